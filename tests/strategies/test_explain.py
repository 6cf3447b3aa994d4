"""Explanations of rows: each party writes what it may see, and nobody else gets it."""

import json
from functools import partial

import numpy as np
import pytest
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.errors import ConfigError
from fedapp.home import home
from fedapp.runs.local import run_local
from fedapp.site.store import read_part
from fedapp.trees.divided import ActivePart, open_splits, path_to
from strategies.eini import Eini
from tests.encrypted import EINI, inference
from tests.federated import model_of
from tests.forests import joined, part_of
from tests.tables import made_columns
from tests.transcript import arrays_of, listen, scalars_of

PARTIES = ("party-1", "party-2", "party-3")
WAYS = [
    *(("secureboost", way) for way in ("interactive", "eini")),
    *(("federated-forest", way) for way in ("interactive", "one-round", "eini")),
]
ROW = "17"


@pytest.fixture
def train(divided):
    """A model of 4 trees of three parties, and its settings."""
    few = {"num_boost_round": 4, "federated_forest__trees": 4, "allow_export": True}
    return partial(divided, n_rows=150, parties=3, **few)


def explanations(folder):
    """What each party has of it."""
    file = f"{folder.summary['model_id']}/explanation.json"
    return {name: json.loads((home() / "sites" / name / file).read_text()) for name in PARTIES}


def reached_splits(model, row):
    """The splits that a row comes to, with the sides that it takes."""
    values, reached = dict(zip("abcdef", row, strict=True)), set()
    for tree in model.trees:
        node = 0
        while tree["left"][node] >= 0:
            at = tree[node]
            column = model.columns[at["column"]]
            value = np.float32(values[column])
            is_left = bool(at["default_left"] if np.isnan(value) else value < at["threshold"])
            reached.add((column, float(at["threshold"]), "left" if is_left else "right"))
            node = at["left"] + (not is_left)
    return reached


@pytest.mark.by_default("secureboost-eini", "federated-forest-one-round")
@pytest.mark.parametrize(("strategy", "way"), WAYS)
def test_each_party_has_its_thresholds_and_together_they_are_the_rows_way(
    train, settings, strategy, way
):
    trained, folder = train(strategy)
    model_id, small_key = folder.summary["model_id"], EINI if way == "eini" else {}
    how = {"strategy": way, "align": "ordered", "explain": ROW, **small_key}
    predicted = run_local(inference(settings, trained, **how))
    found = explanations(predicted)
    splits = {name: found[name]["rows"][ROW]["splits"] for name in PARTIES}
    told = {name: [each for each in splits[name] if "threshold" in each] for name in PARTIES}
    for name in PARTIES:
        part = part_of(name, model_id)
        columns = [part["columns"][column] for column in part["lookup"]["columns"]]
        cuts = {*zip(columns, map(np.float32, part["lookup"]["thresholds"]), strict=True)}
        assert {(split["column"], split["threshold"]) for split in told[name]} <= cuts
        assert all("value" not in split or "threshold" in split for split in splits[name])
        if name != "party-1":
            assert told[name] == splits[name]
            assert set(found[name]["rows"][ROW]) == {"splits"}
    # Splits that are open by each party's own knowledge hold those that the row reaches.
    model = joined(folder) if strategy == "federated-forest" else model_of(folder)
    values = np.array(list(made_columns("binary:logistic", n_rows=150).values()))[:-1, int(ROW)]
    every = {
        (each["column"], each["threshold"], each["side"]) for one in told.values() for each in one
    }
    reached = reached_splits(model, values)
    assert reached == every if way == "interactive" else reached <= every
    # The active party has the score, and leaves where it gets to know them.
    active = found["party-1"]["rows"][ROW]
    as_told = [("side" in each) == ("threshold" in each) for each in active["splits"]]
    assert all(as_told) == (way == "eini")
    site = home() / "sites" / "party-1"
    path = site / predicted.summary["model_id"] / "predictions.csv"
    row, score = path.read_text().splitlines()[1 + int(ROW)].split(",")
    assert row.strip('"') == ROW
    assert active["score"]["probability_1"] == pytest.approx(float(score), abs=1e-12)
    assert ("leaves" in active) == (way != "eini")
    if way != "eini":
        sums = np.sum(active["leaves"], axis=0, keepdims=True)
        shares = read_part(site / model_id, ActivePart).model.predictions_of(sums)
        assert shares[0, 0] == pytest.approx(float(score), abs=1e-9)


def test_the_coordinator_gets_nothing_but_what_it_has_said(train, settings):
    trained, _ = train(columns="random")
    asks = {"columns": "random", "align": "ordered", "explain": f"{ROW},nobody"}
    folder, app = listen(inference(settings, trained, **asks))
    asked = app.of_kind("explain_rows")
    assert len(asked) == 3
    for request, reply in asked:
        assert (scalars_of(request), arrays_of(request)) == ({"rows": [ROW, "nobody"]}, {})
        assert (scalars_of(reply), arrays_of(reply)) == ({"done": True}, {})
    for path in folder.path.iterdir():
        text = path.read_text(errors="replace").replace("max-cat-threshold", "")  # a setting
        assert "threshold" not in text
    found = explanations(folder)
    assert [found[name]["not_among_the_rows"] for name in PARTIES] == [["nobody"]] * 3


@pytest.mark.by_default("False")
@pytest.mark.parametrize("shared", [True, False])
def test_shared_names_show_whose_columns_split(train, tmp_path, monkeypatch, shared):
    monkeypatch.chdir(tmp_path)
    trained, folder = train(allow_export=False, share_column_names=shared)
    names, importance = {*"abcdef"}, folder.summary["importance"]
    assert bool(names & set(importance.get("gain", {}))) == shared
    for name, gain in importance.get("total_gain", {}).items():
        assert importance["gain"][name] == gain / importance["count"][name]
    words = ["predict", str(folder.path), "--data", trained.data, "--output", "out.csv"]
    small = [f"-c{name.replace('__', '.').replace('_', '-')}={EINI[name]}" for name in EINI]
    words += ["--inference", "eini", *map(str.lower, small), "--explain", "17,4"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert "Each party's explanation.json is in home/sites." in result.output
    (path,) = (home() / "sites" / "party-1").glob("*/explanation.json")
    rows = json.loads(path.read_text())["rows"]
    assert set(rows) == {"17", "4"}
    others = [one for one in rows[ROW]["splits"] if one["party"] != "party-1"]
    assert others
    assert all((one["column"] in names) == shared for one in others)
    assert all(one["gain"] > 0 and "threshold" not in one for one in others)


def test_rows_of_a_whole_model_are_explained_by_their_ids(settings, tmp_path):
    folder, file = run_local(settings(num_boost_round=1)), tmp_path / "out.csv"
    arguments = ["predict", str(folder.path), "--data", "breast-cancer", "--output", str(file)]
    result = CliRunner().invoke(cli, [*arguments, "--explain", "17,nobody"])
    rule = "--explain must name rows of the table, got 1 others: 'nobody'"
    assert str(result.exception) == rule
    assert CliRunner().invoke(cli, [*arguments, "--explain", "17"]).exit_code == 0
    written = (tmp_path / "out-explanation.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in written] == ['"row"', '"17"']


@pytest.mark.parametrize("explain", [",", "3,,4", "3,"])
def test_rows_without_an_id_are_refused(settings, explain):
    with pytest.raises(ConfigError, match="explain must be ids of up to 100 rows, separated by"):
        Eini.section_settings(settings(strategy="eini", model="0" * 16, explain=explain))


def test_open_splits_are_those_no_known_split_turns_the_row_away_from():
    #        0
    #      1   2
    #     3 4 5 6
    lefts = np.array([1, 3, 5, -1, -1, -1, -1])
    for known, expected in (
        ({}, [0, 1, 2]),
        ({0: True}, [0, 1]),
        ({0: False, 1: True}, [0, 2]),
        ({1: True}, [0, 1, 2]),
    ):
        nodes, sides = np.array(list(known), dtype=np.int64), np.array(list(known.values()))
        assert open_splits(lefts, nodes, sides) == expected
    assert path_to(lefts, 5) == [(0, False), (2, True)]
    assert path_to(np.array([-1]), 0) == []
