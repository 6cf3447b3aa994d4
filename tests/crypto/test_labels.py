"""Labels that are randomised: what is drawn, how often, and how well two can be told apart."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fedapp.crypto.noise import STEPS, randomised_classes, randomised_measures

KEY = bytes(range(32))
MANY = [f"c{number}" for number in range(20_000)]


def names(n_classes):
    return [f"class {number}" for number in range(n_classes)]


def test_classes_stay_and_change_as_often_as_randomised_response_has_it():
    n_classes, epsilon = 4, 0.5
    for label in (0, n_classes - 1):
        labels = np.full(len(MANY), label, np.float32)
        drawn = randomised_classes(labels, names(n_classes), epsilon, MANY, KEY)
        counts = np.bincount(drawn.astype(int), minlength=n_classes) / len(MANY)
        stays = math.exp(epsilon) / (math.exp(epsilon) + n_classes - 1)
        expected = np.full(n_classes, (1 - stays) / (n_classes - 1))
        expected[label] = stays
        errors = np.sqrt(expected * (1 - expected) / len(MANY))
        assert (np.abs(counts - expected) < 5 * errors).all()


def test_draws_of_two_labels_are_independent_and_no_guess_tells_them_apart_better():
    epsilon = 1.0
    old, new = (
        randomised_classes(np.full(len(MANY), label, np.float32), names(2), epsilon, MANY, KEY)
        for label in (0, 1)
    )
    assert abs(new.mean() - old.mean()) == pytest.approx(math.tanh(epsilon / 2), abs=0.02)
    both = np.histogram2d(old, new, bins=2)[0] / len(MANY)
    stays = math.exp(epsilon) / (math.exp(epsilon) + 1)
    expected = np.outer([stays, 1 - stays], [1 - stays, stays])
    assert (np.abs(both - expected) < 5 * np.sqrt(expected / len(MANY))).all()


def test_noise_of_measures_is_discrete_laplace():
    epsilon, low, high = 2.0, -10.0, 30.0
    labels = np.full(len(MANY), 10.0, np.float32)
    drawn = randomised_measures(labels, low, high, epsilon, MANY, KEY)
    steps = np.rint((drawn.astype(np.float64) - 10.0) / ((high - low) / STEPS))
    rate = epsilon / STEPS
    # Of the distribution with P(x) in proportion to exp(-rate |x|):
    variance = 2 * math.exp(-rate) / (1 - math.exp(-rate)) ** 2
    assert abs(steps.mean()) < 5 * math.sqrt(variance / len(MANY))
    assert steps.var() == pytest.approx(variance, rel=0.06)


def test_measures_are_clipped_to_the_range_and_drawn_anew_for_another_label():
    inside, outside, lower = (
        randomised_measures(np.full(len(MANY), value, np.float32), 0.0, 1.0, 1.0, MANY, KEY)
        for value in (1.0, 1e6, 0.5)
    )
    np.testing.assert_array_equal(inside, outside)
    assert abs(np.corrcoef(inside, lower)[0, 1]) < 5 / math.sqrt(len(MANY))


@examples(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.floats(0.1, 8))
def test_a_rows_draw_depends_on_its_id_and_label_alone(seed, n_classes, epsilon):
    rng = np.random.default_rng(seed)
    ids = MANY[:200]
    labels = rng.integers(0, n_classes, 200).astype(np.float32)
    order = rng.permutation(200)[:50]
    whole = randomised_classes(labels, names(n_classes), epsilon, ids, KEY)
    part = randomised_classes(
        labels[order], names(n_classes), epsilon, [ids[place] for place in order], KEY
    )
    np.testing.assert_array_equal(part, whole[order])
    assert set(whole) <= set(range(n_classes))
    other = randomised_classes(labels, names(n_classes), 0.1, ids, bytes(32))
    assert (other != randomised_classes(labels, names(n_classes), 0.1, ids, KEY)).any()
    np.testing.assert_array_equal(randomised_classes(0 * labels, names(1), 0.1, ids, KEY), 0)
