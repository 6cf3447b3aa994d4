"""Exponentials and logarithms of float32 as the C library rounds them, which XGBoost calls."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedapp.arrays import Floats
from fedapp.kernels import frozen, kernel

EXP, LOG, LOG1P = range(3)


def exp32(powers: Floats) -> Floats:
    """``expf`` of each number."""
    return _each(EXP, powers)


def log1p32(values: Floats) -> Floats:
    """``log1pf`` of numbers > -1."""
    return _each(LOG1P, values)


def log32(values: Floats) -> Floats:
    """``logf`` of numbers > 0."""
    return _each(LOG, values)


def _each(function: int, values: Floats) -> Floats:
    results = np.empty(values.shape, dtype=np.float32)
    _fill(*(function, *frozen(np.ascontiguousarray(values).ravel()), results.ravel()))
    return results


@kernel
def _fill(function: int, values: Any, results: Any) -> None:
    for index in range(len(values)):
        if function == EXP:
            results[index] = math.exp(values[index])
        elif function == LOG:
            results[index] = math.log(values[index])
        else:
            results[index] = math.log1p(values[index])
