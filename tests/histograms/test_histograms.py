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


def test_a_value_on_a_cut_goes_to_the_bin_above_it():
    cuts = Cuts(np.float32([1, 2, 9]), np.array([0, 3]), np.float32([-1]))
    codes, missing_code = digitise(np.float32([[0.5], [1], [1.5], [2], [50]]), cuts)
    assert codes[:, 0].tolist() == [0, 1, 1, 2, 2]
    assert missing_code == -1


@pytest.mark.parametrize(("width", "missing", "dtype"), [(255, True, "u1"), (256, True, "u2")])
def test_codes_take_one_byte_up_to_256_of_them(width, missing, dtype):
    edges = np.arange(1, width + 1, dtype=np.float32)
    values = np.append(np.arange(width, dtype=np.float32), np.nan)[:, None]
    codes, missing_code = digitise(values, Cuts(edges, np.array([0, width]), np.float32([-1])))
    assert codes.dtype == np.dtype(dtype)
    assert codes[-1, 0] == missing_code
    assert (codes[:-1, 0] == np.arange(width)).all()


def test_256_bins_without_missing_values_take_one_byte():
    edges = np.arange(1, 257, dtype=np.float32)
    values = np.arange(256, dtype=np.float32)[:, None]
    codes, missing_code = digitise(values, Cuts(edges, np.array([0, 256]), np.float32([-1])))
    assert codes.dtype == np.uint8
    assert missing_code == -1


def test_histograms_equal_the_sums_row_by_row():
    values = some_values(300, 4)
    cuts = sketch_cuts(sketch_and_code(values, np.ones(300, np.float32), 16)[0])
    codes, missing_code = digitise(values, cuts)
    gradients = RNG.normal(size=(300, 2)).astype(np.float32)
    nodes = RNG.integers(0, 5, 300).astype(np.int32)
    columns = np.array([0, 2, 3])
    widths = cuts.widths[columns]
    wanted = np.array([3, 1], dtype=np.int32)
    found, missing = build_histograms(
        codes, missing_code, columns, widths, gradients, nodes, wanted
    )
    starts = np.cumsum(widths) - widths
    for slot, node in enumerate(wanted):
        for place, column in enumerate(columns):
            sums, absent = naive_histogram(
                codes[:, column], missing_code, gradients, nodes == node, widths[place]
            )
            part = found[slot, starts[place] : starts[place] + widths[place]]
            np.testing.assert_array_equal(part, sums)
            assert missing[slot, place] == absent


@pytest.mark.parametrize("n_trees", [1, 3])
def test_histograms_of_several_trees_are_those_of_each_in_turn(n_trees):
    codes = RNG.integers(0, 6, (200, 3)).astype(np.uint8)  # 5: missing
    gradients = RNG.normal(size=(n_trees, 200, 2)).astype(np.float32)
    nodes = RNG.integers(0, 4, (n_trees, 200)).astype(np.int32)
    layout = codes, 5, np.arange(3), np.full(3, 5)
    pairs = np.array([(tree, node) for tree in range(n_trees) for node in (3, 1)], np.int32)
    found, missing = build_all_histograms(*layout, gradients, nodes, *pairs.T)
    assert len(found) == len(missing) == 2 * n_trees
    for slot, (tree, node) in enumerate(pairs):
        one = np.array([node], np.int32)
        alone, absent = build_histograms(*layout, gradients[tree], nodes[tree], one)
        np.testing.assert_array_equal(found[slot], alone[0])
        np.testing.assert_array_equal(missing[slot], absent[0])


def test_rows_without_gradient_count_nowhere():
    codes = np.array([[0], [255]], dtype=np.uint8)
    nothing = np.zeros((2, 2), np.float32)
    nodes = np.zeros(2, np.int32)
    one = np.array([0]), np.array([1])
    found, missing = build_histograms(codes, 255, *one, nothing, nodes, np.array([0], np.int32))
    assert not found.any()
    assert not missing.any()


def test_adding_histograms_moves_bins_to_their_places():
    total = np.zeros((1, 3, 2))
    add_histograms(total, np.array([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]]), np.array([2, 0, 2]))
    assert total.tolist() == [[[3, 4], [0, 0], [6, 8]]]


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=300),
    st.integers(2, 40),
)
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


@pytest.mark.slow
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


def test_few_representatives_are_all_kept():
    assert prune(np.ones(5), 5).tolist() == [1, 2, 3, 4]


def test_pruning_cuts_at_the_quantiles():
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


def one_split(histogram, missing=0, **limits):
    sums = np.array(histogram).sum(axis=0) + (np.array([1.0, 1.0]) if missing else 0)
    return best_splits(
        np.array([histogram]),
        sums[None],
        np.array([[missing]], dtype=np.int32),
        np.ones((1, 1), dtype=bool),
        layout(len(histogram)),
        Penalties(1.0, 0.0, limits.get("gamma", 0.0), limits.get("min_child_weight", 0.0)),
        RULES,
    )[0]


def test_the_gain_is_that_of_the_formula():
    split = one_split([[-4.0, 2.0], [6.0, 3.0]])
    expected = 16 / 3 + 36 / 4 - 4 / 6
    assert split["column"] == 0
    assert split["cut"] == 0
    assert split["gain"] == pytest.approx(expected, rel=1e-6)
    assert split["left"].tolist() == [-4, 2]
    assert split["right"].tolist() == [6, 3]


def test_missing_rows_go_to_the_better_side():
    towards_right = one_split([[-4.0, 2.0], [6.0, 3.0]], missing=1)
    towards_left = one_split([[4.0, 2.0], [-6.0, 3.0]], missing=1)
    assert not towards_right["default_left"]
    assert towards_left["default_left"]
    assert towards_left["left"].tolist() == [5, 3]


def test_no_side_is_lighter_than_min_child_weight():
    histogram = [[-4.0, 0.5], [6.0, 3.0], [-1.0, 3.0]]
    assert one_split(histogram)["cut"] == 0
    assert one_split(histogram, min_child_weight=1.0)["cut"] == 1


def test_a_gain_below_gamma_is_no_split():
    assert one_split([[-4.0, 2.0], [6.0, 3.0]], gamma=13.6)["column"] == 0
    assert one_split([[-4.0, 2.0], [6.0, 3.0]], gamma=13.7)["column"] == -1


def test_the_lower_column_wins_a_tie():
    histogram = np.array([[[-4.0, 2.0], [6.0, 3.0]] * 2])
    split = best_splits(
        histogram,
        np.array([[2.0, 5.0]]),
        np.zeros((1, 2), np.int32),
        np.ones((1, 2), dtype=bool),
        layout(2, 2),
        NO_PENALTY,
        RULES,
    )[0]
    assert split["column"] == 0


def test_a_column_that_is_not_allowed_is_not_split():
    histogram = np.array([[[-4.0, 2.0], [6.0, 3.0], [-1.0, 2.0], [3.0, 3.0]]])
    split = best_splits(
        histogram,
        np.array([[2.0, 5.0]]),
        np.zeros((1, 2), np.int32),
        np.array([[False, True]]),
        layout(2, 2),
        NO_PENALTY,
        RULES,
    )[0]
    assert split["column"] == 1


def test_l1_shrinks_the_weight_of_a_leaf():
    sums, free = np.array([[-5.0, 3.0], [0.5, 3.0]]), np.float32([[-9, 9]] * 2)
    weights = leaf_weights(sums, Penalties(1.0, 1.0, 0.0, 0.0).of_leaves, free)
    assert weights.tobytes() == np.float32([1.0, -0.0]).tobytes()  # XGBoost's sign of zero
    light = leaf_weights(np.array([[-5.0, 0.5]]), Penalties(1.0, 0.0, 0.0, 1.0).of_leaves, free)
    assert light.tolist() == [0.0]


def test_a_sketch_reports_the_largest_value():
    sketch = sketch_and_code(np.float32([[3], [7], [np.nan]]), np.ones(3, np.float32), 4)[0]
    assert sketch.maxima.tolist() == [7]


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


def test_categories_of_low_weight_go_right_together():
    split, right = by_category(MIXED)
    assert right == [1, 3]
    assert split["right"].tolist() == [11, 5]
    assert split["left"].tolist() == [-8, 5]


def test_one_of_few_categories_goes_right_alone():
    split, right = by_category(MIXED, max_cat_to_onehot=6)
    assert right == [0]
    assert split["right"].tolist() == [-4, 2]
    assert split["default_left"]


def test_missing_rows_go_where_they_belong_among_categories():
    split, right = by_category(MIXED, missing=-9.0)
    assert right == [1, 3]
    assert split["default_left"]
    assert split["left"].tolist() == [-17, 7]
    split, right = by_category(MIXED, missing=9.0)
    assert right == [1, 3]
    assert not split["default_left"]
    assert split["right"].tolist() == [20, 7]


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
