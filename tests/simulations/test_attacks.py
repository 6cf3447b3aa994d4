"""Attacks rebuild what they say, from transcripts of honest runs; how they are run and shown."""

import math
from itertools import product

import numpy as np
import pytest

from fedapp.audit import membership as scored
from fedapp.audit import vertical as grouped
from fedapp.audit.timberstrike import Kinds, Leaves, Rows, Target, dealt, first_counts, matched
from fedapp.errors import ConfigError
from fedapp.trees.model import LEAF
from fedapp.trees.predict import find_leaves
from fedapp.trees.xgboost import grow_trees
from simulations.attack import Attack, Outcome, attack_results
from simulations.attacks import (
    canaries,
    crafted,
    eini_paths,
    horizontal,
    vertical,
)
from simulations.study import Scored, command

SMALL = {"data": "breast-cancer", "columns": "sizes:25,5", "test-fraction": 0.8, "max-bin": 8}
SMALL |= {"secureboost.key-bits": 384, "num-boost-round": 2, "max-depth": 3, "seed": 1}
ALONE = {"secureboost.first-trees": 2}


def test_results_are_means_over_seeds_and_a_run_that_is_kept_is_not_run_again(tmp_path):
    asked, ways = [], {"default": {}, "one": {"max-depth": 1}}

    def run(overrides):
        asked.append(overrides)
        return Outcome(0.5 + overrides["seed"], 0.25, 0.75)

    attack = Attack("who", "what", {"first": {"data": "wine", "eta": 0.9}}, ways, run)
    found = list(attack_results("name", attack, seeds=2, output=tmp_path))
    assert [(one["data"], one["setting"]) for one in found] == [("first", way) for way in ways]
    assert {(one["success"], one["chance"], one["score"]) for one in found} == {(1.0, 0.25, 0.75)}
    given = {"data": "wine", "eta": 0.9, "max-depth": 1}
    assert asked[2:] == [{**given, "seed": seed} for seed in (0, 1)]
    assert list(attack_results("name", attack, seeds=2, output=tmp_path)) == found
    assert len(asked) == 4
    list(attack_results("name", attack, seeds=3, output=tmp_path))
    assert {one["seed"] for one in asked[4:]} == {2}


def test_runs_that_the_attack_is_not_for_are_refused(settings):
    for other in ({"objective": "multi:softprob"}, {"colsample_bytree": 0.5}):
        with pytest.raises(ConfigError, match="the attacked run must have two classes"):
            next(horizontal.attack_plain_sums(settings(**other)))


# Small runs of every attack: settings, and what lowers its success, if anything.
ATTACKS = {
    "shared_nodes": (vertical.attack_shared_nodes, {**SMALL, "columns": "sizes:28,2"}, ALONE),
    "solved_bins": (vertical.attack_solved_bins, SMALL, ALONE),
    "reverse_sums": (crafted.attack_reverse_sums, SMALL, {"num-boost-round": 1}),
    "eini_paths": (eini_paths.attack_eini_paths, {**SMALL, "num-boost-round": 4}, None),
}


@pytest.mark.by_default("solved_bins")
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_beats_chance_and_a_remedy_lowers_its_success(name, monkeypatch):
    monkeypatch.setattr("fedapp.audit.vertical.FOLDS", 2)
    monkeypatch.setattr("fedapp.audit.vertical.DRAWS", 2)
    run, given, remedy = ATTACKS[name]
    found = run(given)
    assert found.success > found.chance + 0.1
    assert found.unfinished == 0.0
    if remedy:
        less = run({**given, **remedy})
        assert less.chance == found.chance
        assert less.success < found.success
        if remedy is ALONE:
            assert less.success == (found.chance if name == "solved_bins" else 0.5)


# Rows from sums


@pytest.mark.by_default("5-plain")
@pytest.mark.parametrize("aggregation", ["plain", "secure"])
@pytest.mark.parametrize("least", [0, 5])
def test_rows_are_rebuilt_from_honest_sums_unless_bins_have_several(
    settings, write_table, aggregation, least
):
    given = {"data": str(write_table(n_rows=60)), "label": "y", "parties": 2, "max_depth": 6}
    given |= {"num_boost_round": 3, "max_bin": 256, "least_bin_rows": least}
    run = settings(pax__aggregation=aggregation, **given)
    attacked = horizontal.attack_masked_sums
    found = attacked(run) if aggregation == "secure" else next(horizontal.attack_plain_sums(run))
    assert (found["rows"], found["wrong"]) == (43, 0)
    assert bool(found["rebuilt"]) == (least == 0)


# Labels from false sums

STUMPS = {**crafted.STUMPS, "test-fraction": 0.97, "num-boost-round": 5}


@pytest.mark.by_default("sums of other rows-16")
@pytest.mark.parametrize(
    ("lie", "n_labels"), [("sums of no rows", 5), ("sums of other rows", 16)], ids=str
)
def test_sums_that_are_not_checked_show_labels_and_checked_ones_end_the_run(
    real_data, lie, n_labels
):
    before, after = (crafted.lied(STUMPS, lie, checks) for checks in ("nothing", "all"))
    assert before == {"rounds": 5, "labels": n_labels, "right": n_labels, "ended": ""}
    assert (after["rounds"] <= 2, after["labels"] <= 4) == (True, True)
    assert "of column" in after["ended"]


# Labels from nodes


def test_a_node_counts_where_it_has_rows_enough_and_a_column_differs():
    lefts = np.array([1, 3, LEAF, LEAF, LEAF])
    leaves = np.array([2, 2, 2, 3, 3, 4, 4, -1, -1], dtype=np.int32)
    drawn = np.array([True, True, False, *[True] * 6])
    column = [1.0, 2.0, 9.0, 1.0, np.nan, np.nan, np.nan, 1.0, 2.0]
    values = np.array(column, dtype=np.float32)[:, None]
    found = grouped.pure_nodes(lefts, leaves, drawn, values, fewest=2)
    assert [members.tolist() for members in found] == [[0, 1], [3, 4]]
    assert not list(grouped.pure_nodes(lefts, leaves, drawn, values, fewest=3))


def test_groups_that_share_a_row_become_one_and_the_two_largest_are_named():
    groups = grouped.joined(grouped.joined(np.arange(5), np.array([3, 4])), np.array([0, 4]))
    assert groups.tolist() == [0, 1, 2, 0, 0]
    labels = np.array([0, 0, 1, 1, 1, 0], dtype=np.float32)
    assert grouped.label_auc(np.array([0, 0, 2, 2, 4, 5]), labels) == pytest.approx(8.5 / 9)
    assert grouped.label_auc(np.array([0, 0, 0, 3, 4, 5]), labels) == pytest.approx(7.5 / 9)


def test_a_margin_is_of_the_label_and_compared_with_models_with_and_without_the_row():
    flags = np.array([[True, True, False], [False, True, True], [True, True, False]])
    margins = np.array([[5.0, 9.0, 1.0], [1.0, 9.0, 2.0], [7.0, 9.0, 1.0]])
    shadows = [scored.ScoredRows(*each) for each in zip(margins, flags, strict=True)]
    found = scored.above_usual(scored.ScoredRows(np.array([6.0, 9.0, 1.0]), flags[0]), shadows)
    # The row that has trained all models says nothing.
    assert found.margins.tolist() == [6.0 - (6.0 + 1.0) / 2, 1.0 - (2.0 + 1.0) / 2]
    assert found.members.tolist() == [True, False]
    labels = np.array([0, 1, 0], np.float32)
    own = Scored(np.array([[0.1], [3], [-2]], np.float32), labels, np.arange(3))
    np.testing.assert_allclose(horizontal.own_margins(own), [-0.1, 3, 2], rtol=1e-6)


def test_a_probability_counts_all_outcomes_and_what_delta_allows():
    epsilon, delta, n_canaries, n_guesses, n_correct = 0.7, 0.001, 12, 8, 6
    right = math.exp(epsilon) / (1 + math.exp(epsilon))
    chances = np.zeros(n_guesses + 1)
    for guesses in product((True, False), repeat=n_guesses):
        chances[sum(guesses)] += math.prod(right if guess else 1 - right for guess in guesses)
    tails = [float(chances[least:].sum()) for least in range(n_correct + 1)]
    steps = range(1, n_correct + 1)
    most = max((tails[n_correct - step] - tails[n_correct]) / step for step in steps)
    expected = tails[n_correct] + 2 * n_canaries * delta * most
    found = canaries.p_value(epsilon, delta, n_canaries, n_guesses, n_correct)
    assert found == pytest.approx(expected)
    assert canaries.p_value(epsilon, 0.0, n_canaries, n_guesses, 0) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("audit", ["rows", "classes", "measures"])
def test_too_little_noise_is_found_and_the_promised_noise_is_not(audit, monkeypatch):
    monkeypatch.setattr(canaries, "FAULTS", (0.1, 0.0))
    words = ["--audit", audit, "--epsilon", "1", "--canaries", "400"]
    whole, little, none = command(canaries.canaries, words)
    assert whole["bound"] < 1.5  # an audit errs in up to one of twenty runs
    assert little["bound"] > 1
    assert none["correct"] == none["guesses"] == 400
    assert none["bound"] > 4


# Rows from trees

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


def numbers(n_columns):
    return Kinds.of(np.zeros((1, n_columns)), np.zeros(n_columns, np.int64))


NUMBERS = numbers(N_COLUMNS)


def target(trees, tells_hessians):
    own, truth = (np.column_stack(made(seed)).astype(np.float64) for seed in (2, 1))
    read = [(Leaves.of(tree, NUMBERS, ETA, tells_hessians), True) for tree in trees]
    return Target(read, MARGIN, truth, own)


def shares(attacked):
    """Means of what is rebuilt, and of what is guessed."""
    return tuple(float(each.mean()) for each in attacked.shares(LAMBDA, np.random.default_rng(0)))


@pytest.mark.parametrize("tells_hessians", [True, False])
def test_the_first_tree_tells_how_many_rows_of_each_class_are_in_a_leaf(trees, tells_hessians):
    values, labels = made(1)
    (leaves,) = find_leaves(trees[:1], values)
    places = np.flatnonzero(trees[0]["left"] == LEAF)
    expected = [
        [np.sum((leaves == leaf) & (labels == label)) for label in (0, 1)] for leaf in places
    ]
    first = Leaves.of(trees[0], NUMBERS, ETA, tells_hessians)
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
        kind = numbers(1)
        leaves = Leaves(*HALVES, weights, told, weights, kind.occurring[None][[0, 0]], kind)
        marks = kind.occurring[None][[0] * 5]
        rows = Rows(-halves[[0] * 5], halves[[0] * 5], labels, margins, marks)
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
@pytest.mark.parametrize("strategy", ["bagging", "cyclic"])
def test_runs_are_attacked(strategy):
    short = {"data": "breast-cancer", "test-fraction": 0.8, "num-boost-round": 6, "max-depth": 3}
    found = horizontal.attack_trees({**short, "strategy": strategy, "seed": 1})
    assert 0.2 < found.chance < found.success < 0.8
