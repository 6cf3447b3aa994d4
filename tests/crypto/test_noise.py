"""Noise of the discrete Gaussian distribution, and what it costs."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from fedapp.crypto import noise
from fedapp.crypto.noise import (
    Budget,
    accept,
    budget_for,
    composed_epsilon,
    discrete_gaussian,
)
from fedapp.crypto.sealed import Stream
from fedapp.errors import ConfigError


def source(label=b""):
    return Stream(bytes(32), noise.NOISE_LABEL, label)


def chi_squared(found, probabilities):
    """Per degree of freedom, over the numbers that are expected five times at least."""
    expected = probabilities * len(found)
    often = expected >= 5
    middle = len(probabilities) // 2
    counts = np.bincount(found[np.abs(found) <= middle] + middle, minlength=len(probabilities))
    return float(((counts - expected)[often] ** 2 / expected[often]).sum() / (often.sum() - 1))


def gaussian(variance, most):
    weights = np.exp(-(np.arange(-most, most + 1) ** 2) / (2 * variance))
    return weights / weights.sum()


@pytest.mark.parametrize("variance", [1, 3, 20])
def test_draws_are_distributed_as_the_discrete_gaussian(variance):
    found = discrete_gaussian(variance, 40_000, source())
    assert chi_squared(found, gaussian(variance, 40)) < 2.2
    assert chi_squared(found, gaussian(variance * 1.1, 40)) > 2.2


def test_draws_are_exact_where_float64_cannot_tell(monkeypatch):
    monkeypatch.setattr(noise, "MARGIN", 2.0)
    found = discrete_gaussian(3, 400, source(b"slow"))
    assert chi_squared(found, gaussian(3, 40)) < 2.2


def test_a_doubtful_comparison_takes_further_digits():
    class Fixed(Stream):
        def __init__(self, *words):
            self.left = list(words)

        def words(self, n_words):
            return np.array([self.left.pop(0) for _ in range(n_words)], dtype=np.uint64)

    bits = 0x5E2D58D8B3BCDF1A  # the first 64 of 1/e
    for nexts, expected in (([0], True), ([2**64 - 1], False)):
        given = Fixed(bits, *nexts)
        assert accept(np.ones(1), lambda _: Fraction(1), given).tolist() == [expected]
        assert not given.left


def test_large_draws_have_the_wanted_variance():
    variance = 10**14
    found = discrete_gaussian(variance, 20_000, source()) / math.sqrt(variance)
    assert abs(found.mean()) < 0.03
    assert found.var() == pytest.approx(1, abs=0.05)
    assert (found**4).mean() == pytest.approx(3, abs=0.3)


def test_what_is_drawn_follows_from_key_and_label_alone():
    one, again, other = (discrete_gaussian(100, 50, source(x)) for x in (b"a", b"a", b"b"))
    assert (one == again).all()
    assert (one != other).any()
    assert (discrete_gaussian(100, 50, Stream(b"k" * 32, noise.NOISE_LABEL, b"a")) != one).any()
    assert chi_squared(source().below(5, 5_000) - 2, np.full(5, 0.2)) < 3.5


@pytest.mark.parametrize("variance", [0, 2**80 + 1])
def test_a_variance_out_of_range_is_refused(variance):
    with pytest.raises(ValueError, match=r"^variance must be 1 to 2\^80, got"):
        discrete_gaussian(variance, 1, source())


def test_a_sum_of_draws_is_as_one_draw():
    total = sum(discrete_gaussian(2, 20_000, source(bytes([n]))) for n in range(3))
    assert chi_squared(np.asarray(total), gaussian(6, 40)) < 2.2


# What it costs


@pytest.mark.parametrize(("epsilon", "multiplier"), [(0.5, 7.6674), (4, 1.1576)])
def test_noise_is_what_the_accountant_says_of_one_gaussian(epsilon, multiplier):
    found = budget_for(epsilon, 1e-5, 50, 3)
    assert found.multiplier == pytest.approx(multiplier, abs=2e-4)
    found.check()
    assert epsilon * 0.999 < composed_epsilon([found], 1e-5) <= epsilon
    rho = 1 / (2 * found.multiplier**2)  # Bun and Steinke 2016, Proposition 1.3
    assert rho + 2 * math.sqrt(rho * math.log(1e5)) > epsilon


def test_the_shares_are_the_whole_budget():
    for n_rounds in (1, 7, 500):
        schedule = Budget(1, 1e-5, 4.0, n_rounds, 3).schedule
        assert sum(each.times * each.share for each in schedule) == pytest.approx(1)


def test_less_noise_no_noise_or_more_sums_do_not_hold():
    found = budget_for(1, 1e-5, 10, 3)
    less = {"multiplier": found.multiplier * 0.99}
    for change in (less, {"multiplier": 0.0}, {"delta": 0.0}, {"n_rounds": 0}):
        with pytest.raises(
            ValueError, match=r"^multiplier must be of more noise to keep epsilon 1"
        ):
            replace(found, **change).check()
    more = replace(found, multiplier=found.multiplier / math.sqrt(found.share("tree")))
    assert composed_epsilon([found, more], 1e-5) > 1
    # Runs over the same rows cost what one of their noise costs.
    both = replace(found, n_rounds=50, multiplier=found.multiplier / math.sqrt(2))
    assert composed_epsilon([found, found], 1e-5) == pytest.approx(composed_epsilon([both], 1e-5))
    twice = composed_epsilon([found, replace(found, n_rounds=50)], 1e-5)
    assert twice == pytest.approx(1.46, abs=0.005)


def test_noise_of_all_parties_but_one_is_enough():
    found = Budget(1, 1e-5, 4.0, 10, 5)
    own = found.party_variance("tree", 1000.0)
    assert 4 * own >= (4.0 * 1000) ** 2 / found.share("tree")
    assert math.sqrt(5 * own) == pytest.approx(found.deviation("tree", 1000.0), rel=1e-6)
    with pytest.raises(ValueError, match=r"^the variance of noise must be >= 32, got"):
        found.party_variance("scores", 0.1)


def test_without_the_accountant_what_to_install_is_said(monkeypatch):
    monkeypatch.setattr("fedapp.errors.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fedapp\[privacy\]'"):
        budget_for(1, 1e-5, 10, 3)
