"""Trees that XGBoost grows, as arrays, and as messages hold them."""

from dataclasses import replace

import numpy as np
import pytest
import xgboost

from fedapp.errors import ProtocolError
from fedapp.messages.local_boosting import BagReply
from fedapp.trees.model import (
    EXPLAINED,
    LEAF,
    NODE,
    Ensemble,
    check_trees,
    pack_trees,
    scaled,
    unpack_trees,
)
from fedapp.trees.predict import add_trees
from fedapp.trees.xgboost import trees_from_xgboost
from strategies.local_boosting import check_report
from tests.reference import compare_trees

NUMBERS = np.zeros(4, dtype=np.int64)  # categories of each column


@pytest.fixture(scope="module")
def grown():
    """A booster of stock XGBoost, its trees, and the rows."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=(300, 4)).astype(np.float32)
    values[rng.random(values.shape) < 0.1] = np.nan
    truth = np.digitize(np.nan_to_num(values[:, 0]), [-0.5, 0.5])
    parameters = {"objective": "multi:softprob", "num_class": 3, "max_depth": 3}
    trained = xgboost.train(parameters, xgboost.DMatrix(values, truth), 2)
    return trained, trees_from_xgboost(trained, NUMBERS).trees, values


def test_trees_of_a_booster_are_its_own(grown):
    trained, trees, values = grown
    model = Ensemble("multi:softprob", np.zeros(3, np.float32), tuple("abcd"), tuple("012"), trees)
    assert compare_trees(model, trained).differing == 0
    zeros = np.zeros((len(values), 3), np.float32)
    theirs = trained.predict(xgboost.DMatrix(values, base_margin=zeros), output_margin=True)
    np.testing.assert_allclose(add_trees(zeros, trees, values), theirs, atol=1e-6)


def test_categorical_splits_of_columns_of_numbers_are_refused():
    codes = np.random.default_rng(0).integers(0, 5, (60, 1)).astype(np.float32)
    matrix = xgboost.DMatrix(
        codes, (codes[:, 0] == 2), feature_types=["c"], enable_categorical=True
    )
    with pytest.raises(ValueError, match="columns of categories by sets, and no others"):
        trees_from_xgboost(xgboost.train({"max_cat_to_onehot": 1}, matrix, 1), NUMBERS[:1])


def test_trees_come_back_from_their_arrays(grown):
    _, trees, _ = grown
    back = unpack_trees(pack_trees(trees, EXPLAINED), NUMBERS).trees
    for tree, other in zip(trees, back, strict=True):
        np.testing.assert_array_equal(tree, other)
    walked = unpack_trees(pack_trees(trees), NUMBERS).trees
    assert all((tree["gain"] == 0).all() for tree in walked)
    assert unpack_trees(pack_trees(()), NUMBERS).trees == ()


def second_pair_again(lefts):
    """The first tree with a split whose children are its parent's."""
    root, child = np.flatnonzero(lefts)[:2]
    return np.where(np.arange(len(lefts)) == root, lefts[child], lefts)


@pytest.mark.parametrize(
    ("field", "change", "rule"),
    [
        ("sizes", np.int32([5]), "trees must divide"),
        ("values", np.float32([1.0]), "values must be"),
        ("defaults", np.uint8([1]), "defaults must be"),
        ("gains", np.float32([1.0]), "gains must be"),
        ("columns", lambda was: was + 4, "columns must be 0 to 3"),
        ("lefts", lambda was: np.where(was > 0, 1, 0).astype(np.uint16), "lefts must lead"),
        ("lefts", lambda was: np.where(was > 0, 999, 0).astype(np.uint16), "lefts must lead"),
        ("lefts", second_pair_again, "lefts must reach every node once"),
    ],
)
def test_arrays_that_would_lead_astray_are_refused(grown, field, change, rule):
    packed = pack_trees(grown[1][1:], ["gains"])
    packed[field] = change(packed[field]) if callable(change) else change
    with pytest.raises(ValueError, match=rule):
        unpack_trees(packed, NUMBERS)


def test_scaling_leaves_what_the_rows_said(grown):
    tree = grown[1][0]
    half = scaled(tree, 0.5)
    for name in NODE.names or ():
        factor = 0.5 if name in {"value", "weight"} else 1
        np.testing.assert_array_equal(half[name], tree[name] * factor)


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


def test_a_reply_must_hold_the_trees_that_were_asked_for():
    nothing = {name: np.empty(0) for name in ("train_sums", "valid_sums")}
    nothing |= {name: np.empty((0, 0)) for name in ("train_scores", "valid_scores")}

    def reply(lefts, sizes):
        n_splits, zeros = np.count_nonzero(lefts), np.zeros(len(lefts), np.float32)
        return BagReply(
            sizes=np.int32(sizes),
            lefts=np.uint16(lefts),
            values=zeros,
            columns=np.zeros(n_splits, np.int32),
            defaults=np.zeros(n_splits, np.uint8),
            sets=np.empty(0, np.uint8),
            gains=zeros[:n_splits],
            hessians=zeros,
            weights=zeros,
            **nothing,
        )

    stump = reply([1, 0, 0], [3])
    few = replace(stump, hessians=stump.hessians[:2])
    check_report("bank", stump, 1, NUMBERS[:1], max_depth=1)
    for sent, n_trees, n_columns, rule in (
        (reply([1, 0, 0], [2]), 1, 1, r"^bank: BagReply\.trees must divide 3 nodes"),
        (stump, 1, 0, r"^bank: BagReply\.trees columns must be 0 to -1"),
        (few, 1, 1, r"^bank: BagReply\.trees hessians must be 3, got 2"),
        (stump, 2, 1, "trees must be 2, got 1"),
        (reply([1, 3, 0, 0, 0], [5]), 1, 1, "sizes must be at most 3 nodes a tree"),
    ):
        with pytest.raises(ProtocolError, match=rule):
            check_report("bank", sent, n_trees, NUMBERS[:n_columns], max_depth=1)
