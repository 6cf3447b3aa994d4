"""What one party's histograms must agree with: its sketch, its totals, and their parents.

This finds sums that no rows of the sketch have, not those of rows that were made up or changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.histograms.bins import Cuts, Ints
from fedapp.kernels import frozen, kernel
from fedapp.trees.boosted.routes import Routes
from fedapp.trees.objective import REGRESSION, LossParameters, Objective
from fedapp.trees.row_bounds import BOUNDED, row_bounds
from fedapp.trees.sets import NO_SET, CategorySets

Doubles = npt.NDArray[np.float64]
LARGEST = float(np.finfo(np.float64).max)
ROUNDED = 1e-6  # gradients, weights and masses are float32, each rounded by up to 2^-24
# Sums of n rows in float64, in another order, differ by up to n 2^-53 of the sum of their sizes.
SLACK = 1e-9
RULES = (
    "",
    "gradients and hessians that the weight of its rows allows",
    "the same total in every column, rows without a value included",
    "children that add up to their parents",
)


@kernel
def _broken_rule(
    above: Any,
    pairs: Any,
    missing: Any,
    totals: Any,
    weights: Any,
    absent: Any,
    starts: Any,
    how: Any,
) -> int:
    """The rule that some nodes or their two children break, or 0.

    Parameters
    ----------
    above, pairs, missing, totals : of the nodes, and of the children of each. A total of NaN is
        that of the first column without missing values.
    how : largest gradient and hessian of a row; slack of both.
    """
    most_g, most_h, slack_g, slack_h = how
    for node in range(len(above)):
        parent, left, right = above[node], pairs[node, 0], pairs[node, 1]
        for place in range(len(parent)):
            g, h = left[place, 0] + right[place, 0], left[place, 1] + right[place, 1]
            size = abs(left[place, 0]) + abs(right[place, 0])
            if size > most_g * weights[place] + slack_g or h > most_h * weights[place] + slack_h:
                return 1
            if abs(parent[place, 0] - g) > slack_g or abs(parent[place, 1] - h) > slack_h:
                return 3
            if min(left[place, 1], right[place, 1]) < -slack_h:
                return 3
        for side in range(2):
            total_g, total_h = totals[node, side]
            for column in range(len(absent)):
                g, h = 0.0, 0.0
                for place in range(starts[column], starts[column + 1]):
                    g, h = g + pairs[node, side, place, 0], h + pairs[node, side, place, 1]
                most = absent[column] if missing[node, side, column] else 0.0
                if not most and np.isnan(total_g):
                    total_g, total_h = g, h
                if abs(total_g - g) > most_g * most + slack_g:
                    return 2
                if total_h - h < -slack_h or total_h - h > most_h * most + slack_h:
                    return 2
    return 0


class Claims:
    """The sums that a party has sent of a level's nodes, compared with those of the next level.

    Parameters
    ----------
    cuts, places : layout of all parties' histograms, and the place of each of the party's bins.
    weights : float64, shape (n_bins + 1,): the most that each bin's rows weigh, then all rows.
    merges : whether the party merges bins node by node, so that they do not follow from a parent.
    """

    def __init__(
        self,
        cuts: Cuts,
        places: Ints,
        weights: Doubles,
        merges: bool,
        objective: Objective,
        parameters: LossParameters,
    ) -> None:
        self._merges, self._weight = merges, float(weights[-1])
        self._weights = weights[:-1] * (1 + ROUNDED)
        self._columns = np.searchsorted(cuts.offsets, places, side="right") - 1
        self._edges = cuts.edges[places]
        known = np.bincount(self._columns, weights[:-1], cuts.n_columns)
        known[cuts.by_category | merges] = 0
        self._absent = np.maximum(self._weight - known, 0) + ROUNDED * self._weight
        self._most = LARGEST, 1.0 if objective == REGRESSION else LARGEST
        if objective in BOUNDED:
            bounds = row_bounds(objective, parameters, 0.0)
            self._most = bounds.gradient, bounds.hessian
        self._layout: tuple[Any, ...] = ()  # of a round, and what came of its last level
        self._nodes: list[Any] = []
        self._rows: dict[tuple[int, int], int] = {}

    def check(self, request: Any, reply: Any, routes: Routes, sets: CategorySets) -> None:
        """Compare a ``GrowReply`` with the sketch, and with the reply for the level above.

        Parameters
        ----------
        request : the ``GrowRequest``.
        routes, sets : its splits, and the sets of those by categories.

        Raises
        ------
        ValueError : a sum breaks one of ``RULES``.
        """
        level, columns, sent = request.level, request.columns, (reply.histograms, reply.missing)
        if level == 0:
            hessian, size = reply.root_sums[:, 1].max(), self._weight * self._most[0]
            if self._most[0] == LARGEST:  # then about the errors of all rows
                size = np.abs(sent[0][..., 0]).sum(axis=1).max() + hessian
                size += self._weight + reply.train_sums[2]
            how = np.array([*self._most, SLACK * size, SLACK * hessian])
            drawn = np.isin(self._columns, columns)
            starts = np.searchsorted(self._columns[drawn], np.append(columns, len(self._absent)))
            self._layout = self._weights[drawn], self._absent[columns], starts, how
            self._drawn = self._edges[drawn]
        wanted = list(
            zip(request.wanted_trees.tolist(), request.wanted_nodes.tolist(), strict=True)
        )
        if level == 0 or self._merges:
            above, keys = sent[0], [key for one in wanted for key in (one, (-1, -1))]
            total = np.full((len(wanted), 2), np.nan) if level else reply.root_sums
            found = [np.stack((each, 0 * each), axis=1) for each in (*sent, total)]
        else:
            keys = [
                (int(one["tree"]), int(one["left"]) + side) for one in routes for side in (0, 1)
            ]
            parents = [self._rows[int(one["tree"]), int(one["node"])] for one in routes]
            above, n_missing, total = (each[parents] for each in self._nodes)
            known = [keys.index(key) for key in wanted]
            rest = np.setdiff1d(np.arange(len(keys)), known)
            found = []
            for whole, each in zip((above, n_missing), sent, strict=True):
                both = np.empty((len(keys), *whole.shape[1:]), dtype=whole.dtype)
                both[known] = each
                both[rest] = whole[rest // 2] - both[rest ^ 1]
                found.append(both.reshape(-1, 2, *whole.shape[1:]))
            left = np.zeros((len(routes), 2))
            for split, (route, own) in enumerate(zip(routes, above, strict=True)):
                place = int(np.searchsorted(columns, route["column"]))
                cells = slice(*self._layout[2][place : place + 2])
                goes_left = self._drawn[cells] <= route["threshold"]
                if route["set"] != NO_SET:  # the edge of a category is its code and 1
                    codes = self._drawn[cells].astype(np.int64) - 1
                    goes_left = ~sets.members(route["set"])[codes]
                left[split] = own[cells][goes_left].sum(axis=0)
                if route["default_left"]:
                    left[split] += total[split] - own[cells].sum(axis=0)
            found.append(np.stack((left, total - left), axis=1))
        if rule := _broken_rule(*frozen(above, *found, *self._layout)):
            raise ValueError(f"must have {RULES[rule]}, got others at level {level}")
        self._nodes = [each.reshape(-1, *each.shape[2:]) for each in found]
        self._rows = {key: row for row, key in enumerate(keys)}
