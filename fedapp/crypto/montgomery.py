"""Montgomery products of many big integers at once, eight in the lanes of a register.

A residue x modulo an odd N is stored as x R mod N, R = 2^(52 k), in k limbs of 52 bits, lowest
first, below 4 N. With R >= 16 N no final subtraction is needed: for a, b < 4 N the product

    (a b + q N) / R,    q = -a b / N mod R,    is below 16 N^2 / R + N <= 2 N,

and the sum of two products is below 4 N again. Out of Montgomery's form, by a product with 1, it is
N at most, and N for 0 only.

Columns of a product are added up without carries: each gets 4 k terms below 2^52, together below
2^64 for k < 1024. All limbs are read and written, whatever their values.

Arguments are not checked here: ``fedapp.crypto.lane_ring.LaneRing`` checks them.

Source: Montgomery, Modular multiplication without trial division, 1985; Gueron and Krasnov,
Accelerating big integer arithmetic using Intel IFMA extensions, 2016.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedapp.crypto.lanes import add, add_high, add_low, carry_of, limb_of, load, spread, store
from fedapp.kernels import kernel


@kernel
def read_words(words: Any, limbs: Any) -> Any:
    """Split 64-bit words into limbs, lowest first; returns whether the last limb is the highest."""
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


@kernel
def write_words(limbs: Any, modulus: Any, words: Any) -> Any:
    """Inverse of ``read_words`` for numbers up to the modulus; writes 0 for the modulus."""
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


@kernel
def carry_over(sums: Any) -> Any:
    """Carry limbs to below 2^52, in place."""
    mask = np.uint64((1 << 52) - 1)
    for row in range(sums.shape[0]):
        carry = np.uint64(0)
        for place in range(sums.shape[1]):
            total = sums[row, place] + carry
            sums[row, place] = total & mask
            carry = total >> np.uint64(52)


@kernel
def _product(total: Any, left: Any, right: Any, modulus: Any, inverse: Any) -> Any:
    """Montgomery's product of eight pairs; ``total`` must not overlap the factors."""
    n_limbs, zero, inverses = len(modulus), spread(np.uint64(0)), spread(inverse)
    for place in range(n_limbs):
        store(total, place, zero)
    # Each turn multiplies ``left`` by a limb of ``right``, adds the multiple of the modulus that
    # makes the lowest limb 0, and moves all limbs down by one.
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


@kernel
def _fill(lanes: Any, lane: Any, number: Any) -> Any:
    """Put a number into a lane."""
    for place in range(len(number)):
        lanes[8 * place + lane] = number[place]


@kernel
def _empty(lanes: Any, out: Any, start: Any) -> Any:
    """Write the lanes to the rows from ``start`` on, as far as there are rows."""
    for lane in range(min(8, len(out) - start)):
        number = out[start + lane]
        for place in range(len(number)):
            number[place] = lanes[8 * place + lane]


@kernel
def multiply(
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
