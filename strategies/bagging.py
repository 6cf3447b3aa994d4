"""Bagging: every party boosts from the same margins; the model moves by the mean of their steps.

With one party this is XGBoost, tree by tree. With K parties each step is a mean of K, weighted by
rows: a leaf value is a full Newton step, and K of them added up would be a K times larger ``eta``,
which no longer converges where ``K * eta`` exceeds 2.

Departures from Flower's ``FedXgbBagging`` (1.41), which joins the parties' trees unscaled:

- It steps K times too far, see above; here a tree's values are scaled by the party's share.
- In the first round each party boosts from the base score that XGBoost estimates from its rows,
  and the joint model keeps that of the first answer; here the base score is explicit, from the
  mean label of all parties.
- It takes ``num_parallel_tree`` trees of a reply, which is one, and marks it as class 0: of several
  classes or local rounds only the first tree is kept. Here all are.
- Trees come in the order of the answers; here in the order of the parties' names, so that the same
  run gives the same model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from fedapp.conversation import Checkpoint, Conversation, Parties, ask
from fedapp.messages.handshake import HelloReply
from fedapp.messages.local_boosting import BagReply, BagRequest
from fedapp.settings import Section, Settings, check
from fedapp.trees.model import Grown, concatenated, scaled
from strategies.base import Summary
from strategies.horizontal import HorizontalStrategy
from strategies.local_boosting import Boosted, begin, finish, trees_of
from strategies.scoring import shares
from strategies.settings import BASE_MARGIN, BOOSTING_SETTINGS, INIT_MODEL, OR_FUNCTION


class BaggingSettings(Section):
    """``[bagging]`` of the run config; ``local_rounds``: rounds a party boosts before a mean."""

    local_rounds: Annotated[int, Field(ge=1, le=10**6)]


class Bagging(HorizontalStrategy):
    """Bagging: every party boosts the same model, which moves by the mean of their steps.

    Parameters
    ----------
    local_rounds : int
        Rounds that a party boosts before a mean.
    **settings
        XGBoost's parameters and the others of the signature, as in the run config.

    Raises
    ------
    ConfigError : a setting breaks its rule, or bagging does not read it.
    """

    method = "bagging"
    reads = BOOSTING_SETTINGS | INIT_MODEL | BASE_MARGIN
    objectives = OR_FUNCTION

    @classmethod
    def own_settings(cls, settings: Settings) -> BaggingSettings:
        return check(BaggingSettings, settings.sections["bagging"], "bagging.")

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        return {**super().planned(settings), "trees": cls.own_settings(settings).local_rounds}

    def conversation(
        self, parties: Parties[HelloReply], saved: Checkpoint | None
    ) -> Conversation[Summary]:
        """One exchange a round; a round's trees travel with the next request."""
        n_rounds = self.own_settings(self.settings).local_rounds
        boosted = yield from begin(self, parties, saved, n_rounds * len(parties))
        while boosted.goes_on:
            replies = yield from _ask(parties, boosted, n_rounds)
            yield from boosted.note_scores(replies)
            if not boosted.history.stops:
                boosted.add(mean_step(boosted, replies))
                yield boosted.checkpoint()
        return (yield from finish(parties, boosted, _ask(parties, boosted, n_rounds=0)))


STRATEGIES = {Bagging.method: Bagging}


def mean_step(boosted: Boosted, replies: Mapping[str, BagReply]) -> Grown:
    """Trees whose sum is the weighted mean of the parties' steps.

    The parties come in the order of their names, each with whole rounds of one tree an output, so
    tree i still adds to output ``i % n_outputs``.
    """
    weights = shares(boosted.weights, replies)
    steps = {party: trees_of(reply, boosted.widths) for party, reply in replies.items()}
    return concatenated(
        Grown(tuple(scaled(tree, weights[party]) for tree in step.trees), step.sets)
        for party, step in steps.items()
    )


def _ask(
    parties: Parties[HelloReply], boosted: Boosted, n_rounds: int
) -> Conversation[dict[str, BagReply]]:
    request = BagRequest(**boosted.order(n_rounds))
    check_reply = boosted.check(dict.fromkeys(parties, n_rounds))
    return (yield from ask(parties.all(request), BagReply, check_reply))
