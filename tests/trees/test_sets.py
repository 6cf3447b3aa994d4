"""Categorical splits: sets, and trees that have them, on their way to disk, messages and rows."""

import json
from dataclasses import fields

import numpy as np
import pytest
import xgboost

from fedapp.errors import DataError
from fedapp.histograms.bins import Cuts, with_categories
from fedapp.histograms.split import CategoryRules, Penalties
from fedapp.records.document import from_text, to_text
from fedapp.trees.grow import ROUTE, Growth, Shape, route_codes, route_values
from fedapp.trees.model import (
    EXPLAINED,
    LEAF,
    Ensemble,
    Grown,
    concatenated,
    ordered_sets,
    pack_trees,
    unpack_trees,
)
from fedapp.trees.predict import find_leaves, move_rows, predict_margins, sides_of, slots_of
from fedapp.trees.sets import NO_SET, CategorySets
from fedapp.trees.xgboost import trees_from_xgboost, typed_columns
from tests.reference import compare_trees

WIDTHS = np.array([0, 3, 11, 0])
CATEGORIES = (None, tuple("abc"), tuple("ABCDEFGHIJK"), None)
NAMES = ("number", "few", "many", "other")


@pytest.fixture(scope="module")
def boosted():
    """A booster of stock XGBoost on categories and numbers, its trees as a model, and the rows."""
    rng = np.random.default_rng(5)
    values = rng.normal(size=(600, 4)).astype(np.float32)
    for column in (1, 2):
        values[:, column] = rng.integers(0, WIDTHS[column], len(values))
    truth = (values[:, 1] == 1) ^ np.isin(values[:, 2], [1, 4, 8, 10]) ^ (values[:, 0] > 0.5)
    values[rng.random(values.shape) < 0.1] = np.nan
    parameters = {"objective": "binary:logistic", "base_score": 0.5, "max_depth": 4}
    matrix = xgboost.DMatrix(values, truth, **typed_columns(WIDTHS))
    booster = xgboost.train(parameters, matrix, 5)
    grown = trees_from_xgboost(booster, WIDTHS)
    start = "binary:logistic", np.float32([0.5]), NAMES, ("0", "1")
    model = Ensemble(*start, grown.trees, grown.sets, CATEGORIES)
    return booster, model, values


def test_sets_hold_codes_in_bits():
    sets = CategorySets.of_codes(((0, 2), (), (9, 8))).widened(np.array([3, 5, 10]))
    assert sets.codes() == [[0, 2], [], [8, 9]]
    assert sets.bits.tolist() == [0b10100000, 0, 0, 0b11000000]
    assert sets.take(np.array([2, 0])).codes() == [[8, 9], [0, 2]]
    assert sets.plus(sets.take(np.array([1]))).widths.tolist() == [3, 5, 10, 5]
    assert len(sets) == 3


def widened(*codes):
    return lambda: CategorySets.of_codes(codes).widened(np.array([3, 3]))


def of_bits(bits, *widths):
    return lambda: CategorySets(np.array(bits, np.uint8), np.array(widths))


@pytest.mark.parametrize(
    ("made", "rule"),
    [
        (of_bits([1, 2], 8), "sets must be 1 bytes, got 2"),
        (of_bits([], 8), "sets must be 1 bytes, got 0"),
        (of_bits([0b00010000], 3), "sets must contain only categories of the column"),
        (of_bits([255, 0b01000000], 9), "sets must contain only categories of the column"),
        (widened([0]), "sets must be 2, one a categorical split, got 1"),
        (widened([0], [3]), "sets must contain only categories of the column"),
        (widened([0], [65_535]), "sets must be of categories < 65535, got 65535"),
    ],
)
def test_bits_and_codes_that_are_no_sets_are_refused(made, rule):
    with pytest.raises(ValueError, match=f"^{rule}$"):
        made()


def test_trees_of_a_booster_are_its_own_with_their_sets(boosted):
    booster, model, values = boosted
    assert {3, 11} == set(model.sets.widths.tolist())
    assert len(model.sets) == sum(int((tree["set"] != NO_SET).sum()) for tree in model.trees) > 20
    assert any((tree["column"][tree["left"] != LEAF] == 0).any() for tree in model.trees)
    assert compare_trees(model, booster).differing == 0
    matrix = xgboost.DMatrix(values, **typed_columns(WIDTHS))
    theirs = booster.predict(matrix, output_margin=True)
    np.testing.assert_allclose(predict_margins(model, values)[:, 0], theirs, atol=1e-6)
    # A code that no category has goes the way of a missing value.
    values = values.copy()
    values[:, 2] = np.nan
    missing = predict_margins(model, values)
    for code in (11, -1, 2**20):
        values[:, 2] = code
        np.testing.assert_array_equal(predict_margins(model, values), missing)


def test_a_model_with_categories_survives_the_disk_and_one_without_says_nothing(boosted):
    _, model, _ = boosted
    again = from_text(to_text(model), Ensemble)
    assert again.categories == CATEGORIES
    assert again.sets.codes() == model.sets.codes()
    for tree, other in zip(model.trees, again.trees, strict=True):
        np.testing.assert_array_equal(tree, other)
    assert to_text(again) == to_text(model)
    empty = Ensemble("binary:logistic", model.base_score, NAMES, ("0", "1"), ())
    assert not {"categories", "sets"} & json.loads(to_text(empty)).keys()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"sets": []}, "one a categorical split"),
        ({"categories": []}, "one a categorical split"),
        ({"categories": [None, ["a"], None]}, "categories must be 4, one a column"),
        (
            {"categories": [None, ["a", 1], None, None]},
            r"categories\[1\]\[1\] must be a text, got 1",
        ),
        ({"categories": [None, ["a", "a"], None, None]}, "categories must differ within a column"),
        ({"categories": [None, ["a"], ["b"], None]}, "sets must contain only categories"),
    ],
)
def test_categories_that_do_not_fit_the_trees_are_refused(boosted, change, rule):
    document = {**json.loads(to_text(boosted[1])), **change}
    with pytest.raises(DataError, match=rule):
        from_text(json.dumps(document), Ensemble)


def test_sets_travel_in_a_bit_a_category(boosted):
    _, model, _ = boosted
    packed = pack_trees(model.trees, EXPLAINED, model.sets)
    assert len(packed["sets"]) == sum(-(-width // 8) for width in model.sets.widths.tolist())
    back = unpack_trees(packed, WIDTHS)
    assert back.sets.codes() == model.sets.codes()
    for tree, other in zip(model.trees, back.trees, strict=True):
        np.testing.assert_array_equal(tree, other)
    with pytest.raises(ValueError, match="sets must be"):
        unpack_trees(packed | {"sets": packed["sets"][:-1]}, WIDTHS)
    with pytest.raises(ValueError, match="sets must be"):
        unpack_trees(packed, np.array([0, 3, 20, 0]))


def test_some_of_the_trees_keep_their_own_sets(boosted):
    _, model, _ = boosted
    shorter = model.first_rounds(2)
    assert len(shorter.sets) == sum(int((tree["set"] != NO_SET).sum()) for tree in model.trees[:2])
    np.testing.assert_array_equal(from_text(to_text(shorter), Ensemble).trees[1], shorter.trees[1])
    parts = [ordered_sets(model.trees[start : start + 2], model.sets) for start in (0, 2, 4)]
    whole = concatenated(parts)
    assert whole.sets.codes() == model.sets.codes()
    for tree, other in zip(model.trees, whole.trees, strict=True):
        np.testing.assert_array_equal(tree, other)
    later = unpack_trees(pack_trees(model.trees[3:], sets=model.sets), WIDTHS)
    assert later.sets.codes() == ordered_sets(model.trees[3:], model.sets).sets.codes()
    assert concatenated([]) == Grown((), concatenated([]).sets)


def test_all_ways_to_move_rows_agree(boosted):
    _, model, values = boosted
    tree = model.trees[0]
    leaves = np.zeros(len(values), np.int32)
    find_leaves(tree, values, leaves, model.sets)
    by_value = by_side = by_code = np.zeros((1, len(values)), np.int32)
    codes, first_rights = coded(values)
    for _ in range(4):
        splits = np.flatnonzero((tree["left"] != LEAF) & np.isin(np.arange(len(tree)), by_value))
        at = tree[splits]
        routes = np.zeros(len(splits), dtype=ROUTE)
        routes["node"] = splits
        for name in ("left", "column", "threshold", "default_left", "set"):
            routes[name] = at[name]
        firsts = np.array([first_rights(s["column"], s["threshold"]) for s in at], dtype=np.int64)
        by_code = route_codes(by_code, routes, firsts, codes, 65535, model.sets)
        slots, sizes = slots_of(by_side, np.zeros(len(splits), np.int32), splits.astype(np.int32))
        cuts = at["column"].astype(np.int64), at["threshold"], at["default_left"].astype(np.uint8)
        sides = sides_of(values, *cuts, slots, sizes, at["set"], model.sets)
        by_side = move_rows(by_side, at["left"], slots, np.cumsum(sizes) - sizes, sides)
        by_value = route_values(by_value, routes, values, model.sets)
    for nodes in (by_value, by_side, by_code):
        np.testing.assert_array_equal(nodes[0], leaves)


def coded(values):
    """A bin for every distinct value, and the first bin of a column at or above a threshold."""
    points = [np.unique(column[~np.isnan(column)]) for column in values.T]
    codes = np.full(values.shape, 65535, np.uint16)
    for of_column, column, known in zip(codes.T, values.T, points, strict=True):
        is_known = ~np.isnan(column)
        of_column[is_known] = np.searchsorted(known, column[is_known])
    return codes, lambda column, threshold: np.searchsorted(points[column], threshold)


def test_growth_goes_on_with_its_sets_where_it_was_kept():
    def growth():
        cuts = Cuts(np.float32([1, 2, 3, 4, 5]), np.array([0, 5]), np.zeros(1, np.float32))
        penalties = Penalties(1.0, 0.0, 0.0, *[0.0] * (len(fields(Penalties)) - 3))
        shape = Shape(2, 0.5, penalties, CategoryRules(4, 64))
        cuts = with_categories(cuts, np.array([9]), np.array([5]))
        found = Growth(1, cuts, np.ones((1, 1), dtype=bool), shape)
        found.set_roots(SUMS.sum(axis=0)[None])
        return found

    whole = growth()
    routes, sets = whole.split(SUMS[None], np.zeros((1, 1), np.int32))
    assert routes["set"].tolist() == [0]
    assert sets.codes() == [[1, 3]]
    assert sets.widths.tolist() == [9]  # of all categories, of which 5 occur
    again = Growth(1, whole.cuts, whole.allowed, whole.shape, state=whole.state)
    light = np.where(np.isin(np.arange(5), [1, 3])[:, None], SUMS, 0)[None]
    for each in (whole, again):
        each.split(light, np.zeros((1, 1), np.int32))
    assert len(whole.grown().sets) > 1
    assert again.grown().sets.codes() == whole.grown().sets.codes()
    np.testing.assert_array_equal(again.grown().trees[0], whole.grown().trees[0])


SUMS = np.array([[-4.0, 2.0], [6.0, 3.0], [-1.0, 1.0], [5.0, 2.0], [-3.0, 2.0]])
