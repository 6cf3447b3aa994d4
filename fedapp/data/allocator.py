"""numpy's allocator (NEP 49), by which all large arrays of a thread are mapped from files.

It makes every array, also those that an expression needs for a moment. numpy asks it where Python
must not run, so its functions are compiled. They put the size of an array before it::

    | size | 56 bytes | array ...

Their context is the size of the largest array in memory, and the pattern of a file's name.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

Code = Callable[..., Any]
GET_HANDLER, SET_HANDLER = 305, 304  # in numpy's table of C functions
VERSION = 1  # of a handler
HEADER, NUMBERS = 64, 16  # bytes before an array, and before the pattern
READ_WRITE, SHARED, FAILED = 3, 1, 2**64 - 1  # of mmap

_python = ctypes.PyDLL(None)
_python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p
_python.Py_IncRef.argtypes = [ctypes.py_object]


class _Handler(ctypes.Structure):
    """numpy's ``PyDataMem_Handler``."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        *((name, ctypes.c_void_p) for name in ("context", "malloc", "calloc", "realloc", "free")),
    )


def current() -> Any:
    """What makes the arrays of this thread."""
    return _of_numpy(GET_HANDLER)()


def use(allocator: Any) -> None:
    """Let an allocator make the arrays of this thread."""
    _of_numpy(SET_HANDLER, ctypes.py_object)(allocator)


@cache
def _of_numpy(number: int, *arguments: Any) -> Any:
    interface = import_module("numpy._core._multiarray_umath")._ARRAY_API
    functions = _python.PyCapsule_GetPointer(interface, None)
    address = ctypes.cast(functions, ctypes.POINTER(ctypes.c_void_p))[number]
    return ctypes.PYFUNCTYPE(ctypes.py_object, *arguments)(address)


@cache
def mapping(folder: str, largest: int) -> Any:
    """What maps arrays of more than ``largest`` bytes from files without names in a folder."""
    pattern = os.fsencode(f"{folder}/XXXXXX")
    numbers = np.array([largest, len(pattern) + 1], np.uint64)
    context = ctypes.create_string_buffer(numbers.tobytes() + pattern)
    handler = _Handler(b"fedapp", VERSION, ctypes.addressof(context), *_functions())
    allocator = _python.PyCapsule_New(ctypes.addressof(handler), b"mem_handler", None)
    _keep(context, handler, allocator)
    return allocator


def _keep(*objects: Any) -> None:
    """Keep what arrays need until the process has ended."""
    for each in objects:
        _python.Py_IncRef(each)


@cache
def _functions() -> list[int]:
    """Addresses of malloc, calloc, realloc and free."""
    # Imported late, as a small table needs no compiler; numba has no types for these.
    numba, ir = (import_module(name) for name in ("numba", "llvmlite.ir"))
    types, extending = (import_module(f"numba.{name}") for name in ("types", "extending"))
    c_function: Callable[[Any], Callable[[Code], Any]] = numba.cfunc
    inlined: Callable[[Code], Code] = extending.register_jitable
    intrinsic: Callable[[Code], Code] = extending.intrinsic
    word, number = types.uintp, types.int32
    not_inherited = os.O_CLOEXEC

    def external(name: str, result: Any, *arguments: Any) -> Any:
        return types.ExternalFunction(name, result(*arguments))

    malloc, calloc = external("malloc", word, word), external("calloc", word, word, word)
    free, memcpy = external("free", types.void, word), external("memcpy", word, word, word, word)
    open_new, unlink = external("mkostemp", number, word, number), external("unlink", number, word)
    allocate = external("posix_fallocate", number, number, types.int64, types.int64)
    mmap = external("mmap", word, word, word, number, number, number, types.int64)
    munmap, close = external("munmap", number, word, word), external("close", number, number)

    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], ir.IntType(64).as_pointer())

        return types.CPointer(types.uint64)(word), code

    @inlined
    def numbers(address: Any) -> Any:
        return numba.carray(pointer(address), 2)

    @inlined
    def map_file(context: Any, size: Any) -> Any:
        n_letters, start = numbers(context)[1], types.uint64(FAILED)
        path = malloc(n_letters)
        memcpy(path, context + NUMBERS, n_letters)
        file = open_new(path, not_inherited)
        if file >= 0:
            unlink(path)
            # Else the process would die at the first page without room.
            if allocate(file, 0, size) == 0:
                start = mmap(0, size, READ_WRITE, SHARED, file, 0)
            close(file)
        free(path)
        return types.uint64(0) if start == FAILED else start

    @inlined
    def make(context: Any, size: Any, is_zero: Any) -> Any:
        if size > numbers(context)[0]:
            start = map_file(context, size + HEADER)
        else:
            start = calloc(1, size + HEADER) if is_zero else malloc(size + HEADER)
        if start == 0:
            return start
        numbers(start)[0] = size
        return start + HEADER

    @inlined
    def drop(context: Any, array: Any) -> None:
        start = array - HEADER
        if array and numbers(start)[0] > numbers(context)[0]:
            munmap(start, numbers(start)[0] + HEADER)
        elif array:
            free(start)

    @c_function(word(word, word))
    def make_array(context: Any, size: Any) -> Any:
        return make(context, size, False)

    @c_function(word(word, word, word))
    def make_zeros(context: Any, n: Any, size: Any) -> Any:
        return make(context, n * size, True)

    @c_function(word(word, word, word))
    def resize(context: Any, array: Any, size: Any) -> Any:
        moved = make(context, size, False)
        if moved and array:
            memcpy(moved, array, min(size, numbers(array - HEADER)[0]))
            drop(context, array)
        return moved

    @c_function(types.void(word, word, word))
    def drop_array(context: Any, array: Any, size: Any) -> None:
        drop(context, array)

    functions = make_array, make_zeros, resize, drop_array
    _keep(*functions)
    return [function.address for function in functions]
