"""Attacks rebuild what they say, from transcripts of honest runs; how they are run and shown."""

import numpy as np
import pytest

from fedapp.audit import labels as grouped
from fedapp.audit import membership as scored
from fedapp.errors import ConfigError
from fedapp.trees.model import LEAF
from simulations import __main__ as every
from simulations.attack import (
    Attack,
    Outcome,
    attack_main,
    attack_results,
)
from simulations.attacks import horizontal, redraws, vertical
from simulations.attacks.horizontal import advantage, attack_masked_sums, attack_plain_sums
from simulations.options import command
from simulations.passing import Scored

SECURE = {"pax__aggregation": "secure"}
SMALL = {"label": "y", "parties": 2, "num_boost_round": 10, "max_depth": 6}


@pytest.mark.slow
def test_rows_are_rebuilt_from_honest_sums_and_none_that_is_nobodys(settings, write_table):
    data = str(write_table(n_rows=100))
    own, pooled = attack_plain_sums(settings(data=data, max_bin=256, **SMALL))
    assert own["rows"] == pooled["rows"] == 72
    assert own["rebuilt"] > 36
    assert own["wrong"] == pooled["wrong"] == 0
    masked = attack_masked_sums(
        settings(data=data, max_bin=256, **{**SMALL, **SECURE, "num_boost_round": 3})
    )
    assert masked["rows"] == own["rows"]
    assert masked["wrong"] == 0
    # A sum of both parties' rows gives away less than the sums of each.
    assert masked["rebuilt"] < own["rebuilt"]
    coarse, _ = attack_plain_sums(settings(data=data, max_bin=8, **SMALL))
    assert coarse["rebuilt"] < own["rebuilt"]
    assert coarse["wrong"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_no_row_is_rebuilt_where_bins_have_five_rows(settings, write_table, aggregation):
    data = str(write_table(n_rows=60))
    few = {**SMALL, "num_boost_round": 3}
    run = settings(data=data, pax__aggregation=aggregation, least_bin_rows=5, **few)
    found = attack_masked_sums(run) if aggregation == "secure" else next(attack_plain_sums(run))
    assert found == {**found, "rows": 43, "rebuilt": 0, "wrong": 0}


def test_runs_that_the_attack_is_not_for_are_refused(settings):
    for other in ({"objective": "multi:softprob"}, {"colsample_bytree": 0.5}):
        with pytest.raises(ConfigError, match="the attacked run must have two classes"):
            next(attack_plain_sums(settings(**other)))


@pytest.mark.slow
def test_a_run_of_each_command_says_what_it_found(monkeypatch):
    words = ["--rounds", "2", "--max-bin", "16", "--least-bin-rows", "5"]
    lines = list(command(horizontal.pax_rows, words))
    assert [line["seen"] for line in lines] == [
        "each party's sums",
        "sums over all parties",
        "sums under masks",
    ]
    assert all(line["rebuilt"] <= line["rows"] == 409 for line in lines)
    assert {line["wrong"] for line in lines} == {0}
    monkeypatch.setattr(horizontal, "SHADOWS", 3)
    monkeypatch.setattr(horizontal, "MODELS", {"plain": {}})
    monkeypatch.setattr(horizontal, "USUAL", {"num-boost-round": 2, "eta": 0.3, "parties": 2})
    (line,) = command(horizontal.membership, ["--data", "breast-cancer", "--seeds", "1"])
    assert (line["how"], line["seeds"]) == ("plain", 1)
    assert -0.2 < line["threshold"] < 0.5


# How attacks are run and shown

WAYS = {"default": {}, "one": {"max-depth": 1}, "two": {"max-depth": 2}}


def attack(asked):
    def run(overrides):
        asked.append(overrides)
        return Outcome(0.5 + overrides["seed"], 0.25, 0.75)

    sets = {
        "first": {"data": "wine", "eta": 0.9},
        "second": {"data": "digits"},
    }
    return Attack("name", "who", "what", sets, WAYS, run)


def test_results_are_means_over_seeds_of_every_set_and_setting(tmp_path):
    asked = []
    found = list(attack_results(attack(asked), seeds=2, output=tmp_path))
    names = [(one["data"], one["setting"]) for one in found]
    assert names == [(data, way) for data in ("first", "second") for way in WAYS]
    assert {(one["success"], one["chance"], one["score"]) for one in found} == {(1.0, 0.25, 0.75)}
    assert asked[2:4] == [
        {"data": "wine", "eta": 0.9, "max-depth": 1, "seed": seed} for seed in (0, 1)
    ]


def test_a_run_that_is_kept_is_not_run_again(tmp_path):
    asked = []
    first = list(attack_results(attack(asked), seeds=2, output=tmp_path))
    n_runs = len(asked)
    assert list(attack_results(attack(asked), seeds=2, output=tmp_path)) == first
    assert len(asked) == n_runs
    list(attack_results(attack(asked), seeds=3, output=tmp_path))
    assert {one["seed"] for one in asked[n_runs:]} == {2}


def test_a_command_prints_a_table_and_where_runs_are_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["attacks", "--data", "first"])
    attack_main(attack([]))
    out = capsys.readouterr().out
    assert ["name", "first", "default", "0.500"] in [line.split()[:4] for line in out.splitlines()]
    assert out.endswith("\neach run is kept in runs/attacks/name\n")
    assert (tmp_path / "runs/attacks/name/first, default, seed 0.json").is_file()


@pytest.mark.parametrize("name", every.TABLED)
def test_an_attack_is_called_like_its_command_and_tried_on_two_sets(name):
    found = every.study_of("attacks", name)
    assert found.name == name
    assert len(found.data) >= 2
    assert len(found.ways) >= 2


# Labels from nodes

GROUPED = {"data": "breast-cancer", "columns": "sizes:15,15", "federated-forest.key-bits": 256}
GROUPED |= {"test-fraction": 0.85, "federated-forest.trees": 4}


@pytest.mark.slow
def test_nodes_that_stay_whole_tell_labels_and_those_of_a_shallow_forest_fewer():
    deep = vertical.attack_label_groups({**GROUPED, "seed": 1})
    shallow = vertical.attack_label_groups({**GROUPED, "seed": 1, "federated-forest.max-depth": 1})
    assert deep.success > deep.chance + 0.1 == shallow.chance + 0.1
    assert shallow.success < deep.success


def test_a_node_counts_where_it_has_rows_enough_and_a_column_differs():
    lefts = np.array([1, 3, LEAF, LEAF, LEAF])
    leaves = np.array([2, 2, 2, 3, 3, 4, 4, -1, -1], dtype=np.int32)
    drawn = np.array([True, True, False, *[True] * 6])
    column = [1.0, 2.0, 9.0, 1.0, np.nan, np.nan, np.nan, 1.0, 2.0]
    values = np.array(column, dtype=np.float32)[:, None]
    found = grouped.pure_nodes(lefts, leaves, drawn, values, fewest=2)
    assert [members.tolist() for members in found] == [[0, 1], [3, 4]]
    assert not list(grouped.pure_nodes(lefts, leaves, drawn, values, fewest=3))


def test_groups_that_share_a_row_become_one():
    groups = grouped.joined(grouped.joined(np.arange(5), np.array([3, 4])), np.array([0, 4]))
    assert groups.tolist() == [0, 1, 2, 0, 0]


def test_the_two_largest_groups_are_named_and_others_lie_between():
    labels = np.array([0, 0, 1, 1, 1, 0], dtype=np.float32)
    assert grouped.label_auc(np.array([0, 0, 2, 2, 4, 5]), labels) == pytest.approx(8.5 / 9)
    assert grouped.label_auc(np.array([0, 0, 0, 3, 4, 5]), labels) == pytest.approx(7.5 / 9)


@pytest.mark.slow
def test_impure_nodes_of_a_forest_tell_labels_too(monkeypatch):
    monkeypatch.setattr("fedapp.audit.labels.FOLDS", 2)
    monkeypatch.setattr("fedapp.audit.labels.DRAWS", 2)
    few = {**GROUPED, "columns": "sizes:28,2", "seed": 1, "federated-forest.max-depth": 2}
    few |= {"federated-forest.trees": 10}
    found = vertical.attack_forest_nodes(few)
    assert found.success > found.chance + 0.1


# Members


def members_and_others(shift, rng):
    """200 rows, of which half are members, whose margins are larger by a shift."""
    members = np.arange(200) < 100
    return scored.ScoredRows(rng.normal(size=200) + shift * members, members)


def test_an_advantage_is_what_other_rows_confirm():
    rng = np.random.default_rng(0)
    same = [advantage(members_and_others(0, rng), rng) for _ in range(5)]
    assert abs(np.mean(same)) < 0.06
    assert advantage(members_and_others(9, rng), rng) > 0.95
    tied = scored.ScoredRows(np.zeros(200), np.arange(200) < 100)
    assert advantage(tied, rng) == 0.0


def test_members_are_caught_above_all_but_one_in_a_hundred_others():
    rng = np.random.default_rng(0)
    assert np.mean([scored.caught(members_and_others(0, rng)) for _ in range(20)]) < 0.05
    assert scored.caught(members_and_others(9, rng)) == 1.0
    assert scored.caught(scored.ScoredRows(np.zeros(200), np.arange(200) < 100)) == 0.0


def test_a_margin_is_held_against_models_with_and_without_the_row():
    flags = np.array([[True, True, False], [False, True, True], [True, True, False]])
    margins = np.array([[5.0, 9.0, 1.0], [1.0, 9.0, 2.0], [7.0, 9.0, 1.0]])
    shadows = [scored.ScoredRows(*each) for each in zip(margins, flags, strict=True)]
    found = scored.above_usual(scored.ScoredRows(np.array([6.0, 9.0, 1.0]), flags[0]), shadows)
    # The row that has trained all models says nothing.
    assert found.margins.tolist() == [6.0 - (6.0 + 1.0) / 2, 1.0 - (2.0 + 1.0) / 2]
    assert found.members.tolist() == [True, False]


def test_a_margin_is_of_the_label():
    found = Scored(np.array([[0.1], [3], [-2]], np.float32), np.array([0, 1, 0], np.float32))
    np.testing.assert_allclose(horizontal.own_margins(found), [-0.1, 3, 2], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("forgets", [False, True])
def test_labels_are_certain_after_two_runs_if_the_second_draws_anew(monkeypatch, forgets):
    if forgets:
        monkeypatch.setattr("fedapp.site.labels.write_atomically", lambda *_, **__: None)
    lines = list(redraws.label_redraws(epsilons=(2.0,)))
    assert [line["of"] for line in lines] == [2940, 3000]
    by_classes, changed = (line["certain"] for line in lines)
    assert by_classes == 0
    assert changed > 20 if forgets else changed == 0
    assert all(line["right"] == line["certain"] for line in lines)
