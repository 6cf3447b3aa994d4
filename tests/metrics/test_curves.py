"""Curves from sums: those of scikit-learn from the rows, as far as bins allow."""

from itertools import pairwise

import numpy as np
import pytest
from sklearn import metrics as sk

from fedapp import metrics

BINARY = "binary:logistic"
CENTER = -0.7


def rows(n=500, seed=0):
    rng = np.random.default_rng(seed)
    labels = (rng.random(n) < 0.3).astype(np.float32)
    margins = (rng.normal(size=n) + 2 * labels - 1.5).astype(np.float32)
    return margins[:, None], labels, rng.uniform(0.5, 2, n).astype(np.float32)


def curves_of(*given, **how):
    found = metrics.statistics(BINARY, *given, 2**14, center=CENTER)
    return metrics.curves(BINARY, found, n_points=10**6, center=CENTER, **how)


def probabilities(margins):
    return 1 / (1 + np.exp(-margins[:, 0].astype(np.float64)))


def test_steps_of_precision_add_up_to_the_average_precision():
    margins, labels, weights = rows()
    drawn = curves_of(margins, labels, weights)["pr"]
    area = np.diff(drawn["recall"]) @ np.array(drawn["precision"][1:])
    exact = sk.average_precision_score(labels, margins[:, 0], sample_weight=weights)
    assert area == pytest.approx(exact, abs=1e-3)
    assert (drawn["recall"][0], drawn["recall"][-1]) == (0.0, 1.0)


def test_calibration_has_the_rows_and_positives_of_ten_groups():
    margins, labels, weights = rows()
    found = {k: np.array(v) for k, v in curves_of(margins, labels, weights)["calibration"].items()}
    assert len(found["rows"]) == 10
    assert found["rows"] == pytest.approx(weights.sum() / 10, rel=0.05)
    assert found["rows"].sum() == pytest.approx(weights.sum())
    assert found["observed"] @ found["rows"] == pytest.approx(weights @ labels)
    mean = probabilities(margins) @ weights
    assert found["predicted"] @ found["rows"] == pytest.approx(mean, rel=1e-3)
    assert (np.diff(found["predicted"]) > 0).all()


def test_the_histogram_of_probabilities_is_that_of_each_class():
    margins, labels, weights = rows()
    found = curves_of(margins, labels, weights)["histogram"]
    for name, of_class in (("negatives", labels == 0), ("positives", labels == 1)):
        exact = np.histogram(
            probabilities(margins)[of_class], found["edges"], weights=weights[of_class]
        )[0]
        assert sum(found[name]) == pytest.approx(weights[of_class].sum())
        assert np.abs(np.array(found[name]) - exact).max() <= 2 * weights.max()  # at an edge


def test_confusion_is_that_of_the_rows_at_one_half_and_at_a_threshold():
    margins, labels, weights = rows()
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
    found = metrics.statistics(BINARY, *rows(5000), 2**14, center=CENTER)
    whole = metrics.curves(BINARY, found, n_points=10**6)["roc"]
    for n_points in (2, 30, 100):
        few = metrics.curves(BINARY, found, n_points=n_points)["roc"]
        points = list(zip(few["fpr"], few["tpr"], strict=True))
        assert 2 <= len(points) <= n_points < len(whole["fpr"])
        assert (points[0], points[-1]) == ((0, 0), (1, 1))
        assert all(a <= c and b <= d for (a, b), (c, d) in pairwise(points))
    areas = [np.trapezoid(each["tpr"], each["fpr"]) for each in (whole, few)]
    assert areas[1] == pytest.approx(areas[0], abs=2e-3)
    sums = metrics.statistics(BINARY, *rows(300), 20)  # of few points it is kept whole
    roc = metrics.curves(BINARY, sums)["roc"]
    area = metrics.scores(BINARY, sums)["auc"]
    assert np.trapezoid(roc["tpr"], roc["fpr"]) == pytest.approx(area, abs=1e-12)
