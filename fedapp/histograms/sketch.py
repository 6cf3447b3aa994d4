"""Quantile sketches of one table, and their fusion into the cuts of all tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedapp.histograms.bins import Codes, Cuts, Floats, Ints, digitise, numbers_alone, ragged
from fedapp.histograms.search import column_ranges, sum_weights
from fedapp.kernels import frozen

LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """What a table's columns look like at a stated resolution: one representative a bin.

    Parameters
    ----------
    representatives : float32, shape (n_bins,), ascending within a column. A value of its bin that
        stands for all of them; the first of a column is the column's smallest value.
    masses : float32, shape (n_bins,), >= 0: sum of the sample weights in the bin.
    offsets : int64, shape (n_columns + 1,): bins of column f are ``offsets[f]`` to
        ``offsets[f+1]``. A column without a single value has no bins.
    maxima : float32, shape (n_columns,): the column's largest value, NaN where it has none.

    A column of categories has no bins, and its maximum is the highest code.
    """

    representatives: Floats
    masses: Floats
    offsets: Ints
    maxima: Floats

    def column(self, column_id: int) -> tuple[Floats, Floats]:
        """Representatives and masses of one column."""
        own = slice(self.offsets[column_id], self.offsets[column_id + 1])
        return self.representatives[own], self.masses[own]

    def with_categories(self, categories: Ints) -> Sketch:
        """With a bin for each category up to the highest that occurs, of the columns that have any
        and are empty here: its code stands for it, and its mass is not told.

        Parameters
        ----------
        categories : as in ``Cuts``, of every column.
        """
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
    """How many categories of each column there are up to the highest that occurs in any of some
    tables; int64, shape (n_columns,), 0 for columns of numbers.

    XGBoost counts like that, and so a column of few categories in use is split as one of few.

    Parameters
    ----------
    categories : as in ``Cuts``, of every column.
    """
    highest = np.max([np.nan_to_num(sketch.maxima, nan=-1) for sketch in sketches], axis=0)
    return np.where(categories > 0, highest.astype(np.float64) + 1, 0).astype(np.int64)


def quantile_cuts(values: Floats, weights: Floats | None, max_bin: int) -> Cuts:
    """XGBoost's own cuts: of ``tree_method="hist"`` with this ``max_bin``.

    A column's cuts depend on that column alone. Rank error: a bin without ties holds at most
    ``1/max_bin + 1/(4 max_bin)`` of the weight (XGBoost sketches at ``eps = 1/(8 max_bin)``).

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns); NaN is missing.
    weights : float32, shape (n_rows,), or None.
    max_bin : most bins a column may have, >= 2.
    """
    import xgboost

    # Labels are there because XGBoost ignores weights without them; they do not enter the sketch.
    matrix = xgboost.QuantileDMatrix(
        values, label=np.zeros(len(values), dtype=np.float32), weight=weights, max_bin=max_bin
    )
    indptr, points = matrix.get_quantile_cut()
    indptr = indptr.astype(np.int64)
    # Per column, the first point is a minimum and no cut.
    is_minimum = np.zeros(len(points), dtype=bool)
    is_minimum[indptr[:-1]] = True
    offsets = indptr - np.arange(len(indptr), dtype=np.int64)
    return Cuts(points[~is_minimum], offsets, points[is_minimum])


def sketch_and_code(
    values: Floats, weights: Floats, max_bin: int, categories: Ints | None = None
) -> tuple[Sketch, Codes, int]:
    """Summarise a table by the quantile bins of its columns; and the number of each value's bin.

    Source: Ong et al. 2020 (PAX), Algorithm 1, line 7.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns); NaN is missing.
    weights : float32, shape (n_rows,), >= 0.
    max_bin : most bins a column may have, >= 2.
    categories : as in ``Cuts``; None: all columns hold numbers.

    Returns
    -------
    sketch : of the table.
    codes, missing_code : as from ``digitise``, by the cuts of the sketch; columns of categories are
        missing throughout.
    """
    by_category = np.zeros(values.shape[1], dtype=np.int64) if categories is None else categories
    highest = _highest_codes(values, by_category)
    values = numbers_alone(values, by_category)
    cuts = quantile_cuts(values, weights, max_bin)
    # Rows without weight are none, as in XGBoost's sketch.
    lows, maxima = column_ranges(*frozen(values, weights))
    # The lowest edge of a bin is a value of the column: XGBoost cuts at values.
    lowest = [
        np.empty(0, dtype=np.float32)
        if np.isnan(low)
        else np.unique(np.concatenate(([low], cuts.column(column_id)[:-1]))).astype(np.float32)
        for column_id, low in enumerate(lows)
    ]
    points, offsets = ragged(lowest)
    found = Sketch(points, np.zeros(len(points), dtype=np.float32), offsets, maxima)
    codes, missing_code = digitise(values, own_cuts(found))
    masses = np.zeros(len(points))
    sum_weights(codes, missing_code, weights, offsets[:-1], masses)
    maxima = np.where(by_category > 0, highest, maxima)
    return Sketch(points, masses.astype(np.float32), offsets, maxima), codes, missing_code


def _highest_codes(values: Floats, categories: Ints) -> Floats:
    """Highest code of each column of categories, NaN where it has no value."""
    highest = np.full(len(categories), np.nan, dtype=np.float32)
    for column_id in np.flatnonzero(categories):
        column = values[:, column_id]
        highest[column_id] = column[~np.isnan(column)].max(initial=-1)
    return np.where(highest < 0, np.float32(np.nan), highest)


def own_cuts(sketch: Sketch) -> Cuts:
    """The cuts a sketch was taken at: a bin begins at its representative."""
    n_columns = len(sketch.maxima)
    edges = [
        np.append(sketch.column(column_id)[0][1:], beyond(sketch.maxima[column_id]))
        if len(sketch.column(column_id)[0])
        else np.empty(0, dtype=np.float32)
        for column_id in range(n_columns)
    ]
    flat, offsets = ragged(edges)
    return Cuts(flat, offsets, np.full(n_columns, -np.inf, dtype=np.float32))


def surrogates(codes: Codes, missing_code: int, representatives: Floats, offsets: Ints) -> Floats:
    """The value that stands for each bin, in place of its number.

    Parameters
    ----------
    codes : uint8 or uint16, shape (n_rows, n_columns).
    missing_code : the code of a missing value, or -1.
    representatives : float32, shape (n_bins,), columns one after the other.
    offsets : int64, shape (n_columns + 1,).

    Returns
    -------
    float32, shape (n_rows, n_columns); NaN where a value is missing.
    """
    if not len(representatives):
        return np.full(codes.shape, np.nan, dtype=np.float32)
    present = codes != missing_code
    places = offsets[:-1] + np.where(present, codes, 0).astype(np.int64)
    known = representatives[np.minimum(places, len(representatives) - 1)]
    return np.where(present, known, np.float32(np.nan))


def fuse_sketches(sketches: Sequence[Sketch], n_bins: int) -> Cuts:
    """Cuts of the union of several tables, at most ``n_bins`` bins a column.

    A column whose tables have no more than ``n_bins`` different representatives is cut at every one
    of them. Otherwise the cuts are those nearest to the ``n_bins``-quantiles of the merged masses,
    so no bin holds more than ``1/n_bins`` of the mass and twice the largest mass between two
    neighbouring representatives.

    Parameters
    ----------
    sketches : one a party, all of the same columns.
    n_bins : >= 2.

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
        return np.array([beyond(np.float32(0))], dtype=np.float32), -beyond(np.float32(0))
    points, places = np.unique(points, return_inverse=True)
    kept = prune(np.bincount(places, weights=masses).astype(np.float64), n_bins)
    top = np.nanmax([sketch.maxima[column_id] for sketch in sketches])
    return np.append(points[kept], beyond(np.float32(top))), -beyond(-points[0])


def prune(masses: npt.NDArray[np.float64], n_bins: int) -> npt.NDArray[np.int64]:
    """Which of the points 1, 2, ... to cut at, so that ``n_bins`` bins have about the same mass.

    Parameters
    ----------
    masses : float64, shape (n_points,): weight of the values at and above each point, up to the
        next.
    n_bins : >= 2.

    Returns
    -------
    int64, ascending, at most ``n_bins - 1``; point 0 is never a cut, it has nothing below it.
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


def beyond(value: np.float32) -> np.float32:
    """A float32 above ``value``, the one XGBoost ends a column's cuts with (summed in float64)."""
    above = float(value) + (abs(float(value)) + float(np.float32(1e-5)))
    return np.float32(min(above, LARGEST))


def bin_map(sketch: Sketch, cuts: Cuts) -> Ints:
    """Global bin of each bin of a sketch, by its representative.

    Returns
    -------
    int64, shape (n_bins of the sketch,): places in the flat layout of ``cuts``.
    """
    return np.concatenate(
        [
            cuts.offsets[column_id]
            + np.searchsorted(cuts.column(column_id), sketch.column(column_id)[0], side="right")
            for column_id in range(cuts.n_columns)
        ]
    ).astype(np.int64)
