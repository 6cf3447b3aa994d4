"""A forest grown level by level: split search, and random draws.

Draws of rows and columns are hashes of numbers, so they do not depend on numpy's version,
and a draw for one column discloses nothing about the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedapp.histograms.build import inside_of
from fedapp.kernels import kernel
from fedapp.trees.forest.cart import Bins, Candidates, Codes, Ints, Rules, fewest_rows
from fedapp.trees.forest.encrypted import NodeTotals, best_cuts, list_columns
from fedapp.trees.forest.label_codes import RowFields
from fedapp.trees.predict import Nodes, Places
from fedapp.trees.structure import joined

Words = npt.NDArray[np.uint64]

KEYS_AT_ONCE = 2**22  # column keys in memory: 32 MB, however many columns a party claims
PER_NODE, PER_TREE = "node", "tree"  # what columns are drawn for
# Java's SplittableRandom
GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Training rows as a split search sees them."""

    # codes, bins: see ``fedapp.trees.forest.cart``
    codes: Codes
    bins: Bins
    targets: npt.NDArray[np.float64]  # (n_rows,): class ids or numbers
    weights: npt.NDArray[np.float64]  # (n_rows,)
    counts: npt.NDArray[np.uint8]  # (n_trees, n_rows): how often each tree draws each row


def search_rows(
    rows: Rows,
    nodes: Nodes,
    open_nodes: tuple[Places, Places],
    column_seeds: Ints,
    n_drawn: Ints,
    rules: Rules,
    per: str = PER_NODE,
) -> Candidates:
    """The best split of every open node over some columns.

    Parameters
    ----------
    nodes : int32, shape (n_trees, n_rows): node of each training row.
    open_nodes : trees and nodes, by tree.
    column_seeds : int64, shape (n_columns,): see ``column_keys``.
    n_drawn : int64, shape (n_open,): how many of these columns are drawn for each node.
    per : see ``columns_of``.
    """
    fields, candidates = RowFields.of(rows.targets, rows.weights, rules.n_classes), []
    fewest = fewest_rows(rules.min_samples_split, rules.min_samples_leaf)
    for first, end in by_tree(open_nodes[0]):
        tree, wanted = int(open_nodes[0][first]), open_nodes[1][first:end]
        counts, n_wanted = rows.counts[tree], n_drawn[first:end]
        inside = inside_of(nodes[tree], (counts > 0) & (fields.weights > 0), wanted)
        columns, keys = columns_of(column_seeds, tree, wanted, n_wanted, per)
        terms = fields.of_rows(inside[0], counts)
        listing, local = list_columns(
            rows.codes, rows.bins, inside, columns, keys, n_wanted, fewest, terms
        )
        totals = NodeTotals.of(fields, rows.targets, counts, inside, fewest)
        choices = best_cuts(listing, local.sums, totals, fields.units, rules)
        candidates.append(local.candidates(listing, choices, rows.bins))
    return joined(candidates)


def by_tree(trees: Places) -> list[tuple[int, int]]:
    """Range of each tree, for nodes sorted by tree."""
    firsts = np.flatnonzero(np.diff(trees, prepend=-1)).tolist()
    return list(pairwise([*firsts, len(trees)]))


def columns_of(
    column_seeds: Ints, tree: int, wanted: Places, n_drawn: Ints, per: str = PER_NODE
) -> tuple[Ints, Ints]:
    """Columns of each wanted node of a tree, in drawing order, and their keys.

    ``per`` is what columns are drawn for: with ``PER_NODE`` those that are not drawn follow and may
    replace those that are the same in the node, with ``PER_TREE`` they are left out.
    """
    keys = column_keys(column_seeds, tree, wanted if per == PER_NODE else wanted * 0)
    columns = np.argsort(keys, axis=1, kind="stable")
    if per == PER_TREE:  # all nodes have the same
        columns = columns[:, : n_drawn.max(initial=0)]
    return columns, np.take_along_axis(keys, columns, axis=1)


class BestSplits(Protocol):
    """Improvements and ranks of a party's best splits, as in ``Candidates``."""

    @property
    def improvements(self) -> npt.NDArray[np.float64]: ...
    @property
    def ranks(self) -> Ints: ...


def winners(offers: Sequence[BestSplits]) -> Ints:
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


def count_drawn_columns(
    column_seeds: Ints,
    owners: Ints,
    n_parties: int,
    n_drawn: int,
    open_nodes: tuple[Places, Places],
    per: str = PER_NODE,
) -> Ints:
    """How many columns of each party are drawn for each open node: shape (n_parties, n_open).

    ``owners``, shape (n_columns,), is the party of each column; ``n_drawn`` is per node, over all
    parties.
    """
    trees, nodes = open_nodes[0], open_nodes[1] if per == PER_NODE else open_nodes[1] * 0
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


# Random draws


def mix(words: Words) -> Words:
    """A bijective hash of each word.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", Figure 16.
    """
    z = words + GAMMA
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    mixed: Words = z ^ (z >> np.uint64(31))
    return mixed


def column_keys(column_seeds: Ints, tree: int, nodes: npt.NDArray[np.int32]) -> Ints:
    """Keys that select columns for the nodes of a tree: the smallest are drawn.

    ``column_seeds`` is int64, shape (n_columns,), >= 0; a column's owner has its seed.
    Returns int64, shape (n_nodes, n_columns), 1 to 2**63 - 2.
    """
    places = mix((np.uint64(tree) << np.uint64(32)) | nodes.astype(np.uint64))
    words = mix(column_seeds.astype(np.uint64)[None, :] ^ places[:, None])
    return (words >> np.uint64(1)).astype(np.int64).clip(1, 2**63 - 2)


def row_counts(bootstrap: bool, seed: int, n_trees: int, n_rows: int) -> npt.NDArray[np.uint8]:
    """How often each tree draws each row (1 without bootstrap); uint8, shape (n_trees, n_rows)."""
    if bootstrap:
        return bootstrap_counts(seed, n_trees, n_rows)
    return np.ones((n_trees, n_rows), dtype=np.uint8)


def column_seeds(seed: int, n_columns: int) -> npt.NDArray[np.int64]:
    """Seeds of all parties' columns, from which they are drawn for nodes."""
    return np.random.default_rng([seed, 2]).integers(0, 2**63 - 1, (n_columns,))


def bootstrap_counts(seed: int, n_trees: int, n_rows: int) -> npt.NDArray[np.uint8]:
    """How often each tree draws each row, in ``n_rows`` draws with replacement."""
    roots = mix(np.uint64(seed) ^ mix(np.arange(n_trees, dtype=np.uint64)))
    counts = np.zeros((n_trees, n_rows), dtype=np.uint8)
    for tree in range(n_trees):
        words = mix(roots[tree] ^ mix(np.arange(n_rows, dtype=np.uint64)))
        _count(words, counts[tree])
    return counts


@kernel
def _count(words: Any, counts: Any) -> None:
    """Draw one row per word: its upper half as a fraction of 2**32."""
    for word in words:
        row = np.int64(((word >> np.uint64(32)) * np.uint64(len(counts))) >> np.uint64(32))
        if counts[row] < 255:
            counts[row] += 1


def n_features(rule: str | float, n_columns: int) -> int:
    """Columns drawn per node; ``rule`` is all, sqrt, log2, or a share of the columns."""
    if rule == "all":
        return n_columns
    if rule in ("sqrt", "log2"):
        root_or_log = np.sqrt(n_columns) if rule == "sqrt" else np.log2(n_columns)
        return max(1, int(root_or_log))
    return max(1, int(float(rule) * n_columns))
