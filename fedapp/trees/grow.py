"""The trees of one boosting round, grown level by level from summed histograms.

``Growth`` grows them; ``ROUTE`` is a split as every party receives it, and ``route_values`` and
``route_codes`` move rows by splits. ``Limits`` are XGBoost 3.2's: columns drawn per tree, of these
per level, of these per node; monotone and interaction constraints. All limits follow from the tree
so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.histograms.bins import Codes, Cuts
from fedapp.histograms.build import Histogram
from fedapp.histograms.split import (
    NO_BOUNDS,
    CategoryRules,
    Penalties,
    best_splits,
    leaf_weights,
    right_categories,
)
from fedapp.kernels import frozen, kernel
from fedapp.trees.draws import ALIKE, Weights, draw_columns
from fedapp.trees.model import LEAF, NODE, Grown, Tree, ordered_sets
from fedapp.trees.queue import BY_LEVEL, Queue
from fedapp.trees.sets import (
    NO_SET,
    NO_SETS,
    CategorySets,
    goes_left,
    kernel_sets,
    set_numbers,
)

# A split as parties receive it: node (tree, node) is split into left and left + 1.
ROUTE = np.dtype(
    [
        ("tree", np.int32),
        ("node", np.int32),
        ("left", np.int32),
        ("column", np.int32),
        ("threshold", np.float32),
        ("default_left", np.bool_),
        ("set", np.int32),  # of a categorical split: number of the set that goes right
    ]
)

Routes = npt.NDArray[np.void]
Places = npt.NDArray[Any]  # integers: numbers of trees, or of nodes within a tree
NodeList = tuple[Places, Places]  # trees and nodes, each of shape (n_nodes,)
Bools = npt.NDArray[np.bool_]

NO_ROUTES = np.empty(0, dtype=ROUTE)
LEVEL, NODE_DRAW = 2, 3  # streams of draws, so that no two share a seed
WIDEST = np.finfo(np.float32).max


def routes_of(*fields: npt.NDArray[Any]) -> Routes:
    """Splits from the arrays of the fields of ``ROUTE``, in its order."""
    routes = np.empty(len(fields[0]), dtype=ROUTE)
    for name, values in zip(ROUTE.names or (), fields, strict=True):
        routes[name] = values
    return routes


def route_values(
    nodes: npt.NDArray[np.int32],
    routes: Routes,
    values: npt.NDArray[np.float32],
    sets: CategorySets = NO_SETS,
) -> npt.NDArray[np.int32]:
    """Node of each row after the splits, by its values; int32, shape (n_trees, n_rows).

    Parameters
    ----------
    nodes : int32, shape (n_trees, n_rows): node of each row before.
    routes : ``ROUTE``.
    values : float32, shape (n_rows, n_columns).
    """
    return _routed(nodes, routes, routes["threshold"], values, np.float32(np.nan), sets)


def route_codes(
    nodes: npt.NDArray[np.int32],
    routes: Routes,
    first_right: npt.NDArray[np.int64],
    codes: Codes,
    missing_code: int,
    sets: CategorySets = NO_SETS,
) -> npt.NDArray[np.int32]:
    """``route_values`` by bins instead of values: a bin moves as a whole.

    Parameters
    ----------
    first_right : int64, shape (n_routes,): lowest bin of the column that goes right.
    codes : uint8 or uint16, shape (n_rows, n_columns).
    missing_code : the code of a missing value, or -1.
    """
    return _routed(nodes, routes, first_right, codes, missing_code, sets)


def each_once_among(wanted: NodeList, nodes: NodeList) -> bool:
    """Whether all wanted nodes are among others, none of them twice."""
    asked = node_keys(wanted).tolist()
    once = set(asked)  # few nodes: sets are faster than numpy
    return len(once) == len(asked) and once.issubset(node_keys(nodes).tolist())


def children_of(trees: Places, lefts: Places) -> NodeList:
    """Both children of some splits, from their left ones."""
    return np.concatenate((trees, trees)), np.concatenate((lefts, lefts + 1))


def number_children(trees: Places, n_nodes: Places) -> tuple[Places, Places]:
    """Left children of splits, sorted by tree, and how many nodes each tree then has: children get
    the next two numbers of their tree."""
    counts = np.bincount(trees, minlength=len(n_nodes))
    ranks = np.arange(len(trees)) - (np.cumsum(counts) - counts)[trees]
    return n_nodes[trees] + 2 * ranks, n_nodes + 2 * counts


def roots_of(n_trees: int) -> NodeList:
    """The root of every tree."""
    return np.arange(n_trees), np.zeros(n_trees, dtype=np.int64)


def node_keys(nodes: NodeList) -> npt.NDArray[np.int64]:
    """A number for each node, in the order of trees and nodes."""
    return (nodes[0].astype(np.int64) << 32) | nodes[1].astype(np.int64)


def _routed(
    nodes: npt.NDArray[np.int32],
    routes: Routes,
    firsts: npt.NDArray[Any],
    cells: npt.NDArray[Any],
    missing: int | np.float32,
    sets: CategorySets,
) -> npt.NDArray[np.int32]:
    """Rows moved; a cell goes left if it is below its split's entry of ``firsts``."""
    firsts = np.ascontiguousarray(firsts)
    by_set = kernel_sets(routes["set"], sets)
    nodes, routes, firsts, cells = frozen(nodes, routes, firsts, cells)
    moved: npt.NDArray[np.int32] = _moved(nodes, routes, firsts, cells, missing, by_set)
    return moved


@kernel
def _moved(nodes: Any, routes: Any, firsts: Any, cells: Any, missing: Any, sets: Any) -> Any:
    """Nodes of the rows of all trees."""
    moved = nodes.copy()
    widths, starts, bits = sets
    for tree in range(nodes.shape[0]):
        highest = 0
        for row in range(nodes.shape[1]):
            highest = max(highest, nodes[tree, row])
        # Index of each node's route, -1 for nodes that were not split.
        split_at = np.full(highest + 1, -1, dtype=np.int64)
        for split in range(len(routes)):
            if routes[split].tree == tree and routes[split].node <= highest:
                split_at[routes[split].node] = split
        for row in range(nodes.shape[1]):
            split = split_at[nodes[tree, row]]
            if split < 0:
                continue
            route = routes[split]
            cell, side = cells[row, route.column], route.default_left
            is_left = goes_left(cell, missing, firsts[split], side, split, widths, starts, bits)
            moved[tree, row] = route.left + (0 if is_left else 1)
    return moved


@kernel
def first_bins(points: Any, offsets: Any, routes: Any) -> Any:
    """For each route, the lowest bin of its column that goes right; int64, shape (n_routes,).

    ``points`` are values of all bins, those of column f from ``offsets[f]`` to ``offsets[f + 1]``.
    """
    firsts = np.empty(len(routes), dtype=np.int64)
    for split in range(len(routes)):
        column = routes[split].column
        of_column = points[offsets[column] : offsets[column + 1]]
        firsts[split] = np.searchsorted(of_column, routes[split].threshold)
    return firsts


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Which columns may split a node of a round, and the bounds of its leaf weights."""

    # seed, round_id: of the draws
    seed: int = 0
    round_id: int = 0
    # bylevel, bynode: shares of a tree's columns drawn per level, and of these per node, in (0, 1]
    bylevel: float = 1.0
    bynode: float = 1.0
    # (n_columns,): 1 if predictions must not fall as the column grows, -1 if not rise; or empty
    monotone: npt.NDArray[np.int8] = field(default_factory=lambda: np.empty(0, dtype=np.int8))
    interactions: tuple[frozenset[int], ...] = ()  # columns that may share a path; empty: all
    weights: Weights = field(default_factory=lambda: ALIKE)  # (n_columns,): of draws; or empty
    both_children: bool = False  # with bins merged by node, no sibling follows from its parent

    def columns(
        self, level: int, places: Sequence[Sequence[int]], trees: Sequence[Tree], allowed: Bools
    ) -> Bools:
        """Columns that may split each node, (n_nodes, n_columns), from those allowed by tree.

        ``places`` are tree and node of each.
        """
        masks = allowed[[tree for tree, _ in places]]
        if self.bylevel < 1:
            drawn = [
                self._drawn(columns, self.bylevel, LEVEL, tree, level)
                for tree, columns in enumerate(allowed)
            ]
            masks = np.stack([drawn[tree] for tree, _ in places])
        if self.bynode < 1:
            pairs = zip(masks, places, strict=True)
            drawn = [
                self._drawn(columns, self.bynode, NODE_DRAW, tree, node)
                for columns, (tree, node) in pairs
            ]
            masks = np.stack(drawn)
        if self.interactions:
            for mask, (tree, node) in zip(masks, places, strict=True):
                mask &= self._compatible(trees[tree], node, len(mask))
        return masks

    def _drawn(self, allowed: Bools, share: float, *stream: int) -> Bools:
        """Draw a share of some columns, at least one."""
        rng = np.random.default_rng([self.seed, self.round_id, *stream])
        return draw_columns(allowed, share, rng, self.weights)

    def _compatible(self, nodes: Tree, node: int, n_columns: int) -> Bools:
        """Columns that may be on a path with those above a node."""
        used = {int(nodes["column"][above]) for above, _ in _path(nodes, node)}
        if not used:
            return np.ones(n_columns, dtype=bool)
        mask = np.zeros(n_columns, dtype=bool)
        for group in (
            used,
            *(interaction for interaction in self.interactions if used <= interaction),
        ):
            mask[list(group)] = True
        return mask

    def bounds(self, nodes: Tree, node: int) -> tuple[np.float32, np.float32]:
        """Lowest and highest weight of a leaf below a node."""
        low, high = -WIDEST, WIDEST
        if not len(self.monotone):
            return low, high
        for above, below in _path(nodes, node):
            direction = self.monotone[nodes["column"][above]]
            left = nodes["left"][above]
            if not direction:
                continue
            middle = (nodes["weight"][left] + nodes["weight"][left + 1]) / np.float32(2)
            if (below == left) == (direction > 0):
                high = middle
            else:
                low = middle
        return low, high


def _path(nodes: Tree, node: int) -> list[tuple[int, int]]:
    """Pairs (ancestor, next node on the path), from the root to a node."""
    steps = []
    while (above := int(nodes["parent"][node])) >= 0:
        steps.append((above, node))
        node = above
    return steps[::-1]


FREE = Limits()


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
    sums: npt.NDArray[np.float64]  # (n_open, *cell): of their rows; NaN before those of the roots
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
        allowed: npt.NDArray[np.bool_],
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
    def _wanted(self) -> npt.NDArray[np.int64]:
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

    def set_roots(self, sums: npt.NDArray[np.float64]) -> None:
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
        allowed: Bools,
        bounds: npt.NDArray[np.float32],
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
            bounds if len(self.limits.monotone) else NO_BOUNDS,
        )

    def _chosen(self, splits: npt.NDArray[Any]) -> tuple[Places, Bools]:
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

    def _bounds(self) -> npt.NDArray[np.float32]:
        """Lowest and highest leaf weight below each open node."""
        state = self.state
        if not len(self.limits.monotone):
            return np.tile([-WIDEST, WIDEST], (len(state.open_nodes), 1))
        places = state.open_nodes.tolist()
        bounds = [self.limits.bounds(state.trees[tree], node) for tree, node in places]
        return np.array(bounds, dtype=np.float32)

    def grown(self) -> Grown:
        """The trees so far."""
        return ordered_sets([tree for tree, _, _ in self._finished()], self.state.sets)

    def padded(self) -> list[tuple[Tree, npt.NDArray[np.int64]]]:
        """See ``Queue.padded``; without sets."""
        return [self.shape.queue.padded(tree) for tree in self.state.trees]

    def places(self) -> tuple[npt.NDArray[np.int64], ...]:
        """Of each node while the trees grow, its node in ``grown``, or the leaf above it."""
        return tuple(places for _, _, places in self._finished())

    def _finished(self) -> list[tuple[Tree, Places, Places]]:
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
        members = [
            self._right_members(int(columns[row]), int(cut[row]), histograms[row])
            for row in np.flatnonzero(by_category).tolist()
        ]
        trees, nodes = parents.T
        lefts, _ = number_children(trees, np.array([len(tree) for tree in self.state.trees]))
        edges = cuts.edges[cuts.offsets[columns] + np.where(by_category, 0, np.maximum(cut, 0))]
        thresholds = np.where(cut >= 0, edges, cuts.minima[columns])
        thresholds = np.where(by_category, np.float32(0), thresholds)
        sets = set_numbers(by_category)
        routes = routes_of(trees, nodes, lefts, columns, thresholds, splits["default_left"], sets)
        return routes, CategorySets.of(members)

    def _right_members(self, column: int, cut: int, histogram: Histogram) -> npt.NDArray[np.bool_]:
        """Which categories of a column a split sends right."""
        bins = slice(self.cuts.offsets[column], self.cuts.offsets[column + 1])
        used = right_categories(histogram[bins], cut, self.shape.penalties, self.shape.rules)
        right = np.zeros(self.cuts.categories[column], dtype=bool)
        right[: len(used)] = used
        return right

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
        sums: npt.NDArray[np.float64],
        bounds: npt.NDArray[np.float32],
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


def leaves_under(parents: Sequence[int] | Places, node: np.dtype[Any] = NODE) -> Tree:
    """A leaf under each of some nodes; -1: a root."""
    leaves = np.zeros(len(parents), dtype=node)
    leaves["left"], leaves["parent"], leaves["set"] = LEAF, parents, NO_SET
    return leaves
