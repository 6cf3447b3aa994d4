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
from fedapp.runs.differences import table_facts
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.site.rows_to_predict import (
    check_range,
    quantiles,
    read_joined,
    unlike_columns,
)
from fedapp.trees.divided import joint_names
from tests.federated import summary_of
from tests.tables import csv_columns, write_rows

N_ROWS = 200


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Tables of a bank, which has the labels, and of an insurer, with columns of the same names."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    banks, insurers = rng.normal(size=(N_ROWS, 2)).round(3), rng.uniform(5, 9, (N_ROWS, 2)).round(3)
    ids = [f"p{row}" for row in range(N_ROWS)]
    label = (banks[:, 0] + insurers[:, 1] > 7).astype(int)
    columns = {"id": ids, "a": banks[:, 0], "b": banks[:, 1], "y": label}
    others = {"id": ids, "a": insurers[:, 0], "b": insurers[:, 1]}
    return {
        "bank": write_rows(tmp_path / "bank.csv", columns),
        "insurer": write_rows(tmp_path / "insurer.csv", others),
    }


def named(tables):
    return ",".join(f"{party}={path}" for party, path in tables.items())


def some_rows(path, first, last, drop=""):
    """A copy with some of the rows, without a column."""
    columns = csv_columns(path, drop)
    some = {name: values[first:last] for name, values in columns.items()}
    return write_rows(path.with_name(f"{path.stem}-{first}-{last}{drop}.csv"), some)


@pytest.fixture
def train(vertical, tables, trained_once):
    """A model of both tables, whose parts stay at the parties unless something else is said."""

    def make(**more):
        given = {"data": named(tables), "label": "y", "id": "id", "align": "psi"}
        return trained_once(vertical(**{**given, "allow_export": False, **more}))

    return make


def predict(folder, data, *more, status=0):
    """The output of the command, which ends in this status."""
    arguments = ["predict", str(folder.path), "--data", data, "--id", "id", "--output", "out.csv"]
    result = CliRunner().invoke(cli, [*arguments, *more])
    text = result.output + str(result.exception or "")
    assert result.exit_code == status, text
    return text


def written(path):
    rows = list(csv.DictReader(path.read_text().splitlines()))
    return {name: [row[name] for row in rows] for name in rows[0]}


def scores():
    """Predictions by id."""
    columns = written(Path("out.csv"))
    return dict(zip(columns["id"], map(float, columns["probability_1"]), strict=True))


def narrow(path):
    columns = csv_columns(path)
    for name in "ab":
        columns[name] = [5 + float(value) / 9 for value in columns[name]]
    return write_rows(path.with_name("narrow.csv"), columns)


def in_common(of):
    return named({"bank": some_rows(of["bank"], 0, 20), "insurer": some_rows(of["insurer"], 5, 99)})


def insurer(of, path):
    return named({**of, "insurer": path})


def other_classes(of):
    text = of["bank"].read_text().replace(",1\n", ",yes\n").replace(",0\n", ",no\n")
    (copy := of["bank"].with_name("changed.csv")).write_text(text)
    return named({**of, "bank": copy})


def swapped(of):
    return named({"bank": of["insurer"], "insurer": some_rows(of["bank"], 0, 200, "y")})


WHOSE = "must say which table is whose, as in bank=TABLE,insurer=TABLE, got"
UNLIKE = "with values unlike those that the model was trained on in 2 of"
EINI = "--inference eini -ceini.unguarded=true -ceini.key-bits=512 -ceini.insecure-small-key=true"
NOT_MATCHED = "15 rows written to out.csv", "5 of 20 rows were not matched"
PREDICTED = {  # the tables from those trained on, more words, the exit status, and the output
    "no names": (lambda of: f"{of['bank']},{of['insurer']}", "", 1, [WHOSE]),
    "a label": (lambda of: insurer(of, some_rows(of["bank"], 0, 200)), "", 1, ["label column 'y'"]),
    "swapped": (swapped, "", 0, [f"insurer.csv {UNLIKE}", f"bank-0-200y.csv {UNLIKE}"]),
    "narrow": (lambda of: insurer(of, narrow(of["insurer"])), "", 0, [f"narrow.csv {UNLIKE}"]),
    "in common": (in_common, "", 0, NOT_MATCHED),
    "in common, encrypted": (in_common, EINI, 0, NOT_MATCHED),
    "explained": (named, "--explain p3,p999", 0, ["1 to be explained are not among the"]),
    "other classes": (other_classes, "", 0, ["no scores: the label has 2 values t"]),
}


@pytest.mark.parametrize("case", PREDICTED)
def test_parties_predict_together_and_no_id_is_printed(case, train, tables):
    make, more, status, texts = PREDICTED[case]
    folder = train()
    text = predict(folder, make(tables), *more.split(), status=status)
    shown = " ".join(text.replace(f"{tables['bank'].parent}/", "").split())
    for expected in texts:
        assert expected in shown
    assert not re.search(r"\bp\d", shown.replace("--explain p3", ""))
    assert Path("out.csv").exists() == (not status)


def test_the_answer_says_who_read_what_and_scores_by_the_label(train, tables, monkeypatch):
    folder, read = train(), []

    def counted(data, *how):
        read.append(data)
        return read_columns_of(data, *how)

    monkeypatch.setattr("fedapp.site.rows_to_predict.read_columns_of", counted)
    text = predict(folder, named(tables))
    assert sorted(read) == sorted(map(str, tables.values()))  # once, though they are checked before
    sizes = "(200 rows, 2 columns)"
    expected = f"bank read {tables['bank']} {sizes}, insurer read {tables['insurer']} {sizes}"
    assert expected in text
    truth, found = [int(y) for y in csv_columns(tables["bank"])["y"]], [*scores().values()]
    assert f"{sk.roc_auc_score(truth, found):.4f}" in text
    assert f"at the run's threshold, {summary_of(folder)['threshold']['value']:.4f}: f1" in text


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
    assert summary["tables"]["bank"] == {"rows": 20, "columns": 2, "source": None}
    assert summary["metrics"] == {}
    assert "5 of 20 rows were not matched: predictions.json has their ids" in caplog.text
    assert not re.search(r"\bp\d", caplog.text + (run.path / "summary.json").read_text())


def test_an_exported_model_of_equal_column_names_predicts_as_its_parties_do(train, tables):
    predict(train(), named(tables))
    together = scores()
    folder = train(allow_export=True, share_column_names=True)
    booster = xgboost.Booster(model_file=folder.path / "model.xgb.json")
    names = ["bank.a", "bank.b", "insurer.a", "insurer.b"]
    assert booster.feature_names == names
    run = load_settings(tomllib.loads((folder.path / "config.toml").read_text()))
    assert set(table_facts(run, folder.path)["contributions"]["mean"]) == set(names)
    assert {"bank.a", "insurer.b"} <= set(summary_of(folder)["importance"]["gain"]) <= set(names)
    backwards = {"insurer": some_rows(tables["insurer"], 0, 150), "bank": tables["bank"]}
    text = predict(folder, named(backwards))
    found = scores()
    assert list(found) == [f"p{row}" for row in range(150)]
    assert found == pytest.approx({name: together[name] for name in found}, abs=1e-6)
    assert "50 of 200 rows were not matched" in text
    cells = [csv_columns(path)[name] for path in tables.values() for name in "ab"]
    matrix = xgboost.DMatrix(np.array(cells, float).T, feature_names=names)
    stock = booster.predict(matrix)[:150].tolist()
    assert [*found.values()] == pytest.approx(stock, abs=1e-6)
    assert WHOSE in predict(folder, f"{tables['bank']},{tables['insurer']}", status=1)
    lacks = {"bank": tables["bank"], "insurer": some_rows(tables["insurer"], 0, 9, drop="b")}
    match = "column 'insurer.b' of the model must be in one of the tables, got none"
    assert match in predict(folder, named(lacks), status=1)


def test_tables_of_an_exported_model_are_read_by_the_runs_schema(train, tables, tmp_path):
    """The insurer's b is -9 where it is missing; numbers have decimal commas, names other letters
    than UTF-8 has. Both tables in one file are read so too."""
    both = {}
    for party, path in tables.items():
        columns = csv_columns(path)
        if party == "insurer":
            columns["b"] = ["-9" if row % 3 == 0 else b for row, b in enumerate(columns["b"])]
        columns = {f"{n}_{party}ä" if n in "ab" else n: values for n, values in columns.items()}
        both |= columns
        text = write_rows(path, columns).read_text().replace(",", ";").replace(".", ",")
        path.write_text(text, encoding="latin-1")
    text = '[columns."b_insurerä"]\nmissing = ["-9"]\nname = "income"\n'
    (schema := tmp_path / "schema.toml").write_text(text, encoding="utf-8")
    how = {"schema": str(schema), "decimal": ",", "encoding": "latin-1"}
    folder = train(allow_export=True, share_column_names=True, **how)
    assert "income" in json.loads((folder.path / "model.json").read_text())["columns"]
    predict(folder, named(tables))
    found = scores()
    one = write_rows(tmp_path / "both.csv", both)
    one.write_text(one.read_text().replace(",", ";").replace(".", ","), encoding="latin-1")
    predict(folder, str(one))
    assert found == scores()


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
    assert sources_to_predict("all.csv", ["party-1", "party-2"], may_be_one=True) == {}


def test_names_say_whose_they_are_where_two_parties_have_one_name():
    assert joint_names({"bank": ["a", "b"], "shop": ["c"]}) == ("a", "b", "c")
    shared = joint_names({"bank": ["a", "b"], "shop": ["b", "c"]})
    assert shared == ("bank.a", "bank.b", "shop.b", "shop.c")
    lone = joint_names({"bank": ["a"], "shop": ["bank.a", "b"]})
    assert lone == ("bank.a", "shop.bank.a", "shop.b")
    with pytest.raises(DataError, match=r"differ by party and name, got 'a\.b\.c' twice"):
        joint_names({"a": ["b.c"], "a.b": ["c"], "d": ["c", "b.c"]})


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


def test_columns_of_another_kind_are_called_unlike():
    rng = np.random.default_rng(1)
    kinds = [rng.normal(size=500), rng.uniform(-1, 1, 500), rng.normal(size=500)]
    values = np.column_stack(kinds).astype(np.float32)
    trained = quantiles(values)
    assert unlike_columns(trained, np.abs(values)) == [0, 1, 2]
    with pytest.raises(DataError, match="got 500 of 500 rows with most columns outside of it"):
        check_range(trained, values + 100)
    check_range(trained, np.full_like(values, np.nan))
    assert np.isnan(quantiles(np.full_like(values, np.nan))).all()
    # Days since a date go on beyond those trained on: warned of, and not refused.
    trained = quantiles(np.linspace(0, 1000, 500, dtype=np.float32)[:, None])
    later = np.linspace(1150, 1300, 3, dtype=np.float32)[:, None]
    check_range(trained, later)
    assert unlike_columns(trained, later) == [0]


@pytest.mark.parametrize("n_rows", [5, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_rows_of_the_same_table_are_never_called_unlike(n_rows, seed):
    rng = np.random.default_rng(seed)
    kinds = [rng.normal(size=3000), rng.integers(0, 3, 3000), rng.lognormal(0, 2, 3000)]
    kinds.append(np.where(rng.random(3000) < 0.3, np.nan, rng.normal(size=3000)))
    values = np.column_stack(kinds).astype(np.float32)
    trained, new = quantiles(values[:1500]), values[1500:][:n_rows]
    check_range(trained, new)
    assert unlike_columns(trained, new) == []
