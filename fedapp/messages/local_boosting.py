"""Bagging and cyclic training: XGBoost grows each tree on the rows of one party.

In bagging every party boosts from the same margins, and the model adds the mean of their trees. In
cyclic training the parties take turns to boost a single model.

Reveals, in short:

- The server learns each party's trees, unencrypted: thresholds are between the party's values, and
  a leaf may describe a single row.
- A party learns the trees of all other parties. Their order shows which came from the same party.

In full: no row, label or gradient of a row leaves a party, and nothing is encrypted.

- The server learns each party's trees as XGBoost grew them on its rows only: thresholds are between
  the party's values, and gains, sums of hessians and leaf values may describe a single row. In
  cyclic training these are the trees of the party whose turn it is.
- Before each round the server also learns each party's training and validation scores, as in
  ``scoring``, and once the sums of ``labels``.
- A party learns the trees of all parties, without gains and hessians; in bagging with leaf values
  times the party's share of the rows.
- [strategy=bagging] In bagging these trees come in the order of the parties' names. The order is
  not sent, but a party recognises its trees, and so can infer which of the other parties grew
  which.
- [strategy=cyclic] In cyclic training a party learns from the turns which trees came from the same
  party. It does not learn that party's name.
- A secret of the party decides which rows and columns it draws, unless it is simulated. XGBoost
  uses 31 bits of it, and trees depend on the draw: a server that tries all of them on guessed rows
  can find out whether the guess is right.
- A party refuses a round that would draw fewer rows than ``min-rows``.
- [init-model!=none] With ``init-model`` a party also learns the trees of that model, without gains
  and hessians.
"""

from __future__ import annotations

from fedapp.messages.fields import EACH_ROUND, Request, message, request
from fedapp.messages.methods import Memory, Method
from fedapp.messages.scoring import GETS, BoostOrder, BoostReport


@request("train.bagging_boost", "growing trees", **EACH_ROUND, spare=1)
class BagRequest(BoostOrder, Request):
    """Add all parties' trees of the last round, score, and boost from there."""


@message
class BagReply(BoostReport):
    """The party's new trees, unscaled."""


@request("train.cyclic_turn", "growing trees", **EACH_ROUND, spare=1)
class TurnRequest(BoostOrder, Request):
    """Add the last turn's trees and score; if ``n_rounds`` is above 0, also boost."""


@message
class TurnReply(BoostReport):
    """The party's new trees; empty if it is not its turn."""


MEMORY = Memory(value=5)  # of XGBoost's matrix
GROUPS = {
    "bagging": Method(
        "horizontal",
        GETS,
        takes_margins=True,
        memory=MEMORY,
        title="Every party boosts from the same margins; the model moves by the mean of "
        "their steps",
    ),
    "cyclic": Method(
        "horizontal",
        GETS,
        takes_margins=True,
        memory=MEMORY,
        title="The parties take turns, in the order of their names, to boost the one model",
    ),
}
