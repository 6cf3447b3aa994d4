"""Explanations of rows: each party writes what it may see, and nobody else gets it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.errors import ConfigError
from fedapp.home import home
from fedapp.messages.inference import ExplainRequest
from fedapp.records.document import load
from fedapp.report import write_report
from fedapp.report.summary import importance_text
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.site.policy import check_policy
from fedapp.site.settings import SiteConfig
from fedapp.site.store import read_part
from fedapp.trees.divided import ActivePart, open_splits, path_to
from fedapp.trees.model import Ensemble
from strategies.eini import Eini
from tests.federated import summary_of
from tests.forests import joined, part_of
from tests.tables import made_columns, write_rows
from tests.transcript import arrays_of, listen, scalars_of

PARTIES = ("party-1", "party-2", "party-3")
WAYS = [
    *(("secureboost", way) for way in ("interactive", "eini")),
    *(("federated-forest", way) for way in ("interactive", "one-round")),
    pytest.param("federated-forest", "eini", marks=pytest.mark.slow),
]
ROW = "17"


@pytest.fixture
def train(settings, tmp_path, trained_once):
    """A model of 4 trees of three parties, and its settings."""

    def make(strategy, **more):
        data = write_rows(tmp_path / "rows.csv", made_columns("binary:logistic", n_rows=150))
        given = {"data": str(data), "label": "y", "parties": 3, "align": "ordered"}
        given |= {"max_depth": 3, "num_boost_round": 4, "allow_export": True}
        given |= {"secureboost__key_bits": 512, "secureboost__insecure_small_key": True}
        given |= {"federated_forest__trees": 4, "federated_forest__max_depth": 3}
        run = settings(**{"strategy": strategy, **given, **more})
        return run, trained_once(run)

    return make


def prediction(make, trained, way, **more):
    model = summary_of(RunFolder(Path(trained.run_dir)))["model_id"]
    given = {"strategy": way, "data": trained.data, "parties": 3, "model": model}
    given |= {"eini__key_bits": 512, "eini__insecure_small_key": True, "eini__unguarded": True}
    return make(**{**given, "align": "ordered", "explain": ROW, **more})


def explanations(folder):
    """What lies at each party."""
    where = {name: home() / "sites" / name / summary_of(folder)["model_id"] for name in PARTIES}
    return {
        name: json.loads((path / "explanation.json").read_text()) for name, path in where.items()
    }


def splits_of(document, row=ROW):
    return document["rows"][row]["splits"]


@pytest.mark.slow
@pytest.mark.by_default("secureboost-eini", "federated-forest*")
@pytest.mark.parametrize(("strategy", "way"), WAYS)
def test_a_party_has_its_own_thresholds_and_values_alone(train, settings, strategy, way):
    trained, folder = train(strategy)
    found = explanations(run_local(prediction(settings, trained, way)))
    n_shown = 0
    for name in PARTIES:
        part = part_of(name, summary_of(folder)["model_id"])
        columns = [part["columns"][column] for column in part["lookup"]["columns"]]
        own = {*zip(columns, map(np.float32, part["lookup"]["thresholds"]), strict=True)}
        shown = [split for split in splits_of(found[name]) if "threshold" in split]
        assert {(split["column"], split["threshold"]) for split in shown} <= own
        assert all("value" not in split or "threshold" in split for split in splits_of(found[name]))
        n_shown += len(shown)
        if name != "party-1":
            assert len(shown) == len(splits_of(found[name]))
            assert set(found[name]["rows"][ROW]) == {"splits"}
    assert n_shown


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "way"), WAYS)
def test_all_explanations_together_are_the_rows_way(train, settings, strategy, way):
    # Splits that are open by each party's own knowledge hold those that the row reaches.
    trained, folder = train(strategy)
    found = explanations(run_local(prediction(settings, trained, way)))
    is_forest = strategy == "federated-forest"
    model = joined(folder) if is_forest else load(folder.path / "model.json", Ensemble)
    active = found["party-1"]["rows"][ROW]
    values = np.array(list(made_columns("binary:logistic", n_rows=150).values()))[:-1, int(ROW)]
    row = dict(zip("abcdef", values, strict=True))
    reached = set()
    for tree in model.trees:
        node = 0
        while tree["left"][node] >= 0:
            at = tree[node]
            column, value = (
                model.columns[at["column"]],
                np.float32(row[model.columns[at["column"]]]),
            )
            is_left = bool(at["default_left"] if np.isnan(value) else value < at["threshold"])
            reached.add((column, float(at["threshold"]), "left" if is_left else "right"))
            node = at["left"] + (not is_left)
    told = {
        (split["column"], split["threshold"], split["side"])
        for name in PARTIES
        for split in splits_of(found[name])
        if "threshold" in split
    }
    assert reached <= told
    if way == "interactive":
        assert reached == told
    assert ("leaves" in active) == (way != "eini")
    assert all(("side" in split) == ("threshold" in split) for split in active["splits"]) == (
        way == "eini"
    )


@pytest.mark.by_default("secureboost-interactive", "federated-forest-one-round")
@pytest.mark.parametrize(("strategy", "way"), WAYS)
def test_the_score_is_the_written_one_and_the_leaves_add_up_to_it(train, settings, strategy, way):
    trained, folder = train(strategy)
    summary = summary_of(run := run_local(prediction(settings, trained, way)))
    path = home() / "sites" / "party-1" / summary["model_id"] / "predictions.csv"
    line = path.read_text().splitlines()[1 + int(ROW)].split(",")
    active = explanations(run)["party-1"]["rows"][ROW]
    assert line[0].strip('"') == ROW
    assert active["score"]["probability_1"] == pytest.approx(float(line[1]), abs=1e-12)
    if way != "eini":
        site = home() / "sites" / "party-1" / summary_of(folder)["model_id"]
        model = read_part(site, ActivePart).model
        sums = np.sum(active["leaves"], axis=0, keepdims=True)
        assert model.predictions_of(sums)[0, 0] == pytest.approx(float(line[1]), abs=1e-9)


@pytest.mark.slow
def test_the_coordinator_gets_nothing_but_what_it_has_said(train, settings):
    trained, _ = train("secureboost", columns="random")
    folder, app = listen(prediction(settings, trained, "interactive", explain=f"{ROW},nobody"))
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
    text = home() / "sites" / "party-1" / summary_of(folder)["model_id"] / "explanation.txt"
    assert f"Row {ROW}, probability_1 0." in text.read_text()
    assert "Not among the rows: nobody" in text.read_text()


@pytest.mark.slow
def test_shared_names_show_whose_columns_split_at_the_active_party(train, settings):
    names = set("abcdef")
    for shared in (True, False):
        trained, _ = train("secureboost", share_column_names=shared)
        found = explanations(run_local(prediction(settings, trained, "eini")))
        others = [one for one in splits_of(found["party-1"]) if one["party"] != "party-1"]
        assert others
        assert all((one["column"] in names) == shared for one in others)
        assert all(one["gain"] > 0 and "threshold" not in one for one in others)


@pytest.mark.slow
def test_the_command_explains_rows(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained, folder = train("secureboost", allow_export=False)
    arguments = ["predict", str(folder.path), "--data", trained.data, "--output", "out.csv"]
    result = CliRunner().invoke(cli, [*arguments, "--explain", "17,4"])
    assert result.exit_code == 0, result.output
    assert "Each party's explanation.txt is in home/sites." in result.output
    (path,) = (home() / "sites" / "party-1").glob("*/explanation.json")
    rows = json.loads(path.read_text())["rows"]
    assert set(rows) == {"17", "4"}


def test_rows_of_a_whole_model_are_explained_by_their_ids(settings, tmp_path):
    folder, file = run_local(settings(num_boost_round=1)), tmp_path / "out.csv"
    arguments = ["predict", str(folder.path), "--data", "breast-cancer", "--output", str(file)]
    result = CliRunner().invoke(cli, [*arguments, "--explain", "17,nobody"])
    assert str(result.exception) == (
        "--explain must name rows of the table, got 1 others: 'nobody'"
    )
    assert CliRunner().invoke(cli, [*arguments, "--explain", "17"]).exit_code == 0
    written = (tmp_path / "out-explanation.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in written] == ['"row"', '"17"']


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("strategy", ["secureboost", "federated-forest"])
def test_the_report_has_gain_and_splits_by_shared_name(train, strategy):
    _, folder = train(strategy, share_column_names=True)
    importance = summary_of(folder)["importance"]
    assert set(importance["gain"]) == set(importance["count"]) <= set("abcdef")
    assert len(importance["gain"]) > 3
    page = write_report(folder.path).read_text()
    n_columns = len(importance["gain"])
    summary = summary_of(folder)
    assert f"</svg><figcaption>{importance_text(summary)}; all {n_columns} in use<" in page
    for name, gain in importance["total_gain"].items():
        assert importance["gain"][name] == gain / importance["count"][name]
        row = rf">{name}</[^<]*<td[^>]*>.*?</td><td[^>]*>{re.escape(f'{gain:.6g}')}</td><td[^>]*>"
        assert re.search(f"{row}{importance['count'][name]}</td>", page)
    _, unnamed = train(strategy, share_column_names=False)
    assert not set(summary_of(unnamed)["importance"].get("gain", {})) & set("abcdef")


@pytest.mark.parametrize("explain", [",", "3,,4", "3,"])
def test_rows_without_an_id_are_refused(settings, explain):
    with pytest.raises(ConfigError, match="explain must be ids of up to 100 rows, separated by"):
        Eini.section_settings(settings(strategy="eini", model="0" * 16, explain=explain))


def test_a_site_explains_in_runs_of_the_methods_it_allows():
    config = SiteConfig("bank", "rows.csv", allowed=frozenset({"eini"}))
    check_policy(config, ExplainRequest.kind, "eini")
    with pytest.raises(ConfigError, match="strategy must be one that the site allows"):
        check_policy(config, ExplainRequest.kind, "interactive")


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
