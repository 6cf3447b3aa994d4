"""How attacks are run and told."""

from __future__ import annotations

import pytest

from simulations.attacks import __main__ as every
from simulations.attacks.frame import Attack, Outcome, Overrides, Result, results, table

WAYS = {"default": {}, "one": {"way": 1}, "two": {"way": 2}}


def attack(asked: list[Overrides]) -> Attack:
    def run(overrides: Overrides) -> Outcome:
        asked.append(overrides)
        return Outcome(0.5 + overrides["seed"], 0.25, 0.75)

    sets = {"first": {"data": "a", "rows": 9}, "second": {"data": "b"}}
    return Attack("name", "who", "what", sets, WAYS, run, quick={"rows": 3})


def test_results_are_means_over_seeds_of_every_set_and_setting() -> None:
    asked: list[Overrides] = []
    found = list(results(attack(asked), seeds=2))
    names = [(one.data, one.setting) for one in found]
    assert names == [(data, way) for data in ("first", "second") for way in WAYS]
    assert {(one.success, one.chance, one.score) for one in found} == {(1.0, 0.25, 0.75)}
    assert asked[2:4] == [{"data": "a", "rows": 9, "way": 1, "seed": seed} for seed in (0, 1)]


def test_quick_results_are_of_one_set_and_two_settings() -> None:
    asked: list[Overrides] = []
    found = list(results(attack(asked), seeds=1, quick=True, data=("second", "first")))
    assert [(one.data, one.setting) for one in found] == [("second", "default"), ("second", "one")]
    assert asked == [{"data": "b", "rows": 3, "seed": 0, **way} for way in ({}, {"way": 1})]


def test_the_table_has_a_line_a_result() -> None:
    line = Result("name", "set", "way", 0.98765, 0.5, 0.25, 1.25)
    assert (
        table([line, line]).splitlines()[2:]
        == ["| name | set | way | 0.988 | 0.500 | 0.250 | 1.2 |"] * 2
    )


def test_the_table_says_where_a_search_has_not_finished() -> None:
    line = Result("name", "set", "way", 0.25, 0.5, 0.25, 1.25, unfinished=0.7)
    assert "| 0.250, 0.700 unfinished | 0.500 |" in table([line])


@pytest.mark.parametrize("module", every.MODULES, ids=lambda module: module.__name__)
def test_an_attack_is_called_like_its_module_and_tried_on_two_sets(module: object) -> None:
    found: Attack = module.ATTACK  # type: ignore[attr-defined]
    assert f"simulations.attacks.{found.name}" == module.__name__  # type: ignore[attr-defined]
    assert len(found.data) >= 2
    assert len(found.ways) >= 2
