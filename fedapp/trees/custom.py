"""An objective and a metric that are functions of whoever runs a simulation in this process.

A function is never sent: parties call the one that this process holds. A party between
organisations, and one of another process, holds none.
"""

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

Array = npt.NDArray[Any]
# Margins and labels of rows of one party, shape (n_rows,), to gradients and hessians of that shape.
ObjectiveFunction = Callable[[Array, Array], tuple[Any, Any]]
# Labels and predictions of such rows to their mean, or to a name and that.
MetricFunction = Callable[[Array, Array], Any]

CUSTOM: Final = "custom"
TOLERANCE = 1e-6  # of a mean over rows from the means over parts of them, relative


@dataclass(frozen=True, slots=True)
class Functions:
    """What a run has in place of names.

    Parameters
    ----------
    objective, metric : None where it has none.
    """

    objective: ObjectiveFunction | None = None
    metric: MetricFunction | None = None


_NONE = Functions()
_held = _NONE
_lock = Lock()


@contextmanager
def held(functions: Functions) -> Iterator[None]:
    """Have the parties of this process call functions while the block runs.

    Raises
    ------
    ConfigError : another run of this process does.
    """
    global _held
    if functions == _NONE:
        yield
        return
    if not _lock.acquire(blocking=False):
        raise ConfigError(
            "objective and eval-metric must be names while another run of this process goes on "
            "with functions, got functions; processes have one such run each"
        )
    _held = functions
    try:
        yield
    finally:
        _held = _NONE
        _lock.release()


def holds_objective() -> bool:
    """Whether this process has an objective of its own."""
    return _held.objective is not None


def holds_metric() -> bool:
    """Whether this process has a metric of its own."""
    return _held.metric is not None


def metric_name(metric: MetricFunction) -> str:
    """What a metric is called in a run: ``custom@`` and the function's name."""
    name = getattr(metric, "__name__", type(metric).__name__)
    return f"{CUSTOM}@{re.sub(r'[^A-Za-z0-9_]', '_', name)[:40]}"


def custom_pairs(margins: Array, labels: Array) -> tuple[Array, Array]:
    """Gradients and hessians of the objective that this process holds.

    Parameters
    ----------
    margins : float32, shape (n_rows, 1).
    labels : float32, shape (n_rows,).

    Returns
    -------
    float32, shape (n_rows, 1), without the rows' weights.

    Raises
    ------
    ConfigError : there is none, it fails, or it returns anything else.
    """
    if _held.objective is None:
        raise ConfigError("objective must be a function of this process, which has none")
    try:
        found = _held.objective(margins[:, 0].copy(), labels.copy())
        gradients, hessians = (np.asarray(each, dtype=np.float32) for each in found)
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


def custom_sum(labels: Array, predictions: Array, weights: Array) -> float:
    """What a party's rows add to the metric that this process holds: its mean times their weight.

    Parameters
    ----------
    labels, predictions, weights : float64, shape (n_rows,).

    Raises
    ------
    ConfigError : there is none, it fails, or it is no mean over rows; or rows have other weights
        than 1, of which it knows nothing.
    """
    if not len(labels):
        return 0.0
    if (weights != weights[0]).any():
        raise ConfigError(
            "eval-metric must be a name where rows have weights, got a function, which is not told "
            "of them"
        )
    # Means over parts of rows add up, also where predictions are of other rows.
    for shift in (0, len(labels) // 3 + 1):
        shown = np.roll(predictions, shift)
        parts = np.arange(len(labels)) % 3 == 0
        of_parts = [
            _mean(labels[part], shown[part]) * part.mean() for part in (parts, ~parts) if part.any()
        ]
        whole = _mean(labels, shown)
        if not math.isclose(whole, sum(of_parts), rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            raise ConfigError(
                "eval-metric must be a mean over rows, which parties can add up, got a function "
                f"whose value for all rows is {whole:g} and by parts of them {sum(of_parts):g}"
            )
    return _mean(labels, predictions) * float(weights.sum())


def _mean(labels: Array, predictions: Array) -> float:
    """What the metric says of rows."""
    if _held.metric is None:
        raise ConfigError("eval-metric must be a function of this process, which has none")
    try:
        found = _held.metric(labels.copy(), predictions.copy())
        value = float(found[1] if isinstance(found, Sequence) else found)
    except Exception as error:
        rule = "eval-metric must return a number, or a name and a number"
        raise ConfigError(f"{rule}, got {type(error).__name__}: {error}") from error
    return value
