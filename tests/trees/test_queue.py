"""Trees of limited leaves, grown level by level, are those of XGBoost's queue."""

import json

import numpy as np
import pytest
import xgboost
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fedapp.errors import ConfigError
from fedapp.records.document import load
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.settings import load_settings
from fedapp.trees.grow import leaves_under
from fedapp.trees.model import LEAF, Ensemble, check_trees
from fedapp.trees.predict import predict_margins
from fedapp.trees.queue import Queue, without_padding
from fedapp.trees.size import n_levels
from strategies.pax import PAX
from strategies.secureboost import SecureBoost
from tests.network import die, resumed
from tests.network import run as run_network
from tests.random_tables import differences, random_case, seeds
from tests.strategies.test_secureboost import CREDIT, DEFAULT, first_rows

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


@pytest.mark.slow
@given(
    gains=st.lists(st.integers(0, 6), min_size=len(PATHS) + 1, max_size=len(PATHS) + 1),
    policy=st.sampled_from(POLICIES),
    max_leaves=st.integers(0, 12),
    max_depth=st.integers(1, 6),
)
@examples(max_examples=100, deadline=None)
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


def growth_of(seed):
    """Draws of settings for ``random_case``."""
    rng = np.random.default_rng([7, seed])
    drawn = {"grow-policy": str(rng.choice(POLICIES))}
    drawn["max-leaves"] = int(rng.choice([0, 1, 2, 3, 5, 8, 20]))
    no_depth = {"max-depth": 0} if drawn["max-leaves"] and rng.random() < 0.5 else {}
    return {**drawn, **no_depth}


@pytest.mark.parametrize("seed", seeds(240, (0, 1, 2, 150, 210)))
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_random_tables_grow_xgboosts_trees(vertical, tmp_path, strategy, seed):
    case = random_case(tmp_path / "random.csv", seed, strategy)
    run = vertical(strategy=strategy, **{**case, **growth_of(seed)})
    assert differences(run, run_local(run)) == []


LIMITS = [
    {"grow_policy": "lossguide", "max_leaves": 12, "max_depth": 0},
    {"grow_policy": "lossguide", "max_depth": 4},
    {"max_leaves": 11, "max_depth": 5},
]


@pytest.mark.slow
@pytest.mark.parametrize("source", [CREDIT, DEFAULT])
@pytest.mark.parametrize(("strategy", "limits"), [("pax", LIMITS[0]), ("secureboost", LIMITS[0])])
def test_real_rows_grow_xgboosts_trees(real_data, vertical, tmp_path, source, strategy, limits):
    name, label, drop = source
    data = first_rows(real_data / name, 1000, tmp_path / "rows.csv", drop)
    of_method = {"parties": 1, "max_bin": 64} if strategy == "pax" else {"parties": 2}
    given = {"label": label, "num_boost_round": 4}
    run = vertical(strategy=strategy, data=data, **given, **of_method, **limits)
    folder = run_local(run)
    assert differences(run, folder) == []
    model = load(folder.path / "model.json", Ensemble)
    assert {(len(tree) + 1) // 2 for tree in model.trees} == {12}
    assert max(_depth(tree) for tree in model.trees) > 4
    booster = xgboost.Booster(model_file=folder.path / "model.xgb.json")
    values = np.random.default_rng(2).normal(40, 30, (500, len(model.columns))).astype(np.float32)
    ours = predict_margins(model, values)[:, 0]
    matrix = xgboost.DMatrix(values, feature_names=booster.feature_names)
    np.testing.assert_array_equal(booster.predict(matrix, output_margin=True), ours)


def _depth(tree):
    depths = np.zeros(len(tree), dtype=int)
    for node in range(1, len(tree)):
        depths[node] = depths[tree["parent"][node]] + 1
    return int(depths.max())


@pytest.mark.by_default("limits0")
@pytest.mark.parametrize("limits", LIMITS)
def test_three_parties_grow_the_tree_of_one_in_the_clear_and_under_masks(made, limits):
    more = {"num_boost_round": 3, "max_bin": 64, "test_fraction": 0.0}
    trees = []
    for parties, aggregation in ((1, "plain"), (3, "plain"), (1, "secure"), (3, "secure")):
        how = {"pax__aggregation": aggregation, "pax__bins": "equal", "parties": parties}
        folder = run_local(made("pax", "multi:softprob", **{**more, **how, **limits}))
        trees.append(load(folder.path / "model.json", Ensemble).trees)
    assert sum(map(len, trees[0])) > 80
    for one, three in (trees[:2], trees[2:]):
        for tree, other in zip(one, three, strict=True):
            for name in ("left", "column", "threshold", "default_left"):
                np.testing.assert_array_equal(tree[name], other[name])
            np.testing.assert_allclose(tree["gain"], other["gain"], rtol=1e-4)
            np.testing.assert_allclose(tree["value"], other["value"], rtol=1e-5, atol=1e-7)


def test_rounds_are_scored_by_the_leaves_of_the_model(made):
    # What parties have added up is what the finished model predicts.
    folder = run_local(made("pax", parties=2, num_boost_round=4, **LIMITS[0]))
    last = json.loads((folder.path / "rounds.jsonl").read_text().splitlines()[-1])
    assert last["valid"]["logloss"] == pytest.approx(
        folder.summary["metrics"]["valid"]["logloss"], rel=1e-6
    )


@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
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
def test_limits_that_no_tree_has_are_refused(strategy, limits, rule):
    with pytest.raises(ConfigError, match=rule):
        load_settings({"strategy": strategy, **limits})


def test_noise_has_no_gains_to_order_splits_by():
    private = {"strategy": "pax", "pax.aggregation": "secure", "privacy.epsilon": 1.0}
    for limits in ({"grow-policy": "lossguide"}, {"max-leaves": 7}):
        with pytest.raises(
            ConfigError, match=r"must be .* with privacy\.epsilon: splits are drawn"
        ):
            PAX.section_settings(load_settings({**private, **limits}))


def test_exchanges_are_planned_by_the_leaves():
    limits = {"grow_policy": "lossguide", "max_leaves": 9, "max_depth": 0}
    settings = load_settings({"strategy": "pax", **limits})
    assert (settings.n_levels, PAX.exchanges_a_round(settings)) == (8, 9)
    assert PAX.planned(settings)["levels"] == 8
    assert SecureBoost.planned(settings)["max_leaves"] == 9


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_engines_grow_the_same_bytes(made, simulate, strategy):
    small = {"secureboost__key_bits": 512, "secureboost__insecure_small_key": True}
    of_method = {
        "pax": {"num_parallel_tree": 2, "subsample": 0.5},
        "secureboost": {**small, "align": "ordered", "allow_export": True},
    }[strategy]
    more = {"parties": 2, **LIMITS[0], **of_method}
    folders = run_local(made(strategy, **more)), simulate(made(strategy, **more))
    local, simulated = ((folder.path / "model.json").read_bytes() for folder in folders)
    assert local == simulated


@pytest.mark.slow
@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_a_server_that_dies_resumes_to_the_same_trees(made, strategy):
    of_method = {
        "pax": {"num_parallel_tree": 2},
        "secureboost": {"secureboost__key_bits": 512, "secureboost__insecure_small_key": True},
    }[strategy]
    of_method |= {} if strategy == "pax" else {"align": "ordered", "allow_export": True}
    more = {"parties": 2, "num_boost_round": 3, **LIMITS[0], **of_method}
    whole = run_local(made(strategy, **more))
    n_steps = whole.summary["exchanges"]
    for step in (n_steps // 2, n_steps - 3):
        run = made(strategy, **more)
        die(run, dies_before_reading=step)
        folder = run_network(resumed(run), simulated_contexts(run))
        model = (folder.path / "model.json").read_bytes()
        assert model == (whole.path / "model.json").read_bytes()


def test_parties_that_merge_bins_grow_by_gain_too(made):
    # Each node reports its own sums, as a child's do not follow from its parent's.
    run = made("pax", parties=2, least_bin_rows=5, **{**LIMITS[0], "max_leaves": 6})
    model = load(run_local(run).path / "model.json", Ensemble)
    assert {len(tree) for tree in model.trees} == {11}
    assert all(((tree["gain"] > 0) == (tree["left"] != LEAF)).all() for tree in model.trees)
