"""Bins, sketches, quantiles, sums and splits against slow forms and known cases."""

import numpy as np
import pytest
import xgboost
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.histograms import bins
from fedapp.histograms.bins import Cuts, digitise, ragged, with_categories
from fedapp.histograms.claimed import carried, disclosed_labels, row_sums, unfit_column, words_of
from fedapp.histograms.sketch import (
    LARGEST_FLOAT,
    Descent,
    bin_map,
    digit_counts,
    fuse_sketches,
    prune,
    quantile_ranks,
    sketch_and_code,
    sketch_cuts,
    surrogates,
    used_categories,
)
from fedapp.histograms.split import Penalties, leaf_weights
from tests.reference import xgboost_trees

RNG = np.random.default_rng(0)


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


def test_l1_shrinks_the_weight_of_a_leaf():
    sums = np.array([[-5.0, 3.0], [5.0, 3.0], [0.5, 3.0]])
    free = np.float32([[-9, 9]] * 3)
    weights = leaf_weights(sums, Penalties(1.0, 1.0, 0.0, 0.0).of_leaves, free)
    assert weights.tobytes() == np.float32([1.0, -1.0, -0.0]).tobytes()
    # Gradients are 0.5, 0.0 and -0.5; XGBoost's zeros have this sign, too.
    alpha = {"alpha": 1, "min_child_weight": 0, "nthread": 1}
    for label in (-0.5, 0.0, 0.5):
        rows = xgboost.DMatrix(np.zeros((1, 1)), [label], base_margin=[0.0])
        (tree,) = xgboost_trees(xgboost.train(alpha, rows, 1))
        ours = leaf_weights(np.array([[-label, 1.0]]), (1.0, 1.0, 0.0, 0.0), free)
        assert ours.tobytes() == np.float32(tree["base_weights"]).tobytes()
    light = leaf_weights(np.array([[-5.0, 0.5]]), Penalties(1.0, 0.0, 0.0, 1.0).of_leaves, free)
    assert light.tolist() == [0.0]


def test_codes_of_no_category_are_missing():
    cuts = Cuts(np.float32([1, 2, 3, 1, 2]), np.array([0, 3, 5]), np.zeros(2, np.float32))
    cuts = with_categories(cuts, np.array([5, 0]), np.array([3, 0]))
    assert cuts.edges.tolist() == [1, 2, 3, 1, 2]
    values = np.float32([[0, 0], [2, 1], [3, 2], [-1, 0], [np.nan, 1]])
    codes, missing_code = digitise(values, cuts)
    assert codes[:, 0].tolist() == [0, 2, *[missing_code] * 3]
    assert codes[:, 1].tolist() == [0, 1, 1, 0, 1]
    one, limits = values[:1, :1], np.array([3])
    assert [bins.any_missing(one + code, limits) for code in (2, 3, -1)] == [0, 1, 1]


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


# Bins found by a search without branches


def some_rows(n_rows, n_columns):
    values = np.round(4 * RNG.normal(size=(n_rows, n_columns))).astype(np.float32)
    values[RNG.random(values.shape) < 0.2] = np.nan
    values[0, 0] = np.inf
    return values


@pytest.mark.parametrize("fewest_cells", [1, 2**40], ids=["threads", "alone"])
def test_codes_are_those_of_numpy(fewest_cells, monkeypatch):
    monkeypatch.setattr(bins, "FEWEST_CELLS", fewest_cells)
    monkeypatch.setattr(bins, "n_cores", lambda: 3)
    values = some_rows(400, 7)
    edges = [np.unique(RNG.normal(size=n).astype(np.float32)) for n in (1, 2, 3, 7, 8, 40, 300)]
    for column, own in zip(values.T, edges, strict=True):  # some values are edges
        column[1 : len(own) + 1] = own
    cuts = Cuts(*ragged(edges), np.zeros(7, dtype=np.float32))
    codes, missing_code = digitise(values, cuts)
    assert missing_code == np.iinfo(codes.dtype).max
    for column, own in enumerate(edges):
        expected = np.minimum(np.searchsorted(own, values[:, column], side="right"), len(own) - 1)
        absent = np.isnan(values[:, column])
        np.testing.assert_array_equal(codes[:, column], np.where(absent, missing_code, expected))


def test_codes_of_a_sketch_are_those_of_its_cuts_and_its_masses_count_them():
    values, weights = some_rows(500, 4)[1:], RNG.integers(0, 3, 499).astype(np.float32)
    values[:, 2] = np.nan
    sketch, codes, missing_code = sketch_and_code(values, weights, 8)
    again = digitise(values, sketch_cuts(sketch_and_code(values, weights, 8)[0]))
    np.testing.assert_array_equal(codes, again[0])
    assert missing_code == again[1]
    for column in range(4):
        own = codes[:, column]
        masses = np.bincount(own[own != missing_code], weights[own != missing_code])
        known = values[(weights > 0) & ~np.isnan(values[:, column]), column]
        np.testing.assert_array_equal(sketch.column(column)[1], masses)
        assert len(known) == 0 or sketch.maxima[column] == known.max()
        assert len(known) == 0 or sketch.column(column)[0][0] == known.min()


def test_a_column_without_a_value_has_no_range():
    values = np.float32([[1, np.nan], [3, 7], [2, np.nan]])
    found = bins.column_ranges(values, np.float32([1, 0, 1]))
    np.testing.assert_array_equal(found, np.float32([[1, np.nan], [2, np.nan]]))


# Quantiles of several tables from counts of all of them


def descended(values, weights, n_bins, parts=1, lightest=0):
    """The cuts of rows that lie in several places."""
    places = np.array_split(np.random.default_rng(1).permutation(len(values)), parts)
    descent = Descent(np.ones(values.shape[1], dtype=bool), n_bins, lightest)
    for digit in range(4):
        prefixes, offsets = descent.wanted()
        counts = [
            digit_counts(values[rows], weights[rows], prefixes, offsets, digit) for rows in places
        ]
        descent.take(np.sum(counts, axis=0))
    return descent.cuts()


def slow_edges(column, weights, n_bins):
    """The cuts of one column with all of its rows at hand."""
    kept = ~np.isnan(column) & (weights > 0)
    values, places = np.unique(column[kept] + np.float32(0), return_inverse=True)
    masses = np.zeros(len(values), dtype=np.int64)
    np.add.at(masses, places, weights[kept])
    if len(values) <= n_bins:
        return [*values[1:].tolist(), LARGEST_FLOAT]
    total, cuts = int(masses.sum()), dict[int, float]()
    for number in range(1, n_bins):
        target = total * number // n_bins
        place = int(np.flatnonzero(masses.cumsum() > target)[0])
        low, high = int(masses[:place].sum()), int(masses[: place + 1].sum())
        at, behind = float(values[place]), float(np.nextafter(values[place], np.float32(np.inf)))
        if values[place] == 0:
            behind = float(np.finfo(np.float32).tiny)
        if low and (high == total or target - low < high - target):
            cuts[low] = at
        elif high < total:
            cuts.setdefault(high, behind)
    return [*sorted(cuts.values()), LARGEST_FLOAT]


@pytest.mark.parametrize("n_bins", [2, 7, 64])
@pytest.mark.parametrize("parts", [1, 3])
def test_cuts_are_the_quantiles_of_all_rows(n_bins, parts):
    n_rows = 500
    columns = [
        RNG.normal(size=n_rows),
        RNG.integers(-3, 4, n_rows),
        np.where(RNG.random(n_rows) < 0.7, 0, RNG.exponential(size=n_rows)),
        RNG.normal(size=n_rows) * 10.0 ** RNG.integers(-30, 30, n_rows),
        np.full(n_rows, np.nan),
        np.full(n_rows, -0.0),
    ]
    values = np.stack(columns, axis=1).astype(np.float32)
    values[RNG.random(values.shape) < 0.1] = np.nan
    weights = RNG.integers(0, 2**40, n_rows)
    cuts = descended(values, weights, n_bins, parts)
    for place in range(values.shape[1]):
        assert cuts.column(place).tolist() == slow_edges(values[:, place], weights, n_bins)
    assert (cuts.minima == -LARGEST_FLOAT).all()


def test_rows_alone_keep_their_last_digits_and_are_parted_alike():
    values = RNG.normal(size=(300, 1)).astype(np.float32)
    values[:150] = np.round(values[:150], 1)
    weights = np.full(300, 8)
    whole, short = (descended(values, weights, 40, 3, lightest) for lightest in (0, 8))
    np.testing.assert_array_equal(digitise(values, whole)[0], digitise(values, short)[0])
    assert np.isin(values[150:], whole.edges).any()
    assert not np.isin(values[150:], short.edges).any()


def test_what_rows_alone_begin_with_is_not_asked_for():
    values = RNG.normal(size=(300, 1)).astype(np.float32)
    descent = Descent(np.ones(1, dtype=bool), 40, lightest=1)
    n_wanted = []
    for digit in range(4):
        prefixes, offsets = descent.wanted()
        n_wanted.append(len(prefixes))
        ones = np.ones(300, dtype=np.int64)
        descent.take(digit_counts(values, ones, prefixes, offsets, digit))
    assert n_wanted[0] == 1
    assert n_wanted[3] == 0 < n_wanted[2] < 40


def test_quantiles_of_large_weights_are_exact():
    total, numbers = 2**61 + 12345, np.arange(1, 65535)
    expected = [total * number // 65535 for number in range(1, 65535)]
    assert quantile_ranks(total, numbers, 65535).tolist() == expected
    assert not len(quantile_ranks(0, numbers, 4))


# Claimed sums are compared with rows exactly: no division of rows is refused, every other is


WIDTHS = np.array([3, 1, 0, 4])  # of the bins of each column
OFFSETS = np.concatenate(([0], np.cumsum(WIDTHS)))


def integers(cells):
    """Words as Python's integers."""
    return cells[..., 0].astype(object) * 2**32 + cells[..., 1].astype(object)


def claimed(codes, numbers, slots, n_nodes):
    """Sums in Python's integers, in words, and missing rows; a code at the width is missing."""
    cells = np.zeros((n_nodes, OFFSETS[-1], numbers.shape[1]), dtype=object)
    missing = np.zeros((n_nodes, len(WIDTHS)), dtype=np.int32)
    for of_row, row, slot in zip(codes, numbers.tolist(), slots, strict=True):
        for column, code in enumerate(of_row if slot >= 0 else ()):
            if code == WIDTHS[column]:
                missing[slot, column] += 1
            else:
                cells[slot, OFFSETS[column] + code] += np.array(row, dtype=object)
    return words_of(cells), missing


@given(
    rows=st.lists(
        st.tuples(
            st.integers(-(2**53), 2**53),
            st.one_of(st.just(0), st.integers(0, 2**53)),
            st.integers(-1, 2),
            st.tuples(*(st.integers(0, int(width)) for width in WIDTHS)),
        ),
        max_size=20,
    )
)
def test_no_division_of_rows_is_refused_and_sums_are_exact(rows):
    numbers = np.array([row[:2] for row in rows], dtype=np.int64).reshape(-1, 2)
    slots = np.array([row[2] for row in rows], dtype=np.int32)
    codes = np.array([row[3] for row in rows], dtype=np.int64).reshape(-1, len(WIDTHS))
    cells, missing = claimed(codes, numbers, slots, 3)
    assert unfit_column(cells, missing, OFFSETS, numbers, slots) is None
    sums = integers(row_sums(numbers, slots, 3))
    assert (
        sums == [np.array(numbers[slots == node], object).sum(axis=0) for node in range(3)]
    ).all()
    derived = carried(cells[:1] - cells[1:2])
    assert (integers(derived) == integers(cells[:1]) - integers(cells[1:2])).all()
    assert ((derived[..., 1] >= 0) & (derived[..., 1] < 2**32)).all()


def test_sums_of_a_million_rows_at_the_limit_are_exact():
    numbers = np.full((10**6, 2), 2**53 - 1)
    numbers[:, 0] *= -1
    (sums,) = integers(row_sums(numbers, np.zeros(10**6, np.int32), 1))
    assert sums.tolist() == [-(10**6) * (2**53 - 1), 10**6 * (2**53 - 1)]


NUMBERS = np.array([[-5, 2], [3, 1], [4, 3], [-1, 1]]) * 2**50
CODES = np.array([[0, 0, 0, 0], [1, 1, 0, 1], [2, 0, 0, 1], [2, 1, 0, 3]])


def add(place, field, number):
    def change(cells, missing):
        cells[0, place, field] += number

    return change


def moved(source, target, field, number):
    def change(cells, missing):
        add(source, field, -number)(cells, missing)
        add(target, field, number)(cells, missing)

    return change


def counted(column, number):
    def change(cells, missing):
        missing[0, column] += number

    return change


@pytest.mark.parametrize(
    ("change", "column"),
    [
        (add(0, 0, 1), 0),  # a bit more than the node
        (add(0, 1, -1), 0),
        (add(6, 1, 1), 3),
        (moved(0, 1, 0, 3 * 2**50), 0),  # more than is negative in all rows
        (moved(0, 1, 1, 2**51 + 1), 0),  # a hessian below 0
        (add(3, 0, 9 * 2**50), 1),  # two missing rows have 2, and can have -6 to 7
        (add(3, 0, -6 * 2**50), 1),
        (add(3, 1, 2**50), 1),  # no two rows have a hessian of 1
        (counted(1, 3), 1),  # more rows than the node has
        (counted(1, -3), 1),
        (counted(1, -2), 1),  # no row, but something is left
        (counted(0, 1), 0),  # a row, of nothing
        (counted(0, -1), 0),  # as by difference to the parent
        (counted(2, 1), 2),  # one more than all
    ],
)
def test_sums_that_no_rows_have_are_found_by_their_column(change, column):
    slots = np.zeros(4, np.int32)
    cells, missing = claimed(CODES, NUMBERS, slots, 1)
    whole = integers(cells)
    assert unfit_column(words_of(whole), missing, OFFSETS, NUMBERS, slots) is None
    change(whole, missing)
    assert unfit_column(words_of(whole), missing, OFFSETS, NUMBERS, slots) == column


@pytest.mark.parametrize(
    ("shape", "n_labels"), [((1,), 4), ((3,), 28), ((6, 4), 12), ((0, 5, 3), 0), ((3, 0, 2), 56)]
)
def test_each_split_tells_as_many_labels_as_its_cuts_have_bits(shape, n_labels):
    assert disclosed_labels(16, *shape) == n_labels
    assert disclosed_labels(31, *shape) == n_labels
