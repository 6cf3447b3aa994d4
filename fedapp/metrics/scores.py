"""Scores read off the sums of all parties together."""

from __future__ import annotations

import numpy as np

from fedapp.metrics.sums import Array, Statistics, check_statistics

# r2 divides by sum w y^2 - (sum w y)^2 / sum w. Below this share of its first term the difference
# is rounding error of float64 sums (about n_rows * 2e-16 at worst).
_MIN_SPREAD = 1e-12


def scores(objective: str, statistics: Statistics) -> dict[str, float]:
    """Every score of the objective, from the statistics of all parties together.

    Returns
    -------
    name -> value, nan where it is undefined (no rows, no positives, constant target ...)
        binary:logistic: auc, logloss, accuracy, f1, precision, recall, ks;
        multi:softprob: accuracy, mlogloss; reg:squarederror: rmse, mae, r2.

    Raises
    ------
    ValueError : the statistics are not those of this objective.
    """
    check_statistics(objective, statistics)
    if objective == "binary:logistic":
        return _binary_scores(statistics)
    if objective == "multi:softprob":
        weight, loss = statistics.sums
        right = float(np.trace(statistics.histogram))
        return {"accuracy": _ratio(right, weight), "mlogloss": _ratio(loss, weight)}
    weight, squares, absolutes, labels, label_squares = statistics.sums
    spread = label_squares - _ratio(labels * labels, weight)
    unexplained = squares / spread if spread > _MIN_SPREAD * label_squares else np.nan
    return {
        "rmse": float(np.sqrt(_ratio(squares, weight))),
        "mae": _ratio(absolutes, weight),
        "r2": float(1.0 - unexplained),
    }


def auc_error(statistics: Statistics) -> float:
    """Bound on ``|scores()["auc"] - exact auc|`` of binary:logistic; nan where auc is.

    Only pairs of one bin can be ordered wrongly, and ``scores`` counts each of them as one half:
    sum_b positives_b negatives_b / (2 P N).
    """
    check_statistics("binary:logistic", statistics)
    negatives, positives = statistics.histogram
    return _ratio(negatives @ positives, 2.0 * negatives.sum() * positives.sum())


def _binary_scores(statistics: Statistics) -> dict[str, float]:
    weight, loss, hits, misses, alarms = (float(term) for term in statistics.sums)
    fpr, tpr = roc(statistics.histogram)
    return {
        "auc": float(np.trapezoid(tpr, fpr)) if fpr.size else np.nan,
        "logloss": _ratio(loss, weight),
        "accuracy": _ratio(weight - misses - alarms, weight),
        "f1": _ratio(2.0 * hits, 2.0 * hits + alarms + misses),
        "precision": _ratio(hits, hits + alarms),
        "recall": _ratio(hits, hits + misses),
        "ks": float(np.abs(tpr - fpr).max()) if fpr.size else np.nan,
    }


def roc(histogram: Array) -> tuple[Array, Array]:
    """False and true positive rates, (0, 0) first, (1, 1) last; empty without both classes."""
    negatives, positives = histogram[:, histogram.any(axis=0)][:, ::-1]
    if not (negatives.any() and positives.any()):
        return np.zeros(0), np.zeros(0)
    falls, rises = (np.concatenate([[0.0], np.cumsum(x)]) for x in (negatives, positives))
    return falls / falls[-1], rises / rises[-1]


def _ratio(part: float, whole: float) -> float:
    """part / whole, nan where whole is 0 or undefined."""
    return float(part / whole) if whole > 0 else np.nan
