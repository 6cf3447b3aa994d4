"""Masks: the n-th residues r^n mod n^2 that make Paillier's ciphertexts random.

**With the public key** masks must also hide from the key's owner, who can divide a result by the
masks of the rows it sent and so test which rows were added. So they are statistically close to
uniform, whatever one knows. The first masks of a process are r^n for a fresh uniform unit r mod n
each. Once there are M of them, ``BASE_BYTES * 8 * M >= b + 128`` for n of b bits, a mask is

    u_1^e_1 * ... * u_M^e_M mod n^2,    e_j uniform in [0, 2^24), fresh for each mask,

of these first masks u_j, a ninth of the work. By the leftover hash lemma it is, even to an
adversary who knows all u_j, within 1/2 sqrt(|G| C - 1) of uniform in the group G of n-th residues,
where C is the chance that two such products of the same random bases agree. With g the common
divisor of all differences of exponents, they agree with chance |{x in G: x^g = 1}| / |G| <= g^2 /
|G|, as G is a product of two cyclic groups; g divides M differences with chance below (1/g +
2^-24)^M; and all differences are 0 with chance 2^(-24 M). So

    |G| C - 1 < sum over g >= 2 of g^2 (1/g + 2^-24)^M + |G| 2^(-24 M) < 5 * 2^-M + 2^-128,

and at 2048 bits (M = 91) a mask is within 2^-45 of uniform and of independence from all others.
Powers of a single base would not do: G is not cyclic, so the owner would see each result's coset of
the group that the base generates, which is that of the product of the rows' own masks.

**With the private key** a mask is a power h^r of one base, computed mod p^2 and mod q^2. Readers of
these ciphertexts know neither p nor q. The plaintexts are hidden

- with full masks by Paillier's assumption only: n-th residues mod n^2 cannot be distinguished from
  units. The exponents mod p^2 and mod q^2 are independent and longer than p and q. The n-th
  residues mod p^2 are a cyclic group of order p - 1, so the mask is a uniform n-th residue, up to
  2^-63, where both bases generate theirs. A base is drawn until no prime below 2^16 divides the
  index of the group that it generates; the chance that a larger prime does is below 2^-18 over the
  draws of key and base;
- otherwise by that assumption and one more: h^r for a uniform r of ``short_bits`` bits cannot be
  distinguished from h^r for a uniform r, where the order of h is unknown. It is the one behind the
  exponents of RFC 7919 (225 bits in a group of 2048, 275 of 3072), behind Damgard, Jurik and
  Nielsen's and Ma, Han and Wang's Paillier; the best attack known, Pollard's kangaroos, takes
  2^(short_bits / 2) products. Here h is the square of a full base, so that no Jacobi symbol shows
  the lowest bit of r.

Ciphertexts re-randomised for the owner always get public-key masks.

Source: Paillier 1999; Impagliazzo, Levin and Luby, Pseudo-random generation from one-way functions,
1989 (the lemma); Gennaro, An improved pseudo-random generator based on discrete log, 2000 (short
exponents); Damgard, Jurik and Nielsen, A generalization of Paillier's public-key system, 2010; Ma,
Han and Wang, Optimized Paillier's cryptosystem with fast encryption and decryption, 2021.
"""

from __future__ import annotations

import functools
import math
import secrets
import threading

import gmpy2
import numpy as np
from gmpy2 import mpz, powmod

from fedapp.crypto.fixed_base import (
    FixedBases,
    SquareBase,
    fixed_bases,
    random_digits,
    square_base,
)
from fedapp.crypto.keys import PrivateKey, PublicKey
from fedapp.crypto.rings import Residues, has_lanes, ring

BASE_BYTES = 3  # of an exponent e_j
# All exponents together are longer than the group's order by this many bits.
SLACK_BITS, OWNER_SLACK_BITS = 128, 64
# Bits of short exponents for n up to 2048 bits, and more for each 1024 beyond.
SHORT_BITS, MORE_SHORT_BITS = 256, 64
# Small enough to try all primes below in milliseconds.
SMALL_PRIME_BOUND = 1 << 16


class PublicMasks:
    """Masks under a public key: fresh ones first, then products of powers of those. Thread-safe."""

    def __init__(self, key: PublicKey) -> None:
        self.n_bases = -(-(key.bits + SLACK_BITS) // (8 * BASE_BYTES))
        self._key, self._ring = key, ring(key.n_squared)
        self._bases: list[mpz] = []
        self._tables: FixedBases | None = None
        self._lock = threading.Lock()

    def draw(self, n_masks: int) -> Residues:
        """Residues mod n^2, within 2^-45 of uniform and independent at 2048 bits."""
        with self._lock:
            fresh = self._fresh(min(n_masks, self.n_bases - len(self._bases)))
            self._bases += self._ring.numbers(fresh)
            if len(fresh) == n_masks:
                return fresh
            if self._tables is None:
                self._tables = fixed_bases(self._ring, self._bases, BASE_BYTES)
        digits = random_digits(n_masks - len(fresh), self._tables.n_tables)
        return np.concatenate([fresh, self._tables.powers(digits)])

    def _fresh(self, n_masks: int) -> Residues:
        """r^n mod n^2 for uniform units r."""
        n, units = self._key.n, list[mpz]()
        while len(units) < n_masks:
            unit = mpz(secrets.randbelow(int(n)))
            if gmpy2.gcd(unit, n) == 1:
                units.append(unit)
        return self._ring.power(self._ring.take(units), n)


@functools.lru_cache(maxsize=1)
def _public_masks(key: PublicKey) -> PublicMasks:
    """This process's masks under a public key, cached for the next call."""
    return PublicMasks(key)


class OwnerMasks:
    """Masks under a private key: powers of a base mod p^2 and mod q^2, joined mod n^2."""

    def __init__(self, key: PrivateKey) -> None:
        self._is_full = key.full_masks
        n_bits = max(key.p.bit_length(), key.q.bit_length()) + OWNER_SLACK_BITS
        if not key.full_masks:
            n_bits = min(n_bits, short_bits(key.public.bits))
        power, n_bytes = 1 if key.full_masks else 2, -(-n_bits // 8)
        pairs = (key.p, key.q), (key.q, key.p)
        self._ring = ring(key.public.n_squared)
        self._rings = [ring(one**2) for one, _ in pairs]
        self.tables = [
            power_tables(powmod(_residue(one, other), power, one**2), one, n_bytes)
            for one, other in pairs
        ]
        # 1 modulo one prime's square and 0 modulo the other's.
        self._units = [
            self._ring.take([other**2 * gmpy2.invert(other**2, one**2)]) for one, other in pairs
        ]

    def draw(self, n_masks: int) -> Residues:
        """Fresh independent masks, residues mod n^2."""
        digits = random_digits(n_masks, self.tables[0].n_tables)
        others = random_digits(*digits.shape) if self._is_full else digits
        left, right = (
            self._ring.multiply(self._ring.lift(table.powers(exponents), prime_ring), unit)
            for table, exponents, prime_ring, unit in zip(
                self.tables, (digits, others), self._rings, self._units, strict=True
            )
        )
        return self._ring.add(left, right)


@functools.lru_cache(maxsize=1)
def _owner_masks(key: PrivateKey) -> OwnerMasks:
    """This process's masks under its private key, cached for the next call."""
    return OwnerMasks(key)


# Of several threads that need new masks, only one computes their tables.
_LOCK = threading.Lock()


def masks_of(key: PublicKey | PrivateKey) -> PublicMasks | OwnerMasks:
    """This process's masks under a key, by the owner's way if it is private."""
    with _LOCK:
        return _owner_masks(key) if isinstance(key, PrivateKey) else _public_masks(key)


def power_tables(base: mpz, prime: mpz, n_bytes: int) -> FixedBases | SquareBase:
    """Powers of a base modulo a prime's square, in whichever way is faster here."""
    if has_lanes():
        return fixed_bases(ring(prime**2), [base], n_bytes)
    return square_base(base, prime, n_bytes)


def short_bits(key_bits: int) -> int:
    """Bits of a short exponent for a modulus n of ``key_bits`` bits."""
    return SHORT_BITS + MORE_SHORT_BITS * max(0, math.ceil(key_bits / 1024) - 2)


def _residue(p: mpz, q: mpz) -> mpz:
    """An n-th residue mod p^2 that generates all of them, up to primes above 2^16."""
    primes = [prime for prime in _small_primes() if (p - 1) % prime == 0]
    while True:
        unit = mpz(1 + secrets.randbelow(int(p - 1)))
        # Without this, a p that is no prime could fail here; the self-test is to detect it.
        is_unit = gmpy2.gcd(unit, p) == 1
        if is_unit and all(powmod(unit, (p - 1) // prime, p) != 1 for prime in primes):
            return powmod(unit, p * q, p**2)


@functools.cache
def _small_primes() -> tuple[int, ...]:
    primes, prime = [], mpz(2)
    while prime < SMALL_PRIME_BOUND:
        primes.append(int(prime))
        prime = gmpy2.next_prime(prime)
    return tuple(primes)
