"""CART's splits: scikit-learn's trees, prediction for prediction.

scikit-learn visits columns in a random order and keeps the first of equal splits. Where trees of
several seeds predict alike, no tie matters, and there ours must predict the same; each comparison
holds that this is so.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import datasets
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from fedapp.trees.categories import category_counts
from fedapp.trees.forest.bagged import (
    BaggedForest,
    Rows,
    column_keys,
    count_drawn_columns,
    grow_forest,
    leaf_values,
    n_features,
    row_counts,
    search_rows,
)
from fedapp.trees.forest.cart import NO_RANK, Rules, between, bin_columns, code_columns
from fedapp.trees.model import parents_of

SEEDS = range(6)
EXACT = 65535
OBJECTIVES = {0: "reg:squarederror", 2: "binary:logistic"}


@dataclass(frozen=True)
class Limits:
    """Settings of a tree, by scikit-learn's names."""

    criterion: Any = "gini"
    max_depth: int = 3
    min_samples_split: int = 2
    min_samples_leaf: int = 1
    min_impurity_decrease: float = 0.0


def one_tree(x, y, limits, weights=None, max_bin=EXACT, categories=()):
    """Our tree, without bootstrap, of all columns."""
    n_classes = 0 if limits.criterion == "variance" else int(y.max()) + 1
    weights = np.ones(len(x)) if weights is None else weights
    bins = bin_columns(x, max_bin, category_counts(categories, x.shape[1]))
    counts = np.ones((1, len(x)), np.uint8)
    rows = Rows(code_columns(x, bins), bins, y.astype(np.float64), weights, counts)
    fewest = limits.min_samples_split, limits.min_samples_leaf
    rules = Rules(limits.criterion, n_classes, *fewest, limits.min_impurity_decrease)
    n_columns = x.shape[1]
    seeds = np.arange(n_columns)
    trees, sets, nodes = grow_forest(rows, x, seeds, n_columns, limits.max_depth, rules)
    sizes = np.array([len(tree) for tree in trees])
    for tree in trees:
        assert (tree["parent"] == parents_of(tree["left"], np.array([0, len(tree)]))).all()
    n_outputs = 1 if n_classes < 3 else n_classes
    given = nodes, rows.counts, weights, y.astype(np.float32), sizes
    values = leaf_values(*given, n_classes, n_outputs)
    names = tuple(map(str, range(n_columns))), tuple(map(str, range(n_classes)))
    objective = OBJECTIVES.get(n_classes, "multi:softprob")
    return BaggedForest(objective, *names, trees, values, sets, categories)


def theirs(x, y, limits, weights, unseen):
    """Predictions of scikit-learn's tree, of which ties decide none."""
    found = []
    for seed in SEEDS:
        given = {**vars(limits), "random_state": seed}
        if limits.criterion == "variance":
            tree = DecisionTreeRegressor(**given | {"criterion": "squared_error"})
            found.append(tree.fit(x, y, weights).predict(unseen)[:, None])
        else:
            shares = DecisionTreeClassifier(**given).fit(x, y, weights).predict_proba(unseen)
            found.append(shares[:, 1:] if shares.shape[1] == 2 else shares)
    assert all((each == found[0]).all() for each in found), "a tie decides"
    return found[0]


def assert_theirs(x, y, limits, weights=None):
    """On 70 % of the rows our tree is theirs, there and on the unseen rows."""
    x = x.astype(np.float32)
    train = np.random.default_rng(0).permutation(len(x))[: len(x) * 7 // 10]
    weights = None if weights is None else weights[train]
    model = one_tree(x[train], y[train], limits, weights)
    ours = model.predictions(model.leaves(x))
    np.testing.assert_allclose(ours, theirs(x[train], y[train], limits, weights, x), 1e-6, 1e-6)
    assert len(model.trees[0]) > 2
    return model


def holes(x, share):
    """The values with some missing; each column has its own share, the first none."""
    rng = np.random.default_rng(5)
    shares = np.linspace(0, share, x.shape[1])
    return np.where(rng.random(x.shape) < shares, np.nan, x)


BREAST, WINE, IRIS, DIABETES = (
    getattr(datasets, f"load_{name}")(return_X_y=True)
    for name in ("breast_cancer", "wine", "iris", "diabetes")
)
NUMBERS = "variance"


@pytest.mark.parametrize(
    ("table", "limits", "share"),
    [
        (BREAST, Limits(max_depth=5, min_impurity_decrease=0.02), 0),
        (WINE, Limits("entropy", 2), 0),
        (IRIS, Limits(), 0),
        (DIABETES, Limits(NUMBERS, 8, min_samples_leaf=30), 0),
        (DIABETES, Limits(NUMBERS, 6, min_samples_split=40), 0),
        (WINE, Limits(max_depth=2), 0.6),
        (IRIS, Limits(min_samples_leaf=8), 0.1),
        (DIABETES, Limits(NUMBERS, 4, min_samples_leaf=8), 0.6),
    ],
)
def test_a_tree_is_scikit_learns_also_with_missing_values(table, limits, share):
    x, y = table
    assert_theirs(holes(x, share) if share else x, y, limits)


def test_a_value_missing_in_prediction_alone_goes_with_most_rows():
    x, y = DIABETES
    limits = Limits(NUMBERS)
    model = one_tree(x.astype(np.float32), y, limits)
    unseen = holes(x, 0.9).astype(np.float32)
    ours = model.predictions(model.leaves(unseen))
    np.testing.assert_allclose(ours, theirs(x, y, limits, None, unseen), 1e-6)


@pytest.mark.parametrize(("table", "criterion"), [(WINE, "gini"), (DIABETES, NUMBERS)])
def test_weights_count_as_in_scikit_learn(table, criterion):
    x, y = table
    weights = np.random.default_rng(2).choice([0.0, 0.5, 1.0, 2.5], len(y))
    assert_theirs(x, y, Limits(criterion, 3, min_samples_leaf=20), weights)


def test_values_that_are_almost_equal_are_not_cut_between():
    x = np.array([[0.0], [5e-8], [1e-7], [1.0]])
    model = one_tree(x.astype(np.float32), np.array([0, 1, 1, 1]), Limits(max_depth=5))
    assert model.trees[0]["left"].tolist() == [1, -1, -1]
    assert 0.4 < model.trees[0]["threshold"][0] < 0.6


def search_roots(x, y, n_trees, n_drawn):
    """The best splits of the roots of trees of all rows."""
    bins = bin_columns(x, EXACT)
    every = np.ones((n_trees, len(x)), np.uint8)
    rows = Rows(code_columns(x, bins), bins, y, np.ones(len(x)), every)
    roots = np.arange(n_trees, dtype=np.int32), np.zeros(n_trees, dtype=np.int32)
    nodes, drawn = np.zeros(every.shape, dtype=np.int32), np.full(n_trees, n_drawn)
    seeds = np.arange(x.shape[1])
    return search_rows(rows, nodes, roots, seeds, drawn, Rules("gini", 2, 2, 1, 0.0))


def test_of_equal_splits_the_lowest_column_wins_whatever_the_order_of_its_key():
    x = np.repeat(np.random.default_rng(3).normal(size=(40, 1)), 5, axis=1).astype(np.float32)
    found = search_roots(x, (x[:, 0] > 0).astype(np.float64), 20, 5)
    assert set(found.columns) == {0}


def test_a_node_whose_drawn_columns_are_constant_takes_the_first_other_one():
    x = np.zeros((40, 6), dtype=np.float32)
    x[:, 4] = np.arange(40)
    y = (x[:, 4] > 20).astype(np.float64)
    found = search_roots(x, y, 30, 2)
    assert set(found.columns) == {4}
    root = np.zeros(1, dtype=np.int32)
    keys = np.concatenate([column_keys(np.arange(6), tree, root) for tree in range(30)])
    drawn = (keys.argsort(axis=1)[:, :2] == 4).any(axis=1)
    assert 0 < drawn.sum() < 30
    np.testing.assert_array_equal(found.ranks, np.where(drawn, 0, keys[:, 4]))
    nothing = search_roots(x * 0, y, 30, 2)
    assert set(nothing.ranks) == {NO_RANK}
    assert np.isnan(nothing.improvements).all()


@given(st.floats(-(2.0**126), 2.0**126, width=32), st.integers(1, 50))
def test_a_threshold_compares_as_the_midpoint_in_double_precision(value, steps):
    below = np.float32(value)
    ladder = [below]
    for _ in range(steps):
        ladder.append(np.nextafter(ladder[-1], np.float32(np.inf)))
    values = np.array(ladder)
    middle = float(values[0]) / 2 + float(values[-1]) / 2
    threshold = between(values[:1], values[-1:])[0]
    np.testing.assert_array_equal(values < threshold, values.astype(np.float64) <= middle)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(2, 12))
def test_bins_hold_every_value_once_in_order(numbers, max_bin):
    values = np.array(numbers, dtype=np.float32)[:, None]
    bins = bin_columns(values, max_bin)
    codes = code_columns(values, bins)[0]
    assert len(bins.lows) <= max(max_bin, 1)
    assert (bins.lows[codes] <= values[:, 0]).all()
    assert (values[:, 0] <= bins.highs[codes]).all()
    assert (bins.highs[:-1] < bins.lows[1:]).all()
    if len(set(numbers)) <= max_bin:
        np.testing.assert_array_equal(bins.lows, np.unique(values))


def test_a_bootstrap_draws_as_many_rows_as_there_are_and_misses_a_third():
    counts = row_counts(True, 7, 50, 1000)
    assert (counts.sum(axis=1) == 1000).all()
    assert 0.35 < (counts == 0).mean() < 0.385  # 1 / e
    assert len({row.tobytes() for row in counts}) == 50
    np.testing.assert_array_equal(counts[:3], row_counts(True, 7, 3, 1000))


def test_a_columns_key_says_nothing_of_the_other_columns():
    seeds = np.random.default_rng(6).integers(0, 2**63 - 1, 9)
    nodes = np.arange(40, dtype=np.int32)
    keys = column_keys(seeds, 3, nodes)
    np.testing.assert_array_equal(column_keys(seeds[4:6], 3, nodes), keys[:, 4:6])
    owners = np.repeat([0, 1, 2], 3)
    places = np.full(40, 3, dtype=np.int32), nodes
    counts = count_drawn_columns(seeds, owners, 3, 4, places)
    assert (counts.sum(axis=0) == 4).all()
    assert len(set(counts[0])) > 2


@pytest.mark.parametrize(
    ("rule", "n"), [("all", 57), ("sqrt", 7), ("log2", 5), (0.5, 28), ("0.1", 5), (0.001, 1)]
)
def test_columns_of_a_node_are_counted_as_in_scikit_learn(rule, n):
    assert n_features(rule, 57) == n


# Columns of categories


@pytest.mark.parametrize("n_classes", [0, 2, 3])
def test_categories_are_divided_in_the_order_of_their_labels_or_one_from_the_rest(n_classes):
    rng = np.random.default_rng(8)
    codes = rng.choice(6, 400, p=[0.2, 0.05, 0.1, 0.1, 0.25, 0.3])  # sums are in another order
    y = (codes * 5 % 6 + rng.integers(0, 3, 400)).astype(np.float64)
    y = y % 3 if n_classes == 3 else y > 3.5 if n_classes else y
    limits = Limits("gini" if n_classes else NUMBERS, 1)
    means = np.array([y[codes == code].mean() for code in range(6)])
    numbers = np.eye(6)[codes] if n_classes == 3 else means[codes][:, None]
    model = one_tree(codes[:, None].astype(np.float32), y, limits, categories=(tuple("abcdef"),))
    ours = model.predictions(model.leaves(codes[:, None].astype(np.float32)))
    np.testing.assert_allclose(ours, theirs(numbers, y, limits, None, numbers), 1e-6, 1e-6)
    assert len(model.sets) == 1


@pytest.mark.parametrize("n_classes", [0, 2, 3])
def test_both_sides_of_a_division_have_as_many_rows_as_they_must(n_classes):
    x = np.repeat(np.float32([0, 1, 2]), [40, 8, 7])[:, None]
    y = x[:, 0].astype(np.float64) % (n_classes or 3)
    for least, n_sets in ((15, 1), (16, 0)):
        limits = Limits("gini" if n_classes else "variance", 1, min_samples_leaf=least)
        assert len(one_tree(x, y, limits, categories=(tuple("abc"),)).sets) == n_sets


def test_a_category_that_no_row_of_the_node_has_goes_where_missing_values_go():
    x = np.random.default_rng(2).integers(0, 5, (60, 1)).astype(np.float32)
    x[::11] = np.nan
    y = np.nan_to_num(x[:, 0]) % 2
    model = one_tree(x, y, Limits("gini", 1), categories=(tuple("abcdef"),))
    others = np.float32([[5], [np.nan], [6]])
    assert len(set(model.leaves(others)[0].tolist())) == 1


def test_columns_that_are_drawn_for_a_few_nodes_at_a_time_are_the_same(monkeypatch):
    seeds, owners = np.arange(1000), np.arange(1000) % 3
    places = np.zeros(200, dtype=np.int32), np.arange(200, dtype=np.int32)
    whole = count_drawn_columns(seeds, owners, 3, 30, places)
    monkeypatch.setattr("fedapp.trees.forest.bagged.KEYS_AT_ONCE", 5000)
    np.testing.assert_array_equal(count_drawn_columns(seeds, owners, 3, 30, places), whole)
