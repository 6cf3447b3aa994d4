"""Times with an event column: XGBoost's accelerated failure times, in PAX and SecureBoost."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xgboost
from hypothesis import given
from hypothesis import strategies as draw
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.data.labels import check_events
from fedapp.errors import ConfigError, DataError, FedappError, PartyError
from fedapp.histograms.bins import Cuts
from fedapp.metrics import binning_errors, pooled, scores, statistics
from fedapp.metrics.survival import Cells, cell_scores
from fedapp.records.document import load
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.runs.predict import predict_table
from fedapp.settings import FIXED_ROUNDS, MOST_ROUNDS, load_settings
from fedapp.site.policy import check_event
from fedapp.site.settings import SiteConfig
from fedapp.trees.grow import ROUTE
from fedapp.trees.histogram_checks import HistogramChecks
from fedapp.trees.losses import DISTRIBUTIONS, PLAIN
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import exact_predictions, gradients, measures, row_bounds
from fedapp.trees.predict import predict_margins
from fedapp.trees.sets import NO_SETS
from fedapp.trees.survival import concordance
from fedapp.trees.xgboost import with_bounds
from strategies.scoring import History
from tests import network
from tests.federated import lines_of
from tests.random_tables import differences
from tests.strategies.test_pax_secure import assert_same_trees
from tests.tables import csv_columns, deal_columns, deal_rows, registry, trial, write_rows

AFT = "survival:aft"
SHARES = {"bank": ("id", "a", "b", "time", "died"), "clinic": ("id", "c", "d", "e", "f")}
SIZE = {"num_boost_round": 4, "max_depth": 4, "label": "time", "event": "died"}


def run_of(make, write, tmp_path, **more):
    """A run on one of the tables."""
    path = tmp_path / "times.csv"
    drop = {} if "weight" in more else {"drop_columns": "w"}
    how = {"data": str(path if path.exists() else write(path)), "objective": AFT, **drop}
    return make(**{**SIZE, **how, **more})


def model_of(run):
    path = run_local(run).path / "model.json"
    return load(path, Ensemble), path.read_bytes()


@pytest.mark.by_default("1.0-normal", "0.3-logistic", "0.3-extreme")
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_gradients_are_xgboosts_to_the_last_bit(distribution, scale):
    rng = np.random.default_rng(4)
    margins = np.concatenate([rng.normal(0, 3, 30), rng.normal(0, 60, 30)]).astype(np.float32)
    labels = (np.exp(rng.normal(0, 2, 60)) * rng.choice([-1, 1], 60)).astype(np.float32)
    how = {"aft_loss_distribution": distribution, "aft_loss_distribution_scale": scale}
    ones = np.ones(60, np.float32)
    ours = gradients(AFT, margins[:, None], labels, ones, replace(PLAIN, **how))
    parameters = {"objective": AFT, "nthread": 1, "lambda": 0, "min_child_weight": 0, **how}
    for row, (gradient, hessian) in enumerate(ours[:, 0]):
        one = slice(row, row + 1)
        rows = xgboost.DMatrix(np.zeros((1, 1)), base_margin=margins[one])
        booster = xgboost.train(parameters, with_bounds(rows, labels[one], AFT), 1)
        learner = json.loads(booster.save_raw("json"))["learner"]
        (tree,) = learner["gradient_booster"]["model"]["trees"]
        assert np.float32(tree["sum_hessian"][0]) == hessian
        assert np.float32(tree["base_weights"][0]) == np.float32(-np.float64(gradient) / hessian)


@pytest.mark.by_default("logistic-registry")
@pytest.mark.parametrize("write", [trial, registry])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_three_parties_grow_xgboosts_trees(settings, tmp_path, write, distribution):
    # Every value of a column has a bin at every party.
    more = {"pax__bins": "equal", "aft_loss_distribution": distribution, "max_bin": 256}
    run = run_of(settings, write, tmp_path, parties=3, drop_columns="w,marker,age", **more)
    if write is registry:
        run = run_of(settings, write, tmp_path, parties=3, **more)
    assert differences(run, run_local(run)) == []


@pytest.mark.slow
@pytest.mark.by_default("more0-trial")
@pytest.mark.parametrize("write", [trial, registry])
@pytest.mark.parametrize("more", [{}, {"weight": "w", "aft_loss_distribution_scale": 0.5}])
def test_under_masks_rows_give_the_trees_of_one_table(settings, tmp_path, write, more):
    secure = {"pax__aggregation": "secure", **more, "max_bin": 256}
    model, content = model_of(run_of(settings, write, tmp_path, parties=3, **secure))
    assert content == model_of(run_of(settings, write, tmp_path, parties=1, **secure))[1]
    plain = {**secure, "pax__aggregation": "plain"}
    assert_same_trees(model, model_of(run_of(settings, write, tmp_path, parties=1, **plain))[0])


@pytest.mark.by_default("more0-trial")
@pytest.mark.parametrize("write", [trial, registry])
@pytest.mark.parametrize("more", [{}, {"weight": "w", "aft_loss_distribution": "extreme"}])
def test_secureboost_grows_xgboosts_trees(vertical, tmp_path, write, more):
    run = run_of(vertical, write, tmp_path, parties=3, columns="even", max_bin=16, **more)
    folder = run_local(run)
    assert differences(run, folder) == []
    assert folder.summary["metrics"]["test"]["c-index"] > 0.5


def test_a_written_model_predicts_alike_in_xgboost(settings, tmp_path):
    run = run_of(settings, trial, tmp_path, parties=1, aft_loss_distribution_scale=0.3)
    folder = run_local(run)
    booster = xgboost.Booster(model_file=folder.path / "model.xgb.json")
    config = json.loads(booster.save_config())["learner"]["objective"]
    assert config["aft_loss_param"]["aft_loss_distribution_scale"] == "0.300000012"
    model = load(folder.path / "model.json", Ensemble)
    rows = np.random.default_rng(2).uniform(0, 80, (200, 4)).astype(np.float32)
    matrix = xgboost.DMatrix(rows, feature_names=list(model.columns))
    theirs = booster.predict(matrix, output_margin=True)
    np.testing.assert_array_equal(predict_margins(model, rows)[:, 0], theirs)
    times = exact_predictions(AFT, theirs.astype(np.float64))
    np.testing.assert_allclose(booster.predict(matrix), times, rtol=1e-6)


@pytest.mark.slow
def test_new_rows_are_scored_where_the_table_says_which_times_are_events(settings, tmp_path):
    run = run_of(settings, trial, tmp_path, parties=3)
    folder = run_local(run)
    new = trial(tmp_path / "new.csv", 200, seed=9)
    output = tmp_path / "predictions.csv"
    scored = predict_table(folder.path, str(new), "", output)
    assert 0.5 < scored.scores["c-index"] < 1
    without = write_rows(tmp_path / "without.csv", csv_columns(new, drop="died"))
    assert predict_table(folder.path, str(without), "", output).scores == {}


@pytest.mark.slow
def test_parties_score_new_rows_of_a_divided_model(vertical, tmp_path):
    run = run_of(vertical, registry, tmp_path, allow_export=False, num_boost_round=2)
    folder, output = run_local(run), tmp_path / "predictions.csv"
    words = ["predict", str(folder.path), "--data", run.data, "--output", str(output), "--json"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.exception
    rows = [np.array(values) for values in csv_columns(Path(run.data)).values()]
    times, died = (each.astype(np.float64) for each in rows[-2:])
    lines = np.loadtxt(output, delimiter=",", skiprows=1, quotechar=chr(34))
    predicted = lines[np.argsort(lines[:, 0]), 1]
    exact = concordance(np.where(died == 1, times, -times), predicted, np.ones(len(times)))
    (shown,) = re.findall(r'"c-index": ([0-9.]+)', done.stdout)
    assert float(shown) == pytest.approx(exact, abs=1e-6)
    assert 0.6 < exact < 0.9


# Scores

ROWS = draw.lists(
    draw.tuples(
        draw.integers(1, 9), draw.booleans(), draw.integers(-4, 4), draw.sampled_from([0, 0.5, 2])
    ),
    min_size=1,
    max_size=40,
)


def counted(labels, times, weights):
    """Harrell's C, pair by pair."""
    pairs = concordant = 0.0
    for first, label in enumerate(labels):
        for other, later in enumerate(labels):
            if label > 0 and (abs(later) > label or later == -label):
                weight = weights[first] * weights[other]
                pairs += weight
                concordant += weight * (np.sign(times[other] - times[first]) + 1) / 2
    return concordant / pairs if pairs else np.nan


@given(ROWS)
def test_concordance_counts_all_pairs(rows):
    times, events, margins, weights = map(np.array, zip(*rows, strict=True))
    labels = np.where(events, times, -times).astype(np.float64)
    arrays = labels, margins.astype(np.float64), weights.astype(np.float64)
    assert concordance(*arrays) == pytest.approx(counted(*arrays), nan_ok=True)


@given(draw.integers(0, 10**6), draw.sampled_from([2, 512, 4096]))
def test_concordance_of_cells_is_within_its_error(seed, n_bins):
    rng = np.random.default_rng(seed)
    times = np.exp(rng.normal(0, rng.uniform(0.1, 4), 80)).astype(np.float32)
    labels = times * rng.choice(np.float32([-1, 1]), 80)
    margins = (np.log(times) * rng.uniform(-1, 1) + rng.normal(0, 1, 80)).astype(np.float32)
    rows = margins[:, None], labels, np.ones(80, np.float32)
    extra = ("aft-nloglik@normal:1",)
    divided = Cells.of_rows(times[:50].astype(float), margins[20:].astype(float), n_bins)
    halves = [
        statistics(AFT, *(each[half] for each in rows), n_bins, extra=extra, cells=divided)
        for half in (slice(30), slice(30, None))
    ]
    total = halves[0] + halves[1]
    exact = pooled(AFT, *rows, extra)
    error = binning_errors(AFT, total)["c-index"]
    assert np.isnan(error) or abs(scores(AFT, total)["c-index"] - exact["c-index"]) <= error + 1e-9
    assert scores(AFT, total, extra)[extra[0]] == pytest.approx(exact[extra[0]])


def test_concordance_of_cells_counts_rows_of_later_ranges_and_half_of_ties():
    """An event, a censored row beside it, and two later rows of which one is predicted later."""
    cells = np.zeros((2, 3, 4))  # one point of time
    cells[:, 0, 0] = 1
    cells[0, 1, :2] = 1
    # The censored row may be before the event, and an event beside itself is counted as unknown.
    value, error = cell_scores(cells.reshape(2, -1))
    assert value == pytest.approx((1 + 1 / 2 + 1 / 4) / (2 + 1 / 2))
    assert error == pytest.approx(value - 1 / (2 + 1 + 1 / 2))


def test_pairs_of_one_time_are_an_event_and_a_censored_row():
    cells = np.zeros((2, 3, 4))
    cells[:, 1, :2] = [[0, 3], [2, 2]]  # three censored rows in the column above two events
    assert cell_scores(cells.reshape(2, -1)) == (pytest.approx(9 / 12), pytest.approx(3 / 12))


def test_the_loss_is_xgboosts(settings, tmp_path):
    rng = np.random.default_rng(3)
    labels = (np.exp(rng.normal(1, 1, 90)) * rng.choice([-1, 1], 90)).astype(np.float32)
    margins = rng.normal(1, 2, 90).astype(np.float32)
    weights = rng.uniform(0.1, 3, 90).astype(np.float32)
    for distribution in DISTRIBUTIONS:
        rows = xgboost.DMatrix(np.zeros((90, 1)), base_margin=margins, weight=weights)
        how = {"objective": AFT, "aft_loss_distribution": distribution, "gamma": 1e9, "eta": 0}
        matrix = with_bounds(rows, labels, AFT)
        results = {}
        xgboost.train(how, matrix, 1, evals=[(matrix, "all")], evals_result=results)
        name = f"aft-nloglik@{distribution}:1"
        ours = pooled(AFT, margins[:, None], labels, weights, (name,))[name]
        assert ours == pytest.approx(results["all"]["aft-nloglik"][-1], rel=1e-5)


# Refusals


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"objective": "reg:gamma"}, "event must be empty unless labels are times, .*reg:gamma"),
        ({"objective": "auto"}, "event must be empty unless labels are times, .* with auto"),
        ({"aft-loss-distribution": "cauchy"}, "must be one of 'normal', 'logistic' or 'extreme'"),
        ({"aft-loss-distribution-scale": 0}, "aft-loss-distribution-scale must be > 0"),
        ({"eval-metric": "aft-nloglik"}, "name the run's distribution and scale, as aft-nloglik@n"),
        ({"eval-metric": "rmse"}, "eval-metric must be one or several of aft-nloglik, c-index"),
        ({"label-epsilon": 1.0}, "label-epsilon must be 0 for survival:aft"),
    ],
)
def test_settings_that_do_not_fit_times_are_refused(more, rule):
    with pytest.raises(ConfigError, match=rule):
        load_settings({"label": "time", "event": "died", "objective": AFT, **more})


@pytest.mark.parametrize("strategy", ["bagging", "cyclic", "fedxgbllr", "federated-forest"])
def test_other_methods_refuse_times(settings, tmp_path, strategy):
    run = run_of(settings, trial, tmp_path, strategy=strategy)
    with pytest.raises(ConfigError, match=f"objective must be one of .* for {strategy}, got surv"):
        run_local(run)


def test_noise_is_refused(settings, tmp_path):
    how = {"pax__aggregation": "secure", "privacy__epsilon": 1.0}
    with pytest.raises(ConfigError, match=r"one without times, queries or quantiles with privacy"):
        run_local(run_of(settings, trial, tmp_path, parties=3, **how))


def test_no_site_adds_noise_to_gradients_of_times():
    for clip in (0.0, 5.0):
        with pytest.raises(
            ValueError, match="must be for labels that are no times or ranks, got surv"
        ):
            row_bounds(AFT, PLAIN, clip)


@pytest.mark.parametrize(
    ("gradient", "hessian", "fits"), [(15, 15, True), (-15, 1, True), (40, 15, False)]
)
def test_the_server_knows_how_large_sums_of_few_rows_may_be(gradient, hessian, fits):
    cuts = Cuts(np.float32([1, 2]), np.array([0, 2]), np.float32([0]))
    weights = np.array([1.0, 1.0, 2.0])
    checks = HistogramChecks(cuts, np.arange(2), weights, False, AFT, PLAIN)
    sums = np.array([[[gradient, hessian], [0.0, 1.0]]])
    request = SimpleNamespace(
        level=0,
        columns=np.array([0], np.int32),
        wanted_trees=np.int32([0]),
        wanted_nodes=np.int32([0]),
    )
    reply = SimpleNamespace(
        histograms=sums,
        missing=np.zeros((1, 1), np.int32),
        root_sums=sums.sum(axis=1),
        train_sums=np.array([2.0, 1.0]),
    )
    with nullcontext() if fits else pytest.raises(ValueError, match="that the weight of its rows"):
        checks.check(request, reply, np.empty(0, ROUTE), NO_SETS)


def test_a_site_whose_labels_are_times_refuses_another_objective():
    site = SiteConfig("bank", "a.csv", "time", event="died")
    check_event(site, AFT)
    for objective in ("auto", "reg:squarederror"):
        with pytest.raises(ConfigError, match=r"objective must be survival:aft or .* for bank"):
            check_event(site, objective)
    with pytest.raises(ConfigError, match="label-epsilon must be 0 in the node config of bank"):
        check_event(replace(site, label_epsilon=1.0), AFT)


TIMES = {"a": [1, 2, 3, 4] * 5, "time": [3.0, 2, 5, 1] * 5, "died": [1, 0, 1, 0] * 5}


@pytest.mark.parametrize(
    ("columns", "rule"),
    [
        ({"time": [3, -2, 5, 0] * 5}, "label column 'time' must be times > 0, got 10 of 20 rows"),
        ({"died": [1, 0, 2, 0] * 5}, r"event column 'died' must be 1 .* or 0 .*, got 5 of 20 rows"),
        ({"died": [1, 0, "", 0] * 5}, "event column 'died' must be 1 .* in every row, got 5"),
        (
            {"died": ["yes", "no", "dead", "no"] * 5},
            "event column must be numbers: 20 of 20",
        ),
        ({"time": ["long", "short", 5, 1] * 5}, "label column 'time' must be times with an event"),
        ({"died": [0] * 20}, "label must be the time of an event in some training row"),
    ],
)
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_times_and_events_are_checked(vertical, tmp_path, columns, rule, strategy):
    path = write_rows(tmp_path / "rows.csv", {**TIMES, "b": range(20), **columns})
    run = vertical(strategy=strategy, data=str(path), objective=AFT, columns="even", **SIZE)
    with pytest.raises(PartyError if "training row" not in rule else FedappError, match=rule):
        run_local(run)


def test_the_size_of_a_time_has_no_sign():
    assert measures(AFT, np.float32([-2, 3])).tolist() == [2, 3]
    assert measures("reg:squarederror", np.float32([-2, 3])).tolist() == [-2, 3]


def test_events_are_counted_in_training_rows():
    check_events(AFT, np.array([0.5]))
    check_events("reg:squarederror", np.array([0.0]))
    with pytest.raises(DataError, match="got only censored times"):
        check_events(AFT, np.array([0.0]))


def test_without_pairs_to_stop_by_a_run_warns_and_has_fewer_rounds(caplog):
    given = {"label": "time", "event": "died", "objective": AFT}
    run = load_settings({**given, "eval-metric": "c-index"})
    history = History.of(run)
    assert history.most_rounds(run) == MOST_ROUNDS
    history.add({"c-index": np.nan})
    assert history.most_rounds(run) == FIXED_ROUNDS
    assert "weight, and an event before another row's time" in caplog.text
    asked = History.of(load_settings({**given, "early-stopping-rounds": 5}))
    asked.metric = "c-index"
    with pytest.raises(ConfigError, match="must have a validation c-index to look at, got none"):
        asked.add({})


# Sites with node configs


@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_sites_with_an_event_column_train_the_model_of_a_simulation(
    vertical, sites, tmp_path, strategy
):
    whole, is_pax = registry(tmp_path / "whole.csv"), strategy == "pax"
    columns = {"id": range(600), **csv_columns(whole)}
    tables = deal_rows(columns, tmp_path) if is_pax else deal_columns(columns, tmp_path, SHARES)
    how = {"strategy": strategy, "objective": AFT, "parties": len(tables), "num_boost_round": 2}
    data = ",".join(f"{name}={path}" for name, path in tables.items())
    roles = {"label": "time", "event": "died", **({} if is_pax else {"id": "id"})}
    drop = {"drop_columns": "w"} if is_pax else {}
    simulated = run_local(vertical(data=data, **how, **roles, **drop))
    own = {key.replace("_", "-"): value for key, value in drop.items()}
    nodes = [{"name": name, "data": path, **roles, **own} for name, path in tables.items()]
    if not is_pax:
        nodes[1] = {key: nodes[1][key] for key in ("name", "data", "id")} | {"label": ""}
    for node in nodes:
        node |= {"allow-export": True, "draws-secret": "none"}
    deployed = run_local(vertical(**how), sites(*nodes))
    models = [(folder.path / "model.json").read_bytes() for folder in (simulated, deployed)]
    assert models[0] == models[1]


def test_a_site_whose_label_is_a_time_refuses_a_run_of_numbers(settings, sites, tmp_path):
    tables = deal_rows(csv_columns(registry(tmp_path / "whole.csv")), tmp_path)
    roles = {"label": "time", "event": "died"}
    nodes = [{"name": name, "data": path, **roles} for name, path in tables.items()]
    run = settings(objective="reg:squarederror", parties=3)
    with pytest.raises(PartyError, match=r"must be survival:aft or .* for (bank|clinic|shop)"):
        run_local(run, sites(*nodes))


def test_an_event_column_without_times_is_refused(vertical, tmp_path):
    columns = {"id": range(600), **csv_columns(registry(tmp_path / "whole.csv"))}
    tables = deal_columns(columns, tmp_path, SHARES)
    moved = csv_columns(tables["clinic"], drop="f")
    write_rows(tables["clinic"], {**moved, "died": csv_columns(tables["bank"], drop="id")["died"]})
    write_rows(tables["bank"], csv_columns(tables["bank"], drop="died"))
    data = ",".join(f"{name}={path}" for name, path in tables.items())
    run = vertical(data=data, objective=AFT, label="time", event="died", id="id")
    with pytest.raises(PartyError, match="event column 'died' must be in the table with the times"):
        run_local(run)


def test_cells_of_few_rows_are_merged():
    rng = np.random.default_rng(8)
    times = np.exp(rng.normal(0, 1, 300)).astype(np.float32)
    labels, margins = times * rng.choice(np.float32([-1, 1]), 300), np.log(times)[:, None]
    rows = margins, labels, np.ones(300, np.float32)
    sizes = statistics(AFT, *rows, 4096, fewest=7).histogram.sum(axis=0)
    assert sizes.sum() == 300
    assert sizes[sizes > 0].min() >= 7
    assert (sizes > 0).sum() > 20


@pytest.mark.by_default("secure")
@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_an_interrupted_run_scores_times_as_a_whole_one(settings, tmp_path, aggregation):
    """Where times and margins are divided is part of the run's state."""

    def made(name):
        (folder := tmp_path / name).mkdir()
        how = {"pax__aggregation": aggregation, "run_dir": str(folder), "num_boost_round": 3}
        return run_of(settings, registry, tmp_path, parties=3, valid_fraction=0.2, **how)

    whole = network.run(made("whole"))
    last = max(line["step"] for line in lines_of(whole.ledger))
    for step in (last, last - 2):
        network.die(run := made(f"dies-{step}"), dies_before_reading=step)
        folder = network.run(network.resumed(run), simulated_contexts(run))
        assert folder.summary["metrics"] == whole.summary["metrics"]
        assert folder.rounds.read_text().count("c-index") == 6


@pytest.mark.slow
def test_a_model_of_another_distribution_is_not_continued(settings, tmp_path):
    begun = run_local(run_of(settings, trial, tmp_path, parties=1, num_boost_round=2))
    path = str(begun.path / "model.xgb.json")
    more = {"parties": 1, "init_model": path, "num_boost_round": 3}
    model, _ = model_of(run_of(settings, trial, tmp_path, **more))
    assert_same_trees(
        model, model_of(run_of(settings, trial, tmp_path, parties=1, num_boost_round=5))[0]
    )
    other = run_of(settings, trial, tmp_path, **more, aft_loss_distribution="logistic")
    with pytest.raises(ConfigError, match="parameters of init-model must be the run's"):
        run_local(other)
