"""Cyclic training: the parties take turns to boost the one model.

Reveals: no row, label or gradient of a row leaves a party, and nothing is encrypted.

- The server learns the trees of the party whose turn it is, as XGBoost grew them on its rows alone:
  thresholds lie among the party's values, and gains, sums of hessians and leaf values may stand for
  a single row. Before each round also all parties' training and validation scores, as in
  ``scoring``, and once the sums of ``labels``.
- A party learns every tree, without gains and hessians, and from the turns which ones came from the
  same party; it is not told that party's name.
- Which rows and columns a party draws follows from a secret of the party's, unless it is simulated.
  XGBoost takes 31 bits of it, and trees tell of the draw: a server that tries them all on rows that
  it has guessed can tell whether these are right. A round that would draw fewer rows than
  ``min-rows`` is refused.
- With ``init-model`` a party also learns the trees of that model, without gains and hessians.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedapp.messages.fields import Request
from fedapp.messages.methods import Method
from fedapp.messages.trees import GETS, BoostOrder, BoostReport

GROUPS = {"cyclic": Method("horizontal", GETS, takes_margins=True)}


@dataclass(frozen=True, slots=True, eq=False)
class TurnRequest(BoostOrder, Request):
    """Add the last turn's trees and score; with ``n_rounds`` above 0 it is the party's turn."""

    kind: ClassVar[str] = "train.cyclic_turn"
    doing: ClassVar[str] = "growing trees"
    each_round: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, eq=False)
class TurnReply(BoostReport):
    """The party's new trees; none where it is not its turn."""
