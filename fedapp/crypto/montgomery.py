"""Montgomery products of many big integers at once, eight in the lanes of a register.

A residue x modulo an odd N is kept as x R mod N, R = 2^(52 k), in k limbs of 52 bits, lowest first,
below 4 N. With R >= 16 N nothing more is subtracted: for a, b < 4 N the product

    (a b + q N) / R,    q = -a b / N mod R,    is below 16 N^2 / R + N <= 2 N,

and the sum of two products is below 4 N again. Out of Montgomery's form, by a product with 1, it
is N at most, and N for 0 alone.

Columns of a product are added up without carries: each gets 4 k terms below 2^52, together below
2^64 for k < 1024. All limbs are read and written, whatever their values.

Source: Montgomery, Modular multiplication without trial division, 1985; Gueron and Krasnov,
Accelerating big integer arithmetic using Intel IFMA extensions, 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gmpy2
import numba
import numpy as np
import numpy.typing as npt
from gmpy2 import mpz

from fedapp.crypto.integers import Bytes, from_bytes_array, to_bytes_array
from fedapp.crypto.lanes import (
    LIMB_BITS,
    N_LANES,
    add,
    add_high,
    add_low,
    carry_of,
    limb_of,
    load,
    spread,
    store,
)

Limbs = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]

SLACK_BITS = 4  # R >= 16 N
MOST_LIMBS = 1023
WORD_BYTES = 8
WINDOW_BITS = 4


class LaneRing:
    """Arithmetic modulo an odd number; residues are uint64, shape (n, n_limbs).

    Raises
    ------
    ValueError : the modulus is even, below 3, or has more than 53,000 bits.
    """

    def __init__(self, modulus: mpz) -> None:
        self.n_limbs = -(-(modulus.bit_length() + SLACK_BITS) // LIMB_BITS)
        if modulus < 3 or modulus % 2 == 0 or self.n_limbs > MOST_LIMBS:
            raise ValueError("modulus must be odd, >= 3 and of at most 53,000 bits, got another")
        self.modulus = modulus
        size, base = mpz(1) << (LIMB_BITS * self.n_limbs), mpz(1) << LIMB_BITS
        self._limbs = self._split([modulus])[0]
        self._inverse = np.uint64(int(base - gmpy2.invert(modulus, base)))
        self._one, self._to, self._from = self._split([size % modulus, size**2 % modulus, mpz(1)])
        self._given = self._limbs, self._inverse

    def read(self, rows: Bytes) -> Limbs:
        """Residues of integers.

        Parameters
        ----------
        rows : uint8, shape (n, width), big endian; integers below 16 N.

        Raises
        ------
        ValueError : rows are too wide to be below 2^(52 k).
        """
        return self.multiply(self._read_limbs(rows), self._to[None])

    def write(self, residues: Limbs, width: int) -> Bytes:
        """The integers >= 0 and < N; the inverse of ``read``, uint8, shape (n, width)."""
        if width < self._n_bytes:
            raise ValueError(f"width must be >= {self._n_bytes} bytes, got {width}")
        limbs = self.multiply(residues, self._from[None])
        words = np.empty((len(limbs), -(-width // WORD_BYTES)), dtype=np.uint64)
        _write_words(limbs, self._limbs, words)
        data = words[:, ::-1].astype(">u8").view(np.uint8)
        return np.ascontiguousarray(data[:, data.shape[1] - width :])

    def take(self, numbers: Sequence[mpz]) -> Limbs:
        """Residues of integers >= 0 and < N."""
        return self.read(to_bytes_array(numbers, self._n_bytes))

    def numbers(self, residues: Limbs) -> list[mpz]:
        """The inverse of ``take``."""
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
        """Products of rows of two arrays.

        Parameters
        ----------
        left, right : residues; a single row stands for as many as there are on the other side.
        left_rows, right_rows : int64, shape (n,): which rows, in order where there is None.

        Returns
        -------
        n residues, in memory of their own.
        """
        left_rows, right_rows = _same_length(left, right, left_rows, right_rows)
        out = np.empty((len(left_rows), self.n_limbs), dtype=np.uint64)
        left, right = self._checked(left, left_rows), self._checked(right, right_rows)
        _multiply(out, left, left_rows, right, right_rows, *self._given, self._scratch(3))
        return out

    def add(self, left: Limbs, right: Limbs) -> Limbs:
        """Sums of two products each; a sum must be multiplied, or written, before it is added."""
        sums = left + right
        _carry(sums)
        return sums

    def power(self, residues: Limbs, exponent: int) -> Limbs:
        """Powers by a common exponent, >= 0; each of its digits costs the same."""
        exponent, digits = int(exponent), []
        while exponent:
            digits.append(exponent % (1 << WINDOW_BITS))
            exponent >>= WINDOW_BITS
        residues = self._checked(residues)
        out = np.empty_like(residues)
        scratch = self._scratch(2 + (1 << WINDOW_BITS))
        found = np.array(digits[::-1], dtype=np.int64)
        _power(out, residues, found, self._one, *self._given, scratch)
        return out

    def squares(self, residues: Limbs, times: int) -> Limbs:
        """Powers by 2^times."""
        residues = self._checked(residues)
        out = np.empty_like(residues)
        _squares(out, residues, times, *self._given, self._scratch(2))
        return out

    def table_products(self, tables: Limbs, digits: Bytes) -> Limbs:
        """Products of one entry a table.

        Parameters
        ----------
        tables : uint64, shape (n_tables, 256, n_limbs).
        digits : uint8, shape (n, n_tables).
        """
        if tables.shape != (digits.shape[1], 256, self.n_limbs) or digits.dtype != np.uint8:
            raise ValueError(f"tables must fit {digits.shape} digits, got {tables.shape}")
        out = np.empty((len(digits), self.n_limbs), dtype=np.uint64)
        tables, digits = np.ascontiguousarray(tables), np.ascontiguousarray(digits)
        _table_products(out, tables, digits, self._one, *self._given, self._scratch(3))
        return out

    def lift(self, residues: Limbs, ring: LaneRing) -> Limbs:
        """Residues of another ring, each as the integer below its modulus, as residues of this."""
        limbs = ring.multiply(residues, ring._from[None])
        wide = np.zeros((len(limbs), self.n_limbs), dtype=np.uint64)
        wide[:, : ring.n_limbs] = limbs
        return self.multiply(wide, self._to[None])

    @property
    def _n_bytes(self) -> int:
        return int(self.modulus.bit_length() + 7) // 8

    def _split(self, numbers: Sequence[mpz]) -> Limbs:
        """Limbs of integers as they are."""
        width = -(-LIMB_BITS * self.n_limbs // 8)
        return self._read_limbs(to_bytes_array(numbers, width))

    def _read_limbs(self, rows: Bytes) -> Limbs:
        """Limbs of integers as they are."""
        n_words = (
            -(-LIMB_BITS * self.n_limbs // 64) + 1
        )  # a word more, which the last limb looks at
        if rows.shape[1] > WORD_BYTES * n_words:
            rule = f"at most {WORD_BYTES * n_words} bytes"
            raise ValueError(f"integers must be of {rule}, got {rows.shape[1]}")
        data = np.zeros((len(rows), WORD_BYTES * n_words), dtype=np.uint8)
        data[:, WORD_BYTES * n_words - rows.shape[1] :] = rows
        words = np.ascontiguousarray(data.view(">u8")[:, ::-1].astype(np.uint64))
        limbs = np.empty((len(rows), self.n_limbs), dtype=np.uint64)
        if not _read_words(words, limbs):
            raise ValueError(f"integers must be below 2^{LIMB_BITS * self.n_limbs}, got a larger")
        return limbs

    def _checked(self, residues: Limbs, rows: Rows | None = None) -> Limbs:
        """Residues in one run of memory, once it is clear that they are ones and have all rows."""
        if residues.dtype != np.uint64 or residues.shape[1:] != (self.n_limbs,):
            found = f"{residues.dtype} of shape {residues.shape}"
            raise ValueError(f"residues must be uint64 of shape (n, {self.n_limbs}), got {found}")
        if rows is not None and len(rows) and not 0 <= rows.min() <= rows.max() < len(residues):
            raise ValueError(f"rows must be 0 to {len(residues) - 1}, got others")
        return np.ascontiguousarray(residues)

    def _scratch(self, n_numbers: int) -> Limbs:
        """Registers for the limbs of so many numbers, on lines of the cache."""
        size = n_numbers * N_LANES * self.n_limbs
        memory = np.empty(size + N_LANES, dtype=np.uint64)
        first = -(memory.ctypes.data // WORD_BYTES) % N_LANES
        return memory[first : first + size]


def _same_length(
    left: Limbs, right: Limbs, left_rows: Rows | None, right_rows: Rows | None
) -> tuple[Rows, Rows]:
    """Rows of both sides, as many."""
    sizes = [
        len(array) if rows is None else len(rows)
        for array, rows in ((left, left_rows), (right, right_rows))
    ]
    n = sizes[1] if sizes[0] == 1 and left_rows is None else sizes[0]
    found = []
    for size, rows in zip(sizes, (left_rows, right_rows), strict=True):
        if rows is None and size == 1:
            rows = np.zeros(n, dtype=np.int64)
        elif rows is None:
            rows = np.arange(size)
        if len(rows) != n:
            raise ValueError(f"factors must be as many on both sides, got {sizes}")
        found.append(np.ascontiguousarray(rows, dtype=np.int64))
    return found[0], found[1]


@numba.njit(cache=True, nogil=True)
def _read_words(words: Any, limbs: Any) -> Any:
    """Limbs of numbers of 64-bit words, lowest first; whether nothing is beyond the last limb."""
    mask, n_limbs, n_words = np.uint64((1 << 52) - 1), limbs.shape[1], words.shape[1]
    rest = np.uint64(0)
    for row in range(words.shape[0]):
        for place in range(n_limbs):
            word, shift = 52 * place // 64, np.uint64(52 * place % 64)
            limb = words[row, word] >> shift
            if shift > 12:
                limb |= words[row, word + 1] << (np.uint64(64) - shift)
            limbs[row, place] = limb & mask
        end = 52 * n_limbs
        rest |= words[row, end // 64] >> np.uint64(end % 64)
        for word in range(end // 64 + 1, n_words):
            rest |= words[row, word]
    return rest == 0


@numba.njit(cache=True, nogil=True)
def _write_words(limbs: Any, modulus: Any, words: Any) -> Any:
    """The inverse of ``_read_words`` for numbers up to the modulus, for which 0 is written."""
    n_limbs = limbs.shape[1]
    for row in range(limbs.shape[0]):
        differs = np.uint64(0)
        for place in range(n_limbs):
            differs |= limbs[row, place] ^ modulus[place]
        for word in range(words.shape[1]):
            place = 64 * word // 52
            shift = 64 * word - 52 * place
            total = np.uint64(0)
            if place < n_limbs:
                total = limbs[row, place] >> np.uint64(shift)
            if place + 1 < n_limbs:
                total |= limbs[row, place + 1] << np.uint64(52 - shift)
            if place + 2 < n_limbs and shift > 40:
                total |= limbs[row, place + 2] << np.uint64(104 - shift)
            words[row, word] = total if differs else np.uint64(0)


@numba.njit(cache=True, nogil=True)
def _carry(sums: Any) -> Any:
    """Bring limbs below 2^52 again, in place."""
    mask = np.uint64((1 << 52) - 1)
    for row in range(sums.shape[0]):
        carry = np.uint64(0)
        for place in range(sums.shape[1]):
            total = sums[row, place] + carry
            sums[row, place] = total & mask
            carry = total >> np.uint64(52)


@numba.njit(cache=True, nogil=True)
def _product(total: Any, left: Any, right: Any, modulus: Any, inverse: Any) -> Any:
    """Montgomery's product of eight pairs; ``total`` is memory of its own.

    A limb of ``right`` after the other is multiplied by ``left``, and the multiple q of the modulus
    added that makes the lowest limb 0; then all move down by one.
    """
    n_limbs, zero, inverses = len(modulus), spread(np.uint64(0)), spread(inverse)
    for place in range(n_limbs):
        store(total, place, zero)
    for turn in range(n_limbs):
        factor = load(right, turn)
        limb, divisor = load(left, 0), spread(modulus[0])
        lowest = add_low(load(total, 0), limb, factor)
        quotient = add_low(zero, lowest, inverses)
        carry = carry_of(add_low(lowest, divisor, quotient))
        for place in range(1, n_limbs):
            column = add(load(total, place), carry)
            column = add_high(add_high(column, limb, factor), divisor, quotient)
            limb, divisor = load(left, place), spread(modulus[place])
            column = add_low(add_low(column, limb, factor), divisor, quotient)
            store(total, place - 1, column)
            carry = zero
        column = add_high(add_high(carry, limb, factor), divisor, quotient)
        store(total, n_limbs - 1, column)
    carry = zero
    for place in range(n_limbs):
        column = add(load(total, place), carry)
        store(total, place, limb_of(column))
        carry = carry_of(column)


@numba.njit(cache=True, nogil=True)
def _fill(lanes: Any, lane: Any, number: Any) -> Any:
    """Put a number into a lane."""
    for place in range(len(number)):
        lanes[8 * place + lane] = number[place]


@numba.njit(cache=True, nogil=True)
def _empty(lanes: Any, lane: Any, number: Any) -> Any:
    """Take a number out of a lane."""
    for place in range(len(number)):
        number[place] = lanes[8 * place + lane]


@numba.njit(cache=True, nogil=True)
def _multiply(
    out: Any,
    left: Any,
    left_rows: Any,
    right: Any,
    right_rows: Any,
    modulus: Any,
    inverse: Any,
    scratch: Any,
) -> Any:
    """See ``LaneRing.multiply``; lanes that are over repeat the last row."""
    n_rows, size = len(left_rows), 8 * len(modulus)
    total, first, second = scratch[:size], scratch[size : 2 * size], scratch[2 * size : 3 * size]
    for start in range(0, n_rows, 8):
        for lane in range(8):
            row = min(start + lane, n_rows - 1)
            _fill(first, lane, left[left_rows[row]])
            _fill(second, lane, right[right_rows[row]])
        _product(total, first, second, modulus, inverse)
        for lane in range(min(8, n_rows - start)):
            _empty(total, lane, out[start + lane])


@numba.njit(cache=True, nogil=True)
def _table_products(
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
        for lane in range(min(8, n_rows - start)):
            _empty(total, lane, out[start + lane])


@numba.njit(cache=True, nogil=True)
def _power(
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
        for lane in range(min(8, n_rows - start)):
            _empty(total, lane, out[start + lane])


@numba.njit(cache=True, nogil=True)
def _squares(out: Any, values: Any, times: Any, modulus: Any, inverse: Any, scratch: Any) -> Any:
    """See ``LaneRing.squares``."""
    n_rows, size = len(values), 8 * len(modulus)
    total, before = scratch[:size], scratch[size : 2 * size]
    for start in range(0, n_rows, 8):
        for lane in range(8):
            _fill(total, lane, values[min(start + lane, n_rows - 1)])
        for _ in range(times):
            total, before = before, total
            _product(total, before, before, modulus, inverse)
        for lane in range(min(8, n_rows - start)):
            _empty(total, lane, out[start + lane])
