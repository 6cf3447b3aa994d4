"""What objectives and the summaries of finished runs show of their scores."""

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from sklearn import metrics as sk

from fedapp import metrics
from fedapp.data.datasets import read_source
from fedapp.errors import ConfigError
from fedapp.metrics.names import EVAL_METRICS, NAMES
from fedapp.report.summary import print_summary
from fedapp.run_folder import RunFolder
from fedapp.runs.baselines import baseline_rows
from fedapp.runs.local import run_local
from fedapp.runs.predict import predicted_rows
from fedapp.settings import load_settings
from fedapp.site.table import Holdout, share_rows
from fedapp.trees.objective import n_outputs, transform
from tests.federated import summary_of
from tests.runs.test_scores_of_runs import BINARY, OBJECTIVES, made, requested, roles_of


@pytest.mark.parametrize("strategy", ["pax", "bagging", "fedavg-linear"])
def test_the_summary_names_the_classes_of_the_confusion_matrix(settings, write_table, strategy):
    names = ["no", "perhaps", "yes"]
    data = str(write_table(n_rows=60, y=[names[place % 3] for place in range(60)]))
    given = {"objective": "multi:softprob", "parties": 2, "fedavg_linear__rounds": 1}
    run = settings(strategy=strategy, data=data, label="y", **given)
    summary = run_local(run).summary
    assert summary["classes"] == names
    assert len(summary["curves"]["confusion"]) == 3


def test_the_scores_of_each_party_are_those_of_its_own_rows(settings):
    """Of two parties, whose shares of the rows are known."""
    run = settings(strategy="pax", data="breast-cancer", parties=2, num_boost_round=4)
    summary = summary_of(run_local(run))
    p, table = predicted_rows(Path(run.run_dir), run.data).predictions[:, -1], read_source(run.data)
    holdout = Holdout(run.test_fraction, run.valid_fraction, run.seed)
    shares = share_rows(table, holdout, run.partition, run.parties)
    labels, value = table.labels.astype(float), summary["threshold"]["value"]
    by_party = summary["metrics"]["by_party"]
    assert list(by_party) == ["party-1", "party-2"]
    threshold = {"value": value, "rows": "valid", "few": True}
    assert summary["threshold"] == threshold
    assert RunFolder(Path(run.run_dir)).threshold is None
    assert summary["rarer_class"] == pytest.approx(1 / 3, abs=0.05)
    for name, rows in zip(by_party, shares["test"], strict=True):
        scores = by_party[name]["test"]
        assert scores["accuracy"] == pytest.approx(sk.accuracy_score(labels[rows], p[rows] >= 0.5))
        assert scores["auc"] == pytest.approx(sk.roc_auc_score(labels[rows], p[rows]), abs=1e-3)
        f1 = sk.f1_score(labels[rows], p[rows] >= value)
        assert scores["f1_at_threshold"] == pytest.approx(f1)
        assert scores["threshold"] == value


def test_the_printed_scores_say_their_threshold_and_weights(settings, write_table):
    data = write_table("weighted", 200, w=[1 + place % 3 for place in range(200)])
    given = {"data": str(data), "label": "y", "weight": "w", "parties": 2}
    summary = summary_of(run_local(settings(strategy="pax", **given)))
    console = Console(record=True, width=120)
    print_summary(summary, console)
    text, test = console.export_text(), summary["metrics"]["test"]
    few = "too few validation rows of a class to choose a threshold: use 0.5, not"
    assert f"{few} {test['threshold']:.4f} of the best F1" in text
    assert "scores at it" not in text
    assert "scores are weighted by the column 'w', as training is" in text
    assert "_at_threshold" not in text


@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_a_model_that_cannot_tell_rows_apart_proposes_no_threshold(
    settings, vertical, write_table, strategy
):
    data = write_table("rare", 300, y=[int(place % 10 == 0) for place in range(300)])
    given = {"data": str(data), "label": "y", "parties": 2, "gamma": 1000.0, "num_boost_round": 1}
    make = vertical if strategy == "secureboost" else settings
    summary = summary_of(run_local(make(strategy=strategy, **given)))
    assert summary["metrics"]["test"]["threshold"] == 0
    assert summary["threshold"] == {}
    assert "confusion_at_threshold" not in summary.get("curves", {})


@pytest.mark.by_default("pax", "bagging")
@pytest.mark.parametrize("strategy", ["pax", "bagging", "fedavg-linear"])
def test_intervals_of_a_run_hold_its_scores_unless_rows_are_weighted(
    settings, write_table, strategy
):
    data = write_table("weighted", 200, w=[1 + place % 2 for place in range(200)])
    given = {"data": str(data), "label": "y", "parties": 2, "strategy": strategy}
    summary = summary_of(run_local(settings(**given, drop_columns="w")))
    spans, scores = summary["intervals"], summary["metrics"]["test"]
    assert {"auc", "logloss", "accuracy", "pr_auc"} <= set(spans)
    assert all(low < scores[name] < high for name, (low, high) in spans.items())
    assert summary["label"] == "y"
    assert summary_of(run_local(settings(**given, weight="w")))["intervals"] == {}


# The table of what each objective has


RANGE = {"residual_range": 8.0}
# Scores from bins, which have a bound; scores with an interval; curves.
FIGURES = {
    BINARY: (
        {"auc", "ks", "pr_auc", "aucpr"},
        {"auc", "logloss", "accuracy", "f1", "precision", "recall", "pr_auc", "aucpr", "error"},
        {"roc", "pr", "calibration", "histogram", "confusion"},
    ),
    "multi:softprob": (
        {"auc_ovr"},
        {"mlogloss", "accuracy", "balanced_accuracy", "macro_f1", "merror"},
        {"confusion"},
    ),
    "survival": ({"c-index"}, set(), set()),
    "rank": (set(), set(), set()),
    "numbers": (set(), {"rmse", "mae"}, {"residuals"}),
}


def rows_of(make, folder, objective):
    """Margins, labels and weights of an objective, and all metrics that may be requested."""
    data = made(folder / "rows.csv", objective)
    run = make(data=str(data), objective=objective, **roles_of(objective))
    labels = baseline_rows(run)[0].labels
    n_classes = 3 if objective == "multi:softprob" else 2 * (objective == BINARY)
    shape = len(labels), n_outputs(objective, n_classes)
    margins = np.random.default_rng(3).normal(0, 1, shape).astype(np.float32)
    return margins, labels, np.ones(len(labels), np.float32), requested(objective)


def kinds(names):
    return {name.partition("@")[0] for name in names}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objective_has_what_the_table_says(settings, tmp_path, objective):
    *arrays, extra = rows_of(settings, tmp_path, objective)
    kind = objective if objective in FIGURES else objective.partition(":")[0]
    bounded, spans, curves = FIGURES.get(kind, FIGURES["numbers"])
    sums = metrics.statistics(objective, *arrays, 4096, 8.0, extra=extra)
    found = metrics.scores(objective, sums, extra)
    assert kinds(found) == {*NAMES[objective], *EVAL_METRICS[objective]}
    assert not np.isnan(list(found.values())).any()
    assert metrics.pooled(objective, *arrays, extra).keys() == found.keys()
    assert kinds(metrics.binning_errors(objective, sums, extra)) == bounded
    assert kinds(metrics.intervals(objective, sums, extra=extra, **RANGE)) == spans
    assert metrics.curves(objective, sums, **RANGE).keys() == curves
    assert metrics.loss_metric(objective) in found
    assert all(metrics.is_metric(name) for name in found)
    how = {"objective": objective, "calibration": "platt", **roles_of(objective)}
    if objective == BINARY:
        load_settings(how)
    else:
        with pytest.raises(ConfigError, match=f"calibration must be none for {objective}"):
            load_settings(how)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_models_are_compared_by_means_over_rows_only(settings, tmp_path, objective):
    """No error of signed times, or of hazard ratios, has a difference with an interval."""
    *arrays, extra = rows_of(settings, tmp_path, objective)
    spans = metrics.paired(objective, arrays[0], arrays[0] + 1, *arrays[1:], extra)
    scores = metrics.pooled(objective, *arrays, extra)
    assert spans.keys() <= scores.keys()
    others = metrics.pooled(objective, arrays[0] + 1, *arrays[1:], extra)
    for name, (value, low, high) in spans.items():
        assert value == pytest.approx(scores[name] - others[name], abs=1e-9), name
        assert low <= value <= high
    assert bool(spans) == (objective not in ("survival:cox", "rank:ndcg", "rank:pairwise"))


@pytest.mark.parametrize("margin", [0.0, 1e-9, -1e-9, 1e-6])
def test_a_row_is_called_positive_in_the_report_as_in_predictions(margin):
    margins = np.full((4, 1), margin, np.float32)
    probability = transform(BINARY, margins)[:, 0]
    called = np.stack([1 - probability, probability], axis=1).argmax(axis=1)
    labels = np.ones(4, np.float32)
    found = metrics.pooled(BINARY, margins, labels, np.ones(4, np.float32))
    assert found["accuracy"] == called.mean() == (margin > 1e-7)
    losses = metrics.paired(BINARY, margins, -np.ones((4, 1), np.float32), labels, labels)
    assert losses["accuracy"][0] == called.mean()
