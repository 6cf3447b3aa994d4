"""Objectives: XGBoost's intercepts, links, labels in their range; and linear models in numpy."""

import json
from dataclasses import replace

import numpy as np
import pytest
import xgboost

from fedapp.data.labels import check_mean, class_names
from fedapp.errors import ConfigError, DataError
from fedapp.records.document import from_text, to_text
from fedapp.runs.baselines import run_baselines
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.trees.custom import CUSTOM
from fedapp.trees.linear import (
    GradientDescent,
    LinearModel,
    descend,
    merge_moments,
    moments,
    predict_linear,
    standardised,
)
from fedapp.trees.losses import LOSSES, PLAIN, LossParameters
from fedapp.trees.objective import (
    base_margin,
    base_score,
    counted_equally,
    exact_predictions,
    gradients,
    is_regression,
    label_sums,
    margins_of,
    transform,
)
from fedapp.trees.xgboost import with_bounds
from tests.federated import summary_of
from tests.tables import claims

NAMED = [objective for objective in LOSSES if objective != CUSTOM]
NUMBERS = [one for one in NAMED if is_regression(one)]
NUMBERS = [
    one for one in NUMBERS if not (LOSSES[one].has_quantile_leaves or LOSSES[one].is_ranking)
]


def intercepts(given, matrix):
    """What XGBoost estimates."""
    config = json.loads(xgboost.train({**given, "nthread": 1}, matrix, 1).save_config())
    scores = json.loads(config["learner"]["learner_model_param"]["base_score"])
    return np.array(scores, dtype=np.float32)


def trees_of(given, matrix):
    model = json.loads(xgboost.train({**given, "nthread": 1}, matrix, 1).save_raw("json"))
    return model["learner"]["gradient_booster"]["model"]["trees"]


@pytest.mark.parametrize(
    ("objective", "scale"),
    [*((name, 1.0) for name in NUMBERS), ("binary:logistic", 1.0), ("binary:logistic", 4.0)],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_intercept_is_the_one_that_xgboost_estimates(objective, scale, weighted):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(400, 4))
    if objective == "binary:logistic":
        labels = (values[:, 0] > 0.4).astype(np.float32)
    else:
        known = "reg:gamma" if objective == "reg:squarederror" else objective
        labels = claims(known, values).astype(np.float32)
    weights = np.ones(400, np.float32)
    if weighted and not counted_equally(objective):
        weights = rng.uniform(0.5, 2, 400).astype(np.float32)
    matrix = with_bounds(xgboost.DMatrix(values, labels, weight=weights), labels, objective)
    given = {"objective": objective, **({} if scale == 1 else {"scale_pos_weight": scale})}
    sums = label_sums(objective, labels, weights, 2), float(weights.sum(dtype=np.float64))
    ours = base_score(objective, *sums, LossParameters(scale, 0.0, 1.5))
    assert ours == pytest.approx(intercepts(given, matrix), rel=1e-6)


def drawn_classes(rng, n_classes):
    """Labels of some of the classes, some of them rare, and weights of several kinds."""
    n_rows, n_there = int(rng.integers(n_classes, 2000)), int(rng.integers(1, n_classes + 1))
    shares = rng.dirichlet(np.full(n_there, rng.choice([0.05, 0.3, 1, 10])))
    labels = rng.choice(n_classes, n_there, replace=False)[rng.choice(n_there, n_rows, p=shares)]
    whole, real = rng.integers(1, 9, n_rows), rng.uniform(0.1, 5, n_rows)
    some = real * (rng.random(n_rows) < 0.7)
    some[0] = 1
    kinds = np.ones(n_rows), whole, real, some
    return labels.astype(np.float32), kinds[rng.integers(4)].astype(np.float32)


def test_the_intercept_of_classes_is_xgboosts_to_the_last_bit():
    rng = np.random.default_rng(0)
    for n_classes in [*range(2, 31)] * 4:
        labels, weights = drawn_classes(rng, n_classes)
        matrix = xgboost.DMatrix(np.zeros((len(labels), 1)), labels, weight=weights)
        theirs = intercepts({"objective": "multi:softprob", "num_class": n_classes}, matrix)
        sums = label_sums("multi:softprob", labels, weights, n_classes)
        ours = base_score("multi:softprob", sums, float(weights.sum(dtype=np.float64)))
        assert ours.tobytes() == theirs.tobytes()


def test_hessians_of_classes_are_xgboosts_to_the_last_bit_wherever_margins_lie():
    rng = np.random.default_rng(3)
    given = {"objective": "multi:softprob", "num_class": 5, "max_depth": 1}
    for size in (0.5, 2.0, 20.0):
        for margins in size * rng.normal(size=(20, 2, 1, 5)):
            for one in (margins[0], -np.abs(margins[1])):
                start = one.astype(np.float32)
                matrix = xgboost.DMatrix(np.zeros((1, 1)), np.ones(1), base_margin=start)
                theirs = [np.float32(tree["sum_hessian"][0]) for tree in trees_of(given, matrix)]
                ours = gradients("multi:softprob", start, *np.ones((2, 1), np.float32))
                assert ours[0, :, 1].tolist() == theirs


def test_weights_are_multiplied_by_that_of_positive_rows_before_gradients():
    weights, ones = np.full(100, 1 / 3, np.float32), np.ones(100, np.float32)
    margins = np.random.default_rng(5).normal(size=100).astype(np.float32)
    given = {"objective": "binary:logistic", "scale_pos_weight": 2.5, "max_depth": 1}
    parameters = replace(PLAIN, scale_pos_weight=2.5)
    ours = gradients("binary:logistic", margins[:, None], ones, weights, parameters)[:, 0, 1]
    for row, hessian in enumerate(ours):
        one = {"weight": weights[row : row + 1], "base_margin": margins[row : row + 1]}
        (tree,) = trees_of(given, xgboost.DMatrix(np.zeros((1, 1)), np.ones(1), **one))
        assert np.float32(tree["sum_hessian"][0]) == hessian


@pytest.mark.parametrize("objective", [name for name in NUMBERS if name != "binary:hinge"])
def test_margins_and_predictions_undo_each_other(objective):
    margins = np.linspace(-4, 4, 50)[:, None]
    predictions = exact_predictions(objective, margins)
    np.testing.assert_allclose(margins_of(objective, predictions), margins, rtol=1e-6, atol=1e-6)
    quick = transform(objective, margins.astype(np.float32))
    np.testing.assert_allclose(quick, predictions, rtol=1e-6)
    back = base_margin(objective, quick[:, 0])
    np.testing.assert_allclose(back, margins[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("objective", NAMED)
def test_margins_of_any_size_have_finite_gradients_and_predictions(objective):
    margins = np.array([[-1e30], [-200], [0], [200], [1e30]], np.float32)
    if objective == "multi:softprob":
        low = np.full((5, 1), -300, np.float32)
        margins = np.vstack((np.hstack((margins, -margins)), np.hstack((low, low))))
    labels, weights = np.full(len(margins), 1, np.float32), np.ones(len(margins), np.float32)
    assert np.isfinite(transform(objective, margins)).all()
    assert np.isfinite(exact_predictions(objective, margins.astype(np.float64))).all()
    if objective in ("binary:logistic", "reg:logistic", "multi:softprob"):
        assert np.isfinite(gradients(objective, margins, labels, weights, PLAIN)).all()


@pytest.mark.parametrize(
    ("objective", "labels", "rule"),
    [
        ("count:poisson", [0, 2, -1], "label must be >= 0 for count:poisson, got 1 of 3 .*, as -1"),
        ("reg:tweedie", [0, 2, -0.5], "must be >= 0 for reg:tweedie, got 1 of 3 .*, as -0.5"),
        ("reg:gamma", [1, 2, 0], "must be > 0 for reg:gamma, got 1 of 3 that are not, as 0"),
        ("reg:squaredlogerror", [0, -0.9, -1 + 1e-9], "must be > -1 for .*, got 1 of 3 .*999"),
        ("binary:hinge", [0, 1, 0.5], "must be 0 or 1 for binary:hinge, got 1 of 3 .*, as 0.5"),
        ("reg:logistic", [0, 1, 1.5], "must be 0 to 1 for reg:logistic, got 1 of 3 .*, as 1.5"),
        ("count:poisson", ["none", "2"], "label must be numbers for count:poisson"),
    ],
)
def test_labels_out_of_the_range_of_an_objective_are_refused(objective, labels, rule):
    with pytest.raises(DataError, match=rule) as refused:
        class_names(np.array(labels), objective)
    assert rule[-4:] not in refused.value.outside or "numbers" in rule


def test_a_mean_label_without_a_margin_is_refused():
    with pytest.raises(DataError, match=r"mean label .* between 0 and inf for count:poisson"):
        check_mean("count:poisson", np.zeros(1, np.float32))


TWO_CLASSES = {"objective": "binary:logistic"}


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"scale-pos-weight": 0.0}, "scale-pos-weight must be > 0"),
        ({"tweedie-variance-power": 2.0}, "tweedie-variance-power must be < 2"),
        ({"huber-slope": 0}, "huber-slope must be > 0.0, got 0"),
        (
            {"objective": "reg:pseudohubererror", "huber-slope": 2, "eval-metric": "rmse,mphe@1"},
            "eval-metric must name the run's huber-slope, as mphe@2, got mphe@1",
        ),
        ({"max-delta-step": "much"}, "max-delta-step must be a number or 'auto'"),
        ({"max-delta-step": -1.0}, "max-delta-step must be .*>= 0"),
        ({**TWO_CLASSES, "eval-metric": "auc,rmsle"}, "eval-metric must be .*, got rmsle"),
    ],
)
def test_settings_of_an_objective_are_checked(given, rule):
    with pytest.raises(ConfigError, match=rule):
        load_settings(given)


@pytest.mark.parametrize(
    ("given", "steps", "watched"),
    [
        ({}, 0, ""),
        ({"objective": "count:poisson"}, 0.7, "poisson-nloglik"),  # bounded unless it is said
        ({"objective": "count:poisson", "max-delta-step": 0}, 0, "poisson-nloglik"),
        ({"max-delta-step": "0.5"}, 0.5, ""),
        (TWO_CLASSES, 0, "auc"),
        ({"eval-metric": "logloss, aucpr"}, 0, "logloss"),
        ({"objective": "reg:pseudohubererror", "huber-slope": 0.5}, 0, "mphe@0.5"),
        ({"objective": "reg:tweedie", "tweedie-variance-power": 1.25}, 0, "tweedie-nloglik@1.25"),
    ],
)
def test_steps_and_the_metric_that_training_stops_by_follow_the_objective(given, steps, watched):
    settings = load_settings(given)
    assert settings.max_delta_step == steps
    assert settings.watched_metric == watched


@pytest.mark.by_default("fedxgbllr*")
@pytest.mark.parametrize(
    ("strategy", "objective", "metrics"),
    [("fedavg-linear", "reg:logistic", "logloss"), ("fedxgbllr", "reg:gamma", "mae,mape")],
)
def test_methods_without_trees_of_the_objective_learn_claims(made, strategy, objective, metrics):
    values = np.random.default_rng(3).integers(0, 12, (600, 4)).astype(np.float64)
    columns = {**dict(zip("abcd", values.T, strict=True)), "y": claims(objective, values)}
    own = {"fedxgbllr__trees": 8, "fedxgbllr__rounds": 2, "fedxgbllr__epochs": 8}
    given = {"eval_metric": metrics, "parties": 2, **(own if strategy == "fedxgbllr" else {})}
    run = made(strategy, objective, columns=columns, **given)
    found = summary_of(run_local(run))["metrics"]
    assert {*run.eval_metrics, run.watched_metric} <= found["test"].keys()
    assert found["train"]["r2"] > 0.02
    # Pooled XGBoost is scored by the same names.
    assert found["test"].keys() == run_baselines(run)["pooled"].keys()


def test_the_first_margin_is_xgboosts_to_the_last_bit():
    rows = xgboost.DMatrix(np.zeros((2, 1)), np.array([0, 1]))
    # The first is one whose logarithm the C library does not round correctly.
    for score in np.float32([0.503802955, *np.random.default_rng(1).uniform(0.01, 0.99, 30)]):
        given = {"objective": "binary:logistic", "base_score": float(score), "gamma": 1e9}
        booster = xgboost.train({**given, "eta": 0.0}, rows, 1)
        margins = booster.predict(rows, output_margin=True)
        assert (margins == base_margin("binary:logistic", score[None])).all()


# Linear models in numpy: moments, descent, the file


OBJECTIVES = ["binary:logistic", "multi:softprob", "reg:squarederror"]


def test_moments_of_parts_are_those_of_all_rows_by_weight():
    rng = np.random.default_rng(0)
    values = rng.normal(1e5, 0.1, (500, 3)).astype(np.float32)  # plain square sums lose this
    values[rng.random(values.shape) < 0.2] = np.nan
    weights = rng.integers(0, 4, 500).astype(np.float32)
    parts = [moments(values[rows], weights[rows]) for rows in np.split(np.arange(500), [7, 300])]
    found = merge_moments(parts)
    for column in range(3):
        there = ~np.isnan(values[:, column])
        often = np.repeat(values[there, column].astype(np.float64), weights[there].astype(int))
        assert found.means[column] == pytest.approx(often.mean(), rel=1e-14)
        assert found.scales[column] == pytest.approx(often.std(), rel=1e-6)


def test_columns_without_spread_or_values_stay_finite():
    values = np.array([[0.1, np.nan], [0.1, np.nan], [0.1, np.nan]], dtype=np.float32)
    found = moments(values, np.ones(3, np.float32))
    assert found.scales.tolist() == [1.0, 1.0]
    inputs = standardised(values, found.means, found.scales)
    np.testing.assert_allclose(inputs, 0, atol=1e-7)


# The descent


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_outlier_and_no_learning_rate_makes_it_diverge(objective):
    rng = np.random.default_rng(2)
    values = rng.normal(size=(600, 5)).astype(np.float32)
    values[3] = 1e6
    truth = rng.integers(0, 2, 600).astype(np.float32)
    ones = np.ones(600, np.float32)
    found = moments(values, ones)
    width = 2 if objective == "multi:softprob" else 1
    names, zeros = (tuple("abcde"), ("0", "1")), (np.zeros((5, width)), np.zeros(width))
    start = LinearModel(objective, *names, found.means, found.scales, *zeros)
    descent = GradientDescent(epochs=30, batch_size=32, learning_rate=1e6, decay=1.0, l2=0.0)
    trained = descend(start, (values, truth, ones), descent, rng)
    assert np.abs(predict_linear(trained, values[:3])).max() < 5


def test_a_weight_of_two_is_a_row_twice():
    rng = np.random.default_rng(3)
    values, start = rng.normal(size=(50, 2)).astype(np.float32), made_model()
    truth, weights = rng.integers(0, 2, 50).astype(np.float32), rng.integers(1, 3, 50)
    descent = GradientDescent(epochs=40, batch_size=1000, learning_rate=0.1, decay=1.0, l2=0.01)
    twice = np.repeat(np.arange(50), weights)
    ones = np.ones(len(twice), np.float32)
    weighted = values, truth, weights.astype(np.float32)
    found = [
        descend(start, rows, descent, np.random.default_rng(0)).weights
        for rows in (weighted, (values[twice], truth[twice], ones))
    ]
    np.testing.assert_allclose(*found, rtol=1e-5)
    nothing = values, truth, np.zeros(50, np.float32)
    assert descend(start, nothing, descent, rng) is start


# The model's file


def made_model():
    """Margin (a - 1) / 2 + (b - 3) / 4 + 1/2."""
    numbers = [1.0, 3.0], [2.0, 4.0], [[1.0], [1.0]], [0.5]
    arrays = (np.array(each) for each in numbers)
    return LinearModel("binary:logistic", ("a", "b"), ("no", "yes"), *arrays)


def test_a_missing_value_counts_as_the_mean():
    values = np.float32([[3, 7], [1, 3], [np.nan, 11]])
    np.testing.assert_array_equal(predict_linear(made_model(), values)[:, 0], [2.5, 0.5, 2.5])


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("objective", "rank:map", "objective must be one of .*, got 'rank:map'"),
        ("weights", [[1.0, 1.0]], r"weights must be of shape \(2, 1\), got \(1, 2\)"),
        ("means", [1.0], r"means must be of shape \(2,\), got \(1,\)"),
        ("bias", [float("nan")], r"bias must be finite, got \[nan\]"),
        ("scales", [1.0, 0.0], r"scales must be > 0, got \[1.0, 0.0\]"),
        ("scales", ["x", 1.0], r"scales must be finite, got \['x', 1.0\]"),
    ],
)
def test_a_broken_model_is_refused(field, value, rule):
    document = {**json.loads(to_text(made_model())), field: value}
    start = "^model must be JSON of fedapp's format 3, got another: "
    with pytest.raises(DataError, match=f"{start}{rule}$"):
        from_text(json.dumps(document), LinearModel)
