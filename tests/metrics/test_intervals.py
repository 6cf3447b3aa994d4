"""Sampling intervals cover as often as they say: of scores, and of differences of two models."""

import math
from importlib import import_module
from statistics import NormalDist

import numpy as np
import pytest
from sklearn import metrics as sk

from fedapp import metrics
from fedapp.metrics.intervals import paired, row_intervals, wilson
from tests.metrics.test_metrics import rows

BINARY, MULTI, REGRESSION = "binary:logistic", "multi:softprob", "reg:squarederror"


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


def test_a_score_that_no_draw_changes_has_no_interval():
    margins, labels = np.array([[-1.0], [1.0]] * 20, np.float32), np.tile([0, 1], 20)
    arrays = margins, labels.astype(np.float32), np.ones(40, np.float32)
    spans = metrics.intervals(BINARY, metrics.statistics(BINARY, *arrays, 64))
    assert not {"auc", "f1", "pr_auc"} & set(spans)
    low, high = spans["accuracy"]  # which counts alone determine
    assert 0.9 < low < high == 1
