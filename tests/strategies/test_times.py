"""Times, some of which are censored: concordance, bounds, and risk sets over all parties' rows."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import xgboost
from hypothesis import given
from hypothesis import strategies as draw

from fedapp.errors import ConfigError, DivergedError, FedappError, PartyError
from fedapp.histograms.bins import Cuts
from fedapp.messages.pax import GrowRequest
from fedapp.metrics import scores, statistics
from fedapp.metrics.survival import cell_scores
from fedapp.runs.baselines import baseline_rows
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.settings import FIXED_ROUNDS, MOST_ROUNDS, load_settings
from fedapp.trees.categories import NO_SETS
from fedapp.trees.histogram_checks import HistogramChecks
from fedapp.trees.limits import DISTRIBUTIONS
from fedapp.trees.losses import PLAIN
from fedapp.trees.objective import gradients, measures
from fedapp.trees.structure import ROUTE
from fedapp.trees.survival import concordance, cox_pairs
from fedapp.trees.xgboost import with_bounds
from strategies.scoring import History
from tests import network
from tests.contract.objectives import AFT, CASES, COX, federation, is_breslows
from tests.federated import model_of
from tests.histograms.test_bounds import asks
from tests.reference import xgboost_trees
from tests.tables import csv_columns, trial, write_rows

# Accelerated failure times


@pytest.mark.by_default("1.0-normal", "0.3-logistic", "0.3-extreme")
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_gradients_are_xgboosts_to_the_last_bit(distribution, scale):
    rng = np.random.default_rng(4)
    margins = np.concatenate([rng.normal(0, 3, 30), rng.normal(0, 60, 30)]).astype(np.float32)
    labels = (np.exp(rng.normal(0, 2, 60)) * rng.choice([-1, 1], 60)).astype(np.float32)
    how = {"aft_loss_distribution": distribution, "aft_loss_distribution_scale": scale}
    ours = gradients(AFT, margins[:, None], labels, np.ones(60, np.float32), replace(PLAIN, **how))
    parameters = {"objective": AFT, "nthread": 1, "lambda": 0, "min_child_weight": 0, **how}
    for row, (gradient, hessian) in enumerate(ours[:, 0]):
        one = slice(row, row + 1)
        rows = xgboost.DMatrix(np.zeros((1, 1)), base_margin=margins[one])
        (tree,) = xgboost_trees(xgboost.train(parameters, with_bounds(rows, labels[one], AFT), 1))
        assert np.float32(tree["sum_hessian"][0]) == hessian
        assert np.float32(tree["base_weights"][0]) == np.float32(-np.float64(gradient) / hessian)


@pytest.mark.parametrize(
    ("gradient", "hessian", "fits"), [(15, 15, True), (-15, 1, True), (40, 15, False)]
)
def test_the_server_knows_how_large_sums_of_few_rows_may_be(gradient, hessian, fits):
    cuts = Cuts(np.float32([1, 2]), np.array([0, 2]), np.float32([0]))
    checks = HistogramChecks(cuts, np.arange(2), np.array([1.0, 1.0, 2.0]), False, AFT, PLAIN)
    sums = np.array([[[gradient, hessian], [0.0, 1.0]]])
    wanted = {"wanted_trees": np.int32([0]), "wanted_nodes": np.int32([0])}
    request = SimpleNamespace(level=0, columns=np.array([0], np.int32), **wanted)
    of_rows = {"root_sums": sums.sum(axis=1), "train_sums": np.array([2.0, 1.0])}
    reply = SimpleNamespace(histograms=sums, missing=np.zeros((1, 1), np.int32), **of_rows)
    with nullcontext() if fits else pytest.raises(ValueError, match="that the weight of its rows"):
        checks.check(request, reply, np.empty(0, ROUTE), NO_SETS)


def test_the_size_of_a_time_has_no_sign():
    assert measures(AFT, np.float32([-2, 3])).tolist() == [2, 3]
    assert measures("reg:squarederror", np.float32([-2, 3])).tolist() == [-2, 3]


def test_an_event_column_without_times_is_refused(vertical, tmp_path):
    _, simulated, nodes = federation(CASES["aft"], "secureboost", tmp_path)
    bank, shop = (csv_columns(node["data"]) for node in nodes)
    write_rows(nodes[1]["data"], {**shop, "died": bank.pop("died")})
    write_rows(nodes[0]["data"], bank)
    with pytest.raises(PartyError, match="event column 'died' must be in the table with the times"):
        run_local(vertical(objective=AFT, **simulated))


# Concordance

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


def test_concordance_of_cells_counts_rows_of_later_ranges_and_half_of_ties():
    """An event, a censored row beside it, and two later rows of which one is predicted later."""
    cells = np.zeros((2, 3, 4))  # one point of time
    cells[:, 0, 0] = 1
    cells[0, 1, :2] = 1
    # The censored row may be before the event, and an event beside itself is counted as unknown.
    value, error = cell_scores(cells.reshape(2, -1))
    assert value == pytest.approx((1 + 1 / 2 + 1 / 4) / (2 + 1 / 2))
    assert error == pytest.approx(value - 1 / (2 + 1 + 1 / 2))


def test_events_of_one_cell_may_be_in_either_order_and_one_event_is_no_pair():
    cells = np.zeros((2, 3, 4))
    cells[1, 0, 0] = 2
    assert cell_scores(cells.reshape(2, -1), squares=2.0) == (0.5, 0.5)
    assert np.isnan(cell_scores(cells.reshape(2, -1), squares=4.0)).all()


def test_pairs_of_one_time_are_an_event_and_a_censored_row():
    cells = np.zeros((2, 3, 4))
    cells[:, 1, :2] = [[0, 3], [2, 2]]  # three censored rows in the column above two events
    assert cell_scores(cells.reshape(2, -1)) == (pytest.approx(9 / 12), pytest.approx(3 / 12))


def test_cells_of_few_rows_are_merged():
    rng = np.random.default_rng(8)
    times = np.exp(rng.normal(0, 1, 300)).astype(np.float32)
    labels, margins = times * rng.choice(np.float32([-1, 1]), 300), np.log(times)[:, None]
    rows = margins, labels, np.ones(300, np.float32)
    sizes = statistics(AFT, *rows, 4096, fewest=7).histogram.sum(axis=0)
    assert sizes.sum() == 300
    assert sizes[sizes > 0].min() >= 7
    assert (sizes > 0).sum() > 20


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


@pytest.mark.by_default("secure")
@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_an_interrupted_run_scores_times_as_a_whole_one(settings, tmp_path, aggregation):
    """Where times and margins are divided is part of the run's state."""
    how = {"pax__aggregation": aggregation, "num_boost_round": 3, "valid_fraction": 0.2}
    made = partial(CASES["aft"].run, settings, tmp_path, parties=3, **how)
    whole = network.run(made())
    last = max(line["step"] for line in whole.ledger)
    for step in (last, last - 2):
        network.die(run := made(), dies_before_reading=step)
        folder = network.run(network.resumed(run), simulated_contexts(run))
        assert folder.summary["metrics"] == whole.summary["metrics"]
        assert folder.rounds_file.read_text().count("c-index") == 6


# Risk sets


def separated_rows(n_rows=600):
    """Times that follow almost exactly from a column, and values; every seventh row is censored."""
    values = np.random.default_rng(3).normal(size=(n_rows, 2)).astype(np.float32)
    times = np.exp(3 - 2 * values[:, 0])
    return np.where(np.arange(n_rows) % 7, times, -times).astype(np.float32), values


def test_hessians_are_never_negative_and_no_gradient_is_infinite():
    ones = np.ones(400, np.float32)
    for seed in range(30):  # XGBoost's at risk are rounding errors, or none, in the end
        rng = np.random.default_rng(seed)
        times, seen = rng.exponential(4, 400) + 0.01, rng.random(400) < 0.6
        margins = rng.normal(0, 6, 400).astype(np.float32)
        labels = np.where(seen, times, -times).astype(np.float32)
        try:
            assert (gradients(COX, margins[:, None], labels, ones)[..., 1] >= 0).all()
        except DivergedError:
            assert np.ptp(margins) > 16  # nothing of float64 is left of the latest


@pytest.mark.parametrize("factor", [5, 15])
def test_sums_at_risk_that_rounding_has_lost_are_summed_from_the_end(factor):
    """XGBoost's own have no digit left where the ratios at risk are far below the others."""
    labels, values = separated_rows()
    margins = (factor * values[:, :1]).astype(np.float32)
    gradient, hessian = (each[:, 0].astype(np.float64) for each in cox_pairs(margins, labels, None))
    order = np.argsort(np.abs(labels), kind="stable")
    ratios, is_event = np.exp(margins[order, 0].astype(np.float64)), labels[order] > 0
    at_risk = np.cumsum(ratios[::-1])[::-1]
    rates, squares = np.cumsum(is_event / at_risk), np.cumsum(is_event / at_risk**2)
    np.testing.assert_allclose(gradient[order], ratios * rates - is_event, rtol=1e-4, atol=1e-5)
    exact = ratios * rates - ratios**2 * squares
    np.testing.assert_allclose(hessian[order], exact, rtol=1e-3, atol=1e-5)


def test_pairs_are_compared_wherever_margins_lie():
    labels, values = separated_rows()
    for shift in (-6, 0, 6):
        rows = values[:, :1] + np.float32(shift), labels, np.ones(len(labels), np.float32)
        assert scores(COX, statistics(COX, *rows, 512))["c-index"] > 0.75


def test_times_are_merged_to_bins(settings, tmp_path):
    path = str(trial(tmp_path / "trial.csv"))
    run = CASES["cox"].run(settings, tmp_path, data=path, parties=1, max_bin=16)
    assert len(np.unique(np.abs(baseline_rows(run)[0].labels))) > 200
    is_breslows(run, run_local(run))


def test_a_round_goes_on_without_a_party_that_is_lost_at_its_sums(settings, tmp_path):
    how = {"parties": 4, "min_parties": 3, "num_boost_round": 2, "max_depth": 2, "max_bin": 16}
    run = CASES["cox"].run(settings, tmp_path, **how)
    folder = network.run(run, app=network.fails_from(6))  # the second round's sums of hazards
    assert [gone["step"] for gone in folder.summary["left_out"]] == [6]
    assert len(model_of(folder).trees) == 2


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda hazards: hazards[::-1], "hazards must be .* rising"),
        (lambda hazards: hazards[1:], "hazards must be .* one a bin"),
        (lambda hazards: -hazards, "hazards must be >= 0"),
    ],
)
def test_hazards_rise_by_bin(settings, tmp_path, monkeypatch, change, rule):
    asks(monkeypatch, GrowRequest, lambda sent: replace(sent, hazards=change(sent.hazards)))
    with pytest.raises(FedappError, match=rf"party-1\b.*GrowRequest\.{rule}"):
        run_local(CASES["cox"].run(settings, tmp_path, parties=1))


def test_parties_sum_hazards_of_no_other_objective(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("strategies.pax.has_risk_sets", lambda _: True)
    with pytest.raises(PartyError, match=r"RisksRequest\.class must not come with survival:aft"):
        run_local(CASES["aft"].run(settings, tmp_path, parties=1))
