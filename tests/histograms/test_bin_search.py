"""Bins found by a search without branches, and sums by bin, against numpy's."""

import numpy as np
import pytest

from fedapp.histograms import bins
from fedapp.histograms.bins import Cuts, digitise, ragged
from fedapp.histograms.sketch import sketch_and_code, sketch_cuts

RNG = np.random.default_rng(3)


def some_rows(n_rows, n_columns):
    values = np.round(4 * RNG.normal(size=(n_rows, n_columns))).astype(np.float32)
    values[RNG.random(values.shape) < 0.2] = np.nan
    values[0, 0] = np.inf
    return values


@pytest.mark.parametrize("n_edges", [0, 1, 2, 3, 7, 8, 255])
def test_a_search_tree_counts_the_edges_that_are_not_above(n_edges):
    edges = np.unique(RNG.normal(size=n_edges).astype(np.float32))
    values = np.concatenate((edges, RNG.normal(size=50), [np.inf, -np.inf])).astype(np.float32)
    codes = np.empty((len(values), 1), dtype=np.uint16)
    bins.find_bins(values[:, None], [edges], np.zeros(1, dtype=np.int64), -1, codes)
    np.testing.assert_array_equal(codes[:, 0], np.searchsorted(edges, values, side="right"))


def test_a_code_beyond_those_of_a_columns_categories_is_missing():
    values = np.array([-1, 0, 1, 2, 3, np.nan], dtype=np.float32)[:, None]
    edges, limits = np.array([1, 2], dtype=np.float32), np.array([3])
    codes = np.empty((len(values), 1), dtype=np.uint16)
    bins.find_bins(values, [edges], limits, 999, codes)
    assert codes[:, 0].tolist() == [999, 0, 1, 2, 999, 999]
    assert [bins.any_missing(values[row : row + 1], limits) for row in (2, 3, 4)] == [0, 0, 1]


@pytest.mark.parametrize("fewest_cells", [1, 2**40], ids=["threads", "alone"])
def test_codes_are_those_of_numpy(fewest_cells, monkeypatch):
    monkeypatch.setattr(bins, "FEWEST_CELLS", fewest_cells)
    monkeypatch.setattr(bins, "n_cores", lambda: 3)
    values = some_rows(400, 3)
    edges = [np.unique(RNG.normal(size=n).astype(np.float32)) for n in (1, 40, 300)]
    cuts = Cuts(*ragged(edges), np.zeros(3, dtype=np.float32))
    codes, missing_code = digitise(values, cuts)
    assert missing_code == np.iinfo(codes.dtype).max
    for column, own in enumerate(edges):
        expected = np.minimum(np.searchsorted(own, values[:, column], side="right"), len(own) - 1)
        absent = np.isnan(values[:, column])
        np.testing.assert_array_equal(codes[:, column], np.where(absent, missing_code, expected))


def test_codes_of_a_sketch_are_those_of_its_cuts_and_its_masses_count_them():
    values, weights = some_rows(500, 4)[1:], RNG.integers(0, 3, 499).astype(np.float32)
    values[:, 2] = np.nan
    sketch, codes, missing_code = sketch_and_code(values, weights, 8)
    again = digitise(values, sketch_cuts(sketch_and_code(values, weights, 8)[0]))
    np.testing.assert_array_equal(codes, again[0])
    assert missing_code == again[1]
    for column in range(4):
        own = codes[:, column]
        masses = np.bincount(own[own != missing_code], weights[own != missing_code])
        known = values[(weights > 0) & ~np.isnan(values[:, column]), column]
        np.testing.assert_array_equal(sketch.column(column)[1], masses)
        assert len(known) == 0 or sketch.maxima[column] == known.max()
        assert len(known) == 0 or sketch.column(column)[0][0] == known.min()


def test_a_column_without_a_value_has_no_range():
    values = np.float32([[1, np.nan], [3, 7], [2, np.nan]])
    found = bins.column_ranges(values, np.float32([1, 0, 1]))
    np.testing.assert_array_equal(found, np.float32([[1, np.nan], [2, np.nan]]))
