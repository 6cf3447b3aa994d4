"""How long cryptography takes on a machine like this one, from a moment's trial."""

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

# Of an exponent, and how many, several times: 30 ms at 2048 bits.
TRIAL_BYTES, TRIAL_POWERS, TRIALS = 16, 32, 5

# One thread works on them: 3 or 30 ms.
TRIAL_IDS = 256


def seconds_to_mask(n_ids: int) -> tuple[float, float]:
    """About the time to mask ids, and that to mask as many points, all cores at work.

    Parameters
    ----------
    n_ids : >= 0.
    """
    ids, scalar = [str(number) for number in range(TRIAL_IDS)], draw_scalar()
    mask(mask_ids(ids[:1], scalar), scalar)  # loads, or compiles, what does it
    began = time.perf_counter()
    points = mask_ids(ids, scalar)
    opened = time.perf_counter()
    mask(points, scalar)
    masked = time.perf_counter()
    share = n_ids / TRIAL_IDS / n_cores()
    return (opened - began) * share, (masked - opened) * share


def seconds_to_encrypt(n_plaintexts: int, key_bits: int) -> float:
    """About the time in which the owner of a Paillier key encrypts, all cores at work.

    Nearly all of it goes into the masks: a power mod p^2 and one mod q^2 each, by
    short exponents; full masks take three times as long. A shorter power still is tried, modulo the
    square of any odd number.

    Parameters
    ----------
    n_plaintexts : >= 0.
    key_bits : of n = p q.

    Returns
    -------
    Seconds.
    """
    odd = mpz(secrets.randbits(key_bits // 2)) | 1
    unit = powmod(2, secrets.randbits(key_bits // 2), odd**2)
    base = power_tables(unit, odd, TRIAL_BYTES)
    trials = []
    for _ in range(TRIALS):
        began = time.perf_counter()
        call(False, base.powers, random_digits(TRIAL_POWERS, TRIAL_BYTES))
        trials.append(time.perf_counter() - began)
    per_byte = median(trials) / TRIAL_POWERS / TRIAL_BYTES
    n_bytes = 2 * short_bits(key_bits) / 8
    return n_plaintexts * n_bytes * per_byte / n_cores() * _crowding()


def _crowding() -> float:
    """How many processes want each core, of which a trial of milliseconds feels nothing."""
    return max(1.0, os.getloadavg()[0] / n_cores()) if hasattr(os, "getloadavg") else 1.0
