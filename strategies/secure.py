"""Sums over all parties under masks, of which the server sees no party's share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedapp.conversation import Conversation, Parties, ask
from fedapp.crypto.fixed_point import SPARE_BITS, Bounds, Whole, power_above
from fedapp.crypto.pairwise import n_words, total
from fedapp.errors import ProtocolError
from fedapp.messages.fields import Request
from fedapp.messages.hello import HelloReply
from fedapp.messages.secure import EVERYONE, KeysReply, KeysRequest, MaskedReply


def exchange_keys(
    parties: Parties[HelloReply],
) -> Conversation[tuple[dict[str, Any], Bounds, bool]]:
    """The parties' keys as the fields of a ``Roster``, what holds for all of their rows, and
    whether any has weights."""
    replies = yield from ask(parties.all(KeysRequest()), KeysReply)
    bounds = bounds_of(parties, replies)
    fields = {
        "names": tuple(replies),
        "box_keys": np.stack([reply.box_key for reply in replies.values()]),
        "run_keys": np.stack([reply.run_key for reply in replies.values()]),
        "n_rows": bounds.n_rows,
        "heaviest": bounds.heaviest,
        "largest": bounds.largest,
    }
    return fields, bounds, any(reply.weighted for reply in replies.values())


def bounds_of(parties: Mapping[str, HelloReply], replies: Mapping[str, KeysReply]) -> Bounds:
    """What holds for the rows of all parties, by what each says of its own."""
    hellos = parties.values()
    n_rows = sum(hello.n_train + hello.n_valid + hello.n_test for hello in hellos)
    # Of labels that are numbers: rounded up to powers of two by those that tell them.
    largest = max(max(-hello.label_low, hello.label_high) for hello in hellos)
    heaviest = max(reply.heaviest for reply in replies.values())
    return Bounds(n_rows, heaviest, power_above(largest))


def ask_for_sums(
    parties: Parties[HelloReply], request: Request, *shapes: tuple[int, ...], n_bytes: int = 8
) -> Conversation[list[Whole]]:
    """Ask all parties the same; what their answers add up to.

    Parameters
    ----------
    shapes : of the arrays that the sum consists of.
    n_bytes : of each number.

    Returns
    -------
    int64 arrays of these shapes.

    Raises
    ------
    ProtocolError : an answer has another length, or the masks do not cancel.
    """
    sizes = [int(np.prod(shape)) for shape in shapes]

    def check(party: str, reply: MaskedReply) -> None:
        if len(reply.masked) != (expected := n_words(sum(sizes), n_bytes)):
            rule = f"must be {expected} words, got {len(reply.masked)}"
            raise ProtocolError(party, "MaskedReply", "masked", rule)

    replies = yield from ask(parties.all(request), MaskedReply, check)
    summed = total((reply.masked for reply in replies.values()), sum(sizes), n_bytes)
    most = 2 ** (8 * n_bytes - SPARE_BITS)
    if summed.max(initial=0) > most or summed.min(initial=0) < -most:
        rule = "must add up to sums of rows: parties were told of different runs, or one is missing"
        raise ProtocolError(EVERYONE, "MaskedReply", "masked", rule)
    parts = np.split(summed, np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
