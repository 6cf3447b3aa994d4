"""What trees of a round split: limited leaves, in XGBoost's order, and columns drawn by weight.

That whole runs grow XGBoost's trees is in ``test_exactness``.
"""

from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
import xgboost
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from clients.secureboost.round import by_tree, draw_rows
from fedapp.errors import ConfigError
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.trees.grow import Queue, leaves_under, without_padding
from fedapp.trees.limits import Limits, draw_columns, n_levels, parse_weights, weights_of
from fedapp.trees.model import LEAF, check_trees
from fedapp.trees.objective import gradients
from fedapp.trees.predict import predict_margins
from strategies.pax import PAX
from strategies.run import load_strategy
from strategies.secureboost import SecureBoost
from tests.federated import model_of
from tests.network import run as run_sites
from tests.pooled import Pooled, pooled_booster
from tests.reference import compare_trees
from tests.tampering import refuses, rewrite_letters

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


NOISE = {"pax.aggregation": "secure", "privacy.epsilon": 1.0}
NO_GAINS = r"must be .* with privacy\.epsilon: splits are drawn"
DIVIDED = {"strategy": "secureboost", "num-parallel-tree": 2}


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"max-depth": 0}, r"max-depth must be >= 1, or 0 .* got 0 with max-leaves=0"),
        ({"max-depth": 0, "max-leaves": 300}, r"max-depth must .* 1 to 256, got .*=300"),
        ({"max-leaves": -1}, "max-leaves must be >= 0, got -1"),
        ({"max-leaves": 2**15 + 1}, "max-leaves must be <= 32768, got 32769"),
        ({"grow-policy": "leafwise"}, "grow-policy must be one of 'depthwise' or 'lossguide'"),
        (NOISE | {"grow-policy": "lossguide"}, NO_GAINS),
        (NOISE | {"max-leaves": 7}, NO_GAINS),
        ({"num-parallel-tree": 0}, "num-parallel-tree must be >= 1, got 0"),
        (NOISE | {"num-parallel-tree": 2}, r"num-parallel-tree must be 1 with privacy\.epsilon"),
        (DIVIDED | {"secureboost.goss": True}, "num-parallel-tree must be 1 with "),
        (DIVIDED | {"multi-strategy": "multi_output_tree"}, "num-parallel-tree must be 1 with "),
        ({"feature-weights": "a:2"}, "feature-weights must be omitted where no colsample"),
    ],
)
def test_limits_that_no_tree_has_are_refused(given, rule):
    given = {"strategy": "pax", **given}
    with pytest.raises(ConfigError, match=rule):
        load_strategy(given["strategy"]).section_settings(load_settings(given))


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


# Columns are drawn by their weights, as ``feature_weights`` of XGBoost; the draws differ


def chance_of_pair(weights, pair):
    """Of both columns, drawn one after the other from all: the slow way, over all orders."""
    total = float(np.sum(weights))
    return sum(
        weights[first] / total * weights[second] / (total - weights[first])
        for first, second in permutations(pair)
    )


def test_pairs_are_drawn_with_the_chances_of_one_after_the_other():
    weights = np.array([4.0, 2.0, 1.0, 1.0])
    rng = np.random.default_rng(5)
    counts = {}
    for _ in range(2000):
        drawn = draw_columns(np.ones(4, dtype=bool), 0.5, rng, weights)
        pair = frozenset(np.flatnonzero(drawn).tolist())
        counts[pair] = counts.get(pair, 0) + 1
    assert len(counts) == 6
    for pair, count in counts.items():
        expected = chance_of_pair(weights, pair)
        assert abs(count / 2000 - expected) < 4.5 * np.sqrt(expected * (1 - expected) / 2000)


def test_columns_without_weight_are_not_drawn():
    weights = np.array([0.0, 1.0, 0.0, 3.0])
    rng = np.random.default_rng(5)
    allowed = np.array([True, True, True, False])
    for share in (0.2, 0.9):
        assert draw_columns(allowed, share, rng, weights).tolist() == [False, True, False, False]
    assert not draw_columns(np.array([True, False, True, False]), 0.5, rng, weights).any()
    assert weights_of(parse_weights("b:2"), ("a", "b")).tolist() == [1, 2]
    assert not SecureBoost.takes("feature-weights")


def test_equal_weights_draw_what_none_draw_in_number():
    for share, n_drawn in ((0.01, 1), (0.5, 5), (0.99, 9)):
        drawn = Limits(3, weights=np.ones(10)).of_trees(share, 4, 10)
        assert drawn.sum(axis=1).tolist() == [n_drawn] * 4
        alike = Limits(3).of_trees(share, 4, 10)
        assert drawn.sum(axis=1).tolist() == alike.sum(axis=1).tolist()
        assert (Limits(3).of_trees(share, 4, 10) == alike).all()
        assert (Limits(3, 1).of_trees(share, 4, 10) != alike).any()
        assert (alike[0] != alike[1]).any()


def test_xgboost_avoids_the_same_columns(made):
    weights = {"colsample_bytree": 0.5, "feature_weights": "a:0,b:0,c:0"}
    booster = pooled_booster(made("pax", num_boost_round=10, parties=1, **weights))
    assert booster.get_score().keys() == {"f3", "f4", "f5"}


@pytest.mark.parametrize(
    ("weights", "rule"),
    [
        ("a", "must be columns with a number from 0 to 1e9, as .*, got a$"),
        ("a:-1", "must be columns with a number .* got a:-1"),
        ("a:nan", "must be columns with a number .* got a:nan"),
        ("a:1,a:2", "must name a column once, got a twice"),
        ("g:2", "must name columns of the table, got g"),
        (",".join(f"{name}:0" for name in "abcdef"), "must be > 0"),
    ],
)
def test_weights_that_are_none_are_refused(made, weights, rule):
    with pytest.raises(ConfigError, match=f"feature-weights {rule}"):
        run_local(made("pax", parties=2, feature_weights=weights, colsample_bytree=0.5))


# Several trees a round on the same gradients, as ``num_parallel_tree``


def test_trees_of_a_round_draw_rows_and_columns_of_their_own(made):
    draws = {"subsample": 0.5, "colsample_bytree": 0.5, "num_boost_round": 1}
    trees = model_of(run_local(made("pax", parties=2, num_parallel_tree=4, **draws))).trees
    assert len({tree["hessian"][0] for tree in trees}) == 4
    assert len({frozenset(tree["column"][tree["left"] > 0].tolist()) for tree in trees}) > 1


def test_each_tree_is_that_of_the_rows_it_has_drawn(made):
    """XGBoost on each draw's gradients grows the same trees, in the second round too."""
    small = {"max_bin": 8, "secureboost__key_bits": 256}
    draws = {"num_parallel_tree": 3, "subsample": 0.5, "min_child_weight": 0.0}
    run = made("secureboost", "multi:softprob", 240, **small, **draws)
    model, whole = model_of(run_local(run)), Pooled(run)
    matrix, width = whole.matrix(whole.values), model.n_outputs
    parameters = {**whole.parameters, "subsample": 1.0, "num_parallel_tree": 1, "eta": run.eta / 3}
    for number in range(2):
        margins = predict_margins(model.first_rounds(number), whole.values[whole.train])
        of_round = whole.labels[whole.train], whole.weights[whole.train]
        pairs = np.tile(gradients(run.objective, margins, *of_round), (1, 3, 1))
        how = SimpleNamespace(goss=False, subsample=0.5, num_parallel_tree=3)
        rng = np.random.default_rng([run.seed, number, 1])
        drawn = by_tree(draw_rows(pairs, how, rng), 3)
        assert 0 < drawn.any(axis=(2, 3)).sum() < 3 * len(pairs)
        for place in range(3):
            matrix.set_base_margin(margins)
            each = drawn[:, place]
            booster = xgboost.train(
                parameters, matrix, 1, obj=lambda *_, each=each: (each[..., 0], each[..., 1])
            )
            first = (3 * number + place) * width
            grown = replace(model, trees=model.trees[first : first + width], num_parallel_tree=1)
            agreement = compare_trees(grown, booster)
            assert (agreement.n_trees, agreement.differing) == (width, 0)
            assert agreement.leaf_error < 1e-6


def test_a_draw_of_too_few_rows_for_one_tree_is_refused(vertical, sites, write_table, monkeypatch):
    """A round draws enough rows, and its second tree does not."""
    bank = {"name": "bank", "data": write_table("bank", 80)}
    shop = {"name": "shop", "data": write_table("shop", 80, y=None), "label": ""}
    limits = {**shop, "min-rows": 60}

    def of_few(drawn):
        bits = np.unpackbits(drawn)
        bits[80:152] = 0
        return np.packbits(bits)

    rewrite_letters(monkeypatch, "EncryptedGradients", "drawn", of_few)
    run = vertical(num_parallel_tree=2, test_fraction=0.0, valid_fraction=0.0)
    refuses(
        r".*drawn must be at least 60 rows \(min-rows of shop\), got 8", run, sites(bank, limits)
    )


# Sites with tables and limits of their own


def nodes(sites, write_table, **more):
    names = ("bank", "shop")
    return sites(*({"name": name, "data": write_table(name, 80), **more} for name in names))


def test_sites_take_what_their_plan_says(settings, sites, write_table):
    limits = {"grow_policy": "lossguide", "max_depth": 0, "min_child_weight": 0.0, "max_leaves": 9}
    run = settings(num_parallel_tree=2, **limits)
    trees = model_of(run_sites(run, nodes(sites, write_table))).trees
    assert len(trees) == 4
    assert max(map(len, trees)) > 3


def test_a_site_limits_the_trees_of_a_round(settings, sites, write_table):
    limited = nodes(sites, write_table, **{"most-trees": 4})
    refuses(r".*must be <= 4 \(most-trees.*got 5", settings(num_parallel_tree=5), limited)


def test_a_server_that_asks_for_more_trees_than_planned_is_refused(
    settings, sites, write_table, monkeypatch
):
    planned = PAX.planned.__func__
    monkeypatch.setattr(
        PAX, "planned", classmethod(lambda cls, run: {**planned(cls, run), "trees": 1})
    )
    rule = r"GrowRequest\.num_parallel_tree must be <= 1 by the plan .*, got 2"
    refuses(f".*{rule}", settings(num_parallel_tree=2), nodes(sites, write_table))
