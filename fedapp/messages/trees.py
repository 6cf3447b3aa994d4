"""Trees in a message, in the layout of ``fedapp.trees.model``.

6 bytes a node and 5 a split, and one bit a category where a split is by categories.

Reveals: see ``bagging``, ``cyclic`` and ``fedxgbllr``, whose messages contain these parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedapp.messages.fields import (
    Array,
    BaseMargin,
    Form,
    PlanLimit,
    Range,
    Reply,
    SiteLimit,
    TreeParameters,
    fields_of,
)
from fedapp.messages.scoring import Scores, Sums

GETS = {"": "each party's trees; a leaf may be a single row"}


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """Part of a message: trees, one after the other."""

    sizes: Annotated[Array, Form("int32", "n_trees", low=1)]  # nodes of each tree
    lefts: Annotated[Array, Form("uint16", "n_nodes")]  # left child, 0 at a leaf
    values: Annotated[Array, Form("float32", "n_nodes")]  # threshold or leaf value
    columns: Annotated[Array, Form("int32", "n_splits", low=0)]
    defaults: Annotated[Array, Form("uint8", "n_splits", low=0, high=1)]  # 1: missing goes left
    sets: Annotated[Array, Form("uint8", "n_set_bytes")]  # bits of categories that go right


@dataclass(frozen=True, slots=True, eq=False)
class RatedTrees(Trees):
    """Trees with the gain of each split."""

    gains: Annotated[Array, Form("float32", "n_splits")]


@dataclass(frozen=True, slots=True, eq=False)
class GrownTrees(RatedTrees):
    """Trees with all that importance and SHAP values need."""

    hessians: Annotated[Array, Form("float32", "n_nodes", low=0)]
    weights: Annotated[Array, Form("float32", "n_nodes")]


@dataclass(frozen=True, slots=True, eq=False)
class BoostOrder(Trees, TreeParameters):
    """The trees that a party does not have yet, and how to boost from there."""

    round_id: Annotated[int, Range(0, 10**6)]
    # 0: only score the model so far.
    n_rounds: Annotated[int, Range(0, 10**6), PlanLimit("trees")]
    n_classes: Annotated[int, Range(0, 1000)]
    base_margin: BaseMargin
    score_bins: Annotated[int, Range(2, 2**20), SiteLimit("score-bins")]


@dataclass(frozen=True, slots=True, eq=False)
class BoostReport(GrownTrees, Reply):
    """The trees a party has grown, and scores of the model before them."""

    train_sums: Sums
    train_scores: Scores
    valid_sums: Sums
    valid_scores: Scores


def arrays_of(message: Trees) -> dict[str, Array]:
    """The arrays of a message's trees."""
    kind = next(kind for kind in (GrownTrees, RatedTrees, Trees) if isinstance(message, kind))
    return fields_of(message, kind)
