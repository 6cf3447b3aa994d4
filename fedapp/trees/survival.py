"""Times of which some are censored: gradients as in XGBoost 3.2, and Harrell's concordance.

A label is signed: the time of an event, or minus the time at which its row was censored.

Accelerated failure times: a margin is the logarithm of a time. Source: Barnwal, Cho and Hocking
2020 (arXiv:2006.04920), Section 3, with the clips and limits of XGBoost. Harrell et al. 1982,
"Evaluating the yield of medical tests", has the concordance.

Proportional hazards: a margin is the logarithm of a hazard ratio. Of a row with ratio e, the
gradient of Cox's partial likelihood is e r - [event] and the hessian e r - e^2 s, where r and s are
sums of 1/E and 1/E^2 over the events up to its time, and E is the sum of the ratios of all rows at
risk at an event: those whose time is not before it. Source: Cox 1972, "Regression Models and
Life-Tables", with Breslow's ties.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Floats
from fedapp.errors import DivergedError
from fedapp.histograms.fixed_point import Whole, from_fixed, to_fixed
from fedapp.kernels import frozen, kernel
from fedapp.trees.c_math import exp32

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


# A hazard ratio is a number of three digits in base 2^31, the last two behind the point. So sums
# over 2^31 rows are exact, in any order.
DIGITS = np.array([0, 31, 62])
N_SUMS = len(DIGITS) + 1  # of a bin of times
LOST = 0.01  # error of a sum at risk, relative, from which it is summed in another order


def cox_pairs(margins: Floats, labels: Floats, parameters: object) -> tuple[Floats, Floats]:
    """Gradients and hessians of margins (n_rows, 1), of the margins' shape, as XGBoost's.

    As there, of rows with one time each counts only the events up to its place in the order of
    rows. A hessian that rounding would leave below 0 is 0. XGBoost subtracts ratios from the sum of
    all; where that leaves a sum at risk with an error of a percent, as few small ratios are left,
    these are summed from the end instead.
    """
    pairs = np.empty((len(labels), 2), dtype=np.float32)
    order = np.argsort(np.abs(labels), kind="stable")
    times, ordered = frozen(labels[order], margins[order, 0])
    pairs[order], is_lost = _cox_each(times, ordered, False)
    if is_lost:
        pairs[order], _ = _cox_each(times, ordered, True)
    return pairs[:, :1], np.maximum(pairs[:, 1:], 0)


@kernel
def _cox_each(labels: Any, margins: Any, from_end: bool) -> Any:
    """Gradient and hessian of each row, by time; whether sums at risk have lost their digits."""
    pairs = np.empty((len(labels), 2), dtype=np.float32)
    # XGBoost's order of operations: float32 exponentials here, and float64 ones below.
    at_risk = 0.0
    for row in range(len(labels)):
        at_risk += np.float64(math.exp(margins[row]))
    ahead, total = np.empty(len(labels)), 0.0
    for row in range(len(labels) - 1, -1, -1):
        total += math.exp(np.float64(margins[row]))
        ahead[row] = total
    is_lost = False
    last_time, last_ratio, passed = 0.0, 0.0, 0.0
    rates, squares = 0.0, 0.0
    for row in range(len(labels)):
        time, is_event = abs(np.float64(labels[row])), labels[row] > 0
        ratio = math.exp(np.float64(margins[row]))
        passed += last_ratio
        if last_time < time:
            at_risk = ahead[row] if from_end else at_risk - passed
            passed = 0.0
            is_lost |= abs(at_risk - ahead[row]) > LOST * ahead[row]
        if is_event:  # what rounding leaves at risk may be 0, by which numba does not divide
            rates += 1.0 / at_risk if at_risk != 0 else math.inf
            squares += 1.0 / (at_risk * at_risk) if at_risk != 0 else math.inf
        pairs[row, 0] = ratio * rates - np.float64(is_event)
        pairs[row, 1] = ratio * rates - ratio * ratio * squares
        last_time, last_ratio = time, ratio
    return pairs, is_lost


def risk_sums(margins: Floats, labels: Floats, bins: npt.NDArray[Any], n_bins: int) -> Whole:
    """Sum of the hazard ratios, digit by digit, and number of events of each bin of times.

    ``bins`` are those of the rows. Returns (n_bins, N_SUMS); sums of several tables add up.
    """
    rest = exp32(margins[:, 0]).astype(np.float64)
    if not (rest <= 2.0**30).all():
        rule = "hazard ratios must be <= 2^30, got a larger one"
        raise DivergedError(f"{rule}: a smaller eta, or less in base-margin, gives smaller ones")
    terms = np.empty((len(rest), N_SUMS), dtype=np.int64)
    for position, digits in enumerate(DIGITS.tolist()):
        terms[:, position] = to_fixed(rest, digits)
        rest -= from_fixed(terms[:, position], digits)
    terms[:, -1] = labels > 0
    sums = np.zeros((n_bins, N_SUMS), dtype=np.int64)
    np.add.at(sums, bins, terms)
    return sums


def hazards_of(sums: Whole) -> Doubles:
    """Sums of 1/E and 1/E^2 over the events up to the end of each bin; (n_bins, 2).

    All rows of a bin have one time. ``sums`` are those of ``risk_sums`` over all rows.
    """
    first, second, third = from_fixed(np.cumsum(sums[::-1, :-1], axis=0)[::-1], DIGITS).T
    at_risk = first + (second + third)
    if ((at_risk <= 0) & (sums[:, -1] > 0)).any():
        rule = "hazard ratios at risk must be >= 2^-62 in sum, got less"
        raise DivergedError(
            f"{rule}: more in base-margin, the same for all rows, gives larger ones"
        )
    rates = np.divide(1.0, at_risk, out=np.zeros(len(sums)), where=at_risk > 0)
    return np.cumsum(sums[:, -1:] * np.stack((rates, rates * rates), axis=1), axis=0)


def binned_pairs(margins: Floats, labels: Floats, hazards: Doubles) -> Floats:
    """Gradients and hessians, (n_rows, 1, 2), where ``hazards`` are those of the rows' bins."""
    ratios = exp32(margins[:, 0]).astype(np.float64)
    shares = ratios * hazards[:, 0]
    # Above 0 but for rounding, as no ratio is larger than the sum of those at risk.
    hessians = np.maximum(shares - ratios * ratios * hazards[:, 1], 0)
    pairs: Floats = np.stack((shares - (labels > 0), hessians), axis=-1).astype(np.float32)
    return pairs[:, None]
