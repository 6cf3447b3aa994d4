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
from fedapp.trees.sets import NO_SET


def stump(threshold=1.0, default_left=False):
    tree = np.zeros(3, dtype=NODE)
    tree["left"], tree["parent"] = [1, LEAF, LEAF], [-1, 0, 0]
    tree["threshold"][0], tree["default_left"][0] = threshold, default_left
    tree["value"], tree["gain"], tree["set"] = [0, -0.5, 0.25], [3, 0, 0], NO_SET
    return tree


def ensemble(*trees, classes=("0", "1")):
    return Ensemble("binary:logistic", np.float32([0.3]), ("a", "b"), classes, trees)


def test_a_model_survives_the_disk_bit_for_bit(tmp_path):
    tree = stump(np.float32(0.1) + np.float32(1e-8))
    tree["value"][1] = np.nextafter(np.float32(0.1), np.float32(1))
    path = tmp_path / "model.json"
    path.write_text(to_text(ensemble(tree)))
    again = load(path, Ensemble)
    assert again.trees[0].tobytes() == tree.tobytes()
    assert again.base_score == np.float32(0.3)
    assert to_text(again) == path.read_text()


def in_tree(field, value):
    def change(document):
        document["trees"][0][field] = value

    return change


FORMAT = "format must be 3 for fedapp .+, got"
ASTRAY = "lefts must lead to two later nodes"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        *(
            ({"base_score": score}, "model must be JSON of fedapp's format")
            for score in ([0.1, 0.2], [float("nan")], "half", None)
        ),
        ({"format": 9}, f"{FORMAT} 9: a newer fedapp may read it$"),
        ({"format": 2}, f"{FORMAT} 2: train the model again$"),
        ({"format": 0}, f"{FORMAT} 0: train the model again$"),
        ({"objective": "rank:pairwise"}, "rank:pairwise"),
        ({"trees": [{}]}, r"trees\[0\] must have left, column, threshold, "),
        (in_tree("left", [7, -1, -1]), ASTRAY),
        (in_tree("left", [0, -1, -1]), ASTRAY),
        (in_tree("left", [-1, -1, -1]), "lefts must reach every node once"),
        (in_tree("column", [2, 0, 0]), "columns must be 0 to 1"),
        (in_tree("column", [-1, 0, 0]), "columns must be 0 to 1"),
    ],
)
def test_rubbish_is_no_model(change, rule):
    document = json.loads(to_text(ensemble(stump())))
    if callable(change):
        change(document)
    else:
        document |= change
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


def test_a_tree_ends_at_max_depth_in_weights_times_eta():
    growth = grown(1)
    growth.split(LEVEL, NONE_MISSING)
    assert not growth.growing
    assert growth.wanted.tolist() == []
    tree = growth.grown().trees[0]
    np.testing.assert_allclose(tree["weight"][1:], [4 / 3, -6 / 7], rtol=1e-6)
    np.testing.assert_allclose(tree["value"], [0, 2 / 3, -3 / 7], rtol=1e-6)
