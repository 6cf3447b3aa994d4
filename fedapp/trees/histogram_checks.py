"""Checks of one party's histograms: whether rows of its sketch can have these sums.

They do not detect rows that were made up or changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.histograms.bins import Cuts, Ints
from fedapp.kernels import frozen, kernel
from fedapp.trees.grow import Routes, node_keys
from fedapp.trees.losses import LOSSES, REGRESSION, LossParameters, Objective
from fedapp.trees.objective import BOUNDED, is_of_rows, row_bounds
from fedapp.trees.sets import CategorySets, goes_left_by_set, kernel_sets

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


@kernel
def _divide(nodes: Any, parents: Any, splits: Any, sets: Any, sent: Any, rows: Any) -> Any:
    """Sums, missing rows and totals of both children; an unsent one is parent minus sibling."""
    # nodes: sums, missing rows and totals by node; sent: sums and missing rows by row
    # splits: (first bin, end, threshold, whether missing goes left), and the edge of each bin
    # rows: int64, (2 n_splits,): row in ``sent`` of each child, -1 if it was not sent
    firsts, ends, thresholds, default_lefts, edges = splits
    n_splits = len(parents)
    sums = np.empty((n_splits, 2, *nodes[0].shape[1:]))
    missing = np.empty((n_splits, 2, nodes[1].shape[1]), dtype=np.int32)
    totals = np.empty((n_splits, 2, 2))
    for split in range(n_splits):
        parent = parents[split]
        by_set = len(sets) and sets[0][split] >= 0
        for part in range(2):
            left, expected = 0.0, 0.0
            for edge in range(firsts[split], ends[split]):
                expected += nodes[0][parent, edge, part]
                goes_left = edges[edge] <= thresholds[split]
                if by_set:  # a category's edge is its code + 1
                    goes_left = goes_left_by_set(edges[edge] - 1, False, sets[0][split], sets)
                if goes_left:
                    left += nodes[0][parent, edge, part]
            total = nodes[2][parent, part]
            left += (1.0 if default_lefts[split] else 0.0) * (total - expected)
            totals[split, 0, part], totals[split, 1, part] = left, total - left
        for side in range(2):
            row, other = rows[2 * split + side], rows[2 * split + 1 - side]
            for edge in range(sums.shape[2]):
                for part in range(2):
                    rest = nodes[0][parent, edge, part] - sent[0][other, edge, part]
                    sums[split, side, edge, part] = sent[0][row, edge, part] if row >= 0 else rest
            for column in range(missing.shape[2]):
                few = nodes[1][parent, column] - sent[1][other, column]
                missing[split, side, column] = sent[1][row, column] if row >= 0 else few
    return sums, missing, totals


@kernel
def _checked(
    nodes: Any, parents: Any, splits: Any, sets: Any, sent: Any, rows: Any, layout: Any
) -> Any:
    """The rule that some nodes or their children break, or 0; and the children as nodes."""
    children = _divide(nodes, parents, splits, sets, sent, rows)
    return _broken_rule(nodes[0], parents, children, layout), children


@kernel
def _checked_roots(sent: Any, totals: Any, layout: Any) -> Any:
    """The same for nodes without parents: compared with themselves and an empty sibling."""
    n_nodes = len(totals)
    sums = np.zeros((n_nodes, 2, *sent[0].shape[1:]))
    missing = np.zeros((n_nodes, 2, sent[1].shape[1]), dtype=np.int32)
    both_totals = np.zeros((n_nodes, 2, 2))
    sums[:, 0], missing[:, 0], both_totals[:, 0] = sent[0], sent[1], totals
    children = sums, missing, both_totals
    return _broken_rule(sent[0], np.arange(n_nodes), children, layout), children


@kernel
def _broken_rule(above: Any, parents: Any, children: Any, layout: Any) -> int:
    """Index of the rule that some nodes or their children break, or 0."""
    (pairs, missing, totals), (weights, absent, starts, how) = children, layout
    most_g, most_h, slack_g, slack_h = how
    for node in range(len(parents)):
        parent = above[parents[node]]
        left = pairs[node, 0]
        right = pairs[node, 1]
        for index in range(len(parent)):
            g, h = left[index, 0] + right[index, 0], left[index, 1] + right[index, 1]
            size = abs(left[index, 0]) + abs(right[index, 0])
            if size > most_g * weights[index] + slack_g or h > most_h * weights[index] + slack_h:
                return 1
            if abs(parent[index, 0] - g) > slack_g or abs(parent[index, 1] - h) > slack_h:
                return 3
            if min(left[index, 1], right[index, 1]) < -slack_h:
                return 3
        for side in range(2):
            # A total of NaN is replaced by that of the first column without missing values.
            total_g, total_h = totals[node, side]
            for column in range(len(absent)):
                g, h = 0.0, 0.0
                for index in range(starts[column], starts[column + 1]):
                    g, h = g + pairs[node, side, index, 0], h + pairs[node, side, index, 1]
                most = absent[column] if missing[node, side, column] else 0.0
                if not most and np.isnan(total_g):
                    total_g, total_h = g, h
                if abs(total_g - g) > most_g * most + slack_g:
                    return 2
                if total_h - h < -slack_h or total_h - h > most_h * most + slack_h:
                    return 2
    return 0


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
        self._most = LARGEST_DOUBLE, 1.0 if objective == REGRESSION else LARGEST_DOUBLE
        if not is_of_rows(objective):
            gradient, hessian = LOSSES[objective].powers(0, parameters)
            self._most = 2.0**gradient, 2.0**hessian
        if objective in BOUNDED:
            bounds = row_bounds(objective, parameters, clip=0.0)
            self._most = bounds.gradient, bounds.hessian
        self._layout: tuple[Any, ...] = ()  # of a round
        self._edges_drawn = self._edges
        # of the last level: sums of its nodes, and their keys, ascending
        self._nodes: tuple[Any, ...] = ()
        self._keys = np.empty(0, dtype=np.int64)

    def check(self, request: Any, reply: Any, routes: Routes, sets: CategorySets) -> None:
        """Check the reply to a ``GrowRequest``; ValueError if sums break one of ``RULES``."""
        level = request.level
        sent = frozen(reply.histograms, reply.missing)
        if level == 0:
            self._begin(request.columns, reply)
        wanted = node_keys((request.wanted_trees, request.wanted_nodes))
        if level == 0 or self._merges:
            totals = np.full((len(wanted), 2), np.nan) if level else reply.root_sums
            (totals,) = frozen(totals)
            rule, children = _checked_roots(sent, totals, self._layout)
            keys = np.repeat(wanted, 2)  # each with its empty sibling
        else:
            # Where leaves are limited, not all children are asked for.
            keys = node_keys((routes["tree"], routes["left"]))
            routes = routes[np.isin(keys, wanted) | np.isin(keys + 1, wanted)]
            trees, lefts = routes["tree"], routes["left"]
            keys = np.repeat(node_keys((trees, lefts)), 2)
            keys[1::2] += 1
            rows = np.full(len(keys), -1)
            rows[np.searchsorted(keys, wanted)] = np.arange(len(wanted))
            parents = np.searchsorted(self._keys, node_keys((trees, routes["node"])))
            starts = self._layout[2]
            first = np.searchsorted(request.columns, routes["column"])
            how = routes["threshold"].copy(), routes["default_left"].copy(), self._edges_drawn
            splits = starts[first], starts[first + 1], *how
            by_set = kernel_sets(routes["set"], sets)
            rule, children = _checked(
                self._nodes, parents, splits, by_set, sent, rows, self._layout
            )
        if rule:
            raise ValueError(f"must have {RULES[rule]}, got others at level {level}")
        # An explicit size: -1 cannot be inferred if a party has no bins.
        self._nodes = tuple(child.reshape(2 * len(child), *child.shape[2:]) for child in children)
        self._keys = keys

    def _begin(self, columns: Ints, reply: Any) -> None:
        """Begin a round."""
        hessian = reply.root_sums[:, 1].max()
        size = self._weight * self._most[0]
        if self._most[0] == LARGEST_DOUBLE:  # unbounded: use the sum of absolute errors
            size = np.abs(reply.histograms[..., 0]).sum(axis=1).max() + hessian
            size += self._weight + reply.train_sums[2]
        how = np.array([*self._most, SLACK * size, SLACK * hessian])
        drawn = np.isin(self._columns, columns)
        starts = np.searchsorted(self._columns[drawn], np.append(columns, len(self._absent)))
        # (weight by bin, missing weight by column, first bin of each column, limits)
        self._layout = frozen(self._weights[drawn], self._absent[columns], starts, how)
        self._edges_drawn = self._edges[drawn]
