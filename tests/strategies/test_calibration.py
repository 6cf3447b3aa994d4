"""Calibrated probabilities, in PAX and SecureBoost, against scikit-learn's."""

import json
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
from fedapp.metrics.sums import margin_middles, statistics
from fedapp.records.document import from_text, to_text
from fedapp.report.summary import resolved_facts
from fedapp.runs.baselines import baseline_rows
from fedapp.runs.differences import model_margins
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.site.store import read_part
from fedapp.trees.calibration import Curve, _grouped, calibrated, fit
from fedapp.trees.divided import ActivePart
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import exact_predictions
from fedapp.trees.predict import predict_margins
from tests.federated import model_of, summary_of
from tests.network import die, resumed
from tests.network import run as run_over_network
from tests.serving import Client, rows_of
from tests.strategies.test_interactive import inference, written
from tests.tables import write_rows

BINARY = "binary:logistic"
N_BINS = 512  # of a round's histograms


def sigmoid(odds):
    return exact_predictions(BINARY, np.asarray(odds, np.float64))


@pytest.fixture
def made(made):
    """Settings of a run of PAX whose probabilities are too high, and whose parties' bins are those
    of the joined rows."""

    shared = made

    def make(**more):
        given = {"parties": 3, "max_bin": 64, "pax__bins": "equal", "valid_fraction": 0.4}
        return shared(
            **{"strategy": "pax", "scale_pos_weight": 4, "num_boost_round": 4, **given, **more}
        )

    return make


def curve_of(folder):
    curve = model_of(folder).curve
    assert curve is not None
    return curve


# Curves


def drawn_rows(n_rows=2000, seed=5):
    """Margins that are too high and too far apart, labels, and weights."""
    rng = np.random.default_rng(seed)
    odds = rng.normal(-1, 1.5, n_rows)
    labels = (rng.random(n_rows) < sigmoid(odds)).astype(float)
    return (odds * 1.7 + 2).astype(np.float32), labels, rng.choice([0.0, 1.0, 2.5], n_rows)


def curve_of_rows(calibration, margins, labels, weights):
    by_class = np.array([weights * (labels == 0), weights * (labels == 1)])
    curve = fit(calibration, margins.astype(float), by_class, weights.sum())
    assert curve is not None
    return curve


def curve_of_bins(calibration, margins, labels, weights):
    rows = [each.astype(np.float32) for each in (margins[:, None], labels, weights)]
    cells = statistics(BINARY, *rows, N_BINS, center=0.5).histogram
    curve = fit(calibration, 0.5 + margin_middles(N_BINS), cells, weights.sum())
    assert curve is not None
    return curve


def test_a_platt_curve_is_scikit_learns():
    rows = drawn_rows()
    curve = curve_of_rows("platt", *rows)
    theirs = _SigmoidCalibration().fit(rows[0].astype(float), rows[1], rows[2])
    # Theirs ends where a step of L-BFGS gains little.
    assert (curve.slope, curve.intercept) == pytest.approx((-theirs.a_, -theirs.b_), abs=1e-3)
    assert (curve.slope, curve.intercept) == pytest.approx((1 / 1.7, -2 / 1.7), abs=0.15)


def test_a_platt_curve_is_the_least_loss_of_targets_that_are_not_0_or_1():
    margins = np.array([-30.0, -1.0, 1.0, 40.0])  # which a line separates
    curve = fit("platt", margins, np.array([[2.0, 1, 0, 0], [0, 0, 2, 1]]), 6)
    assert curve is not None
    # A line meets both targets, 1/5 and 4/5, if it meets them in the mean.
    shares = sigmoid(curve.odds(margins))
    weights = np.array([2.0, 1, 2, 1])
    targets = weights * [0.2, 0.2, 0.8, 0.8]
    assert weights @ shares == pytest.approx(targets.sum())
    assert (weights * margins) @ shares == pytest.approx(targets @ margins)


@pytest.mark.parametrize("calibration", ["platt", "isotonic"])
def test_bins_give_nearly_the_curve_of_rows(calibration):
    # A bin's middle is off by at most 2.3 % of a row's distance from the centre. A step of an
    # isotonic curve moves by a bin, so single rows may be further off.
    rows = drawn_rows()
    curves = [of(calibration, *rows) for of in (curve_of_rows, curve_of_bins)]
    shares = [sigmoid(curve.odds(rows[0].astype(float))) for curve in curves]
    off = np.abs(shares[0] - shares[1])
    assert off.mean() < (0.0005 if calibration == "platt" else 0.01)
    assert calibration == "isotonic" or off.max() < 0.0005


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
def test_margins_that_fall_where_labels_rise_have_no_curve(calibration):
    margins = np.arange(6.0)
    falling = np.array([margins + 1, 6 - margins])
    assert fit(calibration, margins, falling, 42) is None
    assert fit(calibration, margins, falling[::-1], 42) is not None


@pytest.mark.parametrize("calibration", ["platt", "isotonic"])
@pytest.mark.parametrize("scale", [1e-6, 1e9])
def test_a_curve_does_not_depend_on_the_scale_of_weights(calibration, scale):
    margins, labels, weights = drawn_rows()
    by_class = np.array([weights * (labels == 0), weights * (labels == 1)])
    curves = [
        fit(calibration, margins.astype(float), by_class * factor, len(margins))
        for factor in (1.0, scale)
    ]
    odds = [curve.odds(margins.astype(float)) for curve in curves if curve is not None]
    np.testing.assert_allclose(odds[1], odds[0], rtol=1e-9)


@pytest.mark.parametrize("calibration", ["platt", "isotonic"])
@pytest.mark.parametrize("n_rows", [1, 100])
def test_rows_of_one_margin_have_no_curve(calibration, n_rows):
    shares = np.linspace(0.1, 0.9, n_rows)
    one = np.full(n_rows, 1.7)
    assert fit(calibration, one, np.array([7e4 * shares, 3e4 * (1 - shares)]), 10**5) is None


# The model


@pytest.mark.by_default("isotonic")
@pytest.mark.parametrize("calibration", ["platt", "isotonic"])
def test_three_parties_have_the_curve_of_the_joined_rows(made, calibration):
    texts = []
    for parties in (3, 1):
        folder = run_local(made(calibration=calibration, parties=parties))
        texts.append(to_text(curve_model(curve_of(folder), model_of(folder))))
        trained = model_of(folder)
    usual = model_of(run_local(made()))
    assert texts[0] == texts[1]
    assert [tree.tolist() for tree in trained.trees] == [tree.tolist() for tree in usual.trees]
    masked = run_local(made(calibration=calibration, pax__aggregation="secure"))
    np.testing.assert_allclose(
        *(sigmoid(curve_of(one).odds(np.linspace(-3, 3, 50))) for one in (masked, folder)),
        atol=1e-6,
    )


def curve_model(curve, model):
    """A model with nothing but the curve to differ."""
    return Ensemble(BINARY, np.array([0.5], np.float32), (), model.classes, (), curve=curve)


def test_scores_are_of_calibrated_probabilities_by_the_rows_of_the_best_round(made):
    run = made(calibration="platt", n_rows=1000, num_boost_round=60, eta=1, early_stopping_rounds=2)
    folder = run_local(run)
    model, summary = model_of(folder), folder.summary
    assert summary["best_round"] == len(model.trees) < len(folder.rounds.read_text().splitlines())
    rows = baseline_rows(run)[0]
    margins = {
        name: predict_margins(model, rows.values[getattr(rows.split, name)])
        for name in ("valid", "test")
    }
    labels = {name: rows.labels[getattr(rows.split, name)] for name in margins}
    of_rows = curve_of_rows(
        "platt", margins["valid"][:, 0], labels["valid"], np.ones(len(labels["valid"]))
    )
    curve = curve_of(folder)
    assert (curve.slope, curve.intercept) == pytest.approx(
        (of_rows.slope, of_rows.intercept), abs=0.01
    )
    np.testing.assert_array_equal(
        model_margins(folder.path, rows), calibrated(curve, margins["test"])
    )
    scores = summary["metrics"]["test"]
    after = sigmoid(calibrated(curve, margins["test"]))
    assert scores["logloss"] == pytest.approx(log_loss(labels["test"], after))
    before = log_loss(labels["test"], sigmoid(margins["test"]))
    assert scores["uncalibrated-logloss"] == pytest.approx(before)
    assert before > scores["logloss"]
    assert summary["calibration"] == {"method": "platt", "rows": len(labels["valid"])}
    text = resolved_facts(summary)["calibration"]
    assert text.startswith(f"platt, by {len(labels['valid'])} validation rows: test logloss ")
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
    model = model_of(folder)
    margins = predict_margins(model, saved.encode(run.data).to_numpy(np.float32))
    np.testing.assert_allclose(shares, sigmoid(calibrated(model.curve, margins))[:, 0], rtol=1e-5)
    assert np.unique(shares).size < np.unique(margins).size  # steps
    result = CliRunner().invoke(
        cli, ["predict", str(folder.path), "--data", run.data, "--output", "by-command.csv"]
    )
    assert result.exit_code == 0, result.output
    by_command = csv.read_csv("by-command.csv").column(1).to_numpy()
    np.testing.assert_array_equal(by_command.astype(np.float32), shares)
    status, answer = Client(folder.path).score({"rows": rows_of(Path(run.data))[:50]})
    assert status == 200
    served = [row["scores"]["probability_1"] for row in answer["rows"]]
    np.testing.assert_array_equal(np.array(served, np.float32), shares[:50])
    booster = saved.to_xgboost()
    stock = booster.inplace_predict(saved.encode(run.data).to_numpy(np.float32))
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
    run = made(calibration="platt", num_boost_round=2, early_stopping_rounds=1)
    folder = run_local(made(calibration="platt", num_boost_round=2, early_stopping_rounds=1))
    die(run, dies_before_sending=folder.summary["exchanges"] - 1)  # as the scores are asked for
    again = run_over_network(resumed(run), simulated_contexts(run))
    assert (again.path / "model.json").read_text() == (folder.path / "model.json").read_text()


# SecureBoost


def joined(vertical, data, **more):
    given = {"data": str(data), "label": "y", "valid_fraction": 0.4, "scale_pos_weight": 4}
    return vertical(**{**given, "num_boost_round": 3, "secureboost__key_bits": 256, **more})


@pytest.mark.by_default("platt")
@pytest.mark.parametrize("calibration", ["platt", "isotonic"])
def test_secureboosts_active_party_fits_the_curve_to_its_rows(
    vertical, settings, write_table, calibration
):
    run = joined(vertical, write_table(n_rows=300), calibration=calibration)
    folder = run_local(run)
    model, rows = model_of(folder), baseline_rows(run)[0]
    valid, test = rows.split.valid, rows.split.test
    margins = predict_margins(model, rows.values)
    assert to_text(curve_model(curve_of(folder), model)) == to_text(
        curve_model(
            curve_of_rows(calibration, margins[valid, 0], rows.labels[valid], np.ones(len(valid))),
            model,
        )
    )
    scores = folder.summary["metrics"]["test"]
    after = sigmoid(calibrated(model.curve, margins[test]))
    assert scores["logloss"] == pytest.approx(log_loss(rows.labels[test], after), rel=1e-6)
    before = log_loss(rows.labels[test], sigmoid(margins[test]))
    assert scores["uncalibrated-logloss"] == pytest.approx(before, rel=1e-6)
    shares = written(summary_of(run_local(inference(settings, run))))
    np.testing.assert_allclose(shares, sigmoid(calibrated(model.curve, margins)), rtol=1e-5)


def test_steps_of_a_curve_at_sites_are_of_enough_rows(settings, sites, tmp_path):
    rng, ids = np.random.default_rng(4), np.arange(400)
    margins = rng.normal(size=400)
    table = {"id": ids, "a": margins, "y": (margins + rng.normal(size=400) > 0).astype(int)}
    bank = {"name": "bank", "id": "id", "data": tmp_path / "bank.csv", "min-bin-rows": 40}
    write_rows(tmp_path / "bank.csv", table)
    shop = {"name": "shop", "id": "id", "data": tmp_path / "shop.csv", "label": ""}
    write_rows(tmp_path / "shop.csv", {"id": ids, "b": margins + rng.normal(size=400)})
    given = {"secureboost__key_bits": 512, "secureboost__insecure_small_key": True}
    given |= {"num_boost_round": 3, "calibration": "isotonic"}
    given |= {"parties": 2, "valid_fraction": 0.4, "objective": BINARY}
    made = settings(strategy="secureboost", **given)
    summary = summary_of(run_local(made, sites(bank, shop)))
    part = read_part(home() / "sites" / "bank" / summary["model_id"], ActivePart)
    assert isinstance(part.model, Ensemble)
    assert part.model.curve is not None
    assert 2 <= part.model.curve.n_points <= summary["matched_rows"]["valid"] // 40 < 5


def test_groups_of_rows_for_a_curve_have_enough_rows_and_keep_ties_together():
    rng = np.random.default_rng(0)
    for least in (2, 7, 100, 300):
        margins = rng.integers(-20, 20, 250) / 4
        weights = rng.integers(1, 4, 250).astype(float)
        hits = weights * rng.integers(0, 2, 250)
        means, of_groups, positives = _grouped(margins, weights, hits, least)
        assert (np.diff(means) > 0).all()
        assert (of_groups.sum(), positives.sum()) == (weights.sum(), hits.sum())
        ones = np.ones(250)
        assert _grouped(margins, ones, ones, least)[1].min() >= min(least, 250)


@pytest.mark.slow
def test_secureboost_in_flowers_simulation_has_the_same_curve(vertical, write_table, simulate):
    data = write_table(n_rows=300)
    folders = [one(joined(vertical, data, calibration="platt")) for one in (simulate, run_local)]
    texts = [(folder.path / "model.json").read_bytes() for folder in folders]
    assert texts[0] == texts[1]
    assert curve_of(folders[0]).slope > 0


# What is refused


REFUSED = [
    ({"objective": "reg:squarederror"}, "calibration must be none for reg:squarederror, got platt"),
    ({"objective": "multi:softprob"}, "it is for binary:logistic"),
    ({"valid_fraction": 0.0}, "valid-fraction must be > 0 with calibration, got 0.0"),
    ({"calibration": "beta"}, "calibration must be one of 'none', 'platt' or 'isotonic'"),
    (
        {"pax__aggregation": "secure", "privacy__epsilon": 1.0},
        "calibration must be none with privacy.epsilon: validation rows are scored once",
    ),
    (
        {"pax__aggregation": "secure", "min_parties": 2},
        "min-parties must be 0 with pax.aggregation=secure and calibration, got 2",
    ),
]


@pytest.mark.parametrize(("more", "rule"), REFUSED)
def test_settings_that_do_not_fit_are_refused_by_name(made, more, rule):
    with pytest.raises(ConfigError, match=rule):
        run_local(made(**{"calibration": "platt", "scale_pos_weight": 1, **more}))


@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_validation_rows_of_one_class_are_refused_before_the_first_tree(
    made, vertical, write_table, strategy
):
    split = Holdout(0.2, 0.4, 42).split(100)
    labels = np.arange(100) % 2
    labels[split.valid] = 1
    table = write_table(n_rows=100, y=labels)
    make = made if strategy == "pax" else vertical
    run = make(data=str(table), label="y", calibration="platt", valid_fraction=0.4, parties=2)
    with pytest.raises((ConfigError, PartyError), match="validation rows of weight > 0 are not of"):
        run_local(run)
    assert (Path(run.run_dir) / "rounds.jsonl").read_text() == ""


@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_a_model_that_orders_rows_the_other_way_stays_as_it_is(
    made, vertical, write_table, strategy
):
    split = Holdout(0.2, 0.4, 42).split(300)
    rng = np.random.default_rng(1)
    a = rng.normal(size=300)
    labels = (a > 0).astype(int)
    labels[split.valid] = 1 - labels[split.valid]
    data = {"data": str(write_table(n_rows=300, a=a, y=labels)), "label": "y", "parties": 2}
    make = made if strategy == "pax" else vertical
    folder = run_local(make(**data, valid_fraction=0.4, calibration="platt"))
    assert model_of(folder).curve is None
    assert "calibration" not in folder.summary
    assert any("calibration=platt is left out" in text for text in folder.summary["warnings"])
    document = json.loads((folder.path / "model.json").read_text())
    assert "curve" not in document


def test_the_active_party_refuses_a_curve_of_numbers(vertical, write_table, monkeypatch):
    monkeypatch.setattr("fedapp.settings.check_settings", lambda *_: None)  # as no server would
    more = {"scale_pos_weight": 1, "objective": "reg:squarederror"}
    with pytest.raises(PartyError, match="calibration must be none with reg:squarederror"):
        run_local(joined(vertical, write_table(), calibration="platt", **more))
