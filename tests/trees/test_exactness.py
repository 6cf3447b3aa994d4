"""PAX with one party is XGBoost: the same trees, node for node."""

import json
from pathlib import Path

import numpy as np
import pytest
import xgboost

from fedapp.data.datasets import read_source
from fedapp.data.labels import class_ids, class_names
from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.records.document import from_text, load, to_text
from fedapp.runs.baselines import xgboost_parameters
from fedapp.runs.local import run_local
from fedapp.site.settings import SiteConfig
from fedapp.site.table import Holdout, read_subsets
from fedapp.trees.losses import LOSSES
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import transform
from fedapp.trees.predict import predict_margins
from tests.claims import claims, claims_table
from tests.reference import compare_trees
from tests.tables import write_rows

PENALTIES = {"lambda": 0.5, "alpha": 0.3, "gamma": 0.5, "min-child-weight": 5.0}


def pooled_booster(settings, **more):
    """XGBoost on all training rows of a run; ``more`` is for ``xgboost.train``."""
    whole = SiteConfig(
        "all",
        settings.data,
        settings.label,
        weight=settings.weight,
        dropped=settings.dropped,
        base_margin=settings.base_margin,
    )
    holdout = Holdout(settings.test_fraction, settings.valid_fraction, settings.seed)
    table = read_subsets(whole, holdout)["train"]
    assert table.labels is not None
    labels = class_ids(table.labels, class_names(table.labels, settings.objective))
    weights = np.ones(table.n_rows, np.float32) if table.weights is None else table.weights
    matrix = xgboost.QuantileDMatrix(
        table.values,
        labels,
        weight=weights,
        base_margin=table.base_margins,
        max_bin=settings.max_bin,
    )
    parameters = xgboost_parameters(settings, labels, weights, labels, table.columns)
    return xgboost.train(parameters, matrix, settings.num_boost_round, **more)


def agreement(settings):
    """Train PAX and hold it against pooled XGBoost."""
    folder = run_local(settings)
    return compare_trees(load(folder.path / "model.json", Ensemble), pooled_booster(settings))


def assert_exact(found, n_trees):
    assert found.n_trees == n_trees
    assert found.n_nodes > 3 * n_trees
    assert found.differing == 0
    assert found.leaf_error <= 1e-6


def weighted_copy(name, path, drop=(), label=""):
    """A registry table as CSV, with a column of sample weights; ``label`` renames a column to y."""
    from pyarrow import csv, table

    source = read_source(name, Roles(drop=drop))
    assert source.labels is not None
    weights = np.random.default_rng(7).uniform(0.5, 2, source.n_rows).astype(np.float32)
    columns = dict(zip(source.columns, source.values.T, strict=True))
    labels = source.labels
    if label:
        labels = columns.pop(label).astype(np.float64)
    frame = table({**columns, "y": labels, "w": weights})
    csv.write_csv(frame, path)
    return path


REAL = [
    pytest.param("default-credit", "binary:logistic", {}, marks=pytest.mark.slow),
    ("default-credit", "binary:logistic", PENALTIES),
    pytest.param("give-me-some-credit", "binary:logistic", {}, marks=pytest.mark.slow),
    ("give-me-some-credit", "binary:logistic", PENALTIES),
    pytest.param("ijcnn1", "binary:logistic", {"max-bin": 255}, marks=pytest.mark.slow),
    pytest.param("waveform", "multi:softprob", {}, marks=pytest.mark.slow),
    ("waveform", "multi:softprob", PENALTIES),
    ("abalone", "reg:squarederror", {}),
    ("space-ga", "reg:squarederror", PENALTIES),
]


@pytest.mark.by_default("default-credit*", "waveform*", "abalone*")
@pytest.mark.parametrize(("data", "objective", "more"), REAL)
def test_one_party_equals_xgboost_on_real_rows(real_data, settings, data, objective, more):
    run = settings(
        data=data,
        objective=objective,
        parties=1,
        **{"num-boost-round": 6, "max-depth": 5, "max-bin": 64, "valid-fraction": 0.0, **more},
    )
    n_trees = 18 if objective == "multi:softprob" else 6
    assert_exact(agreement(run), n_trees)


@pytest.mark.by_default("waveform*")
@pytest.mark.parametrize(
    ("data", "objective", "label"),
    [
        pytest.param("give-me-some-credit", "binary:logistic", "", marks=pytest.mark.slow),
        ("give-me-some-credit", "reg:squarederror", "age"),
        ("waveform", "multi:softprob", ""),
    ],
)
def test_one_party_equals_xgboost_with_sample_weights(
    real_data, settings, tmp_path, data, objective, label
):
    run = settings(
        data=str(weighted_copy(data, tmp_path / "weighted.csv", label=label)),
        label="y",
        weight="w",
        objective=objective,
        parties=1,
        **{"num-boost-round": 4, "max-depth": 5, "max-bin": 64, "valid-fraction": 0.0},
    )
    n_trees = 12 if objective == "multi:softprob" else 4
    assert_exact(agreement(run), n_trees)


def made_table(path, objective, n_values, n_rows=900):
    """A CSV with few distinct values a column, missing values, and labels of the objective."""
    rng = np.random.default_rng(3)
    values = rng.integers(0, n_values, (n_rows, 6)).astype(np.float64)
    values[rng.random(values.shape) < 0.1] = np.nan
    signal = np.nan_to_num(values[:, 0]) - np.nan_to_num(values[:, 1]) + rng.normal(0, 3, n_rows)
    labels = {
        "binary:logistic": (signal > 0).astype(float),
        "multi:softprob": np.digitize(signal, [-3, 3]).astype(float),
        "reg:squarederror": signal,
    }[objective]
    lines = ["a,b,c,d,e,f,y"]
    for row, label in zip(values, labels, strict=True):
        lines.append(",".join("" if np.isnan(x) else f"{x:g}" for x in row) + f",{label!r}")
    path.write_text("\n".join(lines).replace("np.float64(", "").replace(")", "") + "\n")
    return path


@pytest.mark.each_value_once
@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softprob", "reg:squarederror"])
@pytest.mark.parametrize("parties", [1, 3])
def test_parties_with_few_distinct_values_grow_the_pooled_trees(
    settings, tmp_path, objective, parties
):
    run = settings(
        data=str(made_table(tmp_path / "few.csv", objective, 12)),
        label="y",
        objective=objective,
        parties=parties,
        **{"num-boost-round": 5, "max-depth": 4, "valid-fraction": 0.0, "pax.bins": "equal"},
    )
    assert_exact(agreement(run), 15 if objective == "multi:softprob" else 5)


@pytest.mark.by_default("3-*")
@pytest.mark.parametrize(("parties", "aggregation"), [(1, "plain"), (3, "plain"), (3, "secure")])
def test_classes_start_where_xgboost_starts_them(settings, tmp_path, parties, aggregation):
    run = settings(
        data=str(made_table(tmp_path / "made.csv", "multi:softprob", 12)),
        label="y",
        objective="multi:softprob",
        parties=parties,
        **{"num-boost-round": 1, "pax.aggregation": aggregation},
    )
    model, booster = load(run_local(run).path / "model.json", Ensemble), pooled_booster(run)
    told = json.loads(booster.save_config())["learner"]["learner_model_param"]["base_score"]
    assert model.base_score.tolist() == np.array(json.loads(told), np.float32).tolist()
    assert len(set(model.base_score.tolist())) == 3


@pytest.mark.parametrize("data", ["default-credit", pytest.param("a9a", marks=pytest.mark.slow)])
def test_three_parties_with_few_distinct_real_values_grow_the_pooled_trees(
    real_data, settings, tmp_path, data
):
    # Of default-credit only the columns with at most 256 values, so that no cut is pruned.
    table = read_source(data)
    many = [
        name
        for name, column in zip(table.columns, table.values.T, strict=True)
        if len(np.unique(column)) > 250
    ]
    run = settings(
        data=data,
        parties=3,
        **{
            "drop-columns": ",".join(many),
            "max-bin": 256,
            "num-boost-round": 5,
            "max-depth": 6,
            "valid-fraction": 0.0,
            "pax.bins": "equal",
        },
    )
    assert_exact(agreement(run), 5)


def exported(run):
    """A run's model, the same in stock XGBoost, and the rows it was made from."""
    folder = run_local(run)
    booster = xgboost.Booster()
    booster.load_model(folder.path / "model.xgb.json")
    table = load_table(Path(run.data), Roles(label="y"))
    return load(folder.path / "model.json", Ensemble), booster, table


@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softprob", "reg:squarederror"])
def test_stock_xgboost_predicts_the_same_from_the_export(settings, tmp_path, objective):
    data = str(made_table(tmp_path / "made.csv", objective, 40))
    model, booster, table = exported(
        settings(data=data, label="y", objective=objective, **{"num-boost-round": 5})
    )
    matrix = xgboost.DMatrix(table.values, feature_names=list(table.columns))
    theirs = booster.predict(matrix, output_margin=True).reshape(table.n_rows, -1)
    ours = predict_margins(model, table.values)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.by_default("multi:softprob-3")
@pytest.mark.parametrize(("objective", "width"), [("binary:logistic", 1), ("multi:softprob", 3)])
def test_stock_xgboost_explains_the_export(settings, tmp_path, objective, width):
    data = str(made_table(tmp_path / "made.csv", objective, 40))
    run = settings(data=data, label="y", objective=objective, **{"num-boost-round": 5})
    _, booster, table = exported(run)
    matrix = xgboost.DMatrix(table.values, feature_names=list(table.columns))
    contributions = booster.predict(matrix, pred_contribs=True, strict_shape=True)
    margins = booster.predict(matrix, output_margin=True, strict_shape=True)
    assert contributions.shape == (table.n_rows, width, len(table.columns) + 1)
    np.testing.assert_allclose(contributions.sum(axis=-1), margins, atol=1e-4)
    assert json.loads(booster.save_raw("json"))["learner"]["feature_names"] == list(table.columns)


NEW = [
    *("count:poisson", "reg:gamma", "reg:tweedie", "reg:logistic"),
    *("reg:squaredlogerror", "reg:pseudohubererror", "binary:hinge"),
]
STEPS = {"max-delta-step": 0.4, "alpha": 0.2}


@pytest.mark.by_default("abalone*", "space-ga-reg:squarederror*")
@pytest.mark.parametrize(
    ("data", "objective", "more"),
    [
        ("abalone", "count:poisson", {}),
        ("abalone", "reg:gamma", {}),
        ("abalone", "reg:tweedie", {"tweedie-variance-power": 1.2}),
        ("abalone", "reg:squaredlogerror", {"min-child-weight": 0.0}),
        ("abalone", "reg:pseudohubererror", {"huber-slope": 10.0}),
        ("space-ga", "reg:pseudohubererror", {"huber-slope": 0.5, **STEPS}),
        ("default-credit", "binary:logistic", {"scale-pos-weight": 3.5, **STEPS}),
        pytest.param(
            *("ijcnn1", "binary:logistic", {"scale-pos-weight": 0.4, **STEPS}),
            marks=pytest.mark.slow,
        ),
        ("waveform", "multi:softprob", STEPS),
        ("space-ga", "reg:squarederror", {"max-delta-step": 0.1}),
    ],
)
def test_objectives_and_steps_are_xgboosts_on_real_rows(real_data, settings, data, objective, more):
    run = settings(
        data=data,
        objective=objective,
        parties=1,
        **{"num-boost-round": 4, "max-depth": 5, "max-bin": 64, "valid-fraction": 0.0, **more},
    )
    assert_exact(agreement(run), 12 if objective == "multi:softprob" else 4)


CLAIMS = {
    "label": "y",
    "num-boost-round": 4,
    "max-depth": 4,
    "max-bin": 64,
    "valid-fraction": 0.0,
}


@pytest.mark.by_default("default-credit-reg:tweedie")
@pytest.mark.each_value_once
@pytest.mark.parametrize("objective", NEW)
@pytest.mark.parametrize("data", ["default-credit", "give-me-some-credit"])
def test_simulated_claims_over_real_columns_grow_xgboosts_trees(
    real_data, settings, tmp_path, data, objective
):
    run = settings(
        data=str(claims_table(tmp_path / "claims.csv", data, objective)),
        drop_columns="log_exposure",
        objective=objective,
        parties=1,
        **CLAIMS,
    )
    assert_exact(agreement(run), 4)


@pytest.mark.by_default("binary:hinge")
@pytest.mark.parametrize("objective", NEW)
def test_three_parties_grow_the_pooled_trees_of_claims(settings, tmp_path, objective):
    rng = np.random.default_rng(3)
    values = rng.integers(0, 12, (900, 5)).astype(np.float64)
    values[rng.random(values.shape) < 0.1] = np.nan
    columns = {**dict(zip("abcde", values.T, strict=True)), "y": claims(objective, values)}
    run = settings(
        data=str(write_rows(tmp_path / "claims.csv", columns)),
        objective=objective,
        parties=3,
        **{"pax.bins": "equal", **CLAIMS},
    )
    assert_exact(agreement(run), 4)


@pytest.mark.by_default("count:poisson", "binary:hinge")
@pytest.mark.parametrize("objective", NEW)
def test_stock_xgboost_predicts_claims_from_the_export(settings, tmp_path, objective):
    values = np.random.default_rng(3).normal(size=(300, 4)).round(1)
    columns = {**dict(zip("abcd", values.T, strict=True)), "y": claims(objective, values)}
    given = {"tweedie-variance-power": 1.3, "max-delta-step": 0.6, "huber-slope": 2.0}
    data = str(write_rows(tmp_path / "claims.csv", columns))
    run = settings(data=data, label="y", objective=objective, **given, **{"num-boost-round": 3})
    model, booster, table = exported(run)
    theirs = booster.predict(xgboost.DMatrix(table.values, feature_names=list(table.columns)))
    ours = transform(model.objective, predict_margins(model, table.values))[:, 0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    kept = json.loads(booster.save_config())["learner"]["objective"]
    wanted = {
        "count:poisson": "poisson_regression_param",
        "reg:tweedie": "tweedie_regression_param",
        "reg:pseudohubererror": "pseudo_huber_param",
    }
    if objective in wanted:
        (value,) = kept[wanted[objective]].values()
        assert float(value) == pytest.approx(given[LOSSES[objective].reads[0].replace("_", "-")])
    assert from_text(to_text(model), Ensemble).parameters == model.parameters


HELD = {
    "default-credit": {
        "monotone-constraints": "LIMIT_BAL:-1,PAY_0:1,BILL_AMT1:1",
        "interaction-constraints": "[LIMIT_BAL,PAY_0,PAY_2],[PAY_0,BILL_AMT1,PAY_AMT1],[SEX,AGE]",
    },
    "abalone": {
        "monotone-constraints": "f2:1,f5:1,f8:-1",
        "interaction-constraints": "[f1,f2],[f2,f5,f8],[f3,f4]",
    },
}


@pytest.mark.by_default("abalone*")
@pytest.mark.each_value_once
@pytest.mark.parametrize("kinds", [("monotone",), ("interaction",), ("monotone", "interaction")])
@pytest.mark.parametrize(
    ("data", "objective", "more"),
    [
        ("default-credit", "binary:logistic", {}),
        ("default-credit", "binary:logistic", {"max-delta-step": 0.3, **PENALTIES}),
        ("abalone", "reg:squarederror", {}),
        ("abalone", "count:poisson", {}),
    ],
)
def test_constraints_hold_as_in_xgboost(real_data, settings, data, objective, more, kinds):
    held = {f"{kind}-constraints": HELD[data][f"{kind}-constraints"] for kind in kinds}
    short = {"num-boost-round": 4, "max-depth": 5, "max-bin": 64, "valid-fraction": 0.0}
    run = settings(data=data, objective=objective, parties=1, **{**short, **more, **held})
    found = agreement(run)
    assert_exact(found, 4)
    free = settings(data=data, objective=objective, parties=1, **{**short, **more})
    assert compare_trees(
        load(Path(run.run_dir) / "model.json", Ensemble), pooled_booster(free)
    ).differing
