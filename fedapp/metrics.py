"""Scores of a model, from pooled rows and from sums that parties can add up.

``pooled`` needs every row in one place. ``statistics`` turns one party's rows into a few sums,
``+`` adds the sums of parties, ``scores`` reads the scores off the total: the same numbers, but for
``auc`` and ``ks``, which come from a histogram of the margin (``auc_error`` bounds what that costs
the auc; ks can only be smaller than the exact one).

    objective          sums                          histogram
    binary:logistic    w, w loss, w of hits,         (2, n_bins)  class x bin of the margin
                       misses, false alarms
    multi:softprob     w, w loss                     (k, k)       class x predicted class
    reg:squarederror   w, w e^2, w |e|, w y, w y^2   (1, n_bins)  bin of the residual e = y - margin
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedapp.trees.objective import REGRESSION

Array: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = NDArray[np.float32]

_NAMES = {  # the score that early stopping follows comes first
    "binary:logistic": ("auc", "logloss", "accuracy", "f1", "precision", "recall", "ks"),
    "multi:softprob": ("mlogloss", "accuracy"),
    REGRESSION: ("rmse", "mae", "r2"),
}
OBJECTIVES = tuple(_NAMES)
_N_SUMS = {"binary:logistic": 5, "multi:softprob": 2, REGRESSION: 5}

_LARGER = ("auc", "accuracy", "f1", "precision", "recall", "ks", "r2")
_SMALLER = ("logloss", "mlogloss", "rmse", "mae")
BETTER = dict.fromkeys(_LARGER, True) | dict.fromkeys(_SMALLER, False)
"""Whether a larger value is the better one, by the metric's name."""

LOSSES = {"binary:logistic": "logloss", "multi:softprob": "mlogloss", REGRESSION: "rmse"}
"""The score that training lowers, by objective."""

# r2 divides by sum w y^2 - (sum w y)^2 / sum w. Below this share of its first term the difference
# is rounding error of float64 sums (about n_rows * 2e-16 at worst).
_MIN_SPREAD = 1e-12
# Distances of a margin from the centre of its histogram: bins are of one width below _NEAR, and
# the outer ones take what lies beyond _FAR.
_NEAR, _FAR = 1e-3, 50.0


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Sums over the rows of one party, or of several; the module's table says which.

    Parameters
    ----------
    sums : float64, shape (n_sums,)
    histogram : float64, shape (n_rows_h, n_bins_h)
        Sum of weights in each cell.
    """

    sums: Array
    histogram: Array

    def __add__(self, other: Statistics) -> Statistics:
        """Statistics of the rows of both; ValueError where the shapes differ."""
        mine, theirs = self._shapes(), other._shapes()
        if mine != theirs:
            raise ValueError(f"statistics must be of one shape, got {mine} and {theirs}")
        return Statistics(self.sums + other.sums, self.histogram + other.histogram)

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.sums.shape, self.histogram.shape


def default_metric(objective: str) -> str:
    """Name of the score that early stopping follows; ValueError for an unknown objective."""
    _check_objective(objective)
    return _NAMES[objective][0]


def statistics(
    objective: str,
    margins: Rows,
    labels: Rows,
    weights: Rows,
    n_bins: int,
    residual_range: float = 1.0,
    center: float = 0.0,
) -> Statistics:
    """Sums of one party's rows, for ``scores``.

    Parameters
    ----------
    objective : one of the three in the module's table
    margins : float32, shape (n, n_outputs)
        Model output before sigmoid or softmax; n may be 0.
    labels : float32, shape (n,)
        Class ids, or values for regression.
    weights : float32, shape (n,), >= 0
    n_bins : int, >= 2
        Bins of the histogram; of no effect for multi:softprob.
    residual_range : float, > 0
        Regression alone: the histogram spans [-residual_range, residual_range], its outer bins
        take what lies beyond.
    center : float
        binary:logistic alone: the margin around which bins are narrowest, for a young model's
        margins all lie close to the base margin.

    Returns
    -------
    Statistics

    Raises
    ------
    ValueError : an argument breaks its rule. The text never holds a label.
    """
    margins64, labels64, weights64 = _checked(objective, margins, labels, weights)
    if n_bins < 2:
        raise ValueError(f"n_bins must be >= 2, got {n_bins}")
    if objective == "binary:logistic":
        return _binary_statistics(margins64[:, 0], labels64, weights64, n_bins, center)
    if objective == "multi:softprob":
        return _multi_statistics(margins64, labels64, weights64)
    _check_residual_range(residual_range)
    return _regression_statistics(margins64[:, 0], labels64, weights64, n_bins, residual_range)


def scores(objective: str, statistics: Statistics) -> dict[str, float]:
    """Every score of the objective, from the statistics of all parties together.

    Returns
    -------
    name -> value, nan where it is undefined (no rows, no positives, constant target ...)
        binary:logistic: auc, logloss, accuracy, f1, precision, recall, ks;
        multi:softprob: accuracy, mlogloss; reg:squarederror: rmse, mae, r2.

    Raises
    ------
    ValueError : the statistics are not those of this objective.
    """
    _check_statistics(objective, statistics)
    if objective == "binary:logistic":
        return _binary_scores(statistics)
    if objective == "multi:softprob":
        weight, loss = statistics.sums
        right = float(np.trace(statistics.histogram))
        return {"accuracy": _ratio(right, weight), "mlogloss": _ratio(loss, weight)}
    weight, squares, absolutes, labels, label_squares = statistics.sums
    spread = label_squares - _ratio(labels * labels, weight)
    unexplained = squares / spread if spread > _MIN_SPREAD * label_squares else np.nan
    return {
        "rmse": float(np.sqrt(_ratio(squares, weight))),
        "mae": _ratio(absolutes, weight),
        "r2": float(1.0 - unexplained),
    }


def auc_error(statistics: Statistics) -> float:
    """Bound on ``|scores()["auc"] - exact auc|`` of binary:logistic; nan where auc is.

    Only pairs of one bin can be ordered wrongly, and ``scores`` counts each of them as one half:
    sum_b positives_b negatives_b / (2 P N).
    """
    _check_statistics("binary:logistic", statistics)
    negatives, positives = statistics.histogram
    return _ratio(negatives @ positives, 2.0 * negatives.sum() * positives.sum())


def pooled(objective: str, margins: Rows, labels: Rows, weights: Rows) -> dict[str, float]:
    """The scores of ``scores``, exactly, by scikit-learn from all rows; arguments as there.

    Two departures from scikit-learn: an undefined score is nan without a warning, and auc ranks
    margins, so probabilities that round to 1 are no ties. Its log losses clip probabilities at
    2e-16, where ``scores`` does not.
    """
    margins64, labels64, weights64 = _checked(objective, margins, labels, weights)
    rows = weights64 > 0
    if not rows.any():
        return dict.fromkeys(_NAMES[objective], np.nan)
    of_rows = margins64[rows], labels64[rows], weights64[rows]
    if objective == "binary:logistic":
        return _pooled_binary(*of_rows)
    return (
        _pooled_multi(*of_rows) if objective == "multi:softprob" else _pooled_regression(*of_rows)
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
    _check_statistics(objective, statistics)
    if n_points < 2:
        raise ValueError(f"n_points must be >= 2, got {n_points}")
    if objective == "binary:logistic":
        fpr, tpr = _thinned(*_roc(statistics.histogram), n_points)
        return {"roc": {"fpr": fpr.tolist(), "tpr": tpr.tolist()}}
    if objective == "multi:softprob":
        return {"confusion": statistics.histogram.tolist()}
    _check_residual_range(residual_range)
    counts = statistics.histogram[0]
    edges = np.linspace(-residual_range, residual_range, counts.size + 1)
    return {"residuals": {"edges": edges.tolist(), "counts": counts.tolist()}}


def _binary_statistics(
    margins: Array, labels: Array, weights: Array, n_bins: int, center: float
) -> Statistics:
    losses = np.logaddexp(0.0, margins) - labels * margins
    guesses = margins >= 0
    terms = (1.0, losses, guesses * labels, ~guesses * labels, guesses * (1 - labels))
    sums = np.array([(weights * term).sum() for term in terms])
    bins = _margin_bins(margins - center, n_bins)
    return Statistics(sums, _cells(labels.astype(np.int64), bins, weights, (2, n_bins)))


def _margin_bins(distances: Array, n_bins: int) -> NDArray[np.int64]:
    """Bins that widen with the distance from the centre: linear up to _NEAR, then geometric."""
    places = np.arcsinh(distances / _NEAR) / np.arcsinh(_FAR / _NEAR)
    bins: NDArray[np.int64] = ((places + 1) / 2 * n_bins).astype(np.int64)
    return np.clip(bins, 0, n_bins - 1)


def _multi_statistics(margins: Array, labels: Array, weights: Array) -> Statistics:
    n_rows, n_classes = margins.shape
    class_ids = labels.astype(np.int64)
    losses = -_log_softmax(margins)[np.arange(n_rows), class_ids]
    histogram = _cells(class_ids, margins.argmax(axis=1), weights, (n_classes, n_classes))
    return Statistics(np.array([weights.sum(), weights @ losses]), histogram)


def _regression_statistics(
    predictions: Array, labels: Array, weights: Array, n_bins: int, residual_range: float
) -> Statistics:
    residuals = labels - predictions
    shares = np.clip((residuals / residual_range + 1.0) / 2.0, 0.0, 1.0)
    bins = np.minimum((shares * n_bins).astype(np.int64), n_bins - 1)
    terms = (np.ones_like(labels), residuals**2, np.abs(residuals), labels, labels**2)
    histogram = _cells(np.zeros_like(bins), bins, weights, (1, n_bins))
    return Statistics(np.array([weights @ term for term in terms]), histogram)


def _cells(
    rows: NDArray[np.int64], columns: NDArray[np.int64], weights: Array, shape: tuple[int, int]
) -> Array:
    """Sum of weights in each cell of a (rows, columns) table."""
    flat = np.bincount(rows * shape[1] + columns, weights, minlength=shape[0] * shape[1])
    return flat.astype(np.float64).reshape(shape)  # without rows bincount gives integers


def _binary_scores(statistics: Statistics) -> dict[str, float]:
    weight, loss, hits, misses, alarms = (float(term) for term in statistics.sums)
    fpr, tpr = _roc(statistics.histogram)
    return {
        "auc": float(np.trapezoid(tpr, fpr)) if fpr.size else np.nan,
        "logloss": _ratio(loss, weight),
        "accuracy": _ratio(weight - misses - alarms, weight),
        "f1": _ratio(2.0 * hits, 2.0 * hits + alarms + misses),
        "precision": _ratio(hits, hits + alarms),
        "recall": _ratio(hits, hits + misses),
        "ks": float(np.abs(tpr - fpr).max()) if fpr.size else np.nan,
    }


def _roc(histogram: Array) -> tuple[Array, Array]:
    """False and true positive rates, (0, 0) first, (1, 1) last; empty without both classes."""
    negatives, positives = histogram[:, histogram.any(axis=0)][:, ::-1]
    if not (negatives.any() and positives.any()):
        return np.zeros(0), np.zeros(0)
    falls, rises = (np.concatenate([[0.0], np.cumsum(x)]) for x in (negatives, positives))
    return falls / falls[-1], rises / rises[-1]


def _thinned(fpr: Array, tpr: Array, n_points: int) -> tuple[Array, Array]:
    """At most n_points points, evenly spaced along the curve; both ends stay."""
    if fpr.size <= n_points:
        return fpr, tpr
    # fpr + tpr rises from 0 to 2; the first point at or past each of n_points even steps.
    kept = np.unique(np.searchsorted(fpr + tpr, np.linspace(0.0, 2.0, n_points)))
    return fpr[kept], tpr[kept]


def _pooled_binary(margins: Array, labels: Array, weights: Array) -> dict[str, float]:
    from sklearn import metrics as sk

    p = _sigmoid(margins[:, 0])
    guesses = (p >= 0.5).astype(np.float64)
    fpr = tpr = np.array([np.nan])
    if np.ptp(labels):
        every = {"sample_weight": weights, "drop_intermediate": False}
        fpr, tpr, _ = sk.roc_curve(labels, margins[:, 0], **every)
    rule = {"sample_weight": weights, "zero_division": np.nan}
    return {
        "auc": float(np.trapezoid(tpr, fpr)) if fpr.size > 1 else np.nan,
        "logloss": float(sk.log_loss(labels, p, sample_weight=weights, labels=[0, 1])),
        "accuracy": float(sk.accuracy_score(labels, guesses, sample_weight=weights)),
        "f1": float(sk.f1_score(labels, guesses, **rule)),
        "precision": float(sk.precision_score(labels, guesses, **rule)),
        "recall": float(sk.recall_score(labels, guesses, **rule)),
        "ks": float(np.abs(tpr - fpr).max()),
    }


def _pooled_multi(margins: Array, labels: Array, weights: Array) -> dict[str, float]:
    from sklearn import metrics as sk

    p, class_ids = np.exp(_log_softmax(margins)), np.arange(margins.shape[1])
    guesses = margins.argmax(axis=1)
    return {
        "accuracy": float(sk.accuracy_score(labels, guesses, sample_weight=weights)),
        "mlogloss": float(sk.log_loss(labels, p, sample_weight=weights, labels=class_ids)),
    }


def _pooled_regression(margins: Array, labels: Array, weights: Array) -> dict[str, float]:
    from sklearn import metrics as sk

    pair, rule = (labels, margins[:, 0]), {"sample_weight": weights}
    return {
        "rmse": float(sk.root_mean_squared_error(*pair, **rule)),
        "mae": float(sk.mean_absolute_error(*pair, **rule)),
        "r2": float(sk.r2_score(*pair, **rule)) if np.ptp(labels) else np.nan,
    }


def _sigmoid(margins: Array) -> Array:
    """1 / (1 + exp(-margin)) without overflow; 0 gives exactly 0.5."""
    small = np.exp(-np.abs(margins))
    return np.where(margins >= 0, 1.0, small) / (1.0 + small)


def _log_softmax(margins: Array) -> Array:
    shifted = margins - margins.max(axis=1, keepdims=True)
    logs: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logs


def _ratio(part: float, whole: float) -> float:
    """part / whole, nan where whole is 0 or undefined."""
    return float(part / whole) if whole > 0 else np.nan


def _checked(
    objective: str, margins: Rows, labels: Rows, weights: Rows
) -> tuple[Array, Array, Array]:
    """The arrays in float64, after every check that needs no other argument."""
    _check_objective(objective)
    is_multi, n_rows = objective == "multi:softprob", margins.shape[:1]
    n_outputs = margins.shape[1] if margins.ndim == 2 else 0
    if n_outputs < 1 or (n_outputs > 1) != is_multi:
        columns = "n_classes" if is_multi else "1"
        raise ValueError(f"margins must be of shape (n, {columns}), got {margins.shape}")
    for name, rows in (("labels", labels), ("weights", weights)):
        if rows.shape != n_rows:
            raise ValueError(f"{name} must be of shape {n_rows}, got {rows.shape}")
    for name, values in (("margins", margins), ("labels", labels), ("weights", weights)):
        _check_all(np.isfinite(values), f"{name} must be finite")
    _check_all(weights >= 0, "weights must be >= 0")
    if objective != REGRESSION:
        n_classes = max(n_outputs, 2)
        is_class = (labels >= 0) & (labels < n_classes) & (labels == np.floor(labels))
        _check_all(is_class, f"labels must be class ids 0 to {n_classes - 1}")
    return margins.astype(np.float64), labels.astype(np.float64), weights.astype(np.float64)


def _check_all(holds: NDArray[np.bool_], rule: str) -> None:
    if n_others := int(np.count_nonzero(~holds)):
        raise ValueError(f"{rule}, got {n_others} other values")


def _check_objective(objective: str) -> None:
    if objective not in _N_SUMS:
        raise ValueError(f"objective must be one of {', '.join(_N_SUMS)}, got {objective}")


def _check_residual_range(residual_range: float) -> None:
    if not 0 < residual_range < np.inf:
        raise ValueError(f"residual_range must be > 0 and finite, got {residual_range}")


def _check_statistics(objective: str, statistics: Statistics) -> None:
    _check_objective(objective)
    sums, histogram = statistics.sums, statistics.histogram
    n_rows, n_bins = histogram.shape if histogram.ndim == 2 else (0, 0)
    n_expected = {"binary:logistic": 2, REGRESSION: 1}.get(objective, n_bins)
    shape_holds = n_bins >= 2 and n_rows == n_expected
    if sums.shape != (_N_SUMS[objective],) or not shape_holds:
        raise ValueError(
            f"statistics must be those of {objective}, "
            f"got sums {sums.shape} and histogram {histogram.shape}"
        )
    if not (np.isfinite(sums).all() and np.isfinite(histogram).all() and histogram.min() >= 0):
        raise ValueError("statistics must be finite, and the histogram's cells >= 0")
