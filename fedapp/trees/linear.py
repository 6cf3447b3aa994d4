"""Linear models: logistic, softmax and linear regression on standardised inputs, in numpy.

A column of numbers is one input. A column of categories is one-hot encoded: one input per category,
and a row with a missing value has 0 in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Annotated

import numpy as np

from fedapp.arrays import Doubles, Floats, Ints
from fedapp.trees.categories import Categories, entries_of
from fedapp.trees.losses import REGRESSION, Objective
from fedapp.trees.model import LINEAR, KindsOfColumns, Model
from fedapp.trees.objective import gradients

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

    counts: Doubles
    means: Doubles
    squares: Doubles

    @property
    def scales(self) -> Doubles:
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


def expanded(values: Floats, categories: Categories) -> Floats:
    """Inputs before standardisation, (n_rows, n_inputs): categories one-hot encoded."""
    values = np.ascontiguousarray(values)  # sums depend on the order in memory
    if not categories:
        return values
    parts = [
        values[:, [column]]
        if names is None
        else (values[:, [column]] == np.arange(len(names), dtype=np.float32)).astype(np.float32)
        for column, names in enumerate(categories)
    ]
    return np.hstack(parts)


def moments(values: Floats, weights: Floats, categories: Categories = ()) -> Moments:
    """Moments of the inputs of rows with values, (n_rows, n_columns), and weights, (n_rows,)."""
    return merge_moments(
        _moments(
            expanded(values[rows], categories).astype(np.float64),
            weights[rows].astype(np.float64),
        )
        for rows in row_slices(values, categories)
    )


def _moments(values: Doubles, weights: Doubles) -> Moments:
    present_weights = np.where(np.isnan(values), 0.0, weights[:, None])
    counts = present_weights.sum(axis=0)
    filled = np.nan_to_num(values)
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
class LinearModel(Model):
    """Margins that are linear in the standardised inputs; a missing number counts as the mean."""

    KIND = LINEAR
    objective: Objective  # the loss it was trained for
    columns: tuple[str, ...]  # names of the features, in order
    classes: tuple[str, ...]  # names of the classes in the order of their ids; empty for regression
    # Input i enters as ``(x - means[i]) / scales[i]``.
    means: Annotated[Doubles, "n_inputs"]
    scales: Annotated[Doubles, "n_inputs", "> 0"]
    weights: Annotated[Doubles, "n_inputs", "n_outputs"]
    bias: Annotated[Doubles, "n_outputs"]
    categories: Categories = ()  # names by column; empty if all columns are numeric
    kinds: KindsOfColumns = ()  # as in ``Ensemble``

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return input_names(self.columns, self.categories)

    @property
    def n_inputs(self) -> int:
        """Number of inputs."""
        return len(self.inputs)

    @property
    def base_margin(self) -> Floats:
        """Margins of a row whose inputs are all at their means; float32, shape (n_outputs,)."""
        with np.errstate(over="ignore"):
            return self.bias.astype(np.float32)


@np.errstate(over="ignore", invalid="ignore")  # scores of what leaves float32 are refused
def predict_linear(model: LinearModel, values: Floats) -> Floats:
    """Margins of rows: float32, shape (n_rows, n_outputs)."""
    margins = np.empty((len(values), model.n_outputs), dtype=np.float32)
    for rows in row_slices(values, model.categories):
        inputs = standardised(expanded(values[rows], model.categories), model.means, model.scales)
        margins[rows] = inputs @ model.weights + model.bias
    return margins


def standardised(values: Floats, means: Doubles, scales: Doubles) -> Doubles:
    """Inputs with mean 0 and standard deviation 1; a missing value is 0."""
    inputs: Doubles = np.nan_to_num((values - means) / scales)
    return inputs


@dataclass(frozen=True, slots=True)
class GradientDescent:
    """Settings of mini-batch gradient descent."""

    epochs: int  # passes over the rows, >= 0
    batch_size: int  # maximum rows per step, >= 1
    learning_rate: float  # maximum step length, > 0
    decay: float  # factor of every step, in [0, 1]
    l2: float  # L2 penalty, ``l2 / 2 * weights ** 2``; the bias is not penalised


@np.errstate(over="ignore", invalid="ignore")  # weights that are not finite are not sent
def descend(
    model: LinearModel,
    rows: tuple[Floats, Floats, Floats],
    descent: GradientDescent,
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


def _inputs(model: LinearModel, values: Floats) -> Doubles:
    """Standardised inputs, with a column of ones for the bias."""
    inputs = np.ones((len(values), len(model.means) + 1))
    for rows in row_slices(values, model.categories):
        raw_inputs = expanded(values[rows], model.categories)
        inputs[rows, :-1] = standardised(raw_inputs, model.means, model.scales)
    return inputs


def _spread(inputs: Doubles, shares: Floats) -> float:
    """Upper bound of the largest eigenvalue of the second moments: their Frobenius norm."""
    scaled = inputs * np.sqrt(shares, dtype=np.float64)[:, None] / np.sqrt(len(inputs))
    # The smaller of both Gram matrices: they have the same norm.
    is_wide = inputs.shape[1] > len(inputs)
    return float(np.linalg.norm(scaled @ scaled.T if is_wide else scaled.T @ scaled))


def _batches(n_rows: int, descent: GradientDescent, rng: np.random.Generator) -> Iterator[Ints]:
    """Row numbers of every step; batches of an epoch differ in size by at most one row."""
    n_batches = -(-n_rows // descent.batch_size)
    for _ in range(descent.epochs):
        yield from np.array_split(rng.permutation(n_rows), n_batches)


def row_slices(values: Floats, categories: Categories) -> Iterator[slice]:
    """Slices of rows whose inputs fit in memory; at least one slice."""
    n_rows = len(values)
    n_more = sum(len(names) for names in categories if names)
    size = BATCH_ROWS if not n_more else max(1, BATCH_NUMBERS // (values.shape[1] + n_more))
    for start in range(0, max(n_rows, 1), size):
        yield slice(start, start + size)
