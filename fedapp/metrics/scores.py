"""Scores read off the sums of all parties together."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fedapp.metrics.sums import Array, Statistics, check_statistics, confusion

# r2 divides by sum w y^2 - (sum w y)^2 / sum w. Below this share of its first term the difference
# is rounding error of float64 sums (about n_rows * 2e-16 at worst).
_MIN_SPREAD = 1e-12


def scores(objective: str, statistics: Statistics) -> dict[str, float]:
    """Every score of the objective, from the statistics of all parties together.

    Returns
    -------
    name -> value, nan where it is undefined (no rows, no positives, constant target ...)
        binary:logistic: auc, logloss, accuracy, f1, precision, recall, ks, pr_auc;
        multi:softprob: accuracy, mlogloss, and means over the classes that have rows, each of the
        same weight: balanced_accuracy (recall), auc_ovr (a class against all others), macro_f1
        (here also over classes that are predicted alone); reg:squarederror: rmse, mae, r2.

    Raises
    ------
    ValueError : the statistics are not those of this objective.
    """
    check_statistics(objective, statistics)
    if objective == "binary:logistic":
        return binary_scores(statistics.sums, statistics.histogram)
    if objective == "multi:softprob":
        return multi_scores(statistics.sums, _by_class(statistics))
    weight, squares, absolutes, labels, label_squares = statistics.sums
    spread = label_squares - ratio(labels * labels, weight)
    unexplained = squares / spread if spread > _MIN_SPREAD * label_squares else np.nan
    return {
        "rmse": float(np.sqrt(ratio(squares, weight))),
        "mae": ratio(absolutes, weight),
        "r2": float(1.0 - unexplained),
    }


def score_errors(objective: str, statistics: Statistics) -> dict[str, float]:
    """Bounds on ``|scores()[name] - exact score|`` of scores that histograms give; nan where the
    score is.

    Only pairs of one bin can be ordered wrongly. ``auc`` counts each of them as one half: the error
    is at most sum_b positives_b negatives_b / (2 P N); ``auc_ovr`` is a mean of such.
    ``pr_auc`` takes all rows of a bin as one step: its precision lies between those with all of the
    bin's negatives first and all of its positives first.
    """
    check_statistics(objective, statistics)
    if objective == "binary:logistic":
        errors = {"auc": _auc_error(statistics.histogram)}
        return errors | {"pr_auc": _pr_auc_error(statistics.histogram)}
    if objective == "multi:softprob":
        return {"auc_ovr": _class_mean([_auc_error(each) for each in _by_class(statistics)])}
    return {}


def auc_error(statistics: Statistics) -> float:
    """The bound on ``auc`` of binary:logistic; see ``score_errors``."""
    check_statistics("binary:logistic", statistics)
    return _auc_error(statistics.histogram)


def _auc_error(histogram: Array) -> float:
    negatives, positives = histogram
    return ratio(negatives @ positives, 2.0 * negatives.sum() * positives.sum())


def _pr_auc_error(histogram: Array) -> float:
    negatives, positives = histogram[:, ::-1]
    hits, alarms = np.cumsum(positives), np.cumsum(negatives)
    bins = positives > 0
    taken = hits[bins] / (hits + alarms)[bins]
    best = hits[bins] / (hits + alarms - negatives)[bins]
    before = (hits - positives)[bins]
    worst = before / np.maximum(before + alarms[bins], np.finfo(np.float64).tiny)
    off = np.maximum(best - taken, taken - worst)
    return ratio(float(positives[bins] @ off), float(positives.sum()))


def multi_scores(sums: Array, by_class: Iterable[Array]) -> dict[str, float]:
    """The scores of several classes, of their sums and the histogram of each against the others."""
    weight, loss = sums[:2]
    counts = confusion(sums)
    hits, true, guessed = np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)
    recalls = [ratio(*pair) for pair in zip(hits, true, strict=True)]
    f1s = [ratio(*pair) for pair in zip(2.0 * hits, true + guessed, strict=True)]
    return {
        "mlogloss": ratio(loss, weight),
        "accuracy": ratio(float(hits.sum()), weight),
        "balanced_accuracy": _class_mean(recalls),
        "macro_f1": _class_mean(f1s),
        "auc_ovr": _class_mean([_area(*roc(each)) for each in by_class]),
    }


def _by_class(statistics: Statistics) -> Array:
    """Histogram of each class against the others, shape (n_classes, 2, n_bins)."""
    return statistics.histogram.reshape(-1, 2, statistics.histogram.shape[1])


def _class_mean(values: list[float]) -> float:
    """Mean over the classes for which a score is defined."""
    defined = [value for value in values if not np.isnan(value)]
    return float(np.mean(defined)) if defined else np.nan


def binary_scores(sums: Array, histogram: Array) -> dict[str, float]:
    """The scores of two classes, of their sums and their histogram."""
    weight, loss, hits, misses, alarms = map(float, sums)
    fpr, tpr = roc(histogram)
    return {
        "auc": _area(fpr, tpr),
        "logloss": ratio(loss, weight),
        "accuracy": ratio(weight - misses - alarms, weight),
        "f1": ratio(2.0 * hits, 2.0 * hits + alarms + misses),
        "precision": ratio(hits, hits + alarms),
        "recall": ratio(hits, hits + misses),
        "ks": float(np.abs(tpr - fpr).max()) if fpr.size else np.nan,
        "pr_auc": _average_precision(histogram),
    }


def _average_precision(histogram: Array) -> float:
    """Mean precision over the positives, each at its own bin."""
    negatives, positives = histogram[:, ::-1]
    hits, alarms = np.cumsum(positives), np.cumsum(negatives)
    bins = positives > 0
    precisions = hits[bins] / (hits + alarms)[bins]
    return ratio(float(positives[bins] @ precisions), float(positives.sum()))


def _area(fpr: Array, tpr: Array) -> float:
    return float(np.trapezoid(tpr, fpr)) if fpr.size else np.nan


def roc(histogram: Array) -> tuple[Array, Array]:
    """False and true positive rates, (0, 0) first, (1, 1) last; empty without both classes."""
    negatives, positives = histogram[:, histogram.any(axis=0)][:, ::-1]
    if not (negatives.any() and positives.any()):
        return np.zeros(0), np.zeros(0)
    falls, rises = (np.concatenate([[0.0], np.cumsum(x)]) for x in (negatives, positives))
    return falls / falls[-1], rises / rises[-1]


def ratio(part: float, whole: float) -> float:
    """part / whole, nan where whole is 0 or undefined."""
    return float(part / whole) if whole > 0 else np.nan
