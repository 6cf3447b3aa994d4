"""Proportional hazards of censored times: XGBoost's survival:cox in PAX and SecureBoost."""

import json
from dataclasses import replace

import numpy as np
import pytest
import xgboost

from fedapp.data.datasets import read_source
from fedapp.errors import ConfigError, DivergedError, FedappError, PartyError
from fedapp.messages.pax import GrowRequest
from fedapp.metrics import binning_errors, pooled, scores, statistics
from fedapp.records.document import load
from fedapp.runs.baselines import baseline_rows
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.site.policy import check_event
from fedapp.site.settings import SiteConfig
from fedapp.trees.cox import cox_pairs
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import gradients
from fedapp.trees.predict import predict_margins
from fedapp.trees.survival import concordance
from simulations.bench.exactness import breslow_trees
from tests.histograms.test_bounds import asks
from tests.network import fails_from
from tests.network import run as run_with_loss
from tests.random_tables import differences
from tests.reference import compare_trees
from tests.strategies.test_pax_secure import assert_same_trees
from tests.strategies.test_survival import model_of, run_of
from tests.tables import csv_columns, deal_rows, registry, trial, write_rows

COX = "survival:cox"


def tumours(path):
    """Breast tumours: the radius as a time, and benign ones as events."""
    source = read_source("breast-cancer")
    assert source.labels is not None
    columns = {
        name.replace(" ", "_"): values.round(2)
        for name, values in zip(source.columns, source.values.T, strict=True)
    }
    outcome = {"time": columns.pop("mean_radius").round(1), "died": source.labels.astype(int)}
    few = dict(list(columns.items())[:6])
    return write_rows(path, {**few, "w": outcome["died"], **outcome})


def made_rows(n_rows, seed, tied, spread=1.0):
    """Margins and signed times, in no order."""
    rng = np.random.default_rng(seed)
    times = rng.exponential(4, n_rows) + 0.01
    times = np.ceil(times) if tied else times
    labels = np.where(rng.random(n_rows) < 0.6, times, -times)
    return rng.normal(0, spread, n_rows).astype(np.float32), labels.astype(np.float32)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_xgboosts_to_the_last_bit(tied):
    margins, labels = made_rows(60, 3, tied, spread=2)
    ours = gradients(COX, margins[:, None], labels, np.ones(60, np.float32))[:, 0]
    how = {"objective": COX, "nthread": 1, "lambda": 0, "min_child_weight": 0, "eta": 1}
    checked = 0
    for row, (gradient, hessian) in enumerate(ours):
        is_row = (np.arange(60) == row).astype(np.float32)[:, None]
        matrix = xgboost.DMatrix(is_row, labels, base_margin=margins)
        booster = xgboost.train({**how, "max_depth": 1, "base_score": 1.0}, matrix, 1)
        (tree,) = json.loads(booster.save_raw("json"))["learner"]["gradient_booster"]["model"][
            "trees"
        ]
        if len(tree["sum_hessian"]) > 1:
            assert np.float32(tree["sum_hessian"][2]) == hessian
            weight = np.float32(-np.float64(gradient) / np.float64(hessian))
            assert np.float32(tree["base_weights"][2]) == weight
            checked += 1
    assert checked > 50


def test_hessians_are_never_negative_and_no_gradient_is_infinite():
    ones = np.ones(400, np.float32)
    for seed in range(30):  # XGBoost's at risk are rounding errors, or none, in the end
        margins, labels = made_rows(400, seed, tied=False, spread=6)
        try:
            assert (gradients(COX, margins[:, None], labels, ones)[..., 1] >= 0).all()
        except DivergedError:
            assert np.ptp(margins) > 16  # nothing of float64 is left of the latest


@pytest.mark.by_default("tumours")
@pytest.mark.parametrize("write", [trial, registry, tumours])
def test_secureboost_grows_xgboosts_trees(vertical, tmp_path, write):
    more = {"objective": COX, "columns": "even", "max_bin": 16}
    run = run_of(vertical, write, tmp_path, parties=2, **more)
    folder = run_local(run)
    assert differences(run, folder) == []
    assert folder.summary["metrics"]["test"]["c-index"] > 0.6
    booster = xgboost.Booster(model_file=folder.path / "model.xgb.json")
    model = load(folder.path / "model.json", Ensemble)
    rows = np.random.default_rng(2).uniform(0, 80, (200, len(model.columns))).astype(np.float32)
    ratios = np.exp(predict_margins(model, rows)[:, 0])
    matrix = xgboost.DMatrix(rows, feature_names=list(model.columns))
    np.testing.assert_allclose(booster.predict(matrix), ratios, rtol=1e-6)


def is_xgboosts(run, model):
    """Whether a model is XGBoost's on the pooled rows by the same likelihood, node for node."""
    agreement = compare_trees(model, breslow_trees(run))
    assert agreement.n_nodes > 50
    return agreement.differing == 0 and agreement.leaf_error <= 1e-6


@pytest.mark.by_default("registry")
@pytest.mark.parametrize("write", [trial, registry, tumours])
def test_parties_of_pax_grow_the_trees_of_pooled_rows(settings, tmp_path, write):
    # Every value and every time has a bin at every party.
    how = {"objective": COX, "pax__bins": "equal", "max_bin": 400}
    for parties in (1, 3):
        run = run_of(settings, write, tmp_path, parties=parties, **how)
        plain, _ = model_of(run)
        assert is_xgboosts(run, plain)
    how |= {"pax__aggregation": "secure"}
    masked = [model_of(run_of(settings, write, tmp_path, parties=n, **how)) for n in (1, 3)]
    assert masked[0][1] == masked[1][1]
    assert_same_trees(masked[0][0], plain)


def test_times_are_merged_to_bins(settings, tmp_path):
    run = run_of(settings, trial, tmp_path, parties=1, objective=COX, max_bin=16)
    assert len(np.unique(np.abs(baseline_rows(run)[0].labels))) > 200
    assert is_xgboosts(run, model_of(run)[0])


def test_a_round_goes_on_without_a_party_that_is_lost_at_its_sums(settings, tmp_path):
    how = {"parties": 4, "min_parties": 3, "num_boost_round": 2, "max_depth": 2, "max_bin": 16}
    run = run_of(settings, registry, tmp_path, objective=COX, **how)
    folder = run_with_loss(run, app=fails_from(6))  # the second round's sums of hazards
    assert [gone["step"] for gone in folder.summary["left_out"]] == [6]
    assert len(load(folder.path / "model.json", Ensemble).trees) == 2


@pytest.mark.by_default("plain")
@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_sites_train_the_model_of_a_simulation_and_may_refuse(
    settings, sites, tmp_path, aggregation
):
    tables = deal_rows(csv_columns(registry(tmp_path / "whole.csv")), tmp_path)
    data = ",".join(f"{name}={path}" for name, path in tables.items())
    how = {"objective": COX, "pax__aggregation": aggregation, "num_boost_round": 2}
    how |= {"early_stopping_rounds": 1, "valid_fraction": 0.3}
    roles = {"label": "time", "event": "died", "drop-columns": "w"}
    columns = {name.replace("-", "_"): column for name, column in roles.items()}
    simulated = run_local(settings(data=data, parties=3, **columns, **how))
    roles |= {"draws-secret": "none"}
    nodes = [{"name": name, "data": path, **roles} for name, path in tables.items()]
    deployed = run_local(settings(parties=3, **how), sites(*nodes))
    models = [(folder.path / "model.json").read_bytes() for folder in (simulated, deployed)]
    assert models[0] == models[1]
    nodes[1] |= {"share-risk-sums": "false"}
    rule = "objective must be another for clinic, whose node config has share-risk-sums false"
    with pytest.raises(PartyError, match=rule):
        run_local(settings(parties=3, **how), sites(*nodes))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda sent: replace(sent, hazards=sent.hazards[::-1]), "hazards must be .* rising"),
        (lambda sent: replace(sent, hazards=sent.hazards[1:]), "hazards must be .* one a bin"),
        (lambda sent: replace(sent, hazards=-sent.hazards), "hazards must be >= 0"),
    ],
)
def test_hazards_rise_by_bin(settings, tmp_path, monkeypatch, change, rule):
    asks(monkeypatch, GrowRequest, change)
    with pytest.raises(FedappError, match=rf"party-1\b.*GrowRequest\.{rule}"):
        run_local(run_of(settings, registry, tmp_path, parties=1, objective=COX))


def test_parties_sum_hazards_of_no_other_objective(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("strategies.pax.has_risk_sets", lambda _: True)
    with pytest.raises(PartyError, match=r"RisksRequest\.class must not come with survival:aft"):
        run_local(run_of(settings, registry, tmp_path, parties=1, objective="survival:aft"))


@pytest.mark.parametrize("n_bins", [2, 512, 4096])
def test_concordance_of_cells_orders_rows_by_falling_hazard(n_bins):
    margins, labels = made_rows(300, 7, tied=True)
    rows = margins[:, None], labels, np.ones(300, np.float32)
    exact = pooled(COX, *rows)["c-index"]
    doubles = labels.astype(np.float64), -margins.astype(np.float64), np.ones(300)
    assert exact == concordance(*doubles)
    cells = statistics(COX, *rows, n_bins)
    error = binning_errors(COX, cells)["c-index"]
    assert abs(scores(COX, cells)["c-index"] - exact) <= error + 1e-9


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"weight": "w"}, "weight must be empty for survival:cox, in which all rows count alike"),
        ({"label-epsilon": 1.0}, "label-epsilon must be 0 for survival:cox"),
        ({"eval-metric": "aft-nloglik"}, "eval-metric must be one or several of c-index for surv"),
    ],
)
def test_settings_that_do_not_fit_hazards_are_refused(more, rule):
    with pytest.raises(ConfigError, match=rule):
        load_settings({"label": "time", "event": "died", "objective": COX, **more})


def test_a_site_refuses_weights_of_hazards():
    site = SiteConfig("bank", "a.csv", "time", event="died", weight="w")
    with pytest.raises(ConfigError, match="weight must be empty at bank for survival:cox"):
        check_event(site, COX)


def separated_rows(n_rows=600):
    """Times that follow almost exactly from a column, and values; every seventh row is censored."""
    rng = np.random.default_rng(3)
    values = rng.normal(size=(n_rows, 2)).astype(np.float32)
    times = np.exp(3 - 2 * values[:, 0])
    return np.where(np.arange(n_rows) % 7, times, -times).astype(np.float32), values


@pytest.mark.parametrize("factor", [5, 15])
def test_sums_at_risk_that_rounding_has_lost_are_summed_from_the_end(factor):
    """XGBoost's own have no digit left where the ratios at risk are far below the others."""
    labels, values = separated_rows()
    margins = (factor * values[:, :1]).astype(np.float32)
    gradient, hessian = (each[:, 0].astype(np.float64) for each in cox_pairs(margins, labels))
    order = np.argsort(np.abs(labels), kind="stable")
    ratios, is_event = np.exp(margins[order, 0].astype(np.float64)), labels[order] > 0
    at_risk = np.cumsum(ratios[::-1])[::-1]
    rates, squares = np.cumsum(is_event / at_risk), np.cumsum(is_event / at_risk**2)
    np.testing.assert_allclose(gradient[order], ratios * rates - is_event, rtol=1e-4, atol=1e-5)
    exact = ratios * rates - ratios**2 * squares
    np.testing.assert_allclose(hessian[order], exact, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_a_strong_signal_stays_learned_through_many_rounds(vertical, tmp_path, strategy):
    labels, values = separated_rows()
    columns = {"a": values[:, 0], "b": values[:, 1], "time": np.abs(labels)}
    data = write_rows(tmp_path / "times.csv", {**columns, "event": (labels > 0).astype(int)})
    small = {"max_depth": 3, "eta": 0.3, "num_boost_round": 60, "secureboost__key_bits": 256}
    run = vertical(
        strategy=strategy, data=str(data), label="time", event="event", **small, objective=COX
    )
    assert run_local(run).summary["metrics"]["train"]["c-index"] > 0.95


def test_pairs_are_compared_wherever_margins_lie():
    labels, values = separated_rows()
    for shift in (-6, 0, 6):
        rows = values[:, :1] + np.float32(shift), labels, np.ones(len(labels), np.float32)
        of_bins = scores(COX, statistics(COX, *rows, 512))
        assert of_bins["c-index"] > 0.75
