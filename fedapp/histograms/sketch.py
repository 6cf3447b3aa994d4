"""Quantile sketches of one table, and their fusion into cuts of all tables."""

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


def quantile_cuts(values: Floats, weights: Floats | None, max_bin: int) -> Cuts:
    """XGBoost's cuts for ``tree_method="hist"`` with this ``max_bin``, >= 2.

    A column's cuts depend only on that column. Rank error: a bin without ties holds at most
    ``1/max_bin + 1/(4 max_bin)`` of the weight (XGBoost sketches at ``eps = 1/(8 max_bin)``).
    ``values`` is float32, shape (n_rows, n_columns), NaN where missing; ``weights`` (n_rows,).
    """
    import xgboost

    # XGBoost ignores weights without labels; the labels do not enter the sketch.
    matrix = xgboost.QuantileDMatrix(
        values, label=np.zeros(len(values), dtype=np.float32), weight=weights, max_bin=max_bin
    )
    indptr, points = matrix.get_quantile_cut()
    indptr = indptr.astype(np.int64)
    # The first point of each column is its minimum, not a cut.
    is_minimum = np.zeros(len(points), dtype=bool)
    is_minimum[indptr[:-1]] = True
    offsets = indptr - np.arange(len(indptr), dtype=np.int64)
    return Cuts(points[~is_minimum], offsets, points[is_minimum])


def sketch_and_code(
    values: Floats, weights: Floats, max_bin: int, categories: Ints | None = None
) -> tuple[Sketch, Codes, int]:
    """Sketch a table by quantile bins, and code its values by these bins.

    Source: Ong et al. 2020 (PAX), Algorithm 1, line 7.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns); NaN is missing.
    weights : float32, shape (n_rows,), >= 0.
    categories : as in ``Cuts``; None if all columns are numeric.

    Returns
    -------
    sketch : of the table.
    codes, missing_code : as from ``digitise``, by the cuts of the sketch; columns of categories are
        all missing.
    """
    n_categories = np.zeros(values.shape[1], dtype=np.int64) if categories is None else categories
    highest = _highest_codes(values, n_categories)
    values = numbers_alone(values, n_categories)
    cuts = quantile_cuts(values, weights, max_bin)
    # Rows without weight are ignored, as in XGBoost's sketch.
    lows, maxima = column_ranges(*frozen(values, weights))
    # The lower edge of a bin is a value of the column: XGBoost cuts at values.
    lowest = [
        np.empty(0, dtype=np.float32)
        if np.isnan(low)
        else np.unique(np.concatenate(([low], cuts.column(column_id)[:-1]))).astype(np.float32)
        for column_id, low in enumerate(lows)
    ]
    points, offsets = ragged(lowest)
    without_masses = Sketch(points, np.zeros(len(points), dtype=np.float32), offsets, maxima)
    codes, missing_code = digitise(values, own_cuts(without_masses))
    masses = np.zeros(len(points))
    sum_weights(codes, missing_code, weights, offsets[:-1], masses)
    maxima = np.where(n_categories > 0, highest, maxima)
    return Sketch(points, masses.astype(np.float32), offsets, maxima), codes, missing_code


def _highest_codes(values: Floats, categories: Ints) -> Floats:
    """Highest code of each column of categories, NaN where it has no value."""
    highest = np.full(len(categories), np.nan, dtype=np.float32)
    for column_id in np.flatnonzero(categories):
        column = values[:, column_id]
        highest[column_id] = column[~np.isnan(column)].max(initial=-1)
    return np.where(highest < 0, np.float32(np.nan), highest)


def own_cuts(sketch: Sketch) -> Cuts:
    """The cuts of a sketch: a bin begins at its representative."""
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
        return np.array([beyond(np.float32(0))], dtype=np.float32), -beyond(np.float32(0))
    points, places = np.unique(points, return_inverse=True)
    cut_points = prune(np.bincount(places, weights=masses).astype(np.float64), n_bins)
    top = np.nanmax([sketch.maxima[column_id] for sketch in sketches])
    return np.append(points[cut_points], beyond(np.float32(top))), -beyond(-points[0])


def prune(masses: npt.NDArray[np.float64], n_bins: int) -> npt.NDArray[np.int64]:
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


def beyond(value: np.float32) -> np.float32:
    """A float32 above ``value``: the last edge that XGBoost gives a column (summed in float64)."""
    above = float(value) + (abs(float(value)) + float(np.float32(1e-5)))
    return np.float32(min(above, LARGEST))


def bin_map(sketch: Sketch, cuts: Cuts) -> Ints:
    """Global bin of each bin of a sketch, by its representative, in the layout of ``cuts``."""
    return np.concatenate(
        [
            cuts.offsets[column_id]
            + np.searchsorted(cuts.column(column_id), sketch.column(column_id)[0], side="right")
            for column_id in range(cuts.n_columns)
        ]
    ).astype(np.int64)
