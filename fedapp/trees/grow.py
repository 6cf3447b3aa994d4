"""The trees of one boosting round, grown level by level from summed histograms.

``Growth`` grows them; ``ROUTE`` is a split as every party receives it, and ``route_values`` and
``route_codes`` move rows by splits. ``Limits`` are XGBoost 3.2's: columns drawn per tree, of these
per level, of these per node; monotone and interaction constraints. All limits follow from the tree
so far. ``mean_purity`` measures how well a party could infer labels from rows that share a node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
    node_weight,
    right_categories,
)
from fedapp.kernels import kernel
from fedapp.trees.model import LEAF, NODE, Grown, Tree, ordered_sets, split_trees, stack_trees
from fedapp.trees.predict import Nodes
from fedapp.trees.sets import NO_SET, NO_SETS, CategorySets, goes_left_by_set, kernel_sets

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
NodeId = tuple[int, int]  # tree, node
# Per node: sums in each bin, and missing rows by column.
Summed = tuple[Histogram, npt.NDArray[np.int32]]

LEVEL, NODE_DRAW = 2, 3  # streams of draws, so that no two share a seed
WIDEST = np.finfo(np.float32).max


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
    asked = _keys(wanted).tolist()
    once = set(asked)  # few nodes: sets are faster than numpy
    return len(once) == len(asked) and once.issubset(_keys(nodes).tolist())


def children_of(trees: Places, lefts: Places) -> NodeList:
    """Both children of some splits, from their left ones."""
    return np.concatenate((trees, trees)), np.concatenate((lefts, lefts + 1))


def roots_of(n_trees: int) -> NodeList:
    """The root of every tree."""
    return np.arange(n_trees), np.zeros(n_trees, dtype=np.int64)


def _keys(nodes: NodeList) -> npt.NDArray[np.int64]:
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
    moved = nodes.copy()
    lefts, columns, default_lefts = (
        np.ascontiguousarray(routes[name]) for name in ("left", "column", "default_left")
    )
    by_set, firsts = kernel_sets(routes["set"], sets), np.ascontiguousarray(firsts)
    for tree in range(len(nodes)):
        # Index of each node's route, -1 for nodes that were not split.
        n_nodes = int(nodes[tree].max(initial=0)) + 1
        split_at = np.full(n_nodes, -1, dtype=np.int64)
        ids = np.flatnonzero((routes["tree"] == tree) & (routes["node"] < n_nodes))
        split_at[routes["node"][ids]] = ids
        _move(moved[tree], split_at, lefts, columns, default_lefts, firsts, cells, missing, by_set)
    return moved


@kernel
def _move(
    nodes: Any,
    split_at: Any,
    lefts: Any,
    columns: Any,
    default_lefts: Any,
    firsts: Any,
    cells: Any,
    missing: Any,
    sets: Any,
) -> None:
    """Change the nodes of one tree in place. NaN, which is not a code, differs from itself."""
    for row in range(nodes.shape[0]):
        split = split_at[nodes[row]]
        if split < 0:
            continue
        cell = cells[row, columns[split]]
        if cell == missing or cell != cell:
            goes_left = default_lefts[split]
        elif len(sets) and sets[0][split] >= 0:
            goes_left = goes_left_by_set(cell, default_lefts[split], sets[0][split], sets)
        else:
            goes_left = cell < firsts[split]
        nodes[row] = lefts[split] + (0 if goes_left else 1)


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
    both_children: bool = False  # with bins merged by node, no sibling follows from its parent

    def columns(
        self, level: int, places: Sequence[NodeId], trees: Sequence[Tree], allowed: Bools
    ) -> Bools:
        """Columns that may split each node, (n_nodes, n_columns), from those allowed by tree."""
        masks = allowed[[tree for tree, _ in places]]
        if self.bylevel < 1:
            drawn = [
                self._drawn(columns, self.bylevel, LEVEL, tree, level)
                for tree, columns in enumerate(allowed)
            ]
            masks = np.stack([drawn[tree] for tree, _ in places])
        if self.bynode < 1:
            pairs = zip(masks, places, strict=True)
            masks = np.stack(
                [self._drawn(columns, self.bynode, NODE_DRAW, *place) for columns, place in pairs]
            )
        if self.interactions:
            for mask, (tree, node) in zip(masks, places, strict=True):
                mask &= self._compatible(trees[tree], node, len(mask))
        return masks

    def _drawn(self, allowed: Bools, share: float, *stream: int) -> Bools:
        """Draw a share of some columns, at least one."""
        columns, drawn = np.flatnonzero(allowed), np.zeros_like(allowed)
        if len(columns):
            rng = np.random.default_rng([self.seed, self.round_id, *stream])
            n_drawn = max(1, int(share * len(columns)))
            drawn[rng.choice(columns, n_drawn, replace=False)] = True
        return drawn

    def _compatible(self, nodes: Tree, node: int, n_columns: int) -> Bools:
        """Columns that may be on a path with those above a node."""
        used = {int(nodes["column"][above]) for above, _ in _path(nodes, node)}
        if not used:
            return np.ones(n_columns, dtype=bool)
        mask = np.zeros(n_columns, dtype=bool)
        for group in (used, *(each for each in self.interactions if used <= each)):
            mask[list(group)] = True
        return mask

    def bounds(self, nodes: Tree, node: int) -> tuple[np.float32, np.float32]:
        """Lowest and highest weight of a leaf below a node."""
        low, high = -WIDEST, WIDEST
        if not len(self.monotone):
            return low, high
        for above, below in _path(nodes, node):
            direction, left = self.monotone[nodes["column"][above]], nodes["left"][above]
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

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Shape:
        """From a run's settings; XGBoost keeps penalties in float32."""
        names = [field.name for field in fields(Penalties)]
        penalties = {name: float(np.float32(parameters[name])) for name in names}
        rules = {field.name: parameters[field.name] for field in fields(CategoryRules)}
        return cls(
            parameters["max_depth"],
            parameters["eta"],
            Penalties(**penalties),
            CategoryRules(**rules),
        )


class Growth:
    """The trees of one boosting round, all grown together.

    ``wanted`` lists the nodes whose histograms are needed next: first the roots, then the smaller
    child of each pair, since its sibling is the parent minus it (or both, with
    ``limits.both_children``). ``split`` takes these histograms and returns the splits.

    Parameters
    ----------
    n_trees : trees of the round, one per output.
    cuts : layout of the histograms.
    allowed : bool, shape (n_trees, n_columns): columns each tree may split.
    shape : limits of the trees.
    limits : of the columns and weights of single nodes.
    """

    def __init__(
        self,
        n_trees: int,
        cuts: Cuts,
        allowed: npt.NDArray[np.bool_],
        shape: Shape,
        limits: Limits = FREE,
    ) -> None:
        self.cuts, self.allowed, self.shape, self.limits = cuts, allowed, shape, limits
        self.level = 0
        self.wanted: list[NodeId] = [(tree, 0) for tree in range(n_trees)]
        self._open = list(self.wanted)
        self._nodes = [_leaves(1, parent=-1) for _ in range(n_trees)]
        self._sets = NO_SETS  # of all splits, in the order of the splits
        self._sums: dict[NodeId, npt.NDArray[np.float64]] = {}
        self._parents: dict[NodeId, Summed] = {}

    @property
    def wanted_pairs(self) -> npt.NDArray[np.int32]:
        """Tree and node of each wanted node: int32, shape (n_wanted, 2), trees ascending."""
        return np.array(self.wanted, dtype=np.int32).reshape(-1, 2)

    @property
    def growing(self) -> bool:
        """Whether any node may still be split."""
        return bool(self._open)

    def set_roots(self, sums: npt.NDArray[np.float64]) -> None:
        """Set the sums over all rows, float64, shape (n_trees, 2): gradients and hessians."""
        for tree, total in enumerate(sums):
            self._sums[tree, 0] = total
            self._weigh((tree, 0), (-WIDEST, WIDEST))

    def split(
        self, histograms: Histogram, missing: npt.NDArray[np.int32]
    ) -> tuple[Routes, CategorySets]:
        """Split the open nodes of this level.

        Parameters
        ----------
        histograms : float64, shape (n_wanted, n_bins, 2), in the order of ``wanted``.
        missing : int32, shape (n_wanted, n_columns).

        Returns
        -------
        routes : ``ROUTE``, one per split.
        sets : of the categorical splits, in the order of the routes.
        """
        node_sums = self._complete(histograms, missing)
        if self.limits.both_children and self.level:
            self._update_sums(node_sums)
        open_histograms = np.stack([node_sums[node][0] for node in self._open])
        splits = best_splits(
            open_histograms,
            np.stack([self._sums[node] for node in self._open]),
            np.stack([node_sums[node][1] for node in self._open]),
            self.limits.columns(self.level, self._open, self._nodes, self.allowed),
            self.cuts,
            self.shape.penalties,
            self.shape.rules,
            self.limits.monotone,
            self._bounds(),
        )
        node_splits = [(n, s) for n, s in zip(self._open, splits, strict=True) if s["column"] >= 0]
        members = [self._right_members(split, node_sums[node][0]) for node, split in node_splits]
        sets = CategorySets.of([right for right in members if right is not None])
        routes, n_sets = [], 0
        for (node, split), right in zip(node_splits, members, strict=True):
            routes.append(self._apply(node, split, NO_SET if right is None else n_sets))
            n_sets += right is not None
        self._sets = self._sets.plus(sets)
        self.level += 1
        self._advance([node for node, _ in node_splits], node_sums)
        return np.array(routes, dtype=ROUTE), sets

    def _bounds(self) -> npt.NDArray[np.float32]:
        """Lowest and highest leaf weight below each open node; empty without constraints."""
        if not len(self.limits.monotone):
            return NO_BOUNDS
        bounds = [self.limits.bounds(self._nodes[tree], node) for tree, node in self._open]
        return np.array(bounds, dtype=np.float32)

    def grown(self) -> Grown:
        """The trees so far."""
        return ordered_sets([nodes.copy() for nodes in self._nodes], self._sets)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All that ``restored`` needs to resume from here."""
        nodes, offsets = stack_trees(self._nodes)
        parents = list(self._parents)
        histograms = [self._parents[parent][0] for parent in parents]
        missing = [self._parents[parent][1] for parent in parents]
        n_bins, n_columns = len(self.cuts.edges), self.cuts.n_columns
        return {
            "level": np.array(self.level),
            "wanted": self.wanted_pairs,
            "open": np.array(self._open, dtype=np.int32).reshape(-1, 2),
            "nodes": nodes,
            "tree_offsets": offsets,
            "sets": self._sets.bits,
            "set_widths": self._sets.widths,
            "summed": np.array(list(self._sums), dtype=np.int32).reshape(-1, 2),
            "sums": np.array(list(self._sums.values())).reshape(-1, 2),
            "parents": np.array(parents, dtype=np.int32).reshape(-1, 2),
            "parent_histograms": np.array(histograms).reshape(-1, n_bins, 2),
            "parent_missing": np.array(missing, dtype=np.int32).reshape(-1, n_columns),
        }

    @classmethod
    def restored(
        cls,
        read: Callable[[str], npt.NDArray[Any]],
        cuts: Cuts,
        allowed: npt.NDArray[np.bool_],
        shape: Shape,
        limits: Limits = FREE,
    ) -> Growth:
        """Undo ``arrays``, read by name; the other arguments as in the constructor."""
        growth = cls(0, cuts, allowed, shape, limits)
        growth.level = int(read("level"))
        growth.wanted, growth._open = _pairs(read("wanted")), _pairs(read("open"))
        trees = split_trees(read("nodes"), read("tree_offsets"))
        growth._nodes = [tree.copy() for tree in trees]
        growth._sets = CategorySets(read("sets"), read("set_widths"))
        growth._sums = dict(zip(_pairs(read("summed")), read("sums"), strict=True))
        kinds = ("histograms", "missing")
        sums = zip(*(read(f"parent_{kind}") for kind in kinds), strict=True)
        growth._parents = dict(zip(_pairs(read("parents")), sums, strict=True))
        return growth

    def _complete(
        self, histograms: Histogram, missing: npt.NDArray[np.int32]
    ) -> dict[NodeId, Summed]:
        """Histograms of all open nodes: those that came, and parents minus those."""
        node_sums: dict[NodeId, Summed] = dict(
            zip(self.wanted, zip(histograms, missing, strict=True), strict=True)
        )
        for parent, (total, total_missing) in self._parents.items():
            left, right = self._children(parent)
            if left in node_sums and right in node_sums:
                continue
            sent, other = (left, right) if left in node_sums else (right, left)
            sent_sums, sent_missing = node_sums[sent]
            node_sums[other] = total - sent_sums, total_missing - sent_missing
        return node_sums

    def _update_sums(self, node_sums: Mapping[NodeId, Summed]) -> None:
        """Use the open nodes' reported sums, not their parents': merged bins may differ."""
        for place, (histogram, missing) in node_sums.items():
            tree, node = place
            is_complete = self.allowed[tree] & (missing == 0) & (self.cuts.widths > 0)
            if is_complete.any():
                # Any column without missing rows adds up to the node's total.
                column = int(np.argmax(is_complete))
                bins = slice(self.cuts.offsets[column], self.cuts.offsets[column + 1])
                total = histogram[bins].sum(axis=0)
                if total[1] > 0:
                    self._sums[place] = total
                    self._weigh(place, self.limits.bounds(self._nodes[tree], node))

    def _advance(self, parents: Sequence[NodeId], node_sums: dict[NodeId, Summed]) -> None:
        """Open the children of the nodes just split, if the trees may grow deeper."""
        if self.level == self.shape.max_depth:
            parents = ()
        self._parents = {parent: node_sums[parent] for parent in parents}
        self._open, self.wanted = [], []
        for parent in parents:
            left, right = self._children(parent)
            self._open += [left, right]
            if self.limits.both_children:
                self.wanted += [left, right]
                continue
            # XGBoost's rule: sum over the child of smaller hessian, the left one if equal.
            fewer_right = self._sums[right][1] < self._sums[left][1]
            self.wanted.append(right if fewer_right else left)

    def _children(self, parent: NodeId) -> tuple[NodeId, NodeId]:
        """Both children of a node that was split."""
        tree, node = parent
        left = int(self._nodes[tree]["left"][node])
        return (tree, left), (tree, left + 1)

    def _right_members(self, split: np.void, histogram: Histogram) -> npt.NDArray[np.bool_] | None:
        """Which categories a split sends right; None for a threshold."""
        column = int(split["column"])
        if not self.cuts.by_category[column]:
            return None
        bins = slice(self.cuts.offsets[column], self.cuts.offsets[column + 1])
        used = right_categories(
            histogram[bins], int(split["cut"]), self.shape.penalties, self.shape.rules
        )
        right = np.zeros(self.cuts.categories[column], dtype=bool)
        right[: len(used)] = used
        return right

    def _apply(self, parent: NodeId, split: np.void, number: int) -> tuple[Any, ...]:
        """Split one node: write its children and return its route; ``number`` is its set's."""
        tree, node = parent
        nodes = self._nodes[tree]
        left, column = len(nodes), int(split["column"])
        edges, cut = self.cuts.column(column), split["cut"]
        threshold = edges[cut] if cut >= 0 else self.cuts.minima[column]
        if number != NO_SET:
            threshold = np.float32(0)
            nodes[node]["set"] = len(self._sets) + number
        nodes[node]["left"], nodes[node]["column"] = left, column
        nodes[node]["threshold"], nodes[node]["default_left"] = threshold, split["default_left"]
        nodes[node]["gain"], nodes[node]["value"] = split["gain"], 0
        self._nodes[tree] = np.concatenate((nodes, _leaves(2, parent=node)))
        self._sums[tree, left], self._sums[tree, left + 1] = split["left"], split["right"]
        # As in XGBoost, within the bounds of the parent.
        bounds = self.limits.bounds(self._nodes[tree], node)
        self._weigh((tree, left), bounds)
        self._weigh((tree, left + 1), bounds)
        return tree, node, left, column, threshold, bool(split["default_left"]), number

    def _weigh(self, place: NodeId, bounds: tuple[np.float32, np.float32]) -> None:
        """Set the weight of a node, within bounds, and its value as a leaf."""
        tree, node = place
        gradient, hessian = self._sums[place]
        with np.errstate(over="ignore"):  # ``check_range`` refuses infinite weights
            weight = node_weight(gradient, hessian, self.shape.penalties)
            weight = min(max(weight, bounds[0]), bounds[1])
            self._nodes[tree]["hessian"][node] = hessian
            self._nodes[tree]["weight"][node] = weight
            self._nodes[tree]["value"][node] = weight * np.float32(self.shape.eta)


def _leaves(n_nodes: int, parent: int) -> Tree:
    leaves = np.zeros(n_nodes, dtype=NODE)
    leaves["left"], leaves["parent"], leaves["set"] = LEAF, parent, NO_SET
    return leaves


def _pairs(array: npt.NDArray[Any]) -> list[NodeId]:
    return [(int(tree), int(node)) for tree, node in array]


# Constraints, as texts and as column numbers


# Purity of leaves


def mean_purity(labels: npt.NDArray[np.int64], nodes: Nodes) -> float:
    """Share of the majority class in a node, weighted by rows and averaged over trees.

    Source: Cheng et al. 2019 (arXiv:1901.08755), "Performance of Completely SecureBoost": the sum
    over leaves of n_i / n * p_i. ``labels`` are int64 class ids; ``nodes``, int32, shape (n_trees,
    n_rows), is where each row ends, or is last seen.
    """
    purities = []
    for tree in nodes:
        counts = np.zeros((int(tree.max(initial=0)) + 1, int(labels.max(initial=0)) + 1))
        np.add.at(counts, (tree, labels), 1)
        purities.append(float(counts.max(axis=1).sum() / len(labels)))
    return float(np.mean(purities))


def last_seen(before: Nodes, after: Nodes, splits: npt.NDArray[np.int64]) -> Nodes:
    """Nodes of rows as seen by an observer who knows only some of the last splits.

    ``before`` and ``after`` are the nodes before and after the last splits; ``splits``, shape
    (n_splits, 2), are tree and node of those.
    """
    seen = np.array(before)
    for tree, node in splits:
        rows = before[tree] == node
        seen[tree, rows] = after[tree, rows]
    return seen
