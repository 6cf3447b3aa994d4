"""The threshold of two classes, and scores at it, against scikit-learn."""

from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from fedapp import metrics
from fedapp.data.partition import Holdout
from fedapp.metrics.scores import best_margin
from fedapp.runs.baselines import run_baselines
from fedapp.runs.local import run_local
from tests.metrics.test_metrics import BINARY, parts, rows, seeds


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
    # From histograms:
    how = {"n_bins": 512, "center": 0.7}
    valid = reduce(
        add, [metrics.statistics(BINARY, *one, **how) for one in parts(arrays, n_parties)]
    )
    first = metrics.best_bin(valid)
    found = metrics.scores_from_bin(metrics.statistics(BINARY, *others, **how), first, 0.7)
    threshold = found.pop("threshold")
    assert found == pytest.approx(at_threshold(*others, threshold), nan_ok=True)
    got = metrics.scores_from_bin(valid, first, 0.7)["f1_at_threshold"]
    assert best - 0.05 <= got <= best + 1e-12


@settings(max_examples=40, deadline=None)
@given(seed=seeds, n_rows=st.integers(20, 300), price=st.sampled_from([0.2, 1.0, 5.0, 40.0]))
def test_the_threshold_has_the_least_cost_where_a_metric_names_one(seed, n_rows, price):
    margins, labels, weights = arrays = rows(BINARY, n_rows, seed)
    labels[0] = 1.0
    name = f"cost@{price}"
    shares = weights.astype(np.float64)

    def cost(called):
        missed = shares @ (labels * ~called)
        return (price * missed + shares @ ((1 - labels) * called)) / shares.sum()

    least = min(cost(margins[:, 0] >= margin) for margin in margins[shares > 0, 0])
    margin = best_margin(*arrays, [name])
    at_it = metrics.scores_from_margin(*arrays, margin, [name])
    assert at_it[name] == pytest.approx(least)
    assert at_it[name] == pytest.approx(cost(margins[:, 0] >= margin))
    assert metrics.pooled(BINARY, *arrays, [name])[name] == pytest.approx(least)
    sums = metrics.statistics(BINARY, *arrays, 512, extra=[name])
    first = metrics.best_bin(sums, [name])
    binned = metrics.scores_from_bin(sums, first, 0.0, [name])[name]
    assert metrics.scores(BINARY, sums, [name])[name] == pytest.approx(binned)
    assert least - 1e-9 <= binned <= least + 0.05 * (1 + price)


def test_without_weight_or_positives_there_is_no_threshold():
    margins, labels, weights = rows(BINARY, 20, 0)
    sums = metrics.statistics(BINARY, margins, labels, 0 * weights, 8, extra=["cost@5"])
    assert np.isnan(metrics.scores(BINARY, sums, ["cost@5"])["cost@5"])
    assert metrics.best_bin(sums, ["cost@5"]) is None
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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_a_run_chooses_the_threshold_of_the_least_cost_on_validation_rows(
    settings, vertical, write_table, strategy
):
    make = vertical if strategy == "secureboost" else settings
    given = {"data": str(write_table(n_rows=400)), "label": "y", "parties": 2}
    given |= {"valid_fraction": 0.3, "strategy": strategy}
    run = make(**given, eval_metric="auc,cost@9")
    scores = run_local(run).summary["metrics"]
    usual = run_local(make(**given)).summary["metrics"]
    assert scores["valid"]["threshold"] == scores["test"]["threshold"]
    assert scores["valid"]["threshold"] < usual["valid"]["threshold"]
    assert scores["valid"]["recall_at_threshold"] > usual["valid"]["recall_at_threshold"]
    assert {"threshold", "cost@9"} <= set(run_baselines(run)["pooled"])


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
