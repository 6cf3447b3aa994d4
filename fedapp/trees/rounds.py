"""Boosting round by round: state between rounds, random structures, and checks of histograms.

``Boosting`` has the trees, and splits and leaf values not yet sent. ``draw_trees`` draws structures
whose leaf values only depend on rows, so a tree needs only sums at its leaves and little noise; a
round uses one column, in turn, so the model is a sum of functions of single columns.
``HistogramChecks`` detects sums that no rows of a party's sketch can have, but not rows that were
made up or changed.

Source: Maddock, Cormode, Wang, Maple and Jha 2022 (arXiv:2210.02910): random splits and Newton
leaves; Nori, Caruana, Bu, Shen and Kulkarni 2021 (arXiv:2106.09680): columns in turn. Departures:
cuts are quantiles, no cut leaves a side without values, and leaves are shrunk by the noise of their
hessians.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.histograms.bins import Cuts, Ints
from fedapp.histograms.split import Penalties, node_weight
from fedapp.kernels import frozen, kernel
from fedapp.trees.draws import ALIKE, Weights, draw_columns
from fedapp.trees.grow import FREE, ROUTE, Growth, Limits, Routes, Shape, leaves_under, node_keys
from fedapp.trees.losses import LOSSES, REGRESSION, LossParameters, Objective
from fedapp.trees.model import (
    LEAF,
    NO_TREES,
    Ensemble,
    Grown,
    Tree,
    check_range,
    concatenated,
    stack_trees,
)
from fedapp.trees.objective import BOUNDED, is_of_rows, row_bounds
from fedapp.trees.sets import NO_SETS, CategorySets, Members, goes_left_by_set, kernel_sets

Doubles = npt.NDArray[np.float64]

# Standard deviations of noise that are added to hessians, so that leaves of few rows do not follow
# their noise. On adult, 3 beat 0 and 1 for trees with many leaves, and was as good for others.
SHRINKING = 3.0

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


@dataclass(frozen=True, slots=True, eq=False)
class Sampling:
    """Random draws of a run."""

    seed: int
    colsample: float  # share of the columns each tree may split, in (0, 1]
    weights: Weights = field(default_factory=lambda: ALIKE)  # (n_columns,): of the draws; or empty

    def columns(self, round_id: int, n_trees: int, n_columns: int) -> npt.NDArray[np.bool_]:
        """Columns of each tree, at least one; bool, shape (n_trees, n_columns)."""
        n_drawn = max(1, int(self.colsample * n_columns))
        if n_drawn == n_columns:
            return np.ones((n_trees, n_columns), dtype=bool)
        rng = np.random.default_rng([self.seed, round_id])
        every = np.ones(n_columns, dtype=bool)
        drawn = [draw_columns(every, self.colsample, rng, self.weights) for _ in range(n_trees)]
        return np.array(drawn)


@dataclass(slots=True, eq=False)
class Boosting:
    """Boosting, round by round."""

    bare: Ensemble  # the model without trees
    cuts: Cuts  # layout of the histograms
    shape: Shape  # limits of a tree
    sampling: Sampling
    limits: Limits = FREE  # of single nodes; the round's number is set for each round
    grown: Grown = NO_TREES  # trees of all finished rounds, with their sets
    # routes, route_sets: splits of the last round not yet sent, with their sets
    routes: Routes = field(default_factory=lambda: np.empty(0, dtype=ROUTE))
    route_sets: CategorySets = NO_SETS
    leaves_sent: bool = True  # whether parties have the leaf values of the last round
    # Of the last round's trees: the node that each of the parties' nodes is; none if it is itself.
    places: tuple[Ints, ...] = ()

    @property
    def width(self) -> int:
        """Trees per round."""
        return self.bare.width

    @property
    def n_rounds(self) -> int:
        """Finished rounds."""
        return len(self.grown.trees) // self.width

    @property
    def last_trees(self) -> tuple[Tree, ...]:
        """The trees of the last finished round."""
        return self.grown.trees[-self.width :]

    @property
    def model(self) -> Ensemble:
        """The model so far."""
        return self.bare.with_trees(self.grown)

    def growth(self) -> Growth:
        """The trees of the next round, not yet grown."""
        n_columns = len(self.bare.columns)  # a further one, of times, is split by no tree
        allowed = self.sampling.columns(self.n_rounds, self.width, n_columns)
        allowed = np.pad(allowed, ((0, 0), (0, self.cuts.n_columns - n_columns)))
        limits = replace(self.limits, round_id=self.n_rounds)
        return Growth(self.width, self.cuts, allowed, self.shape, limits)

    def add(self, grown: Grown, places: tuple[Ints, ...] = ()) -> None:
        """Finish a round; its last splits and leaf values are not yet sent."""
        check_range(grown.trees)
        self.places = places
        self.grown = concatenated([self.grown, grown])
        self.leaves_sent = False

    def mark_sent(self) -> None:
        """Mark all splits and leaf values as sent."""
        self.routes = np.empty(0, dtype=ROUTE)
        self.route_sets = NO_SETS
        self.leaves_sent = True

    def unsent_leaves(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Unsent leaf values of the last round, one per node of the parties, and each start."""
        if self.leaves_sent:
            return np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64)
        trees = self.last_trees
        if self.places:
            trees = tuple(tree[at] for tree, at in zip(trees, self.places, strict=True))
        nodes, offsets = stack_trees(trees)
        return np.ascontiguousarray(nodes["value"]), offsets


def n_leaves(trees: Iterable[Tree]) -> int:
    """Number of leaves of some trees."""
    return sum(int((tree["left"] == LEAF).sum()) for tree in trees)


# Trees with random structure


def draw_trees(
    cuts: Cuts, allowed: npt.NDArray[np.bool_], max_depth: int, seed: int, round_id: int
) -> Grown:
    """Structures of a round's trees, each of one column; ``allowed`` is (n_trees, n_columns)."""
    categories = cuts.categories if len(cuts.categories) else np.zeros_like(cuts.widths)
    widths = np.where(categories > 0, categories, cuts.widths)
    trees: list[Tree] = []
    sets: list[Members] = []
    for number, tree_columns in enumerate(allowed):
        columns = np.flatnonzero(tree_columns & (widths > 1))
        if not len(columns):
            trees.append(leaves_under([-1]))
            continue
        # Every column once, in random order, then all again in another order.
        turns, turn = divmod(round_id, len(columns))
        column = int(np.random.default_rng([seed, turns]).permutation(columns)[turn])
        rng = np.random.default_rng([seed, round_id, number])
        trees.append(_draw_tree(cuts, column, np.arange(widths[column]), max_depth, rng, sets))
    return Grown(tuple(trees), CategorySets.of(sets))


def _draw_tree(
    cuts: Cuts,
    column: int,
    bins: npt.NDArray[np.int64],
    max_depth: int,
    rng: np.random.Generator,
    sets: list[Members],
) -> Tree:
    """One tree, level by level; appends the sets of its splits to ``sets``."""
    nodes = [leaves_under([-1])]
    level = [(0, bins)]  # nodes that may be split, and the bins that reach each
    for _ in range(max_depth):
        below = []
        for node, node_bins in level:
            if len(node_bins) < 2:
                continue
            right = _draw_right(node_bins, bool(cuts.by_category[column]), rng)
            split = nodes[node]
            split["left"], split["column"] = len(nodes), column
            split["default_left"] = rng.random() < 0.5
            if cuts.by_category[column]:
                members = np.zeros(cuts.categories[column], dtype=bool)
                members[node_bins[right]] = True
                split["set"] = len(sets)
                sets.append(members)
            else:
                split["threshold"] = cuts.column(column)[node_bins[right][0] - 1]
            for side in (~right, right):
                below.append((len(nodes), node_bins[side]))
                nodes.append(leaves_under([node]))
        level = below
    return np.concatenate(nodes)


def _draw_right(
    bins: npt.NDArray[np.int64], by_category: bool, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Which of at least two bins go right, never none or all; numeric bins: the upper ones."""
    n_right = int(rng.integers(1, len(bins)))
    if not by_category:
        return np.arange(len(bins)) >= len(bins) - n_right
    right = rng.random(len(bins)) < 0.5
    if right.all() or not right.any():
        right[rng.integers(len(bins))] ^= True
    return right


def with_leaf_weights(
    grown: Grown,
    sums: npt.NDArray[np.float64],
    eta: float,
    penalties: Penalties,
    deviation: float,
    most: float,
) -> Grown:
    """The trees with leaf weights (Chen and Guestrin 2016, Eq. 5).

    Parameters
    ----------
    sums : float64, shape (n_leaves, 2): noised gradients and hessians, leaves of all trees in turn.
    deviation : standard deviation of the noise of a sum of hessians.
    most : upper bound of a leaf's absolute weight.
    """
    firmer = replace(
        penalties,
        reg_lambda=penalties.reg_lambda + SHRINKING * deviation,
        min_child_weight=0.0,
        max_delta_step=min(penalties.max_delta_step or most, most),
    )
    trees, first = [], 0
    for structure in grown.trees:
        tree = structure.copy()
        leaves = np.flatnonzero(structure["left"] == LEAF)
        totals = np.zeros((len(tree), 2))
        totals[leaves] = sums[first : first + len(leaves)]
        first += len(leaves)
        totals[leaves, 1] = np.maximum(totals[leaves, 1], penalties.min_child_weight)
        # Children come after their parents: sums of inner nodes, from the leaves up.
        for node in range(len(tree) - 1, 0, -1):
            totals[tree["parent"][node]] += totals[node]
        weights = [node_weight(gradient, hessian, firmer) for gradient, hessian in totals.tolist()]
        tree["hessian"], tree["weight"] = totals[:, 1], weights
        tree["value"][leaves] = tree["weight"][leaves] * np.float32(eta)
        scores = totals[:, 0] ** 2 / (totals[:, 1] + max(firmer.reg_lambda, 1e-12))
        gains = np.zeros(len(tree))
        splits = np.flatnonzero(tree["left"] != LEAF)
        lefts = tree["left"][splits]
        gains[splits] = np.maximum(scores[lefts] + scores[lefts + 1] - scores[splits], 0)
        tree["gain"] = gains
        trees.append(tree)
    return Grown(tuple(trees), grown.sets)


# Checks of one party's histograms


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
