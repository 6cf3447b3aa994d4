"""Paillier's cryptosystem with g = n + 1, on raw integers; ciphertexts are those of phe.

Source: Paillier, Public-key cryptosystems based on composite degree residuosity classes, 1999,
scheme 1 and section 7 (Chinese remainders).
What hides a plaintext, and from whom, is in ``fedapp.crypto.masks``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import gmpy2
import numpy as np
from gmpy2 import mpz, powmod

from fedapp.crypto.integers import Bytes, from_bytes_array, to_bytes_array
from fedapp.crypto.keys import PrivateKey, PublicKey
from fedapp.crypto.masks import owner_masks, public_masks
from fedapp.crypto.workers import Workers

# Calls a process, so that none waits long for the last.
CALLS_PER_WORKER = 4


def encrypt(key: PublicKey | PrivateKey, plaintexts: Sequence[int], workers: Workers) -> Bytes:
    """Encrypt integers, many times faster with the private key.

    Parameters
    ----------
    key : the private key where the caller owns it.
    plaintexts : integers m, -n / 2 < m < n / 2 for the modulus n; a negative m stands for m + n.
    workers : processes to share the work.

    Returns
    -------
    uint8, shape (n, ciphertext_bytes), big endian.

    Raises
    ------
    ValueError : a plaintext is out of range.
    """
    public = key.public if isinstance(key, PrivateKey) else key
    limit = int(public.n) // 2
    n_wrong = sum(not -limit <= plaintext <= limit for plaintext in plaintexts)
    if n_wrong:
        raise ValueError(f"plaintexts must be within n / 2, got {n_wrong} that are not")
    function = _encrypt_owned if isinstance(key, PrivateKey) else _encrypt_public
    shares = share_out(len(plaintexts), workers)
    chunks = workers.run(function, [(key, plaintexts[first:last]) for first, last in shares])
    return _stack(chunks, public)


def rerandomise(key: PublicKey, ciphertexts: Bytes, workers: Workers) -> Bytes:
    """The same plaintexts under fresh masks, unlinkable to the ciphertexts they came in.

    Parameters
    ----------
    ciphertexts : uint8, shape (n, ciphertext_bytes), checked.
    workers : processes to share the work.

    Returns
    -------
    uint8, shape (n, ciphertext_bytes).
    """
    shares = share_out(len(ciphertexts), workers)
    chunks = workers.run(_rerandomise, [(key, ciphertexts[first:last]) for first, last in shares])
    return _stack(chunks, key)


def decrypt(key: PrivateKey, ciphertexts: Bytes, workers: Workers) -> list[int]:
    """Plaintexts of ciphertexts that were checked.

    Parameters
    ----------
    ciphertexts : uint8, shape (n, ciphertext_bytes).
    workers : processes to share the work.

    Returns
    -------
    Integers m, -n / 2 < m < n / 2 for the modulus n, as given to ``encrypt``.
    """
    shares = share_out(len(ciphertexts), workers)
    chunks = workers.run(_decrypt, [(key, ciphertexts[first:last]) for first, last in shares])
    return [plaintext for chunk in chunks for plaintext in chunk]


def check_ciphertexts(key: PublicKey, ciphertexts: Bytes) -> None:
    """Refuse what cannot be a ciphertext under this key; for all that comes from outside.

    Parameters
    ----------
    ciphertexts : uint8, shape (n, ciphertext_bytes).

    Raises
    ------
    ValueError : wrong dtype or shape, or a value is not a unit mod n^2.
    """
    width, shape = key.ciphertext_bytes, ciphertexts.shape
    if ciphertexts.dtype != np.uint8 or len(shape) != 2 or shape[1] != width:
        found = f"{ciphertexts.dtype} of shape {shape}"
        raise ValueError(f"ciphertexts must be uint8 of shape (n, {width}), got {found}")
    values, n, n_squared = from_bytes_array(ciphertexts), key.n, key.n_squared
    n_wrong = sum(not 0 < value < n_squared for value in values)
    if n_wrong:
        raise ValueError(f"ciphertexts must be > 0 and < n^2, got {n_wrong} that are not")
    product = mpz(1)
    for value in values:
        product = product * value % n
    if gmpy2.gcd(product, n) != 1:
        n_wrong = sum(gmpy2.gcd(value, n) != 1 for value in values)
        raise ValueError(f"ciphertexts must be prime to n, got {n_wrong} that are not")


def share_out(n_rows: int, workers: Workers) -> list[tuple[int, int]]:
    """First row, and the one after the last, of each call: few calls, but more than workers."""
    n_calls = min(n_rows, workers.n_workers * CALLS_PER_WORKER)
    ends = [n_rows * call // n_calls for call in range(n_calls + 1)] if n_rows else []
    return list(itertools.pairwise(ends))


def _stack(chunks: Sequence[Bytes], key: PublicKey) -> Bytes:
    """The rows of all calls."""
    return np.concatenate([np.empty((0, key.ciphertext_bytes), np.uint8), *chunks])


def _encrypt_public(key: PublicKey, plaintexts: Sequence[int]) -> Bytes:
    """One call's ciphertexts."""
    n, n_squared = key.n, key.n_squared
    masks = public_masks(key).draw(len(plaintexts))
    pairs = zip(plaintexts, masks, strict=True)
    values = [(1 + plaintext * n) * mask % n_squared for plaintext, mask in pairs]
    return to_bytes_array(values, key.ciphertext_bytes)


def _encrypt_owned(key: PrivateKey, plaintexts: Sequence[int]) -> Bytes:
    """One call's ciphertexts, mod p^2 and q^2."""
    n, squares = key.p * key.q, (key.p**2, key.q**2)
    masks = owner_masks(key).draw(len(plaintexts))
    inverse = gmpy2.invert(*squares)
    values = []
    for plaintext, pair in zip(plaintexts, masks, strict=True):
        body = 1 + plaintext * n
        left, right = (body * mask % square for mask, square in zip(pair, squares, strict=True))
        values.append(left + squares[0] * ((right - left) * inverse % squares[1]))
    return to_bytes_array(values, key.public.ciphertext_bytes)


def _rerandomise(key: PublicKey, ciphertexts: Bytes) -> Bytes:
    """One call's ciphertexts under fresh masks."""
    n_squared, masks = key.n_squared, public_masks(key).draw(len(ciphertexts))
    pairs = zip(from_bytes_array(ciphertexts), masks, strict=True)
    values = [value * mask % n_squared for value, mask in pairs]
    return to_bytes_array(values, key.ciphertext_bytes)


def _decrypt(key: PrivateKey, ciphertexts: Bytes) -> list[int]:
    """One call's plaintexts, by Chinese remainders."""
    p, q, n = key.p, key.q, key.p * key.q
    # (1 + n)^(p - 1) = 1 + (p - 1) n mod p^2, so Paillier's h_p is the inverse of -q mod p.
    scale_p, scale_q, inverse = gmpy2.invert(-q, p), gmpy2.invert(-p, q), gmpy2.invert(p, q)
    plaintexts = []
    for value in from_bytes_array(ciphertexts):
        left = powmod(value, p - 1, p**2) // p * scale_p % p
        right = powmod(value, q - 1, q**2) // q * scale_q % q
        plaintext = left + p * ((right - left) * inverse % q)
        plaintexts.append(int(plaintext if plaintext <= n // 2 else plaintext - n))
    return plaintexts
