"""Models as ONNX, and forests as scikit-learn's, predict what they predict, in another runtime."""

import json
import warnings
from pathlib import Path

import joblib
import numpy as np
import pandas as pd
import pytest
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.runs.predict import load_model, predict

ort = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")
pytestmark = pytest.mark.usefixtures("own_folder")
FOREST = {"trees": 6, "max_depth": 5, "master_keeps_model": True}


@pytest.fixture
def table(write_table):
    """Rows with missing values and values at thresholds, and labels of several kinds."""
    rng = np.random.default_rng(2)
    a = [value if value > -1 else "" for value in rng.normal(size=120).round(1)]
    kind, size = rng.choice(["low", "high", "mid"], 120), rng.exponential(size=120)
    return write_table(n_rows=120, a=a, three=rng.integers(0, 3, 120), kind=kind, size=size)


@pytest.fixture
def towns(write_table):
    """Rows with categories, some missing, that say something of the label."""
    rng = np.random.default_rng(5)
    town = rng.choice([*"ABCDEFGHIJKL", ""], 150)
    y = (np.isin(town, [*"ACFG", ""]) ^ (rng.random(150) < 0.15)).astype(int)
    return write_table("towns", n_rows=150, town=town, shop=rng.choice(["x", "y"], 150), y=y)


def boosted(data, label, **more):
    how = {"parties": 2, "num_boost_round": 4, "max_depth": 4, **more}
    return fedapp.run("pax", data=data, label=label, **how)


def additive(data, label, **more):
    return boosted(data, label, pax={"additive": True, "pairs": 1}, **more)


def forest(data, label, **more):
    given = {"allow_export": True, "align": "ordered", "parties": 2, "federated_forest": FOREST}
    return fedapp.run("federated-forest", data=data, label=label, **{**given, **more})


def rows_of(run, data):
    return run._rows(str(data), "").table.values


def answers(run, rows):
    """What the runtime of ONNX says of rows."""
    session = ort.InferenceSession(run.to_onnx(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"rows": rows}), strict=True))


LABELS = "y", "three", "kind", "size"


@pytest.mark.by_default(
    "additive*", "boosted-three*", "boosted-*gamma", "boosted-*hinge", "forest-size*"
)
@pytest.mark.parametrize(
    ("train", "label", "objective"),
    [
        (boosted, "three", "auto"),
        (additive, "three", "auto"),
        (boosted, "size", "reg:gamma"),
        (boosted, "y", "binary:hinge"),
        (forest, "three", "auto"),
        (forest, "size", "auto"),
    ],
)
def test_onnx_predicts_as_the_model(table, train, label, objective):
    dropped = ",".join({*LABELS} - {label})
    run = train(table, label, objective=objective, drop_columns=dropped)
    rows = rows_of(run, table)
    assert np.isnan(rows).any()
    found = answers(run, rows)
    if "prediction" in found:
        assert np.allclose(found["prediction"][:, 0], run.predict(table), rtol=1e-5)
    else:
        assert np.allclose(found["probabilities"], run.predict_proba(table), atol=1e-5)
        assert found["label"].tolist() == [str(name) for name in run.predict(table)]


@pytest.mark.by_default("boosted")
@pytest.mark.parametrize("train", [boosted, forest])
def test_categories_in_sets_and_one_from_the_rest(towns, train):
    more = {"federated_forest": {**FOREST, "max_features": "all"}} if train is forest else {}
    run = train(towns, "y", **more)
    rows = rows_of(run, towns)
    town, shop = (run.model.columns.index(name) for name in ("town", "shop"))
    unknown = rows[:2].copy()
    unknown[0, [town, shop]] = np.nan
    unknown[1, town] = 99  # no category has this code
    rows = np.concatenate([rows, unknown])
    assert any(len(names) > 6 for names in run.model.sets.codes())
    found = answers(run, rows)["probabilities"]
    assert np.allclose(found[:-2], run.predict_proba(towns), atol=1e-5)
    expected = predict(load_model(run.path / "model.json"), rows)[:, 0]
    assert np.allclose(found[:, 1], expected, atol=1e-5)
    model = onnx.load_from_string(run.to_onnx())
    properties = {each.key: each.value for each in model.metadata_props}
    names = json.loads(properties["categories"])
    assert names["town"] == list(run.model.categories[town])


@pytest.mark.by_default("three", "size")
@pytest.mark.parametrize("label", LABELS)
def test_scikit_learns_forest_predicts_as_the_model(table, label):
    run = forest(table, label, drop_columns=",".join({"y", "three", "kind"} - {label}))
    found, rows = run.to_sklearn(), rows_of(run, table)
    frame = pd.DataFrame(rows, columns=run.model.columns)
    assert np.isnan(rows).any()
    if label == "size":
        assert isinstance(found, RandomForestRegressor)
        assert np.allclose(found.predict(frame), run.predict(table), rtol=1e-12)
        # Values at the thresholds, which go right.
        edges = np.unique(np.concatenate([tree["threshold"] for tree in run.model.trees]))
        at = np.repeat(edges[:, None], rows.shape[1], axis=1).astype(np.float32)
        expected = run.model.predictions(run.model.leaves(at))[:, 0]
        assert np.allclose(
            found.predict(pd.DataFrame(at, columns=frame.columns)), expected, rtol=1e-12
        )
    else:
        assert isinstance(found, RandomForestClassifier)
        assert np.allclose(found.predict_proba(frame), run.predict_proba(table), atol=1e-12)
        assert found.predict(frame).tolist() == run.predict(table).tolist()
        assert found.classes_.tolist() == np.unique(run.predict(table)).tolist()


def export(run, *words):
    return CliRunner().invoke(cli, ["export", str(run.path), *words])


def test_the_command_writes_files(table):
    run = boosted(table, "y", drop_columns="kind", num_boost_round=1)
    done = export(run, "--output", "out.onnx")
    assert done.exit_code == 0, done.output
    assert Path("out.onnx").read_bytes() == run.to_onnx()
    assert export(run, "--to", "xgboost", "--output", "out.json").exit_code == 0
    assert Path("out.json").read_bytes() == (run.path / "model.xgb.json").read_bytes()
    refused = export(run, "--to", "pmml")
    assert "--to must be one of onnx, xgboost, sklearn, curves, got 'pmml'" in str(
        refused.exception
    )
    with pytest.raises(fedapp.ConfigError, match=r"must be of a forest .* got a model of pax$"):
        run.to_sklearn()
    run = forest(table, "y", drop_columns="kind")
    assert export(run, "--to", "sklearn").exit_code == 0
    rows = pd.DataFrame(rows_of(run, table), columns=run.model.columns)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = joblib.load(run.path / "model.joblib")
        assert np.array_equal(read.predict_proba(rows), run.to_sklearn().predict_proba(rows))
    assert read.estimators_[0].get_depth() <= 5


def test_what_a_runtime_cannot_say_is_refused(table):
    linear = fedapp.run("fedavg-linear", data=table, label="y", parties=2)
    with pytest.raises(fedapp.ConfigError, match="got a model of fedavg-linear"):
        linear.to_onnx()
    with pytest.raises(fedapp.ConfigError, match=r"no splits by sets of categories, got .* kind$"):
        forest(table, "y").to_sklearn()
    kept = {**FOREST, "master_keeps_model": False}
    apart = forest(table, "y", drop_columns="kind", federated_forest=kept)
    with pytest.raises(fedapp.ConfigError, match="got a model of federated-forest"):
        apart.to_sklearn()
