"""A site's state for one model, on its disk.

::

    state.json        step, facts, records, dtype and shape of every array, small arrays, files
    checkpoint.json   the same, at the last checkpoint that the server announced
    margins-0-17.raw  bytes of an array after step 17; never changed once written
    sent-17.kept      letters of the 17th answer, until the next checkpoint (``site.answer``)

A step writes new array files, then renames one new ``state.json`` into place: a crash leaves
either the state before the step or the state after it. Files that neither JSON names are deleted.
When ``state.json`` says that the run has ended, the checkpoint is deleted. The last reply is stored
as an array. The files are not ``.npy``: numpy parses their headers with ``ast``, and CPython 3.11
fails if two threads do so at once.

Facts are the fields of roles (``site.roles``). Records are frozen dataclasses of the site, one a
class: its keys of the run, its masks, and its account (``site.account``), which alone is not
affected by a rollback.

If all messages of a run come to one process (``LiveStores``), a state stays in memory
between steps. It is written after the first step, before the server saves a checkpoint and at the
end, so the disk always has the state from which a killed run resumes.

A party's part of a model is a file beside them, private to its owner, salted, and identified by its
digest.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import repeat
from mmap import ACCESS_READ, mmap
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_type_hints

import numpy as np

from fedapp.errors import DataError, ProtocolError
from fedapp.home import PRIVATE, open_private, private_folder, sync_folder, write_atomically
from fedapp.messages.fields import Array, origin_of
from fedapp.trees.divided import PART_FORMAT
from fedapp.trees.model import UNREADABLE
from fedapp.trees.predict import Bits, unpack_bits

FORMAT = 6
STATE, CHECKPOINT = "state.json", "checkpoint.json"
RAW, KEPT = ".raw", ".kept"
ACCOUNT = "Account"  # the record that a rollback leaves as it is
SECONDS_A_DAY = 24 * 60 * 60
KEEP_DAYS = 7  # after which an interrupted run cannot be resumed: copies of its rows are deleted
PART_FILE = "part.json"
SALT_BYTES = CHECK_BYTES = 16
REPLY = "reply"
SMALL = 512  # bytes; a smaller array costs less inside the JSON than as a file


UNIONS = (Union, UnionType)
R = TypeVar("R")


class NoStateError(KeyError):
    """State that a handler needs is missing: an earlier message has not come, or was another's.

    Its argument is the name of the array, fact or record.
    """


def encoded(value: Any) -> Any:
    """A value of JSON scalars, bytes, tuples, mappings and dataclasses of these, as JSON has it."""
    if is_dataclass(value):
        return {each.name: encoded(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {name: encoded(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return [encoded(each) for each in value]
    return value.hex() if isinstance(value, bytes) else value


def decoded(hint: Any, value: Any) -> Any:
    """Inverse of ``encoded``, by the value's type."""
    origin, args = origin_of(hint), get_args(hint)
    if origin is Annotated or (origin in UNIONS and value is not None):
        return decoded(args[0], value)
    if origin is tuple:
        kinds = repeat(args[0]) if args[1:] == (...,) else args
        return tuple(map(decoded, kinds, value))
    if origin is Mapping:
        return {name: decoded(args[1], each) for name, each in value.items()}
    if is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        return hint(**{name: decoded(hints[name], each) for name, each in value.items()})
    return bytes.fromhex(value) if hint is bytes else value


class Facts(dict[str, Any]):
    """JSON values by name."""

    def __missing__(self, name: str) -> Any:
        raise NoStateError(name)


# Open array files of this process. A file never changes, so it is opened once. Their number is
# limited, as a deleted file occupies disk space while it is mapped.
_OPEN: dict[str, Array] = {}
MOST_OPEN = 48
MAPPED = 2**16  # bytes; larger files are mapped instead of read


def open_array(path: str, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    """Open an array file read-only; raises DataError if its size does not fit the shape."""
    array = _OPEN.get(path)  # a single lookup: threads of other sites may clear the table
    if array is None:
        if len(_OPEN) >= MOST_OPEN:
            _OPEN.clear()
        with open(path, "rb") as file:
            n_bytes = os.fstat(file.fileno()).st_size
            if n_bytes != math.prod(shape) * dtype.itemsize:
                raise DataError(f"state must be whole, got {n_bytes} bytes of {Path(path).stem}")
            is_small = n_bytes < MAPPED
            data = file.read() if is_small else mmap(file.fileno(), 0, access=ACCESS_READ)
        _OPEN[path] = array = np.frombuffer(data, dtype).reshape(shape)
    return array


def drop_file(path: Path) -> None:
    """Delete an array file."""
    _OPEN.pop(str(path), None)
    path.unlink(missing_ok=True)


@dataclass(slots=True)
class Store:
    """Arrays, facts and records of one model at one site; changes stay in memory until ``commit``.

    Facts are the fields of roles and such (``site.roles``).
    """

    folder: Path
    lasting: bool = False  # whether a committed step survives a power failure
    live: bool = False  # whether committed arrays stay in memory until ``write``
    step: int = 0  # last committed step, 0 before the first
    attempt: int = 0  # start of the server that sent this step
    facts: Facts = field(default_factory=Facts)  # changed by assignment
    finished: bool = False  # the run has ended: the rows are deleted, and only its result is left
    records: dict[str, Any] = field(default_factory=dict)  # by class, as JSON until first used
    # dtype and shape of each committed array
    _forms: dict[str, list[Any]] = field(default_factory=dict)
    _files: dict[str, str] = field(default_factory=dict)  # files of large arrays
    _small: dict[str, str] = field(default_factory=dict)  # bytes of small arrays, in hex
    _changed: dict[str, Array] = field(default_factory=dict)  # not yet committed
    _unwritten: dict[str, Array] = field(default_factory=dict)  # committed, not yet on disk
    _replaced: set[str] = field(default_factory=set)  # files no longer used
    _saved: dict[str, Any] = field(  # the checkpoint
        default_factory=lambda: {"step": -1, "checkpoint": 0, "files": []}
    )
    may_roll_back: bool = False  # whether there is a checkpoint, or this step makes one

    @classmethod
    def open(cls, folder: Path, lasting: bool = False, live: bool = False) -> Store:
        """Open the state as last written."""
        store = cls._read(folder, STATE, lasting, live)
        store.may_roll_back = store._saved["step"] >= 0
        if store.finished:
            store._end()  # a crash may have come between the last state and this
        return store

    @classmethod
    def _read(cls, folder: Path, name: str, lasting: bool, live: bool) -> Store:
        try:
            state = json.loads((folder / name).read_bytes())
        except FileNotFoundError:
            return cls(folder, lasting, live)
        if state.get("format") != FORMAT:
            rule = f"must be of format {FORMAT}, got {state.get('format')!r}"
            raise DataError(f"state {rule}: another version of fedapp has begun this run")
        return cls(
            folder,
            lasting,
            live,
            state["step"],
            state["attempt"],
            Facts(state["facts"]),
            state["finished"],
            state["records"],
            _forms=state["forms"],
            _files=state["files"],
            _small=state["small"],
            _saved=state["kept"],
        )

    def copy(self) -> Store:
        """Copy the state without its uncommitted arrays; facts become what JSON would return."""
        return replace(
            self,
            facts=Facts(json.loads(json.dumps(self.facts))),
            records=dict(self.records),
            _forms=dict(self._forms),
            _files=dict(self._files),
            _small=dict(self._small),
            _changed={},
            _unwritten=dict(self._unwritten),
            _replaced=set(self._replaced),
            _saved=dict(self._saved),
        )

    def __getitem__(self, name: str) -> Array:
        for arrays in (self._changed, self._unwritten):
            if name in arrays:
                return arrays[name]
        if name not in self._forms:
            raise NoStateError(name)
        dtype, shape = _dtype_of(self._forms[name][0]), self._forms[name][1]
        if name in self._small:
            return np.frombuffer(bytes.fromhex(self._small[name]), dtype).reshape(shape)
        return open_array(f"{self.folder}/{self._files[name]}", dtype, shape)

    def __setitem__(self, name: str, array: Array) -> None:
        self._changed[name] = array

    def __contains__(self, name: str) -> bool:
        return name in self._changed or name in self._unwritten or name in self._forms

    def _names(self) -> set[str]:
        return {*self._changed, *self._unwritten, *self._forms}

    def drop(self, *names: str) -> None:
        """Delete arrays, and with the name ``x`` all named ``x.y``."""
        for name in self._names():
            if name.startswith(tuple(f"{each}." for each in names)) or name in names:
                self._changed.pop(name, None)
                self._drop_stored(name)

    def _drop_stored(self, name: str) -> None:
        self._unwritten.pop(name, None)
        self._forms.pop(name, None)
        self._small.pop(name, None)
        if name in self._files:
            self._replaced.add(self._files.pop(name))

    def forget(self) -> None:
        """Delete all arrays and, once that is committed, the checkpoint."""
        self.drop(*self._names())
        self.finished = True

    def find(self, kind: type[R]) -> R | None:
        """The record of a class, or None if there is none."""
        record = self.records.get(kind.__name__)
        if isinstance(record, dict):
            record = self.records[kind.__name__] = decoded(kind, record)
        return record

    def get(self, kind: type[R]) -> R:
        """The record of a class."""
        if (record := self.find(kind)) is None:
            raise NoStateError(kind.__name__.lower())
        return record

    def put(self, record: object) -> None:
        """Store a record in place of that of its class."""
        self.records[type(record).__name__] = record

    @property
    def is_written(self) -> bool:
        """Whether all committed changes are on disk."""
        return not self._unwritten

    @property
    def answered(self) -> int:
        """Last step with its changes here; 0 if there is none, or if the run has ended."""
        return 0 if self.finished else self.step

    def commit(self, step: int, attempt: int, reply: bytes) -> None:
        """Apply the changes, together with the reply to the step."""
        self[REPLY] = np.frombuffer(reply, dtype=np.uint8)
        is_first = not self.step
        for name, array in self._changed.items():
            self._drop_stored(name)
            committed = np.asarray(array, order="C").view()
            committed.flags.writeable = False
            self._unwritten[name] = committed
        self.step, self.attempt = step, attempt
        self._changed.clear()
        if is_first or self.finished or not self.live:
            self.write()

    def write(self) -> None:
        """Write all committed changes to disk."""
        for name, array in self._unwritten.items():
            assert not array.dtype.hasobject
            form = array.dtype.descr if array.dtype.names else array.dtype.str
            assert _dtype_of(form) == array.dtype
            self._forms[name] = [form, array.shape]
            if array.nbytes <= SMALL:
                self._small[name] = array.tobytes().hex()
            else:
                self._files[name] = f"{name}-{self.attempt}-{self.step}{RAW}"
                path = self.folder / self._files[name]
                write_atomically(path, array.data, lasting=self.lasting)
        self._unwritten.clear()
        self._write(STATE)
        if self.finished:
            self._end()
            self._sweep(self._files.values())
        for file in self._replaced - set(self._saved["files"]):
            drop_file(self.folder / file)
        self._replaced.clear()

    def last_reply(self) -> bytes:
        """Reply to the last step."""
        return self[REPLY].tobytes()

    def keep(self, saved: Store, checkpoint: int) -> None:
        """Write `saved`, a copy of the state before a step, as that of a checkpoint."""
        if saved._saved["step"] == saved.step:  # the server repeats its checkpoint in every message
            return
        written = saved._unwritten.copy()
        if written:
            saved.write()
        files = list(saved._files.values())
        saved._saved = {"step": saved.step, "checkpoint": checkpoint, "files": files}
        saved._write(CHECKPOINT)
        saved._sweep(files)
        self._saved = saved._saved
        for name, array in written.items():
            if self._unwritten.get(name) is array:  # not to be written once more
                del self._unwritten[name]
                for attribute in ("_forms", "_files", "_small"):
                    if name in (values := getattr(saved, attribute)):
                        getattr(self, attribute)[name] = values[name]

    def roll_back(self, checkpoint: int) -> Store | None:
        """The state of this checkpoint; None if it was not stored."""
        if not (self.folder / CHECKPOINT).exists():
            return None
        state = self._read(self.folder, CHECKPOINT, self.lasting, self.live)
        if state._saved["checkpoint"] != checkpoint:
            return None
        if ACCOUNT in self.records:
            state.records[ACCOUNT] = self.records[ACCOUNT]
        return state

    def _write(self, name: str) -> None:
        state = {
            "format": FORMAT,
            "step": self.step,
            "attempt": self.attempt,
            "facts": self.facts,
            "finished": self.finished,
            "records": encoded(self.records),
            "forms": self._forms,
            "files": self._files,
            "small": self._small,
            "kept": self._saved,
        }
        write_atomically(self.folder / name, json.dumps(state).encode(), lasting=self.lasting)
        if self.lasting:
            sync_folder(self.folder)

    def _end(self) -> None:
        """Delete the checkpoint, and letters that only a rollback to it would need."""
        for path in (self.folder / CHECKPOINT, *self.folder.glob(f"*{KEPT}")):
            path.unlink(missing_ok=True)

    def _sweep(self, in_use: Collection[str]) -> None:
        """Delete array files that no state names, such as those of a crashed step."""
        for path in self.folder.glob(f"*{RAW}*"):
            if path.name not in in_use:
                drop_file(path)


def _dtype_of(described: str | list[Any]) -> np.dtype[Any]:
    """A dtype from its JSON form."""
    if isinstance(described, str):
        return np.dtype(described)
    return np.dtype([(name, code) for name, code in described])


class Stores:
    """States of sites, on disk between two messages."""

    def open(self, folder: Path, lasting: bool) -> Store:
        """State after the last step."""
        return Store.open(folder, lasting)

    def committed(self, store: Store) -> None:
        """Called with a state after each step."""

    def write(self) -> None:
        """Write all states, before the server saves a checkpoint."""


class LiveStores(Stores):
    """States of sites in memory, in the one process that receives all messages of a run."""

    def __init__(self) -> None:
        self._states: dict[Path, Store] = {}

    def open(self, folder: Path, lasting: bool) -> Store:
        """A copy of the state, so that a failed step changes nothing."""
        state = self._states.get(folder)
        return state.copy() if state else Store.open(folder, lasting, live=True)

    def committed(self, store: Store) -> None:
        """Keep the state in memory, unless its run has ended."""
        self._states[store.folder] = store
        if store.finished:
            del self._states[store.folder]

    def write(self) -> None:
        """Write the states that have changed, also of sites not asked for some time."""
        for folder, store in list(self._states.items()):
            if store.is_written:
                continue
            written = store.copy()
            written.write()
            if self._states.get(folder) is store:
                self._states[folder] = written


def drop_abandoned(site: Path, days: float) -> None:
    """Delete the states of models whose last step is older than `days`, finished or not.

    A part of a model stays: without it the other parties' parts are worthless. `site` is the folder
    of a site, with a folder per model.
    """
    for path in site.glob("*/" + STATE):
        with suppress(FileNotFoundError):  # another process has deleted it
            is_old = path.stat().st_mtime < time.time() - days * SECONDS_A_DAY
            if is_old and not (path.parent / PART_FILE).exists():
                shutil.rmtree(path.parent)


def has_begun(folder: Path) -> bool:
    """Whether a model has a state here."""
    return (folder / STATE).exists()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a site's state, so that a repeated message waits for the first one."""
    path, is_locked = folder / "lock", False
    while not is_locked:
        private_folder(folder)
        with open_private(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Another message may have deleted the folder meanwhile, as it was refused.
            is_locked = path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
            if is_locked:
                yield


def write_part(folder: Path, document: Mapping[str, Any]) -> None:
    """Write a party's part of a model, readable only by its owner.

    The salt keeps the digest from confirming a guessed threshold. A checksum over the whole part
    detects changes to the file.
    """
    salt = secrets.token_bytes(SALT_BYTES)
    document = {**document, "salt": (salt + _check(salt, document)).hex()}
    write_atomically(folder / PART_FILE, (json.dumps(document) + "\n").encode(), PRIVATE)


def read_part(folder: Path) -> dict[str, Any]:
    """Read what ``write_part`` wrote; raises DataError if it is absent, outdated or changed."""
    path = folder / PART_FILE
    if not path.is_file():
        raise DataError("model must have a part at this party, got none: was it trained here?")
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        salt_and_check = bytes.fromhex(document["salt"])
        is_whole = salt_and_check[SALT_BYTES:] == _check(salt_and_check[:SALT_BYTES], document)
    except UNREADABLE:
        is_whole = False
    if not is_whole:
        rule = "model's part must be as fedapp wrote it, got a file that was changed or is older"
        raise DataError(f"{rule}: restore {PART_FILE}, or train the model again")
    if document.get("format") != PART_FORMAT:
        way = "another version of fedapp trained it; train the model again"
        got = document.get("format")
        raise DataError(f"model must be of format {PART_FORMAT}, got {got!r}: {way}")
    return document


def _check(salt: bytes, document: Mapping[str, Any]) -> bytes:
    """Checksum of a part without its salt."""
    content = {name: value for name, value in document.items() if name != "salt"}
    text = json.dumps(content, sort_keys=True).encode()
    return hashlib.blake2b(text, key=salt, digest_size=CHECK_BYTES).digest()


def part_digest(folder: Path) -> bytes:
    """Digest of a party's part of a model, 32 bytes."""
    return hashlib.blake2b((folder / PART_FILE).read_bytes(), digest_size=32).digest()


def sent_bits(
    sender: str, message: str, field: str, packed: Array, sizes: Sequence[int]
) -> list[Bits]:
    """Unpack bits of several lists of rows, each padded to whole bytes by ``pack_bits``.

    `sender`, `message` and `field` are for the ProtocolError if the bytes do not fit `sizes`.
    """
    try:
        return unpack_bits(packed, sizes)
    except ValueError as error:
        rule = str(error).removeprefix("bits ")
        raise ProtocolError(sender, message, field, rule) from error
