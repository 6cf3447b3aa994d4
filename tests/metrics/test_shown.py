"""The table of what each objective has: scores, bounds, intervals, curves, a calibration."""

import numpy as np
import pytest

from fedapp import metrics
from fedapp.errors import ConfigError
from fedapp.metrics.names import SHOWN
from fedapp.runs.baselines import baseline_rows
from fedapp.settings import load_settings
from fedapp.trees.objective import n_outputs, transform
from tests.runs.test_scores_of_runs import BINARY, OBJECTIVES, made, requested, roles_of

RANGE = {"residual_range": 8.0}


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
    shown = SHOWN[objective]
    sums = metrics.statistics(objective, *arrays, 4096, 8.0, extra=extra)
    found = metrics.scores(objective, sums, extra)
    assert kinds(found) == {*shown.scores, *shown.on_request}
    assert not np.isnan(list(found.values())).any()
    assert metrics.pooled(objective, *arrays, extra).keys() == found.keys()
    assert kinds(metrics.binning_errors(objective, sums, extra)) == {*shown.bounded}
    assert kinds(metrics.intervals(objective, sums, extra=extra, **RANGE)) == {*shown.spans}
    assert metrics.curves(objective, sums, **RANGE).keys() == {*shown.curves}
    assert metrics.loss_metric(objective) in found
    assert all(metrics.is_metric(name) for name in found)
    how = {"objective": objective, "calibration": "platt", **roles_of(objective)}
    if shown.has_calibration:
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
