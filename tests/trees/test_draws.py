"""Columns are drawn by their weights, as ``feature_weights`` of XGBoost; the draws differ.

That parties draw what one does is in ``test_exactness``.
"""

from itertools import permutations

import numpy as np
import pytest

from fedapp.errors import ConfigError
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.trees.constraints import weights_of
from fedapp.trees.draws import draw_columns, parse_weights
from fedapp.trees.rounds import Sampling
from strategies.secureboost import SecureBoost
from tests.pooled import pooled_booster


def chance_of_pair(weights, pair):
    """Of both columns, drawn one after the other from all: the slow way, over all orders."""
    total = float(np.sum(weights))
    return sum(
        weights[first] / total * weights[second] / (total - weights[first])
        for first, second in permutations(pair)
    )


def test_pairs_are_drawn_with_the_chances_of_one_after_the_other():
    weights = np.array([4.0, 2.0, 1.0, 1.0])
    rng = np.random.default_rng(5)
    counts = {}
    for _ in range(2000):
        drawn = draw_columns(np.ones(4, dtype=bool), 0.5, rng, weights)
        pair = frozenset(np.flatnonzero(drawn).tolist())
        counts[pair] = counts.get(pair, 0) + 1
    assert len(counts) == 6
    for pair, count in counts.items():
        expected = chance_of_pair(weights, pair)
        assert abs(count / 2000 - expected) < 4.5 * np.sqrt(expected * (1 - expected) / 2000)


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
        alike = Sampling(3, share).columns(0, 4, 10)
        assert drawn.sum(axis=1).tolist() == alike.sum(axis=1).tolist()
        assert (Sampling(3, share).columns(0, 4, 10) == alike).all()
        assert (Sampling(3, share).columns(1, 4, 10) != alike).any()
        assert (alike[0] != alike[1]).any()


def test_xgboost_avoids_the_same_columns(made):
    weights = {"colsample_bytree": 0.5, "feature_weights": "a:0,b:0,c:0"}
    booster = pooled_booster(made("pax", num_boost_round=10, parties=1, **weights))
    assert booster.get_score().keys() == {"f3", "f4", "f5"}


@pytest.mark.parametrize(
    ("weights", "rule"),
    [
        ("a", "must be columns with a number from 0 to 1e9, as .*, got a$"),
        ("a:-1", "must be columns with a number .* got a:-1"),
        ("a:1,a:2", "must name a column once, got a twice"),
        ("g:2", "must name columns of the table, got g"),
        (",".join(f"{name}:0" for name in "abcdef"), "must be > 0"),
    ],
)
def test_weights_that_are_none_are_refused(made, weights, rule):
    with pytest.raises(ConfigError, match=f"feature-weights {rule}"):
        run_local(made("pax", parties=2, feature_weights=weights, colsample_bytree=0.5))


def test_weights_that_change_nothing_are_refused():
    with pytest.raises(ConfigError, match="feature-weights must be omitted where no colsample"):
        load_settings({"strategy": "pax", "feature-weights": "a:2"})
    assert not SecureBoost.takes("feature-weights")
    assert weights_of(parse_weights("b:2"), ("a", "b")).tolist() == [1, 2]
