"""How a site answers a message: each step once, even if it is sent twice.

The handlers of a method are listed in ``HANDLERS`` of ``clients.<module>``; the module is imported
when a message of its kind arrives. They are methods of roles (``fedapp.site.roles``), which have a
party's state and the order of its messages. A handler takes the request, and the letters if the
request carries some. It returns the reply, and the letters to send if the reply carries some::

    request       -> Reply
    request, Mail -> Reply, Letters
    request       -> Sums              masked if the plan that opened the run says so

Letters are opened before a handler and sealed after it, and sums are masked after it, so that no
handler depends on keys or steps. What is masked follows from the plan, and from nothing that a
request has or a handler returns. What comes in is compared with the site's limits and with the
account of the run (``site.account``) before any handler sees it; a message that is refused, there
or by its handler, changes nothing on disk.

Before an answer is stored, and so before it leaves, a line of it is in the site's log
(``fedapp.site.log``), as is one of each refusal; not in a simulation. Lines have names, shapes and
numbers of bytes, and no value of a table.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from fedapp.crypto.sealed import LARGEST_ATTEMPT, LARGEST_STEP
from fedapp.errors import ConfigError, DataError, FedappError, ProtocolError, as_plain
from fedapp.home import home, secret_at
from fedapp.messages.fields import Reply, Request
from fedapp.messages.handshake import Plan
from fedapp.messages.methods import check_extra, module_of_group
from fedapp.messages.secagg import AMONG
from fedapp.messages.vertical import Parcel, Parcels, pack_parcels, unpack_parcels
from fedapp.messages.wire import (
    ENVELOPE,
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
from fedapp.process import OutOfTime, time_limit
from fedapp.site.account import (
    Ending,
    account_of,
    begin_checkpoint,
    check,
    disclosed,
    is_question,
    note,
    open_account,
    planned,
    position_of,
    take,
)
from fedapp.site.log import append, drop_old
from fedapp.site.mail import Letters, Mail, end_session, open_mail, seal_mail, write_letters
from fedapp.site.policy import check_leaving, check_message, check_policy, group_of
from fedapp.site.register import charge, opening, record_ended, record_opened
from fedapp.site.settings import SiteConfig
from fedapp.site.store import REPLY, SENT, NoStateError, Store, Stores, has_begun
from fedapp.site.sums import (
    Sums,
    add_noise,
    check_among,
    check_leaves,
    forget_pending,
    has_roster,
    mask_sums,
)

log = logging.getLogger("fedapp.site")

Result = Reply | tuple[Reply, Letters] | Sums
Handler = Callable[..., Result]
Handlers = Mapping[type[Request], Handler]
MODEL_ID = re.compile(r"[0-9a-f]{16}")
# Arrays of a finished run: its last reply, and the one that unmasks it.
ENDED, ENDED_MASKS = "ended", "ended_masks"
LONGEST_KIND, LONGEST_REASON = 80, 1000  # characters of what comes from outside, in the log


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
        folder = home() / "sites" / self.name
        secret = self.config.draws_secret.encode()
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


@dataclass(frozen=True, slots=True)
class TableRows:
    """Record of a run: rows of the table that it is about."""

    n: int


# Steps, gaps, attempts, and rollback
#
# A run is one conversation. The server numbers its exchanges 1, 2, 3, ...; the number is a
# message's *step*. A message may be lost or come twice, and the server and any site may die at any
# moment. The model must be the same, and a site must not disclose more than in a run without
# faults. Four rules ensure both.
#
# 1. A step takes effect once. What a step has changed and the reply are stored together, in one
#    entry of the site's journal (``Store.commit``). If the message comes again, the stored reply
#    is the answer; no handler runs.
#
# 2. No step is skipped. Not every party is asked in every exchange, so the steps of a site have
#    gaps. The *gap* of a message is the number of steps since the server last asked this party:
#
#        step     1    2    3    4    5    6
#        bank     x    x    x              x     gap at step 6: 3, so its last step must be 3
#        shop     x    x         x         x     gap at step 6: 2, so its last step must be 4
#
#    If the site's last step is another one, either side has lost a state. The message is refused.
#
# 3. A restarted server continues from its checkpoint, and so does every site. Each message names
#    the step of the server's last *checkpoint*. A site whose own last step is not later has not
#    changed since: it marks its state before this message as the state of the checkpoint. Each
#    start of the server is an *attempt*. The first message of a later attempt makes a site return
#    to the marked state if it has gone beyond it:
#
#        attempt 0   1    2    3 | 4    5  (the server dies; its checkpoint was after step 3)
#        attempt 1               | 4    5    6
#
#    The restarted server does not know which sites have seen its steps 4 and 5, so the gaps of its
#    first messages are 0: any earlier step may be the site's last.
#
#    A rollback does not undo the account of what the site has disclosed (``SURVIVES``): a server
#    could otherwise ask one question twice and compare two answers. A repeated question gets the
#    same answer, with the same random letters (``_as_before``); another one in its place is
#    refused, unless the plan of the run allows ``restarts`` (``account.take``).
#
# 4. A run ends once. With its last step, a site deletes its rows, keys and marked state. It keeps
#    the reply, which may have been lost, for a server that asks again in a later attempt
#    (``_keep``, ``_last_answer``).


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
    check_message(config, request, config.name, envelope.method)
    check_leaving(config, envelope.method, request)
    if not MODEL_ID.fullmatch(envelope.model_id):
        raise ProtocolError(config.name, content.name, "model-id", "must be 16 hex digits")
    folder = _folder_of(home(), config.name, envelope.model_id)
    log_reply = partial(_log_reply, config, request, envelope, content, time.perf_counter())
    if not request.is_step:
        stateless = Site(config, Store(folder))
        content = _handled(stateless, handler, request, envelope, content)
        log_reply(stateless.store, laid_out := to_bytes(content), content)
        return laid_out
    begins = not config.simulated and not has_begun(folder)
    with (
        opening(config, envelope.model_id, envelope.method, request) if begins else nullcontext(),
        _locked(stores, folder, begins),
    ):
        # A simulated site dies with its coordinator: syncing to disk would only cost time.
        store = stores.open(folder, lasting=not config.simulated)
        store = _at_step(store, envelope, config.name, content.name)
        if store.step == envelope.step:
            if store.finished:
                stores.ended(folder)
            laid_out = store.read_bytes(REPLY)
            log_reply(store, laid_out)
            return laid_out
        had_finished = store.finished
        # Until the answer is there, a checkpoint is not written either.
        is_new = 0 < store.step <= envelope.checkpoint and not store.finished
        number = position_of(store).number
        store.may_roll_back |= is_new
        # All messages of a run are of one method.
        if (method := account_of(store).method or envelope.method) != envelope.method:
            rule = f"must be {method}, which has begun this run"
            raise ProtocolError(config.name, content.name, "method", rule)
        note(store, method=method)
        reply = _last_answer(store, kind, envelope, content, config.name)
        if reply is None:
            reply = _handled(Site(config, store), handler, request, envelope, content)
            if letters := parcels_of(reply):
                reply = with_parcels(reply, seal_mail(config.name, store, envelope, letters))
            laid_out = to_bytes(reply)
            if store.finished and envelope.checkpoint:
                _keep(store, request, envelope, content, laid_out)
            if begins:
                store.put(TableRows(record_opened(config.name, envelope.model_id)))
                drop_old(folder.parent, config.log_days)
            log_reply(store, laid_out, reply)
            if store.finished and not (had_finished or config.simulated):
                record_ended(config.name, envelope.model_id, position_of(store).number)
        else:
            laid_out = to_bytes(reply)
            log_reply(store, laid_out)
        if store.finished:
            end_session(store)
        if is_new:
            begin_checkpoint(store, number)
        mark = envelope.checkpoint if is_new else None
        store.commit(envelope.step, envelope.attempt, laid_out, mark, stores.defers)
        if store.finished:
            stores.ended(folder)
    return laid_out


@lru_cache
def _folder_of(home: Path, name: str, model_id: str) -> Path:
    return home / "sites" / name / model_id


@contextmanager
def _locked(stores: Stores, folder: Path, begins: bool) -> Iterator[None]:
    """Lock a run's folder; it goes again where the run is refused before it has begun."""
    with stores.locked(folder):
        try:
            yield
        except FedappError:
            if begins and not has_begun(folder):
                rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def _in_bounds(config: SiteConfig, kind: str) -> Iterator[None]:
    """Bounds on a real site's work for a request.

    Values of the table in an error are logged, and removed from what is sent. Work that takes
    longer than the site allows is ended, and nothing of it is kept.
    """
    try:
        with time_limit(config.most_seconds):
            yield
    except DataError as error:
        if error.here == error.rule:
            raise
        log.error("%s", error)
        raise error.for_others(shares_names=True) from None
    except OutOfTime:
        most = f"{config.most_seconds} s (most-seconds in the node config of {config.name})"
        raise ConfigError(f"{kind} must be answered within {most}, got more to do") from None


def _handled(
    site: Site, handler: Handler, request: Request, envelope: Envelope, content: Content
) -> Content:
    """Check the request and call its handler; the letters of the reply are not sealed yet."""
    config, store = site.config, site.store
    mail: list[Mail] = []
    check_leaves(site.name, store, request)
    try:
        if isinstance(request, Plan):
            open_account(config, store, request)
        if (leaves := disclosed(store, request)) != request.leaves:
            check_leaving(config, envelope.method, request, leaves)
        if request.carries_letters:
            mail.append(open_mail(site.name, store, envelope, parcels_of(content)))
        letters = [pair for inbox in mail for pair in inbox.decoded(envelope.method, type(request))]
        for sender, letter in letters:
            check_message(config, letter, sender, envelope.method)
        check(config, store, request, letters)
        check_among(site.name, store, request, leaves)
        digest, is_known = "", False
        if not config.simulated or leaves in ("sums", "noised") or has_roster(store):
            digest = _digest(content, mail)
            is_known = take(config, store, request, digest, letters)
        with nullcontext() if config.simulated else _in_bounds(config, request.kind):
            result = handler(site, request, *mail)
        reply, sent = _leaving(site, request, leaves, envelope, digest, result)
    except NoStateError as error:
        rule = f"must come later: the site has no {error.args[0]} of this model yet, or no more"
        raise ProtocolError(site.name, content.name, "step", rule) from error
    assert reply.carries_letters or not sent, f"{type(reply).__name__} carries no letters"
    written = write_letters(site.name, sent)
    if written and not config.simulated and is_question(request):
        written = _as_before(store, written, is_known)
    return to_content(reply, site.name, written)


def _leaving(
    site: Site, request: Request, leaves: str, envelope: Envelope, digest: str, result: Result
) -> tuple[Reply, Letters]:
    """What leaves the site of a handler's result: by the plan, sums under masks or as they are."""
    if leaves not in ("sums", "noised"):
        if isinstance(result, Sums):
            assert result.reply is not None, f"{type(request).__name__} asks for no sums"
            result = result.reply(*result.arrays)
        return result if isinstance(result, tuple) else (result, [])
    assert isinstance(result, Sums), f"{type(request).__name__} must be answered by sums"
    assert bool(result.noise) == (leaves == "noised"), "noise must be as the request says"
    if result.noise:
        arrays = add_noise(site.name, site.store, request, result.arrays, result.noise)
        result = replace(result, arrays=arrays)
    masked = mask_sums(site.name, site.store, envelope, request, digest, result)
    if result.noise:  # nothing refuses it from here on
        charge(site.config, envelope.model_id)
    return masked, []


def _as_before(store: Store, written: list[Parcel], is_known: bool) -> list[Parcel]:
    """The letters of an answer, as they were when a rollback repeats its question.

    They may be random, and another answer to the same question would tell the two apart.
    """
    name = f"{SENT}{position_of(store).number}"
    if is_known and name in store:
        content = from_bytes(store.read_bytes(name), "site")
        return unpack_parcels(from_content(Parcels, content, "site"))
    if store.may_roll_back:
        store.write_bytes(name, to_bytes(to_content(pack_parcels(written), "site")))
    return written


def _keep(store: Store, asked: Request, envelope: Envelope, request: Content, reply: bytes) -> None:
    """Keep the reply that ended the run, with its letters sealed; the rows are deleted now."""
    name = ENDED_MASKS if asked.leaves == "masks" else ENDED
    if name not in (endings := account_of(store).endings):
        ending = Ending(asked.kind, envelope.attempt, _digest(request))
        note(store, endings={**endings, name: ending})
        store.write_bytes(name, reply)


def _last_answer(
    store: Store, kind: str, envelope: Envelope, request: Content, party: str
) -> Content | None:
    """The kept reply, if a restarted server asks for it again; otherwise None."""
    for name, ending in account_of(store).endings.items():
        if ending.kind != kind or envelope.attempt <= ending.attempt:
            continue
        if ending.digest != _digest(request):
            rule = "must be what it was when the run ended"
            raise ProtocolError(party, request.name, "content", rule)
        return from_bytes(store.read_bytes(name), party)
    return None


def _digest(request: Content, mail: Sequence[Mail] = ()) -> str:
    """SHA-256 of a request without `among`, and with its letters as they were written."""
    content = without_parcels(request)
    scalars = {name: value for name, value in content.scalars.items() if name != AMONG}
    digest = hashlib.sha256(to_bytes(Content(content.name, scalars, content.arrays)))
    for letters in mail:
        letters.add_to(digest)
    return digest.hexdigest()


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
    for name, got, least, most in (
        ("step", envelope.step, 1, LARGEST_STEP),
        ("attempt", envelope.attempt, store.attempt, LARGEST_ATTEMPT),
    ):
        if got < least:
            raise ProtocolError(party, message, name, f"must be {least} or more, got {got}")
        if got > most:
            raise ProtocolError(party, message, name, f"must be <= {most}, got {got}")
    before = envelope.step - envelope.gap
    if envelope.attempt > store.attempt:
        starts = (*account_of(store).starts, (envelope.attempt, envelope.checkpoint))
        if store.step > envelope.checkpoint:
            store = store.roll_back(envelope.checkpoint) or store
            if store.finished:
                # The run has ended: its kept reply answers.
                store.step = envelope.step - max(envelope.gap, 1)
        forget_pending(store)
        note(store, starts=starts)
    # A restarted server does not know yet when it last asked this site: its gap is 0.
    in_order = store.step == before or (not envelope.gap and 0 < store.step < envelope.step)
    if store.step != envelope.step and not in_order:
        rule = f"must be {store.step + envelope.gap}, got {envelope.step}"
        if not store.step:
            rule = "must be 1: the site has no state of this model, or has lost it"
        raise ProtocolError(party, message, "step", rule)
    return store


def _log_reply(
    config: SiteConfig,
    request: Request,
    envelope: Envelope,
    content: Content,
    began: float,
    store: Store,
    laid_out: bytes,
    reply: Content | None = None,
) -> None:
    """Write a line of a reply that is about to be stored and sent; without `reply`, sent again."""
    if config.simulated:
        return
    line: dict[str, Any] = {"run": envelope.model_id, "kind": request.kind, "step": envelope.step}
    if reply is not None:
        values = {**reply.scalars, **reply.arrays}
        rows, leaves = store.find(TableRows), disclosed(store, request)
        line |= {
            "question": position_of(store).number,  # of the account
            "leaves": leaves,
            "rows": rows.n if rows else 0,
            "masked": leaves in ("sums", "noised"),
            "epsilon": planned(store)["epsilon"] if leaves == "noised" else 0.0,
            "letters_to": reply.scalars.get("peers", []),
            "fields": {name: list(np.shape(value)) for name, value in values.items()},
        }
    event, seconds = "repeated" if reply is None else "answered", _since(began)
    sizes = {"received": content.size, "sent": len(laid_out)}
    append(home() / "sites" / config.name, event, **line, **sizes, seconds=seconds)


def log_refusal(name: str, message: Any, error: Exception, text: str, began: float) -> None:
    """Write a line of a message that a site refuses, or fails to answer; `text` is sent."""
    model_id = str((message.content.get(ENVELOPE) or {}).get("model-id"))
    line = {
        "run": model_id if MODEL_ID.fullmatch(model_id) else "",
        "kind": as_plain(message.metadata.message_type, LONGEST_KIND),
        "error": type(error).__name__,
        "reason": as_plain(text, LONGEST_REASON),
        "received": n_bytes(message.content),
    }
    event = "refused" if isinstance(error, FedappError) else "failed"
    append(home() / "sites" / name, event, **line, seconds=_since(began))


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 4)
