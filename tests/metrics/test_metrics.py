"""Scores, curves and intervals: sums of parties against rows and scikit-learn."""

import math
from functools import reduce
from importlib import import_module
from itertools import pairwise
from operator import add
from statistics import NormalDist

import numpy as np
import pytest
import xgboost
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from fedapp import metrics
from fedapp.data.partition import Holdout
from fedapp.histograms.fixed_point import Bounds
from fedapp.metrics.adders import WholeNumbers
from fedapp.metrics.intervals import paired, row_intervals, wilson
from fedapp.metrics.names import UNCALIBRATED, default_metric
from fedapp.metrics.scores import best_margin
from fedapp.metrics.sums import _margin_bins, margin_edges
from fedapp.runs.local import run_local

BINARY, MULTI, REGRESSION = "binary:logistic", "multi:softprob", "reg:squarederror"
OBJECTIVES = (BINARY, MULTI, REGRESSION)
N_BINS = 64

seeds = st.integers(0, 2**32 - 1)
n_rows_drawn = st.integers(2, 300)


def rows(objective, n_rows, seed):
    """Random margins, labels that follow them a little, and weights of which some are 0."""
    rng = np.random.default_rng(seed)
    n_outputs = 4 if objective == MULTI else 1
    # Rounded, so that ties occur.
    margins = np.round(rng.normal(0, 3, (n_rows, n_outputs)), 1).astype(np.float32)
    noisy = margins + rng.normal(0, 3, margins.shape)
    labels = {
        BINARY: lambda: noisy[:, 0] > 0,
        MULTI: lambda: noisy.argmax(axis=1),
        REGRESSION: lambda: noisy[:, 0],
    }[objective]()
    weights = rng.choice([0.0, 0.5, 1.0, 2.5], n_rows)
    weights[0] = 1.0
    return margins, labels.astype(np.float32), weights.astype(np.float32)


def parts(arrays, n_parties):
    """The rows of each of n_parties parties."""
    return [tuple(a[i::n_parties] for a in arrays) for i in range(n_parties)]


@settings(max_examples=30, deadline=None)
@given(n_bins=st.integers(2, 1000), margins=st.lists(st.floats(-1e38, 1e38), max_size=50))
def test_a_margin_is_in_the_bin_whose_edges_enclose_it(n_bins, margins):
    edges = margin_edges(n_bins)
    ends = np.nextafter(edges, -np.inf), edges, np.nextafter(edges, np.inf)
    distances = np.concatenate((np.array(margins), [-np.inf, np.inf, np.nan], *ends))
    expected = np.searchsorted(edges, distances, side="right")
    np.testing.assert_array_equal(_margin_bins(distances, n_bins), expected)


@pytest.mark.parametrize("objective", [BINARY, MULTI])
@settings(max_examples=60, deadline=None)
@given(n_rows=n_rows_drawn, seed=seeds, half_bins=st.integers(1, 300))
def test_scores_of_histograms_lie_within_their_bounds(objective, n_rows, seed, half_bins):
    arrays = rows(objective, n_rows, seed)
    extra = ("aucpr",) if objective == BINARY else ()
    exact = metrics.pooled(objective, *arrays, extra)
    sums = metrics.statistics(objective, *arrays, 2 * half_bins, extra=extra)
    got = metrics.scores(objective, sums, extra)
    bounds = metrics.binning_errors(objective, sums, extra)
    assert set(bounds) == ({"auc", "ks", "pr_auc", *extra} if objective == BINARY else {"auc_ovr"})
    for name, bound in bounds.items():
        if np.isnan(exact[name]):
            assert np.isnan([got[name], bound]).all()
        else:
            assert abs(got[name] - exact[name]) <= bound + 1e-9, name
    if objective == BINARY and not np.isnan(exact["ks"]):
        assert got["ks"] <= exact["ks"] + 1e-12


@pytest.mark.by_default("multi:softprob")
@pytest.mark.parametrize("objective", OBJECTIVES)
@given(n_rows_drawn, seeds, st.integers(1, 40))
def test_no_bin_has_fewer_rows_than_it_must(objective, n_rows, seed, fewest):
    margins, labels, weights = rows(objective, n_rows, seed)
    counted = (weights > 0).astype(np.float32)
    found = metrics.statistics(objective, margins, labels, counted, N_BINS, fewest=fewest)
    whole = metrics.statistics(objective, margins, labels, counted, N_BINS)
    assert np.array_equal(found.sums, whole.sums)
    n_classes = len(found.histogram) // 2 or 1
    for cells, before in zip(
        np.split(found.histogram, n_classes), np.split(whole.histogram, n_classes), strict=True
    ):
        assert np.array_equal(cells.sum(axis=1), before.sum(axis=1))
        held = cells.sum(axis=0)
        assert (held[held > 0] >= min(fewest, counted.sum())).all()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("fewest", [0, 9])
def test_rows_in_parts_have_the_sums_of_all_rows(objective, fewest, monkeypatch):
    arrays, bounds = rows(objective, 300, 4), Bounds(300, 2, 4)
    extra = {BINARY: ("error@0.4", UNCALIBRATED), REGRESSION: ("mae",)}.get(objective, ())
    before = arrays[0] / 2 if objective == BINARY else None

    def found():
        adder = WholeNumbers(bounds)
        more = {"fewest": fewest, "extra": extra, "adder": adder, "before": before}
        sums = metrics.statistics(objective, *arrays, N_BINS, **more)
        return sums.sums.tolist(), sums.histogram.tolist(), adder.exponents

    expected = found()
    monkeypatch.setattr("fedapp.metrics.sums.PART_ROWS", 70)
    assert found() == expected


def test_many_bins_have_small_bounds_and_the_exact_auc():
    arrays = rows(BINARY, 2000, 1)
    binary = metrics.statistics(BINARY, *arrays, 2**12)
    multi = metrics.statistics(MULTI, *rows(MULTI, 2000, 1), 2**12)
    # Margins of two classes are rounded to 0.1 here: what is left of their bound is ties.
    assert metrics.binning_errors(MULTI, multi)["auc_ovr"] < 2e-3
    assert metrics.binning_errors(BINARY, binary)["auc"] < 1e-2
    got = metrics.scores(BINARY, metrics.statistics(BINARY, *arrays, 100_000))["auc"]
    assert got == pytest.approx(metrics.pooled(BINARY, *arrays)["auc"], abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_pooled_binary_scores_are_those_of_scikit_learn(seed):
    margins, labels, weights = rows(BINARY, 200, seed)
    got = metrics.pooled(BINARY, margins, labels, weights)
    p = 1 / (1 + np.exp(-margins[:, 0].astype(np.float64)))
    guesses = p > 0.5
    assert got["auc"] == pytest.approx(sk.roc_auc_score(labels, p, sample_weight=weights))
    assert got["logloss"] == pytest.approx(sk.log_loss(labels, p, sample_weight=weights))
    for name in ("accuracy", "f1", "precision", "recall"):
        score = getattr(sk, f"{name}_score")(labels, guesses, sample_weight=weights)
        assert got[name] == pytest.approx(score), name
    fpr, tpr, _ = sk.roc_curve(labels, margins[:, 0], sample_weight=weights)
    assert got["ks"] == pytest.approx(np.abs(tpr - fpr).max())
    exact = sk.average_precision_score(labels, margins[:, 0], sample_weight=weights)
    assert got["pr_auc"] == pytest.approx(exact)


def odds_against(margins, class_id):
    """How much more probable the others are, whatever their order: equal odds are equal numbers."""
    others = np.delete(margins - margins[:, [class_id]], class_id, axis=1)
    return np.array([math.fsum(row) for row in np.exp(others)])


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
@example(seed=437)  # rows of equal odds, whose probabilities a sum in another order tells apart
def test_pooled_scores_of_classes_are_those_of_scikit_learn(seed):
    margins, labels, weights = rows(MULTI, 300, seed)
    margins = np.round(margins * 8) / 8  # differences are exact, so that ties are
    labels[:4], weights[:4] = range(4), 1.0
    got = metrics.pooled(MULTI, margins, labels, weights)
    guesses, given = margins.argmax(axis=1), {"sample_weight": weights}
    areas = [
        sk.roc_auc_score(labels == one, -odds_against(margins.astype(np.float64), one), **given)
        for one in range(4)
    ]
    assert got["auc_ovr"] == pytest.approx(np.mean(areas), abs=1e-9)
    balanced = sk.balanced_accuracy_score(labels, guesses, **given)
    assert got["balanced_accuracy"] == pytest.approx(balanced)
    assert got["macro_f1"] == pytest.approx(sk.f1_score(labels, guesses, average="macro", **given))


def test_a_class_without_rows_counts_in_no_mean():
    margins, labels, weights = rows(MULTI, 200, 4)
    labels[labels == 2] = 1
    sums = metrics.statistics(MULTI, margins, labels, weights, 2**20)
    for got in (metrics.scores(MULTI, sums), metrics.pooled(MULTI, margins, labels, weights)):
        guesses, used = margins.argmax(axis=1), np.array([0, 1, 3])
        recall = sk.recall_score(
            labels, guesses, labels=used, average="macro", sample_weight=weights
        )
        assert got["balanced_accuracy"] == pytest.approx(recall)
        assert 0.5 < got["auc_ovr"] < 1


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_pooled_regression_scores_are_those_of_scikit_learn(seed):
    margins, labels, weights = rows(REGRESSION, 200, seed)
    got = metrics.pooled(REGRESSION, margins, labels, weights)
    squares = sk.mean_squared_error(labels, margins[:, 0], sample_weight=weights)
    assert got["rmse"] == pytest.approx(np.sqrt(squares), rel=1e-6)
    assert got["r2"] == pytest.approx(sk.r2_score(labels, margins[:, 0], sample_weight=weights))


def test_confusion_has_true_classes_in_rows():
    margins = np.array([[0, 2, 1], [0, 2, 1], [5, 0, 0]], np.float32)
    labels = np.array([2, 1, 0], np.float32)
    sums = metrics.statistics(MULTI, margins, labels, np.array([2, 1, 1], np.float32), 2)
    expected = [[1, 0, 0], [0, 1, 0], [0, 2, 0]]
    assert metrics.curves(MULTI, sums) == {"confusion": expected}
    assert metrics.scores(MULTI, sums)["accuracy"] == 0.5


def test_residuals_beyond_the_range_stand_in_the_outer_bins():
    labels = np.array([-9, -1, 0, 0.5, 2, 9], np.float32)
    margins, weights = np.zeros((6, 1), np.float32), np.ones(6, np.float32)
    sums = metrics.statistics(REGRESSION, margins, labels, weights, 4, residual_range=2.0)
    drawn = metrics.curves(REGRESSION, sums, residual_range=2.0)["residuals"]
    assert drawn == {"edges": [-2, -1, 0, 1, 2], "counts": [1, 1, 2, 2]}


def test_bins_are_narrowest_around_the_centre():
    """So the auc of a rare class is seen after the first tree."""
    labels, weights = np.array([0, 1, 0, 1], np.float32), np.ones(4, np.float32)
    close = np.float32([[2.0], [2.0001], [2.0002], [2.0003]])
    around = metrics.statistics(BINARY, close, labels, weights, 512, center=2.0)
    away = metrics.statistics(BINARY, close, labels, weights, 512)
    assert metrics.binning_errors(BINARY, around)["auc"] == 0
    assert metrics.scores(BINARY, around)["auc"] == 0.75
    assert metrics.binning_errors(BINARY, away)["auc"] > 0


def test_huge_margins_give_finite_losses():
    margins = np.array([[3e38], [-3e38], [1000]], np.float32)
    labels, weights = np.array([1, 0, 0], np.float32), np.ones(3, np.float32)
    sums = metrics.statistics(BINARY, margins, labels, weights, N_BINS)
    assert metrics.scores(BINARY, sums)["logloss"] == pytest.approx(1000 / 3)
    wide = np.hstack([margins, -margins])
    sums = metrics.statistics(MULTI, wide, labels, weights, N_BINS)
    assert np.isfinite(sums.sums).all()


@pytest.mark.parametrize(
    ("objective", "shape", "n_sums"),
    [(BINARY, (2, 8), 5), (MULTI, (8, 32), 18), (REGRESSION, (1, 8), 5)],
)
def test_no_rows_and_rows_of_zero_weight_give_zeros_and_undefined_scores(objective, shape, n_sums):
    margins, labels, weights = rows(objective, 50, 0)
    none = tuple(array[:0] for array in rows(objective, 2, 0))
    sums = metrics.statistics(objective, *none, 8)
    np.testing.assert_array_equal(sums.sums, np.zeros(n_sums))
    np.testing.assert_array_equal(sums.histogram, np.zeros(shape))
    assert sums.histogram.dtype == np.float64
    for arrays in (none, (margins, labels, 0 * weights)):
        found = metrics.scores(objective, metrics.statistics(objective, *arrays, N_BINS))
        for scores in (found, metrics.pooled(objective, *arrays)):
            assert np.isnan(list(scores.values())).all()


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_alone_has_no_auc_but_a_log_loss(label):
    margins = np.array([[-1], [-2]], np.float32)
    labels, weights = np.full(2, label, np.float32), np.ones(2, np.float32)
    sums = metrics.statistics(BINARY, margins, labels, weights, N_BINS)
    for got in (metrics.scores(BINARY, sums), metrics.pooled(BINARY, margins, labels, weights)):
        assert np.isnan([got["auc"], got["ks"], got["precision"]]).all()
        assert np.isnan(got["recall"]) == (label == 0)
        assert np.isfinite([got["logloss"], got["accuracy"]]).all()
    assert metrics.curves(BINARY, sums) == {"roc": {"fpr": [], "tpr": []}}
    assert np.isnan(metrics.binning_errors(BINARY, sums)["auc"])


def test_a_constant_target_has_no_r2():
    margins = np.array([[1], [2], [3]], np.float32)
    labels, weights = np.full(3, 1e4 / 3, np.float32), np.full(3, 0.1, np.float32)
    sums = metrics.statistics(REGRESSION, margins, labels, weights, N_BINS)
    both = metrics.scores(REGRESSION, sums), metrics.pooled(REGRESSION, margins, labels, weights)
    for got in both:
        assert np.isnan(got["r2"])
        assert np.isfinite([got["rmse"], got["mae"]]).all()


def replaced(objective, **changes):
    margins, labels, weights = rows(objective, 5, 0)
    arrays = {"margins": margins, "labels": labels, "weights": weights, "n_bins": 8} | changes
    return metrics.statistics(objective, **arrays)


@pytest.mark.parametrize(
    ("objective", "changes", "text"),
    [
        (BINARY, {"n_bins": 1}, r"n_bins must be >= 2, got 1"),
        (REGRESSION, {"residual_range": 0.0}, r"residual_range must be > 0 and finite, got 0.0"),
        (BINARY, {"margins": np.zeros((5, 2), np.float32)}, r"of shape \(n, 1\), got \(5, 2\)"),
        (MULTI, {"margins": np.zeros((5, 1), np.float32)}, r"\(n, n_classes\), got \(5, 1\)"),
        (BINARY, {"margins": np.zeros(5, np.float32)}, r"of shape \(n, 1\), got \(5,\)"),
        (BINARY, {"labels": np.zeros(4, np.float32)}, r"labels must be of shape \(5,\), got \(4,"),
        (BINARY, {"labels": np.full(5, 2, np.float32)}, r"class ids 0 to 1, got 5 other values"),
        (MULTI, {"labels": np.full(5, 0.5, np.float32)}, r"class ids 0 to 3, got 5 other values"),
        (REGRESSION, {"labels": np.full(5, np.nan)}, r"labels must be finite, got 5 other values"),
        (BINARY, {"margins": np.full((5, 1), np.inf)}, r"margins must be finite, got 5 other"),
        (BINARY, {"weights": np.full(5, -1.0)}, r"weights must be >= 0, got 5 other values"),
    ],
)
def test_rubbish_rows_are_refused(objective, changes, text):
    with pytest.raises(ValueError, match=text):
        replaced(objective, **changes)


def test_statistics_of_something_else_are_refused():
    assert metrics.larger_is_better("auc")
    assert not metrics.larger_is_better("rmse")
    assert not metrics.larger_is_better("tweedie-nloglik@1.2")
    with pytest.raises(ValueError, match=r"objective must be one of .*, got rank:map"):
        default_metric("rank:map")
    with pytest.raises(ValueError, match=r"statistics must be of one shape, got"):
        replaced(BINARY) + replaced(BINARY, n_bins=10)
    rule = r"must be those of reg:squarederror, got sums .* and histogram \(2, 8\)"
    with pytest.raises(ValueError, match=rule):
        metrics.scores(REGRESSION, replaced(BINARY))
    for cell in (-1.0, np.inf):
        bad = metrics.Statistics(np.zeros(5), np.full((2, 8), cell))
        with pytest.raises(ValueError, match=r"histogram's cells must be 0 to"):
            metrics.binning_errors(BINARY, bad)["auc"]


ASKED = {
    BINARY: ("auc", "aucpr", "logloss", "error", "error@0.3", "rmse", "mae"),
    MULTI: ("mlogloss", "merror"),
    REGRESSION: ("rmse", "mae", "mape"),
    "reg:logistic": ("rmse", "mae", "mape", "logloss", "error", "error@0.7"),
    "count:poisson": ("poisson-nloglik", "tweedie-nloglik@1.3", "rmse", "rmsle", "mae", "mape"),
    "reg:squaredlogerror": ("rmsle", "rmse", "mae", "mape"),
    "reg:pseudohubererror": ("mphe@1", "rmse", "mae", "mape"),
    "binary:hinge": ("error", "rmse", "mae"),
    "reg:gamma": ("gamma-deviance", "tweedie-nloglik@1.7", "rmse", "mae", "mape"),
    "reg:tweedie": ("tweedie-nloglik@1.5", "poisson-nloglik", "rmse", "mae", "mape"),
}


def asked_rows(objective, seed=3):
    """``rows`` with labels in the range of the objective, none of them 0 where it has numbers."""
    if objective in (BINARY, MULTI):
        return rows(objective, 300, seed)
    margins, labels, weights = rows(REGRESSION, 300, seed)
    if objective == "reg:logistic":
        labels = np.clip(1 / (1 + np.exp(-labels)), 1e-3, 1).astype(np.float32)
    elif objective == "binary:hinge":
        labels = (labels > 0).astype(np.float32)
        return margins, labels, weights
    elif objective != REGRESSION:
        margins, labels = margins / 4, np.ceil(np.abs(labels)).astype(np.float32)
    labels[labels == 0] = 1
    if objective == "reg:squaredlogerror":
        margins = np.abs(margins)
    return margins, labels, weights


@pytest.mark.parametrize("objective", ASKED)
def test_metrics_that_are_asked_for_are_xgboosts(objective):
    margins, labels, weights = asked_rows(objective)
    names = ASKED[objective]
    matrix = xgboost.DMatrix(
        np.zeros((len(labels), 1)), labels, weight=weights, base_margin=margins.squeeze()
    )
    classes = {"num_class": margins.shape[1]} if objective == MULTI else {}
    # Of no trees, so that the margins are the matrix's own.
    booster = xgboost.train(
        {
            "objective": objective,
            "eval_metric": [metrics.for_xgboost(name, objective) for name in names],
            "base_score": 0.5,
            **classes,
        },
        matrix,
        0,
    )
    theirs = [float(each.rpartition(":")[2]) for each in booster.eval(matrix).split("\t")[1:]]
    pooled = metrics.pooled(objective, margins, labels, weights, names)
    assert [pooled[name] for name in names] == pytest.approx(theirs, rel=1e-5)
    if objective in (BINARY, "reg:logistic"):
        squares = metrics.pooled(objective, margins, labels, weights, ("brier", "rmse"))
        assert squares["brier"] == pytest.approx(squares["rmse"] ** 2)
    # Margins are rounded to a tenth: a fine histogram tells them apart.
    split = [
        metrics.statistics(objective, *part, 2**14, extra=names)
        for part in parts((margins, labels, weights), 3)
    ]
    found = metrics.scores(objective, reduce(add, split), names)
    assert [found[name] for name in names] == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    ("objective", "names", "rule"),
    [
        (BINARY, ("mape",), "one or several of auc, aucpr, .* for binary:logistic, got mape"),
        (MULTI, ("auc",), "one or several of mlogloss, merror for multi:softprob, got auc"),
        ("reg:tweedie", ("tweedie-nloglik",), "name the power, .*, got tweedie-nloglik"),
        ("reg:tweedie", ("tweedie-nloglik@2",), "name the power, .*, got tweedie-nloglik@2"),
        (REGRESSION, ("mae", "mae"), "name a metric once, got mae,mae"),
        (BINARY, ("error@1",), "name the threshold, between 0 and 1, as error@0.3, got error@1"),
        (BINARY, ("auc@0.3",), "got auc@0.3"),
        ("reg:pseudohubererror", ("mphe",), "name the run's huber-slope, as mphe@1, got mphe"),
    ],
)
def test_a_metric_that_the_rows_do_not_have_is_refused(objective, names, rule):
    with pytest.raises(ValueError, match=f"eval-metric must .*{rule}"):
        metrics.check_metrics(objective, names)


def test_a_relative_error_needs_labels_other_than_0_and_cells_a_size_that_rows_can_have():
    margins, labels, weights = asked_rows(REGRESSION)
    labels[:3], weights[:3] = 0, 1
    with pytest.raises(ValueError, match="must not be 0 with eval-metric=mape, got 3 that are"):
        metrics.statistics(REGRESSION, margins, labels, weights, N_BINS, extra=("mape",))
    found = metrics.statistics(BINARY, *rows(BINARY, 20, 0), N_BINS)
    for value in (1e101, np.inf, np.nan):
        sums, histogram = found.sums.copy(), found.histogram.copy()
        sums[1], histogram[0, 0] = value, value
        with pytest.raises(ValueError, match=r"sums must be within 1e\+100"):
            metrics.check_statistics(BINARY, metrics.Statistics(sums, found.histogram))
        with pytest.raises(ValueError, match=r"cells must be 0 to 1e\+100"):
            metrics.best_bin(metrics.Statistics(found.sums, histogram))


def test_the_largest_cells_that_are_taken_give_scores():
    found = metrics.statistics(BINARY, *rows(BINARY, 20, 0), N_BINS)
    huge = metrics.Statistics(found.sums, np.full_like(found.histogram, 1e100))
    scores = metrics.scores(BINARY, huge, ("aucpr",)) | metrics.scores_from_bin(huge, 3)
    assert all(0 <= scores[name] <= 1 for name in ("auc", "aucpr", "f1_at_threshold"))
    assert metrics.best_bin(huge) == 0
    assert np.isfinite(metrics.binning_errors(BINARY, huge)["auc"])


# Curves


CENTER = -0.7


def rarer_positives(n=500, seed=0):
    rng = np.random.default_rng(seed)
    labels = (rng.random(n) < 0.3).astype(np.float32)
    margins = (rng.normal(size=n) + 2 * labels - 1.5).astype(np.float32)
    return margins[:, None], labels, rng.uniform(0.5, 2, n).astype(np.float32)


def probabilities(margins):
    return 1 / (1 + np.exp(-margins[:, 0].astype(np.float64)))


def test_curves_of_fine_bins_are_those_of_the_rows():
    margins, labels, weights = rarer_positives()
    sums = metrics.statistics(BINARY, margins, labels, weights, 2**14, center=CENTER)
    drawn = metrics.curves(BINARY, sums, n_points=10**6, center=CENTER)
    # Steps of precision add up to the average precision.
    area = np.diff(drawn["pr"]["recall"]) @ np.array(drawn["pr"]["precision"][1:])
    exact = sk.average_precision_score(labels, margins[:, 0], sample_weight=weights)
    assert area == pytest.approx(exact, abs=1e-3)
    assert (drawn["pr"]["recall"][0], drawn["pr"]["recall"][-1]) == (0.0, 1.0)
    # A calibration has the rows and positives of ten groups.
    found = {name: np.array(values) for name, values in drawn["calibration"].items()}
    assert len(found["rows"]) == 10
    assert found["rows"] == pytest.approx(weights.sum() / 10, rel=0.05)
    assert found["rows"].sum() == pytest.approx(weights.sum())
    assert found["observed"] @ found["rows"] == pytest.approx(weights @ labels)
    mean = probabilities(margins) @ weights
    assert found["predicted"] @ found["rows"] == pytest.approx(mean, rel=1e-3)
    assert (np.diff(found["predicted"]) > 0).all()
    # Probabilities of each class are counted between the edges.
    found = drawn["histogram"]
    for name, rows_of in (("negatives", labels == 0), ("positives", labels == 1)):
        given = probabilities(margins)[rows_of], found["edges"]
        exact = np.histogram(*given, weights=weights[rows_of])[0]
        assert sum(found[name]) == pytest.approx(weights[rows_of].sum())
        assert np.abs(np.array(found[name]) - exact).max() <= 2 * weights.max()  # at an edge


def test_confusion_is_that_of_the_rows_at_one_half_and_at_a_threshold():
    margins, labels, weights = rarer_positives()
    found = metrics.statistics(BINARY, margins, labels, weights, 2**14, center=CENTER)
    first = metrics.best_bin(found)
    assert first is not None
    drawn = metrics.curves(BINARY, found, center=CENTER, threshold_bin=first)
    threshold = metrics.scores_from_bin(found, first, CENTER)["threshold"]
    p = probabilities(margins)
    for name, cut in (("confusion", 0.5), ("confusion_at_threshold", threshold)):
        exact = sk.confusion_matrix(labels, p >= cut, sample_weight=weights)
        assert np.array(drawn[name]) == pytest.approx(exact, rel=1e-6)


def test_thinned_curves_rise_from_corner_to_corner_and_keep_their_area():
    found = metrics.statistics(BINARY, *rarer_positives(5000), 2**14, center=CENTER)
    whole = metrics.curves(BINARY, found, n_points=10**6)["roc"]
    for n_points in (2, 30, 100):
        few = metrics.curves(BINARY, found, n_points=n_points)["roc"]
        points = list(zip(few["fpr"], few["tpr"], strict=True))
        assert 2 <= len(points) <= n_points < len(whole["fpr"])
        assert (points[0], points[-1]) == ((0, 0), (1, 1))
        assert all(a <= c and b <= d for (a, b), (c, d) in pairwise(points))
    areas = [np.trapezoid(each["tpr"], each["fpr"]) for each in (whole, few)]
    assert areas[1] == pytest.approx(areas[0], abs=2e-3)
    sums = metrics.statistics(BINARY, *rarer_positives(300), 20)  # of few points it is kept whole
    roc = metrics.curves(BINARY, sums)["roc"]
    area = metrics.scores(BINARY, sums)["auc"]
    assert np.trapezoid(roc["tpr"], roc["fpr"]) == pytest.approx(area, abs=1e-12)


# The threshold of two classes


def at_threshold(margins, labels, weights, threshold):
    """The scores at a probability, by scikit-learn."""
    p = 1 / (1 + np.exp(-margins[:, 0].astype(np.float64)))
    given = {"sample_weight": weights, "zero_division": np.nan}
    return {
        f"{name}_at_threshold": getattr(sk, f"{name}_score")(labels, p >= threshold, **given)
        for name in ("f1", "precision", "recall")
    }


@settings(max_examples=10, deadline=None)
@given(seed=seeds, n_rows=st.integers(20, 300), n_parties=st.integers(1, 4))
def test_the_threshold_has_the_best_f1_and_scores_at_it_are_scikit_learns(seed, n_rows, n_parties):
    arrays, others = rows(BINARY, n_rows, seed), rows(BINARY, 200, seed + 1)
    arrays[1][0] = 1.0
    margin = best_margin(*arrays)
    best = metrics.scores_from_margin(*arrays, margin)["f1_at_threshold"]
    precision, recall, _ = sk.precision_recall_curve(
        arrays[1], arrays[0][:, 0], sample_weight=arrays[2]
    )
    f1s = 2 * precision * recall / np.maximum(precision + recall, 1e-300)
    assert best == pytest.approx(f1s.max())
    others[0][:] += 0.013  # no row of them at the threshold, whose rounding would decide
    found = metrics.scores_from_margin(*others, margin)
    threshold = found.pop("threshold")
    assert found == pytest.approx(at_threshold(*others, threshold), nan_ok=True)
    how = {"n_bins": 512, "center": 0.7}
    split = [metrics.statistics(BINARY, *one, **how) for one in parts(arrays, n_parties)]
    valid = reduce(add, split)
    first = metrics.best_bin(valid)
    got = metrics.scores_from_bin(valid, first, 0.7)["f1_at_threshold"]
    assert best - 0.05 <= got <= best + 1e-12


def test_without_weight_or_positives_there_is_no_threshold():
    margins, labels, weights = rows(BINARY, 20, 0)
    sums = metrics.statistics(BINARY, margins, labels, 0 * weights, 8)
    assert metrics.best_bin(sums) is None
    assert best_margin(margins, 0 * labels, weights) is None
    assert metrics.best_bin(metrics.statistics(BINARY, margins, 0 * labels, weights, 8)) is None


def test_rows_that_a_model_cannot_tell_apart_are_all_called_positive():
    margins, labels = np.full((4, 1), 0.3, np.float32), np.array([0, 1, 1, 0], np.float32)
    weights = np.ones(4, np.float32)
    sums = metrics.statistics(BINARY, margins, labels, weights, 64, center=float(margins[0, 0]))
    first = metrics.best_bin(sums)
    expected = [0.0, 2 / 3, 0.5, 1.0]
    assert list(metrics.scores_from_bin(sums, first, 0.3).values()) == pytest.approx(expected)
    margin = best_margin(margins, labels, weights)
    found = metrics.scores_from_margin(margins, labels, weights, margin)
    assert list(found.values()) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(20))
def test_the_share_of_the_rarer_class_follows_from_scores_or_is_unknown(seed):
    rng = np.random.default_rng(seed)
    labels = (rng.random(60) < rng.uniform(0.05, 0.95)).astype(np.float32)
    margins = rng.normal(rng.uniform(-2, 2), 1, (60, 1)).astype(np.float32)
    weights = np.full(60, 0.25, np.float32)
    share = metrics.rarer_share(metrics.pooled(BINARY, margins, labels, weights))
    called, hits = (margins[:, 0] > 0).any(), (labels * (margins[:, 0] > 0)).any()
    truth = min(labels.mean(), 1 - labels.mean())
    assert share == (None if called and not hits else pytest.approx(truth, abs=1e-6))


def test_few_rows_of_a_class_are_warned_of():
    assert metrics.few_of_class(0.25, 100).startswith("only some 25 of 100 validation rows are of")
    assert "too few to choose a threshold" in metrics.few_of_class(0.25, 100)
    assert metrics.few_of_class(0.3, 100) == metrics.few_of_class(0.0, 0) == ""


@pytest.mark.by_default("pax-10", "secureboost-10", "pax-3")
@pytest.mark.parametrize("step", [10, 3])
@pytest.mark.parametrize("strategy", ["pax", "bagging", "fedavg-linear", "secureboost"])
def test_a_run_warns_of_few_validation_rows_of_a_class(
    settings, vertical, write_table, strategy, step
):
    labels = [int(row % step == 0) for row in range(500)]
    data = str(write_table(n_rows=500, y=labels, w=[0.001] * 500))
    given = {"data": data, "label": "y", "weight": "w", "valid_fraction": 0.5, "parties": 2}
    given |= {"num_boost_round": 1} if strategy != "fedavg-linear" else {}
    make = vertical if strategy == "secureboost" else settings
    summary = run_local(make(strategy=strategy, **given)).summary
    n_few = sum(labels[row] for row in Holdout(0.2, 0.5, 42).split(500).valid)
    told = f"only some {n_few} of 200 validation rows are of the rarer class"
    assert [told in text for text in summary["warnings"]].count(True) == (step == 10)
    assert summary["threshold"].get("few", False) == bool(step == 10 and summary["threshold"])
    assert summary["rarer_class"] == pytest.approx(1 / step, abs=0.05)


# Intervals, which cover as often as they say: of scores, and of differences of two models


def two_models(objective, n_rows, rng):
    """Margins of two models that share part of their error, and labels."""
    width = 3 if objective == MULTI else 1
    shared = rng.normal(size=(n_rows, width))
    first, second = (shared + scale * rng.normal(size=(n_rows, width)) for scale in (0.4, 0.8))
    if objective == BINARY:
        labels = rng.random(n_rows) < 0.3
        first[:, 0] += 1.3 * labels - 1
        second[:, 0] += 1.1 * labels - 0.8
    elif objective == MULTI:
        labels = rng.choice(3, n_rows, p=[0.5, 0.3, 0.2])
        first[np.arange(n_rows), labels] += 1.5
        second[np.arange(n_rows), labels] += 1.2
    else:
        labels = shared[:, 0] + rng.normal(size=n_rows)
    return tuple(each.astype(np.float32) for each in (first, second, labels))


def ones(labels):
    return np.ones(len(labels), np.float32)


def test_wilsons_interval_is_where_a_test_of_the_share_ends():
    """At its ends the count is 1.96 standard errors of that share away."""
    for count, total in ((0, 10), (3, 10), (7, 250), (250, 250)):
        for end in wilson(count, total):
            if 0 < end < 1:
                away = abs(count / total - end) / np.sqrt(end * (1 - end) / total)
                assert away == pytest.approx(NormalDist().inv_cdf(0.975), abs=1e-9)
    assert wilson(0, 10)[0] == 0
    assert (wilson(12, 10), wilson(-2, 10)) == (wilson(10, 10), wilson(0, 10))
    assert wilson(250, 250)[1] == 1


def test_a_difference_of_areas_has_delongs_variance():
    """By the definition: placements of each pair, and their covariance."""
    rng = np.random.default_rng(3)
    first, second, labels = two_models(BINARY, 60, rng)
    second = second.round(1)  # with ties
    aucs = [sk.roc_auc_score(labels, each[:, 0]) for each in (first, second)]

    def placements(scores):
        pairs = scores[labels > 0][:, None] - scores[labels == 0][None]
        wins = (pairs > 0) + 0.5 * (pairs == 0)
        return wins.mean(axis=1), wins.mean(axis=0)

    of_models = [placements(each[:, 0]) for each in (first, second)]
    variance = 0.0
    for placed in zip(*of_models, strict=True):
        covariance = np.cov(np.stack(placed))
        variance += (covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]) / placed[0].size
    value, low, high = paired(BINARY, first, second, labels, ones(labels))["auc"]
    assert value == pytest.approx(aucs[0] - aucs[1], abs=1e-9)
    assert high - low == pytest.approx(2 * 1.959964 * np.sqrt(variance), rel=1e-5)


@pytest.mark.parametrize("objective", [BINARY, MULTI, REGRESSION])
def test_differences_are_those_of_the_scores_and_change_sign(objective):
    first, second, labels = two_models(objective, 200, np.random.default_rng(4))
    extra = {BINARY: ("brier", "error@0.3"), MULTI: (), REGRESSION: ("mape",)}[objective]
    spans = paired(objective, first, second, labels, ones(labels), extra)
    turned = paired(objective, second, first, labels, ones(labels), extra)
    scores = [
        metrics.pooled(objective, each, labels, ones(labels), extra) for each in (first, second)
    ]
    assert set(extra) <= set(spans)
    for name, (value, low, high) in spans.items():
        assert value == pytest.approx(scores[0][name] - scores[1][name], abs=1e-6)
        assert low < value < high
        np.testing.assert_allclose(turned[name], (-value, -high, -low), atol=1e-12)
    if objective == REGRESSION:  # of the root of a mean, by its derivative
        name, errors = "rmse", [(each[:, 0] - labels).astype(float) for each in (first, second)]
        terms = [each**2 / (2 * np.sqrt((each**2).mean())) for each in errors]
    else:
        calls = (lambda m: m[:, 0] > 0) if objective == BINARY else (lambda m: m.argmax(axis=1))
        name, terms = (
            "accuracy",
            [(calls(each) == labels).astype(float) for each in (first, second)],
        )
    reach = 1.959964 * (terms[0] - terms[1]).std(ddof=1) / np.sqrt(200)
    assert spans[name][2] - spans[name][1] == pytest.approx(2 * reach, rel=1e-4)
    none = paired(objective, first, first, labels, ones(labels))
    assert set(none.values()) == {(0.0, 0.0, 0.0)}


@pytest.mark.parametrize("find", [paired, row_intervals])
def test_weighted_rows_and_single_ones_have_no_intervals(find):
    first, second, labels = two_models(BINARY, 50, np.random.default_rng(6))
    models = (first, second) if find is paired else (first,)
    weights = ones(labels)
    assert find(BINARY, *models, labels, weights)
    weights[3] = 2
    assert find(BINARY, *models, labels, weights) == {}
    none = [each[:0] for each in (*models, labels, weights)]
    assert find(BINARY, *none) == {}


# Intervals from sums

# Of 60 intervals of 95 % that cover independently, fewer than 50 with a probability of 0.0003.
N_DRAWN, FEWEST = 60, 50


@pytest.mark.parametrize("objective", [BINARY, MULTI, REGRESSION])
def test_intervals_cover_the_scores_of_all_rows_as_often_as_they_say(objective, monkeypatch):
    # As many as the product draws: the ends of few draws are too close.
    monkeypatch.setattr(import_module("fedapp.metrics.intervals"), "N_DRAWS", 500)
    rng = np.random.default_rng(5)
    truth = metrics.scores(objective, sample(objective, 300_000, rng))
    covered = dict.fromkeys(set(truth) - {"auc_ovr", "ks", "r2"}, 0)
    for _ in range(N_DRAWN):
        drawn = sample(objective, 200, rng)
        spans = metrics.intervals(objective, drawn, residual_range=8.0)
        assert spans.keys() == covered.keys()
        for name, (low, high) in spans.items():
            covered[name] += low <= truth[name] <= high
    assert {name: n for name, n in covered.items() if n < FEWEST} == {}


def sample(objective, n_rows, rng):
    """Statistics of rows that are drawn from one distribution."""
    margins, _, labels = two_models(objective, n_rows, rng)
    return metrics.statistics(objective, margins, labels, ones(labels), 2**12, 8.0)


def test_the_interval_of_an_auc_is_delongs_on_the_logit_scale():
    margins = np.array([[-1.0], [0.5], [0.2], [1.0], [2.0]], np.float32)
    labels, weights = np.array([0, 0, 1, 1, 1], np.float32), np.ones(5, np.float32)
    drawn = metrics.statistics(BINARY, margins, labels, weights, 2**12)
    # Placements of positives: 1/2, 1, 1; of negatives: 1, 2/3.
    area = 5 / 6
    error = math.sqrt(np.var([0.5, 1, 1], ddof=1) / 3 + np.var([1, 2 / 3], ddof=1) / 2)
    logit, reach = math.log(area / (1 - area)), 1.959964 * error / (area * (1 - area))
    expected = [1 / (1 + math.exp(-each)) for each in (logit - reach, logit + reach)]
    assert metrics.intervals(BINARY, drawn)["auc"] == pytest.approx(expected, abs=1e-6)


def test_intervals_are_of_whole_numbers_of_rows_and_the_same_each_time():
    margins, labels, _ = rows(BINARY, 100, 3)
    drawn = metrics.statistics(BINARY, margins, labels, np.ones(100, np.float32), 64)
    assert metrics.intervals(BINARY, drawn) == metrics.intervals(BINARY, drawn) != {}
    noised = metrics.Statistics(drawn.sums, drawn.histogram + 0.25)
    assert metrics.intervals(BINARY, noised) == {}
    emptied = metrics.Statistics(drawn.sums, np.zeros_like(drawn.histogram))
    assert metrics.intervals(BINARY, emptied) == {}
    heavy = metrics.Statistics(drawn.sums, drawn.histogram * 2.0**60)  # weights, whole as float64
    assert metrics.intervals(BINARY, heavy) == {}
    wrong = np.array([12.0, 5, *np.diag([-4.0, -4, -4]).flat]), np.tile(np.arange(8.0), (6, 1))
    assert metrics.intervals("multi:softprob", metrics.Statistics(*wrong)) == {}


def test_a_score_that_no_draw_changes_has_no_interval():
    margins, labels = np.array([[-1.0], [1.0]] * 20, np.float32), np.tile([0, 1], 20)
    arrays = margins, labels.astype(np.float32), np.ones(40, np.float32)
    spans = metrics.intervals(BINARY, metrics.statistics(BINARY, *arrays, 64))
    assert not {"auc", "f1", "pr_auc"} & set(spans)
    low, high = spans["accuracy"]  # which counts alone determine
    assert 0.9 < low < high == 1
