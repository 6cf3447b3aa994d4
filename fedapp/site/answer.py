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
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from typing import Annotated, Any

import numpy as np

from fedapp.cluster import workers_at
from fedapp.crypto.sealed import LARGEST_ATTEMPT, LARGEST_STEP
from fedapp.crypto.workers import sharing
from fedapp.data.scratch import mapping
from fedapp.errors import ConfigError, DataError, FedappError, ProtocolError, as_plain
from fedapp.home import home, secret_at
from fedapp.messages.fields import Reply, Request, check_fields
from fedapp.messages.handshake import Plan
from fedapp.messages.methods import check_extra, module_of_group
from fedapp.messages.secagg import AMONG
from fedapp.messages.vertical import Parcel
from fedapp.messages.wire import (
    ENVELOPE,
    Content,
    Envelope,
    from_content,
    n_bytes,
    parcels_of,
    to_bytes,
    to_content,
    with_parcels,
    without_parcels,
)
from fedapp.process import OutOfTime, time_limit
from fedapp.records.codec import IN_FILE, codec_of
from fedapp.site.account import (
    Ending,
    account_of,
    begin_checkpoint,
    check,
    disclosed,
    is_masked,
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
LETTERS = codec_of(tuple[tuple[str, Annotated[bytes, IN_FILE]], ...])  # receiver and content
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


@dataclass(frozen=True, slots=True)
class Asked:
    """A message that the site's policy allows, as received and as read."""

    config: SiteConfig
    request: Request
    handler: Handler
    envelope: Envelope
    content: Content
    began: float  # when it was received, on the clock of ``time.perf_counter``


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
# faults. Four rules ensure both, and ``answered`` follows them in this order.
#
# 1. A restarted server continues from its checkpoint, and so does every site. Each message names
#    the step of the server's last *checkpoint*. A site whose own last step is not later has not
#    changed since: it marks its state before this message as the state of the checkpoint. Each
#    start of the server is an *attempt*. The first message of a later attempt makes a site return
#    to the marked state if it has gone beyond it (``_resumed``):
#
#        attempt 0   1    2    3 | 4    5  (the server dies; its checkpoint was after step 3)
#        attempt 1               | 4    5    6
#
#    A rollback does not undo the account of what the site has disclosed (``SURVIVES``): a server
#    could otherwise ask one question twice and compare two answers. A repeated question gets the
#    same answer, with the same random letters (``_as_before``); another one in its place is
#    refused, unless the plan of the run allows ``restarts`` (``account.take``).
#
# 2. A step takes effect once. What a step has changed and the reply are stored together, in one
#    entry of the site's journal (``Store.commit``). If the message comes again, the stored reply
#    is the answer; no handler runs.
#
# 3. No step is skipped. Not every party is asked in every exchange, so the steps of a site have
#    gaps. The *gap* of a message is the number of steps since the server last asked this party:
#
#        step     1    2    3    4    5    6
#        bank     x    x    x              x     gap at step 6: 3, so its last step must be 3
#        shop     x    x         x         x     gap at step 6: 2, so its last step must be 4
#
#    If the site's last step is another one, either side has lost a state. The message is refused
#    (``_check_in_order``). A restarted server does not know which sites have seen its steps 4 and
#    5, so the gaps of its first messages are 0: any earlier step may be the site's last.
#
# 4. A run ends once. With its last step, a site deletes its rows, keys and marked state. It keeps
#    the reply, which may have been lost, for a server that asks again in a later attempt
#    (``_keep``, ``_last_answer``).


@mapping()
def answered(
    config: SiteConfig, kind: str, envelope: Envelope, content: Content, stores: Stores = ON_DISK
) -> bytes:
    """Answer one message; returns the reply as bytes in the layout of ``wire.layout``.

    A repeated step gets the stored reply. A restarted server may go back to its last checkpoint;
    any other step out of order is a ProtocolError. Raises ConfigError for what the site does not
    allow, and WaitingError for what it does not allow yet.
    """
    asked = _allowed(config, kind, envelope, content)
    folder = _folder_of(home(), config.name, envelope.model_id)
    if not asked.request.is_step:
        return _new_answer(Store(folder), asked)
    begins = not config.simulated and not has_begun(folder)
    admitted = opening(config, envelope.model_id, envelope.method, asked.request)
    with admitted if begins else nullcontext(), _locked(stores, folder, begins):
        # A simulated site dies with its coordinator: syncing to disk would only cost time.
        store = stores.open(folder, lasting=not config.simulated)
        # 1. A restarted server continues from its checkpoint, and so does the site.
        store = _resumed(store, asked)
        _check_disclosed(store, asked)
        marks = 0 < store.step <= envelope.checkpoint and not store.finished
        number = position_of(store).number
        # 2. A step takes effect once.
        if store.step == envelope.step:
            reply = _stored_reply(store, asked, REPLY)
        else:
            # 3. No step is skipped.
            _check_in_order(store, asked)
            note(store, method=envelope.method)
            store.may_roll_back |= marks
            # 4. A run ends once.
            reply = _last_answer(store, asked) or _new_answer(store, asked, begins)
            if store.finished:
                end_session(store)
            # Until the answer is there, a checkpoint is not written either.
            if marks:
                begin_checkpoint(store, number)
            mark = envelope.checkpoint if marks else None
            store.commit(envelope.step, envelope.attempt, reply, mark, stores.defers)
        if store.finished:
            stores.ended(folder)
    return reply


def _allowed(config: SiteConfig, kind: str, envelope: Envelope, content: Content) -> Asked:
    """Read a message; raises ConfigError or ProtocolError if the site's policy forbids it."""
    request_class, handler = find_handler(kind, config.name)
    check_policy(config, kind, envelope.method)
    check_extra(envelope.method)
    request = from_content(request_class, content, config.name)
    check_message(config, request, config.name, envelope.method)
    check_leaving(config, envelope.method, request)
    if not MODEL_ID.fullmatch(envelope.model_id):
        raise ProtocolError(config.name, content.name, "model-id", "must be 16 hex digits")
    return Asked(config, request, handler, envelope, content, time.perf_counter())


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


def _resumed(store: Store, asked: Asked) -> Store:
    """The state from which a message of this attempt of the server is answered."""
    envelope = asked.envelope
    step, attempt, least = envelope.step, envelope.attempt, store.attempt
    check_fields(
        asked.config.name,
        asked.content.name,
        ("step", step >= 1, f"must be 1 or more, got {step}"),
        ("step", step <= LARGEST_STEP, f"must be <= {LARGEST_STEP}, got {step}"),
        ("attempt", attempt >= least, f"must be {least} or more, got {attempt}"),
        ("attempt", attempt <= LARGEST_ATTEMPT, f"must be <= {LARGEST_ATTEMPT}, got {attempt}"),
    )
    if attempt == least:
        return store
    starts = (*account_of(store).starts, (attempt, envelope.checkpoint))
    if store.step > envelope.checkpoint:
        store = store.roll_back(envelope.checkpoint) or store
        if store.finished:
            # The run has ended: its kept reply answers.
            store.step = step - max(envelope.gap, 1)
    forget_pending(store)
    note(store, starts=starts)
    return store


def _check_disclosed(store: Store, asked: Asked) -> None:
    """Compare what the run discloses with the site's policy, which may have changed since.

    Also before an earlier answer is sent again, whatever kind of message asks for it.
    """
    account = account_of(store)
    if account.opening:
        masked = "noised" if account.opening["epsilon"] else "sums"
        leaves = masked if is_masked(store) else "own"
        check_leaving(asked.config, account.method, asked.request, leaves)


def _check_in_order(store: Store, asked: Asked) -> None:
    """Check that a message follows the site's last step, and is of the run's method."""
    envelope = asked.envelope
    due = f"must be {store.step + envelope.gap}, got {envelope.step}"
    if not store.step:
        due = "must be 1: the site has no state of this model, or has lost it"
    # A restarted server does not know yet when it last asked this site: its gap is 0.
    is_later = not envelope.gap and 0 < store.step < envelope.step
    method = account_of(store).method or envelope.method
    check_fields(
        asked.config.name,
        asked.content.name,
        ("step", is_later or store.step == envelope.step - envelope.gap, due),
        ("method", method == envelope.method, f"must be {method}, which has begun this run"),
    )


def _stored_reply(store: Store, asked: Asked, name: str) -> bytes:
    reply = store.read_bytes(name)
    _log_reply(store, asked, reply)
    return reply


def _new_answer(store: Store, asked: Asked, begins: bool = False) -> bytes:
    """Answer a message for the first time, or again after a rollback; `begins`: it opens a run."""
    config, model_id, had_finished = asked.config, asked.envelope.model_id, store.finished
    reply = _handled(Site(config, store), asked)
    if letters := parcels_of(reply):
        reply = with_parcels(reply, seal_mail(config.name, store, asked.envelope, letters))
    laid_out = to_bytes(reply)
    if store.finished and asked.envelope.checkpoint:
        _keep(store, asked, laid_out)
    if begins:
        store.put(TableRows(record_opened(config.name, model_id)))
        drop_old(store.folder.parent, config.log_days)
    _log_reply(store, asked, laid_out, reply)
    if store.finished and not (had_finished or config.simulated):
        record_ended(config.name, model_id, position_of(store).number)
    return laid_out


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


def _handled(site: Site, asked: Asked) -> Content:
    """Check the request and call its handler; the letters of the reply are not sealed yet."""
    config, store = site.config, site.store
    request, envelope, content = asked.request, asked.envelope, asked.content
    mail: list[Mail] = []
    check_leaves(site.name, store, request)
    workers = workers_at(config.workers) if config.workers else None
    if workers:
        workers.connected()  # or refused before anything is read
    try:
        if isinstance(request, Plan):
            open_account(config, store, request)
        leaves = disclosed(store, request)
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
        bounds = nullcontext() if config.simulated else _in_bounds(config, request.kind)
        with bounds, sharing(workers):
            result = asked.handler(site, request, *mail)
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
            assert leaves == "own", f"{type(request).__name__} asks for no sums"
            assert result.reply is not None, "such sums leave only under masks"
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
        return list(store.read(name, LETTERS))
    if store.may_roll_back:
        store.write(name, LETTERS, tuple(written))
    return written


def _keep(store: Store, asked: Asked, reply: bytes) -> None:
    """Keep the reply that ended the run, with its letters sealed; the rows are deleted now."""
    name = ENDED_MASKS if asked.request.leaves == "masks" else ENDED
    if name not in (endings := account_of(store).endings):
        ending = Ending(asked.request.kind, asked.envelope.attempt, _digest(asked.content))
        note(store, endings={**endings, name: ending})
        store.write_bytes(name, reply)


def _last_answer(store: Store, asked: Asked) -> bytes | None:
    """The kept reply, if a restarted server asks for it again; otherwise None."""
    for name, ending in account_of(store).endings.items():
        if ending.kind == asked.request.kind and ending.attempt < asked.envelope.attempt:
            rule = "must be what it was when the run ended"
            is_same = ending.digest == _digest(asked.content)
            check_fields(asked.config.name, asked.content.name, ("content", is_same, rule))
            return _stored_reply(store, asked, name)
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


def _log_reply(store: Store, asked: Asked, laid_out: bytes, reply: Content | None = None) -> None:
    """Write a line of a reply that is about to be stored and sent; without `reply`, sent again."""
    if asked.config.simulated:
        return
    request, envelope = asked.request, asked.envelope
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
    seconds = round(time.perf_counter() - asked.began, 4)
    event = "repeated" if reply is None else "answered"
    sizes = {"received": asked.content.size, "sent": len(laid_out)}
    append(home() / "sites" / asked.config.name, event, **line, **sizes, seconds=seconds)


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
    append(home() / "sites" / name, event, **line, seconds=round(time.perf_counter() - began, 4))
