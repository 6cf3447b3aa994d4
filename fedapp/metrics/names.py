"""Names of the scores by objective, and whether larger or smaller is better."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedapp.known_names import value_hint
from fedapp.trees.custom import CUSTOM, has_metric
from fedapp.trees.losses import LOSSES, PLAIN, REGRESSION, LossParameters
from fedapp.trees.objective import AUTO, check_objective

UNCALIBRATED = "uncalibrated-logloss"  # of the margins before the model's calibration
AT_THRESHOLD = ("threshold", "f1_at_threshold", "precision_at_threshold", "recall_at_threshold")
"""Scores of two classes at a chosen threshold, beside those at probability 0.5."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Scores of an objective."""

    scores: tuple[str, ...]  # of every run; the one that a run is judged by comes first
    loss: str  # the score that training minimises, if it is none of the objective's parameters
    on_request: tuple[str, ...]  # by ``eval-metric``, without the part behind an @


def _of_numbers(loss: str, *on_request: str, first: str = "rmse") -> Shown:
    scores = first, *(name for name in ("rmse", "mae", "r2") if name != first)
    return Shown(scores, loss, on_request)


_RANKED = Shown(("ndcg",), "ndcg", ("ndcg",))
SHOWN = {
    "binary:logistic": Shown(
        ("auc", "logloss", "accuracy", "f1", "precision", "recall", "ks", "pr_auc"),
        "logloss",
        ("auc", "aucpr", "logloss", "error", "brier", "rmse", "mae"),
    ),
    "multi:softprob": Shown(
        ("mlogloss", "accuracy", "balanced_accuracy", "macro_f1", "auc_ovr"),
        "mlogloss",
        ("mlogloss", "merror"),
    ),
    REGRESSION: _of_numbers("rmse", "rmse", "mae", "mape"),
    "reg:logistic": _of_numbers("logloss", "rmse", "mae", "mape", "logloss", "error", "brier"),
    "count:poisson": _of_numbers(
        "", "poisson-nloglik", "tweedie-nloglik", "rmse", "rmsle", "mae", "mape"
    ),
    "reg:gamma": _of_numbers(
        "", "gamma-deviance", "tweedie-nloglik", "rmse", "rmsle", "mae", "mape"
    ),
    "reg:tweedie": _of_numbers(
        "", "tweedie-nloglik", "poisson-nloglik", "rmse", "rmsle", "mae", "mape"
    ),
    "reg:squaredlogerror": _of_numbers("", "rmsle", "rmse", "mae", "mape"),
    "reg:pseudohubererror": _of_numbers("", "mphe", "rmse", "mae", "mape"),
    "binary:hinge": _of_numbers("", "error", "rmse", "mae"),
    "reg:absoluteerror": _of_numbers("mae", "mae", "rmse", "mape", first="mae"),
    "reg:quantileerror": _of_numbers("", "quantile", "mae", "rmse", "mape"),
    "survival:aft": Shown(("c-index",), "", ("aft-nloglik", "c-index")),
    "survival:cox": Shown(("c-index",), "c-index", ("c-index",)),
    **dict.fromkeys((name for name in LOSSES if LOSSES[name].is_ranking), _RANKED),
    CUSTOM: _of_numbers("rmse", "rmse", "mae", "mape"),
}
"""By objective; metrics on request have XGBoost's names, but ``brier`` and ``c-index``."""
OBJECTIVES = tuple(SHOWN)
NAMES = {objective: shown.scores for objective, shown in SHOWN.items()}
EVAL_METRICS = {objective: shown.on_request for objective, shown in SHOWN.items()}
# Metrics whose parameters are those of the run, and the settings that these are.
_OF_RUN = {
    "mphe": "huber-slope",
    "aft-nloglik": "distribution and scale",
    "quantile": "quantile-alpha",
}
# Metrics with a number behind an @, which ``_OPTIONAL`` may omit: what it is, and its bounds.
_NUMBERED = {
    "tweedie-nloglik": ("power, between 1 and 2", 1.0, 2.0, 1.5),
    "error": ("threshold, between 0 and 1", 0.0, 1.0, 0.3),
    "ndcg": ("number of the first ranks that count", 0.0, 2.0**31, 10),
}
_OPTIONAL = "error", "ndcg"

_LARGER = (
    *("auc", "accuracy", "f1", "precision", "recall", "ks", "pr_auc", "aucpr", "r2"),
    *("balanced_accuracy", "macro_f1", "auc_ovr", "c-index", "ndcg", *AT_THRESHOLD[1:]),
)
_SMALLER = (
    *("logloss", "mlogloss", "rmse", "rmsle", "mae", "mape", "error", "merror", "brier"),
    *("poisson-nloglik", "gamma-deviance", "tweedie-nloglik", "mphe", "aft-nloglik"),
    *("quantile", CUSTOM, UNCALIBRATED),
)
BETTER = dict.fromkeys(_LARGER, True) | dict.fromkeys(_SMALLER, False)
"""Whether a larger value is the better one, by the metric's name up to an @."""
_AT_MOST_1 = {*_LARGER, "error", "merror", "brier"}
_BELOW_0 = {"r2", "poisson-nloglik", "aft-nloglik", CUSTOM}
_ROUNDING = 1e-9  # by which a score of exact sums may be beyond its range


def is_possible(name: str, value: float) -> bool:
    """Whether rows can have this score; where noise is larger than sums, it is often beyond."""
    kind = name.partition("@")[0]
    low = -math.inf if kind in _BELOW_0 else -_ROUNDING
    return low <= value <= (1 + _ROUNDING if kind in _AT_MOST_1 else math.inf)


def loss_metric(objective: str, parameters: LossParameters = PLAIN) -> str:
    """The score that training minimises."""
    names = objective_metrics(objective, parameters)
    return names[0] if names else SHOWN[objective].loss


def default_metric(objective: str) -> str:
    """The score that a run is judged by; a ValueError for an unknown objective."""
    check_objective(objective)
    return NAMES[objective][0]


def objective_metrics(objective: str, parameters: LossParameters) -> tuple[str, ...]:
    """Scores of an objective beyond those of every run."""
    loss = LOSSES.get(objective)
    if loss is None or not loss.metric:
        return ()
    values = [getattr(parameters, name) for name in loss.reads]
    texts = [value if isinstance(value, str) else f"{value:g}" for value in values]
    return (loss.metric + ":".join(texts if loss.metric.endswith("@") else ()),)


def for_xgboost(name: str, objective: str) -> str:
    """A metric that orders models alike, or nearly so, by a name that XGBoost has."""
    kind = name.partition("@")[0]
    if kind == "c-index":
        return objective.partition(":")[2] + "-nloglik"
    return "rmse" if name == "brier" else kind if kind in _OF_RUN else name


def watched_metric(objective: str, eval_metrics: Sequence[str] = ()) -> str:
    """The score that a run is judged by: the first requested or the default; "" while undecided."""
    if objective == AUTO and not eval_metrics:
        return ""
    return eval_metrics[0] if eval_metrics else default_metric(objective)


def stopping_metric(objective: str, eval_metrics: Sequence[str] = ()) -> str:
    """The score that early stopping follows: the first requested, or else the loss."""
    # Unlike an AUC, the loss still distinguishes rounds on few rows.
    if not eval_metrics and (loss := loss_metric(objective)) in NAMES[objective]:
        return loss
    return watched_metric(objective, eval_metrics)


def scored_names(objective: str, eval_metrics: Sequence[str]) -> tuple[str, ...]:
    """All scores of a run."""
    defaults = NAMES[objective]
    return (*defaults, *(name for name in eval_metrics if name not in defaults))


def is_custom(name: str) -> bool:
    """Whether a metric is a function."""
    return name.partition("@")[0] == CUSTOM


def is_metric(name: str) -> bool:
    """Whether ``larger_is_better`` has an answer."""
    return name.partition("@")[0] in BETTER


def larger_is_better(name: str) -> bool:
    """Whether a larger score is better."""
    return BETTER[name.partition("@")[0]]


def check_metrics(objective: str, names: Sequence[str], parameters: LossParameters = PLAIN) -> None:
    """Check the names of metrics; a ValueError for one that the objective lacks, or twice."""
    allowed = EVAL_METRICS[objective]
    for name in names:
        kind, at, number = name.partition("@")
        if name == UNCALIBRATED and objective == "binary:logistic":  # named by calibrated runs
            continue
        if is_custom(name):
            if objective == "multi:softprob":
                raise ValueError(f"eval-metric must be a name for {objective}, got a function")
            if not has_metric():
                raise ValueError(
                    "eval-metric must be a name where no function is given: a function is never "
                    "sent, and fedapp.run(..., eval_metric=function) runs it by the local engine, "
                    "got custom"
                )
            continue
        if kind not in allowed or (at and kind not in (*_NUMBERED, *_OF_RUN)):
            raise ValueError(
                f"eval-metric must be one or several of {', '.join(allowed)} for {objective}, "
                f"got {name}{value_hint('eval-metric', name, allowed)}"
            )
        if kind in _OF_RUN and (due := objective_metrics(objective, parameters)[0]) != name:
            rule = f"eval-metric must name the run's {_OF_RUN[kind]}, as {due}"
            raise ValueError(f"{rule}, got {name}")
        if kind not in _NUMBERED or name in _OPTIONAL:
            continue
        meaning, low, high, example = _NUMBERED[kind]
        if not _is_between(number, low, high) or (kind == "ndcg" and not number.isdecimal()):
            rule = f"eval-metric must name the {meaning}, as {kind}@{example:g}"
            raise ValueError(f"{rule}, got {name}")
    if len(set(names)) < len(names):
        raise ValueError(f"eval-metric must name a metric once, got {','.join(names)}")


def _is_between(text: str, low: float, high: float) -> bool:
    try:
        return low < float(text) < high
    except ValueError:
        return False
