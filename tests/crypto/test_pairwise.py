"""Vectors under masks look random one by one, and add up to what they hide."""

import secrets

import numpy as np
import pytest

from fedapp.crypto.masking import (
    MAX_NUMBERS,
    SIZES,
    expand,
    mask_vector,
    n_words,
    seed_of,
    unmasked_sum,
)
from fedapp.histograms.fixed_point import Bounds, from_fixed, power_above, to_fixed

NAMES = ("bank", "insurer", "shop")
RNG = np.random.default_rng(2)
# Of 255 degrees of freedom: 1 of 10^6 random bytes is beyond, by Wilson and Hilferty 1931.
MOST_CHI2 = 375.0


def pairs(names=NAMES):
    """A secret for every pair of parties, by name of both."""
    drawn = {frozenset((a, b)): secrets.token_bytes(32) for a in names for b in names if a < b}
    return {a: {b: drawn[frozenset((a, b))] for b in names if b != a} for a in names}


def chi_squared(words):
    """How far bytes are from being equally often."""
    found = np.bincount(np.frombuffer(words.tobytes(), np.uint8), minlength=256)
    expected = found.sum() / 256
    return float(((found - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("n_bytes", SIZES)
@pytest.mark.parametrize("n_values", [0, 1, 5, 1000])
def test_masks_cancel_in_the_sum_of_all(n_bytes, n_values):
    most = 2 ** (8 * n_bytes - 3)
    values = RNG.integers(-most, most, (3, n_values))
    by_name = dict(zip(NAMES, values, strict=True))
    shared = pairs()
    masked = [mask_vector(name, by_name[name], shared[name], b"step 1", n_bytes) for name in NAMES]
    assert all(each.shape == (n_words(n_values, n_bytes),) for each in masked)
    half = 2 ** (8 * n_bytes - 1)
    sums = [sum(map(int, column)) for column in values.T]
    assert unmasked_sum(masked, n_values, n_bytes).tolist() == [
        (one + half) % (2 * half) - half for one in sums
    ]


def test_one_partys_vector_is_uniform_over_many_runs():
    views = []
    for run in range(200):
        shared, content = pairs(), np.zeros(64, dtype=np.int64)
        views.append(mask_vector("bank", content, shared["bank"], f"step {run}".encode()))
    assert chi_squared(np.concatenate(views)) < MOST_CHI2
    # So is the sum of two of three, whatever one of them has.
    shared = pairs()
    some = [mask_vector(name, np.arange(20000), shared[name], b"step") for name in NAMES[:2]]
    assert chi_squared(some[0] + some[1]) < MOST_CHI2
    assert chi_squared(np.arange(20000)) > 10 * MOST_CHI2


def stream(secret, label, n_numbers):
    return expand(seed_of(secret, label), n_numbers)


def test_another_label_or_secret_is_another_stream():
    secret = secrets.token_bytes(32)
    first = stream(secret, b"attempt 0", 4000)
    for other in (stream(secret, b"attempt 1", 4000), stream(secrets.token_bytes(32), b"a", 4000)):
        assert not (first == other).any()
        assert chi_squared(first - other) < MOST_CHI2
    np.testing.assert_array_equal(first[:10], stream(secret, b"attempt 0", 10))


def test_a_stream_ends_before_it_comes_again():
    with pytest.raises(ValueError, match=f"n_numbers must be <= {MAX_NUMBERS}"):
        stream(bytes(32), b"", MAX_NUMBERS + 1)


def test_sums_of_the_largest_terms_fit():
    for n_rows in (1, 3, 2**20, 2**20 + 1):
        for n_bytes in SIZES:
            bounds = Bounds(n_rows, heaviest=3)
            exponent = bounds.exponent(-2, n_bytes)
            largest = int(to_fixed(np.array([bounds.most(-2)]), exponent)[0]) if exponent > 0 else 0
            assert largest * n_rows <= 2 ** (8 * n_bytes - 2)


def test_whole_numbers_are_read_as_they_were_written():
    values = np.array([0.0, 1.0, -0.375, 2.0**-30])
    assert from_fixed(to_fixed(values, 40), 40).tolist() == values.tolist()
    assert to_fixed(np.float32([0.1]), 62 - 3)[0] == int(np.float32(0.1) * 2.0**59)
    assert [power_above(value) for value in (0.25, 0.3, 1, 1.5, 4, 0)] == [-2, -1, 0, 1, 2, 0]
