"""Trees and their categories: as arrays, in messages, on the disk, and as they grow."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
import xgboost

from fedapp.errors import DataError, ProtocolError
from fedapp.histograms.bins import Cuts, with_categories
from fedapp.histograms.split import CategoryRules, Penalties
from fedapp.messages.local_boosting import BagReply
from fedapp.records.document import from_text, load, to_text
from fedapp.trees.categories import (
    NO_SET,
    CategorySets,
    chosen,
    joint_categories,
    recoded,
    side_by_side,
)
from fedapp.trees.grow import Growth, Shape
from fedapp.trees.model import (
    EXPLAINED,
    LEAF,
    NODE,
    Ensemble,
    check_trees,
    importance,
    pack_trees,
    unpack_trees,
)
from fedapp.trees.predict import predict_margins
from fedapp.trees.xgboost import trees_from_xgboost, typed_columns
from strategies.local_boosting import check_report
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
    assert len(model.sets) == sum(int((tree["set"] != NO_SET).sum()) for tree in model.trees) > 20
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


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"sets": []}, "one a categorical split"),
        ({"categories": []}, "one a categorical split"),
        ({"categories": [None, ["a"], None]}, "categories must be 4, one a column"),
        ({"categories": [None, ["a", 1], None, None]}, r"categories\[1\]\[1\] must be a text, g"),
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
    walked = unpack_trees(pack_trees(model.trees, sets=model.sets), WIDTHS).trees
    assert all((tree["gain"] == 0).all() for tree in walked)
    assert unpack_trees(pack_trees(()), WIDTHS).trees == ()
    with pytest.raises(ValueError, match="sets must be"):
        unpack_trees(packed | {"sets": packed["sets"][:-1]}, WIDTHS)
    with pytest.raises(ValueError, match="sets must be"):
        unpack_trees(packed, np.array([0, 3, 20, 0]))


# What is no tree


def test_categorical_splits_of_columns_of_numbers_are_refused():
    codes = np.random.default_rng(0).integers(0, 5, (60, 1)).astype(np.float32)
    matrix = xgboost.DMatrix(
        codes, (codes[:, 0] == 2), feature_types=["c"], enable_categorical=True
    )
    with pytest.raises(ValueError, match="columns of categories by sets, and no others"):
        trees_from_xgboost(
            xgboost.train({"max_cat_to_onehot": 1}, matrix, 1), np.zeros(1, np.int64)
        )


@pytest.mark.parametrize(
    ("field", "change", "rule"),
    [
        ("sizes", np.int32([5]), "trees must divide"),
        ("values", np.float32([1.0]), "values must be"),
        ("defaults", np.uint8([1]), "defaults must be"),
        ("gains", np.float32([1.0]), "gains must be"),
        ("columns", lambda was: was + 4, "columns must be 0 to 3"),
    ],
)
def test_arrays_that_would_lead_astray_are_refused(boosted, field, change, rule):
    packed = pack_trees(boosted[1].trees, ["gains"], boosted[1].sets)
    packed[field] = change(packed[field]) if callable(change) else change
    with pytest.raises(ValueError, match=rule):
        unpack_trees(packed, WIDTHS)


STUMP = {  # a split and its two leaves
    "lefts": np.int32([1, LEAF, LEAF]),
    "offsets": np.array([0, 3]),
    "columns": np.zeros(3, np.int32),
}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"offsets": np.array([0, 2])}, "trees must divide 3 nodes"),
        ({"offsets": np.array([0, 3, 3])}, "trees must divide 3 nodes"),
        ({"offsets": np.array([], np.int64)}, "trees must divide 3 nodes"),
        ({"columns": np.int32([2, 0, 0])}, "columns must be 0 to 1"),
        ({"lefts": np.int32([0, LEAF, LEAF])}, "lefts must lead to two later nodes"),
        ({"lefts": np.int32([2, LEAF, LEAF])}, "lefts must lead to two later nodes"),
        ({"lefts": np.int32([2**31 - 1, LEAF, LEAF])}, "lefts must lead to two later nodes"),
        ({"lefts": np.int32([LEAF, LEAF, LEAF])}, "lefts must reach every node once"),
        ({"offsets": np.array([0, 1, 3])}, "lefts must lead to two later nodes"),
    ],
)
def test_broken_trees_are_refused(changes, rule):
    check_trees(**STUMP, n_columns=2)
    with pytest.raises(ValueError, match=f"^{rule}"):
        check_trees(**STUMP | changes, n_columns=2)


def test_a_reply_must_hold_the_trees_that_were_asked_for(boosted):
    _, model, _ = boosted
    nothing = dict.fromkeys(("train_sums", "valid_sums"), np.empty(0))
    nothing |= dict.fromkeys(("train_scores", "valid_scores"), np.empty((0, 0)))
    reply = BagReply(**pack_trees(model.trees[:1], EXPLAINED, model.sets), **nothing)
    check_report("bank", reply, 1, WIDTHS, max_depth=4)
    n = len(reply.lefts)
    for changes, n_trees, widths, max_depth, rule in (
        (
            {"sizes": reply.sizes - 1},
            1,
            WIDTHS,
            4,
            rf"^bank: BagReply\.trees must divide {n} nodes",
        ),
        ({}, 1, WIDTHS[:0], 4, r"^bank: BagReply\.trees columns must be 0 to -1"),
        ({"hessians": reply.hessians[:2]}, 1, WIDTHS, 4, rf"\.trees hessians must be {n}, got 2"),
        ({}, 2, WIDTHS, 4, r"sizes must have size 2 \(n_trees\)"),
        ({}, 1, WIDTHS, 1, "sizes must be at most 3 nodes a tree"),
    ):
        with pytest.raises(ProtocolError, match=rule):
            check_report("bank", replace(reply, **changes), n_trees, widths, max_depth)


# On the disk


def two_stumps():
    tree = np.zeros(3, dtype=NODE)
    tree["left"], tree["parent"], tree["set"] = [1, LEAF, LEAF], [-1, 0, 0], NO_SET
    tree["value"], tree["gain"] = [0, -0.5, 0.25], [3, 0, 0]
    return Ensemble("binary:logistic", np.float32([0.3]), ("a", "b"), ("0", "1"), (tree,) * 2)


FORMAT = "format must be 3 for fedapp .+, got"


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
        ({"trees": [[7, -1, -1]]}, "lefts must lead to two later nodes"),
    ],
)
def test_rubbish_is_no_model(change, rule):
    document = json.loads(to_text(two_stumps()))
    if isinstance(change.get("trees", [{}])[0], list):
        change = {"trees": [document["trees"][0] | {"left": change["trees"][0]}]}
    text = json.dumps(document | change)
    with pytest.raises(DataError, match=rule):
        from_text(text, Ensemble)


def test_there_is_no_model_without_a_file(tmp_path):
    with pytest.raises(DataError, match=r"^model must be a file, got .*none\.json$"):
        load(tmp_path / "none.json", Ensemble)


def test_importance_adds_gains_and_splits():
    found = {"gain": {"a": 3.0}, "total_gain": {"a": 6.0}, "count": {"a": 2}}
    assert importance(two_stumps()) == found


# Growth


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


# Dictionaries of categories


NAN = np.nan


def test_codes_follow_their_names_into_another_dictionary():
    own, joint = (("a", "b", "d"), None), (("b", "c", "d"), None)
    values = np.float32([[0, 5], [1, 6], [NAN, 7], [2, NAN]])
    found, n_unseen = recoded(before := values.copy(), own, joint)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, [[NAN, 5], [0, 6], [NAN, 7], [2, NAN]])
    np.testing.assert_array_equal(values, before)
    assert n_unseen.tolist() == [1, 0]
    same, n_unseen = recoded(values, own, own)
    assert same is values
    assert not n_unseen.any()
    none, n_unseen = recoded(np.float32([[NAN, NAN]]), (None, ("a",)), (("a", "b"), None))
    assert np.isnan(none).all()
    assert not n_unseen.any()


@pytest.mark.parametrize(
    ("own", "joint", "told"),
    [
        ((), (("a", "b"),), "feature column 'x' must be categories, .* got numbers"),
        ((("a", "b"),), (), "feature column 'x' must be numbers, .* got text"),
    ],
)
def test_numbers_are_no_categories(own, joint, told):
    with pytest.raises(DataError, match=told) as found:
        recoded(np.ones((2, 1), np.float32), own, joint, ("x",))
    assert "'x'" not in found.value.outside


def test_dictionaries_are_joined_chosen_and_put_side_by_side():
    found = joint_categories([(("b", "z"), None), (), (("10", "9", "a"), None)])
    assert found == (("10", "9", "a", "b", "z"), None)  # sorted by text
    assert joint_categories([(), ()]) == joint_categories([(None,)]) == ()
    categories = (None, ("a",), ("b",))
    assert chosen(categories, [2, 0]) == (("b",), None)
    assert chosen(categories, [0]) == ()
    assert side_by_side([((), 2), ((("a",),), 1)]) == (None, None, ("a",))
    assert side_by_side([((), 2), ((), 1)]) == ()
