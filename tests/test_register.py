"""Runs that a site counts, and those that wait until a person there has approved them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context
from typer.testing import CliRunner

from fedapp.commands.site import site_app
from fedapp.errors import ConfigError, FedappError, WaitingError
from fedapp.home import home
from fedapp.messages.hello import HelloRequest
from fedapp.messages.methods import all_methods, messages_of
from fedapp.run_folder import RunFolder
from fedapp.site import register
from fedapp.site.answer import answer
from fedapp.site.config import site_config
from fedapp.site.register import admit, runs_of
from fedapp.site.stores import drop_abandoned
from fedapp.wire.codec import Envelope
from fedapp.wire.content import take_apart
from simulations.local import run_local
from strategies import base
from tests.conftest import MakeSettings, MakeSites, WriteTable

HELLO = HelloRequest("binary:logistic", 0.2, 0.1, 42, False)
NODE = {"name": "bank", "data": "rows.csv", "allow": "pax"}


@pytest.fixture
def bank(sites: MakeSites, write_table: WriteTable) -> Callable[..., list[Context]]:
    data = write_table("bank")
    return lambda **node: sites(
        {"name": "bank", "data": data, **{key.replace("_", "-"): v for key, v in node.items()}}
    )


def model_of(folder: RunFolder) -> str:
    return str(json.loads((folder.path / "summary.json").read_text())["model_id"])


def approve(*words: str, answer: str = "") -> Any:
    return CliRunner().invoke(site_app, ["approve", *words], input=answer, env={"COLUMNS": "200"})


def test_no_more_runs_begin_in_a_day_than_the_site_allows(
    settings: MakeSettings, bank: Callable[..., list[Context]]
) -> None:
    contexts = bank(runs_per_day=2)
    models = [model_of(run_local(settings(parties=1), contexts)) for _ in range(2)]
    rule = r"^bank \(step 1\): runs-per-day must be <= 2 on one table in the node config of bank"
    with pytest.raises(FedappError, match=rule):
        run_local(settings(parties=1), contexts)
    assert list(runs_of(home() / "sites" / "bank")) == models
    assert "no run waits here" in approve().output


def test_a_run_counts_once_and_for_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    config, now = site_config({**NODE, "runs-per-day": 1}, {}), [1e9]
    monkeypatch.setattr(register.time, "time", lambda: now[0])
    for _ in range(3):
        admit(config, "a" * 16, "pax", HELLO)
    with pytest.raises(ConfigError, match="runs-per-day must be <= 1"):
        admit(config, "b" * 16, "pax", HELLO)
    other = site_config({**NODE, "runs-per-day": 1, "data": "others.csv"}, {})
    admit(other, "c" * 16, "pax", HELLO)
    now[0] += 86_400
    admit(config, "b" * 16, "pax", HELLO)
    now[0] += 7 * 86_400
    admit(config, "d" * 16, "pax", HELLO)
    assert list(runs_of(home() / "sites" / "bank")) == ["d" * 16]


def test_a_run_waits_until_it_is_approved_and_is_the_same_then(
    settings: MakeSettings,
    bank: Callable[..., list[Context]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, sleep = list[str](), base.time.sleep

    def a_while(seconds: float) -> None:
        if seconds:
            sleep(seconds)
            return
        [model_id] = runs_of(home() / "sites" / "bank")
        asked.append(model_id)
        if len(asked) == 3:
            assert approve(model_id, answer="y\n").exit_code == 0

    plain = run_local(settings(parties=1), bank())
    (home() / "sites" / "bank" / register.RUNS).unlink()
    notes: list[str] = []
    note = RunFolder.note
    monkeypatch.setattr(base, "APPROVAL_POLL", 0.0)
    monkeypatch.setattr(base.time, "sleep", a_while)
    monkeypatch.setattr(
        RunFolder, "note", lambda self, stage: (notes.append(stage.doing), note(self, stage))
    )
    folder = run_local(settings(parties=1), bank(approve="ask"))
    assert asked == [model_of(folder)] * 3
    waits = f"bank: waits for approval at bank: fedapp site approve {asked[0]}; the run asks again"
    assert sum(text.startswith(waits) for text in notes) == 3
    models = [(one.path / "model.json").read_bytes() for one in (plain, folder)]
    assert models[0] == models[1]


def test_a_run_that_nobody_approves_ends_and_says_what_to_do(
    settings: MakeSettings, bank: Callable[..., list[Context]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "APPROVAL_POLL", 0.0)
    rule = r"^bank \(step 1\): waits for approval at bank: fedapp site approve [0-9a-f]{16}; "
    with pytest.raises(FedappError, match=rule + "the run asks again until start-deadline"):
        run_local(settings(parties=1, start_deadline=0.1), bank(approve="ask"))


@pytest.mark.parametrize("method", sorted(all_methods()))
def test_who_approves_reads_what_the_run_reveals(method: str) -> None:
    config = site_config({**NODE, "approve": "ask"}, {})
    with pytest.raises(WaitingError, match=r"^waits for approval at bank: fedapp site approve aa"):
        admit(config, "a" * 16, method, HELLO)
    refused = approve("a" * 16, answer="n\n")
    assert (refused.exit_code, "test-fraction 0.2" in refused.output) == (1, True)
    assert "at bank on 'rows.csv', first asked for" in refused.output
    text = " ".join(refused.output.split())
    module = messages_of(method.replace("-", "_"))
    assert module is not None
    assert module.__doc__ is not None
    assert " ".join(module.__doc__.partition("Reveals")[2].split()) in text
    assert "Let bank take part?" in text
    with pytest.raises(WaitingError):
        admit(config, "a" * 16, method, HELLO)


@pytest.mark.parametrize(
    ("method", "changes", "rule"),
    [
        ("bagging", {}, "strategy must be pax, as when the run first asked bank, got bagging"),
        ("pax", {"valid_fraction": 0.9}, "valid-fraction must be 0.1, as when .*, got 0.9"),
        ("pax", {"rounded": True}, "rounded must be False, as when .*, got True; begin a new run"),
    ],
)
def test_what_was_approved_is_what_begins(method: str, changes: dict[str, Any], rule: str) -> None:
    config = site_config({**NODE, "approve": "ask"}, {})
    with pytest.raises(WaitingError):
        admit(config, "a" * 16, "pax", HELLO)
    other = replace(HELLO, **changes)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"^{rule}"):
            admit(config, "a" * 16, method, other)
        approve("a" * 16, "--yes")
    admit(config, "a" * 16, "pax", HELLO)


def test_a_run_of_another_table_waits_anew() -> None:
    config = site_config({**NODE, "approve": "ask"}, {})
    with pytest.raises(WaitingError):
        admit(config, "a" * 16, "pax", HELLO)
    assert approve("a" * 16, "--yes").exit_code == 0
    admit(config, "a" * 16, "pax", HELLO)
    with pytest.raises(WaitingError):
        admit(replace(config, data="others.csv"), "a" * 16, "pax", HELLO)


def test_a_run_whose_state_was_deleted_counts_and_waits_anew(write_table: WriteTable) -> None:
    table = {"data": str(write_table("bank")), "label": "y"}
    node: dict[str, Any] = {**NODE, **table, "approve": "ask"}
    config = site_config({**node, "runs-per-day": 1}, {})
    folder, envelope = home() / "sites" / "bank", Envelope("a" * 16, 1, method="pax")

    def ask() -> None:
        answer(config, HELLO.kind, envelope, take_apart(HELLO, "bank"))

    with pytest.raises(WaitingError):
        ask()
    assert approve("a" * 16, "--yes").exit_code == 0
    for _ in range(3):
        ask()
    drop_abandoned(folder, days=-1)
    with pytest.raises(ConfigError, match="runs-per-day must be <= 1"):
        ask()
    config = site_config({**node, "runs-per-day": 2}, {})
    with pytest.raises(WaitingError):
        ask()
    assert not runs_of(folder)["a" * 16].approved


def test_an_approval_lapses_with_its_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    config, now = site_config({**NODE, "approve": "ask"}, {}), [1e9]
    monkeypatch.setattr(register.time, "time", lambda: now[0])
    with pytest.raises(WaitingError):
        admit(config, "a" * 16, "pax", HELLO)
    assert approve("a" * 16, "--yes").exit_code == 0
    admit(config, "a" * 16, "pax", HELLO)
    now[0] += register.KEPT_SECONDS
    with pytest.raises(WaitingError):
        admit(config, "a" * 16, "pax", HELLO)


def test_runs_that_wait_are_listed(tmp_path: Path) -> None:
    assert "no run waits here" in approve().output
    admit(site_config(NODE, {}), "a" * 16, "pax", HELLO)
    assert f"{'a' * 16}  bank  pax" in approve().output
    assert approve("a" * 16, "--yes").exit_code == 0
    assert "no run waits here" in approve().output


def test_another_run_than_those_that_wait_cannot_be_approved() -> None:
    with pytest.raises(ConfigError, match=r"^run must be one that waits here \(none\), got abc$"):
        raise approve("abc").exception


def test_approve_is_one_of_two_words() -> None:
    with pytest.raises(ConfigError, match=r"^approve must be ask or all, got 'no'$"):
        site_config({**NODE, "approve": "no"}, {})
