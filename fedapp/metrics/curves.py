"""Curves of a report: ROC, precision and recall, calibration, histograms of scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedapp.metrics.scores import BINARY, N_GROUPS, N_SCORE_BINS, roc, sigmoid
from fedapp.metrics.sums import (
    N_BASE_SUMS,
    Array,
    Statistics,
    check_residual_range,
    check_statistics,
    confusion,
    margin_middles,
)
from fedapp.trees.objective import is_of_rows


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
        return {"confusion": confusion(statistics.sums).tolist()}
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
        "confusion": [[weight - hits - misses - alarms, alarms], [misses, hits]],
    }
    if threshold_bin is not None:
        below, above = histogram[:, :threshold_bin].sum(1), histogram[:, threshold_bin:].sum(1)
        curves["confusion_at_threshold"] = np.stack([below, above], axis=1).tolist()
    return curves


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
