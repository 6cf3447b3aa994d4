"""What rows are predicted before the first tree: the base score, by XGBoost's rules."""

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

# Margin of every class where their shares are not told or not used; it cancels in the softmax.
ALIKE = np.float32(0.5)
# Added to the share of a class before its logarithm is taken, in XGBoost.
SHARE_OFFSET = np.float32(1e-6)
# XGBoost's intercept for an objective that is a function.
CUSTOM_INTERCEPT = 0.5


def label_sums(objective: Objective, labels: Array, weights: Array, n_classes: int) -> Doubles:
    """Weighted sum of the labels of each output; for softmax of the rows of each class.

    Classes are summed as XGBoost does for its intercept, one row after the other in float32. So
    fractional weights in another order, or at several parties, may give other last bits; counts and
    whole weights do not, up to a sum of 2^24.

    Parameters
    ----------
    labels, weights : float32, shape (n_rows,), as ``gradients`` takes them.
    n_classes : 0 for regression.

    Returns
    -------
    float64, shape (n_outputs,).
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
    """Prediction before the first tree: the weighted mean of the labels of all parties.

    For ``multi:softprob`` it is a margin a class, as XGBoost 3.2 has it: the logarithm of its share
    of the rows, less the mean of all classes. For a function it is 0.5, XGBoost's default. Where
    positive rows of two classes count more, it is one Newton step from 0, as in XGBoost 3.2.

    Parameters
    ----------
    label_sums : float64, shape (n_outputs,): see the function of this name.
    weight_sum : of all rows, > 0.
    parameters : of the objective.

    Returns
    -------
    float32, shape (n_outputs,).
    """
    if objective == "multi:softprob":
        # The mean is added up in float32, in the order of XGBoost on one thread.
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
    """A base score that tells nothing of the shares of several classes; of one output as it is."""
    return scores if len(scores) == 1 else np.full_like(scores, ALIKE)


def read_base_score(told: Any, n_outputs: int) -> Array:
    """A base score as the text of a model tells it; one number stands for all outputs.

    Raises
    ------
    ValueError : it is not one for each output.
    """
    return np.broadcast_to(np.asarray(told, dtype=np.float32), (n_outputs,)).copy()


def check_base_score(objective: Objective, scores: Array) -> None:
    """Hold that margins have these predictions.

    Raises
    ------
    ValueError : one has not.
    """
    link = LOSSES[objective].link
    for score in scores:
        if not link.low < score < link.high:
            rule = f"between {link.low:g} and {link.high:g} for {objective}"
            raise ValueError(f"base_score must be {rule}, got {score}")


def check_base_margin(objective: Objective) -> None:
    """Hold that rows may start from a margin of their own, which is one number.

    Raises
    ------
    ValueError : rows have a margin for every class.
    """
    if objective == "multi:softprob":
        raise ValueError(
            f"base-margin must be omitted for {objective}, got a column: it is one number a row, "
            "and here a row has a margin for every class; drop-columns excludes the column"
        )


def base_margin(objective: Objective, scores: Array) -> Array:
    """``base_score`` on the scale of the margins: its logit for logistic loss, its logarithm where
    predictions are exponentials; float32, shape (n_outputs,).

    As XGBoost has it, to the last bit: leaves near 0 would differ by more than 1e-6.
    """
    from fedapp.trees import c_math

    if LOSSES[objective].link is LOGIT:
        return -c_math.log(np.float32(1) / scores - np.float32(1))
    if LOSSES[objective].link is LOG:
        return c_math.log(scores)
    return scores
