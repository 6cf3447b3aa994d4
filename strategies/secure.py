"""Sums over all parties under masks, of which the server sees no party's share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedapp.conversation import Conversation, Parties, ask
from fedapp.crypto.fixed_point import SPARE_BITS, Bounds, Whole, power_above
from fedapp.crypto.pairwise import n_words, total
from fedapp.crypto.shamir import join
from fedapp.errors import ProtocolError, blaming
from fedapp.messages.fields import Array, Request
from fedapp.messages.hello import HelloReply
from fedapp.messages.secure import (
    EVERYONE,
    SEALED_BYTES,
    KeysReply,
    KeysRequest,
    LeftReply,
    LeftRequest,
    MaskedReply,
    UnmaskReply,
    UnmaskRequest,
)

Seeds = tuple[list[bytes], list[bytes]]  # of streams that were added, and subtracted


def exchange_keys(
    parties: Parties[HelloReply], threshold: int = 0
) -> Conversation[tuple[dict[str, Any], Bounds, bool]]:
    """The parties' keys as the fields of a ``Roster``, what holds for all of their rows, and
    whether any has weights.

    Parameters
    ----------
    threshold : parties without which no sum is; 0 where all must be there.
    """
    replies = yield from ask(parties.all(KeysRequest()), KeysReply)
    bounds = bounds_of(parties, replies)
    fields = {
        "names": tuple(replies),
        "box_keys": np.stack([reply.box_key for reply in replies.values()]),
        "run_keys": np.stack([reply.run_key for reply in replies.values()]),
        "n_rows": bounds.n_rows,
        "heaviest": bounds.heaviest,
        "largest": bounds.largest,
        "threshold": threshold,
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


class MaskedSums:
    """Sums over the parties of a roster, with who is left of it.

    Parameters
    ----------
    names : of the parties between whom the next sum is.
    threshold : parties without which no sum is; 0 where all must be there, and one exchange does.
    """

    def __init__(self, names: tuple[str, ...] = (), threshold: int = 0) -> None:
        self.names, self.threshold = names, threshold

    @property
    def among(self) -> tuple[str, ...]:
        """As a request tells it."""
        return self.names if self.threshold else ()

    def without_lost(self, parties: Mapping[str, Any]) -> None:
        """Ask the next sum of these alone, if any may be lost."""
        self.names = tuple(name for name in self.names if name in parties or not self.threshold)

    def ask(
        self,
        parties: Parties[HelloReply],
        request: Request,
        *shapes: tuple[int, ...],
        n_bytes: int = 8,
        part_of_others: bool = False,
        may_fail: int | None = None,
    ) -> Conversation[list[Whole]]:
        """Ask all parties the same; what the answers add up to of those that have answered.

        Parameters
        ----------
        shapes : of the arrays that the sum consists of.
        n_bytes : of each number.
        part_of_others : whether no party may be lost since the last sum, as it is part of that.
        may_fail : as of ``ask``.

        Returns
        -------
        int64 arrays of these shapes; none where one is lost that may not be.

        Raises
        ------
        ProtocolError : an answer has another length, masks do not cancel, or a party is lost that
            is needed to take off those of one that was lost before.
        """
        sizes = [int(np.prod(shape)) for shape in shapes]
        n_masked, n_others = n_words(sum(sizes), n_bytes), max(len(self.among) - 1, 0)

        def check(party: str, reply: MaskedReply) -> None:
            for field, due in (("masked", n_masked), ("sealed", n_others)):
                if (found := len(getattr(reply, field))) != due:
                    raise ProtocolError(party, "MaskedReply", field, f"must be {due}, got {found}")

        replies = yield from ask(parties.all(request), MaskedReply, check, may_fail)
        seeds: Seeds = [], []
        if self.threshold:
            if part_of_others and len(replies) < len(self.names):
                return []
            seeds = yield from self._unmask(replies, may_fail)
        vectors = (reply.masked for reply in replies.values())
        return _parted(total(vectors, sum(sizes), n_bytes, *seeds), shapes, n_bytes)

    def _unmask(
        self, replies: Mapping[str, MaskedReply], may_fail: int | None
    ) -> Conversation[Seeds]:
        """Seeds of the masks that are left in the sum of these answers."""
        before, names = self.names, tuple(replies)
        lost = [name for name in before if name not in replies]

        def sealed_for(holder: str) -> Array:
            others = [name for name in names if name != holder]
            rows = [replies[name].sealed[_place(before, name, holder)] for name in others]
            return np.array(rows, dtype=np.uint8).reshape(-1, SEALED_BYTES)

        def check(party: str, reply: UnmaskReply) -> None:
            for field, due in (("shares", len(names)), ("seeds", len(lost))):
                if (found := len(getattr(reply, field))) != due:
                    raise ProtocolError(party, "UnmaskReply", field, f"must be {due}, got {found}")

        requests = {name: UnmaskRequest(names, sealed_for(name)) for name in names}
        told = yield from ask(requests, UnmaskReply, check, may_fail)
        self.names = names
        if lost and (gone := [name for name in names if name not in told]):
            rule = f"must tell what hides the sum without {', '.join(lost)}; the run can be resumed"
            raise ProtocolError(gone[0], "UnmaskReply", "seeds", rule)
        holders = {before.index(name) + 1: reply for name, reply in told.items()}
        enough = dict(list(holders.items())[: self.threshold])
        own = [
            _joined(name, {place: reply.shares[row] for place, reply in enough.items()})
            for row, name in enumerate(names)
        ]
        pairs = [
            (name < gone, told[name].seeds[row].tobytes())
            for name in names
            for row, gone in enumerate(lost)
        ]
        added = [seed for is_added, seed in pairs if is_added]
        return [*own, *added], [seed for is_added, seed in pairs if not is_added]


def _place(names: tuple[str, ...], sender: str, holder: str) -> int:
    """Row of a holder's share in what a sender has sent."""
    place = names.index(holder)
    return place - (names.index(sender) < place)


def _joined(name: str, shares: Mapping[int, Array]) -> bytes:
    """The seed of a party's own mask."""
    with blaming(name, "UnmaskReply", "shares"):
        return join({holder: share.tobytes() for holder, share in shares.items()})


def _parted(summed: Whole, shapes: Sequence[tuple[int, ...]], n_bytes: int) -> list[Whole]:
    """A sum as arrays of these shapes."""
    most = 2 ** (8 * n_bytes - SPARE_BITS)
    if summed.max(initial=0) > most or summed.min(initial=0) < -most:
        rule = "must add up to sums of rows: parties were told of different runs, or one is missing"
        raise ProtocolError(EVERYONE, "MaskedReply", "masked", rule)
    sizes = [int(np.prod(shape)) for shape in shapes]
    parts = np.split(summed, np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def ask_who_is_left(parties: Parties[HelloReply]) -> Conversation[list[str]]:
    """Go on without those whom some party knows to be lost, in a resumed run; returns them."""
    replies = yield from ask(parties.all(LeftRequest()), LeftReply)
    known = [reply.names for reply in replies.values()]
    lost = [name for name in parties if any(name not in names for names in known)]
    for name in lost:
        parties.leave(name)
    return lost
