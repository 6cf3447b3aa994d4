"""Bagging moves by the mean of the parties' steps; cyclic training takes turns by name."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import xgboost

from fedapp.runs.baselines import baseline_rows, xgboost_parameters
from fedapp.runs.local import run_local
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import base_score, label_sums
from fedapp.trees.predict import predict_margins
from tests.federated import model_of, summary_of
from tests.network import fails_from, run, step_of
from tests.pooled import pooled_booster
from tests.reference import compare_trees
from tests.tables import made_columns
from tests.transcript import arrays_of, listen


@pytest.fixture
def bag(made):
    """Settings of a run of bagging, by its objective."""
    return partial(made, "bagging")


# One party


def test_one_party_is_xgboost_with_weights_penalties_and_local_rounds(bag):
    penalties = {"lambda": 0.5, "alpha": 0.3, "gamma": 0.2, "min_child_weight": 3.0}
    columns = made_columns("reg:squarederror")
    columns["w"] = np.random.default_rng(4).uniform(0, 3, 400).round(3)
    how = {"columns": columns, "weight": "w", "parties": 1, **penalties}
    once = bag("reg:squarederror", **how, num_boost_round=6)
    twice = bag("reg:squarederror", **how, num_boost_round=3, bagging__local_rounds=2)
    for settings in (once, twice):
        found = compare_trees(model_of(run_local(settings)), pooled_booster(once))
        assert (found.n_trees, found.differing) == (6, 0)
        assert found.leaf_error <= 1e-6


# Several parties


def moved_margins(settings, n_rounds):
    """Bagging as its docstring says it, with XGBoost's own predictions as the parties' steps:
    values of all training rows, and their margins."""
    parties = baseline_rows(settings)[1].values()
    values = [rows.values[rows.split.train] for rows in parties]
    labels = [rows.labels[rows.split.train] for rows in parties]
    every, whole = np.concatenate(labels), np.concatenate(values)
    ones = np.ones(len(every), np.float32)
    split = SimpleNamespace(train=np.arange(len(every)))
    rows = SimpleNamespace(labels=every, weights=ones, columns=(), split=split)
    parameters = xgboost_parameters(settings, rows)
    sums = label_sums(settings.objective, every, ones, 3)
    score = base_score(settings.objective, sums, len(every))
    nothing = Ensemble(settings.objective, score, (), (), ())
    margins = np.tile(nothing.base_margin, (len(every), 1))
    for _ in range(n_rounds):
        parts = np.split(margins, np.cumsum([len(rows) for rows in values])[:-1])
        mean = np.zeros_like(margins, dtype=np.float64)
        for own, truth, before in zip(values, labels, parts, strict=True):
            trained = xgboost.train(parameters, xgboost.DMatrix(own, truth, base_margin=before), 1)
            matrix = xgboost.DMatrix(whole, base_margin=margins)
            after = trained.predict(matrix, output_margin=True).reshape(margins.shape)
            mean += (after - margins) * (len(own) / len(margins))
        margins = (margins + mean).astype(np.float32)
    return whole, margins


def test_margins_move_by_the_mean_of_the_parties_steps(bag):
    settings = bag("multi:softprob", partition="sizes:0.6,0.3,0.1", num_boost_round=3)
    values, expected = moved_margins(settings, 3)
    margins = predict_margins(model_of(run_local(settings)), values)
    np.testing.assert_allclose(margins, expected, atol=2e-5)


def test_a_party_of_one_class_and_one_of_no_weight_train(settings, write_table, sites):
    tables = [
        write_table("both", w=[1] * 40),
        write_table("one", seed=1, y=[1] * 40, w=[1] * 40),
        write_table("none", seed=2, w=[0] * 40),
    ]
    nodes = sites(*({"name": path.stem, "data": path, "weight": "w"} for path in tables))
    folder = run_local(settings(strategy="bagging", weight="w"), nodes)
    trees = model_of(folder).trees
    assert len(trees) == 6
    assert all((tree["value"] == 0).all() for tree in trees[1::3])  # names: both, none, one
    assert all((tree["value"] != 0).any() for tree in trees[2::3])


def test_a_tree_travels_to_a_party_once_and_without_gains(bag):
    folder, app = listen(bag(num_boost_round=3))
    boosts = [arrays_of(request) for kind, request, _ in app.heard if kind == "train.bagging_boost"]
    assert not {"gains", "hessians", "weights"} & set(boosts[0])
    nodes = sum(len(tree) for tree in model_of(folder).trees[:6])  # the last round's: at the end
    assert sum(len(arrays["lefts"]) for arrays in boosts) == 3 * nodes


def test_a_lost_party_is_left_out_and_the_others_weigh_more(bag):
    left = model_of(run(bag(num_boost_round=3, min_parties=2), app=fails_from(4)))
    whole = model_of(run_local(bag(num_boost_round=3)))
    assert len(left.trees) == 3 + 2 + 2
    for ours, theirs in zip(left.trees[:3], whole.trees[:3], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # In the second round the first party grew the same tree, for 1/2 in place of about 1/3.
    leaf = int(np.argmax(np.abs(whole.trees[3]["value"])))
    ratio = left.trees[3]["value"][leaf] / whole.trees[3]["value"][leaf]
    assert ratio == pytest.approx(1.5, abs=0.02)


# Cyclic training


@pytest.fixture
def turns(made):
    """Settings of a cyclic run, by its objective."""
    return partial(made, "cyclic")


def test_one_party_boosts_at_a_time_and_all_hear_of_it(turns):
    _, app = listen(turns("multi:softprob", num_boost_round=4))
    steps = {}
    for request, reply in app.of_kind("cyclic_turn"):
        n_sent, grown = (len(arrays_of(message)["sizes"]) for message in (request, reply))
        party = request.metadata.dst_node_id
        steps.setdefault(step_of(request), []).append((party, n_sent, grown))
    for turn, replies in enumerate(steps[step] for step in sorted(steps)):
        assert len(replies) == 3
        assert {n_sent for _, n_sent, _ in replies} == {3 if turn else 0}
        assert [grown for _, _, grown in sorted(replies)] == [
            3 if party == turn % 3 else 0 for party in range(3)
        ]


def test_a_tree_is_the_one_its_party_grows_from_the_model_before_it(turns):
    shorter, whole = (model_of(run_local(turns(num_boost_round=n))) for n in (2, 3))
    for tree, other in zip(shorter.trees, whole.trees, strict=False):
        np.testing.assert_array_equal(tree, other)
    roots = [float(tree["hessian"][0]) for tree in whole.trees]
    assert 3 * max(roots) < 400 / 4  # a third of the rows, hessians of 1/4 at most


def test_the_next_party_takes_the_turn_of_one_that_fails(turns):
    settings = turns(num_boost_round=4, min_parties=2, valid_fraction=0.0)
    folder = run(settings, app=fails_from(4))
    summary = summary_of(folder)
    assert [gone["party"] for gone in summary["left_out"]] == ["party-2"]
    assert summary["trees"] == 4
    assert summary["exchanges"] == 3 + 5 + 1
    assert [line["round"] for line in folder.rounds] == [1, 2, 3, 4]


def test_a_party_that_fails_beside_the_turn_changes_no_tree(turns):
    # Party-2 fails while party-3 has its turn.
    settings, whole = turns(num_boost_round=3, min_parties=2), turns(num_boost_round=3)
    run(settings, app=fails_from(5))
    run_local(whole)
    for tree, other in zip(model_of(settings).trees, model_of(whole).trees, strict=True):
        np.testing.assert_array_equal(tree, other)
