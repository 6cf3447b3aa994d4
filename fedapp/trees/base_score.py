"""The base score, the prediction before the first tree, by XGBoost's rules."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedapp.trees.custom import CUSTOM
from fedapp.trees.objective import (
    LOG,
    LOGIT,
    LOSSES,
    PLAIN,
    Array,
    Doubles,
    LossParameters,
    Objective,
)

# Margin of every class if class shares are not disclosed or not used; it cancels in the softmax.
ALIKE = np.float32(0.5)
# XGBoost adds it to a class's share before taking the logarithm.
SHARE_OFFSET = np.float32(1e-6)
# XGBoost's intercept for a custom objective.
CUSTOM_INTERCEPT = 0.5


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


def alike(scores: Array) -> Array:
    """A base score that discloses nothing about class shares; unchanged for one output."""
    return scores if len(scores) == 1 else np.full_like(scores, ALIKE)


def read_base_score(scores: Any, n_outputs: int) -> Array:
    """A base score as read from a model's text; one number applies to all outputs."""
    return np.broadcast_to(np.asarray(scores, dtype=np.float32), (n_outputs,)).copy()


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
    """``base_score`` on the scale of the margins, to the last bit of XGBoost; shape
    (n_outputs,).
    """
    from fedapp.trees import c_math

    if LOSSES[objective].link is LOGIT:
        return -c_math.log(np.float32(1) / scores - np.float32(1))
    if LOSSES[objective].link is LOG:
        return c_math.log(scores)
    return scores
