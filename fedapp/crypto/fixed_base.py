"""Random products of powers of fixed bases: how masks are drawn when many are needed.

A table holds all powers of a base for one byte of its exponent. A power is the product of one entry
a byte and takes no squaring; a product of powers of several bases is the same with more tables.

    exponent    0xA1 0x74                 0x0C
    table       1    0                    2
    entry       base0^(0xA1 * 2^8)
                     base0^0x74           base1^0x0C

Source: Brickell, Gordon, McCurley and Wilson, Fast exponentiation with precomputation, 1992.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import gmpy2
import numpy as np
from gmpy2 import mpz

from fedapp.crypto.integers import Bytes
from fedapp.crypto.rings import PlainRing, Residues, Ring, sampled
from fedapp.errors import MachineError

# At 2048 bits a table of powers mod n^2 takes 140 kB; digits of 12 bits would save a third of the
# products for eleven times the memory.
DIGIT_BITS = 8


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
        prime, modulus, columns = self.prime, self.prime**2, digits.T.tolist()
        products, totals = [mpz(1)] * len(digits), [mpz(0)] * len(digits)
        for place in range(0, len(columns), 2):
            (residues, terms), (others, more) = self.tables[place : place + 2]
            # A product of two residues is no longer than p^2: one reduction for two tables.
            rows = list(zip(*columns[place : place + 2], strict=True))
            products = [
                product * (residues[one] * others[two]) % modulus
                for product, (one, two) in zip(products, rows, strict=True)
            ]
            totals = [
                total + (terms[one] + more[two])
                for total, (one, two) in zip(totals, rows, strict=True)
            ]
        pairs = zip(products, totals, strict=True)
        powers = [product * (1 + prime * total) % modulus for product, total in pairs]
        for row in sampled("powers", len(powers)):
            (_, residue, *_), (_, term, *_) = self.tables[0]
            exponent = mpz.from_bytes(digits[row].tobytes(), "little")
            if gmpy2.powmod(residue * (1 + prime * term), exponent, modulus) != powers[row]:
                raise MachineError("powers by a prime's square", "gmpy2")
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
        inverses, inverse = [mpz(1)], gmpy2.invert(table[1], prime)
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
