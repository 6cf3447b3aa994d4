"""Exact quantiles of the union of several tables, from counts over all of them.

A float32 maps to a four-digit number in base 256 with the same order. Rows are first counted by the
first digit; then, within each first digit that contains a quantile, by the second; and so on. After
four exchanges the values at the quantiles and the weight below them are known.

A column with at most as many distinct values as bins is resolved completely. Elsewhere a prefix
with a single row is not resolved further: a cut before or after the whole prefix splits the rows
equally well, and the row's value is not disclosed. Counts are of weights, summed over all parties.
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
    """Unsigned integers in the order of the values; NaN is not allowed."""
    bits = np.ascontiguousarray(values + np.float32(0)).view(np.uint32)  # -0.0 becomes 0.0
    return np.where(bits & _SIGN, ~bits, bits | _SIGN).astype(np.uint32)


def values_of(keys: Keys) -> Floats:
    """Undo ``ordered``."""
    bits = np.where(keys & _SIGN, keys & ~_SIGN, ~keys).astype(np.uint32)
    return bits.view(np.float32)


def digit_counts(
    values: Floats, weights: Whole, prefixes: Keys, offsets: Ints, digit: int
) -> Whole:
    """Weights of the rows by their next digit; int64, shape (n_prefixes, 256).

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns); NaN is missing.
    weights : int64, shape (n_rows,), >= 0.
    prefixes : uint32, shape (n_prefixes,), ascending within a column: rows are counted if their
        first digits are one of these.
    offsets : int64, shape (n_columns + 1,): prefixes of column f are ``offsets[f]`` to
        ``offsets[f+1]``.
    digit : number of digits of a prefix, 0 to 3.
    """
    counts = np.zeros(len(prefixes) * BASE, dtype=np.int64)
    for column, (begin, end) in enumerate(pairwise(offsets)):
        column_prefixes = prefixes[begin:end]
        present = ~np.isnan(values[:, column]) & (weights > 0)
        if not len(column_prefixes) or not present.any():
            continue
        keys = ordered(values[present, column]).astype(np.uint64)
        heads = (keys >> np.uint64(DIGIT_BITS * (N_DIGITS - digit))).astype(np.uint32)
        places = np.minimum(np.searchsorted(column_prefixes, heads), len(column_prefixes) - 1)
        is_counted = column_prefixes[places] == heads
        digits = (keys >> np.uint64(DIGIT_BITS * (N_DIGITS - 1 - digit))).astype(np.int64) % BASE
        np.add.at(
            counts, ((begin + places) * BASE + digits)[is_counted], weights[present][is_counted]
        )
    return counts.reshape(-1, BASE)


@dataclass(slots=True, eq=False)
class _Column:
    """State of the descent into one column; all weights are of the union of the tables."""

    prefixes: Keys  # uint32, ascending: first digits of the values looked at
    below: Whole  # weight below each prefix
    masses: Whole  # weight of the rows with each prefix
    whole: bool  # whether the prefixes cover all values of the column
    targets: Whole  # weights at which to cut, as far as not yet resolved
    total: int  # weight of all rows with a value
    cuts: Keys  # resolved cuts, as ordered integers
    under: Whole  # weight below each cut


class Descent:
    """Quantile search of the requesting side: which prefixes to count next, and the cuts.

    Parameters
    ----------
    is_number : bool, shape (n_columns,): only numeric columns have quantiles.
    n_bins : maximum bins of a column, >= 2.
    lightest : a prefix of at most this weight is not resolved further.
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
        """Number of known digits, 0 to 4."""
        return self._digit

    @property
    def masses(self) -> Whole:
        """Weight of the rows with each requested prefix; int64, shape (n_prefixes,)."""
        return np.concatenate([column.masses for column in self._columns])

    def wanted(self) -> tuple[Keys, Ints]:
        """``prefixes`` and ``offsets`` for the next ``digit_counts``."""
        sizes = [len(column.prefixes) for column in self._columns]
        offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        return np.concatenate([column.prefixes for column in self._columns]), offsets

    def take(self, counts: Whole) -> None:
        """Continue with the next digit, from the tables' ``digit_counts``, added up."""
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
        # Which prefix contains each target. Only these are counted by the next digit.
        prefix_ids = np.searchsorted(below, targets, side="right") - 1
        n_digits = self._digit + 1
        is_last = n_digits == N_DIGITS
        is_resolved = is_last | (masses[prefix_ids] <= self._lightest)
        resolved = prefix_ids[is_resolved]
        span = below[resolved], below[resolved] + masses[resolved]
        cuts, under = _nearest(prefixes[resolved], n_digits, *span, targets[is_resolved], total)
        ids = np.unique(prefix_ids[~is_resolved])
        unresolved = prefixes[ids], below[ids], masses[ids], False, targets[~is_resolved], total
        cuts = np.concatenate((column.cuts, cuts))
        return _Column(*unresolved, cuts, np.concatenate((column.under, under)))

    def cuts(self) -> Cuts:
        """Cuts at the quantiles, once all digits are known."""
        columns = [_edges(column) for column in self._columns]
        edges, offsets = ragged(columns)
        minima = np.full(len(columns), -np.float32(LARGEST), dtype=np.float32)
        return Cuts(edges, offsets, minima)


def quantiles(total: int, n_bins: int) -> Whole:
    """Integer parts of j total / n_bins, j = 1 to n_bins - 1; empty for a total of 0."""
    if not total:
        return np.empty(0, dtype=np.int64)
    whole, remainder = divmod(total, n_bins)
    numbers = np.arange(1, n_bins, dtype=np.int64)
    return numbers * whole + numbers * remainder // n_bins


def _nearest(
    prefixes: Keys, n_digits: int, below: Whole, above: Whole, targets: Whole, total: int
) -> tuple[Keys, Whole]:
    """Cuts before or after a whole prefix, nearest to the targets, and the weight below each."""
    shift = np.uint64(DIGIT_BITS * (N_DIGITS - n_digits))
    # ``below`` is the weight below the prefix, ``above`` the weight up to its end. A cut must have
    # rows on both sides.
    nearer = targets - below < above - targets
    first, last = below == 0, above == total
    before = (nearer | last) & ~first
    is_cut = ~(first & last)
    ends = prefixes.astype(np.uint64) + np.where(before, 0, 1).astype(np.uint64)
    return (ends << shift).astype(np.uint32)[is_cut], np.where(before, below, above)[is_cut]


def _edges(column: _Column) -> Floats:
    """Upper edges of the bins of a column; the last is above every value."""
    if column.whole:
        cuts = values_of(column.prefixes)[1:]
    else:
        # Of cuts with the same rows below the highest: more often it is a value of the column.
        order = np.lexsort((column.cuts, column.under))
        under = column.under[order]
        cuts = values_of(column.cuts[order][np.append(under[1:] != under[:-1], True)[: len(under)]])
        # Some processors flush subnormal numbers to 0.
        cuts = np.unique(np.where((cuts > 0) & (cuts < _SMALLEST), _SMALLEST, cuts))
    return np.append(cuts, np.float32(LARGEST)).astype(np.float32)
