"""Proportional hazards: gradients of Cox's partial likelihood.

A label is signed as in ``survival``, and a margin is the logarithm of a hazard ratio. Of a row with
ratio e, the gradient is e r - [event] and the hessian e r - e^2 s, where r and s are sums of 1/E
and 1/E^2 over the events up to its time, and E is the sum of the ratios of all rows at risk at an
event: those whose time is not before it.

Sources: Cox 1972, "Regression Models and Life-Tables", with Breslow's ties; XGBoost 3.2.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.errors import DivergedError
from fedapp.histograms.fixed_point import Whole, from_fixed, to_fixed
from fedapp.kernels import frozen, kernel
from fedapp.trees.c_math import exp32

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# A hazard ratio is a number of three digits in base 2^31, the last two behind the point. So sums
# over 2^31 rows are exact, in any order.
DIGITS = np.array([0, 31, 62])
N_SUMS = len(DIGITS) + 1  # of a bin of times
LOST = 0.01  # error of a sum at risk, relative, from which it is summed in another order


def cox_pairs(margins: Floats, labels: Floats) -> tuple[Floats, Floats]:
    """Gradients and hessians of margins (n_rows, 1), of the margins' shape, as XGBoost's.

    As there, of rows with one time each counts only the events up to its place in the order of
    rows. A hessian that rounding would leave below 0 is 0. XGBoost subtracts ratios from the sum of
    all; where that leaves a sum at risk with an error of a percent, as few small ratios are left,
    these are summed from the end instead.
    """
    pairs = np.empty((len(labels), 2), dtype=np.float32)
    order = np.argsort(np.abs(labels), kind="stable")
    times, ordered = frozen(labels[order], margins[order, 0])
    pairs[order], is_lost = _pairs_each(times, ordered, False)
    if is_lost:
        pairs[order], _ = _pairs_each(times, ordered, True)
    return pairs[:, :1], np.maximum(pairs[:, 1:], 0)


@kernel
def _pairs_each(labels: Any, margins: Any, from_end: bool) -> Any:
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
