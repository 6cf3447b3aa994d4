"""Objectives and metrics that are functions."""

from pathlib import Path

import numpy as np
import pytest
import xgboost
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.errors import FedappError
from fedapp.runs.local import run_local
from fedapp.trees import custom
from fedapp.trees.model import LEAF

SHORT = {"num_boost_round": 4, "max_depth": 3, "max_bin": 32, "eta": 0.3}
SHORT["valid_fraction"] = 0.2
pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def rows():
    """Columns a, b, a label 0 or 1, weights, and the margin that rows start from."""
    rng = np.random.default_rng(3)
    a, b, noise = rng.normal(size=(3, 200)).round(2)
    label = (a + b * b + noise > 0.8).astype(float)
    return np.column_stack([np.where(a < -1.5, np.nan, a), b, label, rng.uniform(1, 2, 200), a / 4])


def logistic(margins, labels):
    """XGBoost's binary:logistic."""
    shares = 1 / (1 + np.exp(-margins))
    return shares - labels, shares * (1 - shares)


def log_loss(labels, margins):
    return "any", np.mean(np.logaddexp(0, margins) - labels * margins)


def area(labels, scores):
    """AUC, which is no mean."""
    over = scores[labels == 1][:, None] > scores[labels == 0]
    return over.mean()


def mae(labels, predictions):
    return float(np.abs(labels - predictions).mean())


def train(strategy, rows, **given):
    how = {**SHORT, "label": "c2", "base_margin": "c4", "parties": 2, **given}
    if "weight" not in how:
        how.setdefault("drop_columns", "c3")
    return fedapp.run(strategy, data=rows, **how)


@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", ["pax", "bagging", "cyclic"])
def test_a_logistic_function_grows_the_trees_of_the_built_in_objective(rows, strategy):
    built_in, own = (
        train(strategy, rows, objective=objective, weight="c3")
        for objective in ("binary:logistic", logistic)
    )
    for tree, other in zip(own.model.trees, built_in.model.trees, strict=True):
        splits = tree["left"] != LEAF
        for field in ("left", "column", "threshold", "default_left"):
            np.testing.assert_array_equal(tree[field][splits], other[field][splits])
        np.testing.assert_allclose(tree["value"], other["value"], rtol=1e-5, atol=1e-6)
    assert own.model.objective == "custom"
    shares = built_in.predict_proba(rows)[:, 1]
    assert np.allclose(own.predict(rows), np.log(shares / (1 - shares)), atol=1e-4)


def test_one_partys_trees_are_those_that_xgboost_grows_for_the_function(rows):
    how = {"parties": 1, "valid_fraction": 0, "test_fraction": 0, "base_margin": ""}
    run = train("pax", rows, objective=logistic, drop_columns=["c3", "c4"], **how)
    names = {"feature_names": ["c0", "c1"], "max_bin": 32}
    matrix = xgboost.QuantileDMatrix(rows[:, :2], rows[:, 2], **names)

    def obj(margins, matrix):
        return logistic(margins, matrix.get_label())

    booster = xgboost.train({"max_depth": 3, "max_bin": 32}, matrix, 4, obj=obj)
    found = booster.predict(matrix, output_margin=True)
    assert np.allclose(run.predict(rows), found, atol=1e-5)
    assert run.to_xgboost().attr("objective") == "custom"
    assert np.allclose(run.to_xgboost().predict(matrix), found, atol=1e-5)


@pytest.mark.by_default("secureboost")
@pytest.mark.parametrize("strategy", ["pax", "bagging", "secureboost"])
def test_a_metric_is_the_mean_over_the_rows_of_all_parties(rows, strategy):
    key = {"secureboost": {"key_bits": 512, "insecure_small_key": True}}
    small = {**key, "align": "ordered", "num_boost_round": 1}
    given = {"objective": "reg:logistic", "eval_metric": ["mae", mae]}
    given |= small if strategy == "secureboost" else {}
    run = train(strategy, rows, **given)
    scores = run.summary["metrics"]
    for subset in ("train", "valid", "test"):
        assert scores[subset]["custom@mae"] == pytest.approx(scores[subset]["mae"], rel=1e-6)


@pytest.mark.parametrize(
    ("strategy", "given", "rule"),
    [
        ("secureboost", {"objective": logistic}, "for secureboost, got a function"),
        ("pax", {"objective": logistic, "engine": "simulation"}, "functions are never sent"),
        ("pax", {"eval_metric": mae, "engine": "simulation"}, "functions are never sent"),
        ("pax", {"objective": logistic, "baselines": True}, "baselines must be False"),
        (
            "pax",
            {"objective": logistic, "pax": {"aggregation": "secure"}, "parties": 3},
            "must be plain where objective or eval_metric is a function, whose sums have no",
        ),
        (
            "pax",
            {"objective": logistic, "early_stopping_rounds": 1},
            "eval_metric must name what early stopping watches, where objective is a function",
        ),
        ("pax", {"eval_metric": [mae, area]}, "must have one function at most, got 2"),
        ("pax", {"objective": "custom"}, "a function is never sent, and fedapp.run"),
        ("pax", {"eval_metric": mae, "objective": "multi:softprob"}, "must be a name for multi"),
    ],
)
def test_functions_are_refused_where_they_cannot_be_called(rows, strategy, given, rule):
    with pytest.raises(fedapp.ConfigError, match=rule):
        train(strategy, rows, base_margin="", **given)
    assert not list(Path("runs").glob("*"))


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"eval_metric": area}, "eval-metric must be a mean over rows, which parties can add up"),
        ({"eval_metric": mae, "weight": "c3"}, "must be a name where rows have weights"),
        ({"eval_metric": lambda labels, scores: "x"}, "must return a number"),
        ({"objective": lambda margins, labels: margins}, "must return gradients and hessians"),
        (
            {"objective": lambda margins, labels: (margins[:2], labels)},
            r"gradients of the objective must be of shape \(\d+,\), one a row, got \(2,\)",
        ),
        ({"objective": lambda margins, labels: (margins, margins - 9)}, "hessians .* must be >= 0"),
        ({"objective": lambda margins, labels: (margins / 0, labels)}, "must be finite"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_a_function_returns_is_checked(rows, given, rule):
    with pytest.raises(FedappError, match=rule):
        train("pax", rows, **{"objective": "reg:logistic", "base_margin": "", **given})
    assert not custom.has_objective()
    assert not custom.has_metric()


def test_the_command_knows_no_functions_and_a_second_run_has_to_wait():
    done = CliRunner().invoke(cli, ["run", "pax", "-c", "objective=custom"])
    assert "a function is never sent" in str(done.exception)
    with (
        custom.functions_in_use(custom.Functions(logistic)),
        pytest.raises(fedapp.ConfigError, match="while another run of this process uses"),
        custom.functions_in_use(custom.Functions(logistic)),
    ):
        pass


@pytest.mark.slow
def test_estimators_take_functions(rows):
    X, y = rows[:, :2], rows[:, 2]
    small = {"n_estimators": 3, "max_depth": 2, "max_bin": 16, "parties": 2}
    model = fedapp.PAXRegressor(objective=logistic, eval_metric=log_loss, **small).fit(X, y)
    assert "custom@log_loss" in model.run_.summary["metrics"]["train"]
    with pytest.raises(ValueError, match="functions are never sent"):
        fedapp.PAXRegressor(objective=logistic, engine="simulation", **small).fit(X, y)


def test_a_party_without_the_function_refuses_a_coordinator_that_asks_for_it(settings, monkeypatch):
    monkeypatch.setattr("strategies.method.check_custom_is_set", lambda objective: None)
    with pytest.raises(FedappError, match=r"HelloRequest.objective .*a function is never sent"):
        run_local(settings(objective="custom", data="diabetes"))


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_with_the_function_and_not_without(rows):
    whole = train("pax", rows, objective=logistic)
    with pytest.raises(fedapp.StoppedError):
        train("pax", rows, objective=logistic, run_dir="one", on_round=lambda info: False)
    with pytest.raises(fedapp.ConfigError, match="a function is never sent"):
        fedapp.run("pax", resume="one")
    resumed = fedapp.run("pax", resume="one", objective=logistic)
    assert (resumed.path / "model.json").read_text() == (whole.path / "model.json").read_text()
