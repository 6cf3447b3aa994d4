"""Leaves that are quantiles of residuals: ``reg:absoluteerror`` and ``reg:quantileerror``.

Once a tree has grown, each leaf gets the quantile of the residuals of its drawn rows, times
``eta``; penalties of leaves act on splits only.

Source: XGBoost 3.2, src/objective/adaptive.cc and src/common/stats.h. XGBoost 3.4 minimises
other losses under these names.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fedapp.trees.losses import LossParameters, Objective

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.integer]
MEDIAN = "reg:absoluteerror"


def quantile(values: Floats, level: float, weights: Floats | None = None) -> np.float32:
    """The quantile of float32 numbers, shape (n >= 1,): without weights that at rank
    ``level * (n + 1)``, interpolated; with weights the first up to which that share of them is."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    if weights is not None:
        totals = np.cumsum(weights[order], dtype=np.float32)  # one after the other
        place = int(np.searchsorted(totals, np.float32(float(totals[-1]) * level)))
        return np.float32(ordered[min(place, len(ordered) - 1)])
    n = len(ordered)
    if not 1 / (n + 1) < level < n / (n + 1):
        return np.float32(ordered[0 if level < 0.5 else -1])
    rank = level * (n + 1)
    below = math.floor(rank) - 1
    step = float(ordered[below + 1] - ordered[below])  # a difference of float32
    return np.float32(float(ordered[below]) + (rank - 1 - below) * step)


def quantile_score(
    objective: Objective, labels: Floats, weights: Floats | None, parameters: LossParameters
) -> Floats:
    """The base score: the quantile of the labels of all rows; float32, shape (1,)."""
    score = quantile(labels, leaf_level(objective, parameters), weights)
    if objective == MEDIAN:
        # XGBoost multiplies by the weight of the rows and divides again, each time as float32.
        total = float(len(labels) if weights is None else weights.sum(dtype=np.float64))
        score = np.float32(float(np.float32(float(score) * total)) * (1 / total))
    return np.array([score], dtype=np.float32)


def leaf_quantiles(
    leaves: Ints, residuals: Floats, weights: Floats | None, level: float, n_nodes: int
) -> Floats:
    """Quantile of the residuals of the rows in each node; float32, shape (n_nodes,), else 0."""
    values = np.zeros(n_nodes, dtype=np.float32)
    order = np.argsort(leaves, kind="stable")
    nodes, firsts = np.unique(leaves[order], return_index=True)
    for node, rows in zip(nodes, np.split(order, firsts[1:]), strict=True):
        values[node] = quantile(residuals[rows], level, None if weights is None else weights[rows])
    return values


def leaf_level(objective: str, parameters: LossParameters) -> float:
    """The level of the quantiles, between 0 and 1, as XGBoost rounds it."""
    return 0.5 if objective == MEDIAN else float(np.float32(parameters.quantile_alpha))
