"""Columns are drawn by their weights, as ``feature_weights`` of XGBoost; the draws differ."""

from itertools import permutations

import numpy as np
import pytest

from fedapp.errors import ConfigError
from fedapp.records.document import load
from fedapp.runs.baselines import baseline_rows, train_boosted
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.trees.constraints import weights_of
from fedapp.trees.draws import draw_columns, parse_weights
from fedapp.trees.model import LEAF, Ensemble
from fedapp.trees.rounds import Sampling
from strategies.secureboost import SecureBoost


def chance_of_pair(weights, pair):
    """Of both columns, drawn one after the other from all: the slow way, over all orders."""
    total = float(np.sum(weights))
    return sum(
        weights[first] / total * weights[second] / (total - weights[first])
        for first, second in permutations(pair)
    )


@pytest.mark.slow
def test_pairs_are_drawn_with_the_chances_of_one_after_the_other():
    weights = np.array([4.0, 2.0, 1.0, 1.0])
    rng = np.random.default_rng(5)
    counts = {}
    for _ in range(8000):
        drawn = draw_columns(np.ones(4, dtype=bool), 0.5, rng, weights)
        pair = frozenset(np.flatnonzero(drawn).tolist())
        counts[pair] = counts.get(pair, 0) + 1
    assert len(counts) == 6
    for pair, count in counts.items():
        expected = chance_of_pair(weights, pair)
        assert abs(count / 8000 - expected) < 4.5 * np.sqrt(expected * (1 - expected) / 8000)


def test_columns_without_weight_are_not_drawn():
    weights = np.array([0.0, 1.0, 0.0, 3.0])
    rng = np.random.default_rng(5)
    allowed = np.array([True, True, True, False])
    for share in (0.2, 0.9):
        assert draw_columns(allowed, share, rng, weights).tolist() == [False, True, False, False]
    assert not draw_columns(np.array([True, False, True, False]), 0.5, rng, weights).any()


def test_equal_weights_draw_what_none_draw_in_number():
    for share, n_drawn in ((0.01, 1), (0.5, 5), (0.99, 9)):
        drawn = Sampling(3, share, np.ones(10)).columns(0, 4, 10)
        assert drawn.sum(axis=1).tolist() == [n_drawn] * 4
        assert drawn.sum(axis=1).tolist() == Sampling(3, share).columns(0, 4, 10).sum(1).tolist()


DRAWS = [
    {"colsample_bytree": 0.5},
    {"colsample_bylevel": 0.5},
    {"colsample_bynode": 0.5, "grow_policy": "lossguide", "max_leaves": 6},
]


@pytest.mark.by_default("draws0")
@pytest.mark.parametrize("draws", DRAWS)
def test_three_parties_draw_what_one_does_in_the_clear_and_under_masks(made, draws):
    weights = "a:0,b:0.2,c:5"  # d, e and f: 1
    runs = [(1, "plain"), (3, "plain"), (1, "secure"), (3, "secure")]
    models = []
    for parties, aggregation in runs:
        how = {"pax__aggregation": aggregation, "pax__bins": "equal", "max_bin": 64}
        more = {"feature_weights": weights, "num_boost_round": 5, **how, **draws}
        run = made("pax", parties=parties, test_fraction=0.0, **more)
        models.append(load(run_local(run).path / "model.json", Ensemble))
    for one, three in (models[:2], models[2:]):
        for tree, other in zip(one.trees, three.trees, strict=True):
            for name in ("left", "column", "threshold", "default_left"):
                np.testing.assert_array_equal(tree[name], other[name])
    columns = np.concatenate([tree["column"][tree["left"] != LEAF] for tree in models[0].trees])
    assert len(columns) > 8
    assert 0 not in columns


def test_xgboost_avoids_the_same_columns(made):
    more = {"num_boost_round": 10, "colsample_bytree": 0.5, "parties": 1}
    run = made("pax", feature_weights="a:0,b:0,c:0", **more)
    rows = baseline_rows(run)[0]
    splits = {
        "ours": load(run_local(run).path / "model.json", Ensemble).trees,
        "free": load(run_local(made("pax", **more)).path / "model.json", Ensemble).trees,
    }
    used = {
        name: {int(c) for tree in trees for c in tree["column"][tree["left"] != LEAF]}
        for name, trees in splits.items()
    }
    assert np.flatnonzero(train_boosted(run, rows).gains).tolist() == [3, 4, 5]
    assert used == {"ours": {3, 4, 5}, "free": {0, 1, 2, 3, 4, 5}}


@pytest.mark.parametrize(
    ("weights", "rule"),
    [
        ("a", "must be columns with a number from 0 to 1e9, as .*, got a$"),
        ("a:-1", "must be columns with a number .* got a:-1"),
        ("a:nan", "must be columns with a number .* got a:nan"),
        ("a:1,a:2", "must name a column once, got a twice"),
    ],
)
def test_weights_that_are_none_are_refused(weights, rule):
    with pytest.raises(ConfigError, match=f"^feature-weights {rule}"):
        load_settings({"strategy": "pax", "feature-weights": weights, "colsample-bytree": 0.5})


def test_weights_that_change_nothing_are_refused(made):
    with pytest.raises(ConfigError, match="feature-weights must be omitted where no colsample"):
        load_settings({"strategy": "pax", "feature-weights": "a:2"})
    for weights, rule in (
        ("g:2", "must name columns of the table, got g"),
        (NOTHING, "must be > 0"),
    ):
        with pytest.raises(ConfigError, match=f"feature-weights {rule}"):
            run_local(made("pax", parties=2, feature_weights=weights, colsample_bytree=0.5))
    assert not SecureBoost.takes("feature-weights")
    assert weights_of(parse_weights("b:2"), ("a", "b")).tolist() == [1, 2]


NOTHING = ",".join(f"{name}:0" for name in "abcdef")
