"""Which horizontal method to take: ways to deal rows out, and the table."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from fedapp.data.partition import partition_rows
from fedapp.errors import ConfigError
from fedapp.runs.baselines import run_baselines
from fedapp.settings import load_settings
from simulations.papers import noniid
from simulations.papers.noniid import ALONE, POOLED


def test_each_party_has_half_the_rows_of_the_one_before():
    rows = np.arange(10_230)
    shares = partition_rows(noniid.halved(10), rows, 10, np.random.default_rng(0))
    assert [len(share) for share in shares] == [5120 >> party for party in range(10)]


def test_scenarios_go_from_chance_to_unlike_parties_and_from_two_to_a_hundred():
    skews = noniid.skews("default-credit")
    assert [one.partition.partition(":")[0] for one in skews] == [
        *("iid", "dirichlet", "dirichlet", "dirichlet", "sizes", "column")
    ]
    assert [one.parties for one in noniid.counts("adult", 100)] == [2, 5, 10, 30, 100]
    assert [one.parties for one in noniid.counts("adult", 10)] == [2, 5, 10]
    every = {one.folder for one in [*skews, *noniid.counts("default-credit", 100)]}
    assert len(every) == 10  # rows by chance at five parties are of both kinds


@pytest.mark.parametrize("method", noniid.METHODS)
def test_settings_of_every_method_can_be_read(method):
    for scenario in noniid.skews("adult"):
        settings = noniid.settings_of(scenario, method, 7)
        assert (settings.seed, settings.parties) == (7, scenario.parties)
        assert settings.strategy == noniid.METHODS[method]["strategy"]


@pytest.mark.parametrize("method", noniid.METHODS)
def test_steps_are_those_of_the_command_but_for_methods_that_have_their_own(method):
    scenario = noniid.counts("adult", 2)[0]
    large, small = (
        noniid.settings_of(replace(scenario, steps=steps), method, 7)
        for steps in (noniid.LARGE, noniid.SMALL)
    )
    if method == "fedavg-linear":
        assert small == large
    elif method == "fedxgbllr":
        assert large.sections[method] == load_settings({}).sections[method]
        assert small.sections[method] == large.sections[method] | {"max-depth": 4}
    else:
        assert (large.eta, large.max_depth, large.early_stopping_rounds) == (0.3, 6, 0)
        assert (small.eta, small.max_depth, small.num_boost_round) == (0.1, 4, 100)


SCORES = {"pax": 0.80, "bagging": 0.797, "cyclic": 0.79, POOLED: 0.81, ALONE: 0.7}
COSTS = {"pax": (300, 9e6), "bagging": (50, 1e6), "cyclic": (20, 1e5)}


def rows(**more):
    scenario = {"data": "adult", "name": "by chance", "partition": "iid", "parties": 3}
    found = []
    for method, score in SCORES.items():
        exchanges, n_bytes = COSTS.get(method, (None, None))
        costs = {"exchanges": exchanges, "bytes": n_bytes, "seconds": 1.0} if exchanges else {}
        found.append({**scenario, "method": method, "score": score, "seed": 42, **costs, **more})
    return found


def test_every_method_has_a_line_and_baselines_send_nothing(monkeypatch, capsys):
    monkeypatch.setattr(noniid, "METHODS", COSTS)
    (print_table,) = noniid.STUDY.tables["rows"]
    print_table(rows(), {"seeds": 1, "steps": "small"})
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[4:] for line in lines] == [
        ["pax", "0.8000", "300", "9.0", "1.0"],
        ["bagging", "0.7970", "50", "1.0", "1.0"],
        ["cyclic", "0.7900", "20", "0.1", "1.0"],
        ["pooled", "0.8100"],
        ["alone", "0.7000"],
    ]


def test_unknown_sets_and_steps_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"^data must be of default-credit, adult, got 'wine'$"):
        noniid.main(data=("wine",))
    with pytest.raises(ConfigError, match=r"^steps must be of large, small, got 'tiny'$"):
        noniid.main(steps="tiny")


def test_a_party_with_rows_of_one_class_scores_by_chance_alone(tmp_path):
    values = np.random.default_rng(0).normal(size=60)
    labels = (values > 0).astype(int)
    table = pa.table({"x": values, "site": np.array(["north", "south"])[labels], "y": labels})
    pa.parquet.write_table(table, tmp_path / "sites.parquet")
    given = {"data": str(tmp_path / "sites.parquet"), "label": "y", "partition": "column:site"}
    found = run_baselines(load_settings({**given, "parties": 2, "num-boost-round": 1}))
    assert found["pooled"]["auc"] == 1.0
    assert {scores["auc"] for scores in found["alone"].values()} == {0.5}


@pytest.mark.slow
def test_all_is_written_and_finished_runs_are_not_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(noniid, "NATURAL", {"breast-cancer": "mean radius"})
    monkeypatch.setattr(
        noniid, "METHODS", {"pax": {"strategy": "pax"}, "bagging": {"strategy": "bagging"}}
    )
    monkeypatch.setattr(noniid, "ALPHAS", (0.3,))
    monkeypatch.setattr(noniid, "N_PARTIES", 3)
    few = {"preset": "xgboost", "num-boost-round": 5}
    monkeypatch.setattr(noniid, "BOOSTED", dict.fromkeys(noniid.BOOSTED, few))
    folder = tmp_path / "steps-small"
    noniid.main(most=3, data=("breast-cancer",), output=tmp_path)
    first = json.loads((folder / "tables.json").read_text())
    assert {row["method"] for row in first["rows"]} == {"pax", "bagging", POOLED, ALONE}
    monkeypatch.setattr(noniid, "run_and_tidy", None)
    capsys.readouterr()
    noniid.main(most=3, data=("breast-cancer",), output=tmp_path)
    assert json.loads((folder / "tables.json").read_text())["rows"] == first["rows"]
    with pytest.raises(TypeError):  # runs with other steps are other runs
        noniid.main(most=3, data=("breast-cancer",), steps="large", output=tmp_path)
