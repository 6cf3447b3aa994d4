"""A threshold for two classes: the best F1 on rows that are not test rows, and scores at it.

A row is called positive where its probability is at or above the threshold. With histograms the
threshold is the lower edge of a bin, and the scores at it are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedapp.metrics.names import AT_THRESHOLD
from fedapp.metrics.rows import pooled, sigmoid
from fedapp.metrics.scores import ratio
from fedapp.metrics.sums import (
    Array,
    Rows,
    Statistics,
    check_statistics,
    checked_rows,
    margin_edges,
)

BINARY = "binary:logistic"


def threshold_rows(has_valid: bool) -> str:
    """The subset that the threshold is chosen on: never the test rows."""
    return "valid" if has_valid else "train"


def best_bin(statistics: Statistics) -> int | None:
    """The first bin called positive at the best F1, the last of ties; None without positives."""
    check_statistics(BINARY, statistics)
    negatives, positives = statistics.histogram
    if not positives.any():
        return None
    used = np.flatnonzero(negatives + positives)
    hits, alarms = (np.cumsum(each[::-1])[::-1][used] for each in (positives, negatives))
    best = _last_best(hits, alarms, float(positives.sum()))
    return int(used[best]) if best else 0


def scores_from_bin(statistics: Statistics, first: int, center: float = 0.0) -> dict[str, float]:
    """The threshold, and scores where the bins from ``first`` on are called positive."""
    check_statistics(BINARY, statistics)
    negatives, positives = statistics.histogram
    edges = np.concatenate(([-np.inf], margin_edges(positives.size)))
    hits, alarms = float(positives[first:].sum()), float(negatives[first:].sum())
    return _named(center + float(edges[first]), hits, alarms, float(positives.sum()))


def best_margin(margins: Rows, labels: Rows, weights: Rows) -> float | None:
    """The threshold of the best F1, between the margins of two rows; None without positives.

    Of ties it is the highest. Arguments as for ``pooled`` of binary:logistic.
    """
    margins64, truth, shares = checked_rows(BINARY, margins, labels, weights)
    rows = shares > 0
    if not (truth[rows] > 0).any():
        return None
    points, places = np.unique(margins64[rows, 0], return_inverse=True)
    positives, negatives = (
        np.bincount(places, shares[rows] * of_class, minlength=points.size).astype(np.float64)
        for of_class in (truth[rows], 1.0 - truth[rows])
    )
    hits, alarms = (np.cumsum(each[::-1])[::-1] for each in (positives, negatives))
    best = _last_best(hits, alarms, float(positives.sum()))
    return float((points[best - 1] + points[best]) / 2.0) if best else -np.inf


def scores_from_margin(
    margins: Rows, labels: Rows, weights: Rows, threshold: float
) -> dict[str, float]:
    """Scores where rows with margins >= ``threshold`` are called positive."""
    margins64, truth, shares = checked_rows(BINARY, margins, labels, weights)
    called = shares * (margins64[:, 0] >= threshold)
    hits, alarms = float(called @ truth), float(called @ (1.0 - truth))
    return _named(threshold, hits, alarms, float(shares @ truth))


def _last_best(hits: Array, alarms: Array, n_positives: float) -> int:
    """Index of the largest F1, the last of ties."""
    f1s = 2.0 * hits / (hits + alarms + n_positives)
    return int(f1s.size - 1 - np.argmax(f1s[::-1]))


def _named(margin: float, hits: float, alarms: float, n_positives: float) -> dict[str, float]:
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
        subset: pooled(objective, *arrays, extra) if len(arrays[1]) else {}
        for subset, arrays in rows.items()
    }
    if objective != BINARY:
        return scores
    chosen = rows.get(threshold_rows(bool(scores.get("valid"))))
    margin = best_margin(*chosen) if chosen is not None else None
    if margin is not None:
        for subset in (name for name, subset_scores in scores.items() if subset_scores):
            scores[subset] |= scores_from_margin(*rows[subset], margin)
    return scores
