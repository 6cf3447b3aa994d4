"""Agreeing on a version of a divided model that the standing processes of the sites answer by."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import numpy as np

from clients.vertical.party import Aligned
from fedapp.errors import DataError, as_protocol_error
from fedapp.messages.fields import check_fields
from fedapp.messages.standing import (
    Address,
    PrepareReply,
    PrepareRequest,
    StoreReply,
    StoreRequest,
    SwitchReply,
    SwitchRequest,
)
from fedapp.messages.vertical import MatchRequest, OrderRequest, VerticalHelloRequest
from fedapp.site.account import planned
from fedapp.site.certificates import check_own_certificate
from fedapp.site.mail import Letters, Mail
from fedapp.site.roles import Order, handlers, role
from fedapp.site.settings import is_address
from fedapp.site.standing import (
    NO_VERSION,
    Agreed,
    Peer,
    certificate,
    current,
    ids_of,
    numbered,
    switch,
    unreached,
)
from fedapp.trees.divided import ActivePart

KEY_BYTES = 32
REACHED_SECONDS = 10.0  # until a process has loaded the version, and the others' answer it


@role
class Agreeing(Aligned):
    """State of a party that agrees with others on a version."""

    title = "a party that agrees on a version"
    order = Order(
        {
            # Without a version all that is known of the tables is their size.
            VerticalHelloRequest: {SwitchRequest},
            MatchRequest: {PrepareRequest},
            OrderRequest: {PrepareRequest},
            PrepareRequest: {StoreRequest},
            StoreRequest: {SwitchRequest},
        }
    )
    address: Address  # of this party
    stored: str = NO_VERSION
    replaced: str = NO_VERSION  # what the active party answers by until it switches

    def prepare(self, request: PrepareRequest, mail: Mail) -> tuple[PrepareReply, Letters]:
        """Tell the others where this party answers."""
        self.check_order(mail)
        now, _ = current(self.name)
        self.address = Address(
            self.config.standing_address,
            np.frombuffer(certificate(self.name, renews=True), np.uint8),
            self.part_digest(),
            np.frombuffer(secrets.token_bytes(KEY_BYTES), np.uint8),
            now if planned(self.site.store)["refreshes"] else NO_VERSION,
            now,
        )
        return PrepareReply(), self.to_others(self.address)

    def store(self, request: StoreRequest, mail: Mail) -> StoreReply:
        """Check what the others have sent, number the rows, and store the version."""
        addresses = {name: mail.one(Address, name) for name in self.others}
        part: ActivePart | None = self.active_part() if self.is_active else None
        drawn = {**addresses, self.name: self.address}
        for name, letter in addresses.items():
            rule = f"must be HOST:PORT, got {letter.address[:80]!r}"
            check_fields(name, letter, ("address", is_address(letter.address), rule))
            with as_protocol_error(name, "Address", "certificate"):
                check_own_certificate(letter.certificate.tobytes())
            if part is not None:
                part.check(name, letter.part)
            due, got = self.address.refreshed, letter.refreshed
            rule = f"must be {due or 'none'}, which {self.name} refreshes, got {got or 'none'}"
            check_fields(name, letter, ("refreshed", got == due, f"{rule}: activate without it"))
        is_one = len({letter.certificate.tobytes() for letter in drawn.values()}) == len(drawn)
        rule = "must be of one party, got one that another party sent too"
        check_fields(next(reversed(addresses), self.name), Address, ("certificate", is_one, rule))
        # Each party draws a part of the key, so none chooses the order.
        keys = [drawn[name].drawn.tobytes() for name in sorted(drawn)]
        ids = numbered(self.ids, keys, ids_of(self.name, self.address.refreshed))
        if len(set(ids.tolist())) < len(ids):
            rule = "ids must be new ones to be matched, got some that another activation has "
            raise DataError(f"{rule}matched meanwhile: activate again", self.name)
        peers = {
            name: Peer(letter.address, letter.certificate.tobytes().decode("ascii"))
            for name, letter in addresses.items()
        }
        self.stored, self.replaced = self.folder.name, drawn[self.active].current
        agreed = Agreed(
            *(self.stored, request.service, self.model, self.name, self.active),
            peers=peers,
            since=time.time(),
        )
        agreed.write(ids)
        return StoreReply(len(ids))

    def switch_version(self, request: SwitchRequest) -> SwitchReply:
        """Answer by the version from now on, or by none; and ask who answers the own process."""
        before = switch(self.name, self.stored, self.replaced)
        names: Sequence[str] = ()
        if self.stored and self.is_active:
            names = unreached(self.name, self.stored, REACHED_SECONDS)
        self.end()
        return SwitchReply(before, tuple(names))


HANDLERS = handlers(Agreeing)
