"""Leaves that are quantiles of residuals: XGBoost's, in SecureBoost."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xgboost
from hypothesis import given
from hypothesis import strategies as draw

from clients.secureboost import active
from fedapp.data.datasets import read_source
from fedapp.errors import ConfigError, PartyError
from fedapp.messages.secureboost import SetupRequest
from fedapp.metrics import pooled
from fedapp.runs.baselines import baseline_rows, train_boosted
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.site.policy import check_event, check_message
from fedapp.site.settings import SiteConfig
from fedapp.trees.losses import PLAIN
from fedapp.trees.model import LEAF
from fedapp.trees.predict import predict_margins
from fedapp.trees.quantiles import as_base_score, leaf_quantiles, quantile_score, ranks_around
from tests.federated import lines_of, model_of
from tests.messages.declared import example
from tests.network import run as run_sites
from tests.random_tables import differences
from tests.reference import compare_trees
from tests.tables import write_rows

MEDIAN, QUANTILE = "reg:absoluteerror", "reg:quantileerror"
BOTH = pytest.mark.parametrize("objective", [MEDIAN, QUANTILE])
LEVELS = [0.5, 0.1, 0.9, 0.25, 0.0625, 1 / 3]


def table(path, seed, **more):
    """A CSV of columns with ties and missing values, labels with ties, and weights."""
    rng = np.random.default_rng(seed)
    n_rows = int(rng.choice([40, 150, 400]))
    values = rng.integers(0, rng.choice([5, 40]), (n_rows, 5)).astype(float)
    values[rng.random(values.shape) < rng.choice([0, 0.2])] = np.nan
    signal = np.nan_to_num(values) @ [1, -1, 1, 2, 1] + rng.standard_cauchy(n_rows)
    columns = dict(zip("abcde", values.T, strict=True))
    labels = signal.round(int(rng.integers(0, 5)))
    weights = rng.choice([0.0, 0.3, 1.0, 2.5, 1 / 3], n_rows)
    return write_rows(path, {**columns, "w": weights, "y": labels, **more})


def run_of(make, path, objective, **more):
    """A run on a table."""
    level = {} if objective == MEDIAN else {"quantile_alpha": 0.3}
    size = {"num_boost_round": 3, "max_depth": 3, "max_bin": 16, "label": "y"}
    drop = {} if "weight" in more else {"drop_columns": "w"}
    return make(data=str(path), objective=objective, **{**size, **drop, **level, **more})


def assert_equal(run, folder):
    """The run's model is XGBoost's in every bit."""
    assert differences(run, folder) == []
    model, trained = model_of(folder), train_boosted(run, baseline_rows(run)[0])
    agreement = compare_trees(model, trained.booster)
    assert (agreement.differing, agreement.leaf_error) == (0, 0)
    config = json.loads(trained.booster.save_config())["learner"]["learner_model_param"]
    assert model.base_score.tolist() == [np.float32(json.loads(config["base_score"])[0])]
    return model


# The same trees


@pytest.mark.slow
@given(
    draw.integers(0, 10**6),
    draw.integers(1, 60),
    draw.sampled_from(LEVELS),
    draw.sampled_from([MEDIAN, QUANTILE]),
    draw.booleans(),
)
def test_first_predictions_are_xgboosts_to_the_last_bit(seed, n_rows, level, objective, weighted):
    rng = np.random.default_rng(seed)
    labels = (rng.standard_cauchy(n_rows) * 10).round(int(rng.integers(0, 6))).astype(np.float32)
    weights = None
    if weighted:
        weights = rng.choice(np.float32([0, 0.1, 1, 1 / 3, 7]), n_rows)
        weights[0] = 1
    parameters = {"objective": objective, "quantile_alpha": level, "nthread": 1, "verbosity": 0}
    matrix = xgboost.DMatrix(np.zeros((n_rows, 1)), labels, weight=weights)
    config = json.loads(xgboost.train(parameters, matrix, 1).save_config())
    (theirs,) = json.loads(config["learner"]["learner_model_param"]["base_score"])
    ours = quantile_score(objective, labels, weights, replace(PLAIN, quantile_alpha=level))
    assert ours.tolist() == [np.float32(theirs)]


@pytest.mark.by_default("1-reg:quantileerror", "4-reg:absoluteerror")
@BOTH
@pytest.mark.parametrize("seed", range(6))
def test_random_tables_grow_xgboosts_trees(vertical, tmp_path, objective, seed):
    path = table(tmp_path / "rows.csv", seed)
    more = {"parties": 2 + seed % 2, "columns": "random", "seed": seed}
    more |= {"weight": "w"} if seed % 3 else {}
    more |= {"quantile_alpha": LEVELS[seed]} if objective == QUANTILE else {}
    more |= {"eta": [0.1, 0.3, 1.0][seed % 3], "reg_lambda": float(seed % 2)}
    run = run_of(vertical, path, objective, **more)
    assert_equal(run, run_local(run))


@pytest.mark.by_default("2-more0-abalone")
@pytest.mark.parametrize("data", ["abalone", "space-ga"])
@pytest.mark.parametrize(
    ("parties", "more"),
    [(2, {"objective": MEDIAN}), (3, {"objective": QUANTILE, "quantile_alpha": 0.9})],
)
def test_real_rows_grow_xgboosts_trees(vertical, real_data, tmp_path, data, parties, more):
    rows = read_source(data)
    assert rows.labels is not None
    columns = dict(zip(rows.columns, rows.values[:800].T, strict=True))
    path = write_rows(tmp_path / "rows.csv", {**columns, "y": rows.labels[:800]})
    size = {"num_boost_round": 4, "max_depth": 4, "max_bin": 16, "columns": "random"}
    run = vertical(data=str(path), label="y", parties=parties, **size, **more)
    folder = run_local(run)
    model = assert_equal(run, folder)
    assert sum((tree["left"] != LEAF).sum() for tree in model.trees) > 20


@pytest.mark.slow
@pytest.mark.by_default("more1-reg:quantileerror", "more2-reg:absoluteerror")
@BOTH
@pytest.mark.parametrize(
    "more",
    [
        {"grow_policy": "lossguide", "max_leaves": 4, "max_depth": 0},
        {"grow_policy": "lossguide", "max_leaves": 5, "max_depth": 4, "weight": "w"},
        {"max_leaves": 3},
        {"reg_alpha": 0.5, "gamma": 1.0, "min_child_weight": 4, "max_delta_step": 0.5},
    ],
)
def test_ways_of_growing_are_xgboosts(vertical, tmp_path, objective, more):
    run = run_of(vertical, table(tmp_path / "rows.csv", 5), objective, **more)
    assert differences(run, run_local(run)) == []


@pytest.mark.slow
@pytest.mark.by_default("reg:quantileerror")
@BOTH
def test_rows_may_start_from_base_margins(vertical, tmp_path, objective):
    margins = np.random.default_rng(1).normal(0, 9, 400).round(2)
    run = run_of(vertical, table(tmp_path / "rows.csv", 5, m=margins), objective, base_margin="m")
    model, trained = model_of(run_local(run)), train_boosted(run, baseline_rows(run)[0])
    agreement = compare_trees(model, trained.booster)
    assert (agreement.differing, agreement.leaf_error) == (0, 0)
    without = run_local(run_of(vertical, Path(run.data), objective, drop_columns="w,m"))
    assert not np.array_equal(model.trees[0]["value"], model_of(without).trees[0]["value"])


@pytest.mark.slow
@pytest.mark.by_default("reg:quantileerror")
@BOTH
def test_a_run_stops_at_xgboosts_best_round(vertical, tmp_path, objective):
    path = table(tmp_path / "rows.csv", 5)
    more = {"num_boost_round": 40, "early_stopping_rounds": 2, "eta": 1.0, "valid_fraction": 0.3}
    run = run_of(vertical, path, objective, **more)
    folder = run_local(run)
    booster = train_boosted(run, baseline_rows(run)[0]).booster  # up to its best round
    assert 0 < folder.summary["best_round"] == booster.num_boosted_rounds() < 38
    agreement = compare_trees(model_of(folder), booster)
    assert (agreement.differing, agreement.leaf_error) == (0, 0)
    metric = "mae" if objective == MEDIAN else "quantile@0.3"
    scores = [line["valid"][metric] for line in lines_of(folder.rounds)]
    assert len(scores) == folder.summary["best_round"] + 2
    assert min(scores) == pytest.approx(folder.summary["metrics"]["valid"][metric])


@pytest.mark.by_default("reg:quantileerror")
@BOTH
def test_a_written_model_predicts_the_same_bits_in_xgboost(vertical, tmp_path, objective):
    folder = run_local(run_of(vertical, table(tmp_path / "rows.csv", 4), objective))
    model, booster = model_of(folder), xgboost.Booster(model_file=folder.path / "model.xgb.json")
    config = json.loads(booster.save_config())["learner"]["objective"]
    assert config["name"] == objective
    if objective == QUANTILE:
        assert json.loads(config["quantile_loss_param"]["quantile_alpha"]) == [0.3]
    rows = np.random.default_rng(2).uniform(0, 40, (300, len(model.columns))).astype(np.float32)
    rows[rows < 4] = np.nan
    theirs = booster.predict(xgboost.DMatrix(rows, feature_names=list(model.columns)))
    np.testing.assert_array_equal(predict_margins(model, rows)[:, 0], theirs)


@pytest.mark.slow
@pytest.mark.by_default("reg:absoluteerror")
@BOTH
def test_first_trees_have_only_the_active_partys_columns(vertical, tmp_path, objective):
    path = table(tmp_path / "rows.csv", 5)
    run = run_of(vertical, path, objective, secureboost__first_trees=1, columns="even")
    first, *later = model_of(run_local(run)).trees
    rows = baseline_rows(run)[0]
    n_active = 3
    alone = replace(rows, values=rows.values.copy())
    alone.values[:, n_active:] = np.nan
    trained = train_boosted(run.model_copy(update={"asked_rounds": 1}), alone)
    (theirs,) = json.loads(trained.booster.save_raw("json"))["learner"]["gradient_booster"][
        "model"
    ]["trees"]
    leaves = first["left"] == LEAF
    assert (first["column"][~leaves] < n_active).all()
    values = np.float32(theirs["split_conditions"])[leaves]
    np.testing.assert_array_equal(first["value"][leaves], values)
    assert any((tree["column"][tree["left"] != LEAF] >= n_active).any() for tree in later)


def test_a_quantile_lies_between_two_rows_or_is_the_first_or_last():
    n_rows = np.array([4, 9])
    for level, ranks, shares in (
        (0.5, [[1, 2], [4, 5]], [0.5, 0.0]),
        (0.15, [[0, 0], [0, 1]], [0.0, 0.5]),
        (0.95, [[3, 3], [8, 8]], [0.0, 0.0]),
    ):
        got, distances = ranks_around(n_rows, level)
        assert got.tolist() == ranks
        assert distances.tolist() == shares


def test_a_median_is_multiplied_and_divided_by_the_weight_as_xgboost_does():
    median = np.float32(0.71428573)
    assert as_base_score(MEDIAN, median, 3.0).tolist() == [np.float32(0.7142857)] != [median]
    assert as_base_score("reg:quantileerror", median, 3.0).tolist() == [median]


def test_only_drawn_rows_count_in_leaves():
    leaves, residuals = np.array([1, 2, 1, 2, 1]), np.float32([5, 1, 3, 9, 4])
    values = leaf_quantiles(leaves, residuals, None, 0.5, 4)
    assert values.tolist() == [0, 4, 5, 0]
    weights = np.float32([1, 1, 3, 2, 1])
    assert leaf_quantiles(leaves, residuals, weights, 0.5, 3).tolist() == [0, 3, 9]


@pytest.mark.by_default("reg:quantileerror")
@BOTH
def test_a_subsample_draws_the_rows_of_its_leaves(vertical, tmp_path, monkeypatch, objective):
    rounds = []

    def recorded(leaves, residuals, *more):
        rounds.append((leaves, residuals))
        return leaf_quantiles(leaves, residuals, *more)

    monkeypatch.setattr(active, "leaf_quantiles", recorded)
    path = table(tmp_path / "rows.csv", 5)
    more = {"subsample": 0.5, "eta": 1.0, "quantile_alpha": 0.5}
    model = model_of(run_local(run_of(vertical, path, objective, **more)))
    for tree, (leaves, residuals) in zip(model.trees, rounds, strict=True):
        assert len(leaves) == tree["hessian"][0]  # a drawn row counts 1
        for leaf in np.flatnonzero(tree["left"] == LEAF):
            of_leaf = residuals[leaves == leaf]
            assert len(of_leaf) == tree["hessian"][leaf]
            assert tree["value"][leaf] == pytest.approx(np.median(of_leaf), rel=1e-6, abs=1e-6)
    assert len({len(leaves) for leaves, _ in rounds}) == len(rounds) == 3


@pytest.mark.slow
@BOTH
def test_a_continued_model_is_that_of_one_run(vertical, tmp_path, objective):
    path = table(tmp_path / "rows.csv", 5)
    whole = model_of(run_local(run_of(vertical, path, objective, num_boost_round=4)))
    first = run_local(run_of(vertical, path, objective, num_boost_round=2))
    more = {"num_boost_round": 2, "init_model": str(first.path)}
    second = model_of(run_local(run_of(vertical, path, objective, **more)))
    assert len(second.trees) == 4
    for ours, theirs in zip(second.trees, whole.trees, strict=True):
        np.testing.assert_array_equal(ours["value"], theirs["value"])
        np.testing.assert_array_equal(ours["gain"], theirs["gain"])


# Scores


@pytest.mark.parametrize("level", LEVELS)
def test_the_pinball_loss_is_xgboosts(level):
    rng = np.random.default_rng(3)
    labels, margins = rng.normal(0, 9, (2, 90)).astype(np.float32)
    weights = rng.uniform(0.1, 3, 90).astype(np.float32)
    rows = xgboost.DMatrix(np.zeros((90, 1)), labels, base_margin=margins, weight=weights)
    how = {"objective": QUANTILE, "quantile_alpha": level, "gamma": 1e9, "eta": 0}
    results = {}
    xgboost.train(how, rows, 1, evals=[(rows, "all")], evals_result=results)
    name = f"quantile@{level:g}"
    ours = pooled(QUANTILE, margins[:, None], labels, weights, (name,))[name]
    assert ours == pytest.approx(results["all"]["quantile"][-1], rel=1e-5)


# Refusals


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"quantile-alpha": 0}, "quantile-alpha must be > 0"),
        ({"quantile-alpha": 1}, "quantile-alpha must be < 1"),
        ({"label-epsilon": 1.0}, "label-epsilon must be 0 for reg:quantileerror: drawn labels"),
        ({"monotone-constraints": "a:1"}, "monotone-constraints must be empty for reg:quantile"),
        ({"eval-metric": "quantile"}, "must name the run's quantile-alpha, as quantile@0.5, got"),
        ({"eval-metric": "rmsle"}, "eval-metric must be one or several of quantile, mae, rmse"),
        ({"scale-pos-weight": 2}, "scale-pos-weight must be 1 for reg:quantileerror"),
    ],
)
def test_settings_that_do_not_fit_are_refused(more, rule):
    with pytest.raises(ConfigError, match=rule):
        load_settings({"strategy": "secureboost", "objective": QUANTILE, **more})


@BOTH
@pytest.mark.parametrize(
    "strategy",
    ["bagging", "cyclic", "fedxgbllr", "fedavg-linear", "federated-forest"],
)
def test_other_methods_refuse_them(settings, tmp_path, objective, strategy):
    run = run_of(settings, table(tmp_path / "rows.csv", 1), objective, strategy=strategy)
    reason = "leaves are quantiles of residuals, which are single rows' values: pax and"
    with pytest.raises(ConfigError, match=f"for {strategy}, got {objective}: {reason}"):
        run_local(run)


@BOTH
def test_constraints_of_a_site_are_refused_before_the_first_tree(
    vertical, sites, write_table, objective
):
    ids, columns = [f"customer {number}" for number in range(90)], np.arange(180.0).reshape(2, 90)
    shop = write_table("shop", 90, id=ids, a=None, b=None, y=None, c=columns[0], d=columns[1])
    bank = {"name": "bank", "data": write_table("bank", 90, id=ids, y=columns[0]), "id": "id"}
    own = {"name": "shop", "data": shop, "id": "id", "label": "", "monotone-constraints": "c:1"}
    rule = f"monotone-constraints must be empty in all node configs for {objective}"
    with pytest.raises(PartyError, match=rule):
        run_sites(vertical(objective=objective), sites(bank, own))


@BOTH
def test_goss_is_refused(vertical, tmp_path, objective):
    run = run_of(vertical, table(tmp_path / "rows.csv", 1), objective, secureboost__goss=True)
    with pytest.raises(ConfigError, match=rf"secureboost\.goss must be false for {objective}"):
        run_local(run)


def test_a_site_computes_quantiles_for_no_other_method():
    site = SiteConfig("bank", "a.csv", "y", simulated=True)
    setup = SetupRequest(**{**example(SetupRequest), "objective": MEDIAN})
    check_message(site, setup, "bank", "secureboost")
    with pytest.raises(ConfigError, match="label-epsilon must be 0 in the node config of bank"):
        check_event(replace(site, label_epsilon=1.0), MEDIAN)
    for method in ("bagging", "horizontal-forest", "federated-forest", ""):
        with pytest.raises(ConfigError, match="objective must be one whose leaves are sums at b"):
            check_message(site, setup, "bank", method)
