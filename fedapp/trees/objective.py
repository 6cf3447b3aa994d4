"""Objectives: gradients in float32 as XGBoost 3 computes them, margins to predictions.

``LOSSES`` has one entry per objective; no other code knows their formulas. Then follow the base
score, by XGBoost's rules, and ``RowBounds``: how much one row can change the sums of gradients and
hessians, for differential privacy.

A custom objective or metric is a function of the process that runs a simulation. It is never sent:
parties in this process call it; in a deployment, or in another process, there is none.

Source: Chen and Guestrin 2016 (arXiv:1603.02754v3), Eq. 2, and XGBoost's documented objectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from fedapp.errors import DivergedError
from fedapp.histograms.fixed_point import Bounds, Whole, power_above, to_fixed
from fedapp.trees.custom import CUSTOM, custom_pairs, has_objective

Array = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Objective = Literal[
    "binary:logistic",
    "multi:softprob",
    "reg:squarederror",
    "reg:logistic",
    "count:poisson",
    "reg:gamma",
    "reg:tweedie",
    "custom",
]
REGRESSION: Final = "reg:squarederror"
# Placeholder until the parties have reported what their labels are.
AUTO: Final[str] = "auto"
SMALLEST_HESSIAN = np.float32(1e-16)
# Beyond these the exponential overflows float32 and float64.
LARGEST_POWER = np.float32(88.7)
LARGEST_EXACT_POWER = 700.0
# Exponentials of margins above are normal float32 numbers, with full precision.
LEAST_UNSHIFTED = np.float32(-87)
MOST_CLASSES = 10**6

# Margin of every class if class shares are not disclosed or not used; it cancels in the softmax.
EQUAL_MARGIN = np.float32(0.5)
# XGBoost adds it to a class's share before taking the logarithm.
SHARE_OFFSET = np.float32(1e-6)
CUSTOM_INTERCEPT = 0.5  # XGBoost's for a custom objective

BOUNDED = "binary:logistic", "reg:logistic", "multi:softprob"
# Factor of a hessian in the joint L2 norm. For logistic loss with prediction p,
# g^2 + 9 h^2 <= max(p^2 + 9 p^2 (1 - p)^2) = 1, so at this scale hessians add nothing to the norm
# (from 3.4 on they would). For softmax, h = 2 p (1 - p): at scale 1 each class adds at most its p,
# or 1 - p for the row's class, so a row's squared norm is at most 2.
LOGISTIC_SCALE, SOFTMAX_SCALE = 3.0, 1.0
# With clipped gradients, the largest hessian counts half as much as the largest gradient.
CLIPPED_SHARE = 0.5
# Upper bound of what rounding adds to a row's norm: half a unit for each of up to 2000 numbers,
# the largest of which has at least 2^21 units.
ROUNDING = 2.0**-16


# Losses


@dataclass(frozen=True, slots=True)
class LossParameters:
    """Parameters of objectives, named as in XGBoost; each objective reads only some."""

    scale_pos_weight: Annotated[float, "> 0"]  # factor of the weight of positive rows
    max_delta_step: Annotated[float, ">= 0"]  # of ``count:poisson``: added to margins for hessians
    tweedie_variance_power: Annotated[float, "> 1", "< 2"]  # of ``reg:tweedie``

    @classmethod
    def of(cls, source: Any) -> LossParameters:
        """From a run's settings, or a message with these fields."""
        return cls(**{field.name: float(getattr(source, field.name)) for field in fields(cls)})


# Defaults.
PLAIN = LossParameters(scale_pos_weight=1.0, max_delta_step=0.0, tweedie_variance_power=1.5)


@dataclass(frozen=True, slots=True)
class Link:
    """Map between margins and predictions, arrays of shape (n_rows, n_outputs)."""

    predict: Callable[[Array], Array]  # float32 margins to predictions
    predict_exactly: Callable[[Doubles], Doubles]  # the same in float64
    margins: Callable[[Doubles], Doubles]  # the inverse of ``predict_exactly``
    # low, high: base scores must be strictly between
    low: float
    high: float


Pairs = Callable[[Array, Array, LossParameters], tuple[Array, Array]]


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
    reads: tuple[str, ...] = ()  # names of the ``LossParameters`` that it reads

    @property
    def label_rule(self) -> str:
        """The range of numeric labels, for error messages."""
        low, high = self.labels
        if np.isfinite(high):
            return f"{low:g} to {high:g}"
        return f"{'>' if self.above_low else '>='} {low:g}"

    def allows(self, labels: Doubles) -> npt.NDArray[np.bool_]:
        """Which labels are in the range; bool, shape (n_rows,)."""
        low, high = self.labels
        above: npt.NDArray[np.bool_] = labels > low if self.above_low else labels >= low
        return above & (labels <= high)


def _exp_within(powers: Array) -> Array:
    """``exp32``, clipped to stay within float32."""
    from fedapp.trees.c_math import exp32  # compiled, so not for those who only name an objective

    return exp32(np.minimum(powers, LARGEST_POWER))


def _sigmoid(margins: Array) -> Array:
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


def _softmax(margins: Array) -> Array:
    return _shares(margins, margins.max(axis=1, keepdims=True))


def _shares(margins: Array, shifts: Array) -> Array:
    """Softmax of margins, less a shift per row of shape (n_rows, 1)."""
    from fedapp.trees.c_math import exp32

    powers = exp32(margins - shifts)
    shares: Array = powers / powers.sum(axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
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


def _squared_pairs(
    margins: Array, labels: Array, parameters: LossParameters
) -> tuple[Array, Array]:
    return margins - labels[:, None], np.ones_like(margins)


def _share_pairs(predictions: Array, truth: Array, steepness: np.float32) -> tuple[Array, Array]:
    """Gradients and hessians of a log loss; hessians never vanish."""
    hessians = steepness * predictions * (np.float32(1) - predictions)
    return predictions - truth, np.maximum(hessians, SMALLEST_HESSIAN)


def _logistic_pairs(
    margins: Array, labels: Array, parameters: LossParameters
) -> tuple[Array, Array]:
    errors, hessians = _share_pairs(_sigmoid(margins), labels[:, None], np.float32(1))
    if parameters.scale_pos_weight == 1:
        return errors, hessians
    positive = np.float32(parameters.scale_pos_weight)
    factors = np.where(labels == 1, positive, np.float32(1))[:, None]
    return errors * factors, hessians * factors


def _softmax_pairs(
    margins: Array, labels: Array, parameters: LossParameters
) -> tuple[Array, Array]:
    largest = margins.max(axis=1, keepdims=True)
    # For gradients, unlike for predictions, XGBoost does not shift margins that are all below 0.
    # Very low ones, whose exponentials would all vanish, are shifted here.
    shifts = np.where(largest < LEAST_UNSHIFTED, largest, np.maximum(largest, np.float32(0)))
    return _share_pairs(_shares(margins, shifts), one_hot(labels, margins), np.float32(2))


def _poisson_pairs(
    margins: Array, labels: Array, parameters: LossParameters
) -> tuple[Array, Array]:
    further = margins + np.float32(parameters.max_delta_step)
    return _exp_within(margins) - labels[:, None], _exp_within(further)


def _gamma_pairs(margins: Array, labels: Array, parameters: LossParameters) -> tuple[Array, Array]:
    ratios = labels[:, None] / _exp_within(margins)
    return np.float32(1) - ratios, ratios


def _tweedie_pairs(
    margins: Array, labels: Array, parameters: LossParameters
) -> tuple[Array, Array]:
    power = np.float32(parameters.tweedie_variance_power)
    below, above = np.float32(1) - power, np.float32(2) - power
    truth = labels[:, None]
    falling = _exp_within(below * margins)
    rising = _exp_within(above * margins)
    # XGBoost's order of multiplication: the last bit of a leaf value moves all of its rows.
    return rising - truth * falling, above * rising - truth * below * falling


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


IDENTITY = Link(_same, _same, _same, -np.inf, np.inf)
LOGIT = Link(_sigmoid, _exact_sigmoid, _log_odds, 0.0, 1.0)
SOFTMAX = Link(_softmax, _exact_softmax, _log_shares, -np.inf, np.inf)
LOG = Link(_exp_within, _exact_exp, _log, 0.0, np.inf)

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
        LOG, _poisson_pairs, _poisson_powers, labels=(0, np.inf), reads=("max_delta_step",)
    ),
    # labels up to 2^16 times the prediction
    "reg:gamma": Loss(LOG, _gamma_pairs, lambda *_: (16, 16), labels=(0, np.inf), above_low=True),
    "reg:tweedie": Loss(
        LOG,
        _tweedie_pairs,
        # labels, over a power of the prediction, up to 2^16 times the largest label
        lambda largest, _: (max(largest, 0) + 16,) * 2,
        labels=(0, np.inf),
        reads=("tweedie_variance_power",),
    ),
    CUSTOM: Loss(IDENTITY, custom_pairs, _no_powers),
}


def check_objective(objective: str, *others: str) -> None:
    """Raise ValueError unless the objective exists or is one of ``others``."""
    allowed = (*LOSSES, *others)
    if objective not in allowed:
        listed = ", ".join(name for name in allowed if name != CUSTOM)
        raise ValueError(f"objective must be one of {listed}, got {objective}")


def check_custom_is_set(objective: str) -> None:
    """Raise ValueError if the objective is a function but this process has none."""
    if objective == CUSTOM and not has_objective():
        raise ValueError(
            "objective must be a name where no function is given: a function is never sent, and "
            "fedapp.run(..., objective=function) runs it by the local engine, got custom"
        )


def is_regression(objective: str) -> bool:
    """Whether labels are numbers, not classes."""
    return not LOSSES[objective].classes[1]


def n_outputs(objective: Objective, n_classes: int) -> int:
    """Margins per row and trees per round: the number of classes for softmax, else 1."""
    return n_classes if objective == "multi:softprob" else 1


def check_classes(objective: Objective, n_classes: int) -> None:
    """Raise ValueError if the objective does not allow this number of classes."""
    check_objective(objective)
    fewest, most = LOSSES[objective].classes
    if not fewest <= n_classes <= most:
        raise ValueError(f"classes must be those of {objective}, got {n_classes}")


def gradients(
    objective: Objective,
    margins: Array,
    labels: Array,
    weights: Array,
    parameters: LossParameters = PLAIN,
) -> Array:
    """First and second derivatives of the loss at the current margins.

    Parameters
    ----------
    margins : float32, shape (n_rows, n_outputs).
    labels : float32, shape (n_rows,): 0 or 1, a class id, or a number, by objective.
    weights : float32, shape (n_rows,), >= 0.

    Returns
    -------
    float32, shape (n_rows, n_outputs, 2): gradient and hessian, times the row's weight.
    """
    pairs = LOSSES[objective].pairs(margins, labels, parameters)
    weighted: Array = np.stack(pairs, axis=-1) * weights[:, None, None]
    if not np.isfinite(weighted).all():
        raise DivergedError("gradients must be finite, got others")
    return weighted


def label_power(objective: str, n_classes: int, bounds: Bounds) -> int:
    """Labels, or class ids, are at most 2 to this power."""
    return bounds.largest if is_regression(objective) else power_above(n_classes)


def gradient_exponents(
    objective: Objective, bounds: Bounds, parameters: LossParameters = PLAIN
) -> tuple[int, int]:
    """Fractional bits of integer gradients and hessians."""
    powers = LOSSES[objective].powers(bounds.largest, parameters)
    return bounds.exponent(powers[0]), bounds.exponent(powers[1])


def whole_gradients(
    objective: Objective, pairs: Array, bounds: Bounds, parameters: LossParameters = PLAIN
) -> Whole:
    """Gradients and hessians as integers whose sums over all rows fit in 63 bits.

    ``pairs`` is float32, shape (..., 2), from ``gradients``. Returns int64 of the same shape, in
    units of 2 to minus the ``gradient_exponents``; a hessian above 0 is at least 1. Raises
    ValueError if a number is larger than the bounds allow.
    """
    powers = LOSSES[objective].powers(bounds.largest, parameters)
    numbers = np.empty(pairs.shape, dtype=np.int64)
    for place, (name, power) in enumerate(zip(("gradient", "hessian"), powers, strict=True)):
        most = bounds.most(power)
        if not (np.abs(pairs[..., place]) <= most).all():
            raise ValueError(f"every {name} must be <= {most:g} in size, got a larger one")
        numbers[..., place] = to_fixed(pairs[..., place], bounds.exponent(power))
    # A row with weight must count, however certain its prediction is.
    numbers[..., 1] = np.maximum(numbers[..., 1], pairs[..., 1] > 0)
    return numbers


def transform(objective: Objective, margins: Array) -> Array:
    """Predictions of margins, both float32, shape (n_rows, n_outputs)."""
    return LOSSES[objective].link.predict(margins)


def exact_predictions(objective: str, margins: Doubles) -> Doubles:
    """``transform`` in float64, for margins that are exact sums of leaf values."""
    return LOSSES[objective].link.predict_exactly(margins)


def margins_of(objective: Objective, predictions: Doubles) -> Array:
    """Undo ``transform``; probabilities of 0 and 1 are moved by 2e-16."""
    margins: Array = LOSSES[objective].link.margins(predictions).astype(np.float32)
    return margins


def one_hot(labels: Array, margins: Array) -> Array:
    """1 in the column of the row's class, 0 elsewhere; float32, shape of ``margins``."""
    hot: Array = (labels[:, None] == np.arange(margins.shape[1])).astype(np.float32)
    return hot


# Exponentials and logarithms of float32, rounded as by the C library, which XGBoost calls:
# correctly but for about one exponential in 1,500 and one logarithm in 100; numpy's are 2 ulp off.


# The base score: the prediction before the first tree


def label_sums(objective: Objective, labels: Array, weights: Array, n_classes: int) -> Doubles:
    """Weighted label sum of each output, for softmax the weight of each class; float64.

    Classes are summed in float32, row by row, as XGBoost does. With fractional weights, another
    order of rows or several parties may change the last bits; counts and integer weights are exact
    up to 2^24. ``n_classes`` is 0 for regression.
    """
    if objective != "multi:softprob":
        return np.array([labels.astype(np.float64) @ weights])
    sums = np.zeros(n_classes, dtype=np.float32)
    np.add.at(sums, labels.astype(np.int64), weights)
    return sums.astype(np.float64)


def base_score(
    objective: Objective,
    label_sums: Doubles,
    weight_sum: float,
    parameters: LossParameters = PLAIN,
) -> Array:
    """Base score of all parties: the weighted mean of the labels; float32, shape (n_outputs,).

    As in XGBoost 3.2, ``multi:softprob`` has a margin per class: the logarithm of its share of the
    rows, centred over the classes. A custom objective has 0.5. With a ``scale_pos_weight``, the
    score is one Newton step from 0.

    ``label_sums``, shape (n_outputs,), and ``weight_sum``, > 0, are over all rows.
    """
    if objective == "multi:softprob":
        # The mean is summed in float32, in the order of XGBoost on one thread.
        shares = (label_sums * (1 / weight_sum)).astype(np.float32) + SHARE_OFFSET
        logs = np.log(shares, dtype=np.float64).astype(np.float32)
        mean = np.add.accumulate(logs / np.float32(len(logs)))[-1]
        centred: Array = logs - mean
        return centred
    if objective == CUSTOM:
        return np.array([CUSTOM_INTERCEPT], dtype=np.float32)
    if objective == "binary:logistic" and parameters.scale_pos_weight != 1:
        positives = parameters.scale_pos_weight * label_sums
        negatives = weight_sum - label_sums
        return LOGIT.predict(
            (2 * (positives - negatives) / (positives + negatives)).astype(np.float32)
        )
    return (label_sums / weight_sum).astype(np.float32)


def balance(positives: float, weight: float) -> float:
    """The ``scale_pos_weight`` that balances two classes, by the weights of positive and of all
    rows: that of the negative over the positive ones; 1 where a class has none."""
    return (weight - positives) / positives if 0 < positives < weight else 1.0


def hide_class_shares(scores: Array) -> Array:
    """A base score that discloses nothing about class shares; unchanged for one output."""
    return scores if len(scores) == 1 else np.full_like(scores, EQUAL_MARGIN)


def check_base_score(objective: Objective, scores: Array) -> None:
    """Raise ValueError unless the link can produce these predictions."""
    link = LOSSES[objective].link
    for score in scores:
        if not link.low < score < link.high:
            rule = f"between {link.low:g} and {link.high:g} for {objective}"
            raise ValueError(f"base_score must be {rule}, got {score}")


def check_base_margin(objective: Objective) -> None:
    """Raise ValueError if the objective has several margins per row, so no base-margin column."""
    if objective == "multi:softprob":
        raise ValueError(
            f"base-margin must be omitted for {objective}, got a column: it is one number a row, "
            "and here a row has a margin for every class; drop-columns excludes the column"
        )


def base_margin(objective: Objective, scores: Array) -> Array:
    """``base_score`` on the scale of the margins, XGBoost's to the last bit; shape (n_outputs,)."""
    from fedapp.trees.c_math import log32

    if LOSSES[objective].link is LOGIT:
        return -log32(np.float32(1) / scores - np.float32(1))
    if LOSSES[objective].link is LOG:
        return log32(scores)
    return scores


# Bounds of rows


@dataclass(frozen=True, slots=True)
class RowBounds:
    """Bounds of a row of weight 1."""

    # gradient, hessian: largest absolute values; beyond, they are clipped
    gradient: float
    hessian: float
    scale: float  # factor of hessians in the norm
    norm: float  # largest L2 norm of all gradients and scaled hessians of a row

    def exponents(self, bounds: Bounds) -> tuple[int, int]:
        """Fractional bits of integer gradients and hessians."""
        powers = power_above(self.gradient), power_above(self.hessian)
        return bounds.exponent(powers[0]), bounds.exponent(powers[1])

    def sensitivities(self, bounds: Bounds) -> tuple[float, float]:
        """The norm in units of integer gradients, and of integer hessians."""
        heaviest = math.ldexp(self.norm * (1 + ROUNDING), bounds.heaviest)
        gradient_bits, hessian_bits = self.exponents(bounds)
        return math.ldexp(heaviest, gradient_bits), math.ldexp(heaviest / self.scale, hessian_bits)

    def whole(self, pairs: np.ndarray, weights: np.ndarray, bounds: Bounds) -> Whole:
        """Clipped and weighted gradients and hessians as integers; int64, shape of ``pairs``.

        ``pairs`` is float32, shape (n_rows, n_outputs, 2), without weights. NaN, which only a
        dishonest run's leaves can cause, becomes 0.
        """
        numbers = np.empty(pairs.shape, dtype=np.int64)
        for place, (most, exponent) in enumerate(
            zip((self.gradient, self.hessian), self.exponents(bounds), strict=True)
        ):
            finite = np.nan_to_num(pairs[..., place].astype(np.float64), nan=0.0)
            clipped = np.clip(finite, -most, most)
            numbers[..., place] = to_fixed(clipped * weights[:, None], exponent)
        return numbers


def row_bounds(objective: Objective, parameters: LossParameters, clip: float) -> RowBounds:
    """Bounds of a row; ValueError unless ``clip`` is set exactly where none follow."""
    if (objective in BOUNDED) == bool(clip):
        rule = "be 0, for gradients have a bound" if clip else "be > 0, for gradients have no bound"
        raise ValueError(f"must {rule} with {objective}, got {clip:g}")
    if objective == "multi:softprob":
        return RowBounds(1.0, 0.5, SOFTMAX_SCALE, math.sqrt(2))
    if objective in BOUNDED:
        heavier = max(parameters.scale_pos_weight, 1.0)
        return RowBounds(heavier, heavier / 4, LOGISTIC_SCALE, heavier)
    hessian = 1.0 if objective == "reg:squarederror" else clip
    return RowBounds(
        clip, hessian, CLIPPED_SHARE * clip / hessian, clip * math.hypot(1, CLIPPED_SHARE)
    )


def row_pairs(
    objective: Objective, margins: np.ndarray, labels: np.ndarray, parameters: LossParameters
) -> np.ndarray:
    """Gradients and hessians without weights; float32, shape (n_rows, n_outputs, 2)."""
    return np.stack(LOSSES[objective].pairs(margins, labels, parameters), axis=-1)
