"""Bins, sketches, sums and splits against slow forms and known cases."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.histograms.bins import Cuts, digitise, ragged, with_categories
from fedapp.histograms.build import add_histograms, build_all_histograms, build_histograms
from fedapp.histograms.sketch import (
    bin_map,
    fuse_sketches,
    prune,
    quantile_cuts,
    sketch_and_code,
    sketch_cuts,
    surrogates,
    used_categories,
)
from fedapp.histograms.split import (
    CategoryRules,
    Penalties,
    best_splits,
    leaf_weights,
    right_categories,
)
from tests.reference import naive_histogram

RNG = np.random.default_rng(0)
NO_PENALTY = Penalties(1.0, 0.0, 0.0, 0.0)
RULES = CategoryRules(max_cat_to_onehot=4, max_cat_threshold=64)


def some_values(n_rows, n_columns, missing=0.1):
    values = RNG.normal(size=(n_rows, n_columns)).astype(np.float32)
    values[RNG.random(values.shape) < missing] = np.nan
    return values


@pytest.mark.parametrize(
    ("width", "missing", "dtype"), [(255, [np.nan], "u1"), (256, [np.nan], "u2"), (256, [], "u1")]
)
def test_codes_take_one_byte_up_to_256_of_them(width, missing, dtype):
    edges = np.arange(1, width + 1, dtype=np.float32)
    values = np.array([*range(width), *missing], np.float32)[:, None]
    codes, missing_code = digitise(values, Cuts(edges, np.array([0, width]), np.float32([-1])))
    assert codes.dtype == np.dtype(dtype)
    assert codes[width:, 0].tolist() == [missing_code] * len(missing)
    assert (missing_code == -1) == (not missing)
    assert (codes[:width, 0] == np.arange(width)).all()


@pytest.mark.parametrize("n_trees", [1, 3])
def test_histograms_equal_the_sums_row_by_row(n_trees):
    values = some_values(300, 4)
    cuts = sketch_cuts(sketch_and_code(values, np.ones(300, np.float32), 16)[0])
    codes, missing_code = digitise(values, cuts)
    gradients = RNG.normal(size=(n_trees, 300, 2)).astype(np.float32)
    gradients[:, :9] = 0  # rows that count nowhere, though they have values
    nodes = RNG.integers(0, 5, (n_trees, 300)).astype(np.int32)
    columns = np.array([0, 2, 3])
    widths = cuts.widths[columns]
    pairs = np.array([(tree, node) for tree in range(n_trees) for node in (3, 1)], np.int32)
    layout = codes, missing_code, columns, widths
    found, missing = build_all_histograms(*layout, gradients, nodes, *pairs.T)
    starts = np.cumsum(widths) - widths
    for slot, (tree, node) in enumerate(pairs):
        counted = (nodes[tree] == node) & gradients[tree].any(axis=1)
        for place, column in enumerate(columns):
            rows = codes[:, column], missing_code, gradients[tree], counted
            sums, absent = naive_histogram(*rows, widths[place])
            part = found[slot, starts[place] : starts[place] + widths[place]]
            np.testing.assert_array_equal(part, sums)
            assert missing[slot, place] == absent
        one = np.array([node], np.int32)
        alone = build_histograms(*layout, gradients[tree], nodes[tree], one)
        np.testing.assert_array_equal(alone[0][0], found[slot])
        np.testing.assert_array_equal(alone[1][0], missing[slot])


def test_adding_histograms_moves_bins_to_their_places():
    total = np.zeros((1, 3, 2))
    add_histograms(total, np.array([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]), np.array([2, 0, 2]))
    assert total.tolist() == [[[3, 4], [0, 0], [6, 8]]]


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=300), st.integers(2, 40))
@settings(deadline=None, max_examples=60)
def test_a_sketch_keeps_all_mass_and_bins_hold_their_representatives(numbers, max_bin):
    values = np.array(numbers, dtype=np.float32)[:, None]
    sketch = sketch_and_code(values, np.ones(len(values), np.float32), max_bin)[0]
    representatives, masses = sketch.column(0)
    assert len(representatives) <= max_bin
    assert masses.sum() == len(values)
    assert (np.diff(representatives) > 0).all()
    assert set(representatives) <= set(values[:, 0])
    codes, missing_code = digitise(values, sketch_cuts(sketch))
    stands_for = surrogates(codes, missing_code, sketch.representatives, sketch.offsets)
    assert (stands_for <= values).all()


@given(
    st.lists(st.lists(st.integers(0, 1000), min_size=2, max_size=200), min_size=1, max_size=4),
    st.integers(2, 30),
)
@settings(deadline=None, max_examples=60)
def test_fused_bins_stay_within_the_stated_mass(parts, n_bins):
    sketches = [
        sketch_and_code(np.float32(part)[:, None], np.ones(len(part), np.float32), 50)[0]
        for part in parts
    ]
    cuts = fuse_sketches(sketches, n_bins)
    masses = np.zeros(len(cuts.edges))
    points = {}
    for sketch in sketches:
        np.add.at(masses, bin_map(sketch, cuts), sketch.masses)
        for representative, mass in zip(*sketch.column(0), strict=True):
            points[representative] = points.get(representative, 0) + mass
    total = masses.sum()
    assert len(cuts.edges) <= n_bins
    assert total == sum(len(part) for part in parts)
    assert masses.max() <= total / n_bins + 2 * max(points.values()) + 1e-3


def test_few_representatives_are_all_kept_and_pruning_cuts_at_the_quantiles():
    assert prune(np.ones(5), 5).tolist() == [1, 2, 3, 4]
    assert prune(np.ones(100), 4).tolist() == [25, 50, 75]
    assert prune(np.array([1.0, 2.0, 1.0]), 2).tolist() == [2]  # as near as 1: the upper one


@pytest.mark.parametrize("weighted", [False, True])
def test_one_sketch_fuses_to_the_cuts_of_xgboost(weighted):
    values = some_values(2000, 3)
    weights = RNG.uniform(0.1, 3, 2000).astype(np.float32) if weighted else np.ones(2000, "f4")
    expected = quantile_cuts(values, weights, 32)
    cuts = fuse_sketches([sketch_and_code(values, weights, 32)[0]], 32)
    np.testing.assert_array_equal(cuts.edges, expected.edges)
    np.testing.assert_array_equal(cuts.offsets, expected.offsets)
    np.testing.assert_array_equal(cuts.minima, expected.minima)


def test_a_column_without_values_has_one_empty_bin():
    values = np.full((4, 2), np.nan, dtype=np.float32)
    values[:, 1] = [1, 2, 3, 4]
    sketch = sketch_and_code(values, np.ones(4, np.float32), 8)[0]
    cuts = fuse_sketches([sketch], 8)
    assert cuts.widths.tolist() == [1, 4]
    assert bin_map(sketch, cuts).tolist() == [1, 2, 3, 4]


def test_sketches_of_tables_apart_cover_the_values_of_both():
    low, high = np.float32([[1], [2]]), np.float32([[8], [9]])
    ones = np.ones(2, np.float32)
    sketches = [sketch_and_code(low, ones, 8)[0], sketch_and_code(high, ones, 8)[0]]
    cuts = fuse_sketches(sketches, 8)
    assert cuts.edges[:-1].tolist() == [2, 8, 9]
    assert [bin_map(sketch, cuts).tolist() for sketch in sketches] == [[0, 1], [2, 3]]


def layout(*widths):
    """Cuts of columns of so many bins."""
    edges = [np.arange(1, width + 1, dtype=np.float32) for width in widths]
    return Cuts(*ragged(edges), np.zeros(len(widths), np.float32))


def one_split(histogram, missing=0, allowed=(True,), **limits):
    """The best split of one or more columns of two or more bins each."""
    n_columns, n_bins = len(allowed), len(histogram) // len(allowed)
    sums = np.array(histogram[:n_bins]).sum(axis=0) + missing
    penalties = Penalties(1.0, 0.0, limits.get("gamma", 0.0), limits.get("min_child_weight", 0.0))
    absent = np.full((1, n_columns), missing, dtype=np.int32)
    cuts = layout(*[n_bins] * n_columns)
    whole = np.array([histogram], dtype=np.float64)
    return best_splits(whole, sums[None], absent, np.array([allowed]), cuts, penalties, RULES)[0]


TWO = [[-4.0, 2.0], [6.0, 3.0]]
LIGHT = [[-4.0, 0.5], [6.0, 3.0], [-1.0, 3.0]]


def test_the_gain_is_that_of_the_formula_and_missing_rows_go_to_the_better_side():
    split = one_split(TWO)
    assert split["gain"] == pytest.approx(16 / 3 + 36 / 4 - 4 / 6, rel=1e-6)
    assert (split["left"].tolist(), split["right"].tolist()) == ([-4, 2], [6, 3])
    assert not one_split(TWO, missing=1)["default_left"]
    towards_left = one_split([[4.0, 2.0], [-6.0, 3.0]], missing=1)
    assert towards_left["default_left"]
    assert towards_left["left"].tolist() == [5, 3]


@pytest.mark.parametrize(
    ("histogram", "how", "column", "cut"),
    [
        (LIGHT, {}, 0, 0),
        (LIGHT, {"min_child_weight": 1.0}, 0, 1),
        (TWO, {"gamma": 13.6}, 0, 0),
        (TWO, {"gamma": 13.7}, -1, None),
        (TWO * 2, {"allowed": (True, True)}, 0, 0),  # the lower column wins a tie
        ([*TWO, [-1.0, 2.0], [3.0, 3.0]], {"allowed": (False, True)}, 1, 0),
    ],
)
def test_a_split_is_the_best_that_is_allowed(histogram, how, column, cut):
    split = one_split(histogram, **how)
    assert split["column"] == column
    assert cut is None or split["cut"] == cut


def test_l1_shrinks_the_weight_of_a_leaf():
    sums, free = np.array([[-5.0, 3.0], [0.5, 3.0]]), np.float32([[-9, 9]] * 2)
    weights = leaf_weights(sums, Penalties(1.0, 1.0, 0.0, 0.0).of_leaves, free)
    assert weights.tobytes() == np.float32([1.0, -0.0]).tobytes()  # XGBoost's sign of zero
    light = leaf_weights(np.array([[-5.0, 0.5]]), Penalties(1.0, 0.0, 0.0, 1.0).of_leaves, free)
    assert light.tolist() == [0.0]


def by_category(histogram, missing=0, **limits):
    """Best split of one column of categories, and the categories that go right; ``missing`` is the
    gradient of the rows without a value."""
    rules = CategoryRules(**{"max_cat_to_onehot": 4, "max_cat_threshold": 64, **limits})
    sums = np.array(histogram).sum(axis=0) + (np.array([missing, 2.0]) if missing else 0)
    n = len(histogram)
    cuts = Cuts(np.arange(1, n + 1, dtype=np.float32), np.array([0, n]), np.zeros(1, np.float32))
    cuts = with_categories(cuts, np.array([n]), np.array([n]))
    given = np.array([histogram]), sums[None], np.array([[missing != 0]], dtype=np.int32)
    allowed = np.ones((1, 1), dtype=bool)
    split = best_splits(*given, allowed, cuts, NO_PENALTY, rules)[0]
    right = right_categories(np.array(histogram), int(split["cut"]), NO_PENALTY, rules)
    return split, np.flatnonzero(right).tolist()


MIXED = [[-4.0, 2.0], [6.0, 3.0], [-1.0, 1.0], [5.0, 2.0], [-3.0, 2.0]]


@pytest.mark.parametrize(
    ("how", "rights", "default_left", "left", "right"),
    [
        ({}, [1, 3], False, [-8, 5], [11, 5]),
        ({"max_cat_to_onehot": 6}, [0], True, None, [-4, 2]),  # one of few goes alone
        ({"missing": -9.0}, [1, 3], True, [-17, 7], None),
        ({"missing": 9.0}, [1, 3], False, None, [20, 7]),
    ],
)
def test_categories_of_low_weight_go_right_together(how, rights, default_left, left, right):
    split, found = by_category(MIXED, **how)
    assert found == rights
    assert left is None or split["left"].tolist() == left
    assert right is None or split["right"].tolist() == right
    assert bool(split["default_left"]) == default_left or not how


def test_no_more_categories_than_the_threshold_are_gathered_on_a_side():
    gradients = np.repeat([1.0, -1.0], 8)
    histogram = np.stack((gradients, np.ones(16)), axis=1).tolist()
    assert by_category(histogram)[1] == list(range(8))
    assert len(by_category(histogram, max_cat_threshold=4)[1]) in {3, 13}


def test_codes_of_no_category_are_missing():
    cuts = with_categories(layout(3, 2), np.array([5, 0]), np.array([3, 0]))
    assert cuts.edges.tolist() == [1, 2, 3, 1, 2]
    values = np.float32([[0, 0], [2, 1], [3, 2], [-1, 0], [np.nan, 1]])
    codes, missing_code = digitise(values, cuts)
    assert codes[:, 0].tolist() == [0, 2, *[missing_code] * 3]
    assert codes[:, 1].tolist() == [0, 1, 1, 0, 1]


def test_a_thousand_categories_are_a_thousand_bins_whatever_max_bin():
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 1000, 5000).astype(np.float32)
    codes[0] = 999
    values = np.stack((codes, rng.normal(size=5000).astype(np.float32)), axis=1)
    categories = np.array([1000, 0])
    sketch = sketch_and_code(values, np.ones(5000, np.float32), 16, categories)[0]
    assert len(sketch.column(0)[0]) == 0  # neither codes nor their weights are told
    used = used_categories([sketch], categories)
    cuts = with_categories(fuse_sketches([sketch], 16), categories, used)
    assert cuts.widths.tolist() == [1000, 16]
    places = bin_map(sketch.with_categories(categories), cuts)
    assert places.tolist() == list(range(1016))
