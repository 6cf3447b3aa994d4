"""Exact quantiles of the rows of several tables, from counts of all of them together.

A float32 is a number of four digits to the base 256 that is in the same order. First the rows are
counted by the first digit; then, within each first digit that some quantile has, by the second; and
so on: after four exchanges the values at the quantiles are known, and how many rows lie below. A
column of no more different values than bins is counted through to all of them. Elsewhere a row that
alone begins with some digits is counted no further: a cut before or behind all that would begin
like it parts the rows alike, and its value stays unknown. Counts are of weights; whose rows they
count does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fedapp.crypto.fixed_point import Whole
from fedapp.histograms.bins import Cuts, Floats, Ints, ragged
from fedapp.histograms.sketch import LARGEST

Keys = npt.NDArray[np.uint32]

N_DIGITS, BASE, DIGIT_BITS = 4, 256, 8
_SIGN = np.uint32(1 << 31)
_SMALLEST = np.finfo(np.float32).tiny


def ordered(values: Floats) -> Keys:
    """Numbers in the order of the values, which are no NaN; any shape."""
    bits = np.ascontiguousarray(values + np.float32(0)).view(np.uint32)  # -0.0 is 0.0
    return np.where(bits & _SIGN, ~bits, bits | _SIGN).astype(np.uint32)


def values_of(keys: Keys) -> Floats:
    """Undo ``ordered``."""
    bits = np.where(keys & _SIGN, keys & ~_SIGN, ~keys).astype(np.uint32)
    return bits.view(np.float32)


def digit_counts(
    values: Floats, weights: Whole, prefixes: Keys, offsets: Ints, digit: int
) -> Whole:
    """Weights of the rows by their next digit.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns); NaN is missing.
    weights : int64, shape (n_rows,), >= 0.
    prefixes : uint32, shape (n_prefixes,), ascending within a column: first digits of the rows that
        are counted.
    offsets : int64, shape (n_columns + 1,): prefixes of column f are ``offsets[f]`` to
        ``offsets[f+1]``.
    digit : how many digits a prefix has, 0 to 3.

    Returns
    -------
    int64, shape (n_prefixes, 256).
    """
    counts = np.zeros(len(prefixes) * BASE, dtype=np.int64)
    for column, (begin, end) in enumerate(pairwise(offsets)):
        own = prefixes[begin:end]
        present = ~np.isnan(values[:, column]) & (weights > 0)
        if not len(own) or not present.any():
            continue
        keys = ordered(values[present, column]).astype(np.uint64)
        heads = (keys >> np.uint64(DIGIT_BITS * (N_DIGITS - digit))).astype(np.uint32)
        places = np.minimum(np.searchsorted(own, heads), len(own) - 1)
        known = own[places] == heads
        digits = (keys >> np.uint64(DIGIT_BITS * (N_DIGITS - 1 - digit))).astype(np.int64) % BASE
        np.add.at(counts, ((begin + places) * BASE + digits)[known], weights[present][known])
    return counts.reshape(-1, BASE)


@dataclass(slots=True, eq=False)
class _Column:
    """Where the descent into one column has come to.

    Parameters
    ----------
    prefixes : uint32, ascending: first digits of the values looked at.
    below, masses : int64: weight of all rows below each, and of those that begin with it.
    whole : whether these are all values there are.
    targets : int64: weights at which to cut, where that is not settled.
    total : weight of all rows that have a value.
    cuts : uint32: where it is, as numbers in the order of the values.
    under : int64: weight below each cut.
    """

    prefixes: Keys
    below: Whole
    masses: Whole
    whole: bool
    targets: Whole
    total: int
    cuts: Keys
    under: Whole


class Descent:
    """The side of the descent that asks.

    Parameters
    ----------
    is_number : bool, shape (n_columns,): the columns that have quantiles.
    n_bins : most bins of a column, >= 2.
    lightest : weight that is not divided further, such as that of a row.
    """

    def __init__(self, is_number: npt.NDArray[np.bool_], n_bins: int, lightest: int = 0) -> None:
        self._n_bins, self._lightest, self._digit = n_bins, lightest, 0
        none = np.empty(0, dtype=np.int64)
        first, zero = np.zeros(1, dtype=np.uint32), np.zeros(1, dtype=np.int64)
        nothing = np.empty(0, dtype=np.uint32)
        self._columns = [
            _Column(first, zero, zero, True, none, 0, nothing, none)
            if has_quantiles
            else _Column(nothing, none, none, True, none, 0, nothing, none)
            for has_quantiles in is_number.tolist()
        ]

    @property
    def digit(self) -> int:
        """How many digits are known, 0 to 4."""
        return self._digit

    @property
    def masses(self) -> Whole:
        """Weight of the rows that begin with each wanted prefix; int64, shape (n_prefixes,)."""
        return np.concatenate([column.masses for column in self._columns])

    def wanted(self) -> tuple[Keys, Ints]:
        """``prefixes`` and ``offsets`` of ``digit_counts``."""
        sizes = [len(column.prefixes) for column in self._columns]
        offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        return np.concatenate([column.prefixes for column in self._columns]), offsets

    def take(self, counts: Whole) -> None:
        """Go down by a digit.

        Parameters
        ----------
        counts : int64, shape (n_prefixes, 256): those of all tables, added up.
        """
        offsets = self.wanted()[1]
        self._columns = [
            self._down(column, counts[begin:end])
            for column, (begin, end) in zip(self._columns, pairwise(offsets), strict=True)
        ]
        self._digit += 1

    def _down(self, column: _Column, counts: Whole) -> _Column:
        filled = counts > 0
        digits = np.arange(BASE, dtype=np.uint32)
        prefixes = ((column.prefixes[:, None] << np.uint32(DIGIT_BITS)) | digits)[filled]
        below = (column.below[:, None] + np.cumsum(counts, axis=1) - counts)[filled]
        masses = counts[filled]
        total = column.total if self._digit else int(masses.sum())
        targets = column.targets if self._digit else quantiles(total, self._n_bins)
        if column.whole and len(masses) <= self._n_bins:
            done = column.cuts, column.under
            return _Column(prefixes, below, masses, True, targets, total, *done)
        places = np.searchsorted(below, targets, side="right") - 1
        n_digits = self._digit + 1
        is_last = n_digits == N_DIGITS
        settled = is_last | (masses[places] <= self._lightest)
        found = places[settled]
        span = below[found], below[found] + masses[found]
        cuts, under = _nearest(prefixes[found], n_digits, *span, targets[settled], total)
        kept = np.unique(places[~settled])
        left = prefixes[kept], below[kept], masses[kept], False, targets[~settled], total
        cuts = np.concatenate((column.cuts, cuts))
        return _Column(*left, cuts, np.concatenate((column.under, under)))

    def cuts(self) -> Cuts:
        """Cuts at the quantiles, once all digits are known."""
        found = [_edges(column) for column in self._columns]
        edges, offsets = ragged(found)
        minima = np.full(len(found), -np.float32(LARGEST), dtype=np.float32)
        return Cuts(edges, offsets, minima)


def quantiles(total: int, n_bins: int) -> Whole:
    """Weights at which ``n_bins`` bins of the same weight end: the whole part of j total / n_bins
    for j = 1 to n_bins - 1; of nothing none."""
    if not total:
        return np.empty(0, dtype=np.int64)
    whole, rest = divmod(total, n_bins)
    numbers = np.arange(1, n_bins, dtype=np.int64)
    return numbers * whole + numbers * rest // n_bins


def _nearest(
    prefixes: Keys, n_digits: int, below: Whole, above: Whole, targets: Whole, total: int
) -> tuple[Keys, Whole]:
    """Cuts before or behind all that begins with a prefix, nearest to the targets but with rows on
    both sides.

    Parameters
    ----------
    prefixes : uint32, shape (n_targets,), each of ``n_digits`` digits.
    below, above : int64, shape (n_targets,): weight below what begins like this, and up to its end.

    Returns
    -------
    The cuts, and the weight below each.
    """
    rest = np.uint64(DIGIT_BITS * (N_DIGITS - n_digits))
    nearer = targets - below < above - targets
    first, last = below == 0, above == total
    before = (nearer | last) & ~first
    kept = ~(first & last)
    ends = prefixes.astype(np.uint64) + np.where(before, 0, 1).astype(np.uint64)
    return (ends << rest).astype(np.uint32)[kept], np.where(before, below, above)[kept]


def _edges(column: _Column) -> Floats:
    """Upper edges of the bins of a column; the last lies above every value."""
    if column.whole:
        cuts = values_of(column.prefixes)[1:]
    else:
        # Of cuts that part the rows alike the highest, which is a value more often.
        order = np.lexsort((column.cuts, column.under))
        under = column.under[order]
        cuts = values_of(column.cuts[order][np.append(under[1:] != under[:-1], True)[: len(under)]])
        # Not all computers tell what is this near to 0 from it.
        cuts = np.unique(np.where((cuts > 0) & (cuts < _SMALLEST), _SMALLEST, cuts))
    return np.append(cuts, np.float32(LARGEST)).astype(np.float32)
