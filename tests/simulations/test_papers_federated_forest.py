"""The table and the figures of the Federated Forest paper."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedapp.data.datasets import read_source
from fedapp.errors import ConfigError
from fedapp.runs.baselines import join_tables, run_baselines
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from simulations import paper as every
from simulations.papers import federated_forest
from simulations.papers import federated_forest as paper

SMALL = {"TREES": 3, "DEPTH": 2, "DATA": ("breast-cancer", "diabetes"), "DOMAIN_SEEDS": 2}
SMALL |= {"DOMAIN_DATA": "breast-cancer", "DOMAINS": (2, 3)}
POINTS = {
    "figure_4": ("trees", [(2, 2, 0.2), (4, 2, 0.2)]),
    "figure_5": ("depth", [(2, 2, 0.2), (2, 3, 0.2)]),
    "figure_6": ("share", [(2, 2, 0.1), (2, 2, 0.2)]),
}


@pytest.fixture
def _short(monkeypatch):
    """Runs of a fraction of a second."""
    for name, value in SMALL.items():
        monkeypatch.setattr(paper, name, value)
    engines = dict.fromkeys(federated_forest.ENGINES, run_local)
    small = {"ENGINES": engines, "PREDICTED": ("breast-cancer",), "FIGURES": POINTS}
    small["TIMED"] = dict.fromkeys(engines, 1)
    for name, value in small.items():
        monkeypatch.setattr(federated_forest, name, value)


# Table 1


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        # Of the paper's Table 1: year prediction, superconduct.
        ((9.537, 0.003), (9.555, 0.061), 0.058),
        ((15.369, 0.118), (15.411, 0.163), 0.186),
        ((0.0, 0.6), (1.96 / 40**0.5, 0.8), 0.05),
        ((0.5, 0.1), (0.5, 0.2), 1.0),
        ((0.5, 0.0), (0.5, 0.0), 1.0),
        ((0.5, 0.0), (0.6, 0.0), 0.0),
    ],
)
def test_the_z_test_is_the_papers_where_its_numbers_agree(first, second, expected):
    assert paper.p_value(first, second, 40) == pytest.approx(expected, abs=0.006)


def test_the_papers_numbers_for_spambase_do_not_give_its_p():
    row = paper.PRINTED["spambase"]
    assert paper.p_value(row["NonFF"], row["FF"], 40) < 1e-5 < row["p"]


def test_means_are_of_what_every_repeat_has():
    draws = np.random.default_rng(0).normal(0.9, 0.02, 40)
    rows = [
        {"data": "x", "RF1": 0.8, "RF2": 0.7, "LR": None, "NonFF": draw, "FF": draw - 0.002}
        for draw in draws
    ]
    found = paper.tested(rows)
    assert found["p"] > 0.5
    assert (found["RF1"], found["repeats"], "LR" in found) == (0.8, 40, False)


@pytest.mark.parametrize("data", ["breast-cancer", "wine", "diabetes"])
def test_what_the_forest_is_held_against_has_the_runs_rows_and_columns(data):
    objective = paper.OBJECTIVES[paper.find_dataset(data).task]
    given = {**paper.own_settings(objective, 5, 4), "data": data, "columns": "random", "seed": 3}
    settings, name = load_settings(given), paper.score_name(objective)
    found, expected = paper.others(settings), run_baselines(settings)
    assert found["NonFF"] == expected["pooled"][name]
    assert found["RF1"] == expected["alone"]["party-1"][name]
    assert len({found["RF1"], found["RF2"], found["NonFF"]}) == 3
    assert (found["LR"] is None) == (data == "wine")


def test_a_linear_model_finds_what_is_linear():
    settings = load_settings({**paper.own_settings("reg:squarederror", 1, 1), "data": "diabetes"})
    table, _, _ = join_tables(settings)
    labels = (table.values @ np.arange(1.0, 11.0)).astype(np.float32)
    found = paper.linear_score("reg:squarederror", replace(table, labels=labels))
    assert found == pytest.approx(0, abs=1e-5)
    signs = (labels > np.median(labels)).astype(np.float32)
    accuracy = paper.linear_score("binary:logistic", replace(table, labels=signs))
    assert accuracy is not None
    assert accuracy > 0.9


def test_rare_classes_are_not_drawn(monkeypatch):
    monkeypatch.setattr(paper, "KDD_ROWS", 500)
    labels = np.array(["many"] * 900 + ["some"] * 90 + ["few"] * 10)
    rows = paper.drawn_rows(labels)
    assert set(labels[rows]) == {"many", "some"}
    assert 480 < len(set(rows.tolist())) == len(rows) < 500


# Figure 3


def test_domains_join_one_after_the_other():
    table = read_source("breast-cancer")
    two, of_two = paper.domains_of(table, 2)
    all_columns, of_all = paper.domains_of(table, paper.N_DOMAINS)
    assert (of_two, of_all) == ("sizes:3,3", "sizes:" + ",".join("3" * 10))
    assert two.columns == all_columns.columns[:6]
    assert sorted(all_columns.columns) == sorted(table.columns)
    place = table.columns.index(two.columns[4])
    np.testing.assert_array_equal(two.values[:, 4], table.values[:, place])


# Figures 4 to 6


def timed(way, point, seconds, engine):
    row = {"data": "spambase", "engine": engine, "way": way, "rows": 9, "exchanges": 2}
    return {**row, **dict(zip(federated_forest.AXES, point, strict=True)), "seconds": seconds}


def test_other_predictions_are_refused(tmp_path):
    rows = []
    for way, value in (("one-round", 0.25), ("classical", 0.25), ("all trees at once", 0.5)):
        folder = tmp_path / way
        folder.mkdir()
        parquet.write_table(pa.table({"row": ["0"], "p": [value]}), folder / "predictions.parquet")
        rows.append({**timed(way, (8, 4, 0.2), 1, "simulation"), "folder": str(folder)})
    federated_forest.check_same(rows[:2])
    with pytest.raises(ValueError, match="predictions must be alike, got others all trees at once"):
        federated_forest.check_same(rows)


@pytest.mark.usefixtures("_short")
@pytest.mark.slow
def test_all_is_written_and_finished_runs_are_not_run_again(tmp_path, monkeypatch, capsys):
    output = tmp_path / "out"
    paper.main(repeats=2, predicted_sets=("breast-cancer",), output=output)
    first = json.loads((output / "tables.json").read_text())
    assert [row["data"] for row in first["table_1"]] == ["breast-cancer", "diabetes"]
    run = json.loads((output / "diabetes" / "federated-forest-42" / "summary.json").read_text())
    again = json.loads((output / "diabetes" / "federated-forest-43" / "summary.json").read_text())
    scores = [summary["metrics"]["test"]["rmse"] for summary in (run, again)]
    assert first["table_1"][1]["FF"][0] == pytest.approx(np.mean(scores))
    assert [row["columns"] for row in first["figure_3"]] == [6, 9]
    timed_rows = first["figures_4_to_6"]
    assert len(timed_rows) == 4 * 3 * 2  # points, ways, engines
    exchanges = {(row["way"], row["trees"], row["depth"]): row["exchanges"] for row in timed_rows}
    assert exchanges["one-round", 2, 2] == exchanges["one-round", 4, 2] == 2
    assert exchanges["classical", 4, 2] > exchanges["classical", 2, 2]
    assert exchanges["classical", 2, 2] > exchanges["all trees at once", 2, 2]
    assert not list(output.glob("*.parquet"))

    def fail(*_):
        raise AssertionError("must not run again")

    monkeypatch.setattr(every, "run_and_keep", fail)
    monkeypatch.setattr(paper, "run_and_tidy", fail)
    monkeypatch.setattr(paper, "run_local", fail)
    capsys.readouterr()
    paper.main(repeats=2, predicted_sets=("breast-cancer",), output=output)
    assert ": done" not in capsys.readouterr().out
    again = json.loads((output / "tables.json").read_text())
    assert again["figures_4_to_6"] == timed_rows


def test_one_repeat_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^repeats must be >= 2, got 1$"):
        paper.main(repeats=1, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
