"""Objectives: gradients of rows, margins to predictions; ``losses`` has their formulas.

Then follow the base score, by XGBoost's rules, and ``RowBounds``: how much one row can change the
sums of gradients and hessians, for differential privacy.

A custom objective or metric is a function of the process that runs a simulation. It is never sent:
parties in this process call it; in a deployment, or in another process, there is none.

Source: Chen and Guestrin 2016 (arXiv:1603.02754v3), Eq. 2, and XGBoost's documented objectives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fedapp.arrays import Doubles, Floats
from fedapp.errors import DivergedError
from fedapp.histograms.fixed_point import Bounds, Whole, power_above, to_fixed
from fedapp.trees.c_math import log32
from fedapp.trees.custom import CUSTOM, has_objective
from fedapp.trees.limits import ONE_TREE
from fedapp.trees.losses import (
    LOG,
    LOGIT,
    LOSSES,
    PLAIN,
    LossParameters,
    Objective,
)
from fedapp.trees.ranking import grades_of

# Placeholder until the parties have reported what their labels are.
AUTO: Final[str] = "auto"

# Margin of every class if class shares are not disclosed or not used; it cancels in the softmax.
EQUAL_MARGIN = np.float32(0.5)
# XGBoost adds it to a class's share before taking the logarithm.
SHARE_OFFSET = np.float32(1e-6)

OF_TIMES: Final = " or ".join(name for name in LOSSES if LOSSES[name].is_survival)
LEAST_SUM = 1e-6  # of hessians, in XGBoost's Newton step from 0

_OF_SHARES = "binary:logistic", "reg:logistic"
BOUNDED = (*_OF_SHARES, "multi:softprob", "reg:pseudohubererror", "binary:hinge")
# Factor of a hessian in the joint L2 norm. For logistic loss with prediction p,
# g^2 + 9 h^2 <= max(p^2 + 9 p^2 (1 - p)^2) = 1, so at this scale hessians add nothing to the norm
# (from 3.4 on they would). For softmax, h = 2 p (1 - p): at scale 1 each class adds at most its p,
# or 1 - p for the row's class, so a row's squared norm is at most 2.
LOGISTIC_SCALE, SOFTMAX_SCALE = 3.0, 1.0
# With clipped gradients, the largest hessian counts half as much as the largest gradient.
CLIPPED_SHARE = 0.5
# For the pseudo-Huber loss of slope d, with u = 1 / (1 + (error / d)^2), g^2 + d^2 h^2 is
# d^2 (1 - u + u^3) <= d^2: at scale d hessians add nothing to the norm.
# Upper bound of what rounding adds to a row's norm: half a unit for each of up to 2000 numbers,
# the largest of which has at least 2^21 units.
ROUNDING = 2.0**-16


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


def check_settings(objective: str, settings: Any) -> None:
    """Raise ValueError if a setting of a run does not fit the objective, which may be `auto`."""
    if settings.event and not (settings.model or is_survival(objective)):  # of what a model trained
        rule = f"must be empty unless labels are times, for which objective is {OF_TIMES}"
        raise ValueError(f"event {rule}, got {settings.event!r} with {objective}")
    if settings.qid and not (settings.model or is_ranking(objective)):
        rule = "must be empty unless rows are ranked, for which objective is rank:ndcg"
        raise ValueError(f"qid {rule}, got {settings.qid!r} with {objective}")
    if settings.weight and (counted := counted_equally(objective)):
        rule = f"must be empty for {objective}, in which all {counted} count alike"
        raise ValueError(f"weight {rule}, got {settings.weight!r}; drop-columns excludes it")
    if objective == AUTO:
        return
    scale = settings.asked_scale_pos_weight
    if scale != 1 and "scale_pos_weight" not in LOSSES[objective].reads:
        rule = f"must be 1 for {objective}, which has no positive rows, got {scale}"
        raise ValueError(f"scale-pos-weight {rule}; it is for binary:logistic")
    if settings.calibration != "none" and objective != "binary:logistic":
        rule = f"must be none for {objective}, got {settings.calibration}"
        raise ValueError(f"calibration {rule}; it is for binary:logistic")
    if settings.multi_strategy == ONE_TREE and objective != "multi:softprob":
        rule = f"must be one_output_per_tree for {objective}, which has one output"
        raise ValueError(f"multi-strategy {rule}, got {ONE_TREE}; it is for multi:softprob")
    if settings.label_epsilon and (has_quantile_leaves(objective) or not is_of_rows(objective)):
        rule = f"must be 0 for {objective}: drawn labels do not fit it"
        raise ValueError(f"label-epsilon {rule}, got {settings.label_epsilon:g}")
    if has_quantile_leaves(objective) and settings.monotone_constraints:
        rule = f"must be empty for {objective}, whose leaves are quantiles without bounds"
        raise ValueError(f"monotone-constraints {rule}, got {settings.monotone_constraints}")
    if objective == CUSTOM and settings.early_stopping_rounds and not settings.eval_metrics:
        rule = "must name what early stopping watches, where objective is a function"
        raise ValueError(f"eval-metric {rule}, got none")
    if settings.base_margin:
        check_base_margin(objective)


def is_regression(objective: str) -> bool:
    """Whether labels are numbers, not classes."""
    return not LOSSES[objective].classes[1]


def is_survival(objective: str) -> bool:
    """Whether labels are times, with the opposite sign where no event was seen."""
    return objective in LOSSES and LOSSES[objective].is_survival


def is_ranking(objective: str) -> bool:
    """Whether labels are codes of queries and relevances, see ``fedapp.trees.ranking``."""
    return objective in LOSSES and LOSSES[objective].is_ranking


def has_risk_sets(objective: str) -> bool:
    """Whether labels are times, and predictions hazard ratios, not times."""
    return objective in LOSSES and LOSSES[objective].has_risk_sets


def counted_equally(objective: str) -> str:
    """What all count alike, so that weights are refused; "" where there may be weights."""
    return "queries" if is_ranking(objective) else "rows" * has_risk_sets(objective)


def is_of_rows(objective: str) -> bool:
    """Whether labels are classes or numbers of single rows: neither times nor ranks."""
    return not (is_survival(objective) or is_ranking(objective))


def measures(objective: str, labels: Any) -> Any:
    """Labels of a regression as numbers of single rows: of times without sign, or relevances."""
    labels = grades_of(labels) if is_ranking(objective) else labels
    return np.abs(labels) if is_survival(objective) else labels


def expected_times(objective: str, predictions: Doubles) -> Doubles:
    """Predictions of times, to compare; of a hazard ratio, one over it."""
    least = np.finfo(np.float64).tiny
    return 1 / np.maximum(predictions, least) if has_risk_sets(objective) else predictions


def has_quantile_leaves(objective: str) -> bool:
    """Whether leaves are quantiles of residuals, which sums over rows do not give."""
    return objective in LOSSES and LOSSES[objective].has_quantile_leaves


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
    margins: Floats,
    labels: Floats,
    weights: Floats,
    parameters: LossParameters = PLAIN,
) -> Floats:
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
    weights = weights * _label_weights(objective, labels, parameters)
    weighted: Floats = np.stack(pairs, axis=-1) * weights[:, None, None]
    if not np.isfinite(weighted).all():
        raise DivergedError("gradients must be finite, got others")
    return weighted


def _label_weights(objective: str, labels: Floats, parameters: LossParameters) -> Floats:
    """Factors of the rows' weights by their labels."""
    if "scale_pos_weight" not in LOSSES[objective].reads:
        return np.ones(len(labels), dtype=np.float32)
    return np.where(labels == 1, np.float32(parameters.scale_pos_weight), np.float32(1))


def label_power(
    objective: str, n_classes: int, bounds: Bounds, parameters: LossParameters | None = None
) -> int:
    """Labels, or class ids, are at most 2 to this power; with parameters, terms of label sums."""
    if parameters and LOSSES[objective].newton:
        return max(LOSSES[objective].powers(bounds.largest, parameters))
    if parameters and is_survival(objective):  # events are counted
        return 0
    return bounds.largest if is_regression(objective) else power_above(n_classes)


def gradient_exponents(
    objective: Objective, bounds: Bounds, parameters: LossParameters = PLAIN
) -> tuple[int, int]:
    """Fractional bits of integer gradients and hessians."""
    powers = LOSSES[objective].powers(bounds.largest, parameters)
    return bounds.exponent(powers[0]), bounds.exponent(powers[1])


def whole_gradients(
    objective: Objective, pairs: Floats, bounds: Bounds, parameters: LossParameters = PLAIN
) -> Whole:
    """Gradients and hessians as integers whose sums over all rows fit in 63 bits.

    ``pairs`` is float32, shape (..., 2), from ``gradients``. Returns int64 of the same shape, in
    units of 2 to minus the ``gradient_exponents``; a hessian above 0 is at least 1. Raises
    ValueError if a number is larger than the bounds allow.
    """
    powers = LOSSES[objective].powers(bounds.largest, parameters)
    numbers = np.empty(pairs.shape, dtype=np.int64)
    for part, (name, power) in enumerate(zip(("gradient", "hessian"), powers, strict=True)):
        most = bounds.most(power)
        if not (np.abs(pairs[..., part]) <= most).all():
            raise ValueError(f"every {name} must be <= {most:g} in size, got a larger one")
        numbers[..., part] = to_fixed(pairs[..., part], bounds.exponent(power))
    # A row with weight must count, however certain its prediction is.
    numbers[..., 1] = np.maximum(numbers[..., 1], pairs[..., 1] > 0)
    return numbers


def transform(objective: Objective, margins: Floats) -> Floats:
    """Predictions of margins, both float32, shape (n_rows, n_outputs)."""
    return LOSSES[objective].link.predict(margins)


def exact_predictions(objective: str, margins: Doubles) -> Doubles:
    """``transform`` in float64, for margins that are exact sums of leaf values."""
    return LOSSES[objective].link.predict_exactly(margins)


def margins_of(objective: Objective, predictions: Doubles) -> Floats:
    """Undo ``transform``; probabilities of 0 and 1 are moved by 2e-16."""
    margins: Floats = LOSSES[objective].link.margins(predictions).astype(np.float32)
    return margins


# The base score: the prediction before the first tree


def n_label_sums(objective: Objective, n_classes: int) -> int:
    """How many sums ``label_sums`` has."""
    return 2 if LOSSES[objective].newton else n_outputs(objective, n_classes)


def newton_terms(
    objective: Objective, labels: Floats, weights: Floats, parameters: LossParameters
) -> Floats:
    """Gradients, with the opposite sign, and hessians at margin 0; float32, shape (n_rows, 2)."""
    nowhere = np.zeros((len(labels), 1), dtype=np.float32)
    pairs = gradients(objective, nowhere, labels, weights, parameters)[:, 0]
    return np.stack((-pairs[:, 0], pairs[:, 1]), axis=1)


def summed_labels(objective: Objective, labels: Floats) -> Doubles:
    """What ``label_sums`` adds up of single rows, where there is one sum: labels, or events."""
    return (labels > 0 if is_survival(objective) else labels).astype(np.float64)


def label_sums(
    objective: Objective,
    labels: Floats,
    weights: Floats,
    n_classes: int,
    parameters: LossParameters = PLAIN,
) -> Doubles:
    """Weighted label sum of each output, for softmax the weight of each class; float64.

    Where XGBoost starts from a Newton step: sums of ``newton_terms``. Of times: weight of events.

    Classes are summed in float32, row by row, as XGBoost does. With fractional weights, another
    order of rows or several parties may change the last bits; counts and integer weights are exact
    up to 2^24. ``n_classes`` is 0 for regression.
    """
    if LOSSES[objective].newton:
        terms = newton_terms(objective, labels, weights, parameters)
        return np.asarray(terms.sum(axis=0, dtype=np.float64))
    if objective != "multi:softprob":
        return np.array([summed_labels(objective, labels) @ weights])
    sums = np.zeros(n_classes, dtype=np.float32)
    np.add.at(sums, labels.astype(np.int64), weights)
    return sums.astype(np.float64)


def base_score(
    objective: Objective,
    label_sums: Doubles,
    weight_sum: float,
    parameters: LossParameters = PLAIN,
) -> Floats:
    """Base score of all parties: the weighted mean of the labels, or what one Newton step from 0
    predicts, where there are sums for it; float32, shape (n_outputs,).

    As in XGBoost 3.2, ``multi:softprob`` has a margin per class: the logarithm of its share of the
    rows, centred over the classes. A custom objective and times have 0.5. With a
    ``scale_pos_weight``, the score is one Newton step from 0.

    ``label_sums``, shape (n_label_sums,), and ``weight_sum``, > 0, are over all rows.
    """
    if objective == "multi:softprob":
        # The mean is summed in float32, in the order of XGBoost on one thread.
        shares = (label_sums * (1 / weight_sum)).astype(np.float32) + SHARE_OFFSET
        logs = np.log(shares, dtype=np.float64).astype(np.float32)
        mean = np.add.accumulate(logs / np.float32(len(logs)))[-1]
        centred: Floats = logs - mean
        return centred
    if (intercept := LOSSES[objective].intercept) is not None:
        return np.array([intercept], dtype=np.float32)
    if objective == "binary:logistic" and parameters.scale_pos_weight != 1:
        positives = parameters.scale_pos_weight * label_sums
        negatives = weight_sum - label_sums
        return LOGIT.predict(
            (2 * (positives - negatives) / (positives + negatives)).astype(np.float32)
        )
    if LOSSES[objective].newton and len(label_sums) == 2:
        step = label_sums[:1] / max(label_sums[1], LEAST_SUM)
        return LOSSES[objective].link.predict(step.astype(np.float32))
    return (label_sums / weight_sum).astype(np.float32)


def balance(positives: float, weight: float) -> float:
    """The ``scale_pos_weight`` that balances two classes, by the weights of positive and of all
    rows: that of the negative over the positive ones; 1 where a class has none."""
    return (weight - positives) / positives if 0 < positives < weight else 1.0


def hide_class_shares(scores: Floats) -> Floats:
    """A base score that discloses nothing about class shares; unchanged for one output."""
    return scores if len(scores) == 1 else np.full_like(scores, EQUAL_MARGIN)


def check_base_score(objective: Objective, scores: Floats) -> None:
    """Raise ValueError unless the link can produce these predictions."""
    link = LOSSES[objective].link
    for score in scores:
        if not link.low < score < link.high:
            rule = f"between {link.low:g} and {link.high:g} for {objective}"
            raise ValueError(f"base_score must be {rule}, got {score}")


def check_base_margin(objective: str) -> None:
    """Raise ValueError if the objective has several margins per row, so no base-margin column."""
    if objective == "multi:softprob":
        raise ValueError(
            f"base-margin must be omitted for {objective}, got a column: it is one number a row, "
            "and here a row has a margin for every class; drop-columns excludes the column"
        )


def base_margin(objective: Objective, scores: Floats) -> Floats:
    """``base_score`` on the scale of the margins, XGBoost's to the last bit; shape (n_outputs,)."""
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
        most = np.array([self.gradient, self.hessian])
        clipped = np.clip(np.nan_to_num(pairs.astype(np.float64), nan=0.0), -most, most)
        return to_fixed(clipped * weights[:, None, None], np.array(self.exponents(bounds)))


def row_bounds(objective: Objective, parameters: LossParameters, clip: float) -> RowBounds:
    """Bounds of a row; ValueError unless ``clip`` is set exactly where none follow."""
    if not is_of_rows(objective):
        raise ValueError(f"must be for labels that are no times or ranks, got {objective}")
    if (objective in BOUNDED) == bool(clip):
        rule = "be 0, for gradients have a bound" if clip else "be > 0, for gradients have no bound"
        raise ValueError(f"must {rule} with {objective}, got {clip:g}")
    if objective == "multi:softprob":
        return RowBounds(1.0, 0.5, SOFTMAX_SCALE, math.sqrt(2))
    if objective == "reg:pseudohubererror":
        return RowBounds(parameters.huber_slope, 1.0, *(parameters.huber_slope,) * 2)
    if objective in _OF_SHARES:
        heavier = max(parameters.scale_pos_weight, 1.0)
        return RowBounds(heavier, heavier / 4, LOGISTIC_SCALE, heavier)
    clip = clip or 1.0  # of ``binary:hinge``
    hessian = 1.0 if objective == "reg:squarederror" else clip
    return RowBounds(
        clip, hessian, CLIPPED_SHARE * clip / hessian, clip * math.hypot(1, CLIPPED_SHARE)
    )


def row_pairs(
    objective: Objective, margins: np.ndarray, labels: np.ndarray, parameters: LossParameters
) -> np.ndarray:
    """Gradients and hessians without weights; float32, shape (n_rows, n_outputs, 2)."""
    pairs = np.stack(LOSSES[objective].pairs(margins, labels, parameters), axis=-1)
    return pairs * _label_weights(objective, labels, parameters)[:, None, None]
