"""Whose table is whose when parties predict together, and what the answer says of it."""

import csv
import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import xgboost
from sklearn import metrics as sk
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.data.datasets import sources_to_predict
from fedapp.data.predictions import read_columns_of
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, DataError
from fedapp.home import home
from fedapp.runs.baselines import table_facts
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.site.joined import read_joined
from fedapp.site.table import check_range, quantiles, unlike_columns
from fedapp.trees.divided import joint_names
from tests.federated import summary_of

N_ROWS = 200


@pytest.fixture
def tables(tmp_path):
    """Tables of a bank, which has the labels, and of an insurer, with columns of the same names."""
    rng = np.random.default_rng(3)
    values = {"bank": rng.normal(size=(N_ROWS, 2)), "insurer": rng.uniform(5, 9, (N_ROWS, 2))}
    label = (values["bank"][:, 0] + values["insurer"][:, 1] > 7).astype(int)
    paths = {}
    for party, columns in values.items():
        paths[party] = tmp_path / f"{party}.csv"
        lines = ["id,a,b" + (",y" if party == "bank" else "")]
        for row, cells in enumerate(columns.round(3)):
            end = f",{label[row]}" if party == "bank" else ""
            lines.append(f"p{row},{cells[0]},{cells[1]}{end}")
        paths[party].write_text("\n".join(lines) + "\n")
    return paths


def named(tables):
    return ",".join(f"{party}={path}" for party, path in tables.items())


def some_rows(path, first, last, drop=""):
    """A copy with some of the rows, without a column."""
    rows = list(csv.DictReader(path.read_text().splitlines()))[first:last]
    copy = path.with_name(f"{path.stem}-{first}-{last}{drop}.csv")
    with copy.open("w", newline="") as file:
        names = [name for name in rows[0] if name != drop]
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return copy


@pytest.fixture
def train(vertical, tables, monkeypatch, tmp_path):
    """A model of both tables, whose parts stay at the parties unless something else is said."""
    monkeypatch.chdir(tmp_path)

    def make(**more):
        given = {"data": named(tables), "label": "y", "id": "id", "allow_export": False, **more}
        return run_local(vertical(**given))

    return make


def predict(folder, data, *more):
    """Exit status and output of the command."""
    arguments = ["predict", str(folder.path), "--data", data, "--id", "id", "--output", "out.csv"]
    result = CliRunner().invoke(cli, [*arguments, *more])
    return result.exit_code, result.output + str(result.exception or "")


def scores():
    """Predictions by id."""
    with Path("out.csv").open() as file:
        return {row["id"]: float(row["probability_1"]) for row in csv.DictReader(file)}


@pytest.mark.slow
def test_files_without_names_are_refused_with_the_names_to_give(train, tables):
    folder = train()
    match = "must say which table is whose, as in bank=TABLE,insurer=TABLE, got"
    assert match in predict(folder, f"{tables['bank']},{tables['insurer']}")[1]
    status, text = predict(folder, str(tables["insurer"]))
    assert status
    assert match in text
    assert not Path("out.csv").exists()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ("bank=a.csv", r"a table for every party of the model \(bank, insurer\), got none for ins"),
        ("bank=a.csv,shop=b.csv", r"must name parties of the model \(bank, insurer\), got 'shop'"),
        ("bank=a.csv,insurer=a.csv", "a different table for every party, got a.csv for bank and"),
        ("bank=a.csv,b.csv", "must name all parties or none"),
    ],
)
def test_tables_must_be_those_of_the_models_parties(data, match):
    with pytest.raises(ConfigError, match=match):
        sources_to_predict(data, ["insurer", "bank"], may_be_one=False)


def test_one_table_is_enough_where_one_was_split():
    assert sources_to_predict("all.csv", ["party-1", "party-2"], may_be_one=True) == {}


@pytest.mark.slow
def test_the_answer_says_who_read_what_and_scores_by_the_label(train, tables):
    folder = train()
    status, text = predict(folder, named(tables))
    assert status == 0, text
    sizes = "(200 rows, 2 columns)"
    expected = f"bank read {tables['bank']} {sizes}, insurer read {tables['insurer']} {sizes}"
    assert expected in text
    assert "200 rows written to out.csv" in text
    rows = list(csv.DictReader(tables["bank"].read_text().splitlines()))
    truth, found = [int(row["y"]) for row in rows], scores()
    area = sk.roc_auc_score(truth, [found[row["id"]] for row in rows])
    assert f"{area:.4f}" in text
    threshold = summary_of(folder)["threshold"]["value"]
    recall = sk.recall_score(truth, [found[row["id"]] >= threshold for row in rows])
    assert f"at the run's threshold, {threshold:.4f}: f1" in text
    assert f"recall {recall:.4f}" in text


@pytest.mark.slow
@pytest.mark.by_default("whole")
@pytest.mark.parametrize("is_whole", [False, True], ids=["parts", "whole"])
def test_semicolons_in_tables_to_predict_are_told(train, tables, is_whole):
    folder = train(allow_export=is_whole)
    _, with_commas = predict(folder, named(tables))
    tables["bank"].write_text(tables["bank"].read_text().replace(",", ";"))
    status, text = predict(folder, named(tables))
    assert status == 0, text
    assert "data file is read as one with semicolons between its fields" in text
    assert "with semicolons" not in with_commas


@pytest.mark.slow
def test_parties_that_predict_read_the_tables_that_were_checked(train, tables, monkeypatch):
    folder, read = train(), []

    def counted(data, *how):
        read.append(data)
        return read_columns_of(data, *how)

    monkeypatch.setattr("fedapp.site.table.read_columns_of", counted)
    status, text = predict(folder, named(tables))
    assert status == 0, text
    assert sorted(read) == sorted(map(str, tables.values()))


@pytest.mark.slow
def test_files_in_the_wrong_order_are_refused(train, tables):
    """Both have columns a and b: the label column tells them apart, and the values."""
    folder = train()
    both = {"bank": tables["bank"], "insurer": some_rows(tables["bank"], 0, 200)}
    status, text = predict(folder, named(both))
    assert status
    assert "must not have the label column 'y': is it the table of the party with labels?" in text
    without = {"bank": tables["insurer"], "insurer": some_rows(tables["bank"], 0, 200, drop="y")}
    status, text = predict(folder, named(without))
    assert status == 0, text
    for party, path in without.items():
        assert f"{party} read {path} with values unlike those that the model was tr" in text


@pytest.mark.slow
def test_values_spread_unlike_those_trained_on_are_warned_of(train, tables):
    folder = train()
    lines = tables["insurer"].read_text().splitlines()
    narrow = tables["insurer"].with_name("narrow.csv")
    cells = [line.split(",") for line in lines[1:]]
    squeezed = [f"{name},{5 + float(a) / 9},{5 + float(b) / 9}" for name, a, b in cells]
    narrow.write_text("\n".join([lines[0], *squeezed]) + "\n")
    status, text = predict(folder, named({**tables, "insurer": narrow}))
    assert status == 0, text
    warned = f"insurer read {narrow} with values unlike those that the model was trained on in 2 of"
    assert warned in text


@pytest.mark.slow
@pytest.mark.by_default("interactive")
@pytest.mark.parametrize("inference", ["interactive", "eini"])
def test_rows_that_others_do_not_have_are_named(train, tables, inference):
    folder = train(align="psi")
    given = {
        "bank": some_rows(tables["bank"], 0, 20),
        "insurer": some_rows(tables["insurer"], 5, 99),
    }
    eini = ["-ceini.unguarded=true", "-ceini.key-bits=512", "-ceini.insecure-small-key=true"]
    more = eini if inference == "eini" else []
    status, text = predict(folder, named(given), "--inference", inference, *more)
    assert status == 0, text
    assert "15 rows written to out.csv" in text
    assert "5 of 20 rows were not matched (--verbose: which)" in text
    assert "p0" not in text.replace(str(folder.path.parent), "")
    assert not (folder.path / "verbose.log").exists()
    assert len(scores()) == 15
    status, text = predict(folder, named(given), "--inference", inference, *more, "--verbose")
    details = folder.path / "verbose.log"
    assert f"not matched: {details} has their ids" in " ".join(text.split())
    assert details.read_text() == "5 of 20 rows were not matched: p0, p1, p2, p3, p4\n"
    assert details.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_ids_to_explain_that_are_not_among_the_rows_are_named(train, tables):
    folder = train()
    status, text = predict(folder, named(tables), "--explain", "p3,p999", "--verbose")
    assert status == 0, text
    assert "1 to be explained are not among the rows: " in text
    assert "p999" not in text
    kept = (folder.path / "verbose.log").read_text()
    assert kept == "1 to be explained are not among the rows: p999\n"


@pytest.mark.slow
def test_a_site_keeps_unmatched_ids_and_scores_on_its_own_disk(
    vertical, settings, tables, sites, caplog
):
    nodes = [
        {"name": "bank", "data": tables["bank"], "id": "id"},
        {"name": "insurer", "data": tables["insurer"], "id": "id", "label": ""},
    ]
    folder = run_local(vertical(allow_export=False), sites(*nodes))
    nodes[0]["predict-data"] = some_rows(tables["bank"], 0, 20)
    nodes[1]["predict-data"] = some_rows(tables["insurer"], 5, 99)
    model = summary_of(folder)["model_id"]
    run = run_local(settings(strategy="interactive", model=model, parties=2), sites(*nodes))
    summary = summary_of(run)
    sidecar = home() / "sites" / "bank" / summary["model_id"] / "predictions.json"
    found = json.loads(sidecar.read_text())
    assert found["not_matched"] == ["p0", "p1", "p2", "p3", "p4"]
    assert found["rows"] == 15
    assert found["scores"]["auc"] is not None
    told = (run.path / "summary.json").read_text()
    assert summary["tables"]["bank"] == {"rows": 20, "columns": 2, "source": None}
    assert "p0" not in told
    assert summary["metrics"] == {}
    assert "5 of 20 rows were not matched: predictions.json has their ids" in caplog.text
    assert not re.search(r"\bp\d", caplog.text)


@pytest.mark.slow
def test_an_exported_model_of_equal_column_names_predicts_as_its_parties_do(
    train, tables, tmp_path
):
    status, text = predict(train(), named(tables))
    assert status == 0, text
    together = scores()
    folder = train(allow_export=True, share_column_names=True)
    booster = xgboost.Booster(model_file=folder.path / "model.xgb.json")
    assert booster.feature_names == ["bank.a", "bank.b", "insurer.a", "insurer.b"]
    backwards = {
        "insurer": some_rows(tables["insurer"], 0, 150),
        "bank": some_rows(tables["bank"], 0, 200),
    }
    status, text = predict(folder, named(backwards))
    assert status == 0, text
    found = scores()
    assert list(found) == [f"p{row}" for row in range(150)]
    assert found == pytest.approx({name: together[name] for name in found}, abs=1e-6)
    assert "150 rows written to out.csv" in text
    assert "50 of 200 rows were not matched (--verbose: which)" in text
    cells = []
    for path in (tables["bank"], tables["insurer"]):
        rows = csv.DictReader(path.read_text().splitlines())
        cells.append(np.array([[float(row[name]) for name in "ab"] for row in rows]))
    matrix = xgboost.DMatrix(np.hstack(cells), feature_names=booster.feature_names)
    stock = booster.predict(matrix)
    assert list(found.values()) == pytest.approx(stock[:150].tolist(), abs=1e-6)
    gains = summary_of(folder)["importance"]["gain"]
    assert {"bank.a", "insurer.b"} <= set(gains) <= set(booster.feature_names)


def test_the_report_explains_an_exported_model_of_equal_column_names(train, tables):
    folder = train(allow_export=True)
    run = load_settings(tomllib.loads((folder.path / "config.toml").read_text()))
    found = table_facts(run, folder.path)["contributions"]
    assert set(found["mean"]) == {"bank.a", "bank.b", "insurer.a", "insurer.b"}


@pytest.mark.slow
def test_a_whole_model_asks_for_the_parties_tables_by_name(train, tables):
    folder = train(allow_export=True)
    match = "must say which table is whose, as in bank=TABLE,insurer=TABLE"
    assert match in predict(folder, f"{tables['bank']},{tables['insurer']}")[1]
    lacks = {"bank": tables["bank"], "insurer": some_rows(tables["insurer"], 0, 9, drop="b")}
    match = "column 'insurer.b' of the model must be in one of the tables, got none"
    assert match in predict(folder, named(lacks))[1]


@pytest.mark.slow
def test_tables_of_an_exported_model_are_read_by_the_runs_schema(train, tables, tmp_path):
    """The insurer's b is -9 where it is missing; numbers have decimal commas, names other letters
    than UTF-8 has. Both tables in one file are read so too."""
    rows = {
        party: list(csv.reader(path.read_text().splitlines())) for party, path in tables.items()
    }
    for place, row in enumerate(rows["insurer"][1:]):
        row[2] = "-9" if place % 3 == 0 else row[2]
    for party, path in tables.items():
        names = [f"{name}_{party}ä" if name in ("a", "b") else name for name in rows[party][0]]
        lines = [";".join(names)]
        lines += [";".join(row).replace(".", ",") for row in rows[party][1:]]
        path.write_text("\n".join(lines) + "\n", encoding="latin-1")
    text = '[columns."b_insurerä"]\nmissing = ["-9"]\nname = "income"\n'
    (tmp_path / "schema.toml").write_text(text, encoding="utf-8")
    folder = train(
        allow_export=True,
        share_column_names=True,
        schema=str(tmp_path / "schema.toml"),
        decimal=",",
        encoding="latin-1",
    )
    model = json.loads((folder.path / "model.json").read_text())
    assert "income" in model["columns"]
    status, text = predict(folder, named(tables))
    assert status == 0, text
    found = scores()
    one = tmp_path / "both.csv"
    lines = [path.read_text("latin-1").splitlines() for path in tables.values()]
    joined = [f"{first};{second.partition(';')[2]}" for first, second in zip(*lines, strict=True)]
    one.write_text("\n".join(joined) + "\n", encoding="latin-1")
    status, text = predict(folder, str(one))
    assert status == 0, text
    assert found == scores()


def test_names_say_whose_they_are_where_two_parties_have_one_name():
    assert joint_names({"bank": ["a", "b"], "shop": ["c"]}) == ("a", "b", "c")
    shared = joint_names({"bank": ["a", "b"], "shop": ["b", "c"]})
    assert shared == ("bank.a", "bank.b", "shop.b", "shop.c")
    lone = joint_names({"bank": ["a"], "shop": ["bank.a", "b"]})
    assert lone == ("bank.a", "shop.bank.a", "shop.b")
    with pytest.raises(DataError, match=r"differ by party and name, got 'a\.b\.c' twice"):
        joint_names({"a": ["b.c"], "a.b": ["c"], "d": ["c", "b.c"]})


def test_the_tables_of_a_whole_model_in_the_wrong_order_are_refused(tmp_path):
    """Both parties have an x, so no column of the insurer is taken from the bank's table."""
    (tmp_path / "bank.csv").write_text("x,id\n1,p\n")
    (tmp_path / "insurer.csv").write_text("x,y,id\n2,3,p\n")
    columns, roles = joint_names({"bank": ["x"], "insurer": ["x", "y"]}), Roles(id_column="id")
    right = {party: str(tmp_path / f"{party}.csv") for party in ("bank", "insurer")}
    assert read_joined(right, columns, roles, "bank")[0].values.tolist() == [[1, 2, 3]]
    wrong = {"bank": right["insurer"], "insurer": right["bank"]}
    rule = r"'insurer\.y' of the model must be in one of the tables, got none"
    with pytest.raises(DataError, match=rule):
        read_joined(wrong, columns, roles, "bank")


@pytest.mark.parametrize("also", [[], ["a"]])
def test_a_column_that_is_called_like_anothers_is_read_from_its_own_table(tmp_path, also):
    """``bank.a`` of the shop is not ``a`` of the bank."""
    own = {"bank": ["a"], "shop": ["bank.a", *also]}
    rows = {"bank": "1,p\n", "shop": "2,3,p\n" if also else "2,p\n"}
    for party, names in own.items():
        (tmp_path / party).with_suffix(".csv").write_text(f"{','.join(names)},id\n{rows[party]}")
    sources = {party: str(tmp_path / f"{party}.csv") for party in own}
    columns, roles = joint_names(own), Roles(id_column="id")
    table, _, _ = read_joined(sources, columns, roles, "bank")
    assert table.values.tolist() == [[1, 2, 3][: len(columns)]]
    rule = r"'bank\.a' of the model must be in one of the tables, got 'a' of bank and 'bank\.a' of"
    with pytest.raises(DataError, match=rule):
        read_joined(sources, ["bank.a"], roles, "bank")


@pytest.mark.slow
def test_a_table_with_labels_of_other_classes_is_predicted_without_scores(train, tables):
    folder = train()
    text = tables["bank"].read_text().replace(",1\n", ",yes\n").replace(",0\n", ",no\n")
    other = tables["bank"].with_name("other.csv")
    other.write_text(text)
    status, text = predict(folder, named({**tables, "bank": other}))
    assert status == 0, text
    assert "no scores: the label has 2 values that are no class of the model" in text


def test_predictions_of_a_whole_model_are_scored_with_weights(settings, write_table, tmp_path):
    weights = [1 + place % 3 for place in range(60)]
    data = write_table("weighted", 60, w=weights)
    given = {"data": str(data), "label": "y", "weight": "w", "parties": 2}
    folder = run_local(settings(strategy="pax", **given))
    output = tmp_path / "out.csv"
    arguments = ["predict", str(folder.path), "--data", str(data), "--output", str(output)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    with output.open() as file, data.open() as rows:
        p = [float(row["probability_1"]) for row in csv.DictReader(file)]
        truth = [int(row["y"]) for row in csv.DictReader(rows)]
    exact = sk.log_loss(truth, p, sample_weight=weights)
    assert f"{exact:.4f}" in result.output
    assert f"{sk.log_loss(truth, p):.4f}" not in result.output
    without = some_rows(data, 0, 60, drop="y")
    result = CliRunner().invoke(cli, [*arguments[:3], str(without), *arguments[4:]])
    assert "logloss" not in result.output
    assert "60 rows written" in result.output


@pytest.mark.parametrize("n_rows", [5, 20, 100, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_rows_of_the_same_table_are_never_called_unlike(n_rows, seed):
    rng = np.random.default_rng(seed)
    kinds = [rng.normal(size=3000), rng.integers(0, 3, 3000), rng.lognormal(0, 2, 3000)]
    kinds.append(np.where(rng.random(3000) < 0.3, np.nan, rng.normal(size=3000)))
    values = np.column_stack(kinds).astype(np.float32)
    trained, new = quantiles(values[:1500]), values[1500:][:n_rows]
    check_range(trained, new)
    assert unlike_columns(trained, new) == []


def test_columns_of_another_kind_are_called_unlike():
    rng = np.random.default_rng(1)
    kinds = [rng.normal(size=500), rng.uniform(-1, 1, 500), rng.normal(size=500)]
    values = np.column_stack(kinds).astype(np.float32)
    trained = quantiles(values)
    assert unlike_columns(trained, np.abs(values)) == [0, 1, 2]
    with pytest.raises(DataError, match="got 500 of 500 rows with most columns outside of it"):
        check_range(trained, values + 100)
    check_range(trained, np.full_like(values, np.nan))


@pytest.mark.parametrize("n_rows", [1, 3, 250])
@pytest.mark.parametrize("n_columns", [1, 2])
def test_a_column_that_drifts_is_warned_of_and_not_refused(n_rows, n_columns):
    """Days since a date go on beyond those trained on."""
    days = np.linspace(0, 1000, 500, dtype=np.float32)
    trained = quantiles(np.column_stack([days] * n_columns))
    later = np.linspace(1150, 1300, n_rows, dtype=np.float32)
    values = np.column_stack([later] * n_columns)
    check_range(trained, values)
    assert unlike_columns(trained, values) == list(range(n_columns))
