"""Arithmetic modulo an odd number on rows of limbs, eight rows at a time.

``fedapp.crypto.montgomery`` has the kernels and their bounds. This module checks their arguments,
and recomputes a sample of their results with gmpy2.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import gmpy2
import numpy as np
import numpy.typing as npt
from gmpy2 import mpz, powmod

from fedapp.crypto import montgomery
from fedapp.crypto.integers import Bytes, from_bytes_array, to_bytes_array
from fedapp.crypto.lanes import LIMB_BITS, registers
from fedapp.crypto.rings import PlainRing, Residues, Ring, sampled
from fedapp.errors import MachineError

Limbs = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]

SLACK_BITS = 4  # R >= 16 N, see fedapp.crypto.montgomery
MOST_LIMBS = 1023
WORD_BYTES = 8
WINDOW_BITS = 4


class LaneRing:
    """Arithmetic modulo an odd number >= 3 of at most 53,000 bits; residues are (n, n_limbs)."""

    def __init__(self, modulus: mpz) -> None:
        self.n_limbs = -(-(modulus.bit_length() + SLACK_BITS) // LIMB_BITS)
        if modulus < 3 or modulus % 2 == 0 or self.n_limbs > MOST_LIMBS:
            raise ValueError("modulus must be odd, >= 3 and of at most 53,000 bits, got another")
        self.modulus = modulus
        size, base = mpz(1) << (LIMB_BITS * self.n_limbs), mpz(1) << LIMB_BITS
        self._limbs = self._split([modulus])[0]
        self._inverse = np.uint64(int(base - gmpy2.invert(modulus, base)))
        self._one, self._to, self._from = self._split([size % modulus, size**2 % modulus, mpz(1)])
        self._kernel_modulus = self._limbs, self._inverse
        self._unscale = gmpy2.invert(size, modulus)

    def read(self, rows: Bytes) -> Limbs:
        """Residues of big-endian integers up to ``n_limbs``; uint8, shape (n, width)."""
        residues = self.multiply(self._read_limbs(rows), self._to[None])
        for row in sampled("read", len(rows)):
            self._check(residues[row], mpz.from_bytes(rows[row].tobytes(), "big"))
        return residues

    def write(self, residues: Limbs, width: int) -> Bytes:
        """Inverse of ``read``: integers >= 0 and < N, uint8, shape (n, width)."""
        if width < self._n_bytes:
            raise ValueError(f"width must be >= {self._n_bytes} bytes, got {width}")
        limbs = self.multiply(residues, self._from[None])
        words = np.empty((len(limbs), -(-width // WORD_BYTES)), dtype=np.uint64)
        montgomery.write_words(limbs, self._limbs, words)
        data = words[:, ::-1].astype(">u8").view(np.uint8)
        for row in sampled("write", len(data)):
            self._check(residues[row], mpz.from_bytes(data[row].tobytes(), "big"))
        return np.ascontiguousarray(data[:, data.shape[1] - width :])

    def take(self, numbers: Sequence[mpz]) -> Limbs:
        """Residues of integers >= 0 and < N."""
        return self.read(to_bytes_array(numbers, self._n_bytes))

    def numbers(self, residues: Limbs) -> list[mpz]:
        """Inverse of ``take``."""
        return from_bytes_array(self.write(residues, self._n_bytes))

    def ones(self, n: int) -> Limbs:
        """The residue 1, n times."""
        return np.tile(self._one, (n, 1))

    def multiply(
        self,
        left: Limbs,
        right: Limbs,
        left_rows: Rows | None = None,
        right_rows: Rows | None = None,
    ) -> Limbs:
        """Products of rows of two arrays, in new memory.

        A single row is broadcast. ``left_rows`` and ``right_rows`` select rows; None for all in
        order.
        """
        left_rows, right_rows = _same_length(left, right, left_rows, right_rows)
        out = np.empty((len(left_rows), self.n_limbs), dtype=np.uint64)
        left, right = self._checked(left, left_rows), self._checked(right, right_rows)
        montgomery.multiply(
            out, left, left_rows, right, right_rows, *self._kernel_modulus, self._scratch(3)
        )
        for row in sampled("multiply", len(out)):
            factors = self._value(left[left_rows[row]]), self._value(right[right_rows[row]])
            self._check(out[row], factors[0] * factors[1])
        return out

    def add(self, left: Limbs, right: Limbs) -> Limbs:
        """Sums of two products each; multiply or write a sum before adding it again."""
        sums = left + right
        montgomery.carry_over(sums)
        for row in sampled("add", len(sums)):
            self._check(sums[row], self._value(left[row]) + self._value(right[row]))
        return sums

    def power(self, residues: Limbs, exponent: int) -> Limbs:
        """Powers by a common exponent >= 0, in time that depends only on its length."""
        digits, remaining = [], int(exponent)
        while remaining:
            digits.append(remaining % (1 << WINDOW_BITS))
            remaining >>= WINDOW_BITS
        residues = self._checked(residues)
        out = np.empty_like(residues)
        scratch = self._scratch(2 + (1 << WINDOW_BITS))
        digit_array = np.array(digits[::-1], dtype=np.int64)
        montgomery.power(out, residues, digit_array, self._one, *self._kernel_modulus, scratch)
        for row in sampled("power", len(out)):
            self._check(out[row], powmod(self._value(residues[row]), exponent, self.modulus))
        return out

    def squares(self, residues: Limbs, times: int) -> Limbs:
        """Powers by 2^times."""
        residues = self._checked(residues)
        out = np.empty_like(residues)
        montgomery.squares(out, residues, times, *self._kernel_modulus, self._scratch(2))
        for row in sampled("squares", len(out)):
            self._check(out[row], powmod(self._value(residues[row]), 1 << times, self.modulus))
        return out

    def table_products(self, tables: Limbs, digits: Bytes) -> Limbs:
        """Products of one entry of each table, uint64, shape (n_tables, 256, n_limbs)."""
        if tables.shape != (digits.shape[1], 256, self.n_limbs) or digits.dtype != np.uint8:
            raise ValueError(f"tables must fit {digits.shape} digits, got {tables.shape}")
        out = np.empty((len(digits), self.n_limbs), dtype=np.uint64)
        tables, digits = np.ascontiguousarray(tables), np.ascontiguousarray(digits)
        montgomery.table_products(
            out, tables, digits, self._one, *self._kernel_modulus, self._scratch(3)
        )
        for row in sampled("table_products", len(out)):
            product = mpz(1)
            for table, digit in zip(tables, digits[row], strict=True):
                product = product * self._value(table[digit]) % self.modulus
            self._check(out[row], product)
        return out

    def lift(self, residues: Limbs, ring: LaneRing) -> Limbs:
        """Residues of another ring, as integers below its modulus, as residues of this ring."""
        limbs = ring.multiply(residues, ring._from[None])
        limbs[(limbs == ring._limbs).all(axis=1)] = 0  # N stands for 0
        wide = np.zeros((len(limbs), self.n_limbs), dtype=np.uint64)
        wide[:, : ring.n_limbs] = limbs
        return self.multiply(wide, self._to[None])

    @property
    def _n_bytes(self) -> int:
        return int(self.modulus.bit_length() + 7) // 8

    def _split(self, numbers: Sequence[mpz]) -> Limbs:
        """Limbs of integers, not in Montgomery's form."""
        width = -(-LIMB_BITS * self.n_limbs // 8)
        return self._read_limbs(to_bytes_array(numbers, width))

    def _read_limbs(self, rows: Bytes) -> Limbs:
        """Limbs of big-endian integers, not in Montgomery's form."""
        # One word more, which reading the last limb touches.
        n_words = -(-LIMB_BITS * self.n_limbs // 64) + 1
        if rows.shape[1] > WORD_BYTES * n_words:
            rule = f"at most {WORD_BYTES * n_words} bytes"
            raise ValueError(f"integers must be of {rule}, got {rows.shape[1]}")
        data = np.zeros((len(rows), WORD_BYTES * n_words), dtype=np.uint8)
        data[:, WORD_BYTES * n_words - rows.shape[1] :] = rows
        words = np.ascontiguousarray(data.view(">u8")[:, ::-1].astype(np.uint64))
        limbs = np.empty((len(rows), self.n_limbs), dtype=np.uint64)
        if not montgomery.read_words(words, limbs):
            raise ValueError(f"integers must be below 2^{LIMB_BITS * self.n_limbs}, got a larger")
        return limbs

    def _checked(self, residues: Limbs, rows: Rows | None = None) -> Limbs:
        """Contiguous residues, after checking their form and that they have all ``rows``."""
        if residues.dtype != np.uint64 or residues.shape[1:] != (self.n_limbs,):
            form = f"{residues.dtype} of shape {residues.shape}"
            raise ValueError(f"residues must be uint64 of shape (n, {self.n_limbs}), got {form}")
        if rows is not None and len(rows) and not 0 <= rows.min() <= rows.max() < len(residues):
            raise ValueError(f"rows must be 0 to {len(residues) - 1}, got others")
        return np.ascontiguousarray(residues)

    def _value(self, residue: Limbs) -> mpz:
        """The integer of one residue, by gmpy2."""
        # Even and odd limbs separately, as limbs of a faulty number may exceed 52 bits.
        even, odd = (gmpy2.pack(residue[k::2].tolist(), 2 * LIMB_BITS) for k in (0, 1))
        return (even + (odd << LIMB_BITS)) * self._unscale % self.modulus

    def _check(self, residue: Limbs, wanted: mpz) -> None:
        if self._value(residue) != wanted % self.modulus:
            raise MachineError(f"residues of {self.modulus.bit_length()} bits", "gmpy2")

    def _scratch(self, n_numbers: int) -> Limbs:
        return registers(n_numbers * self.n_limbs)


def _same_length(
    left: Limbs, right: Limbs, left_rows: Rows | None, right_rows: Rows | None
) -> tuple[Rows, Rows]:
    """Row indices of both sides, of the same length."""
    sizes = [
        len(array) if rows is None else len(rows)
        for array, rows in ((left, left_rows), (right, right_rows))
    ]
    n = sizes[1] if sizes[0] == 1 and left_rows is None else sizes[0]
    both = []
    for size, rows in zip(sizes, (left_rows, right_rows), strict=True):
        if rows is None and size == 1:
            rows = np.zeros(n, dtype=np.int64)
        elif rows is None:
            rows = np.arange(size)
        if len(rows) != n:
            raise ValueError(f"factors must be as many on both sides, got {sizes}")
        both.append(np.ascontiguousarray(rows, dtype=np.int64))
    return both[0], both[1]


@functools.cache
def check_known_answers() -> None:
    """Compare all kernels with RFC 3526 and gmpy2, once a process; raises a MachineError."""
    with gmpy2.context(precision=2048):
        pi = mpz(gmpy2.floor(gmpy2.const_pi() * mpz(2) ** 1918))
    # RFC 3526, Section 3, group 14: the generator, 2, has order (p - 1) / 2.
    prime = mpz(2) ** 2048 - mpz(2) ** 1984 - 1 + 2**64 * (pi + 124476)
    ring = LaneRing(prime)
    is_right = ring.numbers(ring.power(ring.take([mpz(2)]), (prime - 1) // 2)) == [1]
    # From one limb to many; just below and above a power of two, where carries are extreme.
    for modulus in (mpz(3), mpz(2**52 + 21), mpz(2**104 - 1), mpz(2**1024 + 643)):
        ring = LaneRing(modulus)
        is_right = is_right and ring.numbers(_answers(ring)) == list(_answers(PlainRing(modulus)))
    if not is_right:
        raise MachineError(f"residues of {ring.modulus.bit_length()} bits", "gmpy2")


def _answers(ring: Ring) -> Residues:
    """Results of all operations on numbers at the edges of a ring and between them."""
    top = ring.modulus - 1
    residues = ring.take([mpz(0), mpz(1), *(top // k for k in range(1, 10))])
    products = ring.multiply(residues, residues[::-1].copy())
    sums = ring.add(products, residues)
    tables = np.stack([residues, products, sums])[:, np.arange(256) % len(residues)]
    digits = np.arange(33, dtype=np.uint8).reshape(11, 3)
    powers = [ring.squares(residues, 9), ring.power(residues, 2**70 + 12345)]
    return np.concatenate([sums, products, *powers, ring.table_products(tables, digits)])
