"""Predictions with a divided model, interactive or in one round, and explanations of single rows.

Interactive inference: rows traverse the trees, and parties ask each other at every split. Source:
Cheng et al. 2019, "SecureBoost" (arXiv:1901.08755), "Federated Inference based on the Learned
Model", Figure 3; for all trees and rows at once.

One-round prediction: every party sends which rows may end in which leaves. Source: Liu et al. 2019,
"Federated Forest" (arXiv:1905.10053v1), Algorithms 3, 4, 7 and 8. A party traverses all trees with
its splits, and both ways at the others'; a row's leaf is the one that all parties leave open
(Proposition 1). The active party takes the place of the master, which would learn every row's leaf.
Departure: a bit a cell, not a leaf. Leaves that none of a party's splits tells apart are one cell,
and a party of a boosted model, which does not know the leaves, knows how its splits are nested.

Reveals, in short:

- [strategy=interactive] A passive party learns which rows reach which of its splits; no leaf weight
  and no prediction.
- [strategy=interactive] The label holder learns which of these rows go left, at one split after the
  other. The predictions stay with it.
- [strategy=one-round] The label holder learns which way rows go at all splits of a passive party
  that its splits above leave open, also at those that they do not reach.
- [strategy=one-round] A passive party learns nothing of another: it only answers.
- [strategy=interactive|one-round] A passive party that breaks the rules chooses the leaf among
  those that the splits of others leave open; nothing detects it.
- [strategy=interactive|one-round] The server learns sizes: rows, and splits or trees.

In full: rows' ways through the splits of passive parties, to the parties concerned.

[strategy=interactive] By ``interactive``, and where rows traverse an initial model (``Questions``
and ``Answers``):

- The server learns sizes: rows, and how many splits each exchange asks about.
- A passive party learns which of the rows reach which of its splits. It learns no leaf weight, no
  prediction, and nothing of others' splits.
- The active party learns which of these rows go left. The predictions stay with it.
- A passive party answers about a row once a split, and only where its answers so far have led the
  row: down a tree, on one way. An active party that breaks the rules still chooses, at the splits
  of others, which way that is; it learns no second one in the same run. With 10 trees of depth 4 on
  breast-cancer, whose 569 rows have 34,709 sides at the splits of one passive party, an honest
  run asks for 13,780 of them, and no run gets more than 14,615.
- A passive party that breaks the rules chooses its answers, and so the leaf among those that the
  splits of others leave open to the row. Nothing detects it; so also by ``one_round``.

[strategy=one-round] By ``one_round``:

- The server learns sizes: rows, trees, bytes.
- A passive party learns nothing of another: it only answers.
- The active party learns which rows go which way at every split of a passive party that the
  party's splits above leave open to the row, whatever the others' splits. This is more than in
  interactive inference, which asks only about rows that reach a split, and less than a bit a row
  and split. With 10 trees of depth 4 it learns 42 % of all sides of HIGGS and 71 % of those of
  default-credit; interactively 30 and 22 %.
- Of a boosted model that has lost its last rounds by early stopping, the active party learns the
  same at the splits of these rounds.

[explain!=none] By ``explain``: which rows are to be explained, and nothing else. Every party writes
what it may see to its disk only.

- The server learns the ids of the rows, because the run's settings name them, and nothing else: a
  party gives the same answer whether it has such rows or not.
- A party learns which of the rows are to be explained.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from fedapp.messages.fields import (
    AT_ANY_TIME,
    Array,
    Form,
    Letter,
    Range,
    Reply,
    Request,
    Suffix,
    message,
    request,
)
from fedapp.messages.methods import Method


@request("evaluate.interactive_walk", "walking the trees", times=AT_ANY_TIME)
class WalkRequest(Request, letters=True):
    """To the active party: apply the answers, then ask about others' splits, or finish."""

    suffix: Suffix
    trees_at_once: Annotated[int, Range(0, 2**31)]  # 0: all


@request("evaluate.interactive_answer", "walking the trees", times=AT_ANY_TIME)
class AnswerRequest(Request, letters=True):
    """To a passive party: answer which rows go left; the last time, delete the rows."""

    last: bool


@message
class WalkReply(Reply, letters=True):
    """Questions for other parties; none when finished."""

    finished: bool
    n_trees: Annotated[int, Range(0, 10**9)]


@message
class AnswerReply(Reply, letters=True):
    """Answers for the active party."""


@request("evaluate.one_round_walk", "walking the trees")
class CellsRequest(Request, letters=True):
    """To a passive party: traverse all trees."""

    wire_name: ClassVar[str] = "WalkRequest"


@request("evaluate.one_round_intersect", "intersecting the cells")
class IntersectRequest(Request, letters=True):
    """To the active party: intersect the cells, and write the predictions."""

    suffix: Suffix


@message
class CellsReply(Reply, letters=True):
    """Cells for the active party."""

    wire_name: ClassVar[str] = "WalkReply"


@message
class IntersectReply(Reply, letters=True):
    """The predictions are written."""

    n_trees: Annotated[int, Range(0, 10**9)]


@message
class Cells(Letter):
    """Passive to active: rows that the sender's splits leave open to each of its cells.

    For each split two cells, right and left of it; of each a bit a row, in whole bytes, compressed
    by zlib. See ``fedapp.trees.cells``.
    """

    part: Annotated[Array, Form("uint8", 32)]  # digest of the party's part of the model
    cells: Annotated[Array, Form("uint8", "n_bytes")]


MOST_ROWS = 100


@request("evaluate.explain_rows", "explaining rows")
class ExplainRequest(Request):
    """Explain these rows as far as this party may see them."""

    rows: Annotated[tuple[str, ...], Range(1, MOST_ROWS)]  # ids


@message
class ExplainReply(Reply):
    """Confirms the request."""

    done: bool


@message
class Questions(Letter):
    """Active to passive: which rows are at which of its splits."""

    records: Annotated[Array, Form("int64", "n_questions", low=0)]
    # Rows of each.
    sizes: Annotated[Array, Form("int64", "n_questions", low=1, adds_up="n_asked")]
    rows: Annotated[Array, Form("int32", "n_asked", low=0)]  # questions in turn


@message
class Answers(Letter):
    """Passive to active: a bit a row of the questions, 1 for left."""

    part: Annotated[Array, Form("uint8", 32)]  # digest of the party's part of the model
    bits: Annotated[Array, Form("uint8", "n_bit_bytes")]


GROUPS = {
    "interactive": Method(
        "inference",
        {"": "sizes"},
        memory=None,
        title="The active party walks the trees and asks the others level by level",
    ),
    "one_round": Method(
        "inference",
        {"": "sizes"},
        memory=None,
        title="Leaves that each party leaves open, intersected at the active one",
    ),
    "explain": frozenset({"inference"}),
}
