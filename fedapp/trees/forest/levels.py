"""A forest that grows level by level: where its rows are, which nodes are open, how they number.

Whoever knows the splits of each level in their order knows the same forest: the children of the
splits of a tree get the next numbers, a pair a split.
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

KEYS_AT_ONCE = 2**22  # of columns, by which they are drawn: 32 MB, however many a party names


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """Nodes that are split, by tree, and by node within a tree.

    Parameters
    ----------
    trees, nodes, lefts : int32, shape (n_splits,): what is split, and into which left child; the
        right one is the next.
    owners : int64, shape (n_splits,): number of the party whose column it is.
    """

    trees: Places
    nodes: Places
    lefts: Places
    owners: Ints

    @classmethod
    def none(cls) -> Splits:
        """Without a split."""
        nothing = np.empty(0, dtype=np.int32)
        return cls(nothing, nothing, nothing, nothing.astype(np.int64))

    def taken(self, places: npt.NDArray[Any]) -> Splits:
        """Some of them."""
        return Splits(*(getattr(self, name)[places] for name in self.__slots__))

    def plus(self, other: Splits) -> Splits:
        """These, then the others."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__slots__)
        return Splits(*(np.concatenate(pair) for pair in pairs))

    def children(self) -> tuple[Places, Places]:
        """Trees and nodes of all children: the open nodes of the next level."""
        nodes = np.stack((self.lefts, self.lefts + 1), axis=1).ravel()
        return np.repeat(self.trees, 2), nodes.astype(np.int32)

    @property
    def records(self) -> Ints:
        """Record id of each at its owner: how many of the owner's were made before."""
        order = np.argsort(self.owners, kind="stable")
        counts = np.bincount(self.owners)
        ids = np.empty(len(order), dtype=np.int64)
        ids[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        return ids

    def spread(
        self, values: npt.NDArray[Any], n_nodes: Ints, otherwise: Any
    ) -> tuple[npt.NDArray[Any], ...]:
        """A value a node, tree by tree.

        Parameters
        ----------
        values : shape (n_splits,): of the nodes that are split.
        n_nodes : int64, shape (n_trees,): nodes of each tree.
        otherwise : of all other nodes.
        """
        ends = np.cumsum(n_nodes)
        found = np.full(ends[-1], otherwise, dtype=values.dtype)
        found[(ends - n_nodes)[self.trees] + self.nodes] = values
        return tuple(np.split(found, ends[:-1]))


def number(trees: Places, nodes: Places, owners: Ints, n_nodes: Ints) -> tuple[Splits, Ints]:
    """Give the children of a level's splits their numbers.

    Parameters
    ----------
    trees, nodes, owners : of the splits, by tree.
    n_nodes : int64, shape (n_trees,): nodes of each tree so far.

    Returns
    -------
    The splits, and the nodes of each tree with their children.
    """
    counts = np.bincount(trees, minlength=len(n_nodes))
    firsts = np.cumsum(counts) - counts
    lefts = n_nodes[trees] + 2 * (np.arange(len(trees)) - firsts[trees])
    return Splits(trees, nodes, lefts.astype(np.int32), owners), n_nodes + 2 * counts


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What is known of the training rows where columns are looked at.

    Parameters
    ----------
    codes, bins : see ``fedapp.trees.forest.cart``.
    targets : float64, shape (n_rows,): class ids or numbers.
    weights : float64, shape (n_rows,).
    counts : uint8, shape (n_trees, n_rows): how often each tree draws each row.
    """

    codes: Codes
    bins: Bins
    targets: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]
    counts: npt.NDArray[np.uint8]


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
    nodes : int32, shape (n_trees, n_rows): where the training rows are.
    open_nodes : trees and nodes, by tree.
    column_seeds : int64, shape (n_columns,): see ``draws.column_keys``.
    n_drawn : int64, shape (n_open,): how many of these columns are drawn for each node.
    """
    trees, wanted = open_nodes
    weights = exact_weights(rows.weights)
    exact = weights, exact_products(weights, rows.targets)
    found = [
        _search_tree(
            rows, exact, nodes, int(trees[a]), wanted[a:b], column_seeds, n_drawn[a:b], rules
        )
        for a, b in by_tree(trees)
    ]
    return Candidates(
        *(np.concatenate([getattr(one, n) for one in found]) for n in Candidates.__slots__)
    )


def by_tree(trees: Places) -> list[tuple[int, int]]:
    """Where the nodes of each tree begin and end, of nodes by tree."""
    firsts = np.flatnonzero(np.diff(trees, prepend=-1)).tolist()
    return list(pairwise([*firsts, len(trees)]))


def _search_tree(
    rows: Rows,
    exact: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]],
    nodes: Nodes,
    tree: int,
    wanted: Places,
    column_seeds: Ints,
    n_drawn: Ints,
    rules: Rules,
) -> Candidates:
    weights, draws = exact[0], rows.counts[tree]
    inside = inside_of(nodes[tree], (draws > 0) & (weights > 0), wanted)
    given = rows.codes, rows.bins, rows.targets, *exact, draws, *inside
    return best_splits(*given, *columns_of(column_seeds, tree, wanted), n_drawn, rules)


def inside_of(nodes: Places, drawn: Bits, wanted: Places) -> tuple[Places, Ints]:
    """Rows of some nodes of one tree, node after node, ascending within each.

    Parameters
    ----------
    nodes : int32, shape (n_rows,), >= 0: where each row is in the tree.
    drawn : bool, shape (n_rows,): a row that is not drawn is nowhere.
    wanted : int32, shape (n_wanted,): nodes.

    Returns
    -------
    rows : int32, shape (n_inside,).
    starts : int64, shape (n_wanted + 1,): where each node begins and ends among them.
    """
    # By node, from place 1 on; in place 0 stands where rows go that are in none of the nodes.
    # Nodes without rows have places too: others' bits may send all rows one way.
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
    """Columns for each of some nodes of one tree in the order in which they are drawn, and keys.

    Returns
    -------
    Both int64, shape (n_wanted, n_columns).
    """
    keys = column_keys(column_seeds, tree, wanted)
    columns = np.argsort(keys, axis=1, kind="stable")
    return columns, np.take_along_axis(keys, columns, axis=1)


class Offer(Protocol):
    """Improvements and ranks of a party's best splits, as in ``Candidates``."""

    @property
    def improvements(self) -> npt.NDArray[np.float64]: ...
    @property
    def ranks(self) -> Ints: ...


def winners(found: Sequence[Offer]) -> Ints:
    """Number of the party whose split each open node gets; -1 where it becomes a leaf.

    The largest improvement of a drawn column wins; of equals the first party's. Where all drawn
    columns of all parties are the same throughout the node, the one with the smallest key does.
    """
    improvements = np.stack([one.improvements for one in found])
    ranks = np.stack([one.ranks for one in found])
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
    """How many columns of each party are drawn for each open node.

    Parameters
    ----------
    owners : int64, shape (n_columns,): number of the party of each column.
    n_drawn : in all.

    Returns
    -------
    int64, shape (n_parties, n_open).
    """
    trees, nodes = open_nodes
    sizes = np.bincount(owners, minlength=n_parties)
    if n_drawn >= len(owners):
        return np.tile(sizes[:, None], len(trees)).astype(np.int64)
    counts = np.zeros((n_parties, len(trees)), dtype=np.int64)
    at_once = max(1, KEYS_AT_ONCE // len(owners))
    for tree in np.unique(trees):
        of_tree = np.flatnonzero(trees == tree)
        for mine in np.split(of_tree, range(at_once, len(of_tree), at_once)):
            keys = column_keys(column_seeds, int(tree), nodes[mine])
            order = np.argsort(keys, axis=1, kind="stable")[:, :n_drawn]
            for party in range(n_parties):
                counts[party, mine] = (owners[order] == party).sum(axis=1)
    return counts
