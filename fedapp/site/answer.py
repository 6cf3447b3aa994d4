"""How a site answers a message: once a step, whatever is sent twice.

A method's handlers are functions in ``clients.<module>``, listed there in ``HANDLERS``; the module
is imported when a message of its kind arrives. A handler gets the site and the request, and with a
request that carries letters also the letters that have come; it gives back the reply, and with a
reply that carries letters also those to send::

    (Site, Request)       -> Reply
    (Site, Request, Mail) -> Reply, Letters
    (Site, Request)       -> Sums              where the site's own are to be masked

Letters are opened before a handler and sealed after it, and sums are masked after it, so that none
knows of a key or a step.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module

import numpy as np

from fedapp.errors import DataError, ProtocolError, blaming
from fedapp.home import home, secret_at
from fedapp.messages.fields import Reply, Request
from fedapp.messages.methods import module_of_group
from fedapp.messages.secure import AMONG
from fedapp.packages import check_extra
from fedapp.site.config import SiteConfig
from fedapp.site.mail import Letters, Mail, end_session, open_mail, seal_mail, write_letters
from fedapp.site.masks import Sums, check_leaves, is_masked, masked, note_request
from fedapp.site.noise import check_noised, noised
from fedapp.site.plan import check_planned
from fedapp.site.policy import check_leaving, check_policy, check_request, group_of
from fedapp.site.register import note_begun, opening
from fedapp.site.shares import go_back, keep
from fedapp.site.store import NoStateError, Store
from fedapp.site.stores import Stores, has_begun, locked
from fedapp.wire.codec import Envelope
from fedapp.wire.content import (
    Content,
    enclose,
    enclosed,
    put_together,
    take_apart,
    without_parcels,
)
from fedapp.wire.layout import from_bytes, to_bytes

log = logging.getLogger("fedapp.site")

Handler = Callable[..., Reply | tuple[Reply, Letters] | Sums]
MODEL_ID = re.compile(r"[0-9a-f]{16}")
METHOD = "method"  # of the run, in a store's facts
# The last answer of a finished run, and what takes the masks off it.
KEPT, KEPT_MASKS = "kept", "kept_masks"
_LEAVES = ("sums", "noised")  # what a request asks for whose sums have noise: without, with


@dataclass(frozen=True, slots=True)
class Site:
    """What a handler works with: the site's table settings and its state for one model."""

    config: SiteConfig
    store: Store

    @property
    def name(self) -> str:
        """Name of the party."""
        return self.config.name

    @property
    def others(self) -> list[str]:
        """Names of the other parties of a vertical run."""
        return [name for name in self.store.facts["peers"] if name != self.name]

    def entropy(self, *numbers: int, share: float = 1.0) -> list[int]:
        """What draws of this party's rows begin with; the same run draws the same again.

        At a site that is not simulated a secret is mixed in, that of its node config or one drawn
        once, so that nobody else can tell which rows are drawn, and draws of other shares have
        nothing in common.

        Parameters
        ----------
        numbers : of the run and the round, which the coordinator knows.
        share : of the rows that are drawn.
        """
        if self.config.draws_openly:
            return list(numbers)
        folder, secret = home() / "sites" / self.name, self.config.draws_secret.encode()
        key = secret or secret_at(folder / "draws.key", lambda: secrets.token_bytes(32))
        mixed = hmac.digest(key, repr((numbers, share)).encode(), "sha256")
        return [int.from_bytes(mixed, "big")]

    def seeds(self, seed: int, round_id: int, share: float = 1.0) -> np.random.SeedSequence:
        """Of this party's own draws in a round of a run."""
        own = zlib.crc32(self.name.encode())
        return np.random.SeedSequence(self.entropy(seed, round_id, own, share=share))

    def random(self, seed: int, round_id: int, share: float = 1.0) -> np.random.Generator:
        """The draws that begin with ``seeds``."""
        return np.random.default_rng(self.seeds(seed, round_id, share))


ON_DISK = Stores()


def answer(
    config: SiteConfig, kind: str, envelope: Envelope, content: Content, stores: Stores = ON_DISK
) -> Content:
    """Answer one message; see ``answered``."""
    return from_bytes(answered(config, kind, envelope, content, stores), config.name)


def answered(
    config: SiteConfig, kind: str, envelope: Envelope, content: Content, stores: Stores = ON_DISK
) -> bytes:
    """Answer one message, with the reply as ``wire.layout`` lays it out.

    A repeated step gets the stored reply. A server that was started again may go back to its last
    checkpoint; any other step out of order is refused.

    Parameters
    ----------
    stores : where the site's state is between two messages.

    Raises
    ------
    ProtocolError : unknown kind, broken message, or a step out of order.
    DataError, ConfigError : the site cannot do what is asked, or does not allow it.
    WaitingError : it does not allow it yet.
    """
    request_class, handler = find_handler(kind, config.name)
    check_policy(config, kind, envelope.method)
    check_extra(envelope.method)
    request = put_together(request_class, content, config.name)
    check_request(config, request)
    check_leaving(config, envelope.method, request)
    if not MODEL_ID.fullmatch(envelope.model_id):
        raise ProtocolError(config.name, content.name, "model-id", "must be 16 hex digits")
    folder = home() / "sites" / config.name / envelope.model_id
    if not request.is_step:
        return to_bytes(_handled(Site(config, Store(folder)), handler, request, envelope, content))
    begins = not config.simulated and not has_begun(folder)
    run = config, envelope.model_id, envelope.method, request
    with opening(*run) if begins else nullcontext(), locked(folder):
        # A simulated site dies with its coordinator, and would wait for the disk in every exchange.
        kept = stores.open(folder, lasting=not config.simulated)
        store = _at_step(kept, envelope, config.name, content.name)
        if store.step == envelope.step:
            return store.last_reply()
        # A model is one method's from its first message to its last.
        if (begun := store.facts.setdefault(METHOD, envelope.method)) != envelope.method:
            rule = f"must be {begun}, which has begun this run"
            raise ProtocolError(config.name, content.name, "method", rule)
        reply = _told_before(store, kind, envelope, content, config.name)
        if reply is None:
            reply = _handled(Site(config, store), handler, request, envelope, content)
            if letters := enclosed(reply):
                reply = enclose(reply, seal_mail(config.name, store, envelope, letters))
            if store.finished and envelope.checkpoint:
                _keep(store, request, envelope, content, reply)
        if store.finished:
            end_session(store)
        laid_out = to_bytes(reply)
        if begins:
            note_begun(config.name, envelope.model_id)
        store.commit(envelope.step, envelope.attempt, laid_out)
        stores.committed(store)
    return laid_out


@contextmanager
def _kept_here(config: SiteConfig) -> Iterator[None]:
    """What an error says of a table's values goes into the site's own log, and no further."""
    try:
        yield
    except DataError as error:
        if config.simulated or error.here == error.rule:
            raise
        log.error("%s", error)
        raise error.for_others(shares_names=True) from None


def _handled(
    site: Site, handler: Handler, request: Request, envelope: Envelope, content: Content
) -> Content:
    """What the handler answers, with its letters as they are, not sealed yet."""
    given: list[Mail] = []
    check_leaves(site.name, site.store, request)
    check_noised(site.name, site.store, request)
    try:
        check_planned(site.config, site.store, request)
        if request.carries_letters:
            with blaming(site.name, content.name, "parcels"):
                parcels = enclosed(content)
            given.append(open_mail(site.name, site.store, envelope, parcels))
        with _kept_here(site.config):
            found = handler(site, request, *given)
    except NoStateError as error:
        rule = f"must come later: the site has no {error.args[0]} of this model yet, or no more"
        raise ProtocolError(site.name, content.name, "step", rule) from error
    if digest := _digest(content) if is_masked(site.store) else "":
        note_request(site.name, site.store, request, digest)
    if isinstance(found, Sums):
        assert request.leaves == _LEAVES[bool(found.noise)], (
            f"{type(request).__name__} asks for no sums"
        )
        if found.noise:
            given_noise = request, digest, found.arrays, found.noise
            found = replace(found, arrays=noised(site.name, site.store, *given_noise))
        found = masked(site.name, site.store, envelope, request, digest, found)
    reply, letters = found if isinstance(found, tuple) else (found, [])
    assert reply.carries_letters or not letters, f"{type(reply).__name__} carries no letters"
    return take_apart(reply, site.name, write_letters(site.name, letters))


# The last answer, for a server started anew from a checkpoint before it


def _keep(
    store: Store, asked: Request, envelope: Envelope, request: Content, reply: Content
) -> None:
    """Keep the answer that ended the run, whose rows are forgotten now; its letters are sealed."""
    name = KEPT_MASKS if asked.leaves == "masks" else KEPT
    if name not in store.facts:
        store.facts[name] = [asked.kind, envelope.attempt, _digest(request)]
        store[name] = np.frombuffer(to_bytes(reply), dtype=np.uint8)


def _told_before(
    store: Store, kind: str, envelope: Envelope, request: Content, party: str
) -> Content | None:
    """What was kept, where a later start of the server asks for it again."""
    for name in (KEPT, KEPT_MASKS):
        kept_kind, attempt, digest = store.facts.get(name, ("", 0, ""))
        if kept_kind != kind or envelope.attempt <= attempt:
            continue
        if digest != _digest(request):
            rule = "must be what it was when the run ended"
            raise ProtocolError(party, request.name, "content", rule)
        return from_bytes(store[name].tobytes(), party)
    return None


def _digest(request: Content) -> str:
    """Of a request's own fields, whatever letters it carries, and whoever is left."""
    own = without_parcels(request)
    scalars = {name: one for name, one in own.scalars.items() if name != AMONG}
    return hashlib.sha256(to_bytes(Content(own.name, scalars, own.arrays))).hexdigest()


# Finding the handler, and the state to answer from


def find_handler(kind: str, party: str) -> tuple[type[Request], Handler]:
    """The request class and the function of a message kind.

    Raises
    ------
    ProtocolError : no method has such a message.
    """
    if messages := module_of_group(group_of(kind)):
        # A method's messages and their handlers are in files of one name.
        handlers = import_module(f"clients.{messages.__name__.rpartition('.')[2]}").HANDLERS
        for request_class, handler in handlers.items():
            if request_class.kind == kind:
                return request_class, handler
    raise ProtocolError(party, "message", "kind", f"must be known, got {kind!r}")


def _at_step(store: Store, envelope: Envelope, party: str, message: str) -> Store:
    """The state to answer from: just before the step, or just after it."""
    if envelope.step < 1:
        raise ProtocolError(party, message, "step", f"must be 1 or more, got {envelope.step}")
    if envelope.attempt < store.attempt:
        rule = f"must be {store.attempt} or more, got {envelope.attempt}"
        raise ProtocolError(party, message, "attempt", rule)
    before = envelope.step - envelope.gap
    if envelope.attempt > store.attempt:
        starts = [*store.facts.get("starts", ()), [envelope.attempt, envelope.checkpoint]]
        old = store
        if store.step > envelope.checkpoint:
            store = store.roll_back(envelope.checkpoint) or store
            if store.finished:
                # What was kept of the result answers.
                store.step = envelope.step - max(envelope.gap, 1)
        store = go_back(store, before=old)
        store.facts["starts"] = starts
    # A server started anew does not know yet whom it asks, and so not when it last did.
    in_order = store.step == before or (not envelope.gap and 0 < store.step < envelope.step)
    if store.step != envelope.step and not in_order:
        rule = f"must be {store.step + envelope.gap}, got {envelope.step}"
        if not store.step:
            rule = "must be 1: the site has no state of this model, or has lost it"
        raise ProtocolError(party, message, "step", rule)
    if 0 < store.step <= envelope.checkpoint and not store.finished:
        keep(store, envelope.checkpoint)
    return store
