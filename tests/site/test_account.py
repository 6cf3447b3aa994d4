"""What a site answers in a run never exceeds what its opening allows, however it is asked."""

import hashlib
import math
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest

from fedapp.errors import ConfigError, FedappError, PartyError, ProtocolError, WaitingError
from fedapp.home import home
from fedapp.messages.fields import (
    Letter,
    Reply,
    Request,
    fields_of,
    message,
)
from fedapp.messages.handshake import HelloRequest, Plan
from fedapp.messages.methods import all_methods, kinds_of, modules_of_method
from fedapp.messages.pax import SketchRequest
from fedapp.messages.vertical import VerticalHelloRequest
from fedapp.messages.wire import Envelope, from_bytes, to_bytes, to_content, with_parcels
from fedapp.process import OutOfTime, time_limit
from fedapp.runs.local import run_local
from fedapp.site import account, answer
from fedapp.site.mail import Mail
from fedapp.site.settings import SiteConfig, site_config
from fedapp.site.store import LiveStores
from strategies.method import TreeStrategy
from tests.crypto.test_masks import GREETING, TERMS
from tests.messages.declared import example, kinds
from tests.plans import planned
from tests.site.office import approve, read, runs, vertical_hello
from tests.site.test_plan import ask, listing

MODEL = "0123456789abcdef"


def test_the_label_holder_and_the_coordinator_get_no_more_rounds_than_planned(
    vertical, joined, monkeypatch
):
    """Round numbers travel in sealed letters, which the passive party compares with the plan."""
    plan = TreeStrategy.plan
    counted = account._counted
    monkeypatch.setattr(TreeStrategy, "plan", lambda self: {**plan(self), "rounds": 1})
    monkeypatch.setattr("clients.secureboost.active.check_within", lambda *given: None)
    monkeypatch.setattr(
        account,
        "_counted",
        lambda config, *given: {} if config.name == "bank" else counted(config, *given),
    )
    rule = r"shop .*: SumRequest\.message must come at most 2 times by the plan|"
    rule += r"bank: EncryptedGradients\.message must come at most once by the plan"
    with pytest.raises(PartyError, match=rule):
        run_local(vertical(num_boost_round=8), joined())


@pytest.mark.parametrize("kind", [HelloRequest, VerticalHelloRequest])
def test_a_second_hello_is_the_first(write_table, kind):
    """The whole opening is shown, approved, kept and compared; only the order of columns may come
    later."""
    method = "pax" if kind is HelloRequest else "secureboost"
    ids = [f"c{number}" for number in range(40)]
    node = {"name": "bank", "data": str(write_table("bank", id=ids)), "label": "y", "id": "id"}
    config = site_config({**node, "allow": method, "runs-per-day": 1}, {})
    opening = opening_of(kind)
    ask(config, opening, 1, method)
    others = {name: other(getattr(opening, name)) for name in kind.forms}
    del others["columns" if kind is HelloRequest else "parties"], others["rounds"]
    for name, value in others.items():
        with pytest.raises((ProtocolError, ConfigError), match=name.replace("_", "[-_]")):
            ask(config, replace(opening, **{name: value}), 2, method)
    ask(config, opening, 2, method)


def opening_of(kind):
    """An opening by the bank alone."""
    if kind is HelloRequest:
        return replace(GREETING, **planned(("bank",), aggregation="plain"))
    return vertical_hello(aggregation="sealed")


def other(value):
    """Another value of the same kind that keeps the rules of fields."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (*value, "shop")
    if isinstance(value, str):
        return {"plain": "secure", "sealed": "plain", "binary:logistic": "auto"}.get(value, "a")
    return value + 1 if isinstance(value, int) else value / 2 + 0.01


@pytest.mark.parametrize("kind", [HelloRequest, VerticalHelloRequest])
def test_all_of_an_opening_is_shown_to_who_approves_it(kind):
    method = "pax" if kind is HelloRequest else "secureboost"
    node = {"name": "bank", "data": "rows.csv", "allow": method, "approve": "ask"}
    opening = opening_of(kind)
    changes = {
        name: other(getattr(opening, name))
        for name in kind.forms
        if name
        not in ("parties", "fingerprints", "epsilon", "delta", "multiplier", "fold", "folds")
    }
    changes |= {"test_from": "booked:7", "valid_from": "booked:3"}
    opening = replace(opening, **changes)
    with suppress(WaitingError):
        answer.opening(site_config(node, {}), MODEL, method, opening).__enter__()
    (run,) = runs()
    text = read(approve(MODEL, answer="n\n")).rpartition("waits because")[2]
    for name in changes:
        if name in ("test_from", "valid_from", "test_fraction", "seed", "valid_fraction"):
            continue  # in words
        value = run.settings[name]
        assert name.replace("_", "-") in text, name
        assert isinstance(value, list | float) or str(value) in text, name
    assert "those of booked from 7 on validation those of booked from 3 on, before" in text


def test_a_request_asks_for_no_more_epochs_than_the_opening(
    settings, sites, write_table, monkeypatch
):
    plan = TreeStrategy.plan
    monkeypatch.setattr(TreeStrategy, "plan", lambda self: {**plan(self), "epochs": 1})
    contexts = sites({"name": "bank", "data": write_table("bank")})
    rule = r"AverageRequest\.epochs must be <= 1 by the plan that opened the run, got 1000000$"
    with pytest.raises(PartyError, match=rule):
        run_local(
            settings(strategy="fedavg-linear", parties=1, fedavg_linear__local_epochs=10**6),
            contexts,
        )


def test_nothing_is_kept_of_a_request_that_takes_too_long(configs, monkeypatch):
    """Here the time ends with the work, on a machine of any speed, if there is a limit of 7 s."""

    @contextmanager
    def ends_with_the_work(seconds):
        yield
        if seconds == 7:
            raise OutOfTime

    bank = configs["bank"]
    ask(bank, replace(GREETING, rounded=False, **planned((bank.name,), aggregation="plain")), 1)
    sketch = SketchRequest(n_bins=8, **TERMS)
    monkeypatch.setattr(answer, "time_limit", ends_with_the_work)
    rule = r"^train\.pax_sketch must be answered within 7 s \(most-seconds in the node"
    with pytest.raises(ConfigError, match=rule):
        ask(replace(bank, most_seconds=7), sketch, 2)
    ask(bank, sketch, 2)


def test_a_block_that_takes_too_long_is_interrupted_and_a_short_one_is_not():
    def work(seconds, limit):
        begin = time.monotonic()
        with time_limit(limit):
            while time.monotonic() < begin + seconds:
                sum(range(1000))

    with pytest.raises(OutOfTime):
        work(seconds=60, limit=0.05)
    work(seconds=0.1, limit=60)
    work(seconds=0.1, limit=0)


@message
class EchoReply(Reply):
    """That a question was answered."""

    number: int


N_SEQUENCES, ROUNDS, DEPTH = 20, 2, 2
# How many distinct questions of a kind a plan of two rounds of depth 2 between three parties
# allows, beside the restarts; all others once.
MOST = {
    **dict.fromkeys(("train.pax_grow", "train.pax_sums"), ROUNDS * DEPTH),
    **dict.fromkeys(("train.pax_risks", "train.pax_allrisks"), ROUNDS),
    **dict.fromkeys(("train.pax_count", "train.private_count"), 3),
    "train.private_trees": ROUNDS,
    **dict.fromkeys(("train.pax_leaves", "train.pax_leafsums"), math.inf),
    **dict.fromkeys(("train.bagging_boost", "train.cyclic_turn"), ROUNDS + 1),
    **dict.fromkeys(("train.fedavg_linear_average", "train.fedxgbllr_average"), ROUNDS + 1),
    "query.alignment_mask": 3,
    "train.secureboost_begin": ROUNDS + 1,
    **{f"train.secureboost_{one}": ROUNDS * DEPTH for one in ("sum", "split", "partition")},
    **{f"train.federated_forest_{one}": DEPTH for one in ("level", "sum", "split", "partition")},
    "train.horizontal_forest_count": 3,
    **{f"train.horizontal_forest_{one}": DEPTH for one in ("split", "scores")},
    # Two trees of depth 2, and a level's nodes once more for other columns.
    **{f"train.horizontal_forest_{one}": 2 * DEPTH + 15 for one in ("cells", "sums")},
    **{f"train.secureboost_{one}": math.inf for one in ("walk", "answer", "encrypt", "take")},
    **{f"evaluate.{one}": math.inf for one in ("interactive_walk", "interactive_answer")},
    "evaluate.eini_step": math.inf,
    "query.describe_rows_count": 3,
    "query.describe_rows_countsums": 3,
    **{f"query.describe_columns_{one}": math.inf for one in ("encrypt", "take")},
}
# What each restart adds.
A_RESTART = {
    **dict.fromkeys(("train.pax_grow", "train.pax_sums"), DEPTH),
    **dict.fromkeys(("train.pax_risks", "train.pax_allrisks"), 1),
    **dict.fromkeys(("train.bagging_boost", "train.cyclic_turn", "train.private_trees"), 1),
    **dict.fromkeys(("train.fedavg_linear_average", "train.fedxgbllr_average"), 1),
}
ALONE = {"query.greet", "query.hello", "query.vertical_hello", "query.secure_keys"}
ALONE |= {"query.secure_unmask", "query.secure_left"}
RUNS = {
    **{name: ({}, name) for name in all_methods()},
    "pax, secure": ({"aggregation": "secure"}, "pax"),
    "horizontal-forest, secure": ({"aggregation": "secure"}, "horizontal-forest"),
    "describe-rows, secure": ({"aggregation": "secure"}, "describe-rows"),
    "pax, private": (
        {"aggregation": "secure", "epsilon": 1.0, "delta": 1e-5, "multiplier": 5.0},
        "pax",
    ),
}


@dataclass
class Line:
    """The questions that a site has answered, by a second account that is kept here.

    Parameters
    ----------
    asked : the line of questions that leads to the site's state.
    kept : step and number of the checkpoint, and the line up to it.
    distinct : every line that was answered.
    """

    step: int = 0
    attempt: int = 0
    asked: tuple[tuple[str, str], ...] = ()
    kept: tuple[int, int, tuple[tuple[str, str], ...]] = (-1, 0, ())
    distinct: set[tuple[tuple[str, str], ...]] = field(default_factory=set)
    ended: bool = False

    def took(self, envelope, question):
        """The site has answered a message, and called its handler for a question."""
        if envelope.attempt > self.attempt and self.step > envelope.checkpoint and not self.ended:
            kept, step, asked = self.kept[1], self.kept[0], self.kept[2]
            if kept == envelope.checkpoint and step >= 0:
                self.step, self.asked = step, asked
        if envelope.step == self.step:
            return
        if 0 < self.step <= envelope.checkpoint and self.kept[0] != self.step and not self.ended:
            self.kept = self.step, envelope.checkpoint, self.asked
        self.step, self.attempt = envelope.step, envelope.attempt
        if question:
            self.asked = (*self.asked, question)
            self.distinct.add(self.asked)


class Attacker:
    """Sends a site the messages of a method in any order, and keeps the books."""

    def __init__(self, config, run, rng):
        more, self.method = RUNS[run]
        family = all_methods()[self.method].family
        self.config, self.rng, self.stores, self.line = config, rng, LiveStores(), Line()
        self.restarts = int(rng.integers(0, 3)) if family == "horizontal" and not more else 0
        plan = {"rounds": ROUNDS, "max_depth": DEPTH, "restarts": self.restarts, "epochs": 2}
        plan |= {"aggregation": "plain" if family == "horizontal" else "sealed", "max_bin": 4}
        plan |= {} if all_methods()[self.method].trains else {"rounds": 0}
        plan |= {"trees": 2, "parties": ("bank", "insurer", "shop"), "labels": "encoded", **more}
        hello = HelloRequest if family == "horizontal" else VerticalHelloRequest
        values = {**example(hello), **fields_of(Plan()), **plan}
        self.opening = hello(**{**values, "model": ""} if "model" in hello.forms else values)
        self.requests = questions_of(self.method)
        self.model_id = f"{int(rng.integers(2**62)):016x}"
        self.folder = home() / "sites" / config.name / self.model_id
        self.sent = {}
        self.called = 0

    def envelope(self, step, checkpoint=0, attempt=0):
        return Envelope(self.model_id, step, checkpoint, attempt, method=self.method)

    def handler(self, site, request, *mail):
        """Takes the place of all handlers."""
        if site.store.finished:  # as roles do
            raise ProtocolError(site.name, type(request).__name__, "step", "must come earlier")
        self.called += 1
        if request.kind.startswith("evaluate.") and MOST.get(request.kind, 1) == 1:
            site.store.forget()
        return EchoReply(self.called)

    def any_request(self):
        """A request of the method as its form allows, and letters beside it."""
        kind = self.requests[self.rng.integers(len(self.requests))]
        return self.filled(kind), self.any_letters(kind)

    def filled(self, kind):
        """An example whose settings are those of the opening, and whose rest varies."""
        values = example(kind)
        for name in values:
            if name in self.opening.forms and not isinstance(values[name], np.ndarray):
                if not isinstance(values[name], tuple):
                    values[name] = getattr(self.opening, name)
            elif name == "round_id" or name == "level":
                values[name] = int(self.rng.integers(0, 3))
            elif isinstance(values[name], np.ndarray) and values[name].dtype.kind == "f":
                values[name] = values[name] + values[name].dtype.type(self.rng.integers(0, 2))
        return kind(**values)

    def any_letters(self, kind):
        if not kind.carries_letters or self.rng.random() < 0.3:
            return []
        classes = letters_of(kind)
        letter = self.filled(classes[self.rng.integers(len(classes))]) if classes else None
        if letter is None:
            return []
        return [("shop", to_bytes(to_content(letter, "shop")))]

    def ask(self, request, envelope, letters=()):
        """Whether a message is answered; a refused one leaves the disk as it was."""
        content = to_content(request, "bank")
        if request.carries_letters:
            content = with_parcels(content, letters)
        before, called = listing(self.folder), self.called
        given = self.config, request.kind, envelope, content, self.stores
        try:
            answer.answered(*given)
        except FedappError:
            assert listing(self.folder) == before
            return False
        digest = hashlib.sha256(to_bytes(content)).hexdigest()
        is_question = self.called > called and request.kind not in ALONE
        self.line.took(envelope, (request.kind, digest) if is_question else None)
        self.line.ended = self.line.ended or (
            self.called > called
            and request.kind.startswith("evaluate.")
            and MOST.get(request.kind, 1) == 1
        )
        self.sent.setdefault(envelope.step, (request, list(letters)))
        return True

    def play(self, n_messages):
        """Send messages: the next, a repeated, an earlier one, one after a step back."""
        rng, checkpoint, attempt = self.rng, 0, 0
        assert self.ask(self.opening, self.envelope(step=1))
        for _ in range(n_messages):
            step = self.line.step + 1
            chance = rng.random()
            if chance < 0.15:
                step = int(rng.integers(1, step + 2))
            elif chance < 0.45 and checkpoint:
                attempt, step = attempt + 1, checkpoint + 1
            elif chance < 0.65:
                checkpoint = self.line.step
            request, letters = self.any_request()
            if step in self.sent and rng.random() < 0.6:
                request, letters = self.sent[step]
            self.ask(request, self.envelope(step, checkpoint, attempt), letters)

    def check(self):
        """Compare what was answered with what the plan allows."""
        lines = self.line.distinct
        for kind in {line[-1][0] for line in lines}:
            n_answers = sum(line[-1][0] == kind for line in lines)
            most = MOST.get(kind, 1) + self.restarts * A_RESTART.get(kind, 0)
            assert n_answers <= most, kind
        # One line of questions, which each restart may leave once.
        assert len(lines - {line[:-1] for line in lines}) <= 1 + self.restarts


@cache
def questions_of(method):
    """The requests that a method sends, its openings excepted."""
    wanted = {kind for module in modules_of_method(method) for kind in kinds_of(module)}
    asked = (wanted & senders(method)) - ALONE
    return [
        kind for kind in kinds() if issubclass(kind, Request) and getattr(kind, "kind", "") in asked
    ]


def senders(method):
    """Kinds of messages that a site takes from a run of a method."""
    config, allowed = SiteConfig("bank", "rows.csv", allowed=frozenset(all_methods())), set()
    for kind in kinds():
        if issubclass(kind, Request) and hasattr(kind, "kind"):
            with suppress(ConfigError):
                answer.check_policy(config, kind.kind, method)
                allowed.add(kind.kind)
    return allowed


@cache
def letters_of(kind):
    """Classes of letters in a request's module."""
    return [one for one in kinds() if issubclass(one, Letter) and one.__module__ == kind.__module__]


@pytest.mark.by_default("eini", "federated-forest", "pax, secure", "secureboost")
@pytest.mark.parametrize("run", RUNS)
def test_what_is_answered_never_exceeds_the_plan(monkeypatch, run):
    """Messages are replayed, reordered, repeated, forked and rolled back, letters included.

    The door, the account and the store are the real ones; handlers only count, letters are not
    sealed, and the register is left out, as it is opened once a run.
    """
    config = SiteConfig("bank", "rows.csv", allowed=frozenset(all_methods()), allows_insecure=True)
    monkeypatch.setattr(answer, "opening", lambda *given: nullcontext())
    monkeypatch.setattr(answer, "record_opened", lambda *given: None)
    monkeypatch.setattr(account, "_check_parties", lambda *given: None)
    monkeypatch.setattr(
        answer,
        "open_mail",
        lambda name, store, envelope, parcels: Mail(
            name, [(sender, from_bytes(one, sender)) for sender, one in parcels]
        ),
    )
    requests = (one for one in kinds() if issubclass(one, Request) and hasattr(one, "kind"))
    by_kind, playing, n_answered = {one.kind: one for one in requests}, list[Attacker](), 0
    monkeypatch.setattr(
        answer, "find_handler", lambda kind, party: (by_kind[kind], playing[-1].handler)
    )
    for seed in range(N_SEQUENCES):
        playing[:] = [attacker := Attacker(config, run, np.random.default_rng(seed))]
        attacker.play(n_messages=14)
        attacker.check()
        n_answered += len(attacker.line.distinct)
    assert n_answered > N_SEQUENCES
