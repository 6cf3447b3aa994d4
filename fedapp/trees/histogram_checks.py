"""Checks of one party's histograms: whether rows of its sketch can have these sums.

They do not detect rows that were made up or changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.histograms.bins import Cuts, Ints
from fedapp.trees.grow import Routes, node_keys
from fedapp.trees.losses import LOSSES, REGRESSION, LossParameters, Objective
from fedapp.trees.objective import BOUNDED, is_of_rows, row_bounds
from fedapp.trees.sets import NO_SET, CategorySets

Doubles = npt.NDArray[np.float64]

LARGEST_DOUBLE = float(np.finfo(np.float64).max)
ROUNDED = 1e-6  # gradients, weights and masses are float32, each rounded by up to 2^-24
# Float64 sums of n rows in another order differ by up to n 2^-53 of the sum of absolute values.
SLACK = 1e-9
RULES = (
    "",
    "gradients and hessians that the weight of its rows allows",
    "the same total in every column, rows without a value included",
    "children that add up to their parents",
)


class HistogramChecks:
    """Checks a party's histograms, level by level.

    Parameters
    ----------
    cuts, places : layout of all parties' histograms, and the place of each of the party's bins.
    weights : float64, shape (n_bins + 1,): upper bound of each bin's weight, then of all rows.
    merges : whether the party merges bins node by node, so children do not follow from parents.
    objective, parameters : of the loss.
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
        column_weights = np.bincount(self._columns, weights[:-1], cuts.n_columns)
        column_weights[cuts.by_category | merges] = 0
        self._absent = np.maximum(self._weight - column_weights, 0) + ROUNDED * self._weight
        most = LARGEST_DOUBLE, 1.0 if objective == REGRESSION else LARGEST_DOUBLE
        if not is_of_rows(objective):
            gradient, hessian = LOSSES[objective].powers(0, parameters)
            most = 2.0**gradient, 2.0**hessian
        if objective in BOUNDED:
            bounds = row_bounds(objective, parameters, clip=0.0)
            most = bounds.gradient, bounds.hessian
        self._most = np.array(most)  # of a row of weight 1: gradient and hessian
        # Of a round: its bins, and what rounding adds to sums of gradients and hessians.
        self._drawn = np.empty(0, dtype=np.bool_)
        self._slack = np.zeros(2)
        # Of the last level: keys of its nodes, ascending; their sums, missing rows and totals.
        self._keys: Ints = np.empty(0, dtype=np.int64)
        self._sums: Doubles = np.empty(0)
        self._missing: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._totals: Doubles = np.empty(0)

    @np.errstate(over="ignore", invalid="ignore")  # bounds may be infinite, and totals unknown
    def check(self, request: Any, reply: Any, routes: Routes, sets: CategorySets) -> None:
        """Check the reply to a ``GrowRequest``; ValueError if sums break one of ``RULES``."""
        level, columns = request.level, request.columns
        if level == 0:
            self._begin(columns, reply)
        starts = np.searchsorted(self._columns[self._drawn], np.append(columns, len(self._absent)))
        wanted = node_keys((request.wanted_trees, request.wanted_nodes))
        if level == 0 or self._merges:
            keys, above = wanted, reply.histograms
            # Nodes are compared with themselves: one side, which has all rows.
            sums, missing = reply.histograms[:, None], reply.missing[:, None]
            totals = np.full((len(keys), 1, 2), np.nan) if level else reply.root_sums[:, None]
        else:
            # Where leaves are limited, not all children are asked for.
            lefts = node_keys((routes["tree"], routes["left"]))
            is_asked = np.isin(lefts, wanted) | np.isin(lefts + 1, wanted)
            routes, keys = routes[is_asked], (lefts[is_asked, None] + np.arange(2)).ravel()
            parents = np.searchsorted(self._keys, node_keys((routes["tree"], routes["node"])))
            places = np.minimum(np.searchsorted(wanted, keys), len(wanted) - 1).reshape(-1, 2)
            splits, sides = np.nonzero(wanted[places] != keys.reshape(-1, 2))
            above, sums = self._sums[parents], reply.histograms[places]
            missing = reply.missing[places]
            # A child that was not sent is the parent minus its sibling.
            sums[splits, sides] = above[splits] - sums[splits, 1 - sides]
            of_parents = self._missing[parents[splits]]
            missing[splits, sides] = of_parents - missing[splits, 1 - sides]
            bins = starts[np.searchsorted(columns, routes["column"])[:, None] + [0, 1]]
            totals = self._divided(above, self._totals[parents], routes, bins, sets)
        if rule := self._broken_rule(above, sums, missing, totals, columns, starts):
            raise ValueError(f"must have {RULES[rule]}, got others at level {level}")
        n_nodes = len(keys)
        self._keys, self._totals = keys, totals.reshape(n_nodes, 2)
        # Explicit sizes: -1 cannot be inferred if a party has no bins.
        self._sums = sums.reshape(n_nodes, *sums.shape[2:])
        self._missing = missing.reshape(n_nodes, missing.shape[2])

    def _begin(self, columns: Ints, reply: Any) -> None:
        """Begin a round."""
        hessian = reply.root_sums[:, 1].max()
        size = self._weight * self._most[0]
        if self._most[0] == LARGEST_DOUBLE:  # unbounded: use the sum of absolute errors
            size = np.abs(reply.histograms[..., 0]).sum(axis=1).max() + hessian
            size += self._weight + reply.train_sums[2]
        self._slack = SLACK * np.array([size, hessian])
        self._drawn = np.isin(self._columns, columns)

    def _divided(
        self, above: Doubles, totals: Doubles, routes: Routes, bins: Ints, sets: CategorySets
    ) -> Doubles:
        """Totals of both children of some splits, (n_splits, 2, 2), by the sums of their parents.

        ``bins`` has the first and the last but one bin of each split's column.
        """
        lefts, edges = np.empty_like(totals), self._edges[self._drawn]
        for split, (route, (first, end)) in enumerate(zip(routes, bins.tolist(), strict=True)):
            goes_left = edges[first:end] <= route["threshold"]
            if route["set"] != NO_SET:  # a category's edge is its code + 1
                members = sets.members(route["set"])
                codes = edges[first:end].astype(np.int64) - 1
                goes_left = (codes < len(members)) & ~members[np.minimum(codes, len(members) - 1)]
            of_column = above[split, first:end]
            missing = totals[split] - of_column.sum(axis=0)
            lefts[split] = of_column[goes_left].sum(axis=0) + route["default_left"] * missing
        return np.stack((lefts, totals - lefts), axis=1)

    def _broken_rule(
        self,
        above: Doubles,
        sums: Doubles,
        missing: npt.NDArray[np.int32],
        totals: Doubles,
        columns: Ints,
        starts: Ints,
    ) -> int:
        """Index of the first rule that some nodes or their children break, or 0.

        ``above`` has the sums of nodes, (n_nodes, n_bins, 2); the other arrays those of their
        children, (n_nodes, n_children, ...).
        """
        both = sums.sum(axis=1)
        sizes = np.abs(sums).sum(axis=1)
        sizes[..., 1] = both[..., 1]
        is_large = sizes > self._weights[self._drawn][:, None] * self._most + self._slack
        differs = np.abs(above - both) > self._slack
        is_negative = sums[..., 1].min(axis=1) < -self._slack[1]
        by_bin = np.select([is_large.any(axis=2), differs.any(axis=2) | is_negative], [1, 3], 0)
        # By column: the sum of its bins, and the most that rows without a value add.
        ends = np.zeros((*sums.shape[:2], sums.shape[2] + 1, 2))
        np.cumsum(sums, axis=2, out=ends[:, :, 1:])
        of_columns = ends[:, :, starts[1:]] - ends[:, :, starts[:-1]]
        most = np.where(missing > 0, self._absent[columns], 0)[..., None] * self._most
        # An unknown total is that of the first column without missing rows.
        is_whole = missing == 0
        firsts = np.take_along_axis(of_columns, is_whole.argmax(axis=2)[..., None, None], axis=2)
        is_known = ~np.isnan(totals) | ~is_whole.any(axis=2)[..., None]
        totals = np.where(is_known, totals, firsts[:, :, 0])
        rests = totals[:, :, None] - of_columns
        is_wrong = np.abs(rests) > most + self._slack
        is_wrong[..., 1] |= rests[..., 1] < -self._slack[1]
        by_node = 2 * is_wrong.any(axis=(1, 2, 3))[:, None]
        broken = np.concatenate((by_bin, by_node), axis=1).ravel()
        return int(broken[broken > 0][0]) if broken.any() else 0
