"""Names of the scores by objective, and which way each is better."""

from __future__ import annotations

from fedapp.trees.objective import REGRESSION

NAMES = {  # the score that early stopping follows comes first
    "binary:logistic": ("auc", "logloss", "accuracy", "f1", "precision", "recall", "ks"),
    "multi:softprob": ("mlogloss", "accuracy"),
    REGRESSION: ("rmse", "mae", "r2"),
}
OBJECTIVES = tuple(NAMES)
N_SUMS = {"binary:logistic": 5, "multi:softprob": 2, REGRESSION: 5}

_LARGER = ("auc", "accuracy", "f1", "precision", "recall", "ks", "r2")
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
    if objective not in N_SUMS:
        raise ValueError(f"objective must be one of {', '.join(N_SUMS)}, got {objective}")
