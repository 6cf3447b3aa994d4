"""Audits of epsilon: bounds are exact, and a run with too little noise is found."""

import math
from itertools import product

import numpy as np
import pytest
from scipy.stats import beta

from fedapp.histograms.sketch import Descent, digit_counts
from fedapp.messages.pax_secure import PrivateCountRequest
from simulations.attacks import canaries
from simulations.attacks.canaries import audited, in_prefixes, lower_bound, p_value
from simulations.options import command


def test_without_delta_a_bound_is_that_of_a_share_of_correct_guesses():
    for n_guesses, n_correct in ((10, 9), (100, 64), (1000, 1000)):
        share = float(beta.ppf(0.05, n_correct, n_guesses - n_correct + 1))
        bound = lower_bound(0.0, 1000, n_guesses, n_correct, 0.05)
        assert bound == pytest.approx(math.log(share / (1 - share)), abs=1e-9)
    assert lower_bound(0.0, 1000, 100, 50, 0.05) == 0.0


def test_a_probability_counts_all_outcomes_and_what_delta_allows():
    epsilon, delta, n_canaries, n_guesses, n_correct = 0.7, 0.001, 12, 8, 6
    right = math.exp(epsilon) / (1 + math.exp(epsilon))
    chances = np.zeros(n_guesses + 1)
    for guesses in product((True, False), repeat=n_guesses):
        chances[sum(guesses)] += math.prod(right if guess else 1 - right for guess in guesses)

    def tail(least):
        return float(chances[least:].sum())

    steps = range(1, n_correct + 1)
    most = max((tail(n_correct - step) - tail(n_correct)) / step for step in steps)
    expected = tail(n_correct) + 2 * n_canaries * delta * most
    assert p_value(epsilon, delta, n_canaries, n_guesses, n_correct) == pytest.approx(expected)
    assert p_value(epsilon, 0.0, n_canaries, n_guesses, 0) == 1.0


def test_the_most_certain_guesses_come_first():
    coins = np.array([1, 0] * 50)
    scores = 0.5 + 0.1 * np.where(np.arange(100) < 90, 0.5 - coins, 10 * (coins - 0.5))
    found = audited(scores, coins, 0.0)
    assert (found["guesses"], found["correct"]) == (10, 10)
    assert found["bound"] == pytest.approx(lower_bound(0.0, 100, 10, 10, 0.025))
    assert audited(np.where(coins == 1, 0.6, 0.4), coins, 0.0)["guesses"] == 100


def test_an_attacker_finds_the_count_that_a_value_is_in():
    values = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    ones = np.ones(50, dtype=np.int64)
    descent = Descent(np.ones(3, dtype=bool), n_bins=8, lightest=4)
    for digit in range(4):
        prefixes, offsets = descent.wanted()
        counts = digit_counts(values, ones, prefixes, offsets, digit)
        if digit:
            cells = in_prefixes(PrivateCountRequest(digit, prefixes, offsets), values)
            found = np.bincount(cells[cells >= 0], minlength=counts.size)
            np.testing.assert_array_equal(found, counts.ravel())
        descent.take(counts)


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
