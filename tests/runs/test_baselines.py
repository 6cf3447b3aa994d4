"""Pooled XGBoost beside a run whose trees are the same: the same scores, to the last digit."""

import numpy as np
import pytest

from fedapp.report.summary import score_notes
from fedapp.runs.agreement import same_nodes
from fedapp.runs.baselines import order_range, run_baselines
from fedapp.runs.local import run_local
from tests.tables import write_rows


@pytest.fixture
def smooth(tmp_path):
    """Rows whose columns have many values, so that cuts follow the order of the rows."""
    rng = np.random.default_rng(4)
    columns = {name: rng.normal(size=2000) for name in "abcd"}
    signal = columns["a"] * columns["b"] + columns["c"] + rng.normal(0, 0.5, 2000)
    return write_rows(tmp_path / "smooth.csv", {**columns, "y": (signal > 0).astype(int)})


def test_a_vertical_run_scores_as_pooled_xgboost_and_its_nodes_are_counted(vertical, smooth):
    run = vertical(data=str(smooth), label="y", num_boost_round=3, max_depth=4, max_bin=8)
    folder = run_local(run)
    found = run_baselines(run, folder.path)
    scores = folder.summary["metrics"]["test"]
    assert {name: scores[name] for name in found["pooled"]} == pytest.approx(
        found["pooled"], rel=1e-9
    )
    n_same, n_nodes = found["same_nodes"]
    assert n_same == n_nodes > 30
    folder.add_to_summary({"baselines": found})
    line = f"trees: XGBoost's on the joined table, {n_nodes} of {n_nodes} nodes equal"
    assert line in score_notes(folder.summary)
    low, high = order_range(run, "logloss", 4)
    assert low <= high
    assert high - low > 1e-6  # other orders, other cuts


def test_pax_with_one_party_scores_as_pooled_xgboost(settings, smooth):
    run = settings(data=str(smooth), label="y", parties=1, num_boost_round=5, max_depth=4)
    folder = run_local(run)
    found, scores = run_baselines(run, folder.path), folder.summary["metrics"]["test"]
    assert "pr_auc" in found["pooled"]
    assert {name: scores[name] for name in found["pooled"]} == pytest.approx(
        found["pooled"], rel=1e-9
    )
    assert found["same_nodes"][0] == found["same_nodes"][1]


def test_nodes_below_one_that_differs_are_not_counted():
    def model(gain):
        tree = {
            "tree_param": {"size_leaf_vector": "1"},
            "left_children": [1, -1, -1],
            "right_children": [2, -1, -1],
            "split_conditions": [0.5, 1.0, 2.0],
            "loss_changes": [gain, 0, 0],
            "split_indices": [0, 0, 0],
            "default_left": [0, 0, 0],
            **{f"categories{part}": [] for part in ("", "_nodes", "_segments", "_sizes")},
        }
        return {"learner": {"gradient_booster": {"model": {"trees": [tree]}}}}

    other = float(np.nextafter(np.float32(3), np.float32(4)))
    assert same_nodes(model(3.0), model(3.0)) == (3, 3)
    assert same_nodes(model(3.0), model(other)) == (0, 3)
