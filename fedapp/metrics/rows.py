"""Scores of pooled rows: of classes by their sums, of numbers by scikit-learn."""

from __future__ import annotations

import numpy as np

from fedapp.metrics.names import NAMES
from fedapp.metrics.scores import binary_scores, multi_scores
from fedapp.metrics.sums import (
    Array,
    Rows,
    binary_sums,
    cells,
    checked_rows,
    class_margins,
    multi_sums,
)


def pooled(objective: str, margins: Rows, labels: Rows, weights: Rows) -> dict[str, float]:
    """The scores of ``scores``, exactly, from all rows; arguments as there.

    They are scikit-learn's but for this: an undefined score is nan without a warning, auc ranks
    margins, so probabilities that round to 1 are no ties, and log losses clip no probability.
    """
    margins64, labels64, weights64 = checked_rows(objective, margins, labels, weights)
    rows = weights64 > 0
    if not rows.any():
        return dict.fromkeys(NAMES[objective], np.nan)
    of_rows = margins64[rows], labels64[rows], weights64[rows]
    if objective == "binary:logistic":
        return _pooled_binary(*of_rows)
    return (
        _pooled_multi(*of_rows) if objective == "multi:softprob" else _pooled_regression(*of_rows)
    )


def _pooled_binary(margins: Array, labels: Array, weights: Array) -> dict[str, float]:
    given = margins[:, 0], labels, weights
    return binary_scores(binary_sums(*given), _histogram(*given))


def _pooled_multi(margins: Array, labels: Array, weights: Array) -> dict[str, float]:
    by_class = (
        _histogram(odds, (labels == one).astype(np.float64), weights)
        for one, odds in enumerate(class_margins(margins).T)
    )
    return multi_scores(multi_sums(margins, labels.astype(np.int64), weights), by_class)


def _histogram(margins: Array, labels: Array, weights: Array) -> Array:
    """Class x bin, where every distinct margin has a bin of its own."""
    points, bins = np.unique(margins, return_inverse=True)
    return cells(labels.astype(np.int64), bins, weights, (2, points.size))


def _pooled_regression(margins: Array, labels: Array, weights: Array) -> dict[str, float]:
    from sklearn import metrics as sk

    pair, rule = (labels, margins[:, 0]), {"sample_weight": weights}
    return {
        "rmse": float(sk.root_mean_squared_error(*pair, **rule)),
        "mae": float(sk.mean_absolute_error(*pair, **rule)),
        "r2": float(sk.r2_score(*pair, **rule)) if np.ptp(labels) else np.nan,
    }


def sigmoid(margins: Array) -> Array:
    """1 / (1 + exp(-margin)) without overflow; 0 gives exactly 0.5."""
    small = np.exp(-np.abs(margins))
    return np.where(margins >= 0, 1.0, small) / (1.0 + small)
