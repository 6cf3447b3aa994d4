"""The conversation by which vertical parties find their common rows."""

from __future__ import annotations

import itertools

import numpy as np

from fedapp.config import Settings
from fedapp.conversation import Conversation, Parties
from fedapp.crypto.speed import seconds_to_mask
from fedapp.data.partition import SUBSETS, Holdout
from fedapp.messages.alignment import (
    MaskRequest,
    MatchReply,
    MatchRequest,
    OpenRequest,
    OrderRequest,
)
from fedapp.messages.fields import fields_of
from fedapp.messages.parcels import SentReply
from fedapp.messages.vertical import VerticalHelloReply
from strategies.vertical import Mailbox


def align(
    parties: Parties[VerticalHelloReply], mailbox: Mailbox, settings: Settings
) -> Conversation[dict[str, int]]:
    """Everybody's ids under everybody's mask; ``len(parties) + 2`` exchanges.

    The digests of the order lie in the mailbox afterwards, for the active party to check.

    Returns
    -------
    How many rows all parties have in common, by subset.
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
    left = [0.0, 0.0] if ordered else _seconds_left(parties)
    yield from mailbox.relay_each(parties.all(opening), SentReply, seconds=left.pop())
    for _ in () if ordered else passive:
        yield from mailbox.relay(MaskRequest, passive, SentReply, seconds=left.pop())
    matching = mailbox.relay(MatchRequest, [active], MatchReply, seconds=left.pop())
    reply = (yield from matching)[active]
    yield from mailbox.relay(OrderRequest, passive, SentReply)
    return {subset: getattr(reply, f"n_{subset}") for subset in SUBSETS}


def _seconds_left(parties: Parties[VerticalHelloReply]) -> list[float]:
    """From each exchange to the alignment's end; a guess. Every party masks every list."""
    n_others = len(parties) - 1
    opening, masking = seconds_to_mask(max(hello.n_rows for hello in parties.values()))
    alike = any(hello.simulated for hello in parties.values())
    opening *= len(parties) if alike else 1
    turn = masking * (n_others if alike else 1)
    return list(itertools.accumulate([n_others * masking, *[turn] * n_others, opening]))
