"""The loss of each objective: gradients in float32 as XGBoost 3 computes them, links and bounds.

``LOSSES`` has one entry per objective; no other code knows their formulas. ``objective`` computes
with them.

Source: Chen and Guestrin 2016 (arXiv:1603.02754v3), Eq. 2, and XGBoost's documented objectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any, Final, Literal

import numpy as np

from fedapp.arrays import Doubles, Flags, Floats
from fedapp.histograms.fixed_point import power_above
from fedapp.trees.c_math import exp32, log1p32
from fedapp.trees.custom import CUSTOM, custom_pairs
from fedapp.trees.limits import DISTRIBUTIONS
from fedapp.trees.ranking import ranking_pairs
from fedapp.trees.survival import aft_pairs, cox_pairs

Objective = Literal[
    "binary:logistic",
    "multi:softprob",
    "reg:squarederror",
    "reg:logistic",
    "count:poisson",
    "reg:gamma",
    "reg:tweedie",
    "reg:squaredlogerror",
    "reg:pseudohubererror",
    "binary:hinge",
    "reg:absoluteerror",
    "reg:quantileerror",
    "survival:aft",
    "survival:cox",
    "rank:ndcg",
    "rank:pairwise",
    "custom",
]
REGRESSION: Final = "reg:squarederror"
SMALLEST_HESSIAN = np.float32(1e-16)
# Of squared log errors: the least prediction, whose logarithm exists, and the least hessian.
LOWEST_PREDICTION, SMALLEST_LOG_HESSIAN = np.float32(-1 + 1e-6), np.float32(1e-6)
# Beyond these the exponential overflows float32 and float64.
LARGEST_POWER = np.float32(88.7)
LARGEST_EXACT_POWER = 700.0
# Exponentials of margins above are normal float32 numbers, with full precision.
LEAST_UNSHIFTED = np.float32(-87)
MOST_CLASSES = 10**6


@dataclass(frozen=True, slots=True)
class LossParameters:
    """Parameters of objectives, named as in XGBoost; each objective reads only some."""

    scale_pos_weight: Annotated[float, "> 0"]  # factor of the weight of positive rows
    max_delta_step: Annotated[float, ">= 0"]  # of ``count:poisson``: added to margins for hessians
    tweedie_variance_power: Annotated[float, "> 1", "< 2"]  # of ``reg:tweedie``
    huber_slope: Annotated[float, "> 0"] = 1.0  # of ``reg:pseudohubererror``
    aft_loss_distribution: str = "normal"  # of ``survival:aft``: of log times, and its scale
    aft_loss_distribution_scale: Annotated[float, "> 0"] = 1.0
    quantile_alpha: Annotated[float, "> 0", "< 1"] = 0.5  # of ``reg:quantileerror``

    @classmethod
    def of(cls, source: Any) -> LossParameters:
        """From a run's settings, or a message with these fields."""
        values = {field.name: getattr(source, field.name) for field in fields(cls)}
        return cls(**{name: _as_float(value) for name, value in values.items()})


def _as_float(value: Any) -> Any:
    return value if isinstance(value, str) else float(value)


# Defaults.
PLAIN = LossParameters(scale_pos_weight=1.0, max_delta_step=0.0, tweedie_variance_power=1.5)


@dataclass(frozen=True, slots=True)
class Link:
    """Map between margins and predictions, arrays of shape (n_rows, n_outputs)."""

    predict: Callable[[Floats], Floats]  # float32 margins to predictions
    predict_exactly: Callable[[Doubles], Doubles]  # the same in float64
    margins: Callable[[Doubles], Doubles]  # the inverse of ``predict_exactly``
    # low, high: base scores must be strictly between
    low: float
    high: float


Pair = tuple[Floats, Floats]  # gradients and hessians
Pairs = Callable[[Floats, Floats, LossParameters], Pair]


@dataclass(frozen=True, slots=True)
class Loss:
    """One objective."""

    link: Link
    # From float32 margins (n_rows, n_outputs) and labels (n_rows,) to gradients and hessians of
    # the margins' shape, without weights.
    pairs: Pairs
    # From the power of two of the largest label to powers that bound gradients and hessians of a
    # row of weight 1; for unbounded margins, powers that models of such labels do not reach.
    powers: Callable[[int, LossParameters], tuple[int, int]]
    classes: tuple[int, int] = (0, 0)  # minimum and maximum number of classes; 0 for numeric labels
    labels: tuple[float, float] = (-np.inf, np.inf)  # minimum and maximum of a numeric label
    above_low: bool = False  # whether the minimum itself is excluded
    one_of: tuple[float, ...] = ()  # the only numeric labels
    reads: tuple[str, ...] = ()  # names of the ``LossParameters`` that it reads
    # What training minimises, if it is no score of every run; after an @ follow the parameters of
    # ``reads``, with a colon in between.
    metric: str = ""
    # Whether the first prediction is a Newton step from margin 0, not the mean label.
    newton: bool = False
    intercept: float | None = None  # the first prediction, if it does not depend on labels
    # Whether a label is the time of an event, or minus the time at which its row was censored.
    is_survival: bool = False
    # Whether a row's gradient depends on the margins of all rows at risk; see ``survival``.
    has_risk_sets: bool = False
    # Whether a label is a code of its row's query and relevance; see ``ranking``.
    is_ranking: bool = False
    has_quantile_leaves: bool = False  # of residuals, in place of Newton steps

    @property
    def label_rule(self) -> str:
        """The range of numeric labels, for error messages."""
        low, high = self.labels
        if self.is_survival:
            return "a time > 0, or minus the time of a censored row"
        if self.is_ranking:
            return "a whole number from 0 to 31, its row's relevance, with a qid column"
        if self.one_of:
            return " or ".join(f"{label:g}" for label in self.one_of)
        if np.isfinite(high):
            return f"{low:g} to {high:g}"
        return f"{'>' if self.above_low else '>='} {low:g}"

    def allows(self, labels: Doubles) -> Flags:
        """Which labels are in the range; bool, shape (n_rows,)."""
        low, high = self.labels
        labels = labels.astype(np.float32)  # -1 + 1e-9 is -1 there
        above: Flags = labels > low if self.above_low else labels >= low
        above &= (labels != 0) | (not self.is_survival)
        above &= (labels == np.floor(labels)) | (not self.is_ranking)
        return above & (labels <= high) & (np.isin(labels, self.one_of) | (not self.one_of))


def _exp_within(powers: Floats) -> Floats:
    """``exp32``, clipped to stay within float32."""
    return exp32(np.minimum(powers, LARGEST_POWER))


def _sigmoid(margins: Floats) -> Floats:
    return np.float32(1) / (_exp_within(-margins) + np.float32(1))


def _exact_sigmoid(margins: Doubles) -> Doubles:
    shares: Doubles = 1 / (1 + np.exp(-np.clip(margins, -LARGEST_EXACT_POWER, LARGEST_EXACT_POWER)))
    return shares


def _clipped(shares: Doubles) -> Doubles:
    """Probabilities of 0 and 1 moved by 2e-16, as in scikit-learn's log loss."""
    smallest = float(np.finfo(np.float64).eps)
    return np.clip(shares, smallest, 1 - smallest)


def _log_odds(predictions: Doubles) -> Doubles:
    shares = _clipped(predictions)
    odds: Doubles = np.log(shares / (1 - shares))
    return odds


def _softmax(margins: Floats) -> Floats:
    return _shares(margins, margins.max(axis=1, keepdims=True))


def _shares(margins: Floats, shifts: Floats) -> Floats:
    """Softmax of margins, less a shift per row of shape (n_rows, 1)."""
    powers = exp32(margins - shifts)
    shares: Floats = powers / powers.sum(axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
    return shares


def _exact_softmax(margins: Doubles) -> Doubles:
    powers = np.exp(margins - margins.max(axis=1, keepdims=True))
    shares: Doubles = powers / powers.sum(axis=1, keepdims=True)
    return shares


def _log_shares(predictions: Doubles) -> Doubles:
    logs: Doubles = np.log(_clipped(predictions))
    return logs


def _exact_exp(margins: Doubles) -> Doubles:
    """Clipped to float32, so that squares stay within float64."""
    means: Doubles = np.exp(np.minimum(margins, float(LARGEST_POWER)))
    return means


def _log(predictions: Doubles) -> Doubles:
    logs: Doubles = np.log(np.maximum(predictions, np.finfo(np.float64).tiny))
    return logs


def _same(values: Any) -> Any:
    return values


def _is_positive(margins: Any) -> Any:
    """1 for margins above 0, else 0."""
    return (margins > 0).astype(margins.dtype)


def _squared_pairs(margins: Floats, labels: Floats, parameters: LossParameters) -> Pair:
    return margins - labels[:, None], np.ones_like(margins)


def _share_pairs(predictions: Floats, truth: Floats, steepness: np.float32) -> Pair:
    """Gradients and hessians of a log loss; hessians never vanish."""
    hessians = steepness * predictions * (np.float32(1) - predictions)
    return predictions - truth, np.maximum(hessians, SMALLEST_HESSIAN)


def _logistic_pairs(margins: Floats, labels: Floats, parameters: LossParameters) -> Pair:
    return _share_pairs(_sigmoid(margins), labels[:, None], np.float32(1))


def one_hot(labels: Floats, margins: Floats) -> Floats:
    """1 in the column of the row's class, 0 elsewhere; float32, shape of ``margins``."""
    hot: Floats = (labels[:, None] == np.arange(margins.shape[1])).astype(np.float32)
    return hot


def _softmax_pairs(margins: Floats, labels: Floats, parameters: LossParameters) -> Pair:
    largest = margins.max(axis=1, keepdims=True)
    # For gradients, unlike for predictions, XGBoost does not shift margins that are all below 0.
    # Very low ones, whose exponentials would all vanish, are shifted here.
    shifts = np.where(largest < LEAST_UNSHIFTED, largest, np.maximum(largest, np.float32(0)))
    return _share_pairs(_shares(margins, shifts), one_hot(labels, margins), np.float32(2))


def _poisson_pairs(margins: Floats, labels: Floats, parameters: LossParameters) -> Pair:
    further = margins + np.float32(parameters.max_delta_step)
    return _exp_within(margins) - labels[:, None], _exp_within(further)


def _gamma_pairs(margins: Floats, labels: Floats, parameters: LossParameters) -> Pair:
    ratios = labels[:, None] / _exp_within(margins)
    return np.float32(1) - ratios, ratios


def _tweedie_pairs(margins: Floats, labels: Floats, parameters: LossParameters) -> Pair:
    power = np.float32(parameters.tweedie_variance_power)
    below, above = np.float32(1) - power, np.float32(2) - power
    truth = labels[:, None]
    falling = _exp_within(below * margins)
    rising = _exp_within(above * margins)
    return rising - truth * falling, above * rising - truth * below * falling


def _squared_log_pairs(margins: Floats, labels: Floats, parameters: LossParameters) -> Pair:
    predictions = np.maximum(margins, LOWEST_PREDICTION)
    above, truth = predictions + np.float32(1), log1p32(labels)[:, None]
    logs = log1p32(predictions)
    # XGBoost squares and divides in float64.
    rises = (truth - logs + np.float32(1)) / above.astype(np.float64) ** 2
    return (logs - truth) / above, np.maximum(rises.astype(np.float32), SMALLEST_LOG_HESSIAN)


def _pseudo_huber_pairs(margins: Floats, labels: Floats, parameters: LossParameters) -> Pair:
    square = np.float32(parameters.huber_slope) ** 2
    errors = margins - labels[:, None]
    roots = np.sqrt(np.float32(1) + errors**2 / square)
    return errors / roots, square / ((square + errors**2) * roots)


def _hinge_pairs(margins: Floats, labels: Floats, parameters: LossParameters) -> Pair:
    signs = labels[:, None] * np.float32(2) - np.float32(1)
    is_short = margins * signs < 1
    hessians = np.where(is_short, np.float32(1), np.finfo(np.float32).tiny)
    return np.where(is_short, -signs, np.float32(0)), hessians


def _quantile_pairs(margins: Floats, labels: Floats, parameters: LossParameters) -> Pair:
    level = np.float32(parameters.quantile_alpha)
    is_above = margins >= labels[:, None]
    return np.where(is_above, np.float32(1) - level, -level), np.ones_like(margins)


def _aft_pairs(margins: Floats, labels: Floats, parameters: LossParameters) -> Pair:
    kind = DISTRIBUTIONS.index(parameters.aft_loss_distribution)
    return aft_pairs(margins, labels, kind, parameters.aft_loss_distribution_scale)


def _no_powers(largest: int, parameters: LossParameters) -> tuple[int, int]:
    raise ValueError("objective must be one whose gradients have bounds, got a function")


def _logistic_powers(largest: int, parameters: LossParameters) -> tuple[int, int]:
    """|g| <= 1, h <= 1/4, times the weight of positive rows."""
    heavier = power_above(max(parameters.scale_pos_weight, 1.0))
    return heavier, heavier - 2


def _poisson_powers(largest: int, parameters: LossParameters) -> tuple[int, int]:
    """Predictions up to 16 times the largest label."""
    power = max(largest, 0) + 4
    return power, power + power_above(math.exp(min(parameters.max_delta_step, 80.0)))


def _pseudo_huber_powers(largest: int, parameters: LossParameters) -> tuple[int, int]:
    """|g| <= the slope, or an error up to 16 times the largest label; h <= 1."""
    return min(largest + 4, power_above(parameters.huber_slope)), 0


IDENTITY = Link(_same, _same, _same, -np.inf, np.inf)
LOGIT = Link(_sigmoid, _exact_sigmoid, _log_odds, 0.0, 1.0)
SOFTMAX = Link(_softmax, _exact_softmax, _log_shares, -np.inf, np.inf)
LOG = Link(_exp_within, _exact_exp, _log, 0.0, np.inf)
STEP = Link(_is_positive, _is_positive, _same, -np.inf, np.inf)

LOSSES: Final[dict[str, Loss]] = {
    "binary:logistic": Loss(
        LOGIT, _logistic_pairs, _logistic_powers, classes=(2, 2), reads=("scale_pos_weight",)
    ),
    # |g| <= 1, h <= 1/2
    "multi:softprob": Loss(SOFTMAX, _softmax_pairs, lambda *_: (0, -1), classes=(2, MOST_CLASSES)),
    # errors up to 16 times the largest label
    REGRESSION: Loss(IDENTITY, _squared_pairs, lambda largest, _: (largest + 4, 0)),
    "reg:logistic": Loss(LOGIT, _logistic_pairs, _logistic_powers, labels=(0, 1)),
    "count:poisson": Loss(
        LOG,
        _poisson_pairs,
        _poisson_powers,
        labels=(0, np.inf),
        reads=("max_delta_step",),
        metric="poisson-nloglik",
    ),
    # labels up to 2^16 times the prediction
    "reg:gamma": Loss(
        LOG,
        _gamma_pairs,
        lambda *_: (16, 16),
        labels=(0, np.inf),
        above_low=True,
        metric="gamma-deviance",
    ),
    "reg:tweedie": Loss(
        LOG,
        _tweedie_pairs,
        # labels, over a power of the prediction, up to 2^16 times the largest label
        lambda largest, _: (max(largest, 0) + 16,) * 2,
        labels=(0, np.inf),
        reads=("tweedie_variance_power",),
        metric="tweedie-nloglik@",
    ),
    # logarithms up to 2^5 in size, and predictions above -1 + 2^-7
    "reg:squaredlogerror": Loss(
        IDENTITY,
        _squared_log_pairs,
        lambda *_: (12, 20),
        labels=(-1, np.inf),
        above_low=True,
        metric="rmsle",
        newton=True,
    ),
    "reg:pseudohubererror": Loss(
        IDENTITY,
        _pseudo_huber_pairs,
        _pseudo_huber_powers,
        reads=("huber_slope",),
        metric="mphe@",
        newton=True,
    ),
    "binary:hinge": Loss(
        STEP, _hinge_pairs, lambda *_: (0, 0), one_of=(0, 1), metric="error", newton=True
    ),
    # |g| and h <= 1
    "reg:absoluteerror": Loss(
        IDENTITY,
        lambda margins, labels, _: (np.sign(margins - labels[:, None]), np.ones_like(margins)),
        lambda *_: (0, 0),
        has_quantile_leaves=True,
    ),
    "reg:quantileerror": Loss(
        IDENTITY,
        _quantile_pairs,
        lambda *_: (0, 0),
        reads=("quantile_alpha",),
        metric="quantile@",
        has_quantile_leaves=True,
    ),
    # |g| and h <= 15
    "survival:aft": Loss(
        LOG,
        _aft_pairs,
        lambda *_: (4, 4),
        reads=("aft_loss_distribution", "aft_loss_distribution_scale"),
        metric="aft-nloglik@",
        intercept=0.5,
        is_survival=True,
    ),
    # a row's hazards, over all events up to its time, up to 2^16
    "survival:cox": Loss(
        LOG,
        cox_pairs,
        lambda *_: (16, 16),
        intercept=1.0,
        is_survival=True,
        has_risk_sets=True,
    ),
    # The sizes of a query's gradients sum to s, and once normalized to log2(1 + s) <= 60; a row has
    # half of it at most. Hessians are at most twice as large.
    **{
        name: Loss(
            IDENTITY,
            partial(ranking_pairs, name == "rank:ndcg"),
            lambda *_: (5, 6),
            labels=(0, np.inf),
            newton=True,
            is_ranking=True,
        )
        for name in ("rank:ndcg", "rank:pairwise")
    },
    CUSTOM: Loss(IDENTITY, custom_pairs, _no_powers, intercept=0.5),  # XGBoost's
}
