"""Draws of columns for levels and nodes, and what constraints say of a path."""

import numpy as np
import pytest

from fedapp.errors import ConfigError
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.trees.limits import Limits, constraints_of
from fedapp.trees.model import LEAF, NODE
from strategies.run import check_read
from tests.tables import made_columns

ALL = np.ones((2, 20), dtype=bool)
PLACES = [(0, 1), (0, 2), (1, 1), (1, 2)]


def chain(*columns):
    """A tree whose left children are split by these columns in turn."""
    tree = np.zeros(2 * len(columns) + 1, dtype=NODE)
    tree["left"], tree["parent"] = LEAF, -1
    for place, column in enumerate(columns):
        node = 2 * place - 1 if place else 0
        left = 2 * place + 1
        tree["left"][node], tree["column"][node] = left, column
        tree["parent"][left : left + 2] = node
    return tree


def test_a_level_draws_once_for_a_tree_and_a_node_of_these():
    limits = Limits(seed=3, round_id=5, bylevel=0.5, bynode=0.3)
    level = Limits(seed=3, round_id=5, bylevel=0.5).columns(1, PLACES, (), ALL)
    np.testing.assert_array_equal(level[0], level[1])
    assert (level[0] != level[2]).any()
    assert level.sum(axis=1).tolist() == [10] * 4
    nodes = limits.columns(1, PLACES, (), ALL)
    assert nodes.sum(axis=1).tolist() == [3] * 4
    assert not (nodes & ~level).any()
    assert (nodes[0] != nodes[1]).any()
    np.testing.assert_array_equal(nodes, limits.columns(1, PLACES, (), ALL))
    allowed = np.arange(20)[None] < 7  # int(0.35 * 20) of a tree
    limits = Limits(bylevel=0.5, bynode=0.5)
    assert limits.columns(0, [(0, 0)], (), allowed).sum() == int(0.5 * int(0.5 * 7))
    few = Limits(bylevel=0.01, bynode=0.01)
    assert few.columns(0, [(0, 0)], (), allowed).sum() == 1


def test_a_path_may_go_on_with_the_groups_that_have_all_of_it():
    limits = Limits(interactions=(frozenset({0, 1}), frozenset({1, 2, 3}), frozenset({5})))
    allowed = np.ones((1, 7), dtype=bool)
    tree = chain(1, 3, 6)

    def after(node):
        return np.flatnonzero(limits.columns(0, [(0, node)], [tree], allowed)[0]).tolist()

    assert after(0) == list(range(7))
    assert after(1) == [0, 1, 2, 3]  # below a split by 1
    assert after(3) == [1, 2, 3]  # and by 3
    assert after(5) == [1, 3, 6]  # 6 is in no group


def test_below_a_split_of_a_held_column_weights_lie_beyond_its_middle():
    tree = chain(0, 1)
    tree["weight"] = [0, -1, 3, -2, 0.5]
    limits = Limits(monotone=np.array([1, -1], dtype=np.int8))
    widest = float(np.finfo(np.float32).max)
    assert limits.bounds(tree, 1) == (-widest, 1.0)
    assert limits.bounds(tree, 2) == (1.0, widest)
    assert limits.bounds(tree, 3) == (-0.75, 1.0)
    assert limits.bounds(tree, 4) == (-widest, -0.75)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"monotone-constraints": "age"}, "must be columns with 1, 0 or -1, .*, got age"),
        ({"monotone-constraints": "age:2"}, "must be columns with 1, 0 or -1, .*, got age:2"),
        ({"monotone-constraints": "a:1,a:-1"}, "must name a column once, got a twice"),
        ({"interaction-constraints": "a,b"}, r"must be groups of columns, as \[.*, got a,b"),
        ({"interaction-constraints": "[a,b],"}, r"must be groups of columns, .* got \[a,b\],"),
        ({"colsample-bynode": 0.0}, "colsample-bynode must be > 0"),
        ({"strategy": "bagging", "monotone-constraints": "a:1"}, "must be omitted for bagging"),
    ],
)
def test_constraints_of_another_form_are_refused(given, rule):
    with pytest.raises(ConfigError, match=rule):
        check_read(load_settings(given))


def test_columns_that_are_not_there_are_named():
    with pytest.raises(ValueError, match=r"monotone-constraints must name columns .* got c"):
        constraints_of("a:1,c:-1", "", ("a", "b"))
    with pytest.raises(ValueError, match=r"interaction-constraints must name columns .* got d"):
        constraints_of("", "[a,d]", ("a", "b"))


def test_monotone_constraints_beside_categories_are_refused(made):
    columns = made_columns("binary:logistic")
    columns["f"] = np.where(np.arange(len(columns["y"])) % 2, "red", "blue")
    run = made(columns=columns, parties=1, monotone_constraints="a:1")
    with pytest.raises(ConfigError, match="must be empty where a column has categories"):
        run_local(run)
