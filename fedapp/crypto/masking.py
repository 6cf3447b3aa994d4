"""Secure aggregation: pairwise masks that cancel in the sum, and Shamir shares of their seeds.

Whoever relays the vectors sees only their sum. Each pair of parties shares a secret. From it, and
from a label of the content, both draw the same stream of numbers; the one whose name comes first
adds it, the other subtracts it::

    a sends  x_a + s_ab + s_ac
    b sends  x_b - s_ab + s_bc        all in Z/2^64
    c sends  x_c - s_ac - s_bc
    ------------------------------
    sum      x_a + x_b + x_c

To anyone without the secrets each vector looks random, and so does any sum except that of all. A
stream must mask one vector only: two vectors under the same masks reveal their difference. So
labels must be unique to their content.

Where a party may be lost, each adds one more stream, from a ``seed`` that only it has. The sum of
the remaining vectors then contains the streams of these seeds, and those of their pairs with lost
parties. Whoever recovers the seeds, which belong to one label only, subtracts their streams
(``unmasked_sum``). A vector that comes late stays masked by its ``seed``, which nobody recovers.

A seed is recovered from shares: it is the constant of a random polynomial of degree threshold - 1
over a prime field, and a share is its value at the holder's number. Any ``threshold`` shares
recover it, fewer reveal nothing.

Source: Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", Section 4; Shamir 1979, "How to Share a Secret"; ChaCha20 of RFC 8439, keyed BLAKE2b of
RFC 7693.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from fedapp.crypto.sealed import Stream, derived_key
from fedapp.histograms.fixed_point import Whole

Masked = npt.NDArray[np.uint64]

LABEL = b"fedapp mask v1"
NUMBER_BYTES = 8
SIZES = 2, 4, 8  # bytes of a number in Z/2^n; several share a word of 8 bytes
# RFC 8439: a block counter of 32 bits, blocks of 64 bytes.
MAX_NUMBERS = 2**32 * 64 // NUMBER_BYTES
PRIME = 2**255 - 19  # of the shares' field
SHARE_BYTES = 32  # of a share, and of a secret, little-endian


def seed_of(secret: bytes, label: bytes) -> bytes:
    """The 32-byte seed of the stream for one label, which must be unique to its content.

    ``secret`` is shared by the two parties, 32 bytes, from ``sealed.agree``.
    """
    return derived_key(secret, LABEL, label)


def expand(seed: bytes, n_numbers: int) -> Masked:
    """Pseudorandom uint64 numbers of a seed, at most ``MAX_NUMBERS``."""
    if n_numbers > MAX_NUMBERS:
        raise ValueError(f"n_numbers must be <= {MAX_NUMBERS}, got {n_numbers}")
    return Stream(seed).words(n_numbers)


def mask_vector(
    name: str,
    values: Whole,
    secrets: Mapping[str, bytes],
    label: bytes,
    n_bytes: int = 8,
    seed: bytes = b"",
) -> Masked:
    """A party's vector under its masks with all others, uint64, ``n_words`` long.

    Parameters
    ----------
    values : int64, shape (n_values,).
    secrets : by name of the other party.
    label : see ``seed_of``; the same at all parties.
    n_bytes : of a number, one of ``SIZES``; sums are modulo 2^(8 n_bytes).
    seed : of one more mask, 32 bytes, fresh for each vector; empty for none.
    """
    words = np.zeros(n_words(len(values), n_bytes), dtype=np.uint64)
    masked = words.view(f"<u{n_bytes}")
    np.copyto(masked[: len(values)], values, casting="unsafe")  # modulo 2^n
    for peer, secret in secrets.items():
        mask = expand(seed_of(secret, label), len(words)).view(masked.dtype)
        if name < peer:
            masked += mask
        else:
            masked -= mask
    if seed:
        masked += expand(seed, len(words)).view(masked.dtype)
    return words


def unmasked_sum(
    vectors: Iterable[Masked],
    n_values: int,
    n_bytes: int = 8,
    added: Iterable[bytes] = (),
    subtracted: Iterable[bytes] = (),
) -> Whole:
    """Sum of the vectors, int64, shape (n_values,), after removing streams that do not cancel.

    These are ``added`` to the vectors or ``subtracted``, by their seeds.
    """
    first, *others = [np.ascontiguousarray(vector).view(f"<u{n_bytes}") for vector in vectors]
    summed = first.copy()
    for vector in others:
        summed += vector
    for seed in added:
        summed -= expand(seed, n_words(n_values, n_bytes)).view(summed.dtype)
    for seed in subtracted:
        summed += expand(seed, n_words(n_values, n_bytes)).view(summed.dtype)
    signed: Whole = summed[:n_values].view(f"<i{n_bytes}").astype(np.int64, copy=False)
    return signed


def n_words(n_values: int, n_bytes: int) -> int:
    """8-byte words that ``n_values`` numbers take."""
    return -(-n_values * n_bytes // NUMBER_BYTES)


# Shares of a secret


def new_secret() -> bytes:
    """A secret from the operating system's randomness: 32 bytes, below ``PRIME``."""
    return _written(secrets.randbelow(PRIME))


def share_secret(secret: bytes, threshold: int, n_holders: int) -> list[bytes]:
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


def recover_secret(shares: Mapping[int, bytes]) -> bytes:
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
