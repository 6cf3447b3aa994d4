"""Scores of pooled rows, by scikit-learn."""

from __future__ import annotations

import numpy as np

from fedapp.metrics.names import NAMES
from fedapp.metrics.sums import Array, Rows, checked_rows, class_margins, log_softmax


def pooled(objective: str, margins: Rows, labels: Rows, weights: Rows) -> dict[str, float]:
    """The scores of ``scores``, exactly, by scikit-learn from all rows; arguments as there.

    Two departures from scikit-learn: an undefined score is nan without a warning, and auc ranks
    margins, so probabilities that round to 1 are no ties. Its log losses clip probabilities at
    2e-16, where ``scores`` does not.
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
    from sklearn import metrics as sk

    p = sigmoid(margins[:, 0])
    guesses = (p >= 0.5).astype(np.float64)
    fpr = tpr = np.array([np.nan])
    if np.ptp(labels):
        every = {"sample_weight": weights, "drop_intermediate": False}
        fpr, tpr, _ = sk.roc_curve(labels, margins[:, 0], **every)
    rule = {"sample_weight": weights, "zero_division": np.nan}
    return {
        "auc": float(np.trapezoid(tpr, fpr)) if fpr.size > 1 else np.nan,
        "logloss": float(sk.log_loss(labels, p, sample_weight=weights, labels=[0, 1])),
        "accuracy": float(sk.accuracy_score(labels, guesses, sample_weight=weights)),
        "f1": float(sk.f1_score(labels, guesses, **rule)),
        "precision": float(sk.precision_score(labels, guesses, **rule)),
        "recall": float(sk.recall_score(labels, guesses, **rule)),
        "ks": float(np.abs(tpr - fpr).max()),
        "pr_auc": float(sk.average_precision_score(labels, margins[:, 0], sample_weight=weights))
        if labels.any()
        else np.nan,
    }


def _pooled_multi(margins: Array, labels: Array, weights: Array) -> dict[str, float]:
    from sklearn import metrics as sk

    p, class_ids = np.exp(log_softmax(margins)), np.arange(margins.shape[1])
    guesses, present = margins.argmax(axis=1), np.unique(labels)
    rule = {"sample_weight": weights, "average": "macro"}
    odds = class_margins(margins)
    areas = [
        sk.roc_auc_score(labels == one, odds[:, int(one)], sample_weight=weights)
        for one in (present if present.size > 1 else ())
    ]
    return {
        "mlogloss": float(sk.log_loss(labels, p, sample_weight=weights, labels=class_ids)),
        "accuracy": float(sk.accuracy_score(labels, guesses, sample_weight=weights)),
        "balanced_accuracy": float(sk.recall_score(labels, guesses, labels=present, **rule)),
        "macro_f1": float(sk.f1_score(labels, guesses, **rule)),
        "auc_ovr": float(np.mean(areas)) if areas else np.nan,
    }


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
