"""Matching of vertical parties' rows."""

from __future__ import annotations

import itertools

import numpy as np

from fedapp.conversation import Conversation, Parties
from fedapp.crypto.sums import seconds_to_mask
from fedapp.data.partition import SUBSETS, Holdout
from fedapp.messages.fields import fields_of
from fedapp.messages.vertical import (
    MaskRequest,
    MatchReply,
    MatchRequest,
    OpenRequest,
    OrderRequest,
    SentReply,
    VerticalHelloReply,
)
from fedapp.settings import Settings
from strategies.vertical import Mailbox


def align(
    parties: Parties[VerticalHelloReply], mailbox: Mailbox, settings: Settings
) -> Conversation[dict[str, int]]:
    """Private set intersection: every list of ids is masked by every party.

    Takes ``len(parties) + 2`` exchanges. The digests of the order are in the mailbox afterwards,
    for the active party to check. Returns the number of common rows by subset.
    """
    ordered = settings.align == "ordered"
    active, passive = mailbox.active, mailbox.passive
    opening = OpenRequest(
        tuple(parties),
        active,
        np.stack([hello.box_key for hello in parties.values()]),
        np.stack([hello.run_key for hello in parties.values()]),
        np.array([hello.n_rows for hello in parties.values()]),
        ordered,
        **fields_of(settings, Holdout),
    )
    seconds_left = [0.0, 0.0] if ordered else _seconds_left(parties)
    yield from mailbox.relay_each(parties.all(opening), SentReply, seconds=seconds_left.pop())
    for _ in () if ordered else passive:
        yield from mailbox.relay(MaskRequest, passive, SentReply, seconds=seconds_left.pop())
    matching = mailbox.relay(MatchRequest, [active], MatchReply, seconds=seconds_left.pop())
    reply = (yield from matching)[active]
    yield from mailbox.relay(OrderRequest, passive, SentReply)
    return {subset: getattr(reply, f"n_{subset}") for subset in SUBSETS}


def _seconds_left(parties: Parties[VerticalHelloReply]) -> list[float]:
    # An estimate from each exchange to the end, the last exchange's first; every party masks every
    # list, and simulated parties share one machine.
    n_others = len(parties) - 1
    opening, masking = seconds_to_mask(max(hello.n_rows for hello in parties.values()))
    simulated = any(hello.simulated for hello in parties.values())
    opening *= len(parties) if simulated else 1
    turn = masking * (n_others if simulated else 1)
    return list(itertools.accumulate([n_others * masking, *[turn] * n_others, opening]))
