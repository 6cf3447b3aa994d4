"""What bagging and cyclic training send: trees as arrays, and how to grow more.

Reveals: see ``bagging`` and ``cyclic``, whose messages are made of these parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedapp.errors import ProtocolError
from fedapp.messages.fields import Array, Form, Range, Reply
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
    score_bins: Annotated[int, Range(2, 2**20)]


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


def check_forest(party: str, message: Forest, n_columns: int) -> None:
    """Hold that every walk down a tree ends at a leaf, and meets no column that is not there.

    Raises
    ------
    ProtocolError : names the party, the message and the array.
    """

    def hold(holds: bool, field: str, rule: str) -> None:
        if not holds:
            raise ProtocolError(party, type(message).__name__, field, rule)

    lefts, offsets, n_nodes = message.lefts.astype(np.int64), message.offsets, len(message.lefts)
    ends = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == n_nodes
    sizes = np.diff(offsets)
    hold(ends and bool((sizes > 0).all()), "offsets", f"must divide {n_nodes} nodes into trees")
    hold(bool((message.columns < n_columns).all()), "columns", f"must be < {n_columns}")
    inner = np.flatnonzero(lefts != LEAF)
    own = np.arange(n_nodes) - np.repeat(offsets[:-1], sizes)
    leads_on = (lefts > own) & (lefts + 1 < np.repeat(sizes, sizes))
    hold(bool(leads_on[inner].all()), "lefts", "must lead to two later nodes of the tree")
    children = (np.arange(n_nodes) - own + lefts)[inner]
    n_parents = np.bincount(np.concatenate((children, children + 1)), minlength=n_nodes)
    hold(bool((n_parents == (own > 0)).all()), "lefts", "must reach every node once")


def check_report(
    party: str, reply: BoostReport, n_trees: int, n_columns: int, max_depth: int
) -> None:
    """Hold a party's new trees against what it was asked for.

    Raises
    ------
    ProtocolError : another number of trees, trees too large, or no trees at all.
    """
    check_forest(party, reply, n_columns)
    name, sizes = type(reply).__name__, np.diff(reply.offsets)
    if len(sizes) != n_trees:
        raise ProtocolError(party, name, "offsets", f"must be {n_trees} trees, got {len(sizes)}")
    most = 2 ** (max_depth + 1) - 1
    if (sizes > most).any():
        raise ProtocolError(party, name, "offsets", f"must be at most {most} nodes a tree")
