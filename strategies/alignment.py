"""The conversation by which vertical parties find their common rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedapp.config import Settings
from fedapp.conversation import Conversation, Parties
from fedapp.messages.alignment import (
    MaskRequest,
    MatchReply,
    MatchRequest,
    OpenRequest,
    OrderRequest,
)
from fedapp.messages.parcels import SentReply
from fedapp.messages.vertical import VerticalHelloReply
from strategies.vertical import Mailbox


@dataclass(frozen=True, slots=True)
class Aligned:
    """How many rows all parties have in common, by their use."""

    n_train: int
    n_valid: int
    n_test: int


def align(
    parties: Parties[VerticalHelloReply], mailbox: Mailbox, settings: Settings
) -> Conversation[Aligned]:
    """Everybody's ids under everybody's mask; ``len(parties) + 2`` exchanges.

    The digests of the order lie in the mailbox afterwards, for the active party to check.
    """
    ordered = settings.align == "ordered"
    active, passive = mailbox.active, mailbox.passive
    opening = OpenRequest(
        tuple(parties),
        active,
        np.stack([hello.box_key for hello in parties.values()]),
        ordered,
        settings.test_fraction,
        settings.valid_fraction,
        settings.seed,
    )
    yield from mailbox.relay_each(parties.all(opening), SentReply)
    for _ in () if ordered else passive:
        yield from mailbox.relay(MaskRequest, passive, SentReply)
    reply = (yield from mailbox.relay(MatchRequest, [active], MatchReply))[active]
    yield from mailbox.relay(OrderRequest, passive, SentReply)
    return Aligned(reply.n_train, reply.n_valid, reply.n_test)
