"""Masks of Paillier ciphertexts: random n-th powers, by the owner of the key and by others."""

from __future__ import annotations

import functools
import math
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import gmpy2
import numpy as np
from gmpy2 import mpz, powmod

from fedapp.crypto.lanes import has_lanes, ring_of
from fedapp.crypto.paillier_keys import PrivateKey, PublicKey
from fedapp.crypto.rings import Bytes, PlainRing, Residues, Ring

# Of several threads that need new masks, only one computes their tables.
_LOCK = threading.Lock()
BASE_BYTES = 3  # of an exponent e_j
# All exponents together are longer than the group's order by this many bits.
SLACK_BITS, OWNER_SLACK_BITS = 128, 64
# Bits of short exponents for n up to 2048 bits, and more for each 1024 beyond.
SHORT_BITS, MORE_SHORT_BITS = 256, 64
SMALL_PRIME_BOUND = 1 << 16  # trying all primes below takes milliseconds
# At 2048 bits a table of powers mod n^2 takes 140 kB; digits of 12 bits would save a third of the
# products for eleven times the memory.
DIGIT_BITS = 8

# Masks


class PublicMasks:
    """Masks under a public key: fresh ones first, then products of powers of those. Thread-safe."""

    def __init__(self, key: PublicKey) -> None:
        self.n_bases = -(-(key.bits + SLACK_BITS) // (8 * BASE_BYTES))
        self._key, self._ring = key, ring_of(key.n_squared)
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


class OwnerMasks:
    """Masks under a private key: powers of a base mod p^2 and mod q^2, joined mod n^2."""

    def __init__(self, key: PrivateKey) -> None:
        self._is_full = key.full_masks
        n_bits = max(key.p.bit_length(), key.q.bit_length()) + OWNER_SLACK_BITS
        if not key.full_masks:
            n_bits = min(n_bits, short_bits(key.public.bits))
        power = 1 if key.full_masks else 2
        n_bytes = -(-n_bits // 8)
        pairs = (key.p, key.q), (key.q, key.p)
        self._ring = ring_of(key.public.n_squared)
        self._rings = [ring_of(prime**2) for prime, _ in pairs]
        self.tables = [
            power_tables(powmod(_residue(prime, other), power, prime**2), prime, n_bytes)
            for prime, other in pairs
        ]
        # 1 modulo one prime's square and 0 modulo the other's.
        self._units = [
            self._ring.take([other**2 * gmpy2.invert(other**2, prime**2)]) for prime, other in pairs
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


# Those of the last key of each kind are this process's until another key is used.
_public_masks = functools.lru_cache(maxsize=1)(PublicMasks)
_owner_masks = functools.lru_cache(maxsize=1)(OwnerMasks)


def masks_of(key: PublicKey | PrivateKey) -> PublicMasks | OwnerMasks:
    """This process's masks under a key, by the owner's way if it is private."""
    with _LOCK:
        return _owner_masks(key) if isinstance(key, PrivateKey) else _public_masks(key)


def power_tables(base: mpz, prime: mpz, n_bytes: int) -> FixedBases | SquareBase:
    """Powers of a base modulo a prime's square, in whichever way is faster here."""
    if has_lanes():
        return fixed_bases(ring_of(prime**2), [base], n_bytes)
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


# Powers of fixed bases: a table has all powers of a base for one byte of its exponent. A power is
# the product of one entry a byte and takes no squaring:
#
#     exponent    0xA1 0x74                 0x0C
#     table       1    0                    2
#     entry       base0^(0xA1 * 2^8)
#                      base0^0x74           base1^0x0C


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FixedBases:
    """Tables of powers of some bases: (n_bases * n_bytes, 256) residues."""

    ring: Ring
    tables: Residues

    @property
    def n_tables(self) -> int:
        """Bytes of the exponents of all bases."""
        return len(self.tables)

    def powers(self, digits: Bytes) -> Residues:
        """n products of powers.

        ``digits``, uint8, shape (n, n_tables): bytes of the exponents, base after base, lowest
        first.
        """
        return self.ring.table_products(self.tables, digits)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SquareBase:
    """Powers of one base modulo a prime's square by gmpy2, at little more than half the cost.

    A unit w mod p^2 is r (1 + p u) for its residue r = w mod p and one u mod p, and

        r (1 + p u) * r' (1 + p u') = r r' (1 + p (u + u')) mod p^2.

    So a power is a product of residues, which have half the digits of p^2, and a sum. ``tables``
    has the residues r and terms u of the powers, a table a byte of the exponent; an even number.
    """

    prime: mpz
    tables: tuple[tuple[list[mpz], list[mpz]], ...]

    def powers(self, digits: Bytes) -> Residues:
        """Powers mod p^2 as residues of ``PlainRing``; digits as for ``FixedBases``."""
        prime = self.prime
        modulus = self.prime**2
        columns = digits.T.tolist()
        products, totals = [mpz(1)] * len(digits), [mpz(0)] * len(digits)
        for column in range(0, len(columns), 2):
            (residues, terms), (others, more) = self.tables[column : column + 2]
            # A product of two residues is no longer than p^2: one reduction for two tables.
            rows = list(zip(*columns[column : column + 2], strict=True))
            products = [
                product * (residues[first] * others[second]) % modulus
                for product, (first, second) in zip(products, rows, strict=True)
            ]
            totals = [
                total + (terms[first] + more[second])
                for total, (first, second) in zip(totals, rows, strict=True)
            ]
        pairs = zip(products, totals, strict=True)
        powers = [product * (1 + prime * total) % modulus for product, total in pairs]
        return PlainRing(modulus).take(powers)

    @property
    def n_tables(self) -> int:
        """Bytes of an exponent."""
        return len(self.tables)


def square_base(base: mpz, prime: mpz, n_bytes: int) -> SquareBase:
    """Tables of the powers mod ``prime**2`` of a base that is coprime to ``prime``.

    The exponent has ``n_bytes``, rounded up to an even number.
    """
    tables = []
    for table in fixed_bases(PlainRing(prime**2), [base], n_bytes + n_bytes % 2).tables:
        inverses = [mpz(1)]
        inverse = gmpy2.invert(table[1], prime)
        while len(inverses) < len(table):
            inverses.append(inverses[-1] * inverse % prime)
        # w = r + p h: its term is u = h / r mod p.
        pairs = zip(table, inverses, strict=True)
        terms = [power // prime * inverse % prime for power, inverse in pairs]
        tables.append(([power % prime for power in table], terms))
    return SquareBase(prime, tuple(tables))


def fixed_bases(ring: Ring, bases: Sequence[mpz], n_bytes: int) -> FixedBases:
    """Tables of the powers of bases >= 1 and < modulus, by exponents of ``n_bytes`` each."""
    by_byte = [ring.take(bases)]
    for _ in range(n_bytes - 1):
        by_byte.append(ring.squares(by_byte[-1], DIGIT_BITS))
    # firsts: base 0 byte 0, base 0 byte 1, ..., base 1 byte 0, ...
    firsts = np.stack(by_byte, axis=1).reshape(-1, *by_byte[0].shape[1:])
    powers = [ring.ones(len(firsts)), firsts]
    while len(powers) < 1 << DIGIT_BITS:
        powers.append(ring.multiply(powers[-1], firsts))
    return FixedBases(ring, np.stack(powers, axis=1))


def random_digits(n_powers: int, n_tables: int) -> Bytes:
    """Independent uniform exponents from the system; uint8, shape (n_powers, n_tables)."""
    digits = np.frombuffer(secrets.token_bytes(n_powers * n_tables), dtype=np.uint8)
    return digits.reshape(n_powers, n_tables)
