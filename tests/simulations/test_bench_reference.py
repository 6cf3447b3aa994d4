"""The digests of what every method computes find a change, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simulations import study

PLAN = "cyclic"


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["reference", *arguments, "--only", PLAN])
    study.reference_main()


def test_a_second_run_is_as_the_first_and_a_changed_digest_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "reference.json"
    call(monkeypatch, "--write", str(path))
    written = json.loads(path.read_text())
    assert set(written) == {f"{PLAN}: {what}" for what in ("model", "exchanges", "predictions")}
    call(monkeypatch, "--check", str(path))
    assert capsys.readouterr().out.splitlines()[-1] == f"3 as in {path}"
    path.write_text(json.dumps({**written, f"{PLAN}: model": "0" * 32}))
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, "--check", str(path))
    assert ended.value.code == f"{PLAN}: model must be {'0' * 32}, got {written[f'{PLAN}: model']}"


def test_what_only_one_of_two_runs_has_is_a_difference() -> None:
    assert study.differences({"a: model": "1", "b: model": "2"}, {"a: model": "1"}) == [
        "b: model must be 2, got None"
    ]
    assert study.differences({}, {"b: exchanges": 3}) == ["b: exchanges must be None, got 3"]


def test_every_method_has_a_plan_and_every_way_to_predict() -> None:
    from strategies.run import all_strategies

    planned = {str(plan.settings["strategy"]) for plan in study.PLANS.values()}
    planned |= {way for plan in study.PLANS.values() for way in plan.inferences}
    assert planned == set(all_strategies())


def test_a_digest_leaves_out_what_a_run_draws_and_nothing_else(tmp_path: Path) -> None:
    def digest(**document: object) -> str:
        (tmp_path / "part.json").write_text(json.dumps(document))
        return study.digest_of(tmp_path / "part.json")

    assert digest(records=[1], salt="a") == digest(records=[1], salt="b")
    assert digest(records=[1], salt="a") != digest(records=[2], salt="a")
