"""Exponentials and logarithms of float32 as the C library rounds them, which XGBoost calls."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.kernels import frozen, kernel

Floats = npt.NDArray[np.float32]


def exp32(powers: Floats) -> Floats:
    """``expf`` of each number."""
    results = np.empty(powers.shape, dtype=np.float32)
    _exp_each(*(*frozen(np.ascontiguousarray(powers).ravel()), results.ravel()))
    return results


def log1p32(values: Floats) -> Floats:
    """``log1pf`` of numbers > -1."""
    results = np.empty(values.shape, dtype=np.float32)
    _log1p_each(*(*frozen(np.ascontiguousarray(values).ravel()), results.ravel()))
    return results


def log32(values: Floats) -> Floats:
    """``logf`` of numbers > 0; shape (n,)."""
    results = np.empty(values.shape, dtype=np.float32)
    _log_each(*(*frozen(values), results))
    return results


@kernel
def _exp_each(powers: Any, found: Any) -> None:
    for index in range(len(powers)):
        found[index] = math.exp(powers[index])


@kernel
def _log_each(values: Any, found: Any) -> None:
    for index in range(len(values)):
        found[index] = math.log(values[index])


@kernel
def _log1p_each(values: Any, results: Any) -> None:
    for index in range(len(values)):
        results[index] = math.log1p(values[index])
