"""What a linear model is trained by, as whole numbers: as doubles, and the same for any split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedapp.histograms.fixed_point import Bounds, from_parts, power_above, to_parts
from fedapp.trees.linear import (
    LEAST_POWER,
    MODEL_POWER,
    Moments,
    count_powers,
    decode_model,
    largest_powers,
    moments,
    per_input,
    read_squares,
    read_values,
    sum_squares,
    sum_values,
    whole_model,
    whole_weight,
)

N_ROWS = 20
COLOURS = (None, ("blue", "green", "red"))


def summed(values: Any, weights: Any, categories: Any, splits: list[int]) -> Moments:
    """Moments by sums over parties that have the rows between these ones."""
    bounds = Bounds(len(values), power_above(float(weights.max())))
    names = categories or (None,) * values.shape[1]
    is_number = np.array([own is None for own in names])
    parties = list(zip(np.split(values, splits), np.split(weights, splits), strict=True))
    counts = sum(count_powers(*rows, is_number) for rows in parties)
    powers = per_input(largest_powers(np.asarray(counts), is_number), categories)
    rest = powers, bounds
    sums = sum(sum_values(*rows, categories, *rest) for rows in parties)
    found, means = read_values(np.asarray(sums), *rest)
    squares = sum(sum_squares(*rows, categories, means, *rest) for rows in parties)
    return Moments(found, means, read_squares(np.asarray(squares), *rest))


FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=False)


@given(
    hnp.arrays(np.float32, (N_ROWS, 2), elements=FLOATS),
    hnp.arrays(np.float32, N_ROWS, elements=st.floats(0, 4, width=32)),
    st.lists(st.integers(0, N_ROWS), max_size=4).map(sorted),
)
def test_moments_are_the_same_for_any_split(values: Any, weights: Any, splits: list[int]) -> None:
    found, expected = (summed(values, weights, (), one) for one in (splits, []))
    for name in ("counts", "means", "squares"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize(
    ("center", "spread"),
    [(0.0, 1.0), (1e9, 1e3), (-3e30, 1e28), (1e-40, 1e-42), (5.0, 0.0), (0.0, 0.0), (2.0**24, 1.0)],
)
def test_moments_are_those_of_doubles(center: float, spread: float) -> None:
    rng = np.random.default_rng(0)
    values = (center + spread * rng.normal(size=(1000, 2))).astype(np.float32)
    values[rng.random(values.shape) < 0.2] = np.nan
    weights = rng.uniform(0, 3, 1000).astype(np.float32)
    weights[::7] = 0
    found, expected = summed(values, weights, (), [300, 900]), moments(values, weights)
    size = float(np.nanmax(np.abs(values)))
    np.testing.assert_allclose(found.counts, expected.counts, rtol=1e-12)
    np.testing.assert_allclose(found.means, expected.means, rtol=0, atol=1e-14 * size)
    np.testing.assert_allclose(found.scales, expected.scales, rtol=1e-7)


def test_an_outlier_does_not_hide_the_spread_of_other_columns() -> None:
    values = np.random.default_rng(1).normal(size=(500, 3)).astype(np.float32)
    values[17, 1] = 3e38
    weights = np.ones(500, np.float32)
    found, expected = summed(values, weights, (), [100]), moments(values, weights)
    np.testing.assert_allclose(found.scales, expected.scales, rtol=1e-12)


def test_rows_without_weight_and_columns_without_values_count_for_nothing() -> None:
    values = np.array([[1, np.nan], [3, np.nan], [3e38, 7]], np.float32)
    weights = np.array([1, 1, 0], np.float32)
    counts = count_powers(values, weights, np.array([True, True]))
    np.testing.assert_array_equal(largest_powers(counts, np.array([True, True])), [2, LEAST_POWER])
    found = summed(values, weights, (), [1])
    np.testing.assert_array_equal(found.counts, [2, 0])
    np.testing.assert_array_equal(found.means, [2, 0])
    np.testing.assert_array_equal(found.scales, [1, 1])


def test_categories_have_shares() -> None:
    codes = np.array([0, 2, 2, np.nan, 0, 2], np.float32)
    values = np.column_stack((np.arange(6, dtype=np.float32), codes))
    weights = np.array([1, 1, 2, 1, 2, 1], np.float32)
    found = summed(values, weights, COLOURS, [2, 3])
    expected = moments(values, weights, COLOURS)
    np.testing.assert_allclose(found.counts, expected.counts, rtol=1e-12)
    np.testing.assert_allclose(found.squares, expected.squares, rtol=1e-12)
    np.testing.assert_allclose(found.means[1:], [3 / 8, 0, 4 / 8], rtol=1e-12)


@given(st.lists(st.integers(-(2**52), 2**52), min_size=1, max_size=8), st.integers(-60, 60))
def test_parts_hold_twice_the_bits(numbers: list[int], shift: int) -> None:
    bounds = Bounds(len(numbers))
    values = np.ldexp(np.array(numbers, float), shift - 52)[:, None]
    coarse = bounds.exponent(shift)
    exponents = np.array([coarse]), np.array([bounds.finer(coarse)])
    parts = np.stack([part.sum(axis=0) for part in to_parts(values, exponents)])
    assert np.abs(parts).max() <= 2**62
    assert from_parts(parts, exponents)[0] == np.ldexp(float(sum(numbers)), shift - 52)


# Models


def test_the_mean_of_models_is_weighted_by_rows() -> None:
    bounds, rng = Bounds(3000, 1), np.random.default_rng(2)
    models = [rng.normal(size=(4, 2)) * 10**place for place in range(3)]
    rows = [rng.uniform(0, 2, n).astype(np.float32) for n in (1000, 10, 1)]
    weights = [whole_weight(own, bounds) for own in rows]
    power = power_above(float(sum(own.sum() for own in rows)))
    rest = power, "binary:logistic", bounds
    sums = sum(
        whole_model(theta, weight, *rest)  # type: ignore[arg-type]
        for theta, weight in zip(models, weights, strict=True)
    )
    found = decode_model(np.asarray(sums), sum(weights), *rest)  # type: ignore[arg-type]
    shares = [own.sum(dtype=float) for own in rows]
    expected = sum(share * theta for share, theta in zip(shares, models, strict=True)) / sum(shares)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)


def test_a_model_beyond_the_bound_is_refused() -> None:
    bounds = Bounds(10, 0, largest=-3)
    largest = np.full((2, 1), 2.0**MODEL_POWER)
    assert whole_model(largest, 2**40, 0, "binary:logistic", bounds).max() > 0
    rule = r"^every weight of the model must be <= 131072 in size, got a larger one"
    for theta in (largest, np.array([[np.nan]])):
        with pytest.raises(ValueError, match=rule):
            whole_model(theta, 2**40, 0, "reg:squarederror", bounds)
