"""Statistics for training linear models as whole numbers, whose sums over parties are exact.

Means of the inputs are summed first, then squared deviations from the overall means, so that
nothing cancels. Each column's largest absolute value is disclosed before, rounded up to a power of
two. Sums of terms of very different size have two parts (``to_parts``), for float64 precision.
"""

from __future__ import annotations

import math

import numpy as np

from fedapp.data.categories import Categories, entries_of
from fedapp.histograms.fixed_point import (
    Bounds,
    Whole,
    from_fixed,
    from_parts,
    power_above,
    to_fixed,
    to_parts,
)
from fedapp.linear import Floats, Rows, expanded, row_slices
from fedapp.trees.objective import REGRESSION, Objective

# Powers of two that a float32 other than 0 may be rounded up to.
LEAST_POWER, MOST_POWER = -149, 128
N_POWERS = MOST_POWER - LEAST_POWER + 1
# Weights and bias of a model are at most 2 to this power, for regression times the largest label.
# Only almost identical standardised inputs could get larger weights.
MODEL_POWER = 20
Exponents = tuple[Whole, Whole]


def count_powers(values: Rows, weights: Rows, is_number: np.ndarray) -> Whole:
    """One-hot: the power of two that bounds each numeric column's absolute values.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns); NaN is missing.
    weights : float32, shape (n_rows,); rows without weight are ignored.
    is_number : bool, shape (n_columns,).

    Returns
    -------
    int64, shape (n_numbers, N_POWERS), index 0 is ``LEAST_POWER``; all 0 for a column of zeros.
    """
    columns, weighs = np.flatnonzero(is_number), weights > 0
    counts = np.zeros((len(columns), N_POWERS), dtype=np.int64)
    for place, column in enumerate(columns.tolist()):
        most = np.fmax.reduce(np.abs(values[:, column]), initial=0, where=weighs)
        if most > 0:
            counts[place, power_above(float(most)) - LEAST_POWER] = 1
    return counts


def largest_powers(counts: Whole, is_number: np.ndarray) -> Whole:
    """Power of two that bounds each column over all parties; int64, shape (n_columns,).

    ``counts`` is the sum of all parties' ``count_powers``. Columns of categories have 0, columns of
    zeros ``LEAST_POWER``.
    """
    powers = np.zeros(len(is_number), dtype=np.int64)
    highest = [np.flatnonzero(column_counts).max(initial=0) for column_counts in counts]
    powers[is_number] = np.array(highest, dtype=np.int64) + LEAST_POWER
    return powers


def of_inputs(of_columns: Whole, categories: Categories) -> Whole:
    """Repeat a value of each column for each of its inputs."""
    by_column = entries_of(categories, len(of_columns))
    return np.repeat(of_columns, [1 if names is None else len(names) for names in by_column])


def sum_values(
    values: Rows, weights: Rows, categories: Categories, powers: Whole, bounds: Bounds
) -> Whole:
    """Sums of weights and of weighted values of each input; int64, shape (2, 2, n_inputs).

    The second axis are the two parts of ``to_parts``. ``powers`` bounds each input's absolute
    values in rows with weight, ``bounds`` describes all parties' rows.
    """
    sums = np.zeros((2, 2, len(powers)), dtype=np.int64)
    weight_exponents, value_exponents = _exponents(powers * 0, bounds), _exponents(powers, bounds)
    for rows in row_slices(values, categories):
        inputs = expanded(values[rows], categories).astype(np.float64)
        present_weights = np.where(np.isnan(inputs), 0.0, weights[rows, None].astype(np.float64))
        sums[0] += _total(present_weights, weight_exponents)
        sums[1] += _total(present_weights * np.nan_to_num(inputs), value_exponents)
    return sums


def read_values(sums: Whole, powers: Whole, bounds: Bounds) -> tuple[Floats, Floats]:
    """Weights and means of the inputs from the parties' ``sum_values``, added up."""
    counts = np.maximum(from_parts(sums[0], _exponents(powers * 0, bounds)), 0.0)
    totals = from_parts(sums[1], _exponents(powers, bounds))
    most = np.ldexp(1.0, powers)  # a mean must not exceed it by rounding
    return counts, np.clip(totals / np.where(counts > 0, counts, 1), -most, most)


def sum_squares(
    values: Rows,
    weights: Rows,
    categories: Categories,
    means: Floats,
    powers: Whole,
    bounds: Bounds,
) -> Whole:
    """Weighted squared deviations from ``means``, in two parts; int64, shape (2, n_inputs)."""
    sums, exponents = np.zeros((2, len(powers)), dtype=np.int64), _of_squares(powers, bounds)
    for rows in row_slices(values, categories):
        inputs = expanded(values[rows], categories).astype(np.float64)
        squares = np.nan_to_num(inputs - means) ** 2
        sums += _total(weights[rows, None].astype(np.float64) * squares, exponents)
    return sums


def read_squares(sums: Whole, powers: Whole, bounds: Bounds) -> Floats:
    """Sums of squared deviations from the parties' ``sum_squares``, added up."""
    return np.maximum(from_parts(sums, _of_squares(powers, bounds)), 0.0)


def _total(terms: Floats, exponents: Exponents) -> Whole:
    return np.stack([part.sum(axis=0) for part in to_parts(terms, exponents)])


def _of_squares(powers: Whole, bounds: Bounds) -> Exponents:
    """A deviation is at most twice the largest value, and a square at most 4 times its square."""
    return _exponents(2 * powers + 2, bounds)


def _exponents(powers: Whole, bounds: Bounds) -> Exponents:
    coarse = [bounds.exponent(power) for power in powers.tolist()]
    return np.array(coarse, np.int64), np.array([bounds.finer(bits) for bits in coarse], np.int64)


def whole_weight(weights: Rows, bounds: Bounds) -> int:
    """Weight of a party's training rows, by which its model is weighted."""
    return int(to_fixed(weights, bounds.exponent(0)).sum())


def whole_model(
    theta: Floats, weight: int, weight_power: int, objective: Objective, bounds: Bounds
) -> Whole:
    """A model times its party's share of the total weight, as whole numbers.

    Parameters
    ----------
    theta : float64, shape (n_inputs + 1, n_outputs): weights, and the bias last.
    weight : the party's ``whole_weight``.
    weight_power : the total weight is at most 2 to this power.

    Raises
    ------
    ValueError : a number of the model is beyond ``MODEL_POWER``.
    """
    power = _model_power(objective, bounds)
    if not (np.abs(theta) <= math.ldexp(1.0, power)).all():
        rule = f"must be <= {math.ldexp(1.0, power):g} in size, got a larger one"
        raise ValueError(f"every weight of the model {rule}")
    return to_fixed(theta * _share(weight, weight_power, bounds), _model_exponent(power))


def read_model(
    sums: Whole, weight: int, weight_power: int, objective: Objective, bounds: Bounds
) -> Floats:
    """Weighted mean of the models, from sums of ``whole_model`` and ``whole_weight``."""
    exponent = _model_exponent(_model_power(objective, bounds))
    return from_fixed(sums, exponent) / _share(weight, weight_power, bounds)


def _share(weight: int, weight_power: int, bounds: Bounds) -> float:
    """A ``whole_weight`` as a share of 2 to ``weight_power``."""
    return math.ldexp(weight, -bounds.exponent(0) - weight_power)


def _model_power(objective: Objective, bounds: Bounds) -> int:
    return MODEL_POWER + (bounds.largest if objective == REGRESSION else 0)


def _model_exponent(power: int) -> int:
    """Shares add up to 1, with the rounding of each to less than 2."""
    return Bounds(2).exponent(power)
