"""Paillier's cryptosystem with g = n + 1, on raw integers; ciphertexts are those of phe.

Source: Paillier, Public-key cryptosystems based on composite degree residuosity classes, 1999,
scheme 1 and section 7 (Chinese remainders). ``fedapp.crypto.masks`` explains what hides plaintexts
from whom.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import gmpy2
import numpy as np
import numpy.typing as npt
from gmpy2 import mpz

from fedapp.crypto.integers import Bytes, from_bytes_array, to_bytes_array
from fedapp.crypto.keys import PrivateKey, PublicKey
from fedapp.crypto.masks import masks_of
from fedapp.crypto.rings import N_LANES, has_lanes, product, ring, share
from fedapp.crypto.workers import Workers

# Several calls a process, so that none waits long for the last; the rows of a call fit in memory.
CALLS_PER_WORKER, MOST_ROWS = 4, 4096


def encrypt(key: PublicKey | PrivateKey, plaintexts: Sequence[int], workers: Workers) -> Bytes:
    """Encrypt integers to uint8 rows, shape (n, ciphertext_bytes), big endian.

    Parameters
    ----------
    key : the private key where the caller owns it: many times faster.
    plaintexts : -n / 2 < m < n / 2 for the modulus n; a negative m is encrypted as m + n.

    Raises
    ------
    ValueError : a plaintext is out of range.
    """
    public = key.public if isinstance(key, PrivateKey) else key
    limit = int(public.n) // 2
    n_wrong = sum(not -limit <= plaintext <= limit for plaintext in plaintexts)
    if n_wrong:
        raise ValueError(f"plaintexts must be within n / 2, got {n_wrong} that are not")
    return stacked(public, _in_parts(_encrypt, key, plaintexts, workers))


def rerandomise(key: PublicKey, ciphertexts: Bytes, workers: Workers) -> Bytes:
    """The same plaintexts under fresh masks, unlinkable to the checked ``ciphertexts``."""
    return stacked(key, _in_parts(_rerandomise, key, ciphertexts, workers))


def decrypt(key: PrivateKey, ciphertexts: Bytes, workers: Workers) -> list[int]:
    """Plaintexts m, -n / 2 < m < n / 2, of checked ciphertexts."""
    chunks = _in_parts(_decrypt, key, ciphertexts, workers)
    return [plaintext for chunk in chunks for plaintext in chunk]


def check_ciphertexts(key: PublicKey, ciphertexts: Bytes) -> None:
    """Refuse what cannot be a ciphertext under this key; needed for all that comes from outside.

    Raises
    ------
    ValueError : not uint8 of shape (n, ciphertext_bytes), or a value is not a unit mod n^2.
    """
    width, shape = key.ciphertext_bytes, ciphertexts.shape
    if ciphertexts.dtype != np.uint8 or len(shape) != 2 or shape[1] != width:
        form = f"{ciphertexts.dtype} of shape {shape}"
        raise ValueError(f"ciphertexts must be uint8 of shape (n, {width}), got {form}")
    n2_ring, limit = ring(key.n_squared), to_bytes_array([key.n_squared], width)[0]
    # The product of all values mod n: it is a unit only if each value is.
    n_wrong, common = 0, mpz(1)
    for first in range(0, len(ciphertexts), MOST_ROWS):
        rows = np.asarray(ciphertexts[first : first + MOST_ROWS])
        # Compare with n^2 at the first byte that differs.
        differs = rows != limit
        places = differs.argmax(axis=1)
        below: npt.NDArray[np.bool_] = rows[np.arange(len(rows)), places] < limit[places]
        below &= differs.any(axis=1)
        n_wrong += len(rows) - int((below & rows.any(axis=1)).sum())
        if not n_wrong:
            common = common * product(n2_ring, n2_ring.read(rows)) % key.n
    if n_wrong:
        raise ValueError(f"ciphertexts must be > 0 and < n^2, got {n_wrong} that are not")
    if gmpy2.gcd(common, key.n) != 1:
        n_wrong = sum(gmpy2.gcd(value, key.n) != 1 for value in from_bytes_array(ciphertexts))
        raise ValueError(f"ciphertexts must be prime to n, got {n_wrong} that are not")


def share_out(n_rows: int, workers: Workers) -> list[tuple[int, int]]:
    """First and past-the-end row of each call: more calls than workers, and full lanes."""
    unit = N_LANES if has_lanes() else 1
    n_units = -(-n_rows // unit)
    n_calls = max(workers.n_workers * CALLS_PER_WORKER, -(-n_rows // MOST_ROWS))
    n_calls = min(n_units, n_calls)
    ends = [min(unit * (n_units * call // n_calls), n_rows) for call in range(1, n_calls + 1)]
    return list(itertools.pairwise([0, *ends]))


def _in_parts(function: Callable[..., Any], key: Any, rows: Any, workers: Workers) -> list[Any]:
    calls = [(key, rows[first:last]) for first, last in share_out(len(rows), workers)]
    return share(workers, function, calls)


def stacked(key: PublicKey, chunks: Iterable[Bytes]) -> Bytes:
    """The ciphertexts of all calls."""
    return np.concatenate([np.empty((0, key.ciphertext_bytes), np.uint8), *chunks])


def _encrypt(key: PublicKey | PrivateKey, plaintexts: Sequence[int]) -> Bytes:
    """Encrypt the plaintexts of one call: (1 + m n) r^n mod n^2."""
    public = key.public if isinstance(key, PrivateKey) else key
    n, n2_ring = public.n, ring(public.n_squared)
    bodies = n2_ring.take([1 + plaintext % n * n for plaintext in plaintexts])
    values = n2_ring.multiply(bodies, masks_of(key).draw(len(plaintexts)))
    return n2_ring.write(values, public.ciphertext_bytes)


def _rerandomise(key: PublicKey, ciphertexts: Bytes) -> Bytes:
    """Put the ciphertexts of one call under fresh masks."""
    n2_ring = ring(key.n_squared)
    values = n2_ring.multiply(n2_ring.read(ciphertexts), masks_of(key).draw(len(ciphertexts)))
    return n2_ring.write(values, key.ciphertext_bytes)


def _decrypt(key: PrivateKey, ciphertexts: Bytes) -> list[int]:
    """Decrypt the ciphertexts of one call by Chinese remainders."""
    p, q, n = key.p, key.q, key.p * key.q
    # (1 + n)^(p - 1) = 1 + (p - 1) n mod p^2, so Paillier's h_p is the inverse of -q mod p.
    scale_p, scale_q, inverse = gmpy2.invert(-q, p), gmpy2.invert(-p, q), gmpy2.invert(p, q)
    values, powers = from_bytes_array(ciphertexts), []
    for prime in (p, q):
        prime_ring = ring(prime**2)
        residues = prime_ring.take([value % prime**2 for value in values])
        powers.append(prime_ring.numbers(prime_ring.power(residues, prime - 1)))
    plaintexts = []
    for power_p, power_q in zip(*powers, strict=True):
        part_p, part_q = power_p // p * scale_p % p, power_q // q * scale_q % q
        plaintext = part_p + p * ((part_q - part_p) * inverse % q)
        plaintexts.append(int(plaintext if plaintext <= n // 2 else plaintext - n))
    return plaintexts
