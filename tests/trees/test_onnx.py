"""Models as ONNX predict what they predict, in another runtime."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.runs.predict import load_model

ort = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")
pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def table(write_table):
    """Rows with missing values."""
    rng = np.random.default_rng(2)
    a = [value if value > -1 else "" for value in rng.normal(size=80).round(3)]
    return write_table(n_rows=80, a=a, three=rng.integers(0, 3, 80), size=rng.exponential(size=80))


def answers(model, rows):
    """What the runtime says of rows."""
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"rows": rows}), strict=True))


def rows_of(run, data):
    return run._rows(str(data), "").table.values


@pytest.mark.by_default("three")
@pytest.mark.parametrize("label", ["y", "three"])
def test_classes_of_a_boosted_model(table, label):
    run = fedapp.run("pax", data=table, label=label, parties=2, num_boost_round=4, max_depth=3)
    found = answers(run.to_onnx(), rows_of(run, table))
    expected = run.predict_proba(table)
    assert np.isnan(rows_of(run, table)).any()
    assert np.allclose(found["probabilities"], expected, atol=1e-5)
    assert found["label"].tolist() == [str(name) for name in run.predict(table)]


@pytest.mark.parametrize(
    ("objective", "label"),
    [("reg:squarederror", "size"), ("reg:gamma", "size"), ("binary:hinge", "y")],
)
def test_numbers_of_a_boosted_model(table, objective, label):
    run = fedapp.run(
        "pax", data=table, label=label, parties=2, objective=objective, num_boost_round=4
    )
    found = answers(run.to_onnx(), rows_of(run, table))
    assert np.allclose(found["prediction"][:, 0], run.predict(table), rtol=1e-5)


@pytest.mark.by_default("three", "size")
@pytest.mark.parametrize("label", ["y", "three", "size"])
def test_forests(table, label):
    forest = {"trees": 5, "max_depth": 4, "master_keeps_model": True}
    given = {"federated_forest": forest, "allow_export": True, "align": "ordered", "parties": 2}
    run = fedapp.run("federated-forest", data=table, label=label, **given)
    found = answers(run.to_onnx(), rows_of(run, table))
    if label == "size":
        assert np.allclose(found["prediction"][:, 0], run.predict(table), rtol=1e-5)
    else:
        assert np.allclose(found["probabilities"], run.predict_proba(table), atol=1e-5)


def test_the_command_writes_the_file(table):
    run = fedapp.run("pax", data=table, label="y", parties=2, num_boost_round=1)
    done = CliRunner().invoke(cli, ["export", str(run.path), "--output", "out.onnx"])
    assert done.exit_code == 0, done.output
    assert Path("out.onnx").read_bytes() == run.to_onnx()
    words = ["export", str(run.path), "--to", "xgboost", "--output", "out.json"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert Path("out.json").read_bytes() == (run.path / "model.xgb.json").read_bytes()
    refused = CliRunner().invoke(cli, ["export", str(run.path), "--to", "pmml"])
    assert "--to must be one of onnx, xgboost, sklearn, got 'pmml'" in str(refused.exception)


@pytest.fixture
def towns(write_table):
    """Rows with categories, some missing, that say something of the label."""
    rng = np.random.default_rng(5)
    town = rng.choice([*"ABCDEFGHIJKL", ""], 150)
    y = (np.isin(town, [*"ACFG", ""]) ^ (rng.random(150) < 0.15)).astype(int)
    return write_table("towns", n_rows=150, town=town, shop=rng.choice(["x", "y"], 150), y=y)


@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", ["pax", "federated-forest"])
def test_categories_in_sets_and_one_from_the_rest(towns, strategy):
    given = {"num_boost_round": 4, "max_depth": 4}
    if strategy != "pax":
        forest = {"trees": 6, "max_depth": 4, "master_keeps_model": True, "max_features": "all"}
        given = {"federated_forest": forest, "allow_export": True, "align": "ordered"}
    run = fedapp.run(strategy, data=towns, label="y", parties=2, **given)
    rows = rows_of(run, towns)
    town, shop = (run.model.columns.index(name) for name in ("town", "shop"))
    unknown = rows[:2].copy()
    unknown[0, [town, shop]] = np.nan
    unknown[1, town] = 99  # no category has this code
    rows = np.concatenate([rows, unknown])
    assert any(len(names) > 6 for names in run.model.sets.codes())
    model = run.to_onnx()
    found = answers(model, rows)["probabilities"]
    assert np.allclose(found[:-2], run.predict_proba(towns), atol=1e-5)
    expected = load_model(run.path / "model.json")[1](run.model, rows, None)[:, 0]
    assert np.allclose(found[:, 1], expected, atol=1e-5)
    properties = {each.key: each.value for each in onnx.load_from_string(model).metadata_props}
    names = json.loads(properties["categories"])
    assert names["town"] == list(run.model.categories[town])


@pytest.mark.slow
def test_adult_with_all_its_categories(real_data):
    run = fedapp.run("pax", data="adult", parties=2, num_boost_round=20, max_depth=6)
    found = answers(run.to_onnx(), rows_of(run, Path("adult")))["probabilities"]
    assert np.abs(found - run.predict_proba("adult")).max() < 1e-5


def test_what_onnx_cannot_say_is_refused(table):
    linear = fedapp.run("fedavg-linear", data=table, label="y", parties=2)
    with pytest.raises(fedapp.ConfigError, match="got a model of fedavg-linear"):
        linear.to_onnx()
