"""Cyclic training: the parties take turns, in the order of their names, to boost the one model.

A round is one party's boosting round with the full ``eta``. All parties receive its trees with the
next request, because early stopping needs the scores of all, and each must know the model when its
turn comes.

Departures from Flower's ``FedXgbCyclic`` (1.41):

- Its turns go by node ids, which are random, so that two runs differ; here by the parties' names.
- The whole model travels to and fro; here a party keeps its margins and gets the new trees.
- Base score and classes are those of the first party; here they are of all parties.
- It scores the model on one party's rows in turn; here on all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fedapp.conversation import Checkpoint, Conversation, Parties, ask
from fedapp.messages.handshake import HelloReply
from fedapp.messages.local_boosting import TurnReply, TurnRequest
from fedapp.settings import Settings
from strategies.base import Summary
from strategies.horizontal import HorizontalStrategy
from strategies.local_boosting import Boosted, begin, finish, trees_of
from strategies.settings import BASE_MARGIN, BOOSTING_SETTINGS, INIT_MODEL, OR_FUNCTION


class Cyclic(HorizontalStrategy):
    """Cyclic training: parties take turns to boost the one model.

    Parameters
    ----------
    **settings
        XGBoost's parameters and the others of the signature, as in the run config.

    Raises
    ------
    ConfigError : a setting breaks its rule, or cyclic training does not read it.
    """

    method = "cyclic"
    reads = BOOSTING_SETTINGS | INIT_MODEL | BASE_MARGIN
    objectives = OR_FUNCTION

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        """A turn is one round of XGBoost."""
        return {**super().planned(settings), "trees": 1}

    def conversation(
        self, parties: Parties[HelloReply], saved: Checkpoint | None
    ) -> Conversation[Summary]:
        """One turn an exchange. If the party whose turn it is fails, the next one takes it."""
        boosted = yield from begin(self, parties, saved)
        turn = saved.facts["turn"] if saved else last_turn(parties, boosted.n_rounds)
        while boosted.goes_on:
            turn = next_turn(parties, turn)
            replies = yield from _ask(parties, boosted, turn)
            yield from boosted.note_scores(replies)
            if turn in replies and not boosted.history.stops:
                boosted.add(trees_of(replies[turn], boosted.widths))
                yield boosted.checkpoint(turn=turn)
        last_scores = _ask(parties, boosted, turn="")
        return (yield from finish(parties, boosted, last_scores, turn=turn))


STRATEGIES = {Cyclic.method: Cyclic}


def next_turn(parties: Iterable[str], last: str) -> str:
    """The next name after the last one's, and after the highest the lowest."""
    names = sorted(parties)
    return next((name for name in names if name > last), names[0])


def last_turn(parties: Iterable[str], n_rounds: int) -> str:
    """Whose turn the last of ``n_rounds`` rounds was; nobody's before the first."""
    names = sorted(parties)
    return names[(n_rounds - 1) % len(names)] if n_rounds else ""


def _ask(
    parties: Parties[HelloReply], boosted: Boosted, turn: str
) -> Conversation[dict[str, TurnReply]]:
    n_rounds = {party: int(party == turn) for party in parties}
    requests = {party: TurnRequest(**boosted.order(n)) for party, n in n_rounds.items()}
    return (yield from ask(requests, TurnReply, boosted.check(n_rounds)))
