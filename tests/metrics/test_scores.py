"""The scores of finished runs, as the summary has them."""

import csv
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from sklearn import metrics as sk

from fedapp.data.datasets import read_source
from fedapp.report.summary import print_summary
from fedapp.run_files import threshold_of
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from fedapp.site.table import Holdout, share_rows
from tests.federated import summary_of


@pytest.mark.parametrize("strategy", ["pax", "bagging", "fedavg-linear"])
def test_the_summary_names_the_classes_of_the_confusion_matrix(settings, write_table, strategy):
    names = ["no", "perhaps", "yes"]
    data = str(write_table(n_rows=60, y=[names[place % 3] for place in range(60)]))
    given = {"objective": "multi:softprob", "parties": 2, "fedavg_linear__rounds": 1}
    run = settings(strategy=strategy, data=data, label="y", **given)
    summary = run_local(run).summary
    assert summary["classes"] == names
    assert len(summary["curves"]["confusion"]) == 3


def test_the_scores_of_each_party_are_those_of_its_own_rows(settings, tmp_path):
    """Of two parties, whose shares of the rows are known."""
    run = settings(strategy="pax", data="breast-cancer", parties=2, num_boost_round=4)
    summary = summary_of(run_local(run))
    predict_table(Path(run.run_dir), run.data, "", tmp_path / "all.csv")
    table = read_source(run.data)
    with (tmp_path / "all.csv").open() as file:
        p = np.array([float(row["probability_1"]) for row in csv.DictReader(file)])
    holdout = Holdout(run.test_fraction, run.valid_fraction, run.seed)
    shares = share_rows(table, holdout, run.partition, run.parties)
    labels, value = table.labels.astype(float), summary["threshold"]["value"]
    by_party = summary["metrics"]["by_party"]
    assert list(by_party) == ["party-1", "party-2"]
    threshold = {"value": value, "best": "f1", "rows": "valid", "few": True}
    assert summary["threshold"] == threshold
    assert threshold_of(Path(run.run_dir)) is None
    assert summary["rarer_class"] == pytest.approx(1 / 3, abs=0.05)
    for name, rows in zip(by_party, shares["test"], strict=True):
        scores = by_party[name]["test"]
        assert scores["accuracy"] == pytest.approx(sk.accuracy_score(labels[rows], p[rows] >= 0.5))
        assert scores["auc"] == pytest.approx(sk.roc_auc_score(labels[rows], p[rows]), abs=1e-3)
        f1 = sk.f1_score(labels[rows], p[rows] >= value)
        assert scores["f1_at_threshold"] == pytest.approx(f1)
        assert scores["threshold"] == value
    test = summary["metrics"]["test"]
    everyone = np.concatenate(shares["test"])
    exact = sk.average_precision_score(labels[everyone], p[everyone])
    assert abs(test["pr_auc"] - exact) <= summary["binning_errors"]["pr_auc"] + 1e-6
    recall = sk.recall_score(labels[everyone], p[everyone] >= value)
    assert test["recall_at_threshold"] == pytest.approx(recall)


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
