"""What a report draws, from the sums of all parties together."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedapp.metrics.scores import roc
from fedapp.metrics.sums import (
    Array,
    Statistics,
    check_residual_range,
    check_statistics,
    confusion,
)


def curves(
    objective: str, statistics: Statistics, n_points: int = 200, residual_range: float = 1.0
) -> dict[str, Any]:
    """What a report draws, as lists for JSON.

    Parameters
    ----------
    objective, statistics : as for ``scores``
    n_points : int, >= 2
        At most so many points of the ROC curve; its two ends are always among them.
    residual_range : float, > 0
        The one given to ``statistics``.

    Returns
    -------
    binary: {"roc": {"fpr": [...], "tpr": [...]}}, empty lists without positives or negatives;
    multi: {"confusion": [[...]]}, rows true; regression: {"residuals": {"edges": [n_bins + 1],
    "counts": [n_bins]}}, the outer bins with all that lies beyond.

    Raises
    ------
    ValueError : an argument breaks its rule.
    """
    check_statistics(objective, statistics)
    if n_points < 2:
        raise ValueError(f"n_points must be >= 2, got {n_points}")
    if objective == "binary:logistic":
        fpr, tpr = _thinned(*roc(statistics.histogram), n_points)
        return {"roc": {"fpr": fpr.tolist(), "tpr": tpr.tolist()}}
    if objective == "multi:softprob":
        return {"confusion": confusion(statistics).tolist()}
    check_residual_range(residual_range)
    counts = statistics.histogram[0]
    edges = np.linspace(-residual_range, residual_range, counts.size + 1)
    return {"residuals": {"edges": edges.tolist(), "counts": counts.tolist()}}


def _thinned(fpr: Array, tpr: Array, n_points: int) -> tuple[Array, Array]:
    """At most n_points points, evenly spaced along the curve; both ends stay."""
    if fpr.size <= n_points:
        return fpr, tpr
    # fpr + tpr rises from 0 to 2; the first point at or past each of n_points even steps.
    kept = np.unique(np.searchsorted(fpr + tpr, np.linspace(0.0, 2.0, n_points)))
    return fpr[kept], tpr[kept]
