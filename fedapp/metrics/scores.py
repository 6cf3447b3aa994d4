"""Scores: from the sums of all parties, from pooled rows, at a threshold, and as curves.

Scores from sums and from pooled rows agree (``fedapp.metrics``). Of two classes a threshold is
chosen by the best F1 on rows that are not test rows; a row is called
positive where its probability is at or above it. With histograms it is the lower edge of a bin, and
the scores at it are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedapp.metrics import survival
from fedapp.metrics.adders import DOUBLES
from fedapp.metrics.names import AT_THRESHOLD, NAMES, is_possible, scored_names
from fedapp.metrics.sums import (
    N_BASE_SUMS,
    Array,
    Rows,
    Statistics,
    check_residual_range,
    check_statistics,
    checked_rows,
    class_margins,
    confusion,
    margin_edges,
    margin_middles,
    n_base_sums,
    score_of,
    statistics,
    summed,
)
from fedapp.trees.objective import (
    exact_predictions,
    expected_times,
    is_of_rows,
    is_ranking,
    is_regression,
    is_survival,
)

# r2 divides by sum w y^2 - (sum w y)^2 / sum w. Below this share of its first term the difference
# is rounding error of float64 sums (about n_rows * 2e-16 at worst).
_MIN_SPREAD = 1e-12
_ROUNDING = 1e-14  # relative intercepts up to this count as 0
BINARY = "binary:logistic"
FEWEST_OF_CLASS = 30  # validation rows, for a score to mean much
N_GROUPS = 10  # of rows with similar probabilities, for the calibration
N_SCORE_BINS = 25


def scores(objective: str, statistics: Statistics, extra: Sequence[str] = ()) -> dict[str, float]:
    """Every score of the objective, then those of ``extra``, the names of ``statistics``.

    Returns
    -------
    name -> value, nan where it is undefined (no rows, no positives, constant target ...), and where
        no rows have such a score, as noise is larger than its sums.
        Multi-class balanced_accuracy (recall), auc_ovr (a class against all others) and macro_f1
        are unweighted means over the classes that have rows, macro_f1 also over classes that are
        only predicted.
    """
    check_statistics(objective, statistics)
    sums, histogram = statistics.sums, statistics.histogram
    if is_ranking(objective):
        pairs = zip(scored_names(objective, extra), sums[2:], strict=False)
        return {name: ratio(total, sums[1]) for name, total in pairs}
    if objective == "multi:softprob":
        by_name = multi_scores(sums, _by_class(statistics))
    elif objective == BINARY:
        by_name = binary_scores(sums[:N_BASE_SUMS], histogram)
    elif is_survival(objective):
        by_name = {"c-index": survival.cell_scores(histogram, sums[2])[0]}
    else:
        weight, squares, absolutes, labels, label_squares = sums[:N_BASE_SUMS]
        spread = label_squares - ratio(labels * labels, weight)
        unexplained = squares / spread if spread > _MIN_SPREAD * label_squares else np.nan
        rmse, mae = score_of("rmse", squares, weight), ratio(absolutes, weight)
        by_name = {"rmse": rmse, "mae": mae, "r2": float(1.0 - unexplained)}
    of_extra = sums[n_base_sums(objective) :].tolist()
    totals = dict(zip(summed(objective, extra), of_extra, strict=False))
    for name in extra:
        if name in totals:
            by_name[name] = score_of(name, totals[name], float(sums[0]))
        elif name == "merror":
            by_name[name] = 1.0 - by_name["accuracy"]
        elif objective == BINARY and name == "aucpr":
            by_name[name] = area_under_precision_recall(histogram)
    return {name: value if is_possible(name, value) else np.nan for name, value in by_name.items()}


def class_weights(objective: str, statistics: Statistics) -> list[float]:
    """Weight of the rows of each class; empty for a regression, and where noise is larger."""
    check_statistics(objective, statistics)
    if objective == "multi:softprob":
        return _possible(confusion(statistics.sums).sum(axis=1))
    if objective != BINARY:
        return []
    weight, _, hits, misses, _ = map(float, statistics.sums[:N_BASE_SUMS])
    return _possible([weight - hits - misses, hits + misses])


def binning_errors(
    objective: str, statistics: Statistics, extra: Sequence[str] = ()
) -> dict[str, float]:
    """Bounds on ``|scores()[name] - exact score|`` of scores from histograms, nan where these are.

    Only rows of one bin can be in the wrong order. ``auc`` counts each of their pairs as one half:
    the error is at most sum_b positives_b negatives_b / (2 P N); ``auc_ovr`` is a mean of such.
    The other curves take all rows of a bin as one step: they are between those with all of the
    bin's negatives first and all of its positives first. For ``c-index`` see
    ``fedapp.metrics.survival``.
    """
    check_statistics(objective, statistics)
    histogram = statistics.histogram
    if objective == BINARY:
        errors = {
            "auc": _auc_error(histogram),
            "ks": _ks_error(histogram),
            "pr_auc": _pr_auc_error(histogram),
        }
        if "aucpr" in extra:
            errors["aucpr"] = _aucpr_error(histogram)
        return errors
    if objective == "multi:softprob":
        return {
            "auc_ovr": _class_mean([_auc_error(of_class) for of_class in _by_class(statistics)])
        }
    if is_survival(objective):
        return {"c-index": survival.cell_scores(histogram, statistics.sums[2])[1]}
    return {}


def _auc_error(histogram: Array) -> float:
    negatives, positives = histogram
    return ratio(negatives @ positives, 2.0 * negatives.sum() * positives.sum())


def _ks_error(histogram: Array) -> float:
    fpr, tpr = roc(histogram)
    inside = np.maximum(tpr[1:] - fpr[:-1], fpr[1:] - tpr[:-1])
    return float(max(inside.max() - np.abs(tpr - fpr).max(), 0.0)) if fpr.size else np.nan


def _aucpr_error(histogram: Array) -> float:
    negatives, positives = histogram[:, ::-1]
    hits, alarms = np.cumsum(positives), np.cumsum(negatives)

    def area(alarms: Array) -> float:
        """Area where alarms do not change while a bin's positives are added."""
        ratios = divided(hits + alarms, hits - positives + alarms, 1.0)  # unused without alarms
        logs = np.log(np.maximum(ratios, 1.0))
        return ratio(float((positives - alarms * logs).sum()), float(positives.sum()))

    value = area_under_precision_recall(histogram)
    return max(area(alarms - negatives) - value, value - area(alarms))


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
    hits = np.diag(counts)
    true = counts.sum(axis=1)
    guessed = counts.sum(axis=0)
    recalls = [ratio(*pair) for pair in zip(hits, true, strict=True)]
    f1s = [ratio(*pair) for pair in zip(2.0 * hits, true + guessed, strict=True)]
    return {
        "mlogloss": ratio(loss, weight),
        "accuracy": ratio(float(hits.sum()), weight),
        "balanced_accuracy": _class_mean(recalls),
        "macro_f1": _class_mean(f1s),
        "auc_ovr": _class_mean([_area(*roc(histogram)) for histogram in by_class]),
    }


def _by_class(statistics: Statistics) -> Array:
    """Histogram of each class against the others, shape (n_classes, 2, n_bins)."""
    return statistics.histogram.reshape(-1, 2, statistics.histogram.shape[1])


def _class_mean(values: list[float]) -> float:
    """Mean over the classes for which a share is defined; nan if noise makes one impossible."""
    defined = [value for value in values if not np.isnan(value)]
    is_defined = defined and all(is_possible("recall", value) for value in defined)
    return float(np.mean(defined)) if is_defined else np.nan


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
        "pr_auc": float(average_precisions(histogram[None])[0]),
    }


def average_precisions(histograms: Array) -> Array:
    """Mean precision over the positives, each at its bin; of each histogram, nan without them."""
    calls = np.cumsum(histograms[:, :, ::-1], axis=2)[:, :, ::-1]
    positives, hits = histograms[:, 1], calls[:, 1]
    weighted = positives * divided(hits, calls.sum(axis=1), 0.0)
    return divided(weighted.sum(axis=1), positives.sum(axis=1))


def divided(parts: Array, wholes: Array, otherwise: float = np.nan) -> Array:
    """parts / wholes, and another value where the whole is 0."""
    quotients = np.full(wholes.shape, otherwise)
    np.divide(parts, wholes, out=quotients, where=wholes > 0)
    return quotients


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
    alarms = np.cumsum(negatives)[rises]
    hits = np.cumsum(positives)[rises]
    gained = positives[rises]
    before = hits - gained
    alarms_before = alarms - negatives[rises]
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


# Pooled rows


def pooled(
    objective: str, margins: Rows, labels: Rows, weights: Rows, extra: Sequence[str] = ()
) -> dict[str, float]:
    """Exact scores from all rows; arguments as for ``statistics``.

    They equal scikit-learn's, except that an undefined score is nan without a warning, auc ranks
    margins, so probabilities that round to 1 are no ties, and log losses clip no probability.
    """
    exact = exact_statistics(objective, margins, labels, weights, extra)
    if not exact.sums[0]:
        return dict.fromkeys((*NAMES[objective], *extra), np.nan)
    by_name = scores(objective, exact, extra)
    if is_survival(objective):
        from fedapp.trees.survival import concordance  # compiled

        rows = weights > 0
        predictions = exact_predictions(objective, margins[rows].astype(np.float64))[:, 0]
        times = expected_times(objective, predictions)
        by_name["c-index"] = concordance(
            labels[rows].astype(float), times, weights[rows].astype(float)
        )
    return by_name


def exact_statistics(
    objective: str, margins: Rows, labels: Rows, weights: Rows, extra: Sequence[str] = ()
) -> Statistics:
    """Statistics of rows of positive weight, whose histograms have a bin for each distinct margin.

    Of a regression the sums of labels are less the first label, so that ``r2`` does not cancel.
    """
    rows = weights > 0
    margins, labels, weights = margins[rows], labels[rows], weights[rows]
    exact = statistics(objective, margins, labels, weights, 2, extra=extra)
    if objective == BINARY:
        columns = [(margins[:, 0].astype(np.float64), labels)]
    elif objective == "multi:softprob":
        odds = class_margins(margins.astype(np.float64)).T
        columns = [(of_class, labels == class_id) for class_id, of_class in enumerate(odds)]
    else:
        if is_regression(objective) and is_of_rows(objective) and len(labels):
            terms = labels.astype(np.float64) - float(labels[0])
            exact.sums[3:5] = weights @ np.stack([terms, terms**2], axis=1)
        return exact
    shares = weights.astype(np.float64)
    histograms = [exact_histogram(column, truth.astype(float), shares) for column, truth in columns]
    width = max(2, *(histogram.shape[1] for histogram in histograms))
    padded = [
        np.pad(histogram, ((0, 0), (0, width - histogram.shape[1]))) for histogram in histograms
    ]
    return Statistics(exact.sums, np.concatenate(padded))


def exact_histogram(margins: Array, labels: Array, weights: Array) -> Array:
    """Class x bin, where every distinct margin is a bin."""
    points, bins = np.unique(margins, return_inverse=True)
    return DOUBLES.cells(labels.astype(np.int64), bins, weights, (2, points.size))


def sigmoid(margins: Array) -> Array:
    """1 / (1 + exp(-margin)) without overflow; 0 gives exactly 0.5."""
    small = np.exp(-np.abs(margins))
    return np.where(margins >= 0, 1.0, small) / (1.0 + small)


# A threshold for two classes


def threshold_rows(has_valid: bool) -> str:
    """The subset that the threshold is chosen on: never the test rows."""
    return "valid" if has_valid else "train"


def few_of_class(share: float, n_valid: int) -> str:
    """A warning if few of the validation rows are of the rarer of two classes, which has this
    ``share`` of their weight; empty if there are enough, or none at all."""
    n_rows = round(share * n_valid)
    if not n_valid or n_rows >= FEWEST_OF_CLASS:
        return ""
    few = f"only some {n_rows} of {n_valid:,} validation rows are of the rarer class"
    rule = "too few to choose a threshold, and early stopping rests on them"
    return f"{few}: {rule}; a larger valid-fraction has more"


def rarer_share(scores: Mapping[str, float]) -> float | None:
    """Share of the rarer of two classes in the weight of rows, as their scores show; else None."""
    if "recall" not in scores:  # of two classes only
        return None
    accuracy, precision, recall = (scores[name] for name in ("accuracy", "precision", "recall"))
    if np.isnan(recall):  # no row is positive
        return 0.0
    # Misses and false alarms, in units of the positives. Without any call all positives are missed.
    errors = 1.0 if np.isnan(precision) else recall / precision - 2 * recall + 1 if recall else 0.0
    share = (1 - accuracy) / errors if errors > 0 else np.nan
    return min(share, 1 - share) if 0 <= share <= 1 else None


def best_bin(statistics: Statistics) -> int | None:
    """The first bin called positive at the best F1, the last of ties; None without positives."""
    check_statistics(BINARY, statistics)
    negatives, positives = statistics.histogram
    if not positives.any():
        return None
    used, n_positives = np.flatnonzero(negatives + positives), float(positives.sum())
    alarms, hits = np.cumsum(statistics.histogram[:, used][:, ::-1], axis=1)[:, ::-1]
    values = 2.0 * hits / (hits + alarms + n_positives)
    best = values.size - 1 - np.argmax(values[::-1])
    return int(used[best]) if best else 0


def scores_from_bin(statistics: Statistics, first: int, center: float = 0.0) -> dict[str, float]:
    """The threshold, and scores where the bins from ``first`` on are called positive."""
    check_statistics(BINARY, statistics)
    negatives, positives = statistics.histogram
    edges = np.concatenate(([-np.inf], margin_edges(positives.size)))
    calls = float(positives[first:].sum()), float(negatives[first:].sum())
    return _named(center + float(edges[first]), calls, float(positives.sum()))


def best_margin(margins: Rows, labels: Rows, weights: Rows) -> float | None:
    """The threshold of ``best_bin``, between the margins of two rows; None without positives.

    Of ties it is the highest. Arguments as for ``pooled`` of binary:logistic.
    """
    first = best_bin(exact_statistics(BINARY, margins, labels, weights))
    if not first:
        return None if first is None else -np.inf
    points = np.unique(margins[weights > 0, 0].astype(np.float64))
    return float((points[first - 1] + points[first]) / 2.0)


def scores_from_margin(
    margins: Rows, labels: Rows, weights: Rows, threshold: float
) -> dict[str, float]:
    """Scores where rows with margins >= ``threshold`` are called positive."""
    margins64, truth, shares = checked_rows(BINARY, margins, labels, weights)
    called = shares * (margins64[:, 0] >= threshold)
    calls = float(called @ truth), float(called @ (1.0 - truth))
    return _named(threshold, calls, float(shares @ truth))


def _named(margin: float, calls: tuple[float, float], n_positives: float) -> dict[str, float]:
    """Scores at a threshold; ``calls`` are hits and alarms."""
    hits, alarms = calls
    values = (
        float(sigmoid(np.array([margin]))[0]),
        ratio(2.0 * hits, hits + alarms + n_positives),
        ratio(hits, hits + alarms),
        ratio(hits, n_positives),
    )
    return dict(zip(AT_THRESHOLD, values, strict=True))


def pooled_subsets(
    objective: str, rows: Mapping[str, tuple[Rows, Rows, Rows]], extra: Sequence[str] = ()
) -> dict[str, dict[str, float]]:
    """``pooled`` for margins, labels and weights of "train", "valid" and "test"; {} without rows.

    For two classes also the scores at the threshold, which is chosen on the first two subsets.
    """
    scores = {
        subset: pooled(objective, margins, labels, weights, extra) if len(labels) else {}
        for subset, (margins, labels, weights) in rows.items()
    }
    if objective != BINARY:
        return scores
    chosen = rows.get(threshold_rows(bool(scores.get("valid"))))
    margin = best_margin(*chosen) if chosen is not None else None
    if margin is not None:
        for subset in (name for name, subset_scores in scores.items() if subset_scores):
            scores[subset] |= scores_from_margin(*rows[subset], margin)
    return scores


# What a report draws


def curves(
    objective: str,
    statistics: Statistics,
    n_points: int = 200,
    residual_range: float = 1.0,
    center: float = 0.0,
    threshold_bin: int | None = None,
) -> dict[str, Any]:
    """What a report draws, as lists for JSON; arguments not named here as for ``statistics``.

    Parameters
    ----------
    n_points : >= 2: most points of a curve, including its two ends.
    threshold_bin : the first bin called positive at a chosen threshold, if there is one.

    Returns
    -------
    binary
        {"roc": {"fpr", "tpr"}}, empty lists without positives or negatives; and where there are
        both {"pr": {"recall", "precision"}}, {"calibration": {"predicted", "observed", "rows"}} of
        groups of rows with similar probabilities, {"histogram": {"edges", "negatives",
        "positives"}} of the probability, {"confusion": 2 x 2} at probability 0.5, rows true, and
        {"confusion_at_threshold"}.
    multi
        {"confusion": [[...]]}, rows true.
    regression
        {"residuals": {"edges": [n_bins + 1], "counts": [n_bins]}}, the outer bins with all rows
        beyond.
    times, ranked rows
        {}
    """
    check_statistics(objective, statistics)
    if n_points < 2:
        raise ValueError(f"n_points must be >= 2, got {n_points}")
    histogram = statistics.histogram
    if objective == "multi:softprob":
        return {"confusion": _possible(confusion(statistics.sums))}
    if not is_of_rows(objective):
        return {}
    if objective != BINARY:
        check_residual_range(residual_range)
        edges = np.linspace(-residual_range, residual_range, histogram.size + 1)
        return {"residuals": _lists({"edges": edges, "counts": histogram[0]})}
    rates = dict(zip(("fpr", "tpr"), _thinned(*roc(histogram), n_points), strict=True))
    if not rates["fpr"].size:
        return {"roc": _lists(rates)}
    steps = dict(zip(("recall", "precision"), _precisions(histogram, n_points), strict=True))
    probabilities = sigmoid(center + margin_middles(histogram.shape[1]))
    score_edges = np.linspace(0.0, 1.0, N_SCORE_BINS + 1)
    negatives, positives = (
        np.histogram(probabilities, score_edges, weights=weights)[0] for weights in histogram
    )
    weight, _, hits, misses, alarms = (float(term) for term in statistics.sums[:N_BASE_SUMS])
    curves = {
        "roc": _lists(rates),
        "pr": _lists(steps),
        "calibration": _lists(_calibration(histogram, probabilities)),
        "histogram": _lists({"edges": score_edges, "negatives": negatives, "positives": positives}),
        "confusion": _possible([[weight - hits - misses - alarms, alarms], [misses, hits]]),
    }
    if threshold_bin is not None:
        below, above = histogram[:, :threshold_bin].sum(1), histogram[:, threshold_bin:].sum(1)
        curves["confusion_at_threshold"] = np.stack([below, above], axis=1).tolist()
    return curves


def _possible(counts: ArrayLike) -> list[Any]:
    """Counts as lists; empty where noise makes one negative."""
    array = np.asarray(counts, dtype=np.float64)
    return array.tolist() if (array >= -1e-9 * np.abs(array).sum()).all() else []


def _lists(arrays: dict[str, Array]) -> dict[str, list[float]]:
    return {name: array.tolist() for name, array in arrays.items()}


def _precisions(histogram: Array, n_points: int) -> tuple[Array, Array]:
    """Recall and precision as the threshold falls; at recall 0 the first bin's precision."""
    negatives, positives = histogram[:, histogram.any(axis=0)][:, ::-1]
    hits, alarms = np.cumsum(positives), np.cumsum(negatives)
    recalls = hits / hits[-1]
    precisions = hits / (hits + alarms)
    # A point at each bin that adds positives; recall does not change elsewhere.
    adds = positives > 0
    recalls = np.concatenate(([0.0], recalls[adds]))
    precisions = np.concatenate((precisions[adds][:1], precisions[adds]))
    return _thinned(recalls, precisions, n_points)


def _calibration(histogram: Array, probabilities: Array) -> dict[str, Array]:
    """Groups of about as many rows each: mean probability, share of positives."""
    rows = histogram.sum(axis=0)
    used = rows > 0
    rows = rows[used]
    positives = histogram[1, used]
    middles = probabilities[used]
    before = np.cumsum(rows) - rows / 2.0
    groups = np.minimum((before / rows.sum() * N_GROUPS).astype(np.int64), N_GROUPS - 1)
    sums = np.array(
        [np.bincount(groups, weighted) for weighted in (rows, rows * middles, positives)]
    )
    weights, predicted, observed = sums[:, sums[0] > 0]
    return {"predicted": predicted / weights, "observed": observed / weights, "rows": weights}


def _thinned(x: Array, y: Array, n_points: int) -> tuple[Array, Array]:
    """At most n_points points, evenly spaced along the curve, including both ends."""
    if x.size <= n_points:
        return x, y
    # Distance along both axes; the first point at or past each of n_points even steps.
    distances = np.concatenate(([0.0], np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y)))))
    chosen = np.searchsorted(distances, np.linspace(0.0, distances[-1], n_points))
    chosen = np.unique(np.minimum(chosen, x.size - 1))
    return x[chosen], y[chosen]
