"""Where trees over the columns of several parties are split, and by whom.

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

from fedapp.trees.grow import node_keys, number_children
from fedapp.trees.predict import Places

Ints = npt.NDArray[np.int64]
R = TypeVar("R")


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
