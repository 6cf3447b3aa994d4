"""Objectives and metrics that are the user's functions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedapp.errors import ConfigError, DivergedError

AnyArray = npt.NDArray[Any]
# Margins and labels of one party's rows, shape (n_rows,), to gradients and hessians.
ObjectiveFunction = Callable[[AnyArray, AnyArray], tuple[Any, Any]]
# Labels and predictions to the metric's mean over rows, or to a name and the mean.
MetricFunction = Callable[[AnyArray, AnyArray], Any]
CUSTOM: Final = "custom"
TOLERANCE = 1e-6  # relative, between a mean over rows and the mean of means over parts


@dataclass(frozen=True, slots=True)
class Functions:
    """Custom functions of a run; None where it has a named one."""

    objective: ObjectiveFunction | None = None
    metric: MetricFunction | None = None


_NONE = Functions()
_active = _NONE
_lock = Lock()


@contextmanager
def functions_in_use(functions: Functions) -> Iterator[None]:
    """Use these functions while the block runs; ConfigError if another run uses functions."""
    global _active
    if functions == _NONE:
        yield
        return
    if not _lock.acquire(blocking=False):
        raise ConfigError(
            "objective and eval-metric must be names while another run of this process uses "
            "functions, got functions; processes have one such run each"
        )
    _active = functions
    try:
        yield
    finally:
        _active = _NONE
        _lock.release()


def has_objective() -> bool:
    """Whether this process has a custom objective."""
    return _active.objective is not None


def has_metric() -> bool:
    """Whether this process has a custom metric."""
    return _active.metric is not None


def metric_name(metric: MetricFunction) -> str:
    """Name of a custom metric in a run: ``custom@`` and the function's name."""
    name = getattr(metric, "__name__", type(metric).__name__)
    return f"{CUSTOM}@{re.sub(r'[^A-Za-z0-9_]', '_', name)[:40]}"


def custom_pairs(
    margins: AnyArray, labels: AnyArray, parameters: object
) -> tuple[AnyArray, AnyArray]:
    """Gradients and hessians of the custom objective, without weights; float32, (n_rows, 1).

    ``margins`` is float32, shape (n_rows, 1), ``labels`` (n_rows,). Raises ConfigError if there is
    no function, it fails, or it returns anything else.
    """
    if _active.objective is None:
        raise ConfigError("objective must be a function of this process, which has none")
    try:
        returned = _active.objective(margins[:, 0].copy(), labels.copy())
        gradients, hessians = (np.asarray(part, dtype=np.float32) for part in returned)
    except Exception as error:
        rule = "objective must return gradients and hessians"
        raise ConfigError(f"{rule}, got {type(error).__name__}: {error}") from error
    for name, array in (("gradients", gradients), ("hessians", hessians)):
        if array.shape != labels.shape:
            rule = f"must be of shape {labels.shape}, one a row"
            raise ConfigError(f"{name} of the objective {rule}, got {array.shape}")
        if not np.isfinite(array).all():
            raise DivergedError(f"{name} of the objective must be finite, got others")
    if (hessians < 0).any():
        raise ConfigError("hessians of the objective must be >= 0, got others")
    return gradients[:, None], hessians[:, None]


def custom_sum(labels: AnyArray, predictions: AnyArray, weights: AnyArray) -> float:
    """A party's term of the custom metric: the mean over its rows times their weight.

    All arrays are float64, shape (n_rows,). Raises ConfigError if there is no function, it fails,
    it is not a mean over rows, or weights differ between rows, which it does not receive.
    """
    if not len(labels):
        return 0.0
    if (weights != weights[0]).any():
        raise ConfigError(
            "eval-metric must be a name where rows have weights, got a function, which does not "
            "receive them"
        )
    # A mean over rows must add up over parts, also for predictions shifted to other rows.
    for shift in (0, len(labels) // 3 + 1):
        shifted = np.roll(predictions, shift)
        parts = np.arange(len(labels)) % 3 == 0
        part_means = [
            _mean(labels[part], shifted[part]) * part.mean()
            for part in (parts, ~parts)
            if part.any()
        ]
        whole = _mean(labels, shifted)
        if not math.isclose(whole, sum(part_means), rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            raise ConfigError(
                "eval-metric must be a mean over rows, which parties can add up, got a function "
                f"whose value for all rows is {whole:g} and by parts of them {sum(part_means):g}"
            )
    return _mean(labels, predictions) * float(weights.sum())


def _mean(labels: AnyArray, predictions: AnyArray) -> float:
    """Value of the metric."""
    if _active.metric is None:
        raise ConfigError("eval-metric must be a function of this process, which has none")
    try:
        returned = _active.metric(labels.copy(), predictions.copy())
        value = float(returned[1] if isinstance(returned, Sequence) else returned)
    except Exception as error:
        rule = "eval-metric must return a number, or a name and a number"
        raise ConfigError(f"{rule}, got {type(error).__name__}: {error}") from error
    return value
