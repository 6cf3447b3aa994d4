"""Rows that are rebuilt from trees."""

import numpy as np
import pytest

from fedapp.audit.timberstrike import Leaves, Rows, Target, dealt, first_counts, matched
from fedapp.trees.model import LEAF
from fedapp.trees.predict import find_leaves
from fedapp.trees.xgboost import grow_trees
from simulations.attacks.horizontal import VALUES, attack_trees

ETA, LAMBDA, MARGIN = 0.3, 1.0, -0.5
N_ROWS, N_COLUMNS, ROUNDS = 120, 4, 12


def made(seed):
    """Values, few of them large, and labels of rows."""
    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=(N_ROWS, N_COLUMNS))
    labels = numbers[:, 0] + numbers[:, 1] * numbers[:, 2] + 0.5 * rng.normal(size=N_ROWS) > 0
    return np.exp(1.5 * numbers).astype(np.float32), labels.astype(np.float32)


@pytest.fixture(scope="module")
def trees():
    """That XGBoost grows on the rows of seed 1."""
    values, labels = made(1)
    parameters = {"eta": ETA, "max_depth": 4, "reg_lambda": LAMBDA, "max_bin": 256}
    rows = values, labels, np.ones(N_ROWS, np.float32)
    margins, widths = np.full((N_ROWS, 1), MARGIN, np.float32), np.zeros(N_COLUMNS, np.int64)
    return grow_trees("binary:logistic", 2, parameters, rows, margins, ROUNDS, widths).trees


def target(trees, tells_hessians):
    own, truth = (np.column_stack(made(seed)).astype(np.float64) for seed in (2, 1))
    read = [(Leaves.of(tree, N_COLUMNS, ETA, tells_hessians), True) for tree in trees]
    return Target(read, MARGIN, truth, own)


def shares(attacked):
    """Means of what is rebuilt, and of what is guessed."""
    return tuple(float(each.mean()) for each in attacked.shares(LAMBDA, np.random.default_rng(0)))


@pytest.mark.parametrize("tells_hessians", [True, False])
def test_the_first_tree_tells_how_many_rows_of_each_class_are_in_a_leaf(trees, tells_hessians):
    values, labels = made(1)
    leaves = np.zeros(N_ROWS, dtype=np.int32)
    find_leaves(trees[0], values, leaves)
    places = np.flatnonzero(trees[0]["left"] == LEAF)
    expected = [
        [np.sum((leaves == leaf) & (labels == label)) for label in (0, 1)] for leaf in places
    ]
    first = Leaves.of(trees[0], N_COLUMNS, ETA, tells_hessians)
    assert first_counts(first, MARGIN, LAMBDA, N_ROWS).tolist() == expected
    inside = (first.lows[:, None] <= values) & (values < first.highs[:, None])
    assert inside.all(axis=2).sum(axis=1).tolist() == np.sum(expected, axis=1).tolist()


@pytest.mark.parametrize("tells_hessians", [True, False])
def test_trees_tell_more_of_their_rows_than_the_bounds_of_columns(trees, tells_hessians):
    found, first = (shares(target(given, tells_hessians)) for given in (trees, trees[:1]))
    assert found[0] > found[1] + 0.1
    assert found[1] == first[1] < first[0] < found[0]
    attacked = target(trees, tells_hessians)
    rebuilt = attacked.rebuilt(LAMBDA)
    assert (rebuilt.lows < rebuilt.highs).all()
    assert not tells_hessians or rebuilt.labels.sum() == attacked.truth[:, -1].sum()


HALVES = np.array([[-np.inf], [0.0]]), np.array([[0.0], [np.inf]])


def test_rows_are_dealt_out_so_that_sums_are_those_of_the_leaves():
    margins = np.array([-1.0, -1.0, 0.5, 0.5, 2.0])
    labels = np.array([0.0, 0.0, 1.0, 1.0, 0.0])
    means = 1 / (1 + np.exp(-margins))
    gradients, hessians = means - labels, means * (1 - means)
    halves = np.full((2, 1), np.inf)
    truth = np.array([0, 1, 1, 1, 0])
    sums, sizes = (np.bincount(truth, weights=each) for each in (gradients, hessians))
    for told in (sizes, np.zeros(2)):
        weights = -sums / (sizes + LAMBDA)
        leaves = Leaves(*HALVES, weights, told, weights)
        rows = Rows(-halves[[0] * 5], halves[[0] * 5], labels, margins)
        found = dealt(rows, leaves, LAMBDA)
        assert [np.sum(found == leaf) for leaf in (0, 1)] == [2, 3]
        assert np.allclose(np.bincount(found, weights=gradients), sums)
        rows.lows[3] = 0.5  # of two that are alike one can be in the second leaf alone
        assert dealt(rows, leaves, LAMBDA)[3] == 1


def test_rows_are_matched_so_that_most_values_agree():
    truth = np.array([[1.0, 10.0, 0.0], [2.0, 20.0, 1.0], [3.0, 30.0, 1.0]])
    tolerances = np.array([0.5, 1.0, 0.1])
    assert matched(truth[[2, 0, 1]] + np.array([0.4, -0.9, 0.0]), truth, tolerances).mean() == 1.0
    assert matched(truth + np.array([0.6, 0.0, 0.0]), truth, tolerances).mean() == pytest.approx(
        6 / 9
    )
    assert matched(truth[:2], truth, tolerances).mean() == pytest.approx(6 / 9)  # a row is missing


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "knows_values"), [("bagging", False), ("cyclic", True)])
def test_runs_are_attacked(strategy, knows_values):
    short = {"data": "breast-cancer", "test-fraction": 0.8, "num-boost-round": 6, "max-depth": 3}
    found = attack_trees({**short, "strategy": strategy, "seed": 1, VALUES: knows_values})
    assert 0.2 < found.chance < 0.8
    assert 0.2 < found.success < 0.8
    assert (found.success > found.chance) or knows_values
