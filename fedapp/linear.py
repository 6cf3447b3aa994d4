"""Linear models: logistic, softmax and linear regression on standardised inputs, in numpy.

An input is a column of numbers, or one category of a column of categories: 1 where a row has it,
else 0, so that a row without a value has 0 in all inputs of the column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.categories import Categories, entries_of
from fedapp.trees.objective import REGRESSION, Objective, gradients, n_outputs
from fedapp.trees.text import Opening, read_categories, read_model, write_model

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.float32]

KIND = "linear"
ARRAYS = ("means", "scales", "weights", "bias")
BATCH_ROWS = 2**14
BATCH_NUMBERS = 2**22  # inputs of a batch, where columns of categories have many
MOST_HELD = 2**27  # inputs of rows that a descent makes once, and not for every batch
# Largest second derivative of the loss of a row by its margin.
STEEPEST = {"binary:logistic": 0.25, "multi:softprob": 0.5, "reg:logistic": 0.25, REGRESSION: 1.0}
# A column whose spread is below this share of its mean is constant but for rounding.
LEAST_SPREAD = 1e-10


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Weight, mean and sum of squared deviations of the present values of each input.

    Parameters
    ----------
    counts, means, squares : float64, shape (n_inputs,); a column without a value has zeros.
    """

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
    """Of the inputs, in order: names of columns, and ``column=category``."""
    known = entries_of(categories, len(columns))
    return tuple(
        one
        for column, names in zip(columns, known, strict=True)
        for one in ([column] if names is None else [f"{column}={name}" for name in names])
    )


def expanded(values: Rows, categories: Categories) -> Rows:
    """The inputs of rows, before they are standardised.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns); NaN is missing.

    Returns
    -------
    float32, shape (n_rows, n_inputs).
    """
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
    """Moments of the inputs of some rows.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns); NaN is missing.
    weights : float32, shape (n_rows,), >= 0.
    categories : names of the categories of each column.
    """
    return merge_moments(
        _moments(
            expanded(values[rows], categories).astype(np.float64),
            weights[rows].astype(np.float64),
        )
        for rows in row_slices(values, categories)
    )


def _moments(values: Floats, weights: Floats) -> Moments:
    there = np.where(np.isnan(values), 0.0, weights[:, None])
    counts, known = there.sum(axis=0), np.nan_to_num(values)
    means = (there * known).sum(axis=0) / np.where(counts > 0, counts, 1)
    return Moments(counts, means, (there * (known - means) ** 2).sum(axis=0))


def merge_moments(moments: Iterable[Moments]) -> Moments:
    """Moments of the rows of all together, without the cancellation of plain square sums.

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
    """Margins that are linear in the standardised inputs; a missing number counts as the mean.

    Parameters
    ----------
    objective : the loss it was trained for.
    columns : names of the features, in order.
    classes : names of the classes in the order of their ids; empty for regression.
    means, scales : float64, shape (n_inputs,): input i enters as ``(x - means[i]) / scales[i]``.
    weights : float64, shape (n_inputs, n_outputs).
    bias : float64, shape (n_outputs,).
    categories : names of the categories of each column; empty where all hold numbers.
    """

    objective: Objective
    columns: tuple[str, ...]
    classes: tuple[str, ...]
    means: Floats
    scales: Floats
    weights: Floats
    bias: Floats
    categories: Categories = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return input_names(self.columns, self.categories)

    @property
    def n_outputs(self) -> int:
        """Margins of a row: classes for softmax, else 1."""
        return n_outputs(self.objective, len(self.classes))

    @property
    def base_margin(self) -> Rows:
        """Margins of a row whose inputs are all means; float32, shape (n_outputs,)."""
        return self.bias.astype(np.float32)


def predict_linear(model: LinearModel, values: Rows) -> Rows:
    """Margins of rows.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns); NaN is missing.

    Returns
    -------
    float32, shape (n_rows, n_outputs).
    """
    margins = np.empty((len(values), model.n_outputs), dtype=np.float32)
    for rows in row_slices(values, model.categories):
        inputs = standardised(expanded(values[rows], model.categories), model.means, model.scales)
        margins[rows] = inputs @ model.weights + model.bias
    return margins


def standardised(values: Rows, means: Floats, scales: Floats) -> Floats:
    """Inputs of mean 0 and spread 1; a missing value is 0."""
    inputs: Floats = np.nan_to_num((values - means) / scales)
    return inputs


@dataclass(frozen=True, slots=True)
class Descent:
    """Mini-batch gradient descent.

    Parameters
    ----------
    epochs : passes over the rows, >= 0.
    batch_size : most rows a step, >= 1.
    learning_rate : longest step, > 0.
    decay : factor of every step, in [0, 1].
    l2 : penalty, half of it times the square of the weights; the bias is free.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    decay: float
    l2: float


def descend(
    model: LinearModel,
    rows: tuple[Rows, Rows, Rows],
    descent: Descent,
    rng: np.random.Generator,
) -> LinearModel:
    """Train on from a model on some rows.

    A step is never longer than 1 / L, where L bounds the curvature of the batch's loss. So no
    learning rate and no outlier makes it diverge. There is no momentum: it would carry a step that
    fits an outlier on through batches that do not have it.

    Parameters
    ----------
    rows : values, labels and weights, as ``grow_trees`` takes them.
    """
    values, labels, weights = rows
    mean_weight = float(weights.mean(dtype=np.float64))
    if not mean_weight > 0:
        return model
    theta = np.vstack((model.weights, model.bias))
    fits = len(values) * len(model.means) <= MOST_HELD
    everything = _inputs(model, values) if fits else None
    for batch in _batches(len(values), descent, rng):
        inputs = _inputs(model, values[batch]) if everything is None else everything[batch]
        shares = weights[batch] / np.float32(mean_weight)
        margins = (inputs @ theta).astype(np.float32)
        pairs = gradients(model.objective, margins, labels[batch], shares)
        slope = inputs.T @ pairs[..., 0].astype(np.float64) / len(batch)
        slope[:-1] += descent.l2 * theta[:-1]
        curvature = STEEPEST[model.objective] * _spread(inputs, shares) + descent.l2
        theta -= descent.decay * min(descent.learning_rate, 1 / (curvature + 1e-12)) * slope
    return replace(model, weights=theta[:-1], bias=theta[-1])


def _inputs(model: LinearModel, values: Rows) -> Floats:
    """Standardised inputs, and one of ones for the bias."""
    inputs = np.ones((len(values), len(model.means) + 1))
    for rows in row_slices(values, model.categories):
        found = expanded(values[rows], model.categories)
        inputs[rows, :-1] = standardised(found, model.means, model.scales)
    return inputs


def _spread(inputs: Floats, shares: Rows) -> float:
    """At least the largest eigenvalue of the inputs' second moments: their Frobenius norm."""
    scaled = inputs * np.sqrt(shares, dtype=np.float64)[:, None] / np.sqrt(len(inputs))
    is_wide = inputs.shape[1] > len(inputs)
    return float(np.linalg.norm(scaled @ scaled.T if is_wide else scaled.T @ scaled))


def _batches(
    n_rows: int, descent: Descent, rng: np.random.Generator
) -> Iterator[npt.NDArray[np.int64]]:
    """Row numbers of every step; the batches of an epoch differ by one row at most."""
    n_batches = -(-n_rows // descent.batch_size)
    for _ in range(descent.epochs):
        yield from np.array_split(rng.permutation(n_rows), n_batches)


def row_slices(values: Rows, categories: Categories) -> Iterator[slice]:
    """Rows of a table, some at a time, as their inputs take memory; one slice at least."""
    n_rows, n_more = len(values), sum(len(names) for names in categories if names)
    size = BATCH_ROWS if not n_more else max(1, BATCH_NUMBERS // (values.shape[1] + n_more))
    for start in range(0, max(n_rows, 1), size):
        yield slice(start, start + size)


def linear_to_json(model: LinearModel) -> str:
    """The model as text; the same model always gives the same text."""
    content: dict[str, Any] = {name: getattr(model, name).tolist() for name in ARRAYS}
    if model.categories:
        content = {"categories": model.categories, "inputs": model.inputs, **content}
    return write_model(KIND, model, content, ensure_ascii=False)


def linear_from_json(text: str) -> LinearModel:
    """Read a model that ``linear_to_json`` wrote.

    Raises
    ------
    DataError : the text is no linear model of this format.
    """
    return read_model(text, KIND, _checked)


def _checked(said: Opening, document: Mapping[str, Any]) -> LinearModel:
    """The model of a document whose arrays fit its columns, categories and classes."""
    categories = read_categories(document, len(said.columns))
    arrays = {name: np.array(document[name], dtype=np.float64) for name in ARRAYS}
    model = LinearModel(said.objective, said.columns, said.classes, **arrays, categories=categories)
    n_inputs, width = len(model.inputs), model.n_outputs
    shapes = [(n_inputs,), (n_inputs,), (n_inputs, width), (width,)]
    if [array.shape for array in arrays.values()] != shapes:
        raise ValueError(f"arrays must be of shapes {shapes}")
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise ValueError("numbers must be finite")
    if not (model.scales > 0).all():
        raise ValueError("scales must be > 0")
    return model
