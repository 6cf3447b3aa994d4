"""Names of the scores by objective, and which way each is better."""

from __future__ import annotations

from fedapp.trees.objective import REGRESSION

NAMES = {  # the score that early stopping follows comes first
    "binary:logistic": ("auc", "logloss", "accuracy", "f1", "precision", "recall", "ks", "pr_auc"),
    "multi:softprob": ("mlogloss", "accuracy", "balanced_accuracy", "macro_f1", "auc_ovr"),
    REGRESSION: ("rmse", "mae", "r2"),
}
OBJECTIVES = tuple(NAMES)
AT_THRESHOLD = ("threshold", "f1_at_threshold", "precision_at_threshold", "recall_at_threshold")
"""Scores of two classes at a chosen threshold, beside those at probability 0.5."""

_LARGER = (
    *("auc", "accuracy", "f1", "precision", "recall", "ks", "pr_auc", "r2"),
    *("balanced_accuracy", "macro_f1", "auc_ovr", *AT_THRESHOLD[1:]),
)
_SMALLER = ("logloss", "mlogloss", "rmse", "mae")
BETTER = dict.fromkeys(_LARGER, True) | dict.fromkeys(_SMALLER, False)
"""Whether a larger value is the better one, by the metric's name."""

LOSSES = {"binary:logistic": "logloss", "multi:softprob": "mlogloss", REGRESSION: "rmse"}
"""The score that training lowers, by objective."""


def default_metric(objective: str) -> str:
    """Name of the score that early stopping follows; ValueError for an unknown objective."""
    check_objective(objective)
    return NAMES[objective][0]


def check_objective(objective: str) -> None:
    if objective not in NAMES:
        raise ValueError(f"objective must be one of {', '.join(NAMES)}, got {objective}")
