"""Differences of a run's model to the baselines, paired by test rows."""

import numpy as np
import pytest

import fedapp
from fedapp.report.certainty import certainty_notes, score_text, span_text
from fedapp.runs.baselines import decoded, encoded
from tests.tables import made_columns, write_rows

SHORT = {"num_boost_round": 3, "early_stopping_rounds": 0, "max_depth": 3, "eta": 0.3}
SMALL_KEY = {"key_bits": 512, "insecure_small_key": True}


@pytest.fixture
def given(tmp_path):
    """A table split among parties."""
    columns = made_columns("binary:logistic", 400)
    data = write_rows(tmp_path / "rows.csv", {**columns, "w": [1 + row % 2 for row in range(400)]})
    more = {"data": str(data), "label": "y", "drop_columns": "w", "parties": 2}
    return {**SHORT, **more, "run_dir": str(tmp_path / "run"), "progress": False}


def test_margins_are_the_same_from_a_file():
    margins = np.random.default_rng(1).normal(size=(7, 3)).astype(np.float32)
    np.testing.assert_array_equal(decoded(encoded(margins), 7), margins)


def test_a_run_differs_from_its_baselines_by_their_scores(given):
    run = fedapp.run("pax", baselines=True, **given)
    baselines, test = run.summary["baselines"], run.summary["metrics"]["test"]
    assert "test_margins" not in baselines
    spans = {"pooled": baselines["differences"]["pooled"], **baselines["differences"]["alone"]}
    scores = {"pooled": baselines["pooled"], **baselines["alone"]}
    assert set(spans) == set(scores) == {"pooled", "party-1", "party-2"}
    for name, each in spans.items():
        assert set(each) == {"auc", "logloss", "accuracy"}
        for metric, (value, low, high) in each.items():
            bound = 0.01 if metric == "auc" else 1e-6  # scores of areas come from bins
            assert value == pytest.approx(test[metric] - scores[name][metric], abs=bound)
            assert low <= value <= high
    shown = f"with 95 % intervals: pooled {span_text(spans['pooled']['auc'])}, party-1 alo"
    lines = certainty_notes(run.summary, "auc")
    assert any(f"test auc less that of a baseline, {shown}" in line for line in lines)


def test_a_lossless_method_does_not_differ_from_pooled_training(given):
    run = fedapp.run(
        "secureboost", baselines=True, allow_export=True, secureboost=SMALL_KEY, **given
    )
    spans = run.summary["baselines"]["differences"]["pooled"]
    assert {"auc", "logloss", "accuracy"} == set(spans)
    np.testing.assert_allclose([*spans.values()], 0, atol=1e-6)


def test_weighted_rows_have_no_differences(given):
    weighted = {"allow_export": True, "secureboost": SMALL_KEY, "drop_columns": "", "weight": "w"}
    run = fedapp.run("secureboost", baselines=True, **given | weighted)
    assert run.summary["baselines"]["differences"] == {} == run.summary["intervals"]


def test_a_summary_names_the_error_of_binning():
    errors = {"auc": 0.0003, "ks": 0.01231, "pr_auc": 0.1, "cost@5": 0.0}
    (line,) = certainty_notes({"binning_errors": errors}, "auc")
    near = "auc 0.0003, ks 0.013, pr_auc 0.1"
    assert line == f"scores from bins are this near those of rows: {near}"
    assert certainty_notes({}, "auc") == []
    assert score_text(None) == "–"  # noqa: RUF001
