"""Linear models: logistic, softmax and linear regression on standardised inputs, in numpy.

A column of numbers is one input. A column of categories is one-hot encoded: one input per category,
and a row with a missing value has 0 in all of them.

For secure aggregation, moments and models are whole numbers, whose sums over parties are exact.
Means of the inputs are summed first, then squared deviations from the overall means, so that
nothing cancels. Each column's largest absolute value is disclosed before, rounded up to a power of
two. Sums of terms of very different size have two parts (``to_parts``), for float64 precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.histograms.fixed_point import (
    Bounds,
    Whole,
    from_fixed,
    from_parts,
    power_above,
    to_fixed,
    to_parts,
)
from fedapp.trees.categories import Categories, entries_of
from fedapp.trees.model import ModelHeader, read_categories, read_model, write_model
from fedapp.trees.objective import REGRESSION, Objective, gradients, n_outputs

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.float32]

KIND = "linear"
ARRAYS = ("means", "scales", "weights", "bias")
BATCH_ROWS = 2**14
BATCH_NUMBERS = 2**22  # inputs of a batch, if one-hot columns make it wide
MAX_CACHED_INPUTS = 2**27  # up to this size all inputs are computed once, not for every batch
# Upper bound of the second derivative of a row's loss with respect to its margin.
STEEPEST = {"binary:logistic": 0.25, "multi:softprob": 0.5, "reg:logistic": 0.25, REGRESSION: 1.0}
# A column with a standard deviation below this share of its mean is constant up to rounding.
LEAST_SPREAD = 1e-10


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Weight, mean and sum of squared deviations of each input's present values, or zeros."""

    counts: Floats
    means: Floats
    squares: Floats

    @property
    def scales(self) -> Floats:
        """Standard deviation of each input; 1 where it is constant or has no value."""
        spreads = np.sqrt(self.squares / np.where(self.counts > 0, self.counts, 1))
        constant = spreads <= LEAST_SPREAD * np.abs(self.means)
        return np.where(constant, 1.0, spreads)


def input_names(columns: Sequence[str], categories: Categories) -> tuple[str, ...]:
    """Names of the inputs, in order: a numeric column's name, or ``column=category``."""
    by_column = entries_of(categories, len(columns))
    return tuple(
        entry
        for column, names in zip(columns, by_column, strict=True)
        for entry in ([column] if names is None else [f"{column}={name}" for name in names])
    )


def expanded(values: Rows, categories: Categories) -> Rows:
    """Inputs before standardisation, (n_rows, n_inputs): categories one-hot encoded."""
    if not categories:
        return values
    parts = [
        values[:, [column]]
        if names is None
        else (values[:, [column]] == np.arange(len(names), dtype=np.float32)).astype(np.float32)
        for column, names in enumerate(categories)
    ]
    return np.hstack(parts)


def moments(values: Rows, weights: Rows, categories: Categories = ()) -> Moments:
    """Moments of the inputs of rows with values, (n_rows, n_columns), and weights, (n_rows,)."""
    return merge_moments(
        _moments(
            expanded(values[rows], categories).astype(np.float64),
            weights[rows].astype(np.float64),
        )
        for rows in row_slices(values, categories)
    )


def _moments(values: Floats, weights: Floats) -> Moments:
    present_weights = np.where(np.isnan(values), 0.0, weights[:, None])
    counts, filled = present_weights.sum(axis=0), np.nan_to_num(values)
    means = (present_weights * filled).sum(axis=0) / np.where(counts > 0, counts, 1)
    return Moments(counts, means, (present_weights * (filled - means) ** 2).sum(axis=0))


def merge_moments(moments: Iterable[Moments]) -> Moments:
    """Moments of all rows together, without the cancellation of plain sums of squares.

    Source: Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances", Eq. 2.1.
    """
    return reduce(_merge, moments)


def _merge(a: Moments, b: Moments) -> Moments:
    counts = a.counts + b.counts
    share = b.counts / np.where(counts > 0, counts, 1)
    step = b.means - a.means
    squares = a.squares + b.squares + step**2 * a.counts * share
    return Moments(counts, a.means + step * share, squares)


@dataclass(frozen=True, slots=True, eq=False)
class LinearModel:
    """Margins that are linear in the standardised inputs; a missing number counts as the mean."""

    objective: Objective  # the loss it was trained for
    columns: tuple[str, ...]  # names of the features, in order
    classes: tuple[str, ...]  # names of the classes in the order of their ids; empty for regression
    # means, scales: (n_inputs,): input i enters as ``(x - means[i]) / scales[i]``
    means: Floats
    scales: Floats
    weights: Floats  # (n_inputs, n_outputs)
    bias: Floats  # (n_outputs,)
    categories: Categories = ()  # names by column; empty if all columns are numeric

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return input_names(self.columns, self.categories)

    @property
    def n_outputs(self) -> int:
        """Margins per row: the number of classes for softmax, else 1."""
        return n_outputs(self.objective, len(self.classes))

    @property
    def base_margin(self) -> Rows:
        """Margins of a row whose inputs are all at their means; float32, shape (n_outputs,)."""
        return self.bias.astype(np.float32)


def predict_linear(model: LinearModel, values: Rows) -> Rows:
    """Margins of rows: float32, shape (n_rows, n_outputs)."""
    margins = np.empty((len(values), model.n_outputs), dtype=np.float32)
    for rows in row_slices(values, model.categories):
        inputs = standardised(expanded(values[rows], model.categories), model.means, model.scales)
        margins[rows] = inputs @ model.weights + model.bias
    return margins


def standardised(values: Rows, means: Floats, scales: Floats) -> Floats:
    """Inputs with mean 0 and standard deviation 1; a missing value is 0."""
    inputs: Floats = np.nan_to_num((values - means) / scales)
    return inputs


@dataclass(frozen=True, slots=True)
class Descent:
    """Settings of mini-batch gradient descent."""

    epochs: int  # passes over the rows, >= 0
    batch_size: int  # maximum rows per step, >= 1
    learning_rate: float  # maximum step length, > 0
    decay: float  # factor of every step, in [0, 1]
    l2: float  # L2 penalty, ``l2 / 2 * weights ** 2``; the bias is not penalised


def descend(
    model: LinearModel,
    rows: tuple[Rows, Rows, Rows],
    descent: Descent,
    rng: np.random.Generator,
) -> LinearModel:
    """Continue training a model on some rows.

    A step is never longer than 1 / L, where L bounds the curvature of the batch's loss: no learning
    rate and no outlier makes it diverge. There is no momentum, which would carry a step that fits
    an outlier on through batches without it.

    ``rows`` are values, labels and weights, as ``grow_trees`` takes them.
    """
    values, labels, weights = rows
    mean_weight = float(weights.mean(dtype=np.float64))
    if not mean_weight > 0:
        return model
    # (n_inputs + 1, n_outputs): the bias is the weight of a last input of ones, without penalty.
    coefficients = np.vstack((model.weights, model.bias))
    fits_in_memory = len(values) * len(model.means) <= MAX_CACHED_INPUTS
    all_inputs = _inputs(model, values) if fits_in_memory else None
    for batch in _batches(len(values), descent, rng):
        inputs = _inputs(model, values[batch]) if all_inputs is None else all_inputs[batch]
        shares = weights[batch] / np.float32(mean_weight)
        margins = (inputs @ coefficients).astype(np.float32)
        pairs = gradients(model.objective, margins, labels[batch], shares)
        slope = inputs.T @ pairs[..., 0].astype(np.float64) / len(batch)
        slope[:-1] += descent.l2 * coefficients[:-1]
        curvature = STEEPEST[model.objective] * _spread(inputs, shares) + descent.l2
        coefficients -= descent.decay * min(descent.learning_rate, 1 / (curvature + 1e-12)) * slope
    return replace(model, weights=coefficients[:-1], bias=coefficients[-1])


def _inputs(model: LinearModel, values: Rows) -> Floats:
    """Standardised inputs, with a column of ones for the bias."""
    inputs = np.ones((len(values), len(model.means) + 1))
    for rows in row_slices(values, model.categories):
        raw_inputs = expanded(values[rows], model.categories)
        inputs[rows, :-1] = standardised(raw_inputs, model.means, model.scales)
    return inputs


def _spread(inputs: Floats, shares: Rows) -> float:
    """Upper bound of the largest eigenvalue of the second moments: their Frobenius norm."""
    scaled = inputs * np.sqrt(shares, dtype=np.float64)[:, None] / np.sqrt(len(inputs))
    # The smaller of both Gram matrices: they have the same norm.
    is_wide = inputs.shape[1] > len(inputs)
    return float(np.linalg.norm(scaled @ scaled.T if is_wide else scaled.T @ scaled))


def _batches(
    n_rows: int, descent: Descent, rng: np.random.Generator
) -> Iterator[npt.NDArray[np.int64]]:
    """Row numbers of every step; batches of an epoch differ in size by at most one row."""
    n_batches = -(-n_rows // descent.batch_size)
    for _ in range(descent.epochs):
        yield from np.array_split(rng.permutation(n_rows), n_batches)


def row_slices(values: Rows, categories: Categories) -> Iterator[slice]:
    """Slices of rows whose inputs fit in memory; at least one slice."""
    n_rows, n_more = len(values), sum(len(names) for names in categories if names)
    size = BATCH_ROWS if not n_more else max(1, BATCH_NUMBERS // (values.shape[1] + n_more))
    for start in range(0, max(n_rows, 1), size):
        yield slice(start, start + size)


def linear_to_json(model: LinearModel) -> str:
    """The model as text; deterministic."""
    content: dict[str, Any] = {name: getattr(model, name).tolist() for name in ARRAYS}
    if model.categories:
        content = {"categories": model.categories, "inputs": model.inputs, **content}
    return write_model(KIND, model, content, ensure_ascii=False)


def linear_from_json(text: str) -> LinearModel:
    """Read a model that ``linear_to_json`` wrote; raises DataError for any other text."""
    return read_model(text, KIND, _checked)


def _checked(header: ModelHeader, document: Mapping[str, Any]) -> LinearModel:
    """Build the model, and check that its arrays match its columns, categories and classes."""
    categories = read_categories(document, len(header.columns))
    arrays = {name: np.array(document[name], dtype=np.float64) for name in ARRAYS}
    model = LinearModel(
        header.objective, header.columns, header.classes, **arrays, categories=categories
    )
    n_inputs, width = len(model.inputs), model.n_outputs
    shapes = [(n_inputs,), (n_inputs,), (n_inputs, width), (width,)]
    if [array.shape for array in arrays.values()] != shapes:
        raise ValueError(f"arrays must be of shapes {shapes}")
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise ValueError("numbers must be finite")
    if not (model.scales > 0).all():
        raise ValueError("scales must be > 0")
    return model


# Whole numbers

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


def per_input(of_columns: Whole, categories: Categories) -> Whole:
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


def decode_model(
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
