"""Arrays that are larger than memory: values of more than ``LARGEST`` bytes are mapped from a file.

The file is in a private folder of ``$FEDAPP_HOME`` and has no name, so that nothing remains of it
once the array, or the process, has gone. The system writes what it needs memory for, and reads it
again; all else is as with arrays in memory.

Once a process has mapped an array, its numbers of rows are too many for memory as well. Within
``mapping`` every array of more than ``LARGEST_ARRAY`` bytes is then mapped, whatever makes it.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import chain, pairwise
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from fedapp.data import allocator
from fedapp.errors import ConfigError
from fedapp.home import home, private_folder

FOLDER = "scratch"  # of ``$FEDAPP_HOME``
LARGEST = 2**30  # bytes of a table's values in memory
LARGEST_ARRAY = 2**27  # bytes of another array
BATCH_BYTES = 2**26


def empty(shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array in C order, of any values; raises ConfigError if the disk has no room for it."""
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    return np.empty(shape, dtype) if n_bytes <= LARGEST_ARRAY else on_disk(shape, dtype)


def on_disk(shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array in C order, of any values, mapped from a file however small it is."""
    n_values = math.prod(shape)
    mapped = _mapped(max(1, n_values * np.dtype(dtype).itemsize))
    return np.frombuffer(mapped, dtype, n_values).reshape(shape)


@contextmanager
def mapping() -> Iterator[None]:
    """Map every large array that this thread makes, once the process has mapped one."""
    token = _replaced.set([])
    try:
        if _has_mapped:
            _map_all()
        yield
    except MemoryError:
        if _has_mapped:
            raise _without_room("room for arrays") from None
        raise
    finally:
        for before in _replaced.get() or ():
            allocator.use(before)
        _replaced.reset(token)


_has_mapped = False
# The allocator before ``mapping``, once it is another; None outside.
_replaced = ContextVar[list[Any] | None]("replaced", default=None)


def _map_all() -> None:
    global _has_mapped
    _has_mapped = True
    if (replaced := _replaced.get()) == []:
        replaced.append(allocator.current())
        allocator.use(allocator.mapping(str(home() / FOLDER), LARGEST_ARRAY))


def _mapped(n_bytes: int) -> mmap.mmap:
    with _file() as file:
        _extend(file, 0, n_bytes)
        return mmap.mmap(file.fileno(), n_bytes)


def _file() -> IO[bytes]:
    folder = home() / FOLDER
    private_folder(folder)
    _map_all()
    return tempfile.TemporaryFile(dir=folder)


def _extend(file: IO[bytes], start: int, n_bytes: int) -> None:
    """Reserve room; else the process would die at the first page without."""
    with suppress(OSError):  # beyond a quota
        if n_bytes <= shutil.disk_usage(home() / FOLDER).free:
            return os.posix_fallocate(file.fileno(), start, n_bytes)
    raise _without_room(f"{n_bytes:,} bytes for values")


def _without_room(what: str) -> ConfigError:
    free = shutil.disk_usage(home() / FOLDER).free
    rule = f"FEDAPP_HOME must be on a disk with {what} of a table that is larger than memory"
    return ConfigError(f"{rule}, got room for {free:,} at most in '{home() / FOLDER}'")


def stored(tables: Iterable[Any]) -> list[Any]:
    """Some pyarrow.Tables as others, whose columns are in one file on disk."""
    ends = [0]
    with _file() as file:
        for table in tables:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            content = sink.getvalue()
            _extend(file, ends[-1], len(content))
            file.write(content)
            ends.append(file.tell())
        file.flush()
        mapped = pa.py_buffer(mmap.mmap(file.fileno(), ends[-1]))
    return [pa.ipc.open_stream(mapped[start:end]).read_all() for start, end in pairwise(ends)]


def joined(
    parts: Iterable[npt.NDArray[Any]], n_rows: int, no_rows: npt.NDArray[Any] | None = None
) -> npt.NDArray[Any]:
    """Parts with ``n_rows`` together as one array, each copied before the next one is made.

    Where there may be none, ``no_rows`` has the shape and the type.
    """
    every = iter(parts)
    first = next(every) if no_rows is None else next(every, no_rows)
    out = np.empty((n_rows, *first.shape[1:]), first.dtype)
    start = 0
    for part in chain([first], every):
        out[start : start + len(part)] = part
        start += len(part)
    return out


def is_large(n_rows: int, n_columns: int) -> bool:
    """Whether the values of a table are more than memory shall hold."""
    return 4 * n_rows * n_columns > LARGEST


def empty_table(n_rows: int, n_columns: int) -> npt.NDArray[np.float32]:
    """Values of a table, shape (n_rows, n_columns); large ones are in the order of columns."""
    if is_large(n_rows, n_columns):
        return on_disk((n_columns, n_rows), np.float32).T
    return np.empty((n_rows, n_columns), np.float32)


def taken(values: npt.NDArray[Any], rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Some rows of a table's values, in this order."""
    if values.nbytes <= LARGEST:
        return values[rows]
    # Parts of a large table would fill the memory together, also if each is small.
    out = on_disk((values.shape[1], len(rows)), np.float32).T
    for column, of_rows in zip(out.T, values.T, strict=True):
        column[:] = of_rows[rows]
    return out


def side_by_side(columns: Iterable[npt.NDArray[Any]], shape: tuple[int, int]) -> npt.NDArray[Any]:
    """Values of a table of this shape, from its columns."""
    out = empty_table(*shape)
    for column, values in zip(out.T, columns, strict=True):
        column[:] = values
    return out


def copied(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A table's values, which may be changed."""
    shape = len(values), values.shape[1]
    return values.copy() if values.nbytes <= LARGEST else side_by_side(values.T, shape)


def batches(n_rows: int, row_bytes: int) -> Iterator[slice]:
    """Slices of all rows, of ``BATCH_BYTES`` or one row each."""
    size = max(1, BATCH_BYTES // max(1, row_bytes))
    return (slice(start, min(start + size, n_rows)) for start in range(0, n_rows, size))
