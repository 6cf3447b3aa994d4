"""Splits of columns by importance and by correlation, as VertiBench defines them."""

from itertools import permutations

import numpy as np
import pytest

from simulations.papers.vertibench import (
    column_order,
    correlation_split,
    icor_range,
    importance_split,
    inter_correlation,
    partial_correlation,
    rank_correlations,
)


@pytest.fixture
def pairs():
    """Correlations of six columns: three pairs that say the same."""
    return np.kron(np.eye(3), np.ones((2, 2)))


def all_splits(n_columns, n_parties):
    """Every way to deal columns out in equal numbers."""
    size = n_columns // n_parties
    return {
        tuple(tuple(sorted(order[k : k + size])) for k in range(0, n_columns, size))
        for order in permutations(range(n_columns))
    }


@pytest.mark.parametrize("alpha", [1e-3, 0.1, 1.0, 100.0])
def test_every_column_is_at_one_party_and_no_party_is_empty(alpha):
    for seed in range(20):
        split = importance_split(9, 4, alpha, np.random.default_rng(seed))
        assert sorted(column for party in split for column in party) == list(range(9))
        assert min(map(len, split)) >= 1


def test_a_small_alpha_gives_one_party_nearly_all_columns_and_a_large_one_equal_shares():
    def largest(alpha):
        rngs = map(np.random.default_rng, range(40))
        return float(np.mean([max(map(len, importance_split(40, 4, alpha, rng))) for rng in rngs]))

    assert largest(0.01) > 34
    assert largest(1000.0) < 16


def test_pcor_is_the_spread_of_singular_values():
    assert partial_correlation(np.eye(3)) == 0  # equal ones
    # Values 2 and 0: deviation sqrt(2), over the root of two of them.
    assert partial_correlation(np.ones((2, 2))) == pytest.approx(1.0)
    assert partial_correlation(np.ones((1, 4))) == 0  # a single one


def test_icor_is_least_where_what_is_correlated_is_together(pairs):
    together, apart = ((0, 1), (2, 3), (4, 5)), ((0, 2), (1, 4), (3, 5))
    assert inter_correlation(pairs, together) == pytest.approx(-1.0)
    assert inter_correlation(pairs, apart) > -0.2


def test_the_search_finds_the_least_and_the_largest_of_all_splits(pairs):
    noise = np.random.default_rng(0).normal(size=(6, 6)) * 0.05
    correlations = pairs * 0.9 + (noise + noise.T) * (1 - np.eye(6))
    every = [inter_correlation(correlations, split) for split in all_splits(6, 3)]
    found = icor_range(correlations, 3, np.random.default_rng(1))
    assert found == (pytest.approx(min(every)), pytest.approx(max(every)))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_split_has_the_correlation_that_beta_asks_for(beta):
    values = np.random.default_rng(2).normal(size=(50, 6)).astype(np.float32)
    values[:, 1] += 3 * values[:, 0]
    values[:, 5] -= 2 * values[:, 4]
    correlations = rank_correlations(values)
    every = [inter_correlation(correlations, split) for split in all_splits(6, 2)]
    split = correlation_split(correlations, 2, beta, np.random.default_rng(3))
    assert [len(party) for party in split] == [3, 3]
    asked = min(every) + beta * (max(every) - min(every))
    nearest = min(every, key=lambda icor: abs(icor - asked))
    assert inter_correlation(correlations, split) == pytest.approx(nearest)


def test_correlations_are_of_ranks_and_a_constant_column_has_none():
    column = np.array([1, 2, 3, 4], np.float32)
    found = rank_correlations(np.stack([column, np.exp(column), -column, 0 * column], axis=1))
    np.testing.assert_allclose(found[0], [1, 1, -1, 0], atol=1e-12)
    assert np.isfinite(found).all()


def test_columns_stand_party_by_party():
    assert column_order(((0, 3), (1,), (2, 4))) == ([0, 3, 1, 2, 4], "sizes:2,1,2")
