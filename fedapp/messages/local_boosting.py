"""What bagging and cyclic training send: trees as arrays, and how to grow more.

Reveals: see ``bagging`` and ``cyclic``, whose messages are made of these parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedapp.messages.fields import Array, Form, Range, Reply, SiteLimit
from fedapp.messages.parameters import TreeParameters
from fedapp.messages.scoring import Scores, Sums

LEAF = -1


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Trees one after the other, a value a node; the right child follows the left."""

    lefts: Annotated[Array, Form("int32", "n_nodes", low=LEAF)]  # within the tree; -1 at a leaf
    columns: Annotated[Array, Form("int32", "n_nodes", low=0)]
    thresholds: Annotated[Array, Form("float32", "n_nodes")]
    defaults: Annotated[Array, Form("uint8", "n_nodes", low=0, high=1)]  # 1: missing goes left
    values: Annotated[Array, Form("float32", "n_nodes")]  # of leaves, learning rate included
    offsets: Annotated[Array, Form("int64", "n_offsets", low=0)]  # n_trees + 1


@dataclass(frozen=True, slots=True, eq=False)
class GrownForest(Forest):
    """Trees with what importance and SHAP values need beside them."""

    gains: Annotated[Array, Form("float32", "n_nodes")]
    hessians: Annotated[Array, Form("float32", "n_nodes", low=0)]
    weights: Annotated[Array, Form("float32", "n_nodes")]


@dataclass(frozen=True, slots=True, eq=False)
class BoostOrder(Forest, TreeParameters):
    """The trees a party does not know yet, and how to boost on from there."""

    round_id: Annotated[int, Range(0, 10**6)]
    n_rounds: Annotated[int, Range(0, 10**6)]  # 0: only score the model so far
    n_classes: Annotated[int, Range(0, 1000)]
    base_margin: float
    score_bins: Annotated[int, Range(2, 2**20), SiteLimit("score-bins")]


@dataclass(frozen=True, slots=True, eq=False)
class BoostReport(GrownForest, Reply):
    """The trees a party has grown, and scores of the model before them."""

    train_sums: Sums
    train_scores: Scores
    valid_sums: Sums
    valid_scores: Scores


def forest_of(message: Forest) -> dict[str, Array]:
    """The arrays of a message's trees."""
    kind = GrownForest if isinstance(message, GrownForest) else Forest
    return {name: getattr(message, name) for name in kind.__dataclass_fields__}
