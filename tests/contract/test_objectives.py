"""What every objective of ``objectives`` must do, in PAX, in SecureBoost and at sites."""

import json
from functools import partial

import numpy as np
import pytest
import xgboost

from fedapp.errors import ConfigError, FedappError, PartyError
from fedapp.metrics import pooled
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from fedapp.settings import load_settings
from fedapp.trees.limits import DISTRIBUTIONS
from fedapp.trees.losses import PLAIN
from fedapp.trees.objective import exact_predictions, gradients, row_bounds
from fedapp.trees.predict import predict_margins
from fedapp.trees.ranking import N_GRADES
from fedapp.trees.xgboost import with_bounds
from tests.contract.objectives import (
    AFT,
    CASES,
    COX,
    LEVELS,
    NDCG,
    PAIRWISE,
    QUANTILE,
    arrays_of,
    federation,
    one_row_trees,
)
from tests.federated import model_bytes, model_of
from tests.strategies.test_pax import assert_same_trees
from tests.tables import csv_columns, write_rows

MASKED = {"pax__aggregation": "secure"}


# XGBoost's numbers


@pytest.mark.parametrize(("objective", "step"), [(COX, 1), (NDCG, 9), (PAIRWISE, 9)])
@pytest.mark.parametrize("n_grades", [2, 5, 32])
def test_gradients_that_follow_from_several_rows_are_xgboosts_to_the_last_bit(
    objective, step, n_grades
):
    rng = np.random.default_rng(n_grades)
    queries = np.zeros(60, int) if objective == COX else np.repeat(range(4), rng.integers(1, 70, 4))
    n_rows, ones = len(queries), np.ones(len(queries), np.float32)
    margins = rng.normal(0, 2, n_rows).round(1).astype(np.float32)
    if objective == COX:  # of few grades times are tied
        times = np.ceil(rng.exponential(4, n_rows) * n_grades) / n_grades
        labels = grades = np.where(rng.random(n_rows) < 0.6, times, -times).astype(np.float32)
        more, order = {}, np.arange(n_rows)
    else:
        grades = rng.integers(0, n_grades, n_rows)
        labels, more = (queries * N_GRADES + grades).astype(np.float32), {"qid": queries}
        # Rows in turns of the queries, in the order within each.
        order = np.lexsort((queries, np.arange(n_rows) - np.searchsorted(queries, queries)))
    ours = np.empty((n_rows, 2), np.float32)
    ours[order] = gradients(objective, margins[order][:, None], labels[order], ones)[:, 0]

    def matrix(is_row):
        return xgboost.DMatrix(is_row, grades, base_margin=margins, **more)

    parameters = {"objective": objective, "base_score": 1.0 if objective == COX else 0.0}
    checked = 0
    for row, hessian, weight in one_row_trees(parameters, matrix, n_rows, step):
        assert hessian == ours[row, 1]
        assert weight == np.float32(-np.float64(ours[row, 0]) / np.float64(ours[row, 1]))
        checked += 1
    assert checked > 40 / step


LOSSES = [
    *((AFT, f"aft-nloglik@{each}:1", {"aft_loss_distribution": each}) for each in DISTRIBUTIONS),
    *((QUANTILE, f"quantile@{level:g}", {"quantile_alpha": level}) for level in LEVELS),
]


@pytest.mark.parametrize(("objective", "name", "parameters"), LOSSES)
def test_the_loss_is_xgboosts(objective, name, parameters):
    rng = np.random.default_rng(3)
    labels = (np.exp(rng.normal(1, 1, 90)) * rng.choice([-1, 1], 90)).astype(np.float32)
    margins = rng.normal(1, 2, 90).astype(np.float32)
    weights = rng.uniform(0.1, 3, 90).astype(np.float32)
    rows = xgboost.DMatrix(np.zeros((90, 1)), labels, base_margin=margins, weight=weights)
    rows = with_bounds(rows, labels, AFT) if objective == AFT else rows
    how, results = {"objective": objective, "gamma": 1e9, "eta": 0, **parameters}, {}
    xgboost.train(how, rows, 1, evals=[(rows, "all")], evals_result=results)
    ours = pooled(objective, margins[:, None], labels, weights, (name,))[name]
    assert ours == pytest.approx(results["all"][name.partition("@")[0]][-1], rel=1e-5)


# Models


@pytest.mark.by_default("aft", "cox", "ndcg", "quantile")
@pytest.mark.parametrize("name", [name for name in CASES if name != "aft, weighted"])
def test_parties_of_pax_grow_the_trees_of_all_rows_also_under_masks(settings, tmp_path, name):
    # Every value has a bin at every party.
    equal = {"pax__bins": "equal", "pax__fusion": "finest", "max_bin": 400}
    make = partial(CASES[name].run, settings, tmp_path, **equal)
    plain = make(parties=3)
    folder = run_local(plain)
    CASES[name].judge(plain, folder)
    one, three = (run_local(make(parties=parties, **MASKED)) for parties in (1, 3))
    assert model_bytes(one) == model_bytes(three)
    assert_same_trees(model_of(three), model_of(folder))


@pytest.mark.by_default("aft, weighted", "cox", "ndcg", "quantile")
@pytest.mark.parametrize("name", CASES)
def test_secureboost_grows_xgboosts_trees_and_xgboost_predicts_alike(vertical, tmp_path, name):
    run = CASES[name].run(vertical, tmp_path, parties=3, columns="even", max_bin=16)
    folder = run_local(run)
    CASES[name].judge(run, folder)
    assert folder.summary["metrics"]["test"].get("c-index", 1) > 0.5
    model, booster = model_of(folder), xgboost.Booster(model_file=folder.path / "model.xgb.json")
    rows = np.random.default_rng(2).uniform(0, 80, (300, len(model.columns))).astype(np.float32)
    rows[rows < 8] = np.nan
    matrix = xgboost.DMatrix(rows, feature_names=list(model.columns))
    theirs = booster.predict(matrix, output_margin=True)
    np.testing.assert_array_equal(predict_margins(model, rows)[:, 0], theirs)
    predicted = exact_predictions(run.objective, theirs.astype(np.float64))
    np.testing.assert_allclose(booster.predict(matrix), predicted, rtol=1e-6)
    config = json.loads(booster.save_config())["learner"]["objective"]
    assert config["name"] == run.objective
    if CASES[name].written:
        group, parameter, value = CASES[name].written
        assert config[group][parameter] == value


@pytest.mark.by_default("quantile-pax")
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
@pytest.mark.parametrize("name", ["aft, weighted", "ndcg", "median", "quantile"])
def test_a_continued_model_is_that_of_one_run(vertical, tmp_path, strategy, name):
    parties = {"pax": 1, "secureboost": 2}[strategy]
    make = partial(CASES[name].run, vertical, tmp_path, strategy=strategy, parties=parties)
    whole, begun = (run_local(make(num_boost_round=rounds)) for rounds in (3, 2))
    for file in ("model.json", "model.xgb.json") if strategy == "pax" else ("",):
        more = {"num_boost_round": 1, "init_model": str(begun.path / file)}
        assert_same_trees(model_of(run_local(make(**more))), model_of(whole))


# Scores of new rows


@pytest.mark.by_default("ndcg")
@pytest.mark.parametrize("name", ["aft", "ndcg"])
def test_new_rows_are_scored_where_the_table_has_all_of_a_label(settings, tmp_path, name):
    case, output = CASES[name], tmp_path / "predictions.csv"
    folder = run_local(case.run(settings, tmp_path, parties=3))
    new = case.write(tmp_path / "new.csv", seed=9)
    scored = predict_table(folder.path, str(new), "", output)
    predicted = np.loadtxt(output, delimiter=",", skiprows=1, usecols=1)
    assert scored.scores == pytest.approx(case.score(arrays_of(new), predicted))
    without = write_rows(tmp_path / "without.csv", csv_columns(new, drop=case.extra))
    assert predict_table(folder.path, str(without), "", output).scores == {}


# Sites


@pytest.mark.by_default("pax-*", "secureboost-ndcg")
@pytest.mark.parametrize("name", ["aft", "cox", "ndcg", "quantile"])
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_sites_train_the_model_of_a_simulation(vertical, sites, tmp_path, strategy, name):
    masked = MASKED | {"subsample": 0.8} if (strategy, name) == ("pax", "quantile") else {}
    how, simulated, nodes = federation(CASES[name], strategy, tmp_path, **masked)
    for node in nodes:
        node |= {"least-parties": 2} if masked else {}
    deployed = run_local(vertical(**how), sites(*nodes))
    assert model_bytes(run_local(vertical(**how, **simulated))) == model_bytes(deployed)


def test_a_site_that_does_not_share_sums_at_risk_refuses_their_objective(vertical, sites, tmp_path):
    _, _, nodes = federation(CASES["cox"], "pax", tmp_path)
    nodes[1] |= {"share-risk-sums": False}
    with pytest.raises(PartyError, match="must be another for shop, whose node config"):
        run_local(vertical(strategy="pax", objective=COX), sites(*nodes))


# Refusals

DUE = "event must be empty unless labels are times, .*"
PLACES = "eval-metric must name the number of the first ranks"
REFUSED = {
    AFT: [
        ({"objective": "reg:gamma"}, DUE + "reg:gamma"),
        ({"aft-loss-distribution": "cauchy"}, "must be one of 'normal', 'logistic' or 'extreme'"),
        ({"aft-loss-distribution-scale": 0}, "aft-loss-distribution-scale must be > 0"),
        ({"eval-metric": "aft-nloglik"}, "name the run's distribution and scale, as aft-nloglik@n"),
        ({"eval-metric": "rmse"}, "eval-metric must be one or several of aft-nloglik, c-index"),
    ],
    COX: [
        ({"weight": "w"}, "weight must be empty for survival:cox, in which all rows count alike"),
        ({"label-epsilon": 1.0}, "label-epsilon must be 0 for survival:cox"),
    ],
    NDCG: [
        ({"objective": "reg:gamma"}, "qid must be empty unless rows are ranked, .*with reg:gamma"),
        ({"objective": "rank:map"}, "objective .*ranking is not supported; nearest is rank:nd"),
        ({"weight": "w"}, "weight must be empty for rank:ndcg, in which all queries count alike"),
        ({"label-epsilon": 1.0}, "label-epsilon must be 0 for rank:ndcg"),
        ({"eval-metric": "ndcg@0"}, PLACES + " .*ndcg@10"),
        ({"eval-metric": "ndcg@2.5"}, PLACES),
        ({"eval-metric": "ndcg-"}, "eval-metric must be one or several of ndcg"),
        ({"lambdarank-pair-method": "mean"}, "pairs, gains and normalization .* XGBoost's defaul"),
    ],
    QUANTILE: [
        ({"quantile-alpha": 0}, "quantile-alpha must be > 0"),
        ({"quantile-alpha": 1}, "quantile-alpha must be < 1"),
        ({"label-epsilon": 1.0}, "label-epsilon must be 0 for reg:quantileerror: drawn labels"),
        ({"monotone-constraints": "a:1"}, "monotone-constraints must be empty for reg:quantile"),
        ({"eval-metric": "quantile"}, "must name the run's quantile-alpha, as quantile@0.5, got"),
        ({"eval-metric": "rmsle"}, "eval-metric must be one or several of quantile, mae, rmse"),
        ({"scale-pos-weight": 2}, "scale-pos-weight must be 1 for reg:quantileerror"),
    ],
}


@pytest.mark.parametrize(
    ("objective", "more", "rule"), [(key, *row) for key, rows in REFUSED.items() for row in rows]
)
def test_settings_that_do_not_fit_are_refused(objective, more, rule):
    event, qid = {"event": "died"}, {"qid": "query"}
    roles = {AFT: event, COX: event, NDCG: qid, QUANTILE: {"strategy": "secureboost"}}[objective]
    with pytest.raises(ConfigError, match=rule):
        load_settings({"label": "y", **roles, "objective": objective, **more})


OTHERS = ["bagging", "cyclic", "fedxgbllr", "fedavg-linear", "federated-forest"]
OTHER = "objective must be one of .* for {strategy}, got {objective}"
NO_NOISE = MASKED | {"privacy__epsilon": 1.0, "parties": 3}
OF_ROWS = "one without times, queries or quantiles with privacy"
DRAWS = {"strategy": "secureboost", "secureboost__goss": True}
GOSS = r"secureboost\.goss must be false for {objective}"
NO_LOSS = MASKED | {"min_parties": 2, "parties": 3}
QUANTILES = ": leaves are quantiles of residuals, which are single rows' values: pax and"


@pytest.mark.parametrize(
    ("name", "how", "rule"),
    [
        *((name, {"strategy": other}, OTHER) for name in ("cox", "ndcg") for other in OTHERS),
        *(("quantile", {"strategy": other}, OTHER + QUANTILES) for other in OTHERS),
        *((name, NO_NOISE, OF_ROWS) for name in ("aft", "ndcg", "quantile")),
        *((name, DRAWS, GOSS) for name in ("median", "quantile")),
        ("quantile", NO_LOSS, "min-parties must be 0 with pax.aggregation=secure and reg"),
    ],
)
def test_runs_that_do_not_fit_an_objective_are_refused(settings, tmp_path, name, how, rule):
    rule = rule.format(**{**CASES[name].how, **how})
    with pytest.raises((ConfigError, PartyError), match=rule):
        run_local(CASES[name].run(settings, tmp_path, **how))


@pytest.mark.parametrize(("objective", "clip"), [(AFT, 0.0), (AFT, 5.0), (NDCG, 0.0)])
def test_gradients_of_times_and_ranks_have_no_bound_for_noise(objective, clip):
    with pytest.raises(ValueError, match="must be for labels that are no times or ranks, got"):
        row_bounds(objective, PLAIN, clip)


ROWS = {
    "aft": {"time": [3.0, 2, 5, 1] * 5, "died": [1, 0, 1, 0] * 5},
    "ndcg": {"grade": [3, 2, 0, 1] * 5, "query": ["x", "y"] * 10},
}
FLAT = "label must differ between training rows of some query"
CHECKED = {
    "aft": [
        ({"time": [3, -2, 5, 0] * 5}, {}, "label column 'time' must be times > 0, got 10 of 20"),
        ({"died": [1, 0, 2, 0] * 5}, {}, r"event column 'died' must be 1 .* or 0 .*, got 5 of"),
        ({"died": [1, 0, "", 0] * 5}, {}, "column 'died' must be 1 .* in every row, got 5"),
        ({"died": ["yes", "no", "dead", "no"] * 5}, {}, "event column must be numbers: 20 of"),
        ({"time": ["long", "short", 5, 1] * 5}, {}, "label column 'time' must be times with an"),
        ({"died": [0] * 20}, {}, "label must be the time of an event in some training row"),
    ],
    "ndcg": [
        ({"grade": [3, -2, 0.5, 40] * 5}, {}, "column 'grade' must be whole .* got 15 of 20"),
        ({"grade": ["good", "bad", "", "x"] * 5}, {}, "label column '?grade'? must"),
        ({"query": ["x", ""] * 10}, {}, "column 'query' must have no missing values, got 10"),
        ({"grade": [1] * 20}, {}, FLAT),
        ({"query": range(20)}, {}, FLAT),
        ({}, {"qid": "session"}, "qid column 'session' must be in the table"),
        ({}, {"qid": ""}, "qid must name the column of queries at .* for rank:ndcg, got none"),
        ({}, {"folds": 3, "fold": 1}, "folds must be at most the 2 rows"),
    ],
}


@pytest.mark.by_default("pax-aft-*", "secureboost-aft-*", "pax-ndcg-columns9-*")
@pytest.mark.parametrize(
    ("name", "columns", "how", "rule"), [(key, *row) for key in CHECKED for row in CHECKED[key]]
)
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_labels_are_checked(vertical, tmp_path, strategy, name, columns, how, rule):
    rows = {"a": [1, 2, 3, 4] * 5, "b": range(20), "w": range(20), **ROWS[name], **columns}
    data = str(write_rows(tmp_path / "rows.csv", rows))
    more = {"strategy": strategy, "parties": 1 if strategy == "pax" else 2, "columns": "even"}
    with pytest.raises(FedappError, match=rule):
        run_local(CASES[name].run(vertical, tmp_path, **{"data": data, **more, **how}))
