"""Boosting round by round: state between rounds, and random structures.

``Boosting`` has the trees, and splits and leaf values not yet sent. ``draw_trees`` draws structures
whose leaf values only depend on rows, so a tree needs only sums at its leaves and little noise; a
round uses one column, in turn, so the model is a sum of functions of single columns.

Source: Maddock, Cormode, Wang, Maple and Jha 2022 (arXiv:2210.02910): random splits and Newton
leaves; Nori, Caruana, Bu, Shen and Kulkarni 2021 (arXiv:2106.09680): columns in turn. Departures:
cuts are quantiles, no cut leaves a side without values, and leaves are shrunk by the noise of their
hessians.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from fedapp.arrays import Doubles, Flags, Floats, Ints
from fedapp.histograms.bins import Cuts
from fedapp.histograms.split import Penalties, leaf_weights
from fedapp.kernels import frozen
from fedapp.trees.categories import NO_SETS, CategorySets, Members
from fedapp.trees.grow import Growth, Shape, leaves_under
from fedapp.trees.limits import FREE, Limits
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
from fedapp.trees.structure import NO_ROUTES, Routes

# Standard deviations of noise that are added to hessians, so that leaves of few rows do not follow
# their noise. On adult, 3 beat 0 and 1 for trees with many leaves, and was as good for others.
SHRINKING = 3.0


@dataclass(slots=True, eq=False)
class Boosting:
    """Boosting, round by round."""

    bare: Ensemble  # the model without trees
    cuts: Cuts  # layout of the histograms
    shape: Shape  # limits of a tree
    colsample: float  # share of the columns each tree may split, in (0, 1]
    limits: Limits = FREE  # of single nodes; the round's number is set for each round
    grown: Grown = NO_TREES  # trees of all finished rounds, with their sets
    # routes, route_sets: splits of the last round not yet sent, with their sets
    routes: Routes = field(default_factory=lambda: NO_ROUTES)
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
        limits = replace(self.limits, round_id=self.n_rounds)
        allowed = limits.of_trees(self.colsample, self.width, n_columns)
        allowed = np.pad(allowed, ((0, 0), (0, self.cuts.n_columns - n_columns)))
        return Growth(self.width, self.cuts, allowed, self.shape, limits)

    def add(self, grown: Grown, places: tuple[Ints, ...] = ()) -> None:
        """Finish a round; its last splits and leaf values are not yet sent."""
        check_range(grown.trees)
        self.places = places
        self.grown = concatenated([self.grown, grown])
        self.leaves_sent = False

    def mark_sent(self) -> None:
        """Mark all splits and leaf values as sent."""
        self.routes = NO_ROUTES
        self.route_sets = NO_SETS
        self.leaves_sent = True

    def unsent_leaves(self) -> tuple[Floats, Ints]:
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


def draw_trees(cuts: Cuts, allowed: Flags, max_depth: int, seed: int, round_id: int) -> Grown:
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
    bins: Ints,
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


def _draw_right(bins: Ints, by_category: bool, rng: np.random.Generator) -> Flags:
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
    sums: Doubles,
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
        free = np.tile(np.array([-np.inf, np.inf], np.float32), (len(tree), 1))
        (totals, free), tree["hessian"] = frozen(totals, free), totals[:, 1]
        tree["weight"] = leaf_weights(totals, firmer.of_leaves, free)
        tree["value"][leaves] = tree["weight"][leaves] * np.float32(eta)
        scores = totals[:, 0] ** 2 / (totals[:, 1] + max(firmer.reg_lambda, 1e-12))
        gains = np.zeros(len(tree))
        splits = np.flatnonzero(tree["left"] != LEAF)
        lefts = tree["left"][splits]
        gains[splits] = np.maximum(scores[lefts] + scores[lefts + 1] - scores[splits], 0)
        tree["gain"] = gains
        trees.append(tree)
    return Grown(tuple(trees), grown.sets)
