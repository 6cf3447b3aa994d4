"""How a site answers a message: each step once, even if it is sent twice.

The handlers of a method are listed in ``HANDLERS`` of ``clients.<module>``; the module is imported
when a message of its kind arrives. They are methods of roles (``fedapp.site.roles``), which have a
party's state and the order of its messages. A handler takes the request, and the letters if the
request carries some. It returns the reply, and the letters to send if the reply carries some::

    request       -> Reply
    request, Mail -> Reply, Letters
    request       -> Sums              if the site's sums are to be masked

Letters are opened before a handler and sealed after it, and sums are masked after it, so that no
handler depends on keys or steps.

Each answer adds a JSON line to ``$FEDAPP_HOME/answers/NAME.jsonl``: time, run, outcome, seconds and
bytes, and nothing about rows.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from fedapp.data.datasets import NAME
from fedapp.errors import DataError, ProtocolError
from fedapp.home import home, open_private, private_folder, secret_at
from fedapp.messages.fields import Reply, Request, check_extra, module_of_group
from fedapp.messages.secagg import AMONG
from fedapp.messages.wire import (
    DIVERGED,
    REFUSED,
    WAITING,
    Content,
    Envelope,
    from_bytes,
    from_content,
    n_bytes,
    parcels_of,
    to_bytes,
    to_content,
    with_parcels,
    without_parcels,
)
from fedapp.process import log_run
from fedapp.site.account import check_planned
from fedapp.site.mail import Letters, Mail, end_session, open_mail, seal_mail, write_letters
from fedapp.site.register import charge, opening, record_opened
from fedapp.site.settings import SiteConfig, check_leaving, check_policy, check_request, group_of
from fedapp.site.store import NoStateError, Store, Stores, has_begun, locked
from fedapp.site.sums import (
    Sums,
    add_noise,
    carry_over,
    check_leaves,
    check_noised,
    is_masked,
    keep,
    mask_sums,
    note_request,
)

log = logging.getLogger("fedapp.site")

Handler = Callable[..., Reply | tuple[Reply, Letters] | Sums]
Handlers = Mapping[type[Request], Handler]
Call = TypeVar("Call", bound=Callable[..., Any])
MODEL_ID = re.compile(r"[0-9a-f]{16}")
METHOD = "method"  # of the run, among a store's facts
# The last answer of a finished run, and the reply that unmasks it.
KEPT, KEPT_MASKS = "kept", "kept_masks"
OUTCOMES = {None: "answered", WAITING: "waiting", REFUSED: "refused", DIVERGED: "refused"}


@dataclass(frozen=True, slots=True)
class Site:
    """State of a handler: the site's settings and its store for one model."""

    config: SiteConfig
    store: Store

    @property
    def name(self) -> str:
        """Name of the party."""
        return self.config.name

    def entropy(self, *numbers: int, share: float = 1.0) -> list[int]:
        """Seed entropy of this party's draws; the same run draws the same rows again.

        A site that is not simulated mixes in a secret, from its node config or drawn once, so that
        nobody else can compute which rows are drawn, and draws of another `share` of the rows are
        independent. The coordinator knows `numbers`, those of the run and the round.
        """
        if self.config.draws_openly:
            return list(numbers)
        folder, secret = home() / "sites" / self.name, self.config.draws_secret.encode()
        key = secret or secret_at(folder / "draws.key", lambda: secrets.token_bytes(32))
        mixed = hmac.digest(key, repr((numbers, share)).encode(), "sha256")
        return [int.from_bytes(mixed, "big")]

    def seeds(self, seed: int, round_id: int, share: float = 1.0) -> np.random.SeedSequence:
        """Seeds of this party's draws in a round of a run."""
        party = zlib.crc32(self.name.encode())
        return np.random.SeedSequence(self.entropy(seed, round_id, party, share=share))

    def random(self, seed: int, round_id: int, share: float = 1.0) -> np.random.Generator:
        """Generator seeded with ``seeds``."""
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
    """Answer one message; returns the reply as bytes in the layout of ``wire.layout``.

    A repeated step gets the stored reply. A restarted server may go back to its last checkpoint;
    any other step out of order is a ProtocolError. Raises ConfigError for what the site does not
    allow, and WaitingError for what it does not allow yet.
    """
    request_class, handler = find_handler(kind, config.name)
    check_policy(config, kind, envelope.method)
    check_extra(envelope.method)
    request = from_content(request_class, content, config.name)
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
        # A simulated site dies with its coordinator: syncing to disk would only cost time.
        store = stores.open(folder, lasting=not config.simulated)
        store = _at_step(store, envelope, config.name, content.name)
        if store.step == envelope.step:
            return store.last_reply()
        # All messages of a run are of one method.
        if (method := store.facts.setdefault(METHOD, envelope.method)) != envelope.method:
            rule = f"must be {method}, which has begun this run"
            raise ProtocolError(config.name, content.name, "method", rule)
        reply = _last_answer(store, kind, envelope, content, config.name)
        if reply is None:
            reply = _handled(Site(config, store), handler, request, envelope, content)
            if letters := parcels_of(reply):
                reply = with_parcels(reply, seal_mail(config.name, store, envelope, letters))
            if store.finished and envelope.checkpoint:
                _keep(store, request, envelope, content, reply)
        if store.finished:
            end_session(store)
        laid_out = to_bytes(reply)
        if begins:
            record_opened(config.name, envelope.model_id)
        store.commit(envelope.step, envelope.attempt, laid_out)
        stores.committed(store)
    return laid_out


@contextmanager
def _values_stay_local(config: SiteConfig) -> Iterator[None]:
    """Log values of the table in an error locally, and remove them from what is sent."""
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
    """Check the request and call its handler; the letters of the reply are not sealed yet."""
    mail: list[Mail] = []
    check_leaves(site.name, site.store, request)
    check_noised(site.name, site.store, request)
    try:
        check_planned(site.config, site.store, request)
        if request.carries_letters:
            mail.append(open_mail(site.name, site.store, envelope, parcels_of(content)))
        with _values_stay_local(site.config):
            result = handler(site, request, *mail)
    except NoStateError as error:
        rule = f"must come later: the site has no {error.args[0]} of this model yet, or no more"
        raise ProtocolError(site.name, content.name, "step", rule) from error
    if digest := _digest(content) if is_masked(site.store) else "":
        note_request(site.name, site.store, request, digest)
    if isinstance(result, Sums):
        due = "noised" if result.noise else "sums"
        assert request.leaves == due, f"{type(request).__name__} asks for no sums"
        if result.noise:
            charge(site.config, envelope.model_id)
            arrays = add_noise(site.name, site.store, request, digest, result.arrays, result.noise)
            result = replace(result, arrays=arrays)
        result = mask_sums(site.name, site.store, envelope, request, digest, result)
    reply, letters = result if isinstance(result, tuple) else (result, [])
    assert reply.carries_letters or not letters, f"{type(reply).__name__} carries no letters"
    return to_content(reply, site.name, write_letters(site.name, letters))


def _keep(
    store: Store, asked: Request, envelope: Envelope, request: Content, reply: Content
) -> None:
    """Keep the reply that ended the run, with its letters sealed; the rows are deleted now."""
    name = KEPT_MASKS if asked.leaves == "masks" else KEPT
    if name not in store.facts:
        store.facts[name] = [asked.kind, envelope.attempt, _digest(request)]
        store[name] = np.frombuffer(to_bytes(reply), dtype=np.uint8)


def _last_answer(
    store: Store, kind: str, envelope: Envelope, request: Content, party: str
) -> Content | None:
    """The kept reply, if a restarted server asks for it again; otherwise None."""
    for name in (KEPT, KEPT_MASKS):
        last_kind, attempt, digest = store.facts.get(name, ("", 0, ""))
        if last_kind != kind or envelope.attempt <= attempt:
            continue
        if digest != _digest(request):
            rule = "must be what it was when the run ended"
            raise ProtocolError(party, request.name, "content", rule)
        return from_bytes(store[name].tobytes(), party)
    return None


def _digest(request: Content) -> str:
    """SHA-256 of a request without its letters and without `among`."""
    content = without_parcels(request)
    scalars = {name: one for name, one in content.scalars.items() if name != AMONG}
    return hashlib.sha256(to_bytes(Content(content.name, scalars, content.arrays))).hexdigest()


def find_handler(kind: str, party: str) -> tuple[type[Request], Handler]:
    """Request class and handler of a message kind; raises ProtocolError for an unknown kind."""
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
        current = store
        if store.step > envelope.checkpoint:
            store = store.roll_back(envelope.checkpoint) or store
            if store.finished:
                # The run has ended: its kept reply answers.
                store.step = envelope.step - max(envelope.gap, 1)
        store = carry_over(store, before=current)
        store.facts["starts"] = starts
    # A restarted server does not know yet when it last asked this site: its gap is 0.
    in_order = store.step == before or (not envelope.gap and 0 < store.step < envelope.step)
    if store.step != envelope.step and not in_order:
        rule = f"must be {store.step + envelope.gap}, got {envelope.step}"
        if not store.step:
            rule = "must be 1: the site has no state of this model, or has lost it"
        raise ProtocolError(party, message, "step", rule)
    if 0 < store.step <= envelope.checkpoint and not store.finished:
        keep(store, envelope.checkpoint)
    return store


def answers_file(name: str) -> Path:
    """Path of a site's log."""
    return home() / "answers" / f"{name}.jsonl"


def log_answers(answer: Call) -> Call:
    """Wrap a ClientApp's call to log each answer, except in simulation."""

    @wraps(answer)
    def call(app: Any, message: Any, context: Any) -> Any:
        name = str(context.node_config.get("name"))
        if "data" not in context.node_config or not NAME.fullmatch(name):
            return answer(app, message, context)
        log_run(message.metadata.run_id)
        began, reply = time.perf_counter(), answer(app, message, context)
        error = reply.error.code if reply.has_error() else None
        line = {
            "time": round(time.time(), 3),
            "run": str(message.metadata.run_id),
            "outcome": OUTCOMES.get(error, "failed"),
            "seconds": round(time.perf_counter() - began, 4),
            "received": n_bytes(message.content),
            "sent": 0 if error else n_bytes(reply.content),
        }
        private_folder(answers_file(name).parent)
        with open_private(answers_file(name), "a") as file:
            file.write(json.dumps(line) + "\n")
        return reply

    return cast(Call, call)
