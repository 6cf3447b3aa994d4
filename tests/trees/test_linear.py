"""Linear models in numpy: moments, descent, the file."""

import json

import numpy as np
import pytest

from fedapp.errors import DataError
from fedapp.records.document import from_text, to_text
from fedapp.trees.linear import (
    GradientDescent,
    LinearModel,
    descend,
    merge_moments,
    moments,
    predict_linear,
    standardised,
)

OBJECTIVES = ["binary:logistic", "multi:softprob", "reg:squarederror"]


def test_moments_of_parts_are_those_of_all_rows_by_weight():
    rng = np.random.default_rng(0)
    values = rng.normal(1e5, 0.1, (500, 3)).astype(np.float32)  # plain square sums lose this
    values[rng.random(values.shape) < 0.2] = np.nan
    weights = rng.integers(0, 4, 500).astype(np.float32)
    parts = [moments(values[rows], weights[rows]) for rows in np.split(np.arange(500), [7, 300])]
    found = merge_moments(parts)
    for column in range(3):
        there = ~np.isnan(values[:, column])
        often = np.repeat(values[there, column].astype(np.float64), weights[there].astype(int))
        assert found.means[column] == pytest.approx(often.mean(), rel=1e-14)
        assert found.scales[column] == pytest.approx(often.std(), rel=1e-6)


def test_columns_without_spread_or_values_stay_finite():
    values = np.array([[0.1, np.nan], [0.1, np.nan], [0.1, np.nan]], dtype=np.float32)
    found = moments(values, np.ones(3, np.float32))
    assert found.scales.tolist() == [1.0, 1.0]
    inputs = standardised(values, found.means, found.scales)
    np.testing.assert_allclose(inputs, 0, atol=1e-7)


# The descent


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_outlier_and_no_learning_rate_makes_it_diverge(objective):
    rng = np.random.default_rng(2)
    values = rng.normal(size=(600, 5)).astype(np.float32)
    values[3] = 1e6
    truth = rng.integers(0, 2, 600).astype(np.float32)
    ones = np.ones(600, np.float32)
    found = moments(values, ones)
    width = 2 if objective == "multi:softprob" else 1
    names, zeros = (tuple("abcde"), ("0", "1")), (np.zeros((5, width)), np.zeros(width))
    start = LinearModel(objective, *names, found.means, found.scales, *zeros)
    descent = GradientDescent(epochs=30, batch_size=32, learning_rate=1e6, decay=1.0, l2=0.0)
    trained = descend(start, (values, truth, ones), descent, rng)
    assert np.abs(predict_linear(trained, values[:3])).max() < 5


def test_a_weight_of_two_is_a_row_twice():
    rng = np.random.default_rng(3)
    values, start = rng.normal(size=(50, 2)).astype(np.float32), made_model()
    truth, weights = rng.integers(0, 2, 50).astype(np.float32), rng.integers(1, 3, 50)
    descent = GradientDescent(epochs=40, batch_size=1000, learning_rate=0.1, decay=1.0, l2=0.01)
    twice = np.repeat(np.arange(50), weights)
    ones = np.ones(len(twice), np.float32)
    weighted = values, truth, weights.astype(np.float32)
    found = [
        descend(start, rows, descent, np.random.default_rng(0)).weights
        for rows in (weighted, (values[twice], truth[twice], ones))
    ]
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_rows_without_weight_teach_nothing():
    rows = np.float32([[1, 2], [3, 4]]), np.float32([0, 1]), np.zeros(2, np.float32)
    start = made_model()
    descent = GradientDescent(epochs=5, batch_size=1, learning_rate=0.1, decay=1.0, l2=0.1)
    assert descend(start, rows, descent, np.random.default_rng(0)) is start


# The model's file


def made_model():
    """Margin (a - 1) / 2 + (b - 3) / 4 + 1/2."""
    numbers = [1.0, 3.0], [2.0, 4.0], [[1.0], [1.0]], [0.5]
    arrays = (np.array(each) for each in numbers)
    return LinearModel("binary:logistic", ("a", "b"), ("no", "yes"), *arrays)


def test_a_missing_value_counts_as_the_mean():
    values = np.float32([[3, 7], [1, 3], [np.nan, 11]])
    np.testing.assert_array_equal(predict_linear(made_model(), values)[:, 0], [2.5, 0.5, 2.5])


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("objective", "rank:map", "objective must be one of .*, got 'rank:map'"),
        ("weights", [[1.0, 1.0]], r"weights must be of shape \(2, 1\), got \(1, 2\)"),
        ("means", [1.0], r"means must be of shape \(2,\), got \(1,\)"),
        ("bias", [float("nan")], r"bias must be finite, got \[nan\]"),
        ("scales", [1.0, 0.0], r"scales must be > 0, got \[1.0, 0.0\]"),
        ("scales", ["x", 1.0], r"scales must be finite, got \['x', 1.0\]"),
    ],
)
def test_a_broken_model_is_refused(field, value, rule):
    document = {**json.loads(to_text(made_model())), field: value}
    start = "^model must be JSON of fedapp's format 3, got another: "
    with pytest.raises(DataError, match=f"{start}{rule}$"):
        from_text(json.dumps(document), LinearModel)
