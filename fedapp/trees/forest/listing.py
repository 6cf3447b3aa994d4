"""Columns that may be cut in the nodes of a tree, listed by their owner, who cannot read labels.

It adds up rows, a sum a bin, and who can read the sums looks for the best cut (``column_sums``).
Bins that may not be cut between (``scan.CLOSE``) are one here, so that between any two a cut is
allowed.

::

    node 0                               node 1
    column 2          column 5           column 2
    bin bin missing | bin bin bin bin  | bin bin     a sum each: rows, and what they add up to
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.kernels import frozen, kernel
from fedapp.trees.forest.cart import (
    DRAWN,
    LOWEST,
    NO_RANK,
    Bins,
    Codes,
    Floats,
    Ints,
    between,
    fewest_rows,
    is_constant,
)
from fedapp.trees.forest.scan import CLOSE

Places = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """Columns of nodes that may be cut, and how many sums there are of each.

    Parameters
    ----------
    ranks : int64, shape (n_nodes,): see ``cart.Candidates``.
    n_columns : int64, shape (n_nodes,): columns that are listed; 0 where nothing may be cut.
    columns : int64, shape (n_listed,): node by node, ascending within each.
    n_bins : int64, shape (n_listed,): bins that rows are in.
    missing : uint8, shape (n_listed,): 1 where values are missing, with one more sum at the end.
    unordered : uint8, shape (n_listed,): 1 where bins are categories, in no order.
    sizes : int32, shape (n_sums,): rows, however often they are drawn.
    """

    ranks: Ints
    n_columns: Ints
    columns: Ints
    n_bins: Ints
    missing: npt.NDArray[np.uint8]
    unordered: npt.NDArray[np.uint8]
    sizes: Places

    @property
    def nodes(self) -> Ints:
        """Place of the node of each listed column."""
        return np.repeat(np.arange(len(self.n_columns)), self.n_columns)

    @property
    def ends(self) -> Ints:
        """Where the sums of each listed column end, with a 0 before."""
        return np.concatenate(([0], np.cumsum(self.n_bins + self.missing)))

    @classmethod
    def joined(cls, listings: Sequence[Listing]) -> Listing:
        """Of several trees, one after the other."""
        return cls(*(np.concatenate([getattr(one, n) for one in listings]) for n in cls.__slots__))

    def of_nodes(self, first: int, end: int) -> Listing:
        """Of some neighbouring nodes."""
        nodes = slice(first, end)
        before, n_listed = self.n_columns[:first].sum(), self.n_columns[nodes].sum()
        listed = slice(before, before + n_listed)
        sums = slice(*self.ends[[before, before + n_listed]])
        return Listing(
            self.ranks[nodes],
            self.n_columns[nodes],
            self.columns[listed],
            self.n_bins[listed],
            self.missing[listed],
            self.unordered[listed],
            self.sizes[sums],
        )

    def per_column(self, sums: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What the sums of each listed column add up to."""
        found: npt.NDArray[Any] = np.add.reduceat(sums, self.ends[:-1]) if len(sums) else sums
        return found


@dataclass(frozen=True, slots=True, eq=False)
class OwnColumns:
    """What only the owner of listed columns knows.

    Parameters
    ----------
    thresholds : float32, shape (n_sums,): what is below goes left with this bin and those before;
        nothing is, at the last bin: there only missing values go left.
    codes : int32, shape (n_sums,): the category whose sum it is, of a column of categories.
    rows, places : int32, shape (n_terms,): rows, and the sum each goes into.
    """

    thresholds: Floats
    codes: Places
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
) -> tuple[Listing, OwnColumns]:
    """Columns to sum for the nodes of one tree, whatever the labels.

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
    known = codes, bins.lows, bins.highs, bins.offsets, *inside, columns, keys, n_drawn
    _list(*(*frozen(*known), *fewest, ranks, is_listed))
    nodes, listed = np.nonzero(is_listed)
    rows, cells, width = _terms(codes, bins, inside, nodes, listed)
    filled, of_cells, counts = np.unique(cells, return_inverse=True, return_counts=True)
    owners, codes_of = np.divmod(filled, width)
    begins, missing = _begins(bins, listed[owners], owners, codes_of)
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
    thresholds = _thresholds(bins, listed[owners], owners, codes_of, firsts, missing)
    places = (np.cumsum(begins) - 1)[of_cells].astype(np.int32)
    return listing, OwnColumns(thresholds, codes_of[firsts].astype(np.int32), rows, places)


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
    """Lowest and highest bin of a column in a node, -1 without any; rows where it is missing."""
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
    """Rows of each listed column's node; the cell of each, column and bin; how wide a column is."""
    rows, starts = inside
    lengths = np.diff(starts)[nodes]
    owners = np.repeat(np.arange(len(listed)), lengths)
    within = np.arange(len(owners)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    found = rows[starts[nodes][owners] + within]
    width = int(bins.widths.max(initial=0)) + 1  # missing is one more
    return found, owners * width + codes[listed[owners], found], width


def _begins(bins: Bins, columns: Ints, owners: Ints, codes: Ints) -> tuple[Flags, Flags]:
    """Whether a sum begins at each filled bin, and whether it is that of missing values."""
    missing = codes == bins.widths[columns]
    begins = np.ones(len(codes), dtype=np.bool_)
    at = np.flatnonzero((owners[1:] == owners[:-1]) & ~missing[1:]) + 1
    firsts = bins.offsets[columns[at]]
    begins[at] = bins.lows[firsts + codes[at]] > bins.highs[firsts + codes[at - 1]] + CLOSE
    return begins, missing


def _thresholds(
    bins: Bins,
    columns: Ints,
    owners: Ints,
    codes: Ints,
    firsts: Ints,
    missing: Flags,
) -> Floats:
    """Threshold behind each sum: halfway to the next bin of its column."""
    thresholds = np.full(len(firsts), LOWEST, dtype=np.float32)
    nexts = firsts[1:]
    cut = np.flatnonzero((owners[nexts] == owners[nexts - 1]) & ~missing[nexts])
    nexts = nexts[cut]
    begin = bins.offsets[columns[nexts]]
    below = bins.highs[begin + codes[nexts - 1]]
    thresholds[cut] = between(below, bins.lows[begin + codes[nexts]])
    return thresholds
