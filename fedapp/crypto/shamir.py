"""A secret as shares of which so many give it back, and fewer say nothing of it.

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
    """Shares of the holders 1, 2, ... in turn; 32 bytes each.

    Parameters
    ----------
    secret : from ``new_secret``.
    threshold : shares that give it back, 1 to ``n_holders``.

    Raises
    ------
    ValueError : the secret is none, or the threshold is out of range.
    """
    if not 1 <= threshold <= n_holders:
        raise ValueError(f"threshold must be 1 to {n_holders}, got {threshold}")
    coefficients = [_read(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_written(_value(coefficients, holder)) for holder in range(1, n_holders + 1)]


def join(shares: Mapping[int, bytes]) -> bytes:
    """The secret of which these are as many shares as it takes, by the holder's number.

    Raises
    ------
    ValueError : a share is none, or a holder's number is not above 0.
    """
    if not shares or min(shares) < 1:
        raise ValueError(f"shares must be of holders from 1 on, got {sorted(shares)}")
    secret = 0
    for holder, share in shares.items():
        above, below = 1, 1
        for other in shares.keys() - {holder}:
            above = above * other % PRIME
            below = below * (other - holder) % PRIME
        secret += _read(share) * above * pow(below, -1, PRIME)
    return _written(secret % PRIME)


def _value(coefficients: list[int], place: int) -> int:
    """Of the polynomial, by Horner's rule."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % PRIME
    return value


def _read(written: bytes) -> int:
    number = int.from_bytes(written, "little")
    if len(written) != SHARE_BYTES or number >= PRIME:
        raise ValueError(f"share must be {SHARE_BYTES} bytes below 2^255 - 19, got another")
    return number


def _written(number: int) -> bytes:
    return number.to_bytes(SHARE_BYTES, "little")
