"""PAX as a whole: what it sends, how often, and what comes out."""

import numpy as np
import pytest

from fedapp.errors import ConfigError
from fedapp.run_folder import Checkpoints
from fedapp.runs.local import run_local
from fedapp.trees.model import LEAF
from strategies.pax_sums import share_bins
from tests.federated import lines_of, model_bytes, model_of, summary_of
from tests.transcript import arrays_of, listen, scalars_of


def test_the_smaller_child_alone_is_asked_for(settings):
    _, app = listen(settings(max_depth=3, parties=1, num_boost_round=1))
    asked = app.of_kind("pax_grow")
    assert [len(arrays_of(request)["wanted_nodes"]) for request, _ in asked] == [1, 1, 2]
    whole, *below = (arrays_of(reply)["histograms"][..., 1].sum() for _, reply in asked)
    assert max(below) < whole / 2


def test_bins_are_divided_by_rows_and_a_small_party_gets_few(settings):
    assert share_bins(255, {"a": 2721, "b": 265, "c": 13}) == {"a": 231, "b": 23, "c": 2}
    sizes = {"partition": "sizes:0.9,0.08,0.02", "pax__bins": "share"}
    _, app = listen(settings(**sizes, max_bin=50, valid_fraction=0.0))
    asked = [scalars_of(request)["n_bins"] for request, _ in app.of_kind("pax_sketch")]
    assert sorted(asked) == [2, 4, 45]


@pytest.mark.parametrize(
    ("data", "objective", "n_bins"),
    [("breast-cancer", "binary:logistic", 30), ("diabetes", "reg:squarederror", 10)],
)
def test_classification_keeps_the_finest_resolution_and_regression_the_coarsest(
    settings, monkeypatch, data, objective, n_bins
):
    states, save = [], Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda *given: states.append(given[2]) or save(*given))
    parties = {"partition": "sizes:0.75,0.25", "parties": 2}
    run_local(settings(data=data, objective=objective, max_bin=40, **parties))
    assert states[0].boosting.cuts.widths.max() == n_bins  # of a column, after the fusion


DEFAULT = {"early_stopping_rounds": "auto", "valid_fraction": 0.5, "test_fraction": 0.0}
DEFAULT |= {"parties": 2, "label": "y"}


@pytest.mark.by_default("400-pax", "198-pax", "400-cyclic")
@pytest.mark.parametrize("strategy", ["pax", "bagging", "cyclic"])
@pytest.mark.parametrize("n_rows", [400, 198])
def test_a_default_run_stops_by_the_loss_of_enough_validation_rows(
    settings, write_table, strategy, n_rows
):
    given = {"data": str(write_table(n_rows=n_rows)), "num_boost_round": "auto", "eta": 1.0}
    folder = run_local(settings(strategy=strategy, **DEFAULT, **given))
    summary, lines = summary_of(folder), lines_of(folder.rounds)
    if n_rows == 198:  # of which too few are to look at
        assert (len(lines), summary["best_round"]) == (100, None)
        assert summary["boosting"]["early_stopping_rounds"] == 0
        return
    losses = [line["valid"]["logloss"] for line in lines]
    assert summary["best_round"] == int(np.argmin(losses)) + 1 == len(lines) - 20
    boosting = {"num_boost_round": 300, "eta": 1.0, "early_stopping_rounds": 20}
    assert summary["boosting"] == {**boosting, "scale_pos_weight": 1.0, "min_child_weight": 1.0}


def test_a_default_run_goes_on_where_there_is_nothing_to_stop_by(settings, write_table, caplog):
    labels = [0] * 398 + [1] * 2
    given = {"data": str(write_table(n_rows=400, y=labels)), "seed": 5}
    one = {**DEFAULT, "parties": 1}
    folder = run_local(settings(**one, **given, num_boost_round=25, eval_metric="auc"))
    summary = summary_of(folder)
    assert summary["metrics"]["valid"]["auc"] is None
    assert (summary["trees"], summary["best_round"]) == (25, None)
    assert "early stopping is off: it must have a validation auc to look at" in caplog.text


@pytest.mark.parametrize(
    ("parties", "partition", "bins"),
    [(4, "iid", "share"), (5, "iid", "equal"), (2, "sizes:0.81,0.19", "equal")],
)
def test_bins_are_shared_where_no_party_is_small(settings, parties, partition, bins):
    given = {"parties": parties, "partition": partition, "num_boost_round": 1, "max_bin": 16}
    folders = [run_local(settings(**given)), run_local(settings(**given, pax__bins=bins))]
    assert summary_of(folders[0])["bins"] == bins
    assert model_bytes(folders[0]) == model_bytes(folders[1])


def test_early_stopping_needs_rows_to_look_at(settings, write_table):
    few = {"test_fraction": 0.0, "valid_fraction": 0.01, "early_stopping_rounds": 2}
    run = settings(data=str(write_table(n_rows=8)), label="y", parties=1, **few)
    with pytest.raises(ConfigError, match="valid-fraction must leave validation rows"):
        run_local(run)


def test_a_tree_splits_only_the_columns_it_drew_and_sums_the_rows_it_drew(settings):
    drawn = {"num_boost_round": 6, "max_depth": 4, "colsample_bytree": 0.1, "subsample": 0.5}
    trees = model_of(run_local(settings(**drawn))).trees
    used = [set(tree["column"][tree["left"] != LEAF].tolist()) for tree in trees]
    assert all(1 <= len(columns) <= 3 for columns in used)
    assert len(set().union(*used)) > 3
    whole = model_of(run_local(settings())).trees[0]["hessian"][0]
    assert 0.35 * whole < trees[0]["hessian"][0] < 0.65 * whole
