"""Compute scores from the sums of all parties together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fedapp.metrics.row_losses import score_of, summed
from fedapp.metrics.sums import N_OWN_SUMS, Array, Statistics, check_statistics, confusion

# r2 divides by sum w y^2 - (sum w y)^2 / sum w. Below this share of its first term the difference
# is rounding error of float64 sums (about n_rows * 2e-16 at worst).
_MIN_SPREAD = 1e-12
_ROUNDING = 1e-14  # relative intercepts up to this count as 0


def scores(objective: str, statistics: Statistics, extra: Sequence[str] = ()) -> dict[str, float]:
    """Every score of the objective, then those of ``extra``, the names given to ``statistics``.

    Returns
    -------
    name -> value, nan where it is undefined (no rows, no positives, constant target ...)
        Multi-class balanced_accuracy (recall), auc_ovr (a class against all others) and macro_f1
        are unweighted means over the classes that have rows, macro_f1 also over classes that are
        only predicted.
    """
    check_statistics(objective, statistics)
    sums, histogram = statistics.sums, statistics.histogram
    if objective == "multi:softprob":
        return with_extra(objective, multi_scores(sums, _by_class(statistics)), sums, extra)
    if objective == "binary:logistic":
        by_name = binary_scores(sums[:N_OWN_SUMS], histogram)
        return with_extra(objective, by_name, sums, extra, histogram)
    weight, squares, absolutes, labels, label_squares = sums[:N_OWN_SUMS]
    spread = label_squares - ratio(labels * labels, weight)
    unexplained = squares / spread if spread > _MIN_SPREAD * label_squares else np.nan
    by_name = {
        "rmse": float(np.sqrt(ratio(squares, weight))),
        "mae": ratio(absolutes, weight),
        "r2": float(1.0 - unexplained),
    }
    return with_extra(objective, by_name, sums, extra)


def with_extra(
    objective: str,
    found: dict[str, float],
    sums: Array,
    extra: Sequence[str],
    histogram: Array | None = None,
) -> dict[str, float]:
    """Add the requested scores that are not among those given."""
    totals = dict(zip(summed(objective, extra), sums[N_OWN_SUMS:].tolist(), strict=False))
    for name in extra:
        if name in totals:
            found[name] = score_of(name, totals[name], float(sums[0]))
        elif name == "merror":
            found[name] = 1.0 - found["accuracy"]
        elif name == "aucpr" and histogram is not None:
            found[name] = area_under_precision_recall(histogram)
    return found


def score_errors(objective: str, statistics: Statistics) -> dict[str, float]:
    """Bounds on ``|scores()[name] - exact score|`` of scores from histograms, nan where these are.

    Only pairs of one bin can be in the wrong order. ``auc`` counts each of them as one half: the
    error is at most sum_b positives_b negatives_b / (2 P N); ``auc_ovr`` is a mean of such.
    ``pr_auc`` takes all rows of a bin as one step: its precision is between those with all of the
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
    """Multi-class scores from sums and the histogram of each class against the others."""
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
    """Binary scores from sums and histogram."""
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


def area_under_precision_recall(histogram: Array) -> float:
    """Area under precision over recall, as XGBoost's ``aucpr``; nan without both classes.

    Source: Davis and Goadrich 2006, "The relationship between Precision-Recall and ROC curves":
    between two thresholds false positives grow linearly with true positives.
    """
    negatives, positives = histogram[:, histogram.any(axis=0)][:, ::-1]
    n_positives = positives.sum()
    if not (negatives.any() and positives.any()):
        return np.nan
    rises = positives > 0  # elsewhere recall does not change
    alarms, hits = np.cumsum(negatives)[rises], np.cumsum(positives)[rises]
    gained = positives[rises]
    before, alarms_before = hits - gained, alarms - negatives[rises]
    # Alarms at a hit h: alarms_before + slope (h - before), so precision is h / (a h + b).
    slope = negatives[rises] / gained
    a, b = 1.0 + slope, alarms_before - slope * before
    linear = np.abs(b) <= _ROUNDING * (hits + alarms)
    ends = [np.where(linear, 1.0, a * h + b) for h in (before, hits)]
    curved = gained / a - np.where(linear, 0.0, b) / a**2 * np.log(ends[1] / ends[0])
    return float(curved.sum() / n_positives)


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
