"""Numbers modulo 2^255 - 19, eight at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numba
from llvmlite import ir
from numba import types

from fedapp.crypto.lanes.registers import (
    REGISTER,
    WORD,
    add_product,
    is_flat,
    operation,
    same,
    spread_word,
)
from fedapp.crypto.rings import N_LANES

P = 2**255 - 19
N_LIMBS, BITS, FACTOR_BITS = 5, 51, 52
LIMB = (1 << BITS) - 1
SLOT_WORDS = N_LANES * N_LIMBS
NUMBER_WORDS = 4  # of 64 bits, of an encoded number
# Largest limb after carries below 2^13: the highest carry returns to the lowest limb times 19.
CARRIED = LIMB + 19 * (1 << 13)


class Element:
    """Eight numbers modulo p: five registers of limbs, none above ``most``."""

    def __init__(self, builder: Any, limbs: Sequence[Any], most: int) -> None:
        assert most < 1 << 64
        self.builder, self.limbs, self.most = builder, list(limbs), most
        self._carried: Element | None = None

    def constant(self, number: int) -> Element:
        """One number in all lanes."""
        limbs = [same(number % P >> BITS * limb & LIMB) for limb in range(N_LIMBS)]
        return Element(self.builder, limbs, LIMB)

    def carried(self) -> Element:
        """The same numbers with no limb above ``CARRIED``."""
        if self.most <= CARRIED:
            return self
        if self._carried is None:
            build = self.builder
            carries = [build.lshr(limb, same(BITS)) for limb in self.limbs]
            limbs = [build.and_(limb, same(LIMB)) for limb in self.limbs]
            limbs[1:] = map(build.add, limbs[1:], carries)
            limbs[0] = add_product(build, "l", limbs[0], carries[-1], same(19))
            self._carried = Element(build, limbs, CARRIED)
        return self._carried

    def __add__(self, other: Element) -> Element:
        left, right = self, other
        if left.most + right.most >= 1 << 64:
            left, right = left.carried(), right.carried()
        limbs = map(self.builder.add, left.limbs, right.limbs)
        return Element(self.builder, list(limbs), left.most + right.most)

    def __sub__(self, other: Element) -> Element:
        """Adds a multiple of p first, so that no limb falls below 0."""
        left, right = self, other
        if left.most + right.most + (1 << 52) >= 1 << 64:
            left, right = left.carried(), right.carried()
        times = -(-right.most // (LIMB - 18))
        multiple = [same(times * (LIMB - 18)), *[same(times * LIMB)] * (N_LIMBS - 1)]
        limbs = map(self.builder.add, left.limbs, multiple)
        limbs = map(self.builder.sub, list(limbs), right.limbs)
        return Element(self.builder, list(limbs), left.most + times * LIMB)

    def __neg__(self) -> Element:
        return self.constant(0) - self

    def __mul__(self, other: Element) -> Element:
        left = self._factor()
        right = other._factor()
        build = self.builder
        pairs = [(i, j) for i in range(N_LIMBS) for j in range(N_LIMBS)]
        # columns[k] has weight 2^(51 k). The high halves of products come first, as all of them
        # are doubled at once.
        columns = [same(0)] * (2 * N_LIMBS)
        for i, j in pairs:
            columns[i + j + 1] = add_product(
                build, "h", columns[i + j + 1], left.limbs[i], right.limbs[j]
            )
        columns = [build.add(column, column) for column in columns]  # 2^52 is 2 x 2^51
        for i, j in pairs:
            columns[i + j] = add_product(build, "l", columns[i + j], left.limbs[i], right.limbs[j])
        return self._folded(columns, left.most * right.most)

    def square(self) -> Element:
        """The product with itself; products of different limbs are computed once and doubled."""
        factor, build = self._factor(), self.builder
        limbs, places = factor.limbs, range(N_LIMBS)
        pairs = [(i, j) for i in places for j in places if i < j]
        columns = [same(0)] * (2 * N_LIMBS)
        for i, j in pairs:
            columns[i + j + 1] = add_product(build, "h", columns[i + j + 1], limbs[i], limbs[j])
        columns = [build.add(column, column) for column in columns]
        for i, j in pairs:
            columns[i + j] = add_product(build, "l", columns[i + j], limbs[i], limbs[j])
        for i in places:
            columns[2 * i + 1] = add_product(build, "h", columns[2 * i + 1], limbs[i], limbs[i])
        columns = [build.add(column, column) for column in columns]
        for i in places:
            columns[2 * i] = add_product(build, "l", columns[2 * i], limbs[i], limbs[i])
        return self._folded(columns, factor.most**2)

    def is_zero(self) -> Any:
        """Lanes where it is 0, as bits."""
        limbs = self._canonical()
        union = limbs[0]
        for limb in limbs[1:]:
            union = self.builder.or_(union, limb)
        return self.builder.icmp_unsigned("==", union, same(0))

    def is_negative(self) -> Any:
        """Lanes where it is odd, which RFC 9496 calls negative, as bits."""
        lowest = self.builder.and_(self._canonical()[0], same(1))
        return self.builder.icmp_unsigned("!=", lowest, same(0))

    def where(self, bits: Any, other: Element) -> Element:
        """This element in the lanes whose bit is set, ``other`` elsewhere."""
        limbs = [
            self.builder.select(bits, mine, theirs)
            for mine, theirs in zip(self.limbs, other.limbs, strict=True)
        ]
        return Element(self.builder, limbs, max(self.most, other.most))

    def swapped(self, mask: Any, other: Element) -> tuple[Element, Element]:
        """Both elements, swapped in the lanes where the mask's bits are set."""
        build = self.builder
        most = max(self.most, other.most)
        changes = [
            build.and_(build.xor(mine, theirs), mask)
            for mine, theirs in zip(self.limbs, other.limbs, strict=True)
        ]
        first, second = (
            Element(build, list(map(build.xor, element.limbs, changes)), most)
            for element in (self, other)
        )
        return first, second

    def abs(self) -> Element:
        """The element or its negative, whichever is even."""
        return (-self).where(self.is_negative(), self)

    def words(self) -> list[Any]:
        """The numbers below p as four registers of 64-bit words."""
        build, limbs = self.builder, self._canonical()
        words = []
        for word in range(NUMBER_WORDS):
            first, shift = divmod(64 * word, BITS)
            upper = build.shl(limbs[first + 1], same(BITS - shift))
            words.append(build.or_(build.lshr(limbs[first], same(shift)), upper))
        return words

    def _factor(self) -> Element:
        return self if self.most < 1 << FACTOR_BITS else self.carried()

    def _folded(self, columns: Sequence[Any], product: int) -> Element:
        """Reduce ten columns to five, as 2^255 = 19; ``product`` bounds products of limbs."""
        build, limbs = self.builder, []
        for column, upper in zip(columns[:N_LIMBS], columns[N_LIMBS:], strict=True):
            nineteen = build.add(build.shl(upper, same(4)), build.shl(upper, same(1)))
            limbs.append(build.add(build.add(column, upper), nineteen))
        column = N_LIMBS * ((1 << FACTOR_BITS) + 2 * (product >> FACTOR_BITS))
        return Element(build, limbs, 20 * column)

    def _canonical(self) -> list[Any]:
        """Limbs of the numbers below p, each below 2^51."""
        # Carried numbers are below 2 p. Subtract p where adding 19 would reach 2^255.
        build = self.builder
        limbs = list(self.carried().limbs)
        carry = same(19)
        for limb in limbs:
            carry = build.lshr(build.add(limb, carry), same(BITS))
        carry = add_product(build, "l", same(0), carry, same(19))
        for index, limb in enumerate(limbs):
            total = build.add(limb, carry)
            limbs[index] = build.and_(total, same(LIMB))
            carry = build.lshr(total, same(BITS))
        return limbs


class Slots:
    """Elements in memory from a given slot on, as formulas read and write them."""

    def __init__(self, builder: Any, words: Any, first: Any) -> None:
        self._builder = builder
        self._words = builder.gep(words, [builder.mul(first, ir.Constant(WORD, SLOT_WORDS))])

    def __getitem__(self, slot: int) -> Element:
        limbs = [self.register(slot, limb) for limb in range(N_LIMBS)]
        return Element(self._builder, limbs, CARRIED)

    def __setitem__(self, slot: int, element: Element) -> None:
        self.put(slot, element.carried().limbs)

    def register(self, slot: int, index: int) -> Any:
        """One register, without interpretation."""
        return self._builder.load(self._register(slot, index), align=8)

    def put(self, slot: int, registers: Sequence[Any]) -> None:
        """Write registers, without interpretation."""
        for index, register in enumerate(registers):
            self._builder.store(register, self._register(slot, index), align=8)

    def put_bits(self, slot: int, bits: Any) -> None:
        """Write a register of ones and zeros."""
        self.put(slot, [self._builder.zext(bits, REGISTER)])

    def spread(self, word: int) -> Any:
        """A word of the first slot in all lanes."""
        address = self._builder.gep(self._words, [ir.Constant(WORD, word)])
        return spread_word(self._builder, self._builder.load(address))

    def number(self, slot: int = 0) -> Element:
        """Elements of four-word numbers, without their highest bit."""
        build = self._builder
        words = [self.register(slot, index) for index in range(NUMBER_WORDS)]
        limbs = []
        for index in range(N_LIMBS):
            word, shift = divmod(BITS * index, 64)
            limb = build.lshr(words[word], same(shift))
            if shift > 64 - BITS and word + 1 < NUMBER_WORDS:
                limb = build.or_(limb, build.shl(words[word + 1], same(64 - shift)))
            limbs.append(build.and_(limb, same(LIMB)))
        return Element(build, limbs, LIMB)

    def _register(self, slot: int, index: int) -> Any:
        word = ir.Constant(WORD, SLOT_WORDS * slot + N_LANES * index)
        return self._builder.bitcast(self._builder.gep(self._words, [word]), REGISTER.as_pointer())


def of_slots(formula: Callable[..., None]) -> Any:
    """Compile ``formula(*slots)`` into a function ``f(memory, places)``.

    Slots that the formula reads before it writes may overlap those it writes.
    """
    n_slots = len(inspect.signature(formula).parameters)

    def typed(_: Any, memory: Any, places: Any) -> Any:
        if not (is_flat(memory) and isinstance(places, types.UniTuple) and len(places) == n_slots):
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            words = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            firsts = [builder.extract_value(arguments[1], index) for index in range(n_slots)]
            formula(*(Slots(builder, words, first) for first in firsts))
            return context.get_dummy_value()

        return types.void(memory, places), generate

    emitted = operation(typed)

    @numba.njit(nogil=True)
    def function(memory: Any, places: Any) -> None:
        emitted(memory, places)

    return function


@of_slots
def multiply(out: Slots, left: Slots, right: Slots) -> None:
    """A product."""
    out[0] = left[0] * right[0]


@of_slots
def square(out: Slots, value: Slots) -> None:
    """A square."""
    out[0] = value[0].square()
