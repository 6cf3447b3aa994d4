"""How attacks are run and told."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from simulations import __main__ as every
from simulations.study import (
    Attack,
    Outcome,
    Overrides,
    Result,
    attack_main,
    attack_results,
    attacks_table,
)

WAYS: dict[str, Overrides] = {"default": {}, "one": {"max-depth": 1}, "two": {"max-depth": 2}}


def attack(asked: list[Overrides]) -> Attack:
    def run(overrides: Overrides) -> Outcome:
        asked.append(overrides)
        return Outcome(0.5 + overrides["seed"], 0.25, 0.75)

    sets: dict[str, Overrides] = {
        "first": {"data": "wine", "eta": 0.9},
        "second": {"data": "digits"},
    }
    return Attack("name", "who", "what", sets, WAYS, run, quick={"eta": 0.3})


def test_results_are_means_over_seeds_of_every_set_and_setting(tmp_path: Path) -> None:
    asked: list[Overrides] = []
    found = list(attack_results(attack(asked), seeds=2, output=tmp_path))
    names = [(one.data, one.setting) for one in found]
    assert names == [(data, way) for data in ("first", "second") for way in WAYS]
    assert {(one.success, one.chance, one.score) for one in found} == {(1.0, 0.25, 0.75)}
    assert asked[2:4] == [
        {"data": "wine", "eta": 0.9, "max-depth": 1, "seed": seed} for seed in (0, 1)
    ]


def test_quick_results_are_of_one_set_and_two_settings(tmp_path: Path) -> None:
    asked: list[Overrides] = []
    sets = ("second", "first")
    found = list(attack_results(attack(asked), seeds=1, quick=True, data=sets, output=tmp_path))
    assert [(one.data, one.setting) for one in found] == [("second", "default"), ("second", "one")]
    common = {"data": "digits", "eta": 0.3, "seed": 0}
    assert asked == [{**common, **way} for way in ({}, {"max-depth": 1})]


def test_a_run_that_is_kept_is_not_run_again(tmp_path: Path) -> None:
    asked: list[Overrides] = []
    first = list(attack_results(attack(asked), seeds=2, output=tmp_path))
    n_runs = len(asked)
    assert list(attack_results(attack(asked), seeds=2, output=tmp_path)) == first
    assert len(asked) == n_runs
    list(attack_results(attack(asked), seeds=3, output=tmp_path))
    assert {one["seed"] for one in asked[n_runs:]} == {2}
    n_runs = len(asked)
    list(attack_results(attack(asked), seeds=1, quick=True, output=tmp_path))
    assert len(asked) == n_runs + 2


def test_what_was_found_before_an_interruption_is_kept(tmp_path: Path) -> None:
    asked: list[Overrides] = []
    before = list(islice(attack_results(attack(asked), seeds=1, output=tmp_path), 2))
    assert list(attack_results(attack(asked), seeds=1, output=tmp_path))[:2] == before
    assert len(asked) == 6


@pytest.mark.parametrize("seeds", ["0", "-1", "two"])
def test_a_command_without_a_run_is_refused(
    seeds: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["attacks", f"--seeds={seeds}"])
    with pytest.raises(SystemExit):
        attack_main(attack([]))
    assert f"argument --seeds: must be >= 1, got {seeds}" in capsys.readouterr().err


def test_a_command_says_how_long_it_took_and_where_runs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["attacks", "--quick"])
    attack_main(attack([]))
    assert capsys.readouterr().out.endswith("0 seconds; each run is kept in runs/attacks/name\n")
    assert (tmp_path / "runs/attacks/name/first, default, quick, seed 0.json").is_file()


def test_the_table_has_a_line_a_result() -> None:
    line = Result("name", "set", "way", 0.98765, 0.5, 0.25, 1.25)
    assert (
        attacks_table([line, line]).splitlines()[2:]
        == ["| name | set | way | 0.988 | 0.500 | 0.250 | 1.2 |"] * 2
    )


def test_the_table_says_where_a_search_has_not_finished() -> None:
    line = Result("name", "set", "way", 0.25, 0.5, 0.25, 1.25, unfinished=0.7)
    assert "| 0.250, 0.700 unfinished | 0.500 |" in attacks_table([line])


@pytest.mark.parametrize("name", every.TABLED)
def test_an_attack_is_called_like_its_command_and_tried_on_two_sets(name: str) -> None:
    (found,) = every.attack_command(name).args  # type: ignore[attr-defined]
    assert found.name == name
    assert len(found.data) >= 2
    assert len(found.ways) >= 2
