"""Interactive inference: rows traverse the trees of a model whose splits are at several parties.

Source: Cheng et al. 2019, "SecureBoost" (arXiv:1901.08755), "Federated Inference based on the
Learned Model", Figure 3; for all trees and rows at once.

Reveals: rows' ways through the splits of passive parties, to the parties concerned.

- The server learns sizes: rows, and how many splits each exchange asks about.
- A passive party learns which of the rows reach which of its splits. It learns no leaf weight, no
  prediction, and nothing of others' splits.
- The active party learns which of these rows go left. The predictions stay with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedapp.messages.fields import Range, Reply, Request
from fedapp.messages.methods import Method

GROUPS = {"interactive": Method("inference", {"": "sizes"})}


@dataclass(frozen=True, slots=True, eq=False)
class WalkRequest(Request, letters=True):
    """To the active party: apply the answers, then ask about others' splits, or finish."""

    kind: ClassVar[str] = "evaluate.interactive_walk"
    doing: ClassVar[str] = "walking the trees"
    suffix: Annotated[str, Range(4, 8)]  # of the file to write: .csv or .parquet
    trees_at_once: Annotated[int, Range(0, 2**31)]  # 0: all


@dataclass(frozen=True, slots=True, eq=False)
class AnswerRequest(Request, letters=True):
    """To a passive party: answer which rows go left; the last time, delete the rows."""

    kind: ClassVar[str] = "evaluate.interactive_answer"
    doing: ClassVar[str] = "walking the trees"
    last: bool


@dataclass(frozen=True, slots=True, eq=False)
class WalkReply(Reply, letters=True):
    """Questions for other parties; none when finished."""

    finished: bool
    n_trees: Annotated[int, Range(0, 10**9)]


@dataclass(frozen=True, slots=True, eq=False)
class AnswerReply(Reply, letters=True):
    """Answers for the active party."""
