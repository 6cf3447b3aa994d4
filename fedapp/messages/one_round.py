"""One-round prediction: every party sends which rows may end in which leaves.

Source: Liu et al. 2019, "Federated Forest" (arXiv:1905.10053v1), Algorithms 3, 4, 7 and 8. A party
traverses all trees with its splits, and both ways at the others'; a row's leaf is the one that all
parties leave open (Proposition 1). The active party takes the place of the master, which would
learn every row's leaf.

Reveals: rows' ways through the splits of passive parties, to the active party.

- The server learns sizes: rows, trees, bytes.
- A passive party learns nothing of another: it only answers.
- The active party learns which rows go which way at every split of a passive party whose direction
  shows in its leaf sets, for rows that reach the split and for rows that do not. This is more than
  in interactive inference, which does not ask about rows that do not reach a split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedapp.messages.fields import Array, Form, Letter, Range, Reply, Request
from fedapp.messages.methods import Method

GROUPS = {"one_round": Method("inference", {"": "sizes"})}


@dataclass(frozen=True, slots=True, eq=False)
class LeafSetsRequest(Request, letters=True):
    """To a passive party: traverse all trees."""

    kind: ClassVar[str] = "evaluate.one_round_walk"
    wire_name: ClassVar[str] = "WalkRequest"
    doing: ClassVar[str] = "walking the trees"


@dataclass(frozen=True, slots=True, eq=False)
class IntersectRequest(Request, letters=True):
    """To the active party: intersect the leaf sets, and write the predictions."""

    kind: ClassVar[str] = "evaluate.one_round_intersect"
    doing: ClassVar[str] = "intersecting the leaf sets"
    suffix: Annotated[str, Range(4, 8)]  # of the file to write: .csv or .parquet


@dataclass(frozen=True, slots=True, eq=False)
class LeafSetsReply(Reply, letters=True):
    """Leaf sets for the active party."""

    wire_name: ClassVar[str] = "WalkReply"


@dataclass(frozen=True, slots=True, eq=False)
class IntersectReply(Reply, letters=True):
    """The predictions are written."""

    n_trees: Annotated[int, Range(0, 10**9)]


@dataclass(frozen=True, slots=True, eq=False)
class LeafSets(Letter):
    """Passive to active: rows that may end in each leaf, tree after tree.

    Of each tree a bit a row and leaf, leaves in the order of their nodes, each in whole bytes,
    compressed by zlib.
    """

    part: Annotated[Array, Form("uint8", 32)]  # digest of the party's part of the model
    ends: Annotated[Array, Form("int64", "n_trees", low=0)]
    sets: Annotated[Array, Form("uint8", "n_bytes")]
