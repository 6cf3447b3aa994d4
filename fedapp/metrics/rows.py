"""Scores of pooled rows: classification from sums, regression by scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedapp.metrics.adders import DOUBLES
from fedapp.metrics.names import NAMES
from fedapp.metrics.row_losses import extra_sums
from fedapp.metrics.scores import binary_scores, multi_scores, with_extra
from fedapp.metrics.sums import (
    N_OWN_SUMS,
    Array,
    Rows,
    binary_sums,
    checked_rows,
    class_margins,
    multi_sums,
)
from fedapp.trees.objective import exact_predictions


def pooled(
    objective: str, margins: Rows, labels: Rows, weights: Rows, extra: Sequence[str] = ()
) -> dict[str, float]:
    """Exact scores from all rows; arguments as for ``statistics``.

    They equal scikit-learn's, except that an undefined score is nan without a warning, auc ranks
    margins, so probabilities that round to 1 are no ties, and log losses clip no probability.
    """
    margins64, labels64, weights64 = checked_rows(objective, margins, labels, weights)
    rows = weights64 > 0
    if not rows.any():
        return dict.fromkeys((*NAMES[objective], *extra), np.nan)
    of_rows = margins64[rows], labels64[rows], weights64[rows]
    if objective == "multi:softprob":
        return _pooled_multi(*of_rows, extra)
    predictions = exact_predictions(objective, of_rows[0])[:, 0]
    sums = np.zeros(N_OWN_SUMS)
    sums[0] = of_rows[2].sum()
    more = extra_sums(objective, extra, predictions, *of_rows[1:], DOUBLES)
    sums = np.concatenate((sums, more))
    if objective == "binary:logistic":
        binary_rows = of_rows[0][:, 0], *of_rows[1:]
        histogram = _histogram(*binary_rows)
        by_name = binary_scores(np.array(binary_sums(*binary_rows)), histogram)
        return with_extra(objective, by_name, sums, extra, histogram)
    return with_extra(objective, _pooled_regression(predictions, *of_rows[1:]), sums, extra)


def _pooled_multi(
    margins: Array, labels: Array, weights: Array, extra: Sequence[str]
) -> dict[str, float]:
    by_class = (
        _histogram(odds, (labels == one).astype(np.float64), weights)
        for one, odds in enumerate(class_margins(margins).T)
    )
    sums = multi_sums(margins, labels.astype(np.int64), weights)
    return with_extra("multi:softprob", multi_scores(sums, by_class), sums, extra)


def _histogram(margins: Array, labels: Array, weights: Array) -> Array:
    """Class x bin, where every distinct margin is a bin."""
    points, bins = np.unique(margins, return_inverse=True)
    return DOUBLES.cells(labels.astype(np.int64), bins, weights, (2, points.size))


def _pooled_regression(predictions: Array, labels: Array, weights: Array) -> dict[str, float]:
    from sklearn import metrics as sk

    pair, rule = (labels, predictions), {"sample_weight": weights}
    return {
        "rmse": float(sk.root_mean_squared_error(*pair, **rule)),
        "mae": float(sk.mean_absolute_error(*pair, **rule)),
        "r2": float(sk.r2_score(*pair, **rule)) if np.ptp(labels) else np.nan,
    }


def sigmoid(margins: Array) -> Array:
    """1 / (1 + exp(-margin)) without overflow; 0 gives exactly 0.5."""
    small = np.exp(-np.abs(margins))
    return np.where(margins >= 0, 1.0, small) / (1.0 + small)
