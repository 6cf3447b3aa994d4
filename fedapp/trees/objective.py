"""Loss functions: gradients in float32 as XGBoost 3 computes them, margins to predictions.

Source: Chen and Guestrin 2016 (arXiv:1603.02754v3), Eq. 2, and XGBoost's documented objectives.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Objective = Literal["binary:logistic", "multi:softprob", "reg:squarederror"]
REGRESSION: Final = "reg:squarederror"

SMALLEST_HESSIAN = np.float32(1e-16)
# XGBoost's default intercept; the same for every class, so it cancels in the softmax.
SOFTMAX_INTERCEPT = 0.5


def n_outputs(objective: Objective, n_classes: int) -> int:
    """Margins of a row, and trees of a boosting round: one a class for softmax, else 1."""
    return n_classes if objective == "multi:softprob" else 1


def check_classes(objective: Objective, n_classes: int) -> None:
    """Hold that a model for this loss may have so many classes.

    Raises
    ------
    ValueError : it may not.
    """
    fewest, most = {"binary:logistic": (2, 2), REGRESSION: (0, 0)}.get(objective, (2, 10**6))
    if not fewest <= n_classes <= most:
        raise ValueError(f"classes must be those of {objective}, got {n_classes}")


def base_score(objective: Objective, label_sum: float, weight_sum: float) -> np.float32:
    """Prediction before the first tree: the weighted mean of the labels of all parties.

    For ``multi:softprob`` it is 0.5 for every class, XGBoost's default.
    """
    if objective == "multi:softprob":
        return np.float32(SOFTMAX_INTERCEPT)
    return np.float32(label_sum / weight_sum)


def base_margin(objective: Objective, score: np.float32) -> np.float32:
    """``base_score`` on the scale of the margins: its logit for logistic loss."""
    if objective == "binary:logistic":
        return np.float32(-np.log(np.float32(1) / score - np.float32(1), dtype=np.float64))
    return np.float32(score)


def gradients(objective: Objective, margins: Array, labels: Array, weights: Array) -> Array:
    """First and second derivatives of the loss at the current margins.

    Parameters
    ----------
    margins : float32, shape (n_rows, n_outputs).
    labels : float32, shape (n_rows,): 0 or 1, a class id, or a number, by objective.
    weights : float32, shape (n_rows,), >= 0.

    Returns
    -------
    float32, shape (n_rows, n_outputs, 2): gradient and hessian, times the row's weight.
    """
    if objective == REGRESSION:
        errors, hessians = margins - labels[:, None], np.ones_like(margins)
    else:
        predictions = transform(objective, margins)
        truth = labels[:, None] if objective == "binary:logistic" else one_hot(labels, margins)
        errors = predictions - truth
        steepness = np.float32(1 if objective == "binary:logistic" else 2)
        hessians = steepness * predictions * (np.float32(1) - predictions)
        hessians = np.maximum(hessians, SMALLEST_HESSIAN)
    return np.stack((errors, hessians), axis=-1) * weights[:, None, None]


def transform(objective: Objective, margins: Array) -> Array:
    """Predictions of margins: probabilities, or the margins themselves for regression.

    Parameters
    ----------
    margins : float32, shape (n_rows, n_outputs).

    Returns
    -------
    float32, shape (n_rows, n_outputs).
    """
    if objective == "binary:logistic":
        # Past 88.7 the exponential leaves float32.
        return np.float32(1) / (_exp(np.minimum(-margins, np.float32(88.7))) + np.float32(1))
    if objective == "multi:softprob":
        powers = _exp(margins - margins.max(axis=1, keepdims=True))
        shares: Array = powers / powers.sum(axis=1, keepdims=True, dtype=np.float64).astype(
            np.float32
        )
        return shares
    return margins


def exact_predictions(
    objective: Objective, margins: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """``transform`` in float64, for margins that are exact sums of leaf weights.

    Parameters
    ----------
    margins : float64, shape (n_rows, n_outputs).
    """
    if objective == "binary:logistic":
        found: npt.NDArray[np.float64] = 1 / (1 + np.exp(-np.clip(margins, -700, 700)))
        return found
    if objective == "multi:softprob":
        powers = np.exp(margins - margins.max(axis=1, keepdims=True))
        shares: npt.NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
        return shares
    return margins


def margins_of(objective: Objective, predictions: npt.NDArray[np.float64]) -> Array:
    """Undo ``transform``, for models that predict probabilities without margins.

    Probabilities of 0 and 1 are moved by 2e-16, as in scikit-learn's log loss.
    """
    if objective == REGRESSION:
        return predictions.astype(np.float32)
    smallest = float(np.finfo(np.float64).eps)
    shares = np.clip(predictions, smallest, 1 - smallest)
    odds = shares / (1 - shares) if objective == "binary:logistic" else shares
    margins: Array = np.log(odds).astype(np.float32)
    return margins


def _exp(powers: Array) -> Array:
    """Correctly rounded float32, as the C library's expf; numpy's own is off by up to 2 ulp."""
    exact: npt.NDArray[np.float64] = np.exp(powers, dtype=np.float64)
    rounded: Array = exact.astype(np.float32)
    return rounded


def one_hot(labels: Array, margins: Array) -> Array:
    """1 in the column of the row's class, 0 elsewhere; float32, shape of ``margins``."""
    hot: Array = (labels[:, None] == np.arange(margins.shape[1])).astype(np.float32)
    return hot
