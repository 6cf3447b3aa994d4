"""Where trees are split, and by whom; and rows moved by splits.

The splits of each level, in order, determine the trees: their children get the next two numbers of
their tree. So parties that know a level's splits agree on node numbers without being sent any, and
number the splits of every owner alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Ints
from fedapp.histograms.bins import Empty, in_parts
from fedapp.kernels import frozen, kernel
from fedapp.trees.categories import NO_SETS, CategorySets
from fedapp.trees.predict import Places, goes_left, kernel_sets

R = TypeVar("R")
NAN = np.float32(np.nan)

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
Numbers = npt.NDArray[Any]  # integers: numbers of trees, or of nodes within a tree
NodeList = tuple[Numbers, Numbers]  # trees and nodes, each of shape (n_nodes,)
NO_ROUTES = np.empty(0, dtype=ROUTE)


def joined(records: Sequence[R]) -> R:
    """Records of arrays as one: each field's arrays, one after the other."""
    kind: Any = type(records[0])
    names = (field.name for field in fields(kind))
    record: R = kind(*(np.concatenate([getattr(one, name) for one in records]) for name in names))
    return record


@dataclass(frozen=True, slots=True, eq=False)
class SplitNodes:
    """Split nodes, by tree, and by node within a tree."""

    # trees, nodes, lefts: (n_splits,): split node and left child; the right one is the next
    trees: Places
    nodes: Places
    lefts: Places
    owners: Ints  # (n_splits,): number of the party that owns the column

    @classmethod
    def none(cls) -> SplitNodes:
        """Without splits."""
        nothing = np.empty(0, dtype=np.int32)
        return cls(nothing, nothing, nothing, nothing.astype(np.int64))

    def children(self) -> tuple[Places, Places]:
        """Trees and nodes of all children: the open nodes of the next level."""
        nodes = np.stack((self.lefts, self.lefts + 1), axis=1).ravel()
        return np.repeat(self.trees, 2), nodes.astype(np.int32)

    @property
    def records(self) -> Ints:
        """Record id of each split at its owner: the owner's splits are numbered in order."""
        order = np.argsort(self.owners, kind="stable")
        counts = np.bincount(self.owners)
        ids = np.empty(len(order), dtype=np.int64)
        ids[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        return ids

    def spread(
        self, values: npt.NDArray[Any], n_nodes: Ints, otherwise: Any
    ) -> tuple[npt.NDArray[Any], ...]:
        """One value per node, tree by tree: ``values`` at split nodes, ``otherwise`` elsewhere."""
        ends = np.cumsum(n_nodes)
        node_values = np.full(ends[-1], otherwise, dtype=values.dtype)
        node_values[(ends - n_nodes)[self.trees] + self.nodes] = values
        return tuple(np.split(node_values, ends[:-1]))


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """Trees so far, without thresholds: the same at all that grow them."""

    n_nodes: Ints  # (n_trees,)
    levels: tuple[SplitNodes, ...] = ()

    @classmethod
    def roots(cls, n_trees: int) -> Structure:
        """Trees without splits."""
        return cls(np.ones(n_trees, dtype=np.int64))

    @property
    def level(self) -> int:
        """The level that may be split next, from 0."""
        return len(self.levels)

    @property
    def last(self) -> SplitNodes:
        """SplitNodes of the last level."""
        return self.levels[-1] if self.levels else SplitNodes.none()

    @property
    def splits(self) -> SplitNodes:
        """SplitNodes of all levels."""
        return joined((SplitNodes.none(), *self.levels))

    @property
    def open_nodes(self) -> tuple[Places, Places]:
        """Trees and nodes that may be split next: children of the last splits, or the roots."""
        if self.levels:
            return self.last.children()
        n_trees = len(self.n_nodes)
        return np.arange(n_trees, dtype=np.int32), np.zeros(n_trees, dtype=np.int32)

    def places(self, trees: Places, nodes: Places, owners: Ints, n_parties: int) -> Ints:
        """Indices of some splits among the open nodes; ValueError if one cannot be split."""
        keys, open_keys = node_keys((trees, nodes)), node_keys(self.open_nodes)
        places = np.minimum(np.searchsorted(open_keys, keys), max(len(open_keys) - 1, 0))
        fits = len(keys) <= len(open_keys) and bool((open_keys[places] == keys).all())
        if not fits or (np.diff(keys) <= 0).any() or (owners >= n_parties).any():
            raise ValueError("must be open, in order, and of parties of the run")
        return places

    def split(self, trees: Places, nodes: Places, owners: Ints) -> Structure:
        """With a level's splits, sorted by tree: their children get each tree's next numbers."""
        lefts, n_nodes = number_children(trees, self.n_nodes)
        splits = SplitNodes(trees, nodes, lefts.astype(np.int32), owners)
        return replace(self, n_nodes=n_nodes, levels=(*self.levels, splits))


def routes_of(*fields: npt.NDArray[Any]) -> Routes:
    """Splits from the arrays of the fields of ``ROUTE``, in its order."""
    routes = np.empty(len(fields[0]), dtype=ROUTE)
    for name, values in zip(ROUTE.names or (), fields, strict=True):
        routes[name] = values
    return routes


def route_rows(
    nodes: npt.NDArray[np.int32],
    routes: Routes,
    cells: npt.NDArray[Any],
    sets: CategorySets = NO_SETS,
    firsts: npt.NDArray[Any] | None = None,
    missing: int | np.float32 = NAN,
    empty: Empty = np.empty,
) -> npt.NDArray[np.int32]:
    """Node of each row after the splits; int32, shape (n_trees, n_rows), in an array of ``empty``.

    Parameters
    ----------
    nodes : int32, shape (n_trees, n_rows): node of each row before.
    routes : ``ROUTE``.
    cells : shape (n_rows, n_columns): float32 values, or numbers of bins, each of which moves as a
        whole.
    firsts : shape (n_routes,): of bins, the lowest one of the column that goes right.
    missing : of bins, the code of a missing value, or -1.
    """
    firsts = np.ascontiguousarray(routes["threshold"] if firsts is None else firsts)
    by_set = kernel_sets(routes["set"], sets)
    routes, firsts, cells = frozen(routes, firsts, cells)
    moved: npt.NDArray[np.int32] = empty(nodes.shape, np.int32)
    moved[:] = nodes
    in_parts(
        (nodes.shape[1], nodes.shape[0]),
        lambda first, last: _move(moved, routes, firsts, cells, missing, by_set, first, last),
    )
    return moved


def each_once_among(wanted: NodeList, nodes: NodeList) -> bool:
    """Whether all wanted nodes are among others, none of them twice."""
    asked = node_keys(wanted).tolist()
    once = set(asked)  # few nodes: sets are faster than numpy
    return len(once) == len(asked) and once.issubset(node_keys(nodes).tolist())


def children_of(trees: Numbers, lefts: Numbers) -> NodeList:
    """Both children of some splits, from their left ones."""
    return np.concatenate((trees, trees)), np.concatenate((lefts, lefts + 1))


def number_children(trees: Numbers, n_nodes: Numbers) -> tuple[Numbers, Numbers]:
    """Left children of splits, sorted by tree, and how many nodes each tree then has: children get
    the next two numbers of their tree."""
    counts = np.bincount(trees, minlength=len(n_nodes))
    ranks = np.arange(len(trees)) - (np.cumsum(counts) - counts)[trees]
    return n_nodes[trees] + 2 * ranks, n_nodes + 2 * counts


def roots_of(n_trees: int) -> NodeList:
    """The root of every tree."""
    return np.arange(n_trees), np.zeros(n_trees, dtype=np.int64)


def node_keys(nodes: NodeList) -> Ints:
    """A number for each node, in the order of trees and nodes."""
    return (nodes[0].astype(np.int64) << 32) | nodes[1].astype(np.int64)


@kernel
def _move(
    nodes: Any,
    routes: Any,
    firsts: Any,
    cells: Any,
    missing: Any,
    sets: Any,
    first: int,
    last: int,
) -> None:
    """Move some rows of all trees; a cell goes left if it is below its split's first."""
    widths, starts, bits = sets
    for tree in range(nodes.shape[0]):
        highest = 0
        for row in range(first, last):
            highest = max(highest, nodes[tree, row])
        # Index of each node's route, -1 for nodes that were not split.
        split_at = np.full(highest + 1, -1, dtype=np.int64)
        for split in range(len(routes)):
            if routes[split].tree == tree and routes[split].node <= highest:
                split_at[routes[split].node] = split
        for row in range(first, last):
            split = split_at[nodes[tree, row]]
            if split < 0:
                continue
            route = routes[split]
            cell, side = cells[row, route.column], route.default_left
            is_left = goes_left(cell, missing, firsts[split], side, split, widths, starts, bits)
            nodes[tree, row] = route.left + (0 if is_left else 1)


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
