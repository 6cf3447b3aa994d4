"""Shamir secret sharing: any ``threshold`` shares recover the secret, fewer reveal nothing.

Source: Shamir 1979, "How to Share a Secret": the secret is the constant of a random polynomial of
degree threshold - 1 over a prime field, and a share is its value at the holder's number.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

PRIME = 2**255 - 19
SHARE_BYTES = 32  # of a share, and of a secret, little-endian


def new_secret() -> bytes:
    """A secret from the operating system's randomness: 32 bytes, below ``PRIME``."""
    return _written(secrets.randbelow(PRIME))


def split(secret: bytes, threshold: int, n_holders: int) -> list[bytes]:
    """Shares of 32 bytes for the holders 1, 2, ... of a secret from ``new_secret``."""
    if not 1 <= threshold <= n_holders:
        raise ValueError(f"threshold must be 1 to {n_holders}, got {threshold}")
    coefficients = [_read(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    shares = []
    for holder in range(1, n_holders + 1):
        value = 0
        for coefficient in reversed(coefficients):  # Horner's rule
            value = (value * holder + coefficient) % PRIME
        shares.append(_written(value))
    return shares


def join(shares: Mapping[int, bytes]) -> bytes:
    """Recover the secret from at least ``threshold`` shares, by the holder's number, >= 1."""
    if not shares or min(shares) < 1:
        raise ValueError(f"shares must be of holders from 1 on, got {sorted(shares)}")
    secret = 0
    # Lagrange interpolation at 0.
    for holder, share in shares.items():
        numerator, denominator = 1, 1
        for other in shares.keys() - {holder}:
            numerator = numerator * other % PRIME
            denominator = denominator * (other - holder) % PRIME
        secret += _read(share) * numerator * pow(denominator, -1, PRIME)
    return _written(secret % PRIME)


def _read(written: bytes) -> int:
    number = int.from_bytes(written, "little")
    if len(written) != SHARE_BYTES or number >= PRIME:
        raise ValueError(f"share must be {SHARE_BYTES} bytes below 2^255 - 19, got another")
    return number


def _written(number: int) -> bytes:
    return number.to_bytes(SHARE_BYTES, "little")
