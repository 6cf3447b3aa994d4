"""Sums of one party's rows that add up over parties, and checks of both.

``statistics`` adds up in the numbers of an ``Adder``; see ``adders``. Losses of ``eval-metric``
follow XGBoost 3.2's documentation, in float64 here and float32 there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from operator import add
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedapp.metrics import survival
from fedapp.metrics.adders import DOUBLES, Adder
from fedapp.metrics.names import NAMES, UNCALIBRATED, is_custom, scored_names
from fedapp.trees.custom import custom_sum
from fedapp.trees.limits import DISTRIBUTIONS
from fedapp.trees.losses import LOSSES, LOWEST_PREDICTION
from fedapp.trees.objective import (
    check_objective,
    exact_predictions,
    has_risk_sets,
    is_of_rows,
    is_ranking,
    is_regression,
    is_survival,
    transform,
)

Array: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = NDArray[np.float32]
Ints = NDArray[np.int64]

N_BASE_SUMS = 5  # of two classes and of numbers; of times ``survival.N_SUMS``
PART_ROWS = 2**22  # whose sums are added up together
N_RANKED_SUMS = 3  # of ranked rows: weight, queries, and sum of their NDCG
# Largest cell or sum: products of two, summed over all bins, stay within float64.
MAX_WEIGHT = 1e100

# Distances of a margin from the centre of its histogram: bins have equal width below _NEAR, and
# the outer ones have all rows beyond _FAR.
_NEAR, _FAR = 1e-3, 50.0
# Least bins of a class. The classes of multi:softprob share the bins, so that their histograms are
# as large as those of two classes.
_FEWEST_CLASS_BINS = 32
# Margins of classes are sums of exponentials; further decimals depend on the order of the sum.
_DECIMALS = 9
_SMALLEST = 1e-16  # of a probability or a mean whose logarithm is taken
_GAMMA_SHIFT = 1e-6  # XGBoost adds it to labels and predictions of the gamma deviance
# Computed from the sums of every run, or from the histogram.
DERIVED = ("aucpr", "merror")

# Bounds on a row's loss, keys of ``_POWERS``; all others are bounded as a deviance.
_SIZES = {
    **dict.fromkeys(("logloss", UNCALIBRATED), "loss"),
    "error": "weight",
    "rmse": "square",
    "brier": "square",
    "rmsle": "loss",
    "mae": "error",
    "quantile": "error",
    "aft-nloglik": "loss",
}


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Sums over the rows of one party or of several, as in the table of ``fedapp.metrics``."""

    sums: Array
    histogram: Array

    def __add__(self, other: Statistics) -> Statistics:
        """Statistics of the rows of both; a ValueError where the shapes differ."""
        left, right = ((each.sums.shape, each.histogram.shape) for each in (self, other))
        if left != right:
            raise ValueError(f"statistics must be of one shape, got {left} and {right}")
        return Statistics(self.sums + other.sums, self.histogram + other.histogram)


def statistics(
    objective: str,
    margins: Rows,
    labels: Rows,
    weights: Rows,
    n_bins: int,
    residual_range: float = 1.0,
    center: float = 0.0,
    fewest: int = 0,
    extra: Sequence[str] = (),
    adder: Adder = DOUBLES,
    before: Rows | None = None,
    cells: survival.Cells | None = None,
    totals: list[Ints] | Iterator[Ints] | None = None,
) -> Statistics:
    """Sums of one party's rows, for ``scores``, in the numbers of ``adder``.

    Of many rows, those of parts are added up, unless a score needs all rows at once.

    Parameters
    ----------
    margins : float32, shape (n, n_outputs), before sigmoid or softmax; n may be 0.
    labels : float32, shape (n,), class ids, or values for regression.
    weights : float32, shape (n,), >= 0
    n_bins : >= 2, of the histogram; the classes of multi:softprob share them.
    residual_range : regression only, > 0: the outer bins have all rows beyond.
    center : binary:logistic only: the margin around which bins are narrowest, as a young model's
        margins are all close to the base margin.
    fewest : least rows of positive weight of a non-empty bin: smaller bins are merged.
    extra : names of additional metrics, as in ``eval-metric``.
    before : margins before a calibration, if those above are calibrated.
    cells : of times: where the table of all parties is divided; by default by these rows.
    totals : where these rows are a part, rows by bin each time that bins are merged: a list gets
        those of this part, an iterator has those of all parts.

    Raises
    ------
    ValueError : an argument breaks its rule. The text never contains a label.
    """
    if len(margins) > PART_ROWS and is_of_rows(objective) and not any(map(is_custom, extra)):
        parts = [slice(i, i + PART_ROWS) for i in range(0, len(margins), PART_ROWS)]

        def of_part(some: slice, adder: Adder, totals: list[Ints] | Iterator[Ints]) -> Statistics:
            rows = margins[some], labels[some], weights[some]
            earlier = None if before is None else before[some]
            more: Any = residual_range, center, fewest, extra, adder, earlier, cells, totals
            return statistics(objective, *rows, n_bins, *more)

        counts = [list[Ints]() for _ in parts]
        for some, n_rows in zip(parts, counts, strict=True) if fewest else ():
            of_part(some, deepcopy(adder), n_rows)
        sums_of_bins = [np.sum(n_rows, axis=0) for n_rows in zip(*counts, strict=True)]
        # An adder notes what it adds up, once.
        adders = [adder, *(deepcopy(adder) for _ in parts[1:])]
        pairs = zip(parts, adders, strict=True)
        return reduce(add, (of_part(some, one, iter(sums_of_bins)) for some, one in pairs))
    margins64, labels64, weights64 = checked_rows(objective, margins, labels, weights)
    if n_bins < 2:
        raise ValueError(f"n_bins must be >= 2, got {n_bins}")
    rows = _Weighted(weights64, n_bins, fewest, adder, totals)
    if objective == "multi:softprob":
        return _multi_statistics(margins64, labels64, rows)
    predictions = only = margins64[:, 0]
    if is_ranking(objective):
        return _ranked_statistics(only, labels64, scored_names(objective, extra), rows)
    is_binary = objective == "binary:logistic"
    if not is_binary or summed(objective, extra):  # others of two classes need only margins
        predictions = exact_predictions(objective, margins64)[:, 0]
    if is_binary:
        sums, histogram = _binary_sums_and_cells(only, labels64, center, rows)
    elif is_survival(objective):
        # Margins of hazards fall with predicted times.
        rising = -only if has_risk_sets(objective) else only
        sums, histogram = _time_sums_and_cells(rising, labels64, cells, rows)
    else:
        check_residual_range(residual_range)
        residuals = labels64 - predictions
        sums, histogram = _number_sums_and_cells(residuals, labels64, residual_range, rows)
    more = extra_sums(objective, extra, predictions, labels64, weights64, adder, before)
    return Statistics(np.array(sums + more), histogram)


@dataclass(frozen=True, slots=True, eq=False)
class _Weighted:
    """Weights of rows, and how they are added up."""

    weights: Array
    n_bins: int
    fewest: int  # rows of a bin, see ``statistics``
    adder: Adder
    totals: list[Ints] | Iterator[Ints] | None = None

    def total(self, size: str, terms: NDArray[Any]) -> Any:
        """Weighted sum of terms; ``size`` as of an ``Adder``."""
        return self.adder.total(size, np.asarray(terms, dtype=np.float64), self.weights)

    def cells(self, groups: NDArray[Any], bins: Ints, n_groups: int, n_bins: int) -> Array:
        """Weight by group of rows and bin."""
        shape = n_groups, n_bins
        cells: Array = self.adder.cells(groups.astype(np.int64), bins, self.weights, shape)
        return cells

    def merged(self, bins: Ints) -> Ints:
        """Bins of rows, merged until each has at least ``fewest`` rows with weight."""
        n_rows, most = np.empty(0, np.int64), max(self.n_bins, _FEWEST_CLASS_BINS)
        if self.fewest:
            n_rows = np.bincount(bins[self.weights > 0], minlength=most)
        if isinstance(self.totals, list):
            self.totals.append(n_rows)
        elif self.totals and self.fewest:
            n_rows = next(self.totals)
        if not n_rows.any():
            return bins
        from fedapp.histograms.groups import group  # compiled

        each = np.arange(len(n_rows))
        ends = group(each, n_rows[None], np.array([0, len(n_rows)]), self.fewest)
        # A group's rows are counted in its mean bin.
        totals, means = np.bincount(ends, n_rows), np.bincount(ends, n_rows * each)
        means //= np.maximum(totals, 1)
        merged: Ints = means[ends[np.minimum(bins, len(ends) - 1)]].astype(np.int64)
        return merged


def checked_rows(
    objective: str, margins: Rows, labels: Rows, weights: Rows
) -> tuple[Array, Array, Array]:
    """The arrays in float64, after all checks that need no other argument."""
    check_objective(objective)
    is_multi = objective == "multi:softprob"
    n_rows = margins.shape[:1]
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
    if is_regression(objective):
        loss = LOSSES[objective]
        _check_all(loss.allows(labels.astype(np.float64)), f"labels must be {loss.label_rule}")
    else:
        n_classes = max(n_outputs, 2)
        is_class = (labels >= 0) & (labels < n_classes) & (labels == np.floor(labels))
        _check_all(is_class, f"labels must be class ids 0 to {n_classes - 1}")
    return margins.astype(np.float64), labels.astype(np.float64), weights.astype(np.float64)


def n_base_sums(objective: str) -> int:
    """Sums of an objective with one output, before those of further metrics."""
    if is_ranking(objective):
        return N_RANKED_SUMS
    return survival.N_SUMS if is_survival(objective) else N_BASE_SUMS


def check_residual_range(residual_range: float) -> None:
    if not 0 < residual_range < np.inf:
        raise ValueError(f"residual_range must be > 0 and finite, got {residual_range}")


def confusion(sums: Array) -> Array:
    """Weights of multi:softprob by true class (rows) and predicted class (columns)."""
    n_classes = math.isqrt(len(sums) - 2)
    return sums[2:].reshape(n_classes, n_classes)


@lru_cache(maxsize=8)
def margin_edges(n_bins: int) -> Array:
    """Lower edges of a histogram's bins but the first, as distances from its centre.

    They widen with the distance: linear up to _NEAR, then geometric.
    """
    places = 2.0 * np.arange(1, n_bins) / n_bins - 1.0
    edges: Array = _NEAR * np.sinh(places * np.arcsinh(_FAR / _NEAR))
    edges.flags.writeable = False
    return edges


def margin_middles(n_bins: int) -> Array:
    """Middles of a histogram's bins; the outer bins have none and take their edge."""
    edges = margin_edges(n_bins)
    ends = np.concatenate((edges[:1], edges, edges[-1:]))
    middles: Array = (ends[1:] + ends[:-1]) / 2.0
    return middles


def class_margins(margins: Array) -> Array:
    """Log odds of each class: they order rows as probabilities do, but none rounds to 1."""
    places = np.arange(len(margins))
    best = margins.argmax(axis=1)
    powers = np.exp(margins - margins[places, best][:, None])
    others = powers.sum(axis=1, keepdims=True) - powers
    without_best = powers.copy()
    without_best[places, best] = 0.0
    others[places, best] = without_best.sum(axis=1)  # summed, as 1 minus the best would cancel
    smallest = np.finfo(np.float64).tiny
    odds = np.log(np.maximum(powers, smallest)) - np.log(np.maximum(others, smallest))
    rounded: Array = np.round(odds, _DECIMALS)
    return rounded


def check_statistics(objective: str, statistics: Statistics) -> None:
    """Check that statistics have the form of the objective; a ValueError."""
    check_objective(objective)
    sums, histogram = statistics.sums, statistics.histogram
    n_rows, n_bins = histogram.shape if histogram.ndim == 2 else (0, 0)
    if objective == "multi:softprob":
        n_sums = 2 + (n_rows // 2) ** 2
        n_expected = max(n_rows // 2, 2) * 2
        fits = sums.shape == (n_sums,)
    else:
        # Sums of further metrics may follow.
        n_expected = 1 if is_regression(objective) and not is_survival(objective) else 2
        fits = sums.ndim == 1 and len(sums) >= n_base_sums(objective)
        n_ranges = math.isqrt(n_bins)  # of times; columns are one more
        fits &= not is_survival(objective) or n_bins == n_ranges * (n_ranges + 1)
    if not fits or n_rows != n_expected or n_bins < 2:
        raise ValueError(
            f"statistics must be those of {objective}, "
            f"got sums {sums.shape} and histogram {histogram.shape}"
        )
    # NaN breaks both rules.
    if not (np.abs(sums) <= MAX_WEIGHT).all():
        raise ValueError(f"sums must be within {MAX_WEIGHT:g}")
    if not ((histogram >= 0) & (histogram <= MAX_WEIGHT)).all():
        raise ValueError(f"the histogram's cells must be 0 to {MAX_WEIGHT:g}")


def _binary_sums_and_cells(
    margins: Array, labels: Array, center: float, rows: _Weighted
) -> tuple[list[Any], Array]:
    bins = rows.merged(_margin_bins(margins - center, rows.n_bins))
    guesses = is_called(margins)
    counts = guesses * labels, ~guesses * labels, guesses * (1 - labels)
    sums = [
        rows.total("weight", np.ones_like(labels)),
        rows.total("loss", binary_losses(margins, labels)),
        *(rows.total("weight", count) for count in counts),
    ]
    return sums, rows.cells(labels, bins, 2, rows.n_bins)


def binary_losses(margins: Array, labels: Array) -> Array:
    """Log loss of each row of two classes."""
    losses: Array = np.logaddexp(0.0, margins) - labels * margins
    return losses


def class_losses(margins: Array, class_ids: Ints) -> Array:
    """Log loss of each row of several classes."""
    shifted = margins - margins.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    losses: Array = -logs[np.arange(len(margins)), class_ids]
    return losses


def is_called(margins: Array) -> NDArray[np.bool_]:
    """Which rows are called positive: whose probability, as it is predicted, is above 0.5."""
    probabilities = transform("binary:logistic", margins.astype(np.float32)[:, None])
    return np.asarray(probabilities[:, 0] > np.float32(0.5))


def _margin_bins(distances: Array, n_bins: int) -> Ints:
    """Bin of each distance, as ``np.searchsorted`` finds it, in a fifth of the time."""
    places = (np.arcsinh(distances / _NEAR) / np.arcsinh(_FAR / _NEAR) + 1.0) * (n_bins / 2)
    # Rounded, so it may be the bin beside. No number is in the last bin, like infinity.
    bins: Ints = np.fmax(np.fmin(places, n_bins - 1), 0).astype(np.int64)
    ends = np.concatenate(([-np.inf], margin_edges(n_bins), [np.nan]))
    bins -= distances < ends[bins]
    bins += distances >= ends[bins + 1]
    return bins


def _multi_statistics(margins: Array, labels: Array, rows: _Weighted) -> Statistics:
    n_classes = margins.shape[1]
    class_ids = labels.astype(np.int64)
    # At equal probabilities the log odds of a class are -log(n_classes - 1).
    n_bins = max(_FEWEST_CLASS_BINS, rows.n_bins // n_classes)
    center = -np.log(n_classes - 1)
    histograms = [
        rows.cells(
            class_ids == class_id, rows.merged(_margin_bins(odds - center, n_bins)), 2, n_bins
        )
        for class_id, odds in enumerate(class_margins(margins).T)
    ]
    counts = rows.cells(class_ids, margins.argmax(axis=1), n_classes, n_classes)
    weight = rows.total("weight", np.ones_like(labels))
    loss = rows.total("loss", class_losses(margins, class_ids))
    return Statistics(np.array([weight, loss, *counts.flat]), np.concatenate(histograms))


def _number_sums_and_cells(
    residuals: Array, labels: Array, residual_range: float, rows: _Weighted
) -> tuple[list[Any], Array]:
    shares = np.clip((residuals / residual_range + 1.0) / 2.0, 0.0, 1.0)
    bins = rows.merged(np.minimum((shares * rows.n_bins).astype(np.int64), rows.n_bins - 1))
    terms = {
        "weight": np.ones_like(labels),
        "square": residuals**2,
        "error": np.abs(residuals),
        "label": labels,
        "label square": labels**2,
    }
    sums = [rows.total(size, term) for size, term in terms.items()]
    return sums, rows.cells(np.zeros_like(bins), bins, 1, rows.n_bins)


def _time_sums_and_cells(
    margins: Array, labels: Array, cells: survival.Cells | None, rows: _Weighted
) -> tuple[list[Any], Array]:
    times, is_event = np.abs(labels), labels > 0
    cells = cells or survival.Cells.of_rows(times, margins, rows.n_bins)
    ranges, columns = cells.places(times, margins)
    n_columns = survival.n_columns(rows.n_bins)
    merged = rows.merged(ranges * n_columns + columns)
    is_between = is_event & (merged // n_columns % 2 == 0)
    # Of larger weights the bound on the score takes less than the squares.
    terms = np.ones_like(labels), is_event, is_between * np.minimum(rows.weights, 1.0)
    sums = [rows.total("weight", term) for term in terms]
    return sums, rows.cells(is_event, merged, survival.FORM, survival.n_cells(rows.n_bins))


def _ranked_statistics(
    scores: Array, labels: Array, names: Sequence[str], rows: _Weighted
) -> Statistics:
    """Weight, number of queries, and sums of their scores; there is no histogram of rows."""
    from fedapp.trees.ranking import N_TOP, query_ndcg  # compiled

    every = [query_ndcg(labels, scores, int(name.partition("@")[2] or N_TOP)) for name in names]
    queries = replace(rows, weights=np.ones(len(every[0])))
    sums = [queries.total("weight", values) for values in (queries.weights, *every)]
    weight, nowhere = rows.total("weight", np.ones_like(labels)), np.empty(0, dtype=np.int64)
    cells = replace(rows, weights=np.empty(0)).cells(nowhere, nowhere, 1, 2)
    return Statistics(np.array([weight, *sums]), cells)


def _check_all(holds: NDArray[np.bool_], rule: str) -> None:
    if n_others := int(np.count_nonzero(~holds)):
        raise ValueError(f"{rule}, got {n_others} other values")


# Differential privacy: terms are clipped, and noised histograms are moved to possible values


def make_plausible(noised: Statistics) -> Statistics:
    """Noised sums with a histogram that rows could have; ``scores`` excludes what sums cannot be.

    Cumulative sums over the bins become ascending, halfway between the nearest ascending sums above
    and below, so that curves are not biased.
    """
    totals = np.maximum(np.cumsum(noised.histogram, axis=1), 0)
    totals = np.minimum(totals, totals[:, -1:])
    upper = np.maximum.accumulate(totals, axis=1)
    lower = np.minimum.accumulate(totals[:, ::-1], axis=1)[:, ::-1]
    histogram = np.diff((upper + lower) / 2, axis=1, prepend=0.0)
    return Statistics(noised.sums, np.maximum(histogram, 0))


# Losses of rows, by XGBoost's names and formulas


def _log_loss(labels: Array, shares: Array) -> Array:
    logs, others = (np.log(np.maximum(p, _SMALLEST)) for p in (shares, 1 - shares))
    losses: Array = -labels * logs - (1 - labels) * others
    return losses


def _error(labels: Array, shares: Array, threshold: float = 0.5) -> Array:
    # XGBoost's probabilities are float32.
    called = shares.astype(np.float32) > np.float32(threshold)
    return np.where(called, 1 - labels, labels)


def _relative(labels: Array, predictions: Array) -> Array:
    if not labels.all():
        rule = "labels must not be 0 with eval-metric=mape"
        raise ValueError(f"{rule}, got {np.count_nonzero(labels == 0)} that are")
    return np.abs((labels - predictions) / labels)


def _poisson(labels: Array, means: Array) -> Array:
    values, places = np.unique(labels, return_inverse=True)
    factorials = np.array([math.lgamma(value + 1) for value in values.tolist()])[places]
    losses: Array = factorials + means - np.log(np.maximum(means, _SMALLEST)) * labels
    return losses


def _gamma(labels: Array, means: Array) -> Array:
    ratios = (labels + _GAMMA_SHIFT) / (means + _GAMMA_SHIFT)
    losses: Array = 2 * (ratios - np.log(ratios) - 1)
    return losses


def _squared_log(labels: Array, predictions: Array) -> Array:
    # XGBoost's metric is NaN below the least prediction, which its gradients are clipped at.
    logs = np.log1p(np.maximum(predictions, float(LOWEST_PREDICTION)))
    losses: Array = (np.log1p(labels) - logs) ** 2
    return losses


def _failure_time(labels: Array, times: Array, distribution: str, scale: float) -> Array:
    from fedapp.trees.survival import aft_losses  # compiled

    return aft_losses(labels, times, DISTRIBUTIONS.index(distribution), scale)


# By labels y and predictions p, then the numbers of the name.
_LOSSES: dict[str, Callable[..., Array]] = {
    **dict.fromkeys(("logloss", UNCALIBRATED), _log_loss),
    "error": _error,
    **dict.fromkeys(("rmse", "brier"), lambda y, p: (y - p) ** 2),
    "rmsle": _squared_log,
    "mphe": lambda y, p, slope: slope**2 * (np.sqrt(1 + ((y - p) / slope) ** 2) - 1),
    "tweedie-nloglik": lambda y, p, power: (
        p ** (2 - power) / (2 - power) - y * p ** (1 - power) / (1 - power)
    ),
    "mae": lambda y, p: np.abs(y - p),
    "mape": _relative,
    "poisson-nloglik": _poisson,
    "gamma-deviance": _gamma,
    "aft-nloglik": _failure_time,
    "quantile": lambda y, p, level: np.maximum(level * (y - p), (level - 1) * (y - p)),
}


def summed(objective: str, extra: Sequence[str]) -> tuple[str, ...]:
    """The requested metrics that need one more sum."""
    return tuple(
        name
        for name in extra
        if name not in NAMES[objective] and name.partition("@")[0] not in DERIVED
    )


def extra_sums(
    objective: str,
    extra: Sequence[str],
    predictions: Array,
    labels: Array,
    weights: Array,
    adder: Adder,
    before: Rows | None = None,
) -> list[Any]:
    """Weighted sums over rows, float64 of shape (n_rows,), one for each of ``summed``."""
    rows = weights > 0
    earlier = {}
    if before is not None:
        earlier = {UNCALIBRATED: exact_predictions(objective, before[rows].astype(float))[:, 0]}
    labels, predictions, weights = labels[rows], predictions[rows], weights[rows]
    sizes = {name: _SIZES.get(name.partition("@")[0], "deviance") for name in extra}
    return [
        custom_sum(labels, predictions, weights)
        if is_custom(name)
        else adder.total(
            sizes[name], losses_of(name, labels, earlier.get(name, predictions)), weights
        )
        for name in summed(objective, extra)
    ]


def losses_of(name: str, labels: Array, predictions: Array) -> Array:
    """Unweighted loss of each row."""
    kind, _, numbers = name.partition("@")
    values = [_number(text) for text in numbers.split(":") if text]
    return _LOSSES[kind](labels, predictions, *values)


def _number(text: str) -> float | str:
    return text if text in DISTRIBUTIONS else float(text)


def score_of(name: str, total: float, weight: float) -> float:
    """A score from its sum and the weight of all rows; nan without rows, and of a root below 0."""
    mean = total / weight if weight > 0 else np.nan
    if name not in ("rmse", "rmsle"):
        return float(mean)
    return float(np.sqrt(mean)) if mean >= 0 else np.nan
