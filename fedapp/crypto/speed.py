"""Estimate how long cryptography takes on a machine like this one, by a brief trial."""

from __future__ import annotations

import os
import secrets
import time
from statistics import median

from gmpy2 import mpz, powmod

from fedapp.crypto.fixed_base import random_digits
from fedapp.crypto.masks import power_tables, short_bits
from fedapp.crypto.psi import draw_scalar, mask, mask_ids
from fedapp.crypto.rings import call
from fedapp.crypto.workers import n_cores

# 5 trials of 32 powers by exponents of 16 bytes: 30 ms at 2048 bits.
TRIAL_BYTES, TRIAL_POWERS, TRIALS = 16, 32, 5
TRIAL_IDS = 256  # in one thread: 3 ms with AVX-512 IFMA, else 30 ms


def seconds_to_mask(n_ids: int) -> tuple[float, float]:
    """Approximate seconds to mask ids, and to mask as many points, with all cores at work."""
    ids, scalar = [str(number) for number in range(TRIAL_IDS)], draw_scalar()
    mask(mask_ids(ids[:1], scalar), scalar)  # warm-up: loads or compiles the code
    start = time.perf_counter()
    points = mask_ids(ids, scalar)
    ids_masked = time.perf_counter()
    mask(points, scalar)
    points_masked = time.perf_counter()
    share = n_ids / TRIAL_IDS / n_cores()
    return (ids_masked - start) * share, (points_masked - ids_masked) * share


def seconds_to_encrypt(n_plaintexts: int, key_bits: int) -> float:
    """Approximate seconds for the owner of a Paillier key to encrypt, with all cores at work.

    Nearly all of it goes into the masks: a power mod p^2 and one mod q^2 each, by short exponents;
    full masks take three times as long. The trial uses still shorter exponents, modulo the square
    of any odd number.
    """
    odd = mpz(secrets.randbits(key_bits // 2)) | 1
    unit = powmod(2, secrets.randbits(key_bits // 2), odd**2)
    base = power_tables(unit, odd, TRIAL_BYTES)
    trials = []
    for _ in range(TRIALS):
        start = time.perf_counter()
        call(False, base.powers, random_digits(TRIAL_POWERS, TRIAL_BYTES))
        trials.append(time.perf_counter() - start)
    per_byte = median(trials) / TRIAL_POWERS / TRIAL_BYTES
    n_bytes = 2 * short_bits(key_bits) / 8
    # Processes per core: a trial of milliseconds does not notice that others want the core too.
    load = max(1.0, os.getloadavg()[0] / n_cores()) if hasattr(os, "getloadavg") else 1.0
    return n_plaintexts * n_bytes * per_byte / n_cores() * load
