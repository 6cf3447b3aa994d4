"""Estimates of how long encryption takes."""

import time

import pytest

from fedapp.crypto.paillier import encrypt
from fedapp.crypto.paillier_keys import generate_key
from fedapp.crypto.sums import seconds_to_encrypt
from fedapp.crypto.workers import Workers
from fedapp.kernels import n_cores


def test_encryption_takes_about_as_long_as_was_said():
    """Within a factor of 10, as other processes may be at work: a wrong unit is further off."""
    key, n_plaintexts = generate_key(2048), 400
    with Workers(n_cores()) as workers:
        encrypt(key, range(8 * n_cores()), workers)  # the tables are made
        began = time.perf_counter()
        encrypt(key, range(n_plaintexts), workers)
        took = time.perf_counter() - began
    assert took / 10 < seconds_to_encrypt(n_plaintexts, 2048) < took * 10


@pytest.mark.parametrize("key_bits", [512, 2048])
def test_no_plaintexts_take_no_time(key_bits):
    assert seconds_to_encrypt(0, key_bits) == 0
