"""Quantiles of several tables from counts of all of them."""

import numpy as np
import pytest

from fedapp.histograms.bins import digitise
from fedapp.histograms.sketch import (
    LARGEST_FLOAT,
    Descent,
    digit_counts,
    ordered,
    quantile_ranks,
    values_of,
)

RNG = np.random.default_rng(5)


def descended(values, weights, n_bins, parts=1, lightest=0):
    """The cuts of rows that lie in several places."""
    places = np.array_split(np.random.default_rng(1).permutation(len(values)), parts)
    descent = Descent(np.ones(values.shape[1], dtype=bool), n_bins, lightest)
    for digit in range(4):
        prefixes, offsets = descent.wanted()
        counts = [
            digit_counts(values[rows], weights[rows], prefixes, offsets, digit) for rows in places
        ]
        descent.take(np.sum(counts, axis=0))
    return descent.cuts()


def slow_edges(column, weights, n_bins):
    """The cuts of one column with all of its rows at hand."""
    kept = ~np.isnan(column) & (weights > 0)
    values, places = np.unique(column[kept] + np.float32(0), return_inverse=True)
    masses = np.zeros(len(values), dtype=np.int64)
    np.add.at(masses, places, weights[kept])
    if len(values) <= n_bins:
        return [*values[1:].tolist(), LARGEST_FLOAT]
    total, cuts = int(masses.sum()), dict[int, float]()
    for number in range(1, n_bins):
        target = total * number // n_bins
        place = int(np.flatnonzero(masses.cumsum() > target)[0])
        low, high = int(masses[:place].sum()), int(masses[: place + 1].sum())
        at, behind = float(values[place]), float(np.nextafter(values[place], np.float32(np.inf)))
        if values[place] == 0:
            behind = float(np.finfo(np.float32).tiny)
        if low and (high == total or target - low < high - target):
            cuts[low] = at
        elif high < total:
            cuts.setdefault(high, behind)
    return [*sorted(cuts.values()), LARGEST_FLOAT]


@pytest.mark.parametrize("n_bins", [2, 7, 64])
@pytest.mark.parametrize("parts", [1, 3])
def test_cuts_are_the_quantiles_of_all_rows(n_bins, parts):
    n_rows = 500
    columns = [
        RNG.normal(size=n_rows),
        RNG.integers(-3, 4, n_rows),
        np.where(RNG.random(n_rows) < 0.7, 0, RNG.exponential(size=n_rows)),
        RNG.normal(size=n_rows) * 10.0 ** RNG.integers(-30, 30, n_rows),
        np.full(n_rows, np.nan),
        np.full(n_rows, -0.0),
    ]
    values = np.stack(columns, axis=1).astype(np.float32)
    values[RNG.random(values.shape) < 0.1] = np.nan
    weights = RNG.integers(0, 2**40, n_rows)
    cuts = descended(values, weights, n_bins, parts)
    for place in range(values.shape[1]):
        assert cuts.column(place).tolist() == slow_edges(values[:, place], weights, n_bins)
    assert (cuts.minima == -LARGEST_FLOAT).all()


def test_rows_alone_keep_their_last_digits_and_are_parted_alike():
    values = RNG.normal(size=(300, 1)).astype(np.float32)
    values[:150] = np.round(values[:150], 1)
    weights = np.full(300, 8)
    whole, short = (descended(values, weights, 40, 3, lightest) for lightest in (0, 8))
    np.testing.assert_array_equal(digitise(values, whole)[0], digitise(values, short)[0])
    assert np.isin(values[150:], whole.edges).any()
    assert not np.isin(values[150:], short.edges).any()


def test_what_rows_alone_begin_with_is_not_asked_for():
    values = RNG.normal(size=(300, 1)).astype(np.float32)
    descent = Descent(np.ones(1, dtype=bool), 40, lightest=1)
    n_wanted = []
    for digit in range(4):
        prefixes, offsets = descent.wanted()
        n_wanted.append(len(prefixes))
        ones = np.ones(300, dtype=np.int64)
        descent.take(digit_counts(values, ones, prefixes, offsets, digit))
    assert n_wanted[0] == 1
    assert n_wanted[3] == 0 < n_wanted[2] < 40


def test_numbers_are_in_the_order_of_the_values():
    values = np.float32([-LARGEST_FLOAT, -1, -1e-40, 0.0, 1e-40, 1, 2, LARGEST_FLOAT])
    keys = ordered(values)
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    assert values_of(keys).tolist() == values.tolist()
    assert ordered(np.float32([-0.0])) == ordered(np.float32([0.0]))


def test_quantiles_of_large_weights_are_exact():
    total, numbers = 2**61 + 12345, np.arange(1, 65535)
    expected = [total * number // 65535 for number in range(1, 65535)]
    assert quantile_ranks(total, numbers, 65535).tolist() == expected
    assert not len(quantile_ranks(0, numbers, 4))
