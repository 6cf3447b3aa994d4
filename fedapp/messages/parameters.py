"""XGBoost's tree parameters in a message: the run's settings.

Reveals: nothing of any row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fedapp.messages.fields import Array, Form, Range, SiteLimit, fields_of
from fedapp.trees.sets import MOST_CATEGORIES

MOST_DEPTH = 15
MOST_NODES = 2 ** (MOST_DEPTH + 1)  # of a tree
NotNegative = Annotated[float, Range(0, 1e38)]
BaseMargin = Annotated[Array, Form("float32", "n_outputs")]  # of a row before its first tree


@dataclass(frozen=True, eq=False)
class TreeParameters:
    """Part of a message: how trees are grown, named as in the run config."""

    __slots__ = ()  # its fields are slots of the message, which may have another base with slots

    max_depth: Annotated[int, Range(1, MOST_DEPTH)]
    eta: NotNegative
    reg_lambda: NotNegative
    reg_alpha: NotNegative
    gamma: NotNegative
    min_child_weight: NotNegative
    max_cat_to_onehot: Annotated[int, Range(1, MOST_CATEGORIES)]
    max_cat_threshold: Annotated[int, Range(1, MOST_CATEGORIES)]
    max_delta_step: NotNegative
    subsample: Annotated[float, Range(0, 1)]
    colsample_bytree: Annotated[float, Range(0, 1)]
    colsample_bylevel: Annotated[float, Range(0, 1)]
    colsample_bynode: Annotated[float, Range(0, 1)]
    max_bin: Annotated[int, Range(2, 65535), SiteLimit("most-bins")]
    seed: Annotated[int, Range(0, 2**63 - 1)]


@dataclass(frozen=True, eq=False)
class LossFields:
    """Part of a message: parameters of the objective, and additional metrics."""

    __slots__ = ()

    scale_pos_weight: Annotated[float, Range(0, 1e38)]
    max_delta_step: NotNegative
    tweedie_variance_power: Annotated[float, Range(1, 2)]
    eval_metrics: Annotated[tuple[str, ...], Range(0, 20)]


def parameters_of(source: Any) -> dict[str, Any]:
    """The fields of ``TreeParameters`` of the run's settings or of a message."""
    return fields_of(source, TreeParameters)


def loss_fields(source: Any) -> dict[str, Any]:
    """The fields of ``LossFields`` of the run's settings or of a message."""
    return fields_of(source, LossFields)
