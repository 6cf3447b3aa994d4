"""Arithmetic modulo an odd number N on rows of limbs, eight rows at a time.

``LaneRing`` checks arguments, the kernels nothing. A residue x is stored in Montgomery's form, x R
mod N for R = 2^(52 k), in k limbs of 52 bits, lowest first, below 4 N. With R >= 16 N no final
subtraction is needed: for a, b < 4 N the product

    (a b + q N) / R,    q = -a b / N mod R,    is below 16 N^2 / R + N <= 2 N,

and the sum of two products is below 4 N again. Out of Montgomery's form, by a product with 1, it is
N at most, and N for 0 only.

Columns of a product are added up without carries: each gets 4 k terms below 2^52, together below
2^64 for k < 1024. All limbs are read and written, whatever their values.

Kernels work on eight numbers at once, with a limb of each in a lane of a register::

    register    limb j of number 0 | limb j of number 1 | ... | limb j of number 7

Processors have the 52-bit multiplications since Intel's Ice Lake (2019) and AMD's Zen 4 (2022).

Source: Montgomery, Modular multiplication without trial division, 1985; Gueron and Krasnov,
Accelerating big integer arithmetic using Intel IFMA extensions, 2016.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import gmpy2
import numpy as np
from gmpy2 import mpz

from fedapp.arrays import Ints
from fedapp.crypto.lanes.registers import (
    LIMB_BITS,
    WORD_BYTES,
    Limbs,
    add,
    add_high,
    add_low,
    carry_of,
    limb_of,
    load,
    registers,
    spread,
    store,
)
from fedapp.crypto.rings import (
    Bytes,
    Residues,
    Ring,
    from_bytes_array,
    to_bytes_array,
)
from fedapp.errors import MachineError
from fedapp.kernels import kernel

SLACK_BITS, MOST_LIMBS = 4, 1023  # R >= 16 N, and columns below 2^64
WINDOW_BITS = 4


class LaneRing(Ring):
    """Arithmetic modulo an odd number >= 3 of at most 53,000 bits; residues are (n, n_limbs)."""

    def __init__(self, modulus: mpz) -> None:
        self.n_limbs = -(-(modulus.bit_length() + SLACK_BITS) // LIMB_BITS)
        if modulus < 3 or modulus % 2 == 0 or self.n_limbs > MOST_LIMBS:
            raise ValueError("modulus must be odd, >= 3 and of at most 53,000 bits, got another")
        super().__init__(modulus)
        size = mpz(1) << (LIMB_BITS * self.n_limbs)
        base = mpz(1) << LIMB_BITS
        self._limbs = self._split([modulus])[0]
        self._inverse = np.uint64(int(base - gmpy2.invert(modulus, base)))
        self._one, self._to, self._from = self._split([size % modulus, size**2 % modulus, mpz(1)])
        self._kernel_modulus = self._limbs, self._inverse

    def read(self, rows: Bytes) -> Limbs:
        """Residues of big-endian integers up to ``n_limbs``; uint8, shape (n, width)."""
        return self.multiply(self._read_limbs(rows), self._to[None])

    def write(self, residues: Limbs, width: int) -> Bytes:
        """Inverse of ``read``: integers >= 0 and < N, uint8, shape (n, width)."""
        if width < self._n_bytes:
            raise ValueError(f"width must be >= {self._n_bytes} bytes, got {width}")
        limbs = self.multiply(residues, self._from[None])
        words = np.empty((len(limbs), -(-width // WORD_BYTES)), dtype=np.uint64)
        write_words(limbs, self._limbs, words)
        data = words[:, ::-1].astype(">u8").view(np.uint8)
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
        left_rows: Ints | None = None,
        right_rows: Ints | None = None,
    ) -> Limbs:
        """Products of rows of two arrays, in new memory.

        A single row is broadcast. ``left_rows`` and ``right_rows`` select rows; None for all in
        order.
        """
        chosen = (left, left_rows), (right, right_rows)
        sides = [np.arange(len(values)) if rows is None else rows for values, rows in chosen]
        if len(sizes := {*map(len, sides)} - {1}) > 1:
            raise ValueError(f"factors must be as many on both sides, got {sorted(sizes)}")
        left_rows, right_rows = map(np.ascontiguousarray, np.broadcast_arrays(*sides))
        out = np.empty((len(left_rows), self.n_limbs), dtype=np.uint64)
        left, right = self._checked(left, left_rows), self._checked(right, right_rows)
        products(out, left, left_rows, right, right_rows, *self._kernel_modulus, self._scratch(3))
        return out

    def add(self, left: Limbs, right: Limbs) -> Limbs:
        """Sums of two products each; multiply or write a sum before adding it again."""
        sums = left + right
        carry_over(sums)
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
        power(out, residues, digit_array, self._one, *self._kernel_modulus, scratch)
        return out

    def squares(self, residues: Limbs, times: int) -> Limbs:
        """Powers by 2^times."""
        residues = self._checked(residues)
        out = np.empty_like(residues)
        squares(out, residues, times, *self._kernel_modulus, self._scratch(2))
        return out

    def table_products(self, tables: Limbs, digits: Bytes) -> Limbs:
        """Products of one entry of each table, uint64, shape (n_tables, 256, n_limbs)."""
        if tables.shape != (digits.shape[1], 256, self.n_limbs) or digits.dtype != np.uint8:
            raise ValueError(f"tables must fit {digits.shape} digits, got {tables.shape}")
        out = np.empty((len(digits), self.n_limbs), dtype=np.uint64)
        tables, digits = np.ascontiguousarray(tables), np.ascontiguousarray(digits)
        table_products(out, tables, digits, self._one, *self._kernel_modulus, self._scratch(3))
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
        if not read_words(words, limbs):
            raise ValueError(f"integers must be below 2^{LIMB_BITS * self.n_limbs}, got a larger")
        return limbs

    def _checked(self, residues: Limbs, rows: Ints | None = None) -> Limbs:
        """Contiguous residues, after checking their form and that they have all ``rows``."""
        if residues.dtype != np.uint64 or residues.shape[1:] != (self.n_limbs,):
            form = f"{residues.dtype} of shape {residues.shape}"
            raise ValueError(f"residues must be uint64 of shape (n, {self.n_limbs}), got {form}")
        if rows is not None and len(rows) and not 0 <= rows.min() <= rows.max() < len(residues):
            raise ValueError(f"rows must be 0 to {len(residues) - 1}, got others")
        return np.ascontiguousarray(residues)

    def _scratch(self, n_numbers: int) -> Limbs:
        return registers(n_numbers * self.n_limbs)


@functools.cache
def check_known_answers() -> None:
    """Compare all kernels with gmpy2, once a process; raises a MachineError."""
    # From one limb to many; just below and above a power of two, where carries are extreme.
    for modulus in (3, 2**52 + 21, 2**104 - 1, 2**1024 + 643, 2**2048 - 1):
        ring, plain = LaneRing(mpz(modulus)), Ring(mpz(modulus))
        if ring.numbers(_answers(ring)) != list(_answers(plain)):
            raise MachineError(f"residues of {modulus.bit_length()} bits", "gmpy2")


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


# Kernels


@kernel
def read_words(words: Any, limbs: Any) -> Any:
    """Split 64-bit words into limbs, lowest first; returns whether the last limb is the highest."""
    mask = np.uint64((1 << 52) - 1)
    n_limbs = limbs.shape[1]
    n_words = words.shape[1]
    rest = np.uint64(0)
    for row in range(words.shape[0]):
        for index in range(n_limbs):
            word = 52 * index // 64
            shift = np.uint64(52 * index % 64)
            limb = words[row, word] >> shift
            if shift > 12:
                limb |= words[row, word + 1] << (np.uint64(64) - shift)
            limbs[row, index] = limb & mask
        end = 52 * n_limbs
        rest |= words[row, end // 64] >> np.uint64(end % 64)
        for word in range(end // 64 + 1, n_words):
            rest |= words[row, word]
    return rest == 0


@kernel
def write_words(limbs: Any, modulus: Any, words: Any) -> Any:
    """Inverse of ``read_words`` for numbers up to the modulus; writes 0 for the modulus."""
    n_limbs = limbs.shape[1]
    for row in range(limbs.shape[0]):
        differs = np.uint64(0)
        for index in range(n_limbs):
            differs |= limbs[row, index] ^ modulus[index]
        for word in range(words.shape[1]):
            index = 64 * word // 52
            shift = 64 * word - 52 * index
            total = np.uint64(0)
            if index < n_limbs:
                total = limbs[row, index] >> np.uint64(shift)
            if index + 1 < n_limbs:
                total |= limbs[row, index + 1] << np.uint64(52 - shift)
            if index + 2 < n_limbs and shift > 40:
                total |= limbs[row, index + 2] << np.uint64(104 - shift)
            words[row, word] = total if differs else np.uint64(0)


@kernel
def carry_over(sums: Any) -> Any:
    """Carry limbs to below 2^52, in place."""
    mask = np.uint64((1 << 52) - 1)
    for row in range(sums.shape[0]):
        carry = np.uint64(0)
        for limb in range(sums.shape[1]):
            total = sums[row, limb] + carry
            sums[row, limb] = total & mask
            carry = total >> np.uint64(52)


@kernel
def _product(total: Any, left: Any, right: Any, modulus: Any, inverse: Any) -> Any:
    """Montgomery's product of eight pairs; ``total`` must not overlap the factors."""
    n_limbs = len(modulus)
    zero = spread(np.uint64(0))
    inverses = spread(inverse)
    for index in range(n_limbs):
        store(total, index, zero)
    # Each turn multiplies ``left`` by a limb of ``right``, adds the multiple of the modulus that
    # makes the lowest limb 0, and moves all limbs down by one.
    for turn in range(n_limbs):
        factor = load(right, turn)
        limb, divisor = load(left, 0), spread(modulus[0])
        lowest = add_low(load(total, 0), limb, factor)
        quotient = add_low(zero, lowest, inverses)
        carry = carry_of(add_low(lowest, divisor, quotient))
        for index in range(1, n_limbs):
            column = add(load(total, index), carry)
            column = add_high(add_high(column, limb, factor), divisor, quotient)
            limb = load(left, index)
            divisor = spread(modulus[index])
            column = add_low(add_low(column, limb, factor), divisor, quotient)
            store(total, index - 1, column)
            carry = zero
        column = add_high(add_high(carry, limb, factor), divisor, quotient)
        store(total, n_limbs - 1, column)
    carry = zero
    for index in range(n_limbs):
        column = add(load(total, index), carry)
        store(total, index, limb_of(column))
        carry = carry_of(column)


@kernel
def _fill(lanes: Any, lane: Any, number: Any) -> Any:
    """Put a number into a lane."""
    for limb in range(len(number)):
        lanes[8 * limb + lane] = number[limb]


@kernel
def _empty(lanes: Any, out: Any, start: Any) -> Any:
    """Write the lanes to the rows from ``start`` on, as far as there are rows."""
    for lane in range(min(8, len(out) - start)):
        number = out[start + lane]
        for limb in range(len(number)):
            number[limb] = lanes[8 * limb + lane]


@kernel
def products(
    out: Any,
    left: Any,
    left_rows: Any,
    right: Any,
    right_rows: Any,
    modulus: Any,
    inverse: Any,
    scratch: Any,
) -> Any:
    """See ``LaneRing.multiply``; lanes past the end repeat the last row."""
    n_rows, size = len(left_rows), 8 * len(modulus)
    total, first, second = scratch[:size], scratch[size : 2 * size], scratch[2 * size : 3 * size]
    for start in range(0, n_rows, 8):
        for lane in range(8):
            row = min(start + lane, n_rows - 1)
            _fill(first, lane, left[left_rows[row]])
            _fill(second, lane, right[right_rows[row]])
        _product(total, first, second, modulus, inverse)
        _empty(total, out, start)


@kernel
def table_products(
    out: Any, tables: Any, digits: Any, one: Any, modulus: Any, inverse: Any, scratch: Any
) -> Any:
    """See ``LaneRing.table_products``."""
    n_rows, size = len(digits), 8 * len(modulus)
    total, before, entry = scratch[:size], scratch[size : 2 * size], scratch[2 * size : 3 * size]
    for start in range(0, n_rows, 8):
        for lane in range(8):
            _fill(total, lane, one)
        for table in range(tables.shape[0]):
            total, before = before, total
            for lane in range(8):
                row = min(start + lane, n_rows - 1)
                _fill(entry, lane, tables[table, digits[row, table]])
            _product(total, before, entry, modulus, inverse)
        _empty(total, out, start)


@kernel
def power(
    out: Any, values: Any, digits: Any, one: Any, modulus: Any, inverse: Any, scratch: Any
) -> Any:
    """See ``LaneRing.power``; digits of four bits, the highest first."""
    n_rows, size = len(values), 8 * len(modulus)
    total, before, powers = scratch[:size], scratch[size : 2 * size], scratch[2 * size :]
    for start in range(0, n_rows, 8):
        for lane in range(8):
            _fill(powers, lane, one)
            _fill(powers[size:], lane, values[min(start + lane, n_rows - 1)])
            _fill(total, lane, one)
        for digit in range(2, 16):
            last = powers[(digit - 1) * size : digit * size]
            here = powers[digit * size : (digit + 1) * size]
            _product(here, last, powers[size : 2 * size], modulus, inverse)
        for digit in digits:
            for _ in range(4):
                total, before = before, total
                _product(total, before, before, modulus, inverse)
            total, before = before, total
            factor = powers[digit * size : (digit + 1) * size]
            _product(total, before, factor, modulus, inverse)
        _empty(total, out, start)


@kernel
def squares(out: Any, values: Any, times: Any, modulus: Any, inverse: Any, scratch: Any) -> Any:
    """See ``LaneRing.squares``."""
    n_rows, size = len(values), 8 * len(modulus)
    total, before = scratch[:size], scratch[size : 2 * size]
    for start in range(0, n_rows, 8):
        for lane in range(8):
            _fill(total, lane, values[min(start + lane, n_rows - 1)])
        for _ in range(times):
            total, before = before, total
            _product(total, before, before, modulus, inverse)
        _empty(total, out, start)
