"""Bagging: every party boosts from the same margins, and the model moves by their mean.

Reveals: no row, label or gradient of a row leaves a party, and nothing is encrypted.

- The server learns each party's trees as XGBoost grew them on its rows alone: thresholds lie among
  the party's values, and gains, sums of hessians and leaf values may stand for a single row. Before
  each round also its training and validation scores, as in ``scoring``, and once the sums of
  ``labels``.
- A party learns the trees of all parties, without gains and hessians, their leaf values times the
  party's share of the rows. They come in the order of the parties' names, which it is not told, but
  it can tell which are its own, and so who among the others grew which.
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

GROUPS = {"bagging": Method("horizontal", GETS, takes_margins=True)}


@dataclass(frozen=True, slots=True, eq=False)
class BagRequest(BoostOrder, Request):
    """Add the last round's trees of all parties, score, and boost on from there."""

    kind: ClassVar[str] = "train.bagging_boost"
    doing: ClassVar[str] = "growing trees"
    each_round: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, eq=False)
class BagReply(BoostReport):
    """The party's new trees, unscaled."""
