"""A forest as scikit-learn's own predicts what it predicts."""

import warnings

import joblib
import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli

pytestmark = pytest.mark.usefixtures("own_folder")
FOREST = {"trees": 6, "max_depth": 5, "master_keeps_model": True}


def forest(data, label, **more):
    given = {"allow_export": True, "align": "ordered", "parties": 2, "label": label}
    given |= {"federated_forest": FOREST, **more}
    return fedapp.run("federated-forest", data=data, **given)


def rows_of(run, data):
    return run._rows(str(data), "").table.values


@pytest.fixture
def table(write_table):
    """Rows with missing values, and values at thresholds."""
    rng = np.random.default_rng(2)
    a = [value if value > -1 else "" for value in rng.normal(size=120).round(1)]
    kind, size = rng.choice(["low", "high", "mid"], 120), rng.exponential(size=120)
    return write_table(n_rows=120, a=a, three=rng.integers(0, 3, 120), kind=kind, size=size)


@pytest.mark.by_default("three-kind,y")
@pytest.mark.parametrize(
    ("label", "drop"), [("y", "kind,three"), ("three", "kind,y"), ("kind", "y,three")]
)
def test_classes(table, label, drop):
    run = forest(table, label, drop_columns=drop)
    found, rows = run.to_sklearn(), rows_of(run, table)
    assert isinstance(found, RandomForestClassifier)
    assert np.isnan(rows).any()
    frame = _frame(run, rows)
    assert np.allclose(found.predict_proba(frame), run.predict_proba(table), atol=1e-12)
    assert found.predict(frame).tolist() == run.predict(table).tolist()
    assert found.classes_.tolist() == np.unique(run.predict(table)).tolist()


def test_numbers_and_splits_at_the_values_themselves(table):
    run = forest(table, "size", drop_columns="kind")
    found, rows = run.to_sklearn(), rows_of(run, table)
    assert isinstance(found, RandomForestRegressor)
    assert np.allclose(found.predict(_frame(run, rows)), run.predict(table), rtol=1e-12)
    # Values at the thresholds, which go right.
    edges = np.unique(np.concatenate([tree["threshold"] for tree in run.model.trees]))
    at = np.repeat(edges[:, None], rows.shape[1], axis=1).astype(np.float32)
    expected = run.model.predictions(run.model.leaves(at))[:, 0]
    assert np.allclose(found.predict(_frame(run, at)), expected, rtol=1e-12)


def _frame(run, rows):
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(rows, columns=run.model.columns)


def test_the_command_writes_a_file_that_joblib_reads(table):
    run = forest(table, "y", drop_columns="kind")
    done = CliRunner().invoke(cli, ["export", str(run.path), "--to", "sklearn"])
    assert done.exit_code == 0, done.output
    rows = _frame(run, rows_of(run, table))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = joblib.load(run.path / "model.joblib")
        assert np.array_equal(read.predict_proba(rows), run.to_sklearn().predict_proba(rows))
    assert read.estimators_[0].get_depth() <= 5


@pytest.mark.slow
def test_what_is_no_forest_of_numbers_is_refused(table):
    with pytest.raises(fedapp.ConfigError, match=r"no splits by sets of categories, got .* kind$"):
        forest(table, "y").to_sklearn()
    boosted = fedapp.run("pax", data=table, label="y", parties=2, num_boost_round=1)
    with pytest.raises(fedapp.ConfigError, match=r"must be of a forest .* got a model of pax$"):
        boosted.to_sklearn()
    kept = {**FOREST, "master_keeps_model": False}
    apart = forest(table, "y", drop_columns="kind", federated_forest=kept)
    with pytest.raises(fedapp.ConfigError, match="got a model of federated-forest"):
        apart.to_sklearn()


@pytest.mark.slow
@pytest.mark.parametrize("data", ["give-me-some-credit", "breast-cancer"])
def test_real_rows(data, real_data):
    run = forest(data, "")
    rows = rows_of(run, data)
    found = run.to_sklearn().predict_proba(_frame(run, rows))
    assert np.abs(found - run.predict_proba(data)).max() < 1e-12
