"""Objectives, growth, prediction, and the model on disk."""

import json

import numpy as np
import pytest

from fedapp.errors import DataError
from fedapp.histograms.bins import Cuts
from fedapp.histograms.split import CategoryRules, Penalties
from fedapp.records.document import from_text, load, to_text
from fedapp.trees.grow import Growth, Shape
from fedapp.trees.model import LEAF, NODE, Ensemble, importance
from fedapp.trees.objective import base_margin, gradients, transform
from fedapp.trees.predict import predict_margins
from fedapp.trees.rounds import Sampling
from fedapp.trees.sets import NO_SET

ONE = np.ones(1, np.float32)


def stump(threshold=1.0, default_left=False):
    tree = np.zeros(3, dtype=NODE)
    tree["left"], tree["parent"] = [1, LEAF, LEAF], [-1, 0, 0]
    tree["threshold"][0], tree["default_left"][0] = threshold, default_left
    tree["value"], tree["gain"], tree["set"] = [0, -0.5, 0.25], [3, 0, 0], NO_SET
    return tree


def ensemble(*trees, classes=("0", "1")):
    return Ensemble("binary:logistic", np.float32([0.3]), ("a", "b"), classes, trees)


def test_logistic_gradients_are_those_of_the_loss():
    found = gradients("binary:logistic", np.float32([[0.0]]), ONE, np.float32([2]))
    assert found.tolist() == [[[-1.0, 0.5]]]


def test_softmax_hessians_are_twice_p_times_1_minus_p():
    found = gradients("multi:softprob", np.zeros((1, 4), np.float32), 2 * ONE, ONE)
    np.testing.assert_allclose(found[0, :, 0], [0.25, 0.25, -0.75, 0.25])
    np.testing.assert_allclose(found[0, :, 1], [0.375] * 4)


def test_squared_error_gradients_are_residuals():
    found = gradients("reg:squarederror", np.float32([[3.0]]), ONE, np.float32([0.5]))
    assert found.tolist() == [[[1.0, 0.5]]]


def test_the_base_margin_of_logistic_loss_is_a_logit():
    margin = base_margin("binary:logistic", np.float32([0.3]))
    assert transform("binary:logistic", margin[None])[0, 0] == pytest.approx(0.3)


def test_extreme_margins_stay_finite():
    margins = np.float32([[1e4], [-1e4]])
    assert transform("binary:logistic", margins)[:, 0].tolist() == pytest.approx([1, 0])
    found = gradients("binary:logistic", margins, np.float32([0, 1]), np.ones(2, np.float32))
    assert np.isfinite(found).all()
    assert (found[:, 0, 1] > 0).all()


@pytest.mark.parametrize(("value", "left"), [(0.5, True), (1.0, False), (np.nan, False)])
def test_a_row_goes_left_below_the_threshold(value, left):
    model = ensemble(stump())
    margin = predict_margins(model, np.float32([[value, 0]]))[0, 0]
    leaf = np.float32(-0.5 if left else 0.25)
    assert margin == model.base_margin + leaf


def test_a_missing_value_follows_the_default():
    model = ensemble(stump(default_left=True))
    margin = predict_margins(model, np.float32([[np.nan, 0]]))[0, 0]
    assert margin == model.base_margin + np.float32(-0.5)


def test_a_model_survives_the_disk_bit_for_bit(tmp_path):
    tree = stump(np.float32(0.1) + np.float32(1e-8))
    tree["value"][1] = np.nextafter(np.float32(0.1), np.float32(1))
    path = tmp_path / "model.json"
    path.write_text(to_text(ensemble(tree)))
    again = load(path, Ensemble)
    assert again.trees[0].tobytes() == tree.tobytes()
    assert again.base_score == np.float32(0.3)
    assert to_text(again) == path.read_text()


def of_classes(scores):
    names = ("a", "b"), ("x", "y", "z")
    return Ensemble("multi:softprob", np.float32(scores), *names, (stump(), stump(), stump()))


def test_a_model_of_classes_says_where_each_starts():
    text = to_text(of_classes([0.25, -1.5, 1.25]))
    assert json.loads(text)["base_score"] == [0.25, -1.5, 1.25]
    assert from_text(text, Ensemble).base_score.tolist() == [0.25, -1.5, 1.25]


@pytest.mark.parametrize("score", [[0.1, 0.2], [0.1, 0.2, float("nan")], "half", None])
def test_a_base_score_that_is_not_one_a_class_is_refused(score):
    text = json.dumps({**json.loads(to_text(of_classes([0, 0, 0]))), "base_score": score})
    with pytest.raises(DataError, match="model must be JSON of fedapp's format"):
        from_text(text, Ensemble)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"format": 9}, "format must be 3 for fedapp .+, got 9: a newer fedapp may read it$"),
        ({"format": 2}, "format must be 3 for fedapp .+, got 2: train the model again$"),
        ({"format": 0}, "format must be 3 for fedapp .+, got 0: train the model again$"),
        ({"objective": "rank:pairwise"}, "rank:pairwise"),
        ({"trees": [{}]}, r"trees\[0\] must have left, column, threshold, "),
    ],
)
def test_rubbish_is_no_model(change, rule):
    document = {**json.loads(to_text(ensemble(stump()))), **change}
    with pytest.raises(DataError, match=rule):
        from_text(json.dumps(document), Ensemble)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("left", [7, -1, -1], "lefts must lead to two later nodes"),
        ("left", [0, -1, -1], "lefts must lead to two later nodes"),
        ("left", [-1, -1, -1], "lefts must reach every node once"),
        ("column", [2, 0, 0], "columns must be 0 to 1"),
        ("column", [-1, 0, 0], "columns must be 0 to 1"),
    ],
)
def test_a_tree_that_leads_nowhere_is_refused(field, value, rule):
    document = json.loads(to_text(ensemble(stump())))
    document["trees"][0][field] = value
    with pytest.raises(DataError, match=rule):
        from_text(json.dumps(document), Ensemble)


def test_there_is_no_model_without_a_file(tmp_path):
    with pytest.raises(DataError, match=r"^model must be a file, got .*none\.json$"):
        load(tmp_path / "none.json", Ensemble)


def test_importance_adds_gains_and_splits():
    found = {"gain": {"a": 3.0}, "total_gain": {"a": 6.0}, "count": {"a": 2}}
    assert importance(ensemble(stump(), stump())) == found


def grown(max_depth):
    cuts = Cuts(np.float32([1, 2, 3, 9]), np.array([0, 4]), np.float32([-1]))
    shape = Shape(max_depth, 0.5, Penalties(1.0, 0.0, 0.0, 0.0), CategoryRules(4, 64))
    growth = Growth(1, cuts, np.ones((1, 1), dtype=bool), shape)
    growth.set_roots(np.array([[2.0, 8.0]]))
    return growth


LEVEL = np.array([[[-4.0, 2.0], [6.0, 3.0], [-1.0, 1.0], [1.0, 2.0]]])
NONE_MISSING = np.zeros((1, 1), dtype=np.int32)


def test_the_lighter_child_is_asked_for_and_the_other_is_the_difference():
    growth = grown(3)
    routes, _ = growth.split(LEVEL, NONE_MISSING)
    assert routes["threshold"].tolist() == [1.0]
    assert growth.wanted.tolist() == [[0, 1]]
    left = LEVEL.copy()
    left[0, 1:] = 0
    assert len(growth.split(left, NONE_MISSING)[0]) == 1
    trees = growth.grown().trees
    assert trees[0]["left"].tolist() == [1, LEAF, 3, LEAF, LEAF]


def test_a_tree_ends_at_max_depth():
    growth = grown(1)
    growth.split(LEVEL, NONE_MISSING)
    assert not growth.growing
    assert growth.wanted.tolist() == []


def test_leaves_are_weights_times_eta():
    growth = grown(1)
    growth.split(LEVEL, NONE_MISSING)
    tree = growth.grown().trees[0]
    np.testing.assert_allclose(tree["weight"][1:], [4 / 3, -6 / 7], rtol=1e-6)
    np.testing.assert_allclose(tree["value"], [0, 2 / 3, -3 / 7], rtol=1e-6)


def test_every_tree_draws_its_share_of_the_columns():
    allowed = Sampling(1, 0.5).columns(0, 3, 10)
    assert allowed.sum(axis=1).tolist() == [5, 5, 5]
    assert (allowed[0] != allowed[1]).any()
    assert (Sampling(1, 0.5).columns(0, 3, 10) == allowed).all()
    assert (Sampling(1, 0.5).columns(1, 3, 10) != allowed).any()
    assert Sampling(1, 0.01).columns(0, 1, 10).sum() == 1
