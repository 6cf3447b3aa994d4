"""Check one party's histograms against its sketch, its totals and the parents' histograms.

Detects sums that no rows of the sketch can have, but not rows that were made up or changed.
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
Loss = tuple[Objective, LossParameters]
LARGEST = float(np.finfo(np.float64).max)
ROUNDED = 1e-6  # gradients, weights and masses are float32, each rounded by up to 2^-24
# Float64 sums of n rows in another order differ by up to n 2^-53 of the sum of absolute values.
SLACK = 1e-9
RULES = (
    "",
    "gradients and hessians that the weight of its rows allows",
    "the same total in every column, rows without a value included",
    "children that add up to their parents",
)


@kernel
def _divide(nodes: Any, parents: Any, goes_left: Any, route: Any, sent: Any, rows: Any) -> Any:
    """Sums, missing rows and totals of both children; an unsent one is parent minus sibling."""
    # nodes: sums, missing rows and totals by node; sent: sums and missing rows by row
    # goes_left: bool, (n_splits, n_bins); route: (first bin, end, whether missing goes left)
    # rows: int64, (n_splits, 2): row in ``sent`` of each child, -1 if it was not sent
    n_splits = len(parents)
    sums = np.empty((n_splits, 2, *nodes[0].shape[1:]))
    missing = np.empty((n_splits, 2, nodes[1].shape[1]), dtype=np.int32)
    totals = np.empty((n_splits, 2, 2))
    for split in range(n_splits):
        parent, (first, end, default_left) = parents[split], route[split]
        for part in range(2):
            left, known = 0.0, 0.0
            for place in range(first, end):
                known += nodes[0][parent, place, part]
                if goes_left[split, place]:
                    left += nodes[0][parent, place, part]
            total = nodes[2][parent, part]
            left += default_left * (total - known)
            totals[split, 0, part], totals[split, 1, part] = left, total - left
        for side in range(2):
            row, other = rows[split, side], rows[split, 1 - side]
            for place in range(sums.shape[2]):
                for part in range(2):
                    rest = nodes[0][parent, place, part] - sent[0][other, place, part]
                    sums[split, side, place, part] = sent[0][row, place, part] if row >= 0 else rest
            for column in range(missing.shape[2]):
                few = nodes[1][parent, column] - sent[1][other, column]
                missing[split, side, column] = sent[1][row, column] if row >= 0 else few
    return sums, missing, totals


@kernel
def _broken_rule(above: Any, parents: Any, children: Any, layout: Any) -> int:
    """Index of the rule that some nodes or their children break, or 0."""
    (pairs, missing, totals), (weights, absent, starts, how) = children, layout
    most_g, most_h, slack_g, slack_h = how
    for node in range(len(parents)):
        parent, left, right = above[parents[node]], pairs[node, 0], pairs[node, 1]
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
            # A total of NaN is replaced by that of the first column without missing values.
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
    """Checks a party's histograms, level by level.

    Parameters
    ----------
    cuts, places : layout of all parties' histograms, and the place of each of the party's bins.
    weights : float64, shape (n_bins + 1,): upper bound of each bin's weight, then of all rows.
    merges : whether the party merges bins node by node, so children do not follow from parents.
    loss : the objective and its parameters.
    """

    def __init__(
        self, cuts: Cuts, places: Ints, weights: Doubles, merges: bool, loss: Loss
    ) -> None:
        self._merges, self._weight = merges, float(weights[-1])
        self._weights = weights[:-1] * (1 + ROUNDED)
        self._columns = np.searchsorted(cuts.offsets, places, side="right") - 1
        self._edges = cuts.edges[places]
        column_weights = np.bincount(self._columns, weights[:-1], cuts.n_columns)
        column_weights[cuts.by_category | merges] = 0
        self._absent = np.maximum(self._weight - column_weights, 0) + ROUNDED * self._weight
        self._most = LARGEST, 1.0 if loss[0] == REGRESSION else LARGEST
        if loss[0] in BOUNDED:
            bounds = row_bounds(*loss, clip=0.0)
            self._most = bounds.gradient, bounds.hessian
        self._layout: tuple[Any, ...] = ()  # of a round; below, the sums of its last level
        self._nodes: tuple[Any, ...] = ()
        self._rows: dict[tuple[int, int], int] = {}

    def check(self, request: Any, reply: Any, routes: Routes, sets: CategorySets) -> None:
        """Check the reply to a ``GrowRequest``; ValueError if sums break one of ``RULES``."""
        level, columns, sent = request.level, request.columns, (reply.histograms, reply.missing)
        if level == 0:
            hessian, size = reply.root_sums[:, 1].max(), self._weight * self._most[0]
            if self._most[0] == LARGEST:  # unbounded: use the sum of absolute errors
                size = np.abs(sent[0][..., 0]).sum(axis=1).max() + hessian
                size += self._weight + reply.train_sums[2]
            how = np.array([*self._most, SLACK * size, SLACK * hessian])
            drawn = np.isin(self._columns, columns)
            starts = np.searchsorted(self._columns[drawn], np.append(columns, len(self._absent)))
            # (weight by bin, missing weight by column, first bin of each column, limits)
            layout = self._weights[drawn], self._absent[columns], starts, how
            self._layout = tuple(frozen(*layout))
            self._drawn = self._edges[drawn]
        trees, nodes = request.wanted_trees.tolist(), request.wanted_nodes.tolist()
        wanted = list(zip(trees, nodes, strict=True))
        if level == 0 or self._merges:
            # No parent: the sums are compared with themselves, as if the sibling were empty.
            keys = [key for one in wanted for key in (one, (-1, -1))]
            total = np.full((len(wanted), 2), np.nan) if level else reply.root_sums
            children = tuple(np.stack((each, 0 * each), axis=1) for each in (*sent, total))
            above, parents = sent[0], np.arange(len(wanted))
        else:
            places = routes[["tree", "node", "left"]].tolist()
            keys = [(tree, left + side) for tree, _, left in places for side in (0, 1)]
            parents = np.array([self._rows[tree, node] for tree, node, _ in places])
            rows = {key: row for row, key in enumerate(wanted)}
            pairs = np.array([rows.get(key, -1) for key in keys]).reshape(-1, 2)
            goes_left = self._drawn <= routes["threshold"][:, None]
            starts, first = self._layout[2], np.searchsorted(columns, routes["column"])
            for split in np.flatnonzero(routes["set"] != NO_SET):
                cells = slice(*starts[first[split] : first[split] + 2])
                codes = self._drawn[cells].astype(np.int64) - 1  # a category's edge is its code + 1
                goes_left[split, cells] = ~sets.members(routes["set"][split])[codes]
            route = np.stack((starts[first], starts[first + 1], routes["default_left"]), axis=1)
            above = self._nodes[0]
            children = _divide(self._nodes, parents, goes_left, route, tuple(frozen(*sent)), pairs)
        (above,), children = frozen(above), tuple(frozen(*children))
        if rule := _broken_rule(above, parents, children, self._layout):
            raise ValueError(f"must have {RULES[rule]}, got others at level {level}")
        # An explicit size: -1 cannot be inferred if a party has no bins.
        self._nodes = tuple(each.reshape(2 * len(each), *each.shape[2:]) for each in children)
        self._rows = {key: row for row, key in enumerate(keys)}
