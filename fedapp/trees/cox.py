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

from fedapp.kernels import frozen, kernel

Array = npt.NDArray[np.float32]


def cox_pairs(margins: Array, labels: Array) -> tuple[Array, Array]:
    """Gradients and hessians of margins (n_rows, 1), of the margins' shape, as XGBoost's.

    As there, of rows with one time each counts only the events up to its place in the order of
    rows. A hessian that rounding would leave below 0 is 0.
    """
    pairs = np.empty((len(labels), 2), dtype=np.float32)
    order = np.argsort(np.abs(labels), kind="stable")
    rows = frozen(labels[order], margins[order, 0])
    pairs[order] = _pairs_each(*rows)
    return pairs[:, :1], np.maximum(pairs[:, 1:], 0)


@kernel
def _pairs_each(labels: Any, margins: Any) -> Any:
    """Gradient and hessian of each row; rows are by time."""
    pairs = np.empty((len(labels), 2), dtype=np.float32)
    # XGBoost's order of operations: float32 exponentials here, and float64 ones below.
    at_risk = 0.0
    for row in range(len(labels)):
        at_risk += np.float64(math.exp(margins[row]))
    last_time, last_ratio, passed = 0.0, 0.0, 0.0
    rates, squares = 0.0, 0.0
    for row in range(len(labels)):
        time, is_event = abs(np.float64(labels[row])), labels[row] > 0
        ratio = math.exp(np.float64(margins[row]))
        passed += last_ratio
        if last_time < time:
            at_risk -= passed
            passed = 0.0
        if is_event:  # what rounding leaves at risk may be 0, by which numba does not divide
            rates += 1.0 / at_risk if at_risk != 0 else math.inf
            squares += 1.0 / (at_risk * at_risk) if at_risk != 0 else math.inf
        pairs[row, 0] = ratio * rates - np.float64(is_event)
        pairs[row, 1] = ratio * rates - ratio * ratio * squares
        last_time, last_ratio = time, ratio
    return pairs
