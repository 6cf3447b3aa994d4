"""What a linear model is trained by, as whole numbers whose sums over parties are exact.

Means of the inputs come first, and then spreads around the means of all rows, so that nothing
cancels. How large values are is told before, to powers of two. A sum whose terms may differ much in
size is in two parts (``to_parts``), so that it is as good as one of doubles.
"""

from __future__ import annotations

import math

import numpy as np

from fedapp.crypto.fixed_point import (
    Bounds,
    Whole,
    from_parts,
    from_whole,
    power_above,
    to_parts,
    to_whole,
)
from fedapp.data.categories import Categories, entries_of
from fedapp.linear import Floats, Rows, expanded, row_slices
from fedapp.trees.objective import REGRESSION, Objective

# Powers of two that a float32 other than 0 may be rounded up to.
LEAST_POWER, MOST_POWER = -149, 128
N_POWERS = MOST_POWER - LEAST_POWER + 1
# No weight of a model is beyond 2 to this power, nor its bias; times the largest label, where the
# model predicts labels. Standardised inputs, whose weights are so large, would be all but equal.
MODEL_POWER = 20
Exponents = tuple[Whole, Whole]


# How large the values of each column are


def count_powers(values: Rows, weights: Rows, is_number: np.ndarray) -> Whole:
    """Which power of two each column of numbers comes up to at its largest value in size.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns); NaN is missing.
    weights : float32, shape (n_rows,); rows without weight do not count.
    is_number : bool, shape (n_columns,).

    Returns
    -------
    int64, shape (n_numbers, N_POWERS): 1 at the power, from ``LEAST_POWER`` on; none at all for a
    column without a value other than 0.
    """
    columns, weighs = np.flatnonzero(is_number), weights > 0
    counts = np.zeros((len(columns), N_POWERS), dtype=np.int64)
    for place, column in enumerate(columns.tolist()):
        most = np.fmax.reduce(np.abs(values[:, column]), initial=0, where=weighs)
        if most > 0:
            counts[place, power_above(float(most)) - LEAST_POWER] = 1
    return counts


def largest_powers(counts: Whole, is_number: np.ndarray) -> Whole:
    """The power of two that no value of a column exceeds in size.

    Parameters
    ----------
    counts : of ``count_powers``, added up over parties.

    Returns
    -------
    int64, shape (n_columns,); of columns of categories 0, without a value ``LEAST_POWER``.
    """
    powers = np.zeros(len(is_number), dtype=np.int64)
    highest = [np.flatnonzero(own).max(initial=0) for own in counts]
    powers[is_number] = np.array(highest, dtype=np.int64) + LEAST_POWER
    return powers


def of_inputs(of_columns: Whole, categories: Categories) -> Whole:
    """For each input what is said of its column."""
    known = entries_of(categories, len(of_columns))
    return np.repeat(of_columns, [1 if names is None else len(names) for names in known])


# Moments


def sum_values(
    values: Rows, weights: Rows, categories: Categories, powers: Whole, bounds: Bounds
) -> Whole:
    """Weights of the rows where each input has a value, and weighted values.

    Parameters
    ----------
    values, weights, categories : see ``linear.moments``.
    powers : of each input, which no value of a row of weight above 0 exceeds.
    bounds : of all parties' rows.

    Returns
    -------
    int64, shape (2, 2, n_inputs): both in two parts.
    """
    found = np.zeros((2, 2, len(powers)), dtype=np.int64)
    of_weights, of_values = _exponents(powers * 0, bounds), _exponents(powers, bounds)
    for rows in row_slices(values, categories):
        inputs = expanded(values[rows], categories).astype(np.float64)
        own = np.where(np.isnan(inputs), 0.0, weights[rows, None].astype(np.float64))
        found[0] += _total(own, of_weights)
        found[1] += _total(own * np.nan_to_num(inputs), of_values)
    return found


def read_values(sums: Whole, powers: Whole, bounds: Bounds) -> tuple[Floats, Floats]:
    """Weights and means of the inputs; see ``sum_values``."""
    counts = np.maximum(from_parts(sums[0], _exponents(powers * 0, bounds)), 0.0)
    totals = from_parts(sums[1], _exponents(powers, bounds))
    most = np.ldexp(1.0, powers)  # which rounding must not exceed
    return counts, np.clip(totals / np.where(counts > 0, counts, 1), -most, most)


def sum_squares(
    values: Rows,
    weights: Rows,
    categories: Categories,
    means: Floats,
    powers: Whole,
    bounds: Bounds,
) -> Whole:
    """Weighted squares of deviations from the means of all rows; further arguments as of
    ``sum_values``.

    Parameters
    ----------
    means : of the inputs, none beyond its power.

    Returns
    -------
    int64, shape (2, n_inputs): in two parts.
    """
    found, exponents = np.zeros((2, len(powers)), dtype=np.int64), _of_squares(powers, bounds)
    for rows in row_slices(values, categories):
        inputs = expanded(values[rows], categories).astype(np.float64)
        squares = np.nan_to_num(inputs - means) ** 2
        found += _total(weights[rows, None].astype(np.float64) * squares, exponents)
    return found


def read_squares(sums: Whole, powers: Whole, bounds: Bounds) -> Floats:
    """See ``sum_squares``."""
    return np.maximum(from_parts(sums, _of_squares(powers, bounds)), 0.0)


def _total(terms: Floats, exponents: Exponents) -> Whole:
    return np.stack([part.sum(axis=0) for part in to_parts(terms, exponents)])


def _of_squares(powers: Whole, bounds: Bounds) -> Exponents:
    """A deviation is twice the largest value at most."""
    return _exponents(2 * powers + 2, bounds)


def _exponents(powers: Whole, bounds: Bounds) -> Exponents:
    coarse = [bounds.exponent(power) for power in powers.tolist()]
    return np.array(coarse, np.int64), np.array([bounds.finer(own) for own in coarse], np.int64)


# Models


def whole_weight(weights: Rows, bounds: Bounds) -> int:
    """Weight of a party's training rows, which its model counts by."""
    return int(to_whole(weights, bounds.exponent(0)).sum())


def whole_model(
    theta: Floats, weight: int, weight_power: int, objective: Objective, bounds: Bounds
) -> Whole:
    """A model times its party's share of the weight of all.

    Parameters
    ----------
    theta : shape (n_inputs + 1, n_outputs): weights, and the bias last.
    weight : of ``whole_weight``.
    weight_power : all parties' weights come up to 2 to this power at most.

    Returns
    -------
    int64, of the shape of ``theta``.

    Raises
    ------
    ValueError : a number of the model is beyond ``MODEL_POWER``.
    """
    power = _model_power(objective, bounds)
    if not (np.abs(theta) <= math.ldexp(1.0, power)).all():
        rule = f"must be <= {math.ldexp(1.0, power):g} in size, got a larger one"
        raise ValueError(f"every weight of the model {rule}")
    return to_whole(theta * _share(weight, weight_power, bounds), _model_exponent(power))


def read_model(
    sums: Whole, weight: int, weight_power: int, objective: Objective, bounds: Bounds
) -> Floats:
    """The weighted mean of the models whose ``whole_model`` and ``whole_weight`` add up to this."""
    exponent = _model_exponent(_model_power(objective, bounds))
    return from_whole(sums, exponent) / _share(weight, weight_power, bounds)


def _share(weight: int, weight_power: int, bounds: Bounds) -> float:
    """Of 2 to ``weight_power``, by a ``whole_weight``."""
    return math.ldexp(weight, -bounds.exponent(0) - weight_power)


def _model_power(objective: Objective, bounds: Bounds) -> int:
    return MODEL_POWER + (bounds.largest if objective == REGRESSION else 0)


def _model_exponent(power: int) -> int:
    """Shares add up to 1, and with the rounding of each to less than 2."""
    return Bounds(2).exponent(power)
