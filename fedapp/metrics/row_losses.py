"""Scores that are a sum over rows, by XGBoost's names and formulas.

Source: XGBoost 3.2's documentation of ``eval_metric``. Here in float64, there in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedapp.metrics.adders import Adder
from fedapp.metrics.names import NAMES, WITH_POWER, is_custom
from fedapp.trees.objective import custom_sum

Array = NDArray[np.float64]

_SMALLEST = 1e-16  # of a probability or a mean whose logarithm is taken
_GAMMA_SHIFT = 1e-6  # XGBoost adds it to labels and predictions of the gamma deviance
# Bounds on a row's loss, see ``fedapp.metrics.adders``; all others are bounded as a deviance.
_SIZES = {"logloss": "loss", "error": "weight", "rmse": "square", "mae": "error"}
# Computed from the sums of every run, or from the histogram.
DERIVED = ("aucpr", "merror")


def _log_loss(labels: Array, shares: Array) -> Array:
    logs, others = (np.log(np.maximum(each, _SMALLEST)) for each in (shares, 1 - shares))
    losses: Array = -labels * logs - (1 - labels) * others
    return losses


def _error(labels: Array, shares: Array) -> Array:
    # XGBoost's probabilities are float32.
    called = shares.astype(np.float32) > np.float32(0.5)
    return np.where(called, 1 - labels, labels)


def _relative(labels: Array, predictions: Array) -> Array:
    if not labels.all():
        rule = "labels must not be 0 with eval-metric=mape"
        raise ValueError(f"{rule}, got {np.count_nonzero(labels == 0)} that are")
    return np.abs((labels - predictions) / labels)


def _poisson(labels: Array, means: Array) -> Array:
    values, places = np.unique(labels, return_inverse=True)
    factorials = np.array([math.lgamma(value + 1) for value in values.tolist()])[places]
    losses: Array = factorials + means - np.log(np.maximum(means, _SMALLEST)) * labels
    return losses


def _gamma(labels: Array, means: Array) -> Array:
    ratios = (labels + _GAMMA_SHIFT) / (means + _GAMMA_SHIFT)
    losses: Array = 2 * (ratios - np.log(ratios) - 1)
    return losses


def _tweedie(labels: Array, means: Array, power: float) -> Array:
    falling = labels * means ** (1 - power) / (1 - power)
    losses: Array = means ** (2 - power) / (2 - power) - falling
    return losses


_LOSSES: dict[str, Callable[[Array, Array], Array]] = {
    "logloss": _log_loss,
    "error": _error,
    "rmse": lambda labels, predictions: (labels - predictions) ** 2,
    "mae": lambda labels, predictions: np.abs(labels - predictions),
    "mape": _relative,
    "poisson-nloglik": _poisson,
    "gamma-deviance": _gamma,
}


def summed(objective: str, extra: Sequence[str]) -> tuple[str, ...]:
    """The requested metrics that need a sum of their own."""
    return tuple(name for name in extra if name not in (*NAMES[objective], *DERIVED))


def extra_sums(
    objective: str,
    extra: Sequence[str],
    predictions: Array,
    labels: Array,
    weights: Array,
    adder: Adder,
) -> list[Any]:
    """Weighted sums over rows, float64 of shape (n_rows,), one for each of ``summed``."""
    rows = weights > 0
    pair, weights = (labels[rows], predictions[rows]), weights[rows]
    return [
        custom_sum(*pair, weights)
        if is_custom(name)
        else adder.total(_SIZES.get(name, "deviance"), _losses(name, *pair), weights)
        for name in summed(objective, extra)
    ]


def _losses(name: str, labels: Array, predictions: Array) -> Array:
    """Unweighted loss of each row."""
    kind, _, power = name.partition("@")
    if kind == WITH_POWER:
        return _tweedie(labels, predictions, float(power))
    return _LOSSES[kind](labels, predictions)


def score_of(name: str, total: float, weight: float) -> float:
    """A score from its sum and the weight of all rows; nan without rows."""
    mean = total / weight if weight > 0 else np.nan
    return float(np.sqrt(mean)) if name == "rmse" else float(mean)
