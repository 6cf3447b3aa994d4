"""Accelerated failure times as in XGBoost, and Harrell's concordance; some times are censored.

A label is signed: the time of an event, or minus the time at which its row was censored. A margin
is the logarithm of a time.

Sources: Barnwal, Cho and Hocking 2020 (arXiv:2006.04920), Section 3, with the clips and limits of
XGBoost 3.2; Harrell et al. 1982, "Evaluating the yield of medical tests".
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.kernels import frozen, kernel

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

LARGEST_TERM = 15.0  # of a gradient or hessian
_NORMAL, _LOGISTIC = 0, 1  # the kinds of distributions; 2 is the extreme value distribution
_LEAST_HESSIAN = 1e-16
_LEAST = 1e-12  # of a density or a probability


def aft_pairs(margins: Floats, labels: Floats, kind: int, scale: float) -> tuple[Floats, Floats]:
    """Gradients and hessians of margins (n_rows, 1), of the margins' shape."""
    gradients = np.empty(len(labels), dtype=np.float32)
    hessians = np.empty(len(labels), dtype=np.float32)
    truth, logs = frozen(labels, np.ascontiguousarray(margins[:, 0]))
    _pairs_each(truth, logs, kind, float(np.float32(scale)), gradients, hessians)
    return gradients[:, None], hessians[:, None]


def aft_losses(labels: Doubles, times: Doubles, kind: int, scale: float) -> Doubles:
    """Negative log likelihood of each row at its predicted time; shape (n_rows,)."""
    losses = np.empty(len(labels))
    logs = np.log(np.maximum(times, np.finfo(np.float64).tiny))
    truth, logs = frozen(labels, logs)
    _losses_each(truth, logs, kind, float(np.float32(scale)), losses)
    return losses


def concordance(labels: Doubles, predictions: Doubles, weights: Doubles) -> float:
    """Harrell's C: of pairs with a known order, the share that predictions order alike.

    A pair counts its rows' weights, and one half where its predictions are equal; NaN without
    pairs. An event comes before a row censored at the same time.
    """
    order = np.lexsort((labels > 0, -np.abs(labels)))  # latest first; of a time, events last
    _, ranks = np.unique(predictions, return_inverse=True)
    rows = labels[order], ranks[order].astype(np.int64), weights[order]
    concordant, comparable = _count_pairs(*frozen(*rows))
    return float(concordant / comparable) if comparable > 0 else math.nan


@kernel
def _density(kind: int, z: float) -> Any:
    """Density, its integral, and its first and second derivative."""
    if kind == _NORMAL:
        density = math.exp(-z * z / 2.0) / math.sqrt(2.0 * math.pi)
        below = 0.5 * (1 + math.erf(z / math.sqrt(2.0)))
        return density, below, -z * density, (z * z - 1.0) * density
    w = math.exp(z)
    is_huge, is_large = math.isinf(w), math.isinf(w * w)
    if kind == _LOGISTIC:
        below = 1.0 if is_huge else w / (1 + w)
        if is_large:
            return 0.0, below, 0.0, 0.0
        density = w / ((1 + w) * (1 + w))
        bend = density * (w * w - 4 * w + 1) / ((1 + w) * (1 + w))
        return density, below, density * (1 - w) / (1 + w), bend
    density = 0.0 if is_huge else w * math.exp(-w)
    slope = 0.0 if is_huge else (1 - w) * density
    bend = 0.0 if is_large else (w * w - 3 * w + 1) * density
    return density, 1 - math.exp(-w), slope, bend


@kernel
def _limits(kind: int, is_event: Any, is_late: Any, sigma: float) -> Any:
    """Gradient and hessian far from the time; ``is_late``: the time is after the prediction."""
    before = LARGEST_TERM if kind == _NORMAL else 1.0 / sigma
    after = 1.0 / sigma if kind == _LOGISTIC else LARGEST_TERM
    gradient = -after if is_late else (before if is_event else 0.0)
    if kind == _NORMAL:
        has_curve = is_event or is_late
        return gradient, 1.0 / (sigma * sigma) if has_curve else _LEAST_HESSIAN
    if kind == _LOGISTIC:
        return gradient, _LEAST_HESSIAN
    return gradient, LARGEST_TERM if is_late else _LEAST_HESSIAN


@kernel
def _ratio(top: float, bottom: float, limit: float, low: float) -> float:
    """A quotient, or its limit where it has none, within the bounds of XGBoost."""
    ratio = limit if bottom == 0 else top / bottom
    if bottom < _LEAST and not math.isfinite(ratio):
        ratio = limit
    return min(max(ratio, low), LARGEST_TERM)


@kernel
def _pairs_each(
    labels: Any, margins: Any, kind: int, sigma: float, gradients: Any, hessians: Any
) -> None:
    for row in range(len(labels)):
        is_event = labels[row] > 0
        # numba's float() leaves float32 as it is.
        z = (math.log(abs(np.float64(labels[row]))) - np.float64(margins[row])) / sigma
        density, below, slope, bend = _density(kind, z)
        if is_event:
            top, bottom = slope, sigma * density
            curve, square = -(density * bend - slope * slope), sigma * sigma * density * density
        else:
            top, bottom = -density, sigma * (1 - below)
            curve, square = -((1 - below) * -slope - density * density), bottom * bottom
        gradient, hessian = _limits(kind, is_event, z > 0, sigma)
        gradients[row] = _ratio(top, bottom, gradient, -LARGEST_TERM)
        hessians[row] = _ratio(curve, square, hessian, _LEAST_HESSIAN)


@kernel
def _losses_each(labels: Any, logs: Any, kind: int, sigma: float, losses: Any) -> None:
    for row in range(len(labels)):
        time = abs(labels[row])
        density, below, _, _ = _density(kind, (math.log(time) - logs[row]) / sigma)
        likelihood = density / (sigma * time) if labels[row] > 0 else 1 - below
        losses[row] = -math.log(max(likelihood, _LEAST))


@kernel
def _count_pairs(labels: Any, ranks: Any, weights: Any) -> Any:
    """Weights of concordant and of comparable pairs, by a Fenwick tree over the ranks."""
    tree = np.zeros(ranks.max() + 2 if len(ranks) else 1)
    at_rank = np.zeros(len(tree))
    concordant, comparable, n_waiting, later = 0.0, 0.0, 0, 0.0
    for row in range(len(labels)):
        if labels[row] > 0:
            above = later - at_rank[ranks[row]]
            rank = ranks[row]
            while rank > 0:
                above -= tree[rank]
                rank -= rank & -rank
            concordant += weights[row] * (above + at_rank[ranks[row]] / 2)
            comparable += weights[row] * later
            n_waiting += 1
        # Events of one time are no pairs: they are added once all of them were compared.
        is_last = row + 1 == len(labels) or abs(labels[row + 1]) < abs(labels[row])
        n_added = 1 if labels[row] < 0 else n_waiting if is_last else 0
        for added in range(row + 1 - n_added, row + 1):
            at_rank[ranks[added]] += weights[added]
            later += weights[added]
            rank = ranks[added] + 1
            while rank < len(tree):
                tree[rank] += weights[added]
                rank += rank & -rank
        if is_last:
            n_waiting = 0
    return concordant, comparable
