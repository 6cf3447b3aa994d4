"""Named values in one file, to which each step appends what it has changed.

::

    entry   magic, sizes and checksum, header, arrays; a multiple of 8 bytes
    header  JSON: {"facts": ..., "values": {name: [tree, numbers]}, "dropped": [name], "mark": ...,
            "kept": [name] | null, "arrays": [[number, dtype, shape], ...]}
    arrays  raw C-order bytes, each padded to 8 bytes: numba compiles again for unaligned arrays;
            a large one in Fortran order as transposed, and with a fourth entry, true

A value is a tree (``records.codec``) and the numbers of its arrays. An array is written once, in
the entry whose value first has it, and named by its number from then on: what refers to an array
never changes it in place. So a step costs the bytes of what it has assigned. A large array is
mapped from the file once it is there, so that the system may use its memory for others.

``mark`` in an entry keeps the state before it as that of a checkpoint; an entry with ``kept``
begins from that state again, except for the values named there. A file of which most is no longer
used is replaced by one with the state of the checkpoint, and what differs now; ``end`` replaces it
by one with the last state.

A process that dies while it appends leaves half an entry at the end, whose checksum is wrong: the
state is then that before the step. The next entry is written over it. With ``lasting``, an entry
is on the disk when ``append`` returns (``fsync``), and so is a new file's name; otherwise it
survives the process but not a loss of power.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.errors import DataError
from fedapp.home import PRIVATE, replacing, sync_folder
from fedapp.records.codec import Array, Codec, Tree

MAGIC = b"fedapp B"  # 8 bytes; the last is the version of the states that parties have
PREFIX = struct.Struct("<8sIIQ")  # magic, checksum, bytes of the header, bytes of the entry
ALIGNMENT = 8
JOINED = 2**16  # bytes; smaller parts are written together
# A file is replaced once it has this multiple of what it had when it was last replaced, and more:
TIMES, SPARE = 2, 2**21  # bytes
MANY = 32  # arrays that are no longer used
LARGE = 2**24  # bytes of an array that is mapped from the file, in the order that it has
ABSENT = object()


@dataclass(slots=True, eq=False)
class Stored:
    """A value as it is in a journal, or as it will be; and the object that it was or became."""

    codec: Codec | None = None  # of a value that was assigned
    value: Any = ABSENT
    tree: Tree = ABSENT
    arrays: Sequence[Array] = ()
    numbers: Sequence[int] = ()  # of the arrays; none before they are written

    def read(self, codec: Codec) -> Any:
        """The value; decoded once."""
        if self.value is ABSENT:
            self.value = codec.decode(self.tree, self.arrays)
        return self.value

    def encode(self) -> None:
        """Take the value apart, unless it has been."""
        if self.tree is ABSENT:
            assert self.codec is not None
            arrays = list[Array]()
            self.tree = self.codec.encode(self.value, arrays)
            self.arrays = arrays

    @property
    def has_arrays(self) -> bool:
        """Whether any array is part of the value."""
        self.encode()
        return bool(self.arrays)


@dataclass(slots=True, eq=False)
class State:
    """Values by name, and facts about them all; replaced as a whole."""

    facts: Mapping[str, Any] = field(default_factory=dict)  # of JSON values
    values: Mapping[str, Stored] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Journal:
    """A file of named values, and its content in memory.

    ``now`` is the last state, ``base`` that of the checkpoint ``mark``.
    """

    path: Path
    lasting: bool = False  # whether an entry survives a loss of power
    now: State = field(default_factory=State)
    base: State | None = None
    mark: int = 0
    _written: State = field(default_factory=State)  # the last one on disk
    _arrays: dict[int, Array] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)  # of arrays by id
    _filed: set[int] = field(default_factory=set)  # arrays that the file has
    _most: int = 0  # arrays, before those that no state has are dropped
    _next: int = 0
    _inode: int = 0
    _size: int = 0
    _least: int = 0  # size of the file when it was last replaced

    def refresh(self) -> None:
        """Read what another process has written."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            if self._inode:
                self._forget()
            return
        if (status.st_ino, status.st_size) == (self._inode, self._size):
            return
        if status.st_ino != self._inode or status.st_size < self._size:
            self._forget()
        self._read()

    def _forget(self) -> None:
        self.now, self.base, self.mark, self._written = State(), None, 0, State()
        self._arrays, self._numbers, self._filed = {}, {}, set()
        self._inode = self._size = self._least = 0

    def _read(self) -> None:
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            if not status.st_size:
                return
            data = mmap(file.fileno(), 0, access=ACCESS_READ)
        self._inode = status.st_ino
        while (end := self._read_entry(data, self._size)) > self._size:
            self._size = end
        self._written = self.now
        self._drop_unused()

    def _drop_unused(self) -> None:
        """Forget arrays that no state has, once they are many."""
        if len(self._arrays) <= self._most:
            return
        states = [state for state in (self.base, self.now) if state is not None]
        used = {n for state in states for value in state.values.values() for n in value.numbers}
        self._arrays = {number: self._arrays[number] for number in used}
        self._numbers = {id(array): number for number, array in self._arrays.items()}
        self._filed &= used
        self._most = 2 * len(used) + MANY

    def _read_entry(self, data: mmap, start: int) -> int:
        """Apply the entry that begins at a place; returns where it ends, ``start`` if not whole."""
        if start + PREFIX.size > len(data):
            return start
        magic, checksum, header_size, size = PREFIX.unpack_from(data, start)
        end = start + int(size)
        if magic != MAGIC and not start:
            rule = f"{self.path.name} must be of {MAGIC.decode()}"
            raise DataError(f"{rule}: another version began this run")
        body = start + PREFIX.size
        if magic != MAGIC or end > len(data):
            return start
        if zlib.crc32(memoryview(data)[body:end], header_size) != checksum:
            return start
        header = json.loads(data[body : body + header_size])
        for number, array in _arrays(data, header, body + header_size):
            self._note(number, array)
            self._filed.add(number)
        if header["mark"] is not None:
            self.base, self.mark = self.now, header["mark"]
        before = self.now if header["kept"] is None else self.since_base(header["kept"])
        dropped = header["dropped"]
        values = {name: value for name, value in before.values.items() if name not in dropped}
        for name, (tree, numbers) in header["values"].items():
            arrays = [self._arrays[number] for number in numbers]
            values[name] = Stored(tree=tree, arrays=arrays, numbers=numbers)
        self.now = State(header["facts"], values)
        return end

    def _map(self, start: int) -> None:
        """Map large arrays from the entries that have just been written, from a place on."""
        large = set[int]()
        with open(self.path, "rb") as file:
            data = mmap(file.fileno(), 0, access=ACCESS_READ)
        while start < self._size:
            _, _, header_size, size = PREFIX.unpack_from(data, start)
            body = start + PREFIX.size
            header = json.loads(data[body : body + header_size])
            for number, array in _arrays(data, header, body + header_size):
                if array.nbytes > LARGE and number in self._arrays:
                    self._numbers.pop(id(self._arrays[number]), None)
                    self._note(number, array)
                    large.add(number)
            start += size
        for state in (self.now, self.base or State()):
            for stored in state.values.values():
                if large.intersection(stored.numbers):
                    stored.arrays = [self._arrays[number] for number in stored.numbers]
                    stored.value = ABSENT

    def since_base(self, kept: Iterable[str]) -> State:
        """The state of the checkpoint, with some values as they are now."""
        assert self.base is not None
        values = dict(self.base.values)
        for name in kept:
            values.pop(name, None)
            if name in self.now.values:
                values[name] = self.now.values[name]
        return State(self.base.facts, values)

    def _note(self, number: int, array: Array) -> None:
        self._arrays[number], self._numbers[id(array)] = array, number
        self._next = max(self._next, number + 1)

    def append(
        self,
        state: State,
        mark: int | None = None,
        kept: Sequence[str] | None = None,
        defers: bool = False,
    ) -> None:
        """Make a state the last one; with ``defers`` it is written later, by ``write``.

        Parameters
        ----------
        mark : the state before is that of this checkpoint.
        kept : the state follows that of the checkpoint, except for these values.

        Raises
        ------
        OSError : it could not be written; the state is the one before.
        """
        if mark is not None or kept is not None:
            self.write()
        before = self.now, self.base, self.mark
        if mark is not None:
            self.base, self.mark = self.now, mark
        follows = self.now if kept is None else self.since_base(kept)
        self.now = state
        if defers and mark is None and kept is None:
            return
        try:
            self._write(follows, mark, kept)
        except BaseException:
            self.now, self.base, self.mark = before
            raise

    def end(self, state: State) -> None:
        """Make a state the last one, and all that the file has."""
        before, self.now = self.now, state
        try:
            self.compact(has_ended=True)
        except BaseException:
            self.now = before
            raise

    def write(self) -> None:
        """Write the last state, unless it is on disk."""
        if self._written is not self.now:
            self._write(self._written)

    def _write(
        self, before: State, mark: int | None = None, kept: Sequence[str] | None = None
    ) -> None:
        """Append what differs from a state that the file has."""
        parts, filed = self._entry(before, self.now, self._filed, mark, kept)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, PRIVATE)
        try:
            try:
                os.ftruncate(descriptor, self._size)  # half an entry of a process that died
                size = _write_all(descriptor, parts, self._size, self.lasting)
            except BaseException:
                os.ftruncate(descriptor, self._size)
                raise
            is_new = not self._inode
            self._inode = os.fstat(descriptor).st_ino
        finally:
            os.close(descriptor)
        if is_new and self.lasting:
            sync_folder(self.path.parent)
        self._filed |= filed
        start, self._size = self._size, self._size + size
        self._least = self._least or size  # all of a new file is used
        self._written = self.now
        if size > LARGE:
            self._map(start)
        self._drop_unused()
        if self._size > TIMES * self._least + SPARE:
            with suppress(OSError):  # tried again with the next entry
                self.compact()

    def _entry(
        self,
        before: State,
        after: State,
        known: Set[int],
        mark: int | None = None,
        kept: Sequence[str] | None = None,
    ) -> tuple[list[bytes | memoryview], set[int]]:
        """An entry in parts, and the numbers of the arrays in it: those that are not known."""
        values, new = dict[str, Any](), dict[int, Array]()
        for name, stored in after.values.items():
            if before.values.get(name) is not stored:
                self._number(stored)
                values[name] = [stored.tree, stored.numbers]
                pairs = zip(stored.numbers, stored.arrays, strict=True)
                new |= {number: array for number, array in pairs if number not in known}
        laid = [  # in C order
            (number, array, []) if array.flags.c_contiguous else (number, array.T, [True])
            for number, array in new.items()
        ]
        header = {
            "facts": after.facts,
            "values": values,
            "dropped": [name for name in before.values if name not in after.values],
            "mark": mark,
            "kept": kept,
            "arrays": [
                [number, of.dtype.descr if of.dtype.names else of.dtype.str, of.shape, *turned]
                for number, of, turned in laid
            ],
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        parts: list[bytes | memoryview] = [text, bytes(-(PREFIX.size + len(text)) % ALIGNMENT)]
        for _, array, _ in laid:
            raw = array.reshape(-1).view(np.uint8).data if array.size else b""
            parts += [raw, bytes(-array.nbytes % ALIGNMENT)]
        size, checksum = PREFIX.size, len(text)  # begun with what it does not cover
        for part in parts:
            size = size + len(part)
            checksum = zlib.crc32(part, checksum)
        return [PREFIX.pack(MAGIC, checksum, len(text), size), *parts], set(new)

    def _number(self, stored: Stored) -> None:
        """Give a value's arrays numbers."""
        stored.encode()
        if len(stored.numbers) == len(stored.arrays):
            return
        numbers, arrays = list[int](), list[Array]()
        for array in stored.arrays:
            if (number := self._numbers.get(id(array))) is None:
                assert not array.dtype.hasobject
                flags = array.flags
                stays = flags.c_contiguous or (flags.f_contiguous and array.nbytes > LARGE)
                whole = array if stays else np.ascontiguousarray(array)
                if whole is not array:  # what is read next shall be in C order
                    stored.value = ABSENT
                whole.flags.writeable = False
                number, array = self._next, whole
                self._note(number, array)
            numbers.append(number)
            arrays.append(array)
        stored.numbers, stored.arrays = numbers, arrays

    def compact(self, has_ended: bool = False) -> None:
        """Replace the file by one with only what is used; ``has_ended``: without the checkpoint."""
        keeps_base = self.base is not None and not has_ended
        first, mark = (self.base or self.now, self.mark) if keeps_base else (self.now, None)
        parts, filed = self._entry(State(), first, frozenset())
        if mark is not None:
            more, added = self._entry(first, self.now, filed, mark)
            parts, filed = [*parts, *more], filed | added
        with replacing(self.path) as file:
            size = _write_all(file.fileno(), parts, 0, self.lasting)
            inode = os.fstat(file.fileno()).st_ino
        self._filed, self._inode, self._size, self._least = filed, inode, size, size
        self._written = self.now
        self.base = self.base if keeps_base else None
        if size > LARGE:
            self._map(0)
        self._most = 0
        self._drop_unused()
        if self.lasting:
            sync_folder(self.path.parent)


def _arrays(data: mmap, header: dict[str, Any], offset: int) -> Iterator[tuple[int, Array]]:
    """Numbers and arrays of an entry, which follow its header."""
    for number, form, shape, *transposed in header["arrays"]:
        dtype = np.dtype(form if isinstance(form, str) else [(*field,) for field in form])
        offset = _aligned(offset)
        array = np.frombuffer(data, dtype, math.prod(shape), offset).reshape(shape)
        yield number, array.T if transposed else array
        offset += array.nbytes


def _write_all(
    descriptor: int, parts: Iterable[bytes | memoryview], offset: int, lasting: bool
) -> int:
    """Write bytes at a place of a file; returns their number."""
    start = offset
    for part in _joined(parts):
        data = memoryview(part)
        while len(data):
            n_written = os.pwrite(descriptor, data, offset)
            data, offset = data[n_written:], offset + n_written
    if lasting:
        os.fsync(descriptor)
    return offset - start


def _joined(parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes, with small parts in one."""
    small = list[bytes | memoryview]()
    for part in parts:
        if len(part) < JOINED:
            small.append(part)
        else:
            yield b"".join(small)
            yield part
            small.clear()
    yield b"".join(small)


def _aligned(offset: int) -> int:
    return offset + -offset % ALIGNMENT
