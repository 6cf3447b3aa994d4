"""A forest grown level by level: nodes of its rows, open nodes, and node numbers.

The splits of each level, in order, determine the forest: their children get the next two numbers of
the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedapp.kernels import frozen, kernel
from fedapp.trees.forest.cart import Bins, Candidates, Codes, Ints, Rules, best_splits
from fedapp.trees.forest.draws import column_keys
from fedapp.trees.forest.label_codes import exact_products, exact_weights
from fedapp.trees.sides import Bits, Nodes, Places

KEYS_AT_ONCE = 2**22  # column keys in memory: 32 MB, however many columns a party claims


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """Split nodes, by tree, and by node within a tree."""

    # trees, nodes, lefts: (n_splits,): split node and left child; the right one is the next
    trees: Places
    nodes: Places
    lefts: Places
    owners: Ints  # (n_splits,): number of the party that owns the column

    @classmethod
    def none(cls) -> Splits:
        """Without splits."""
        nothing = np.empty(0, dtype=np.int32)
        return cls(nothing, nothing, nothing, nothing.astype(np.int64))

    def taken(self, places: npt.NDArray[Any]) -> Splits:
        """Some of the splits."""
        return Splits(*(getattr(self, name)[places] for name in self.__slots__))

    def plus(self, other: Splits) -> Splits:
        """With further splits appended."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__slots__)
        return Splits(*(np.concatenate(pair) for pair in pairs))

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


def number(trees: Places, nodes: Places, owners: Ints, n_nodes: Ints) -> tuple[Splits, Ints]:
    """Number the children of a level's splits, which are sorted by tree.

    ``n_nodes``, shape (n_trees,), is the nodes of each tree so far. Returns the splits, and the
    number of nodes with their children.
    """
    counts = np.bincount(trees, minlength=len(n_nodes))
    firsts = np.cumsum(counts) - counts
    lefts = n_nodes[trees] + 2 * (np.arange(len(trees)) - firsts[trees])
    return Splits(trees, nodes, lefts.astype(np.int32), owners), n_nodes + 2 * counts


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Training rows as a split search sees them."""

    # codes, bins: see ``fedapp.trees.forest.cart``
    codes: Codes
    bins: Bins
    targets: npt.NDArray[np.float64]  # (n_rows,): class ids or numbers
    weights: npt.NDArray[np.float64]  # (n_rows,)
    counts: npt.NDArray[np.uint8]  # (n_trees, n_rows): how often each tree draws each row


def search(
    rows: Rows,
    nodes: Nodes,
    open_nodes: tuple[Places, Places],
    column_seeds: Ints,
    n_drawn: Ints,
    rules: Rules,
) -> Candidates:
    """The best split of every open node over some columns.

    Parameters
    ----------
    nodes : int32, shape (n_trees, n_rows): node of each training row.
    open_nodes : trees and nodes, by tree.
    column_seeds : int64, shape (n_columns,): see ``draws.column_keys``.
    n_drawn : int64, shape (n_open,): how many of these columns are drawn for each node.
    """
    weights = exact_weights(rows.weights)
    labelled = rows.codes, rows.bins, rows.targets, weights, exact_products(weights, rows.targets)
    candidates = []
    for first, end in by_tree(open_nodes[0]):
        tree, wanted = int(open_nodes[0][first]), open_nodes[1][first:end]
        draws = rows.counts[tree]
        inside = inside_of(nodes[tree], (draws > 0) & (weights > 0), wanted)
        drawn = *columns_of(column_seeds, tree, wanted), n_drawn[first:end]
        candidates.append(best_splits(*labelled, draws, *inside, *drawn, rules))
    return Candidates(
        *(np.concatenate([getattr(each, n) for each in candidates]) for n in Candidates.__slots__)
    )


def by_tree(trees: Places) -> list[tuple[int, int]]:
    """Range of each tree, for nodes sorted by tree."""
    firsts = np.flatnonzero(np.diff(trees, prepend=-1)).tolist()
    return list(pairwise([*firsts, len(trees)]))


def inside_of(nodes: Places, drawn: Bits, wanted: Places) -> tuple[Places, Ints]:
    """Rows of some nodes of one tree, node after node, ascending within each.

    Parameters
    ----------
    nodes : int32, shape (n_rows,), >= 0: node of each row.
    drawn : bool, shape (n_rows,): other rows are in no node.

    Returns
    -------
    rows : int32, shape (n_inside,).
    starts : int64, shape (n_wanted + 1,): start of each node's rows, and the end of the last.
    """
    # numbers[node + 1] is the node's index; numbers[0] is that of rows in none of the nodes.
    # Nodes may have no rows: another party's bits can send all rows one way.
    last = max(int(nodes.max(initial=0)), int(wanted.max(initial=0)))
    numbers = np.full(last + 2, len(wanted), dtype=np.int32)
    numbers[wanted + 1] = np.arange(len(wanted))
    rows, starts = _list(*(*frozen(nodes, drawn, numbers), len(wanted)))
    return rows[: starts[-1]], starts


@kernel
def _list(nodes: Any, drawn: Any, numbers: Any, n_wanted: int) -> tuple[Any, Any]:
    """Sort by node, without a branch, which would be mispredicted for every third row."""
    slots, ends = np.empty(len(nodes), np.int32), np.zeros(n_wanted + 2, np.int64)
    for row in range(len(nodes)):
        slots[row] = numbers[(nodes[row] + 1) * drawn[row]]
        ends[slots[row] + 1] += 1
    for slot in range(n_wanted + 1):  # np.cumsum takes numba 0.1 s to load
        ends[slot + 1] += ends[slot]
    starts, rows = ends[:-1].copy(), np.empty(len(nodes), np.int32)
    for row in range(len(nodes)):
        rows[ends[slots[row]]] = row
        ends[slots[row]] += 1
    return rows, starts


def columns_of(column_seeds: Ints, tree: int, wanted: Places) -> tuple[Ints, Ints]:
    """Columns of each wanted node of a tree, in drawing order, and their keys."""
    keys = column_keys(column_seeds, tree, wanted)
    columns = np.argsort(keys, axis=1, kind="stable")
    return columns, np.take_along_axis(keys, columns, axis=1)


class Offer(Protocol):
    """Improvements and ranks of a party's best splits, as in ``Candidates``."""

    @property
    def improvements(self) -> npt.NDArray[np.float64]: ...
    @property
    def ranks(self) -> Ints: ...


def winners(offers: Sequence[Offer]) -> Ints:
    """Number of the party whose split each open node gets; -1 if it becomes a leaf.

    The largest improvement on a drawn column wins, the first party's if equal. If all drawn columns
    of all parties are constant in the node, the column with the smallest key wins.
    """
    improvements = np.stack([offer.improvements for offer in offers])
    ranks = np.stack([offer.ranks for offer in offers])
    # Rank 0 is a drawn column; any other rank is a key, so only the smallest key competes.
    at_first = ranks == ranks.min(axis=0)
    gains = np.where(at_first & ~np.isnan(improvements), improvements, -np.inf)
    best = gains.argmax(axis=0)
    chosen: Ints = np.where(gains.max(axis=0) > -np.inf, best, -1)
    return chosen


def draw_columns(
    column_seeds: Ints,
    owners: Ints,
    n_parties: int,
    n_drawn: int,
    open_nodes: tuple[Places, Places],
) -> Ints:
    """How many columns of each party are drawn for each open node: shape (n_parties, n_open).

    ``owners``, shape (n_columns,), is the party of each column; ``n_drawn`` is per node, over all
    parties.
    """
    trees, nodes = open_nodes
    sizes = np.bincount(owners, minlength=n_parties)
    if n_drawn >= len(owners):
        return np.tile(sizes[:, None], len(trees)).astype(np.int64)
    counts = np.zeros((n_parties, len(trees)), dtype=np.int64)
    at_once = max(1, KEYS_AT_ONCE // len(owners))
    for tree in np.unique(trees):
        tree_places = np.flatnonzero(trees == tree)
        for places in np.split(tree_places, range(at_once, len(tree_places), at_once)):
            keys = column_keys(column_seeds, int(tree), nodes[places])
            order = np.argsort(keys, axis=1, kind="stable")[:, :n_drawn]
            for party in range(n_parties):
                counts[party, places] = (owners[order] == party).sum(axis=1)
    return counts
