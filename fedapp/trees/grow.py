"""The trees of one boosting round, grown level by level from summed histograms.

``Growth`` grows them; ``VectorGrowth`` grows one tree for all outputs, with a vector in each leaf:
XGBoost's ``multi_output_tree``, as in XGBoost 3.2 without constraints and columns of categories.

``Queue`` has the nodes that XGBoost splits, and their order, where a tree's leaves are limited. It
takes one node after the other from a queue until the tree has ``max_leaves``. With ``depthwise`` it
takes the lowest number, with ``lossguide`` the largest gain, and of equal gains the lowest number;
children get the next two numbers.

Parties are asked level by level all the same. Nodes whose children are not evaluated yet can only
be passed by these, never the other way round: what is not among the first ``max_leaves - 1`` of the
evaluated nodes never will be. So each level splits those that are, and asks for their children. In
the end some of these splits have been passed by deeper ones; ``Queue.finished`` drops them::

    gains      a 5 -> b 4, c 3      max_leaves = 3: a and one more
    level 1    b 4 is first, c 3 is out      only b is split
    level 2    children of b: d 9, e 1       d and e are out: a and b make three leaves

Source: src/tree/driver.h of XGBoost 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Flags, Floats, Ints
from fedapp.histograms.bins import Cuts
from fedapp.histograms.build import Histogram
from fedapp.histograms.split import (
    CategoryRules,
    Penalties,
    best_splits,
    best_vector_splits,
    leaf_weights,
    right_categories,
    vector_weights,
)
from fedapp.kernels import frozen
from fedapp.trees.categories import NO_SET, NO_SETS, CategorySets, set_numbers
from fedapp.trees.limits import FREE, GrowPolicy, Limits
from fedapp.trees.model import LEAF, NODE, Grown, Tree, node_of, ordered_sets
from fedapp.trees.structure import Numbers, Routes, number_children, roots_of, routes_of


@dataclass(frozen=True, slots=True)
class Queue:
    """The order of splits, and how many a tree may have; named as in XGBoost."""

    grow_policy: GrowPolicy = "depthwise"
    max_leaves: int = 0  # 0: no limit

    @property
    def is_by_level(self) -> bool:
        """Whether trees are split in the order of their nodes."""
        return self.grow_policy == "depthwise"

    def chosen(self, tree: Tree, nodes: Ints, gains: Floats) -> tuple[Flags, Flags]:
        """Which open nodes of a level are split, and which of them so that children may be too.

        ``nodes`` ascend, and have splits of these ``gains``.
        """
        most = self.max_leaves - 1
        if not self.max_leaves:
            every = np.ones(len(nodes), dtype=bool)
            return every, every
        if self.is_by_level:
            n_left = most - int((tree["left"] != LEAF).sum())
            return np.arange(len(nodes)) < n_left, np.full(len(nodes), len(nodes) < n_left)
        all_gains = tree["gain"].copy()
        all_gains[nodes] = gains
        first = _by_gain(tree["left"], all_gains, most)
        # A child comes after its parent, so not if that is the last.
        return np.isin(nodes, first), np.isin(nodes, first[: most - 1] if most else first)

    def finished(self, tree: Tree) -> tuple[Tree, Ints, Ints]:
        """A grown tree in XGBoost's order, without splits that the queue never reached.

        ``tree`` has the values of its splits as leaves, too.

        Returns
        -------
        tree : the tree.
        nodes : int64, shape (n_nodes,): what number each of its nodes had as it grew.
        places : int64: the node that each node of the tree that grew is now, or is below.
        """
        most = self.max_leaves - 1 if self.max_leaves else len(tree)
        order = np.flatnonzero(tree["left"] != LEAF)
        if not self.is_by_level:
            order = _by_gain(tree["left"], tree["gain"], most)
        lefts = tree["left"][order].astype(np.int64)
        nodes = np.concatenate(([0], np.stack((lefts, lefts + 1), axis=1).ravel()))
        places = np.full(len(tree), -1)
        places[nodes] = np.arange(len(nodes))
        for node in np.flatnonzero(places < 0):  # parents come first
            places[node] = places[tree["parent"][node]]
        ordered = tree[nodes]
        ordered["parent"][1:] = places[ordered["parent"][1:]]
        is_split = np.isin(nodes, order)
        ordered["left"] = np.where(is_split, places[np.maximum(ordered["left"], 0)], LEAF)
        dropped = ~is_split
        for name in ("column", "threshold", "default_left", "gain"):
            ordered[name][dropped] = 0
        ordered["set"][dropped] = NO_SET
        ordered["value"][is_split] = 0
        return ordered, nodes, places

    def padded(self, tree: Tree) -> tuple[Tree, Ints]:
        """As ``finished``, followed by the nodes that it drops, whose splits now gain nothing.

        All parties have these splits in their parts of a divided model, so rows go down them too;
        all leaves below one have the value that it has as a leaf. The second is as of ``finished``.
        """
        ordered, nodes, places = self.finished(tree)
        dropped = np.setdiff1d(np.arange(len(tree)), nodes)  # siblings stay side by side
        numbers = np.concatenate((nodes, dropped))
        now = np.argsort(numbers)
        whole = tree[numbers]
        whole["parent"][1:] = now[whole["parent"][1:]]
        is_leaf = whole["left"] == LEAF
        whole["left"] = np.where(is_leaf, LEAF, now[np.maximum(whole["left"], 0)])
        whole["value"] = ordered["value"][places[numbers]]
        whole["value"][~is_leaf] = 0
        whole["gain"][: len(nodes)] = ordered["gain"]
        whole["gain"][len(nodes) :] = 0
        return whole, numbers


def without_padding(tree: Tree) -> Tree:
    """A tree of ``Queue.padded`` without the nodes that were dropped."""
    is_split = (tree["left"] != LEAF) & (tree["gain"] > 0)
    first_nodes = tree[: 2 * int(is_split.sum()) + 1].copy()
    ends = (first_nodes["left"] != LEAF) & (first_nodes["gain"] == 0)
    for node in np.flatnonzero(ends):
        below = int(tree["left"][node])
        while tree["left"][below] != LEAF:
            below = int(tree["left"][below])
        first_nodes["value"][node] = tree["value"][below]
    for name in ("column", "threshold", "default_left"):
        first_nodes[name][ends] = 0
    first_nodes["left"][ends], first_nodes["set"][ends] = LEAF, NO_SET
    return first_nodes


BY_LEVEL = Queue()


def _by_gain(lefts: npt.NDArray[np.int32], gains: Floats, most: int) -> Ints:
    """The first nodes that a queue by gain takes; nodes without a split have gain 0.

    ``lefts`` is ``LEAF`` where children are not evaluated.
    """
    order: list[int] = []
    queue = [(-float(gains[0]), 0, 0)] if gains[0] > 0 else []  # gain, final number, node
    while queue and len(order) < most:
        _, _, node = heappop(queue)
        if lefts[node] != LEAF:
            for side in (0, 1):
                child = int(lefts[node]) + side
                if gains[child] > 0:
                    heappush(queue, (-float(gains[child]), 2 * len(order) + 1 + side, child))
        order.append(node)
    return np.array(order, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Shape:
    """Limits of tree size, and leaf weights; named as in XGBoost."""

    max_depth: int
    eta: float
    penalties: Penalties
    rules: CategoryRules
    queue: Queue = BY_LEVEL

    @classmethod
    def of(cls, parameters: Mapping[str, Any], n_parallel: int = 1) -> Shape:
        """From a run's settings, as float32; eta is divided among parallel trees."""
        names = [field.name for field in fields(Penalties)]
        penalties = {name: float(np.float32(parameters[name])) for name in names}
        rules = {field.name: parameters[field.name] for field in fields(CategoryRules)}
        return cls(
            parameters["max_depth"],
            float(np.float32(parameters["eta"]) / np.float32(n_parallel)),
            Penalties(**penalties),
            CategoryRules(**rules),
            Queue(parameters["grow_policy"], parameters["max_leaves"]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Growing:
    """A round between two levels: all that a ``Growth`` resumes from."""

    trees: tuple[Tree, ...]  # the value of a split is that of the leaf that it was
    open_nodes: npt.NDArray[np.int32]  # (n_open, 2): tree and node, trees ascending
    sums: Doubles  # (n_open, *cell): of their rows; NaN before those of the roots
    level: int = 0
    sets: CategorySets = NO_SETS  # of all splits, in the order of the splits
    # of the parents of the open nodes, which come in pairs: sums in each bin, missing rows by
    # column; empty at the roots, and where both children are asked for
    histograms: Histogram | None = None
    missing: npt.NDArray[np.int32] | None = None


class Growth:
    """The trees of one boosting round, all grown together.

    ``wanted`` are the nodes whose histograms are needed next: first the roots, then the smaller
    child of each pair, since its sibling is the parent minus it (or both, with
    ``limits.both_children``). ``split`` takes these histograms and returns the splits.

    Parameters
    ----------
    n_trees : trees of the round, one per output.
    cuts : layout of the histograms.
    allowed : bool, shape (n_trees, n_columns): columns each tree may split.
    shape : limits of the trees.
    limits : of the columns and weights of single nodes.
    state : from where a round resumes.
    """

    node: np.dtype[Any] = NODE  # of the trees
    cell: tuple[int, ...] = (2,)  # shape of the sums of a node, or of a bin

    def __init__(
        self,
        n_trees: int,
        cuts: Cuts,
        allowed: Flags,
        shape: Shape,
        limits: Limits = FREE,
        state: Growing | None = None,
    ) -> None:
        self.cuts, self.allowed, self.shape, self.limits = cuts, allowed, shape, limits
        roots = np.stack(roots_of(n_trees), axis=1).astype(np.int32)
        trees = (leaves_under([-1], self.node),) * n_trees
        self.state = state or Growing(trees, roots, np.full((n_trees, 2), np.nan))

    @property
    def level(self) -> int:
        """Level of the open nodes."""
        return self.state.level

    @property
    def wanted(self) -> npt.NDArray[np.int32]:
        """Tree and node of each wanted node: int32, shape (n_wanted, 2), trees ascending."""
        return self.state.open_nodes[self._wanted]

    @property
    def _wanted(self) -> Ints:
        """Indices of the wanted nodes among the open ones."""
        if self.state.histograms is None:
            return np.arange(len(self.state.open_nodes))
        # XGBoost's rule: sum over the child of smaller hessian, the left one if equal.
        hessians = self.state.sums[..., 1].reshape(len(self.state.sums), -1)
        totals = np.add.accumulate(hessians, axis=1)[:, -1]
        lefts, rights = totals[::2], totals[1::2]
        return 2 * np.arange(len(lefts)) + (rights < lefts)

    @property
    def growing(self) -> bool:
        """Whether any node may still be split."""
        return len(self.state.open_nodes) > 0

    def set_roots(self, sums: Doubles) -> None:
        """Set the sums over all rows, float64, shape (n_trees, *cell): gradients and hessians."""
        trees = [leaves_under([-1], self.node) for _ in sums]
        self._weigh(trees, self.state.open_nodes, sums, self._bounds())
        self.state = replace(self.state, trees=tuple(trees), sums=np.asarray(sums, np.float64))

    def split(
        self, histograms: Histogram, missing: npt.NDArray[np.int32]
    ) -> tuple[Routes, CategorySets]:
        """Split the open nodes of this level.

        Parameters
        ----------
        histograms : float64, shape (n_wanted, n_bins, *cell), in the order of ``wanted``.
        missing : int32, shape (n_wanted, n_columns).

        Returns
        -------
        routes : ``ROUTE``, one per split.
        sets : of the categorical splits, in the order of the routes.
        """
        histograms, missing = self._complete(histograms, missing)
        if self.limits.both_children and self.level:
            self._update_sums(histograms, missing)
        state = self.state
        places = state.open_nodes.tolist()
        bounds = self._bounds()
        allowed = self.limits.columns(self.level, places, state.trees, self.allowed)
        splits = self._best(histograms, missing, allowed, bounds)
        chosen, may_grow = self._chosen(splits)
        splits = splits[chosen]
        parents = state.open_nodes[chosen]
        routes, sets = self._routes(parents, splits, histograms[chosen])
        children = np.repeat(parents, 2, axis=0)
        children[:, 1] = (routes["left"][:, None] + [0, 1]).ravel()
        sums = np.stack((splits["left"], splits["right"]), axis=1).reshape(-1, *self.cell)
        trees = [
            self._divided(nodes, routes[parents[:, 0] == tree], splits[parents[:, 0] == tree])
            for tree, nodes in enumerate(state.trees)
        ]
        # As in XGBoost, within the bounds of the parent.
        self._weigh(trees, children, sums, np.repeat(bounds[chosen], 2, axis=0))
        is_open = np.repeat(may_grow, 2)
        asks_both = self.limits.both_children or not may_grow.any()
        self.state = Growing(
            tuple(trees),
            children[is_open],
            sums[is_open],
            state.level + 1,
            state.sets.plus(sets) if len(sets) else state.sets,
            None if asks_both else histograms[chosen[may_grow]],
            None if asks_both else missing[chosen[may_grow]],
        )
        return routes, sets

    def _best(
        self,
        histograms: Histogram,
        missing: npt.NDArray[np.int32],
        allowed: Flags,
        bounds: Floats,
    ) -> npt.NDArray[Any]:
        """The best split of each open node."""
        return best_splits(
            histograms,
            self.state.sums,
            missing,
            allowed,
            self.cuts,
            self.shape.penalties,
            self.shape.rules,
            self.limits.monotone,
            bounds,
        )

    def _chosen(self, splits: npt.NDArray[Any]) -> tuple[Numbers, Flags]:
        """Indices of the open nodes that are split, and whose children may be."""
        chosen, may_grow, shape = [], [], self.shape
        is_last = 0 < shape.max_depth <= self.level + 1
        gaining = np.flatnonzero(splits["column"] >= 0)
        for number, tree in enumerate(self.state.trees):
            rows = gaining[self.state.open_nodes[gaining, 0] == number]
            nodes = self.state.open_nodes[rows, 1].astype(np.int64)
            of_tree, may = shape.queue.chosen(tree, nodes, splits["gain"][rows])
            chosen.append(rows[of_tree])
            may_grow.append(may[of_tree] & (not is_last))
        return np.concatenate(chosen), np.concatenate(may_grow)

    def _bounds(self) -> Floats:
        """Lowest and highest leaf weight below each open node."""
        state = self.state
        places = state.open_nodes.tolist()
        bounds = [self.limits.bounds(state.trees[tree], node) for tree, node in places]
        return np.array(bounds, dtype=np.float32).reshape(-1, 2)

    def grown(self) -> Grown:
        """The trees so far."""
        return ordered_sets([tree for tree, _, _ in self._finished()], self.state.sets)

    def padded(self) -> list[tuple[Tree, Ints]]:
        """See ``Queue.padded``; without sets."""
        return [self.shape.queue.padded(tree) for tree in self.state.trees]

    def places(self) -> tuple[Ints, ...]:
        """Of each node while the trees grow, its node in ``grown``, or the leaf above it."""
        return tuple(places for _, _, places in self._finished())

    def _finished(self) -> list[tuple[Tree, Numbers, Numbers]]:
        return [self.shape.queue.finished(tree) for tree in self.state.trees]

    def _complete(
        self, histograms: Histogram, missing: npt.NDArray[np.int32]
    ) -> tuple[Histogram, npt.NDArray[np.int32]]:
        """Sums of all open nodes: those that came, and parents minus those."""
        of_parents, missing_of_parents = self.state.histograms, self.state.missing
        if of_parents is None or missing_of_parents is None:
            return histograms, missing
        sent = self._wanted
        every = np.empty((2 * len(sent), *histograms.shape[1:]))
        every[sent], every[sent ^ 1] = histograms, of_parents - histograms
        every_missing = np.empty((2 * len(sent), missing.shape[1]), dtype=np.int32)
        every_missing[sent], every_missing[sent ^ 1] = missing, missing_of_parents - missing
        return every, every_missing

    def _update_sums(self, histograms: Histogram, missing: npt.NDArray[np.int32]) -> None:
        """Use the open nodes' reported sums, not their parents': merged bins may differ."""
        state = self.state
        sums = state.sums.copy()
        trees = [nodes.copy() for nodes in state.trees]
        for row, (tree, node) in enumerate(state.open_nodes.tolist()):
            is_complete = self.allowed[tree] & (missing[row] == 0) & (self.cuts.widths > 0)
            if is_complete.any():
                # Any column without missing rows adds up to the node's total.
                column = int(np.argmax(is_complete))
                bins = slice(self.cuts.offsets[column], self.cuts.offsets[column + 1])
                total = histograms[row, bins].sum(axis=0)
                if total[1] > 0:
                    sums[row], this = total, slice(row, row + 1)
                    bounds = np.array([self.limits.bounds(trees[tree], node)])
                    self._weigh(trees, state.open_nodes[this], sums[this], bounds)
        self.state = replace(state, sums=sums, trees=tuple(trees))

    def _routes(
        self, parents: npt.NDArray[np.int32], splits: npt.NDArray[Any], histograms: Histogram
    ) -> tuple[Routes, CategorySets]:
        """Splits as parties receive them; children are numbered tree by tree, level by level."""
        columns = splits["column"]
        cut = splits["cut"]
        cuts = self.cuts
        by_category = cuts.by_category[columns]
        members = list[Flags]()
        for row in np.flatnonzero(by_category).tolist():
            start, end = cuts.offsets[columns[row] : columns[row] + 2]
            of_column, rules = histograms[row, start:end], self.shape.rules
            used = right_categories(of_column, int(cut[row]), self.shape.penalties, rules)
            members.append(np.zeros(cuts.categories[columns[row]], dtype=bool))
            members[-1][: len(used)] = used
        trees, nodes = parents.T
        lefts, _ = number_children(trees, np.array([len(tree) for tree in self.state.trees]))
        edges = cuts.edges[cuts.offsets[columns] + np.where(by_category, 0, np.maximum(cut, 0))]
        thresholds = np.where(cut >= 0, edges, cuts.minima[columns])
        thresholds = np.where(by_category, np.float32(0), thresholds)
        sets = set_numbers(by_category)
        routes = routes_of(trees, nodes, lefts, columns, thresholds, splits["default_left"], sets)
        return routes, CategorySets.of(members)

    def _divided(self, nodes: Tree, routes: Routes, splits: npt.NDArray[Any]) -> Tree:
        """A tree with the splits of a level, whose children are not weighed yet."""
        parents = routes["node"]
        divided = np.concatenate((nodes, leaves_under(np.repeat(parents, 2), self.node)))
        for name in ("left", "column", "threshold", "default_left"):
            divided[name][parents] = routes[name]
        has_set = routes["set"] != NO_SET
        divided["set"][parents[has_set]] = len(self.state.sets) + routes["set"][has_set]
        divided["gain"][parents] = splits["gain"]
        return divided

    def _weigh(
        self,
        trees: Sequence[Tree],
        places: npt.NDArray[np.int32],
        sums: Doubles,
        bounds: Floats,
    ) -> None:
        """Set the weights of nodes, within bounds, and their values as leaves."""
        sums, bounds = frozen(sums, bounds)
        weights = leaf_weights(sums, self.shape.penalties.of_leaves, bounds)
        with np.errstate(over="ignore"):  # ``check_range`` refuses infinite weights
            values = weights * np.float32(self.shape.eta)
            hessians = sums[:, 1].astype(np.float32)
        for tree, nodes in enumerate(trees):
            rows = places[:, 0] == tree
            at = places[rows, 1]
            nodes["hessian"][at], nodes["weight"][at] = hessians[rows], weights[rows]
            nodes["value"][at] = values[rows]


def leaves_under(parents: Sequence[int] | Numbers, node: np.dtype[Any] = NODE) -> Tree:
    """A leaf under each of some nodes; -1: a root."""
    leaves = np.zeros(len(parents), dtype=node)
    leaves["left"], leaves["parent"], leaves["set"] = LEAF, parents, NO_SET
    return leaves


class VectorGrowth(Growth):
    """``Growth`` of a single tree whose sums are of ``n_outputs`` gradients and hessians."""

    def __init__(
        self,
        n_outputs: int,
        cuts: Cuts,
        allowed: Flags,
        shape: Shape,
        limits: Limits = FREE,
        state: Growing | None = None,
    ) -> None:
        self.node = node_of(n_outputs)
        self.cell = (n_outputs, 2)
        super().__init__(1, cuts, allowed, shape, limits, state)

    def _best(
        self,
        histograms: Histogram,
        missing: npt.NDArray[np.int32],
        allowed: Flags,
        bounds: Floats,
    ) -> npt.NDArray[Any]:
        """The best split of each open node; ``bounds`` are none."""
        sums, penalties = self.state.sums, self.shape.penalties
        return best_vector_splits(histograms, sums, missing, allowed, self.cuts, penalties)

    def _weigh(
        self,
        trees: Sequence[Tree],
        places: npt.NDArray[np.int32],
        sums: Doubles,
        bounds: Floats,
    ) -> None:
        """Set the weights of nodes, and their values as leaves."""
        (tree,) = trees
        nodes = places[:, 1]
        shape = self.shape
        weights, values = vector_weights(*(*frozen(sums), shape.penalties.of_leaves, shape.eta))
        tree["weight"][nodes] = weights
        tree["value"][nodes] = values
        # As XGBoost rounds: a root's value after its weight, and a sum after each output.
        roots = nodes == 0
        tree["value"][nodes[roots]] = weights[roots] * np.float32(shape.eta)
        hessians = np.zeros(len(nodes), dtype=np.float32)
        for of_output in sums[..., 1].T:
            of_output = np.where(roots, of_output.astype(np.float32), of_output)
            hessians = (hessians + of_output).astype(np.float32)
        tree["hessian"][nodes] = hessians

    def grown(self) -> Grown:
        """The tree so far."""
        grown = super().grown()
        return grown._replace(trees=tuple(map(_with_sums, grown.trees)))

    def padded(self) -> list[tuple[Tree, Ints]]:
        """See ``Queue.padded``."""
        return [(_with_sums(tree), numbers) for tree, numbers in super().padded()]


def _with_sums(tree: Tree) -> Tree:
    """The tree with sums of the children's float32 hessians at splits, as in XGBoost."""
    splits = np.flatnonzero((tree["left"] != LEAF) & (tree["gain"] > 0))
    lefts = tree["left"][splits]
    whole = tree.copy()
    whole["hessian"][splits] = tree["hessian"][lefts] + tree["hessian"][lefts + 1]
    return whole
