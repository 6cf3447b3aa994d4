"""The best cuts from sums over another party's bins, at the party that can read the sums.

The owner of columns, who cannot read labels, lists them and sums rows per bin (``list_columns``);
the party that can read the sums searches the best cut (``best_cuts``). Bins too close to cut
between (``CLOSE``) are merged by the owner, so a cut is allowed between any two sums::

    node 0                               node 1
    column 2          column 5           column 2
    bin bin missing | bin bin bin bin  | bin bin     one sum each

Scan, rules and ties are those of ``cart``, which searches where labels and columns are together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.kernels import frozen, kernel
from fedapp.trees.forest.cart import (
    CLOSE,
    CRITERIA,
    DRAWN,
    EPSILON,
    LOWEST,
    NO_RANK,
    Bins,
    Codes,
    Floats,
    Ints,
    Rules,
    beats,
    between,
    fewest_rows,
    is_constant,
    scan,
    scan_categories,
)
from fedapp.trees.forest.levels import RowFields

Places = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
Sums = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """Columns of nodes that may be cut, and the number of sums of each."""

    ranks: Ints  # (n_nodes,): see ``cart.Candidates``
    n_columns: Ints  # (n_nodes,): listed columns; 0 if the node cannot be split
    columns: Ints  # (n_listed,): node by node, ascending within each
    n_bins: Ints  # (n_listed,): non-empty bins
    missing: npt.NDArray[np.uint8]  # (n_listed,): 1 with one more sum, of missing values
    unordered: npt.NDArray[np.uint8]  # (n_listed,): 1 for a column of categories
    sizes: Places  # (n_sums,): distinct rows of each sum

    @property
    def nodes(self) -> Ints:
        """Index of the node of each listed column."""
        return np.repeat(np.arange(len(self.n_columns)), self.n_columns)

    @property
    def ends(self) -> Ints:
        """Where the sums of each listed column end, starting with 0."""
        return np.concatenate(([0], np.cumsum(self.n_bins + self.missing)))

    @classmethod
    def joined(cls, listings: Sequence[Listing]) -> Listing:
        """Listings of several trees, one after the other."""
        return cls(
            *(np.concatenate([getattr(listing, n) for listing in listings]) for n in cls.__slots__)
        )

    def per_column(self, sums: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Total of the sums of each listed column."""
        totals: npt.NDArray[Any] = np.add.reduceat(sums, self.ends[:-1]) if len(sums) else sums
        return totals


@dataclass(frozen=True, slots=True, eq=False)
class OwnerColumns:
    """What only the owner of listed columns knows."""

    thresholds: Floats  # (n_sums,): of the cut after each sum; after a column's last, ``LOWEST``
    codes: Places  # (n_sums,): the category of each sum of a column of categories
    # rows, places: (n_terms,): rows, and the index of the sum each is added to
    rows: Places
    places: Places


def list_columns(
    codes: Codes,
    bins: Bins,
    inside: tuple[Places, Ints],
    columns: Ints,
    keys: Ints,
    n_drawn: Ints,
    fewest: tuple[int, int],
) -> tuple[Listing, OwnerColumns]:
    """Columns to sum for the nodes of one tree, independent of labels.

    Parameters
    ----------
    codes, bins : see ``cart``.
    inside : rows of the nodes, see ``levels.inside_of``.
    columns, keys, n_drawn : see ``cart.best_splits``, which looks at the same columns.
    fewest : ``min_samples_split`` and ``min_samples_leaf``.
    """
    n_nodes = len(n_drawn)
    ranks = np.full(n_nodes, NO_RANK, dtype=np.int64)
    is_listed = np.zeros((n_nodes, len(codes)), dtype=np.bool_)
    columns_read = codes, bins.lows, bins.highs, bins.offsets, *inside, columns, keys, n_drawn
    _list(*(*frozen(*columns_read), *fewest, ranks, is_listed))
    nodes, listed = np.nonzero(is_listed)
    # A cell is a bin of a listed column in its node; a sum is one or more filled cells.
    rows, cells, width = _terms(codes, bins, inside, nodes, listed)
    filled, cell_ids, counts = np.unique(cells, return_inverse=True, return_counts=True)
    owners, bin_codes = np.divmod(filled, width)
    begins, missing = _begins(bins, listed[owners], owners, bin_codes)
    firsts = np.flatnonzero(begins)
    sizes = np.add.reduceat(counts, firsts) if len(firsts) else counts
    n_sums, n_missing = np.bincount(owners[firsts], minlength=len(listed)), missing[firsts]
    with_missing = np.bincount(owners[firsts][n_missing], minlength=len(listed))
    listing = Listing(
        ranks,
        is_listed.sum(axis=1),
        listed,
        n_sums - with_missing,
        with_missing.astype(np.uint8),
        (bins.n_categories[listed] > 0).astype(np.uint8),
        sizes.astype(np.int32),
    )
    thresholds = _thresholds(bins, listed[owners], owners, bin_codes, firsts, missing)
    places = (np.cumsum(begins) - 1)[cell_ids].astype(np.int32)
    return listing, OwnerColumns(thresholds, bin_codes[firsts].astype(np.int32), rows, places)


@kernel
def _list(
    codes: Any,
    lows: Any,
    highs: Any,
    offsets: Any,
    rows: Any,
    starts: Any,
    columns: Any,
    keys: Any,
    n_drawn: Any,
    min_split: int,
    min_leaf: int,
    ranks: Any,
    is_listed: Any,
) -> None:
    for node in range(len(starts) - 1):
        start, end = starts[node], starts[node + 1]
        n_inside = end - start
        if n_inside < fewest_rows(min_split, min_leaf):
            continue
        differs = False
        for rank in range(columns.shape[1]):
            if rank >= n_drawn[node] and differs:
                break
            column = columns[node, rank]
            first = offsets[column]
            missing = offsets[column + 1] - first
            low, high, n_missing = _extent(codes[column], rows, start, end, missing)
            if is_constant(low, high, n_missing, first, lows, highs):
                continue
            if not differs:
                differs = True
                ranks[node] = DRAWN if rank < n_drawn[node] else keys[node, rank]
            is_listed[node, column] = True


@kernel
def _extent(codes: Any, rows: Any, start: int, end: int, missing: int) -> tuple[int, int, int]:
    """Lowest and highest bin of a column in a node, -1 without any; number of missing rows."""
    no_code: Any = np.int64(-1)  # a literal would be a type of its own
    low, high, n_missing = missing, no_code, 0
    for place in range(start, end):
        code: Any = np.int64(codes[rows[place]])
        if code == missing:
            n_missing += 1
        else:
            low, high = min(low, code), max(high, code)
    return low, high, n_missing


def _terms(
    codes: Codes, bins: Bins, inside: tuple[Places, Ints], nodes: Ints, listed: Ints
) -> tuple[Places, Ints, int]:
    """Rows of each listed column's node, their cells (column and bin), and cells per column."""
    rows, starts = inside
    lengths = np.diff(starts)[nodes]
    owners = np.repeat(np.arange(len(listed)), lengths)
    offsets = np.arange(len(owners)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    node_rows = rows[starts[nodes][owners] + offsets]
    width = int(bins.widths.max(initial=0)) + 1  # missing is one more
    return node_rows, owners * width + codes[listed[owners], node_rows], width


def _begins(bins: Bins, columns: Ints, owners: Ints, codes: Ints) -> tuple[Flags, Flags]:
    """Whether a sum begins at each non-empty bin, and whether it is of missing values."""
    missing = codes == bins.widths[columns]
    begins = np.ones(len(codes), dtype=np.bool_)
    ids = np.flatnonzero((owners[1:] == owners[:-1]) & ~missing[1:]) + 1
    firsts = bins.offsets[columns[ids]]
    begins[ids] = bins.lows[firsts + codes[ids]] > bins.highs[firsts + codes[ids - 1]] + CLOSE
    return begins, missing


def _thresholds(
    bins: Bins, columns: Ints, owners: Ints, codes: Ints, firsts: Ints, missing: Flags
) -> Floats:
    """Threshold after each sum: halfway to the next bin of its column."""
    thresholds = np.full(len(firsts), LOWEST, dtype=np.float32)
    nexts = firsts[1:]
    cut = np.flatnonzero((owners[nexts] == owners[nexts - 1]) & ~missing[nexts])
    nexts = nexts[cut]
    begin = bins.offsets[columns[nexts]]
    below = bins.highs[begin + codes[nexts - 1]]
    thresholds[cut] = between(below, bins.lows[begin + codes[nexts]])
    return thresholds


# At the party that can read the sums


@dataclass(frozen=True, slots=True, eq=False)
class NodeTotals:
    """Nodes that may be split, at the party with the labels."""

    sizes: Ints  # (n_nodes,): distinct rows
    totals: Sums  # (n_nodes, n_fields): sums over the rows, integers
    large: Flags  # (n_nodes,): whether there are enough rows
    is_open: Flags  # (n_nodes,): and labels differ
    weights: Sums  # (n_nodes,): of all rows of the node's tree

    @classmethod
    def joined(cls, trees: Sequence[NodeTotals]) -> NodeTotals:
        """Nodes of several trees, one after the other."""
        return cls(*(np.concatenate([getattr(of, n) for of in trees]) for n in cls.__slots__))

    @classmethod
    def of(
        cls,
        fields: RowFields,
        targets: Sums,
        counts: npt.NDArray[np.uint8],
        inside: tuple[Places, Ints],
        fewest: tuple[int, int],
    ) -> NodeTotals:
        """Sum rows of the nodes of one tree.

        ``targets`` (class ids or numbers) and ``counts`` (how often the tree draws each row) have
        shape (n_rows,); for ``inside`` and ``fewest`` see ``list_columns``.
        """
        rows, starts = inside
        sizes = np.diff(starts)
        nodes = np.repeat(np.arange(len(sizes)), sizes)
        terms = fields.numbers[rows] * counts[rows, None]
        # Integers, so the order of summation does not matter.
        totals = [np.bincount(nodes, field, minlength=len(sizes)) for field in terms.T]
        large = sizes >= fewest_rows(*fewest)
        is_pure, filled = np.ones(len(sizes), dtype=np.bool_), np.flatnonzero(sizes)
        if len(filled):
            begins = starts[filled]
            lowest = np.minimum.reduceat(targets[rows], begins)
            is_pure[filled] = np.maximum.reduceat(targets[rows], begins) == lowest
        weights = np.full(len(sizes), fields.weights @ counts)
        return cls(sizes, np.stack(totals, axis=1), large, large & ~is_pure, weights)


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """The best cut of each node over listed columns."""

    # improvements, ranks: as in ``cart.Candidates``
    improvements: Sums
    ranks: Ints
    listed: Ints  # (n_nodes,): index of the listed column; -1 without a cut
    cuts: Ints  # (n_nodes,): the last bin that goes left
    defaults: npt.NDArray[np.uint8]  # (n_nodes,): 1 if missing goes left
    rights: npt.NDArray[np.uint8]  # (n_nodes, n_bytes): bits of the categories that go right


def best_cuts(
    listing: Listing, sums: Sums, nodes: NodeTotals, units: Sums, rules: Rules
) -> Choices:
    """The best cut of each node; ``sums``, (n_sums, n_fields), are in ``units``."""
    is_open, n_nodes = nodes.is_open, len(nodes.is_open)
    most = int((listing.n_bins * listing.unordered).max(initial=0))
    is_right = np.zeros((n_nodes, most), dtype=np.bool_)
    choices = Choices(
        np.full(n_nodes, np.nan),
        np.where(is_open, listing.ranks, NO_RANK),
        np.full(n_nodes, -1, dtype=np.int64),
        np.zeros(n_nodes, dtype=np.int64),
        np.zeros(n_nodes, dtype=np.uint8),
        np.empty((n_nodes, 0), dtype=np.uint8),
    )
    least = rules.min_decrease * nodes.weights if rules.min_decrease else nodes.weights - np.inf
    columns = listing.nodes, listing.columns, listing.ends, listing.missing, listing.unordered
    limits = CRITERIA[rules.criterion], rules.min_samples_leaf
    outputs = choices.improvements, choices.listed, choices.cuts, choices.defaults
    scaled = sums * units, nodes.totals * units
    read = frozen(*columns, listing.sizes, *scaled, is_open, least)
    _choose(*(*read, *limits, *outputs, is_right))
    return replace(choices, rights=np.packbits(is_right, axis=1))


@kernel
def _choose(
    nodes: Any,
    columns: Any,
    ends: Any,
    missing: Any,
    unordered: Any,
    sizes: Any,
    sums: Any,
    totals: Any,
    is_open: Any,
    least: Any,
    criterion: int,
    min_leaf: int,
    improvements: Any,
    listed: Any,
    cuts: Any,
    defaults: Any,
    is_right: Any,
) -> None:
    widest = 0
    for place in range(len(nodes)):
        widest = max(widest, ends[place + 1] - ends[place])
    # Values 0, 1, 2 ..., one per bin, so that every cut is allowed.
    values = np.arange(widest + 1).astype(np.float32)
    lefts = np.zeros(widest + 1, np.bool_)
    inside = np.zeros((widest + 1, sums.shape[1]))
    counts = np.zeros(widest + 1, np.int64)
    for place in range(len(nodes)):
        node, start, end = nodes[place], ends[place], ends[place + 1]
        if not is_open[node]:
            continue
        n_bins = end - start - missing[place]
        inside[n_bins] = 0
        counts[n_bins] = 0
        # Element by element: slices take numba seconds to compile.
        for bin_id in range(end - start):
            counts[bin_id] = sizes[start + bin_id]
            for kind in range(sums.shape[1]):
                inside[bin_id, kind] = sums[start + bin_id, kind]
        last = n_bins - 1
        cut = 0
        if unordered[place]:
            gain, side = scan_categories(
                inside, counts, totals[node], 0, last, n_bins, criterion, min_leaf, lefts
            )
        else:
            gain, cut, _, side = scan(
                *(inside, counts, totals[node], 0, last, n_bins, 0, values, values),
                *(criterion, min_leaf),
            )
        best = improvements[node] if listed[node] >= 0 else -np.inf
        if beats(gain, columns[place], best, columns[listed[node]]):
            improvements[node] = gain
            listed[node], cuts[node], defaults[node] = place, cut, side
            for bin_id in range(n_bins if unordered[place] else 0):
                is_right[node, bin_id] = not lefts[bin_id]
    for node in range(len(listed)):
        if listed[node] >= 0 and improvements[node] + EPSILON < least[node]:
            improvements[node] = np.nan
            listed[node] = -1
