"""Cuts of the union of several tables: from quantile sketches, or exact from counts.

``Sketch`` summarises a table, ``fuse_sketches`` makes cuts of several. ``Descent`` finds exact
quantiles instead: a float32 maps to a four-digit number in base 256 with the same order. Rows are
first counted by the first digit; then, within each first digit that contains a quantile, by the
second; and so on. After four exchanges the values at the quantiles and the weight below them are
known. A column with at most as many distinct values as bins is resolved completely. Elsewhere a
prefix with a single row is not resolved further: a cut before or after the whole prefix splits the
rows equally well, and the row's value is not disclosed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Flags, Floats, Ints
from fedapp.histograms.bins import (
    Codes,
    Cuts,
    Empty,
    column_groups,
    column_ranges,
    digitise,
    n_threads,
    ragged,
    sum_weights,
)
from fedapp.histograms.fixed_point import Whole
from fedapp.kernels import frozen

ValueKeys = npt.NDArray[np.uint32]  # values as unsigned integers of four digits, in the same order

LARGEST_FLOAT = float(np.finfo(np.float32).max)
N_DIGITS, BASE, DIGIT_BITS = 4, 256, 8
_SIGN = np.uint32(1 << 31)
_SMALLEST = np.finfo(np.float32).tiny


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """Summary of a table's bins; of a column of categories only the maximum, its highest code."""

    representatives: Floats  # (n_bins,): a value of each bin, ascending; the first is the minimum
    masses: Floats  # (n_bins,), >= 0: sum of the sample weights in the bin
    offsets: Ints  # (n_columns + 1,): bins of column f are offsets[f] to offsets[f+1], or none
    maxima: Floats  # (n_columns,): maximum of the column, NaN if it has no value

    def column(self, column_id: int) -> tuple[Floats, Floats]:
        """Representatives and masses of one column."""
        bins = slice(self.offsets[column_id], self.offsets[column_id + 1])
        return self.representatives[bins], self.masses[bins]

    def with_categories(self, categories: Ints) -> Sketch:
        """Add a bin for each category in use, its mass 0: it is not disclosed."""
        used = used_categories([self], categories)
        columns = [
            (np.arange(used[column_id], dtype=np.float32), np.zeros(used[column_id], np.float32))
            if width
            else self.column(column_id)
            for column_id, width in enumerate(categories.tolist())
        ]
        points, offsets = ragged([representatives for representatives, _ in columns])
        return Sketch(points, ragged([mass for _, mass in columns])[0], offsets, self.maxima)


def used_categories(sketches: Sequence[Sketch], categories: Ints) -> Ints:
    """Number of categories of each column, up to the highest code in any of the tables.

    int64, shape (n_columns,), 0 for numeric columns. XGBoost counts like that, so a column of which
    few categories are in use is split as one of few categories.
    """
    highest = np.max([np.nan_to_num(sketch.maxima, nan=-1) for sketch in sketches], axis=0)
    return np.where(categories > 0, highest.astype(np.float64) + 1, 0).astype(np.int64)


def quantile_cuts(
    values: Floats, weights: Floats | None, max_bin: int, categories: Ints | None = None
) -> Cuts:
    """XGBoost's cuts for ``tree_method="hist"`` with this ``max_bin``, >= 2.

    A column's cuts depend only on that column, so groups of columns are cut one after the other.
    Rank error: a bin without ties holds at most ``1/max_bin + 1/(4 max_bin)`` of the weight
    (XGBoost sketches at ``eps = 1/(8 max_bin)``).

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns), NaN where missing.
    weights : float32, shape (n_rows,).
    categories : as in ``Cuts``: values of these columns do not count; None if all are numeric.
    """
    import xgboost

    rows = {}
    if weights is not None and (weights != 1).any():  # XGBoost copies them, and 1 is its default
        # It ignores weights without labels; the labels do not enter the sketch.
        rows = {"weight": weights, "label": np.zeros(len(values), dtype=np.float32)}
    edges, widths, minima = list[Floats](), list[Ints](), list[Floats]()
    for group in column_groups(values.shape):
        numbers = values[:, group]
        if categories is not None and categories[group].any():
            numbers = np.where(categories[group] > 0, np.float32(np.nan), numbers)
        matrix = xgboost.QuantileDMatrix(
            numbers, max_bin=max_bin, nthread=n_threads(numbers.shape), **rows
        )
        indptr, points = matrix.get_quantile_cut()
        indptr = indptr.astype(np.int64)
        # The first point of each column is its minimum, not a cut.
        is_minimum = np.zeros(len(points), dtype=bool)
        is_minimum[indptr[:-1]] = True
        edges.append(points[~is_minimum])
        minima.append(points[is_minimum])
        widths.append(np.diff(indptr) - 1)
    offsets = np.concatenate([[0], *widths]).cumsum()
    return Cuts(np.concatenate(edges), offsets, np.concatenate(minima))


def sketch_and_code(
    values: Floats,
    weights: Floats,
    max_bin: int,
    categories: Ints | None = None,
    empty: Empty = np.empty,
) -> tuple[Sketch, Codes, int]:
    """Sketch a table by quantile bins, and code its values by these bins.

    Source: Ong et al. 2020 (PAX), Algorithm 1, line 7.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns); NaN is missing.
    weights : float32, shape (n_rows,), >= 0.
    categories : as in ``Cuts``; None if all columns are numeric.
    empty : makes the array of codes.

    Returns
    -------
    sketch : of the table.
    codes, missing_code : as from ``digitise``, by the cuts of the sketch; columns of categories are
        all missing.
    """
    n_categories = np.zeros(values.shape[1], dtype=np.int64) if categories is None else categories
    cuts = quantile_cuts(values, weights, max_bin, n_categories)
    # Rows without weight are ignored, as in XGBoost's sketch.
    lows, maxima = column_ranges(*frozen(values, weights))
    lows[n_categories > 0] = np.nan
    # The lower edge of a bin is a value of the column: XGBoost cuts at values.
    lowest = [
        np.empty(0, dtype=np.float32)
        if np.isnan(low)
        else np.unique(np.concatenate(([low], cuts.column(column_id)[:-1]))).astype(np.float32)
        for column_id, low in enumerate(lows)
    ]
    points, offsets = ragged(lowest)
    without_masses = Sketch(points, np.zeros(len(points), dtype=np.float32), offsets, maxima)
    codes, missing_code = digitise(values, sketch_cuts(without_masses), empty)
    masses = np.zeros(len(points))
    sum_weights(codes, missing_code, weights, offsets[:-1], masses)
    maxima = np.where(n_categories > 0, _highest_codes(values, n_categories), maxima)
    return Sketch(points, masses.astype(np.float32), offsets, maxima), codes, missing_code


def _highest_codes(values: Floats, categories: Ints) -> Floats:
    """Highest code of each column of categories, NaN where it has no value."""
    highest = np.full(len(categories), np.nan, dtype=np.float32)
    for column_id in np.flatnonzero(categories):
        column = values[:, column_id]
        highest[column_id] = column[~np.isnan(column)].max(initial=-1)
    return np.where(highest < 0, np.float32(np.nan), highest)


def sketch_cuts(sketch: Sketch) -> Cuts:
    """The cuts of a sketch: a bin begins at its representative."""
    n_columns = len(sketch.maxima)
    edges = [
        np.append(sketch.column(column_id)[0][1:], upper_edge(sketch.maxima[column_id]))
        if len(sketch.column(column_id)[0])
        else np.empty(0, dtype=np.float32)
        for column_id in range(n_columns)
    ]
    flat, offsets = ragged(edges)
    return Cuts(flat, offsets, np.full(n_columns, -np.inf, dtype=np.float32))


def surrogates(codes: Codes, missing_code: int, representatives: Floats, offsets: Ints) -> Floats:
    """Replace codes of bins by their representatives; NaN where a value is missing.

    Parameters
    ----------
    codes : uint8 or uint16, shape (n_rows, n_columns).
    missing_code : the code of a missing value, or -1.
    representatives, offsets : as in ``Sketch``.
    """
    if not len(representatives):
        return np.full(codes.shape, np.nan, dtype=np.float32)
    present = codes != missing_code
    places = offsets[:-1] + np.where(present, codes, 0).astype(np.int64)
    values = representatives[np.minimum(places, len(representatives) - 1)]
    return np.where(present, values, np.float32(np.nan))


def fuse_sketches(sketches: Sequence[Sketch], n_bins: int) -> Cuts:
    """Cuts of the union of several tables, at most ``n_bins`` bins per column.

    A column with at most ``n_bins`` distinct representatives is cut at all of them. Otherwise the
    cuts are the representatives nearest to the ``n_bins``-quantiles of the merged masses, so no bin
    has more than ``1/n_bins`` of the mass plus twice the largest mass between two neighbouring
    representatives.

    Source: Ong et al. 2020 (PAX), Algorithm 1, lines 21 to 26.
    """
    n_columns = len(sketches[0].maxima)
    merged = [_fuse_column(sketches, column_id, n_bins) for column_id in range(n_columns)]
    edges, offsets = ragged([edges for edges, _ in merged])
    return Cuts(edges, offsets, np.array([low for _, low in merged], dtype=np.float32))


def _fuse_column(
    sketches: Sequence[Sketch], column_id: int, n_bins: int
) -> tuple[Floats, np.float32]:
    """Upper edges of one column, and a value below all its values."""
    columns = [sketch.column(column_id) for sketch in sketches]
    points = np.concatenate([representatives for representatives, _ in columns])
    masses = np.concatenate([mass for _, mass in columns])
    if not len(points):
        return np.array([upper_edge(np.float32(0))], dtype=np.float32), -upper_edge(np.float32(0))
    points, places = np.unique(points, return_inverse=True)
    cut_points = prune(np.bincount(places, weights=masses).astype(np.float64), n_bins)
    top = np.nanmax([sketch.maxima[column_id] for sketch in sketches])
    return np.append(points[cut_points], upper_edge(np.float32(top))), -upper_edge(-points[0])


def prune(masses: Doubles, n_bins: int) -> Ints:
    """Points at which to cut, so that ``n_bins`` bins have about the same mass.

    ``masses[i]`` is the weight from point i up to the next. Returns int64, ascending, at most
    ``n_bins - 1`` points; never point 0, which has nothing below it.
    """
    n_points = len(masses)
    if n_points <= n_bins:
        return np.arange(1, n_points)
    below = np.cumsum(masses)[:-1]  # below[i] is the mass under point i + 1
    targets = np.arange(1, n_bins) * (masses.sum() / n_bins)
    right = np.minimum(np.searchsorted(below, targets), n_points - 2)
    left = np.maximum(right - 1, 0)
    nearest = np.where(targets - below[left] < below[right] - targets, left, right)
    return np.unique(nearest) + 1


def upper_edge(value: np.float32) -> np.float32:
    """A float32 above ``value``: the last edge that XGBoost gives a column (summed in float64)."""
    above = float(value) + (abs(float(value)) + float(np.float32(1e-5)))
    return np.float32(min(above, LARGEST_FLOAT))


def bin_map(sketch: Sketch, cuts: Cuts) -> Ints:
    """Global bin of each bin of a sketch, by its representative, in the layout of ``cuts``."""
    return np.concatenate(
        [
            cuts.offsets[column_id]
            + np.searchsorted(cuts.column(column_id), sketch.column(column_id)[0], side="right")
            for column_id in range(cuts.n_columns)
        ]
    ).astype(np.int64)


# Exact quantiles


def ordered(values: Floats) -> ValueKeys:
    """Unsigned integers in the order of the values; NaN is not allowed."""
    bits = np.ascontiguousarray(values + np.float32(0)).view(np.uint32)  # -0.0 becomes 0.0
    return np.where(bits & _SIGN, ~bits, bits | _SIGN).astype(np.uint32)


def values_of(keys: ValueKeys) -> Floats:
    """Undo ``ordered``."""
    bits = np.where(keys & _SIGN, keys & ~_SIGN, ~keys).astype(np.uint32)
    return bits.view(np.float32)


def digit_counts(
    values: Floats, weights: Whole, prefixes: ValueKeys, offsets: Ints, digit: int
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

    prefixes: ValueKeys  # uint32, ascending: first digits of the values looked at
    below: Whole  # weight below each prefix
    masses: Whole  # weight of the rows with each prefix
    whole: bool  # whether the prefixes cover all values of the column
    targets: Whole  # weights at which to cut, as far as not yet resolved
    total: int  # weight of all rows with a value
    cuts: ValueKeys  # resolved cuts, as ordered integers
    under: Whole  # weight below each cut
    # values at resolved targets; of a prefix that is not resolved further its lowest
    points: ValueKeys


class Descent:
    """Quantile search of the requesting side: which prefixes to count next, and the cuts.

    Parameters
    ----------
    is_number : bool, shape (n_columns,): only numeric columns have quantiles.
    n_bins : maximum bins of a column, >= 2.
    lightest : a prefix of at most this weight is not resolved further.
    percents : where to cut, ascending, ``n_bins - 1``; empty: at equal weights.
    """

    def __init__(
        self,
        is_number: Flags,
        n_bins: int,
        lightest: int = 0,
        percents: Sequence[int] = (),
    ) -> None:
        self._n_bins = n_bins
        self._shares = np.array(percents or range(1, n_bins)), 100 if percents else n_bins
        self._lightest = lightest
        self.digit = 0  # number of digits counted so far, 0 to 4
        no_weights, no_values = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint32)
        self._columns = [
            _Column(
                prefixes=np.zeros(int(has_quantiles), dtype=np.uint32),
                below=np.zeros(int(has_quantiles), dtype=np.int64),
                masses=np.zeros(int(has_quantiles), dtype=np.int64),
                whole=True,
                targets=no_weights,
                total=0,
                cuts=no_values,
                under=no_weights,
                points=no_values,
            )
            for has_quantiles in is_number.tolist()
        ]

    @property
    def masses(self) -> Whole:
        """Weight of the rows with each requested prefix; int64, shape (n_prefixes,)."""
        return np.concatenate([column.masses for column in self._columns])

    def wanted(self) -> tuple[ValueKeys, Ints]:
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
        self.digit += 1

    def _down(self, column: _Column, counts: Whole) -> _Column:
        filled = counts > 0
        digits = np.arange(BASE, dtype=np.uint32)
        prefixes = ((column.prefixes[:, None] << np.uint32(DIGIT_BITS)) | digits)[filled]
        below = (column.below[:, None] + np.cumsum(counts, axis=1) - counts)[filled]
        masses = counts[filled]
        total = column.total if self.digit else int(masses.sum())
        targets = column.targets if self.digit else quantile_ranks(total, *self._shares)
        if column.whole and len(masses) <= self._n_bins:
            return replace(
                column, prefixes=prefixes, below=below, masses=masses, targets=targets, total=total
            )
        # Which prefix contains each target. Only these are counted by the next digit.
        prefix_ids = np.searchsorted(below, targets, side="right") - 1
        n_digits = self.digit + 1
        is_last = n_digits == N_DIGITS
        is_resolved = is_last | (masses[prefix_ids] <= self._lightest)
        resolved = prefix_ids[is_resolved]
        starts, resolved_targets = below[resolved], targets[is_resolved]
        ends = starts + masses[resolved]
        cuts, under = _nearest(prefixes[resolved], n_digits, starts, ends, resolved_targets, total)
        ids = np.unique(prefix_ids[~is_resolved])
        points = prefixes[resolved] << np.uint32(DIGIT_BITS * (N_DIGITS - n_digits))
        cuts, points = (
            np.concatenate(two) for two in ((column.cuts, cuts), (column.points, points))
        )
        return _Column(
            prefixes=prefixes[ids],
            below=below[ids],
            masses=masses[ids],
            whole=False,
            targets=targets[~is_resolved],
            total=total,
            cuts=cuts,
            under=np.concatenate((column.under, under)),
            points=points,
        )

    @property
    def is_whole(self) -> Flags:
        """Which columns are resolved completely: each bin has one value only."""
        return np.array([column.whole for column in self._columns])

    def points(self) -> list[Floats]:
        """Values at each column's targets, once all digits are counted; empty without values."""
        return [
            values_of(
                column.prefixes[np.searchsorted(column.below, column.targets, side="right") - 1]
                if column.whole
                else np.sort(column.points)
            )
            for column in self._columns
        ]

    def last_column(self) -> tuple[Floats, Whole]:
        """All values of the last column and their weights, or its cuts, which weigh alike."""
        column = self._columns[-1]
        if column.whole:
            return values_of(column.prefixes), column.masses
        cuts = _edges(column)[:-1]
        return cuts, np.ones(len(cuts), dtype=np.int64)

    def cuts(self) -> Cuts:
        """Cuts at the quantiles, once all digits are counted."""
        edges, offsets = ragged([_edges(column) for column in self._columns])
        return Cuts(edges, offsets, np.full(len(self._columns), -LARGEST_FLOAT, dtype=np.float32))


def quantile_ranks(total: int, numbers: Whole, parts: int) -> Whole:
    """Integer parts of j total / parts, j being each of the numbers; empty for a total of 0."""
    whole, remainder = divmod(total, parts)
    return numbers * whole + numbers * remainder // parts if total else numbers[:0]


def _nearest(
    prefixes: ValueKeys, n_digits: int, below: Whole, above: Whole, targets: Whole, total: int
) -> tuple[ValueKeys, Whole]:
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
    cuts = cuts[np.isfinite(cuts)]  # with noise, counts may be where no value can
    return np.append(cuts, np.float32(LARGEST_FLOAT)).astype(np.float32)


# Merged bins
