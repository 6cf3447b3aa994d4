"""Eight words side by side in a register: numba functions of LLVM's vector operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numba.extending
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

from fedapp.crypto.rings import N_LANES

LIMB_BITS = 52

WORD = ir.IntType(64)
REGISTER = ir.VectorType(WORD, N_LANES)
Limbs = npt.NDArray[np.uint64]
WORD_BYTES = 8


def registers(n_registers: int) -> npt.NDArray[np.uint64]:
    """Uninitialised memory for ``n_registers``, aligned to cache lines; flat."""
    n_words = n_registers * N_LANES
    memory = np.empty(n_words + N_LANES, dtype=np.uint64)
    first = -(memory.ctypes.data // memory.itemsize) % N_LANES
    return memory[first : first + n_words]


class _Lanes(types.Type):
    """Numba's type of a register."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


LANES: Any = _Lanes()


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    """How LLVM stores the type."""

    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, REGISTER)  # type: ignore[no-untyped-call]


def operation(function: Callable[..., Any]) -> Any:
    """Register a function as a numba intrinsic."""
    return numba.extending.intrinsic(function)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    """Address of the register ``index`` of an array."""
    data = context.make_array(kind)(context, builder, array).data
    word = builder.gep(data, [builder.mul(index, ir.Constant(WORD, N_LANES))])
    return builder.bitcast(word, REGISTER.as_pointer())


def is_flat(array: Any) -> bool:
    """Whether an array is one contiguous run of 64-bit words."""
    words = isinstance(array, types.Array) and array.dtype == types.uint64
    return words and array.ndim == 1 and array.layout == "C"


@operation
def load(_: Any, array: Any, index: Any) -> Any:
    """Words ``8 * index`` to ``8 * index + 7`` of a flat uint64 array."""
    if not is_flat(array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_pointer(context, builder, signature.args[0], *arguments), align=8)

    return LANES(array, types.intp), generate


@operation
def store(_: Any, array: Any, index: Any, lanes: Any) -> Any:
    """Write a register over words ``8 * index`` to ``8 * index + 7``."""
    if not is_flat(array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *target, value = arguments
        builder.store(value, _pointer(context, builder, signature.args[0], *target), align=8)
        return context.get_dummy_value()

    return types.void(array, types.intp, LANES), generate


def spread_word(builder: Any, word: Any) -> Any:
    """A register with the same word in all lanes."""
    first = ir.Constant(ir.IntType(32), 0)
    single = builder.insert_element(ir.Constant(REGISTER, ir.Undefined), word, first)
    everywhere = ir.Constant(ir.VectorType(ir.IntType(32), N_LANES), None)
    return builder.shuffle_vector(single, ir.Constant(REGISTER, ir.Undefined), everywhere)


@operation
def spread(_: Any, word: Any) -> Any:
    """The same word in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return spread_word(builder, arguments[0])

    return LANES(types.uint64), generate


def add_product(builder: Any, half: str, *registers: Any) -> Any:
    """Add the low ("l") or high ("h") half of a product; registers: sum and two factors."""
    kind = ir.FunctionType(REGISTER, [REGISTER] * 3)
    find: Any = cgutils.get_or_insert_function
    function = find(builder.module, kind, f"llvm.x86.avx512.vpmadd52{half}.uq.512")
    return builder.call(function, registers)


def _lanes(n_registers: int, emit: Callable[..., Any]) -> Any:
    """A function of ``n_registers`` to one: its type, and what adds its instructions."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit(builder, *arguments)

    return LANES(*[LANES] * n_registers), generate


def same(number: int) -> Any:
    """A register with the same number in all lanes."""
    return ir.Constant(REGISTER, [ir.Constant(WORD, number)] * N_LANES)


@operation
def add_low(_: Any, total: Any, left: Any, right: Any) -> Any:
    """``total`` plus the lower 52 bits of the product of the factors' lower 52 bits."""
    return _lanes(3, lambda builder, *lanes: add_product(builder, "l", *lanes))


@operation
def add_high(_: Any, total: Any, left: Any, right: Any) -> Any:
    """``total`` plus the upper 52 bits of the product of the factors' lower 52 bits."""
    return _lanes(3, lambda builder, *lanes: add_product(builder, "h", *lanes))


@operation
def add(_: Any, left: Any, right: Any) -> Any:
    """Sums modulo 2^64."""
    return _lanes(2, lambda builder, *lanes: builder.add(*lanes))


@operation
def limb_of(_: Any, lanes: Any) -> Any:
    """The lower 52 bits."""
    return _lanes(1, lambda builder, lanes: builder.and_(lanes, same((1 << LIMB_BITS) - 1)))


@operation
def carry_of(_: Any, lanes: Any) -> Any:
    """What is above the lower 52 bits."""
    return _lanes(1, lambda builder, lanes: builder.lshr(lanes, same(LIMB_BITS)))
