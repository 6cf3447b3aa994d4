"""What a site answers in a run never exceeds what its opening allows, however it is asked."""

import math
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache

import pytest

from fedapp.errors import ConfigError, PartyError, ProtocolError, WaitingError
from fedapp.messages.fields import (
    Request,
    fields_of,
)
from fedapp.messages.handshake import HelloRequest, Plan
from fedapp.messages.methods import all_methods, kinds_of, modules_of_method
from fedapp.messages.pax import SketchRequest
from fedapp.messages.vertical import VerticalHelloRequest
from fedapp.process import OutOfTime, time_limit
from fedapp.runs.local import run_local
from fedapp.site import account, answer
from fedapp.site.account import Position
from fedapp.site.settings import SiteConfig, site_config
from fedapp.site.store import Store
from strategies.method import TreeStrategy
from tests.crypto.test_masks import GREETING, TERMS
from tests.messages.declared import example, kinds
from tests.plans import planned
from tests.site.office import approve, read, runs, vertical_hello
from tests.site.test_plan import ask

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
        end = time.monotonic() + seconds
        with time_limit(limit):
            while time.monotonic() < end:
                sum(range(1000))

    with pytest.raises(OutOfTime):
        work(seconds=60, limit=0.05)
    for limit in (60, 0):
        work(seconds=0.1, limit=limit)


ROUNDS, DEPTH, N_ASKED = 2, 2, 60
# How many questions of a kind a plan of two rounds of depth 2 between three parties allows; all
# others once.
MOST = {
    "train.pax_grow": ROUNDS * DEPTH,
    "train.pax_risks": ROUNDS,
    **dict.fromkeys(("train.pax_count", "train.private_count"), 3),
    "train.private_trees": ROUNDS,
    "train.pax_leaves": math.inf,
    # One more may only score.
    **dict.fromkeys(("train.bagging_boost", "train.cyclic_turn"), ROUNDS),
    **dict.fromkeys(("train.fedavg_linear_average", "train.fedxgbllr_average"), ROUNDS),
    "query.alignment_mask": 3,
    "train.secureboost_begin": ROUNDS + 1,
    **{f"train.secureboost_{one}": ROUNDS * DEPTH for one in ("sum", "split", "partition")},
    **{f"train.federated_forest_{one}": DEPTH for one in ("level", "sum", "split", "partition")},
    **{f"train.federated_forest_{one}": math.inf for one in ("encrypt", "take")},
    "train.horizontal_forest_count": 3,
    "train.horizontal_forest_split": DEPTH,
    # Two trees of depth 2, and a level's nodes once more for other columns.
    "train.horizontal_forest_cells": 2 * DEPTH + 15,
    **{f"train.secureboost_{one}": math.inf for one in ("walk", "answer", "encrypt", "take")},
    **{f"evaluate.{one}": math.inf for one in ("interactive_walk", "interactive_answer")},
    "evaluate.eini_step": math.inf,
    "query.describe_rows_count": 3,
    **{f"query.describe_columns_{one}": math.inf for one in ("encrypt", "take")},
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


@pytest.mark.parametrize("run", RUNS)
def test_of_each_kind_a_site_takes_as_many_questions_as_the_plan_says(tmp_path, run):
    """Rounds and levels rise as far as they may; what is refused changes nothing."""
    plan, method = RUNS[run]
    is_horizontal = all_methods()[method].family == "horizontal"
    plan = {"aggregation": "plain" if is_horizontal else "sealed", **plan}
    plan |= {"rounds": ROUNDS * all_methods()[method].trains, "max_depth": DEPTH, "levels": DEPTH}
    plan |= {"trees": 2, "restarts": 0, "epochs": 2, "max_bin": 4}
    plan["parties"] = ("bank", "insurer", "shop")
    opening = HelloRequest if is_horizontal else VerticalHelloRequest
    values = {**example(opening), **fields_of(Plan()), "labels": "encoded", **plan}
    opening = account.opening_of(opening(**{name: values[name] for name in opening.forms}))
    config, taken = SiteConfig("bank", "rows.csv"), {}
    for kind in questions_of(method):
        store = Store(tmp_path / kind.kind)
        account.note(store, opening=opening, method=method)
        settings = {name: opening[name] for name in kind.forms if name in opening}
        for name in {"epochs", "n_rounds", "level"} & kind.planned.keys():
            question = kind(**example(kind) | settings | {name: 10**6})
            with pytest.raises(ProtocolError, match=rf"\.{name} must be <= |class must be one for"):
                account.check(config, store, question)
        for number in range(N_ASKED):
            round_id, level = divmod(number // 5, DEPTH + 1)
            numbers = {"round_id": round_id, "level": level}
            fields = {name: value for name, value in numbers.items() if name in kind.forms}
            question, before = kind(**example(kind) | settings | fields), store.find(Position)
            try:
                account.check(config, store, question)
                account.take(config, store, question, f"{number}")
                taken[kind.kind] = taken.get(kind.kind, 0) + 1
            except ProtocolError:
                store.put(before or Position())
    most = {kind: MOST.get(kind, 1) for kind in taken}
    assert taken == {kind: N_ASKED if times == math.inf else times for kind, times in most.items()}
    assert len(taken) >= 3
