"""What a site has disclosed in a run, and what it still may: one record, one check at the door.

The promise: *a run is a line of questions, and its opening says how long it may be.* A site answers
no question that its opening, as a person has approved it, does not allow; it answers each kind of
question at most as often as the opening allows; and in the place of a question that it has answered
it answers only the same one, whoever asks, under whatever aggregation, and however often the server
restarts. So what a server can learn of a site is what the opening shows, not what it thinks of on
the way.

A *question* is a request with all its fields and with the letters that other parties wrote beside
it. ``check`` compares both with the opening: fields of the same name have the same value, fields
with a ``PlanLimit`` at most its value, rounds rise by one and end. ``take`` puts the question in
its place. Each question is bound to all questions before it by a chain of digests, so two questions
are the same only if the whole line up to them is.

A repeated step gets the stored reply and is no question. A restarted server goes back to its last
checkpoint, and the site to the state that it stored then (see the page in ``site.answer``)::

    question    1    2    3    4    5          chain and number of the last one: ``Position``,
                          |                    a part of the state
                      checkpoint
    attempt 0   o----o----o----o----o
    attempt 1             o----4'              must be 4: what was answered since the checkpoint
                                               is in the ``Account``, which never goes back

Once a later checkpoint is stored, the state before it is gone, and so is what was answered before.
Letters may be random (ciphertexts are); so ``site.answer`` stores those of each answer until then,
and sends the same again.

Two exceptions. A round that loses a party in the clear restarts without it, so its questions
differ: the opening says how often that may happen (``restarts``), at most twice, and not at a site
with ``least-bin-rows``. And a run that has diverged is opened again with fewer rounds, and ends,
once, in the place of the round that diverged. A later hello may also bring the order of columns,
which is known once all tables are; it heads the chain.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedapp.crypto.sealed import prefixed
from fedapp.data.datasets import NAME, NAME_RULE
from fedapp.errors import ProtocolError
from fedapp.messages.fields import OWN_OR_SUMS, Message, Request, Round, check_fields
from fedapp.messages.handshake import MOST_RESTARTS, Plan
from fedapp.messages.methods import method_of
from fedapp.site.settings import SiteConfig
from fedapp.site.store import SENT, NoStateError, Store
from fedapp.site.trust import site_fingerprint

# What a request discloses -> the aggregations that allow it.
ALLOWED = {"own": ("plain", "sealed"), "sums": ("secure",), "noised": ("secure",)}
COLUMNS = "columns"  # field of an opening: their order may follow later, when all are known


@dataclass(frozen=True, slots=True)
class Summed:
    """A sum that was unmasked."""

    number: int  # of its question
    chain: str
    names: tuple[str, ...]  # over these parties


@dataclass(frozen=True, slots=True)
class Ending:
    """The question that ended the run, whose reply is stored."""

    kind: str
    attempt: int
    digest: str


@dataclass(frozen=True, slots=True)
class Account:
    """What survives rollbacks, restarts and attempts, until the model's folder is deleted."""

    method: str = ""
    opening: Mapping[str, Any] | None = None  # fields of the request that opened the run
    starts: tuple[tuple[int, int], ...] = ()  # attempts, and the checkpoint each went back to
    # Since the last checkpoint: chain by number.
    answered: Mapping[str, str] = field(default_factory=dict)
    # How many distinct ones of a kind, and of a class of letters.
    times: Mapping[str, int] = field(default_factory=dict)
    restarts: int = 0  # rounds that were restarted
    rounds: int | None = None  # fewer than the opening's, with which the run was opened again
    is_cut: bool = False  # whether it has ended in the place of a round
    first_round: int | None = None  # not 0 if the run continues another model
    # Of the run, by the array that has the reply.
    endings: Mapping[str, Ending] = field(default_factory=dict)
    # Sums, see ``site.sums``
    among: tuple[str, ...] = ()  # the parties that remain
    summed: tuple[Summed, ...] = ()  # since the last checkpoint
    noise_key: bytes = b""
    # Sums that were disclosed with noise: for which chain.
    noised: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Position:
    """Where in its line of questions a state is."""

    number: int = 0
    chain: str = ""
    round_id: int | None = None  # the last one that has begun


def account_of(store: Store) -> Account:
    """The account of a run; an empty one before it has begun."""
    return store.find(Account) or Account()


def position_of(store: Store) -> Position:
    """Where the state is."""
    return store.find(Position) or Position()


def note(store: Store, **fields: Any) -> None:
    """Change fields of the account."""
    account = account_of(store)
    if any(getattr(account, name) != value for name, value in fields.items()):
        store.put(replace(account, **fields))


def open_account(config: SiteConfig, store: Store, request: Plan) -> None:
    """Store the opening of a run; it must name the site, and be that of any earlier hello."""
    name, message = config.name, type(request).__name__
    opening = opening_of(request)
    if config.least_bin_rows and not config.simulated:
        # Two rounds on the same gradients, cut otherwise, differ by fewer rows than a bin has.
        opening["restarts"] = 0
    account = account_of(store)
    for setting, value in (account.opening or opening).items():
        # A run that has diverged is resumed with fewer rounds; another may allow fewer restarts.
        is_shorter = setting in ("rounds", "restarts") and opening[setting] < value
        if setting != COLUMNS and opening[setting] != value and not is_shorter:
            was, got = (text if text != "" else "''" for text in (value, opening[setting]))
            rule = f"must be {was}, as when the run was opened, got {got}"
            raise ProtocolError(name, message, setting, f"{rule}; begin a new run")
    first = account.opening or opening
    rounds = min(opening["rounds"], first["rounds"] if account.rounds is None else account.rounds)
    note(store, opening=first, rounds=rounds if rounds < first["rounds"] else None)
    if opening.get(COLUMNS) and not position_of(store).number:
        # Their order decides what every question is about, so it is the head of the line.
        order = prefixed(*(column.encode() for column in opening[COLUMNS]))
        store.put(Position(chain=hashlib.sha256(order).hexdigest()))
    if not config.simulated:
        _check_parties(name, request)
        _check_rounds(config, account.method, request)


def _check_parties(name: str, request: Plan) -> None:
    parties, fingerprints = request.parties, request.fingerprints
    are_names = len(set(parties)) == len(parties) and all(map(NAME.fullmatch, parties))
    pinned = dict(zip(parties, fingerprints, strict=False)).get(name)
    rule = f"must have {name} with the fingerprint of its key"
    check_fields(
        name,
        request,
        ("parties", are_names, f"must be {NAME_RULE}, each once"),
        ("fingerprints", len(fingerprints) == len(parties), "must be one a party"),
        ("parties", pinned == site_fingerprint(name), rule),
    )


def _check_rounds(config: SiteConfig, method: str, request: Plan) -> None:
    """Check that a plan has only rounds and restarts that a run of its kind can have."""
    declared = method_of(method)
    # A party that is lost in the clear makes a round restart, twice if it comes back. Nobody can
    # check whether there are more parties: their names and keys are the coordinator's.
    is_plain = request.aggregation == "plain" and declared and declared.family == "horizontal"
    trains = declared is None or declared.trains
    for name, most in (
        ("rounds", config.most_rounds - request.restarts if trains else 0),
        ("restarts", MOST_RESTARTS * bool(is_plain)),
    ):
        rule = f"must be <= {most} in such a run (most-rounds includes restarts)"
        got = getattr(request, name)
        check_fields(config.name, request, (name, got <= most, f"{rule}, got {got}"))


def opening_of(request: Any) -> dict[str, Any]:
    """All fields of an opening, as JSON values."""
    fields = ((name, getattr(request, name)) for name in type(request).forms)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields}


def planned(store: Store) -> Mapping[str, Any]:
    """The opening of a run that has one."""
    opening = account_of(store).opening
    if opening is None:
        raise NoStateError("opening")
    return opening


def check_within(
    config: SiteConfig, store: Store, message: str, field: str, got: int, limit: str
) -> None:
    """Check a value derived from a message against a limit of the plan; raises ProtocolError."""
    if not config.simulated and got > (most := planned(store)[limit]):
        _refuse(config.name, message, field, f"must be <= {most}", got)


def check_roster(store: Store, name: str, roster: dict[str, str]) -> None:
    """Check that the parties and the fingerprints of their keys are those of the plan."""
    plan = planned(store)
    fingerprints = dict(zip(plan["parties"], plan["fingerprints"], strict=True))
    for party in sorted({*fingerprints, *roster}):
        if (due := fingerprints.get(party)) != (got := roster.get(party)):
            rule = f"must be {due} by the plan that opened the run, got {got}"
            raise ProtocolError(name, "parcel", "key", f"of {party} {rule}")


# At the door


def is_masked(store: Store) -> bool:
    """Whether sums over rows leave the site only under masks, by the plan that opened the run."""
    return bool(planned(store)["aggregation"] == "secure")


def disclosed(store: Store, request: Request) -> str:
    """What an answer discloses, as ``Request.leaves``; the plan alone decides on masks."""
    if request.leaves != OWN_OR_SUMS:
        return request.leaves
    return "sums" if is_masked(store) else "own"


def check(
    config: SiteConfig, store: Store, request: Request, letters: Sequence[tuple[str, Message]] = ()
) -> None:
    """Check that a question is within the plan of the run; not in a simulation.

    `letters` are those beside the request, with their senders. Raises ProtocolError if a setting
    differs, a limit is exceeded, or a round is out of order.
    """
    if config.simulated or not is_question(request):
        return
    plan = planned(store)
    for party, message in ((config.name, request), *letters):
        for name in type(message).forms:
            value = getattr(message, name)
            limit = type(message).planned.get(name)
            if limit and value > plan[limit.name]:
                _refuse(party, message, name, f"must be <= {plan[limit.name]}", value)
            is_setting = not limit and message is request and name in plan
            if is_setting and isinstance(value, bool | int | float | str) and value != plan[name]:
                _refuse(party, message, name, f"must be {plan[name]}", value)
    aggregation = plan["aggregation"]
    leaves = disclosed(store, request)
    fits = aggregation in ALLOWED.get(leaves, (aggregation,))
    if not fits or (leaves in ("own", "sums") and plan["epsilon"]):
        rule = f"must be one for aggregation {aggregation}"
        _refuse(config.name, request, "class", rule, request.kind)
    if asked := request.round:
        rounds = _rounds(store, asked)
        if asked.id not in rounds:
            due = " or ".join(map(str, rounds)) or "none: all have begun"
            [field] = request.rounds
            _refuse(config.name, request, field, f"must be {due}", asked.id)


def _refuse(party: str, message: Message | str, field: str, rule: str, got: Any) -> None:
    rule = f"{rule} by the plan that opened the run, got {got}"
    check_fields(party, message, (field, False, rule))


def is_question(request: Request) -> bool:
    """Whether an answer discloses anything about rows; openings, keys and masks have own rules."""
    return request.is_step and not (
        isinstance(request, Plan)
        or (request.kind.startswith("query.") and request.leaves in ("nothing", "masks"))
    )


def _rounds(store: Store, asked: Round) -> range:
    """The rounds that a request may be of: the one in progress, or the next."""
    account = account_of(store)
    last = position_of(store).round_id
    first = asked.id if account.first_round is None else account.first_round
    # After the last round, a request that does not train may score the model.
    n_rounds = planned(store)["rounds"] if account.rounds is None else account.rounds
    end = first + n_rounds - asked.trains
    if last is None:
        return range(first, min(first, end) + 1)
    # What was answered here before a step back is compared as a whole by ``take``.
    is_known = str(position_of(store).number + 1) in account.answered
    is_over = asked.begins and not (is_known or _may_restart(account))
    return range(last + is_over, min(last + 1, end) + 1)


def _may_end(account: Account, request: Request) -> bool:
    """Whether a run that was opened again with fewer rounds may end with this request."""
    if account.rounds is None or account.is_cut:
        return False
    if not (asked := request.round):
        return request.kind.startswith("evaluate.") or bool(request.spare)
    return not asked.trains or asked.id >= (account.first_round or 0) + account.rounds


def _may_restart(account: Account) -> bool:
    assert account.opening is not None
    return account.restarts < int(account.opening["restarts"])


def take(
    config: SiteConfig,
    store: Store,
    request: Request,
    digest: str,
    letters: Sequence[tuple[str, Message]] = (),
) -> bool:
    """Put a question in its place; returns whether it was answered before a rollback.

    `digest` is that of the request with its letters. Raises ProtocolError if another question was
    answered in this place, or the plan allows no more of this kind.
    """
    if not is_question(request):
        return False
    account = account_of(store)
    before = position_of(store)
    chain = hashlib.sha256(prefixed(before.chain.encode(), digest.encode())).hexdigest()
    asked = request.round
    store.put(Position(before.number + 1, chain, asked.id if asked else before.round_id))
    number = str(before.number + 1)
    if config.simulated or (earlier := account.answered.get(number)) == chain:
        return not config.simulated
    is_restart = asked is not None and asked.begins and asked.id == before.round_id
    is_cut = earlier is not None and _may_end(account, request)
    if earlier is not None and not is_cut:
        if not _may_restart(account):
            rule = "must be what it was before the run was resumed; begin a new run"
            raise ProtocolError(config.name, type(request).__name__, "content", rule)
        is_restart = True
    first = account.first_round
    if first is None and asked:
        first = asked.id
    store.put(
        replace(
            account,
            # What was answered after a question that restarts a round is another line.
            answered={n: c for n, c in account.answered.items() if int(n) < int(number)}
            | {number: chain},
            times=_counted(config, account, request, letters),
            restarts=account.restarts + is_restart,
            is_cut=account.is_cut or is_cut,
            first_round=first,
        )
    )
    return False


def _counted(
    config: SiteConfig, account: Account, request: Request, letters: Sequence[tuple[str, Message]]
) -> dict[str, int]:
    """How many questions of each kind there are with this one; raises ProtocolError."""
    times = dict(account.times)
    for party, message in ((config.name, request), *letters):
        name = message.kind if isinstance(message, Request) else type(message).__name__
        times[name] = times.get(name, 0) + 1
        if times[name] > (most := most_times(type(message), account)):
            often = "once" if most == 1 else f"{most:g} times"
            rule = f"must come at most {often} by the plan that opened the run, got one more"
            raise ProtocolError(party, type(message).__name__, "message", rule)
    return times


def most_times(kind: type[Message], account: Account) -> float:
    """How many distinct questions or letters of a class the plan of a run allows."""
    if isinstance(kind.times, int | float):
        return kind.times
    plan = account.opening
    assert plan is not None
    sizes = {name: len(plan[name]) if name == "parties" else int(plan[name]) for name in kind.times}
    if "rounds" in sizes:
        sizes["rounds"] += int(plan["restarts"])  # rounds that restart
    return math.prod(sizes.values()) + kind.spare


def begin_checkpoint(store: Store, number: int) -> None:
    """Forget what cannot be asked again once the state after a question is a checkpoint's.

    By the question's number, as a server may number steps as it likes.
    """
    account = account_of(store)
    answered = {n: chain for n, chain in account.answered.items() if int(n) > number}
    summed = tuple(item for item in account.summed if item.number > number)
    note(store, answered=answered, summed=summed)
    for question in store.sent():
        if question <= number:
            store.drop(f"{SENT}{question}")
