"""Checks of one party's histograms: whether rows of its sketch can have these sums.

They do not detect rows that were made up or changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Ints
from fedapp.histograms.bins import Cuts, spans
from fedapp.trees.categories import CategorySets
from fedapp.trees.losses import LOSSES, REGRESSION, LossParameters, Objective
from fedapp.trees.objective import BOUNDED, is_of_rows, row_bounds
from fedapp.trees.predict import Bits, sides_of
from fedapp.trees.structure import Routes, node_keys, roots_of

LARGEST_DOUBLE = float(np.finfo(np.float64).max)
ROUNDED = 1e-6  # gradients, weights and masses are float32, each rounded by up to 2^-24
# Float64 sums of n rows in another order differ by up to n 2^-53 of the sum of absolute values.
SLACK = 1e-9
WEIGHT = "gradients and hessians that the weight of its rows allows"
TOTAL = "the same total in every column, rows without a value included"
CHILDREN = "children that add up to their parents"


@dataclass(frozen=True, slots=True, eq=False)
class _Nodes:
    """Sums over nodes of a level; of two, the first is of gradients, the second of hessians."""

    keys: Ints  # (n_nodes,)
    bins: Doubles  # (2, n_nodes, n_bins)
    columns: Doubles  # (2, n_nodes, n_columns): of each column's bins
    totals: Doubles  # (2, n_nodes); NaN if unknown
    missing: npt.NDArray[np.int32]  # (n_nodes, n_columns): rows without a value

    def at(self, keys: Ints) -> _Nodes:
        """Some of the nodes."""
        order = np.argsort(self.keys)
        at = order[np.searchsorted(self.keys, keys, sorter=order)]
        sums = self.bins[:, at], self.columns[:, at], self.totals[:, at]
        return _Nodes(keys, *sums, self.missing[at])


class HistogramChecks:
    """Checks a party's histograms, level by level.

    All sums are float64, gradients first and hessians second: of bins (2, n_nodes, n_bins), of
    columns (2, n_nodes, n_columns), of nodes (2, n_nodes).

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
        # A bin goes where its largest value goes; that of a category is its code and a fraction.
        self._tops = np.nextafter(cuts.edges[places], np.float32(-np.inf))
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
        self._most = np.array(most)[:, None, None]  # of a row of weight 1
        # Of a round: its bins, the first of each of its columns and the end, and what rounding adds
        # to sums.
        self._drawn = np.empty(0, dtype=np.bool_)
        self._starts: Ints = np.empty(0, dtype=np.int64)
        self._slack = np.zeros((2, 1, 1))
        nothing = np.empty((2, 0, 0))
        self._nodes = _Nodes(self._starts, nothing, nothing, nothing, np.empty(0, np.int32))

    @np.errstate(over="ignore", invalid="ignore")  # bounds may be infinite, and totals unknown
    def check(self, request: Any, reply: Any, routes: Routes, sets: CategorySets) -> None:
        """Check the reply to a ``GrowRequest``; ValueError if sums break one of the rules."""
        level, sent, missing = request.level, reply.histograms.transpose(2, 0, 1), reply.missing
        wanted = node_keys((request.wanted_trees, request.wanted_nodes))
        if level == 0:
            self._begin(request.columns, reply)
            # All trees of a turn have the same roots, which are sent once an output.
            copies = len(reply.root_sums) // len(wanted)
            wanted = node_keys(roots_of(len(reply.root_sums)))
            sent, missing = np.tile(sent, (1, copies, 1)), np.tile(missing, (copies, 1))
        if level == 0 or self._merges:
            totals = np.full((2, len(wanted)), np.nan) if level else reply.root_sums.T
            bins, n_sides, adds_up = np.ascontiguousarray(sent), 1, True
            nodes = self._with_totals(wanted, bins, totals, missing)
        else:
            # Where leaves are limited, not all children are asked for.
            lefts = node_keys((routes["tree"], routes["left"]))
            firsts = np.append(wanted, -1)[np.searchsorted(wanted, lefts)]
            is_asked = (firsts == lefts) | (firsts == lefts + 1)
            routes, lefts, firsts = routes[is_asked], lefts[is_asked], firsts[is_asked]
            is_left = firsts == lefts
            above = self._nodes.at(node_keys((routes["tree"], routes["node"])))
            # First a child of each that was sent, then its sibling: sent too, or the rest.
            step, n_sides = len(wanted) // len(lefts), 2
            first, missing = sent[:, ::step], reply.missing[::step]
            if step == 1:
                second, others = above.bins - first, above.missing - missing
            else:
                second, others = sent[:, 1::2], reply.missing[1::2]
            # Also of a difference: beside a child that is too large its parent is lost in rounding.
            adds_up = bool((np.abs(above.bins - (first + second)) <= self._slack).all())
            totals = self._first_totals(above, routes, is_left, request.columns, sets)
            nodes = self._with_totals(
                np.concatenate((firsts, lefts + is_left)),
                np.concatenate((first, second), axis=1),
                np.concatenate((totals, above.totals - totals), axis=1),
                np.concatenate((missing, others)),
            )
        absent = self._absent[request.columns]
        if rule := self._broken_rule(nodes, n_sides, adds_up, absent):
            raise ValueError(f"must have {rule}, got others at level {level}")
        self._nodes = nodes

    def _begin(self, columns: Ints, reply: Any) -> None:
        """Begin a round."""
        hessian = reply.root_sums[:, 1].max()
        size = self._weight * self._most[0, 0, 0]
        if self._most[0, 0, 0] == LARGEST_DOUBLE:  # unbounded: use the sum of absolute errors
            size = np.abs(reply.histograms[..., 0]).sum(axis=1).max() + hessian
            size += self._weight + reply.train_sums[2]
        self._slack[:, 0, 0] = SLACK * size, SLACK * hessian
        self._drawn = np.isin(self._columns, columns)
        ends = np.append(columns, len(self._absent))
        self._starts = np.searchsorted(self._columns[self._drawn], ends)

    def _with_totals(
        self, keys: Ints, bins: Doubles, totals: Doubles, missing: npt.NDArray[np.int32]
    ) -> _Nodes:
        """Nodes, an unknown total of which is that of the first column without missing rows."""
        columns = np.zeros((*bins.shape[:2], missing.shape[1]))
        filled = np.flatnonzero(np.diff(self._starts))
        if len(filled):
            columns[..., filled] = np.add.reduceat(bins, self._starts[filled], axis=2)
        unknown = np.isnan(totals).any(axis=0)
        if unknown.any():
            firsts = (missing == 0).argmax(axis=1)
            of_first = np.take_along_axis(columns, firsts[None, :, None], axis=2)[..., 0]
            of_first[:, missing.all(axis=1)] = np.nan
            totals = np.where(unknown, of_first, totals)
        return _Nodes(keys, bins, columns, totals, missing)

    def _first_totals(
        self, above: _Nodes, routes: Routes, is_left: Bits, columns: Ints, sets: CategorySets
    ) -> Doubles:
        """Totals of one child of each split, the left or the right, from its parent's bins."""
        at = np.searchsorted(columns, routes["column"])
        starts, widths, splits = self._starts[at], np.diff(self._starts)[at], np.arange(len(at))
        split_ids, places = spans(widths)
        bins = starts[split_ids] + places
        tops = self._tops[self._drawn][:, None]
        cuts = routes["threshold"], routes["default_left"], bins, widths, routes["set"]
        counts = sides_of(tops, np.zeros_like(at), *cuts, sets) == is_left[split_ids]
        missing = above.totals - above.columns[:, splits, at]
        totals = np.where(routes["default_left"] == is_left, missing, 0.0)
        for part, sums in enumerate(above.bins):
            totals[part] += np.bincount(split_ids, sums[split_ids, bins] * counts, len(at))
        return totals

    def _broken_rule(self, nodes: _Nodes, n_sides: int, adds_up: bool, absent: Doubles) -> str:
        """A rule that nodes break, or none; if they are children, those of one side come first."""
        shape = n_sides, len(nodes.keys) // n_sides, nodes.bins.shape[2]
        most = (self._weights[self._drawn] * self._most + self._slack)[:, 0]
        sizes = np.abs(nodes.bins[0]).reshape(shape), nodes.bins[1].reshape(shape)
        for of_bins, limits in zip(sizes, most, strict=True):
            if (of_bins.sum(axis=0) > limits).any():
                return WEIGHT
        if not adds_up or nodes.bins[1].min(initial=0.0) < -self._slack[1]:
            return CHILDREN
        rests = nodes.totals[..., None] - nodes.columns
        limits = np.where(nodes.missing > 0, absent, 0.0) * self._most + self._slack
        is_wrong = (np.abs(rests) > limits).any() or (rests[1] < -self._slack[1]).any()
        return TOTAL if is_wrong else ""
