"""Cyclic training: the parties take turns to boost a single model.

Reveals: no row, label or gradient of a row leaves a party, and nothing is encrypted.

- The server learns the trees of the party whose turn it is, as XGBoost grew them on its rows only:
  thresholds are between the party's values, and gains, sums of hessians and leaf values may
  describe a single row.
- Before each round the server also learns all parties' training and validation scores, as in
  ``scoring``, and once the sums of ``labels``.
- A party learns every tree, without gains and hessians, and from the turns which trees came from
  the same party. It does not learn that party's name.
- A secret of the party decides which rows and columns it draws, unless it is simulated. XGBoost
  uses 31 bits of it, and trees depend on the draw: a server that tries all of them on guessed rows
  can tell whether the guess is right.
- A party refuses a round that would draw fewer rows than ``min-rows``.
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
    """Add the last turn's trees and score; if ``n_rounds`` is above 0, also boost."""

    kind: ClassVar[str] = "train.cyclic_turn"
    doing: ClassVar[str] = "growing trees"
    each_round: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, eq=False)
class TurnReply(BoostReport):
    """The party's new trees; empty if it is not its turn."""
