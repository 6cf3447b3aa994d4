"""Calibrated probabilities, in PAX and SecureBoost, against scikit-learn's."""

from pathlib import Path

import numpy as np
import pytest
from pyarrow import csv
from sklearn.calibration import _SigmoidCalibration
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import log_loss
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.data.partition import Holdout
from fedapp.errors import ConfigError, DataError, PartyError
from fedapp.home import home
from fedapp.records.document import from_text, to_text
from fedapp.report.summary import resolved_facts
from fedapp.runs.baselines import baseline_rows
from fedapp.runs.differences import model_margins
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.site.store import read_part
from fedapp.trees.calibration import Curve, calibrated, fit
from fedapp.trees.divided import ActivePart
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import exact_predictions
from fedapp.trees.predict import predict_margins
from tests.encrypted import SMALL_KEY, scored
from tests.federated import model_bytes, model_of
from tests.network import die, resumed
from tests.network import run as run_over_network
from tests.serving import Client, rows_of
from tests.tables import deal_columns

BINARY = "binary:logistic"


def sigmoid(odds):
    return exact_predictions(BINARY, np.asarray(odds, np.float64))


@pytest.fixture
def made(made):
    """Settings of a run of PAX whose probabilities are too high, and whose parties' bins are those
    of the joined rows."""
    given = {"parties": 3, "max_bin": 64, "pax__bins": "equal", "valid_fraction": 0.4}
    given |= {"scale_pos_weight": 4, "num_boost_round": 4}
    return lambda **more: made(**{**given, **more})


# Curves


def drawn_rows(n_rows=2000, seed=5):
    """Margins that are too high and too far apart, labels, and weights."""
    rng = np.random.default_rng(seed)
    odds = rng.normal(-1, 1.5, n_rows)
    labels = (rng.random(n_rows) < sigmoid(odds)).astype(float)
    return (odds * 1.7 + 2).astype(np.float32), labels, rng.choice([0.0, 1.0, 2.5], n_rows)


def curve_of_rows(calibration, margins, labels, weights, scale=1.0):
    by_class = np.array([weights * (labels == 0), weights * (labels == 1)])
    return fit(calibration, margins.astype(float), scale * by_class, weights.sum())


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e9])  # of weights, which says nothing
def test_a_platt_curve_is_scikit_learns(scale):
    rows = drawn_rows()
    curve = curve_of_rows("platt", *rows, scale)
    theirs = _SigmoidCalibration().fit(rows[0].astype(float), rows[1], rows[2])
    # Theirs ends where a step of L-BFGS gains little.
    assert (curve.slope, curve.intercept) == pytest.approx((-theirs.a_, -theirs.b_), abs=1e-3)
    assert (curve.slope, curve.intercept) == pytest.approx((1 / 1.7, -2 / 1.7), abs=0.15)


def test_a_platt_curve_is_the_least_loss_of_targets_that_are_not_0_or_1():
    margins = np.array([-30.0, -1.0, 1.0, 40.0])  # which a line separates
    curve = fit("platt", margins, np.array([[2.0, 1, 0, 0], [0, 0, 2, 1]]), 6)
    # A line meets both targets, 1/5 and 4/5, if it meets them in the mean.
    shares = sigmoid(curve.odds(margins))
    weights = np.array([2.0, 1, 2, 1])
    targets = weights * [0.2, 0.2, 0.8, 0.8]
    assert weights @ shares == pytest.approx(targets.sum())
    assert (weights * margins) @ shares == pytest.approx(targets @ margins)


def test_an_isotonic_curve_is_scikit_learns_and_reaches_neither_0_nor_1():
    margins, labels, weights = drawn_rows(300)
    curve = curve_of_rows("isotonic", margins, labels, weights)
    used = weights > 0
    rows = margins[used].astype(float), labels[used], weights[used]
    ends = 1 / (rows[2] @ (1 - rows[1]) + 2), 1 - 1 / (rows[2] @ rows[1] + 2)
    theirs = IsotonicRegression(out_of_bounds="clip").fit(*rows)
    np.testing.assert_array_equal(
        curve.probabilities, np.clip(theirs.predict(curve.margins), *ends)
    )
    clipped = IsotonicRegression(y_min=ends[0], y_max=ends[1], out_of_bounds="clip").fit(*rows)
    points = np.linspace(-9, 12, 5000)
    np.testing.assert_allclose(sigmoid(curve.odds(points)), clipped.predict(points), atol=1e-12)
    assert (curve.probabilities[0], curve.probabilities[-1]) == pytest.approx(ends)


@pytest.mark.parametrize("calibration", ["platt", "isotonic"])
def test_margins_that_fall_where_labels_rise_or_are_all_one_have_no_curve(calibration):
    margins = np.arange(6.0)
    falling = np.array([margins + 1, 6 - margins])
    assert fit(calibration, margins, falling, 42) is None
    assert fit(calibration, margins, falling[::-1], 42) is not None
    for n_rows in (1, 100):
        shares = np.linspace(0.1, 0.9, n_rows)
        by_class = np.array([7e4 * shares, 3e4 * (1 - shares)])
        assert fit(calibration, np.full(n_rows, 1.7), by_class, 10**5) is None


# The model


def test_three_parties_have_the_curve_of_the_joined_rows(made):
    texts = []
    for parties in (3, 1):
        folder = run_local(made(calibration="isotonic", parties=parties))
        trained = model_of(folder)
        texts.append(to_text(curve_model(trained.curve, trained)))
    usual = model_of(run_local(made()))
    assert texts[0] == texts[1]
    assert [tree.tolist() for tree in trained.trees] == [tree.tolist() for tree in usual.trees]
    masked = run_local(made(calibration="isotonic", pax__aggregation="secure"))
    points = np.linspace(-3, 3, 50)
    odds = [model_of(one).curve.odds(points) for one in (masked, folder)]
    np.testing.assert_allclose(*map(sigmoid, odds), atol=1e-6)


def curve_model(curve, model):
    """A model with nothing but the curve to differ."""
    return Ensemble(BINARY, np.array([0.5], np.float32), (), model.classes, (), curve=curve)


@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_scores_are_of_calibrated_probabilities_by_the_rows_of_the_best_round(
    made, settings, strategy
):
    more = {"parties": 2, "secureboost__key_bits": 256, "align": "ordered"}
    if strategy == "pax":
        more = {"n_rows": 1000, "num_boost_round": 60, "eta": 1, "early_stopping_rounds": 2}
    run = made(strategy=strategy, calibration="platt", **more)
    folder = run_local(run)
    model, summary, rows = model_of(folder), folder.summary, baseline_rows(run)[0]
    n_rounds = len(folder.rounds_file.read_text().splitlines())
    assert len(model.trees) == (summary["best_round"] or n_rounds)
    assert strategy != "pax" or len(model.trees) < n_rounds
    valid, test, margins = rows.split.valid, rows.split.test, predict_margins(model, rows.values)
    ones = np.ones(len(valid))
    due = curve_of_rows("platt", margins[valid, 0], rows.labels[valid], ones)
    if strategy == "pax":  # of bins
        expected = pytest.approx((due.slope, due.intercept), abs=0.01)
        assert (model.curve.slope, model.curve.intercept) == expected
    else:
        assert to_text(curve_model(model.curve, model)) == to_text(curve_model(due, model))
        shares = sigmoid(calibrated(model.curve, margins))
        np.testing.assert_allclose(scored(settings, run), shares, rtol=1e-5, atol=1e-6)
    after = calibrated(model.curve, margins[test])
    np.testing.assert_array_equal(model_margins(folder.path, rows), after)
    scores = summary["metrics"]["test"]
    assert scores["logloss"] == pytest.approx(log_loss(rows.labels[test], sigmoid(after)), rel=1e-6)
    before = log_loss(rows.labels[test], sigmoid(margins[test]))
    assert scores["uncalibrated-logloss"] == pytest.approx(before, rel=1e-6)
    assert before > scores["logloss"]
    assert summary["calibration"] == {"method": "platt", "rows": len(valid)}
    text = resolved_facts(summary)["calibration"]
    assert text.startswith(f"platt, by {len(valid)} validation rows: test logloss ")
    assert f"{scores['logloss']:.4f}, without it {before:.4f}; exports and SHAP" in text


def test_everything_that_predicts_is_calibrated_and_contributions_are_not(
    made, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    run = made(calibration="isotonic")
    folder = run_local(run)
    assert folder.summary["warnings"][-1].startswith(
        "calibration=isotonic has only 128 validation rows, and follows chance below 1,000"
    )
    saved = fedapp.load(folder.path)
    shares = saved.predict_proba(run.data)[:, 1]
    model, values = model_of(folder), saved.encode(run.data).to_numpy(np.float32)
    margins = predict_margins(model, values)
    np.testing.assert_allclose(shares, sigmoid(calibrated(model.curve, margins))[:, 0], rtol=1e-5)
    assert np.unique(shares).size < np.unique(margins).size  # steps
    words = ["predict", str(folder.path), "--data", run.data, "--output", "by-command.csv"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    by_command = csv.read_csv("by-command.csv").column(1).to_numpy()
    np.testing.assert_array_equal(by_command.astype(np.float32), shares)
    status, answer = Client(folder.path).score({"rows": rows_of(Path(run.data))[:50]})
    assert status == 200
    served = [row["scores"]["probability_1"] for row in answer["rows"]]
    np.testing.assert_array_equal(np.array(served, np.float32), shares[:50])
    stock = saved.to_xgboost().inplace_predict(values)
    np.testing.assert_allclose(stock, sigmoid(margins)[:, 0], rtol=1e-5)
    sums = saved.explain(run.data)
    np.testing.assert_allclose(np.asarray(sums).sum(axis=1), margins[:, 0], atol=1e-4)
    result = CliRunner().invoke(cli, ["export", str(folder.path), "--to", "xgboost"])
    assert result.output.strip().endswith("model.xgb.json: without the calibration")


def test_a_curve_is_of_all_trees_and_two_classes():
    curve = Curve(1.0, 0.0, np.array([0.0, 1.0]), np.array([0.2, 0.9]))
    model = curve_model(curve, Ensemble(BINARY, np.array([0.5], np.float32), (), ("a", "b"), ()))
    text = to_text(model)
    assert from_text(text, Ensemble).predictions_of(np.array([[0.5]]))[0, 0] == pytest.approx(0.55)
    for change, rule in {
        ("[0.2,0.9]", "[0.9,0.2]"): "points of curve must rise",
        ("[0.0,1.0]", "[1.0,1.0]"): "points of curve must rise",
        ("[0.2,0.9]", "[0.2,1.0]"): "curve.probabilities must be < 1",
        ('"slope":1.0', '"slope":-1.0'): "curve.slope must be > 0",
        (f'{BINARY}"', 'reg:logistic"'): "must be",
    }.items():
        with pytest.raises(DataError, match=rule):
            from_text(text.replace(*change), Ensemble)


def test_a_run_that_dies_resumes_to_the_same_curve(made):
    run, whole = (made(calibration="platt", num_boost_round=2) for _ in range(2))
    folder = run_local(whole)
    die(run, dies_before_sending=folder.summary["exchanges"] - 1)  # as the scores are asked for
    again = run_over_network(resumed(run), simulated_contexts(run))
    assert model_bytes(again) == model_bytes(folder)


def test_steps_of_a_curve_at_sites_are_of_enough_rows(settings, sites, tmp_path):
    rng, ids = np.random.default_rng(4), np.arange(400)
    margins = rng.normal(size=400)
    table = {"id": ids, "a": margins, "y": (margins + rng.normal(size=400) > 0).astype(int)}
    table["b"] = margins + rng.normal(size=400)
    tables = deal_columns(table, tmp_path, {"bank": ("id", "a", "y"), "shop": ("id", "b")})
    bank = {"name": "bank", "id": "id", "data": tables["bank"], "min-bin-rows": 40}
    shop = {"name": "shop", "id": "id", "data": tables["shop"], "label": ""}
    given = {"num_boost_round": 3, "calibration": "isotonic", "valid_fraction": 0.4, **SMALL_KEY}
    run = settings(strategy="secureboost", parties=2, objective=BINARY, **given)
    summary = run_local(run, sites(bank, shop)).summary
    part = read_part(home() / "sites" / "bank" / summary["model_id"], ActivePart)
    assert 2 <= part.model.curve.n_points <= summary["matched_rows"]["valid"] // 40 < 5


# What is refused

MASKED = {"pax__aggregation": "secure"}
VERTICAL = {"strategy": "secureboost", "parties": 2, "align": "ordered"}
REFUSED = [
    ({"objective": "reg:squarederror"}, "calibration must be none for reg:squarederror, got platt"),
    ({"objective": "multi:softprob"}, "it is for binary:logistic"),
    ({"valid_fraction": 0.0}, "valid-fraction must be > 0 with calibration, got 0.0"),
    ({"calibration": "beta"}, "calibration must be one of 'none', 'platt' or 'isotonic'"),
    ({**MASKED, "privacy__epsilon": 1.0}, "none with privacy.epsilon: validation rows are scored"),
    ({**MASKED, "min_parties": 2}, "min-parties must be 0 with pax.aggregation=secure and calibr"),
]


@pytest.mark.parametrize(("more", "rule"), REFUSED)
def test_settings_that_do_not_fit_are_refused_by_name(made, more, rule):
    with pytest.raises(ConfigError, match=rule):
        run_local(made(**{"calibration": "platt", "scale_pos_weight": 1, **more}))


def test_the_active_party_refuses_a_curve_of_numbers(made, monkeypatch):
    monkeypatch.setattr("fedapp.settings.check_settings", lambda *_: None)  # as no server would
    numbers = {"scale_pos_weight": 1, "objective": "reg:squarederror", "calibration": "platt"}
    with pytest.raises(PartyError, match="calibration must be none with reg:squarederror"):
        run_local(made(**VERTICAL, **numbers))


@pytest.mark.parametrize("change", ["one class", "the other way"])
@pytest.mark.parametrize("how", [{}, VERTICAL], ids=["pax", "secureboost"])
def test_validation_rows_without_a_curve_are_refused_or_leave_the_model_as_it_is(made, how, change):
    values = np.random.default_rng(1).normal(size=(2, 300))
    labels, valid = (values[0] > 0).astype(int), Holdout(0.2, 0.4, 42).split(300).valid
    labels[valid] = 1 if change == "one class" else 1 - labels[valid]
    columns = {"a": values[0], "b": values[1], "y": labels}
    run = made(columns=columns, calibration="platt", **{"parties": 2, **how})
    if change == "one class":
        with pytest.raises((ConfigError, PartyError), match="validation rows of weight > 0 are"):
            run_local(run)
        assert (Path(run.run_dir) / "rounds.jsonl").read_text() == ""  # before the first tree
        return
    folder = run_local(run)
    assert b"curve" not in model_bytes(folder)
    assert "calibration" not in folder.summary
    assert any("calibration=platt is left out" in text for text in folder.summary["warnings"])
