"""Trees of limited leaves, grown level by level, are those of XGBoost's queue.

That whole runs grow XGBoost's trees is in ``test_exactness``.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fedapp.errors import ConfigError
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.trees.grow import leaves_under
from fedapp.trees.model import LEAF, check_trees
from fedapp.trees.queue import Queue, without_padding
from fedapp.trees.size import n_levels
from strategies.pax import PAX
from strategies.secureboost import SecureBoost
from tests.federated import model_of

POLICIES = "depthwise", "lossguide"

# The queue itself


def slow_queue(gains, policy, max_leaves, max_depth):
    """Paths of the split nodes in XGBoost's order: one at a time, from all that are evaluated."""
    order, queue, number = list[str](), ["r"], {"r": 0}
    while queue:
        key = (lambda path: number[path]) if policy == "depthwise" else None
        best = min(queue, key=key or (lambda path: (-gains[path], number[path])))
        queue.remove(best)
        if gains.get(best, 0) <= 0 or (max_leaves and len(order) + 1 >= max_leaves):
            continue
        order.append(best)
        for child in (best + "0", best + "1"):
            number[child] = len(number)
            if len(child) - 1 < max_depth and gains.get(child, 0) > 0:
                queue.append(child)
    return order


def level_by_level(gains, queue, max_depth):
    """Paths of the split nodes of a tree that grows as parties are asked; and its pieces."""
    tree, paths, open_nodes, asked = leaves_under([-1]), ["r"], [0], list[int]()
    for level in range(max_depth):
        asked.append(len(open_nodes))
        nodes = np.array([node for node in open_nodes if gains.get(paths[node], 0) > 0], np.int64)
        found = np.array([gains[paths[node]] for node in nodes], dtype=np.float32)
        chosen, may_grow = queue.chosen(tree, nodes, found)
        open_nodes = []
        for node, gain, grows in zip(nodes[chosen], found[chosen], may_grow[chosen], strict=True):
            tree["left"][node], tree["gain"][node] = len(tree), gain
            if grows and level + 1 < max_depth:
                open_nodes += [len(tree), len(tree) + 1]
            tree = np.concatenate((tree, leaves_under([node, node])))
            paths += [paths[node] + "0", paths[node] + "1"]
        if not open_nodes:
            break
    tree["weight"] = np.arange(len(tree))
    tree["value"] = tree["weight"] / 2
    finished, numbers, places = queue.finished(tree)
    padded, order = queue.padded(tree)
    np.testing.assert_array_equal(without_padding(padded), finished)
    check_trees(padded["left"], np.array([0, len(padded)]))
    assert sorted(order) == list(range(len(tree)))
    ends = np.argsort(order)[np.flatnonzero(tree["left"] == LEAF)]  # where rows end
    expected = finished["value"][places[tree["left"] == LEAF]]
    np.testing.assert_array_equal(padded["value"][ends], expected)
    split = [paths[numbers[node]] for node in np.flatnonzero(finished["left"] != LEAF)]
    by_child = sorted(split, key=lambda path: int(finished["left"][_at(path, finished)]))
    return by_child, finished, numbers, places, asked


def _at(path, tree):
    """The node that a path from the root leads to."""
    node = 0
    for side in path[1:]:
        node = int(tree["left"][node]) + int(side)
    return node


PATHS = ["r" + format(number, f"0{depth}b") for depth in range(1, 6) for number in range(2**depth)]


@given(
    gains=st.lists(st.integers(0, 6), min_size=len(PATHS) + 1, max_size=len(PATHS) + 1),
    policy=st.sampled_from(POLICIES),
    max_leaves=st.integers(0, 12),
    max_depth=st.integers(1, 6),
)
@examples(max_examples=40, deadline=None)
def test_level_by_level_ends_in_the_tree_of_the_queue(gains, policy, max_leaves, max_depth):
    by_path = dict(zip(["r", *PATHS], gains, strict=True))  # few gains, many of them equal
    expected = slow_queue(by_path, policy, max_leaves, max_depth)
    split, tree, numbers, places, _ = level_by_level(by_path, Queue(policy, max_leaves), max_depth)
    assert split == expected
    assert len(tree) == 2 * len(expected) + 1
    np.testing.assert_array_equal(places[numbers], np.arange(len(tree)))
    is_leaf = tree["left"] == LEAF
    np.testing.assert_array_equal(tree["gain"][is_leaf], 0)
    np.testing.assert_array_equal(tree["value"][is_leaf], numbers[is_leaf] / 2)
    for node in range(1, len(tree)):  # children still follow their parents
        assert tree["left"][tree["parent"][node]] in (node, node - 1)


def test_no_more_nodes_are_asked_for_than_may_be_split():
    gains = {path: 100 - len(path) for path in ["r", *PATHS]}
    *_, asked = level_by_level(gains, Queue("lossguide", 4), 6)
    # Three splits: the root, and both its children, below which nothing can be.
    assert asked == [1, 2, 2]
    *_, asked = level_by_level(gains, Queue("depthwise", 4), 6)
    assert asked == [1, 2]


@pytest.mark.parametrize(
    ("limits", "levels"), [((6, 0), 6), ((6, 4), 3), ((2, 9), 2), ((0, 9), 8), ((3, 1), 1)]
)
def test_a_tree_has_no_more_levels_than_leaves_allow(limits, levels):
    assert n_levels(*limits) == levels


# Runs


BY_GAIN = {"grow_policy": "lossguide", "max_leaves": 12, "max_depth": 0}


@pytest.mark.parametrize(
    ("limits", "rule"),
    [
        ({"max-depth": 0}, r"max-depth must be >= 1, or 0 .* got 0 with max-leaves=0"),
        ({"max-depth": 0, "max-leaves": 300}, r"max-depth must .* 1 to 256, got .*=300"),
        ({"max-leaves": -1}, "max-leaves must be >= 0, got -1"),
        ({"max-leaves": 2**15 + 1}, "max-leaves must be <= 32768, got 32769"),
        ({"grow-policy": "leafwise"}, "grow-policy must be one of 'depthwise' or 'lossguide'"),
    ],
)
def test_limits_that_no_tree_has_are_refused(limits, rule):
    with pytest.raises(ConfigError, match=rule):
        load_settings({"strategy": "pax", **limits})


@pytest.mark.parametrize("limits", [{"grow-policy": "lossguide"}, {"max-leaves": 7}])
def test_noise_has_no_gains_to_order_splits_by(limits):
    private = {"strategy": "pax", "pax.aggregation": "secure", "privacy.epsilon": 1.0}
    with pytest.raises(ConfigError, match=r"must be .* with privacy\.epsilon: splits are drawn"):
        PAX.section_settings(load_settings({**private, **limits}))


def test_exchanges_are_planned_by_the_leaves():
    settings = load_settings({"strategy": "pax", **BY_GAIN, "max_leaves": 9})
    assert (settings.n_levels, PAX.exchanges_a_round(settings)) == (8, 9)
    assert PAX.planned(settings)["levels"] == 8
    assert SecureBoost.planned(settings)["max_leaves"] == 9


def test_parties_that_merge_bins_grow_by_gain_too(made):
    # Each node reports its own sums, as a child's do not follow from its parent's.
    run = made("pax", parties=2, least_bin_rows=5, **{**BY_GAIN, "max_leaves": 6})
    model = model_of(run_local(run))
    assert {len(tree) for tree in model.trees} == {11}
    assert all(((tree["gain"] > 0) == (tree["left"] != LEAF)).all() for tree in model.trees)
