"""A site's state for one model, on its disk and in memory.

::

    state    a journal (``records.journal``): what each step has changed, appended to one file
    lock     held while a message is answered

Values are the fields of roles (``site.roles``), and the site's records, frozen dataclasses, one a
class: its keys of the run, its masks, and its account (``site.account``). Beside them are the last
reply, and the letters of the answers since the last checkpoint that the server announced
(``site.answer``). A step is answered from a copy of the mapping of values, and committed as a
whole: a step that fails, in memory or on the disk, changes nothing. A rollback returns to the state
of the checkpoint, but not what ``SURVIVES`` it: the account and those letters.

The state stays in memory between messages (`Stores`); what another process has appended meanwhile
is read first. Where all messages of a run come to one process that may lose it (``LiveStores``),
it is written after the first step, before the server saves a checkpoint and at the end, so the disk
always has the state from which a killed run resumes. When a run ends, its arrays are deleted and
the file is replaced.

A party's part of a model is a file beside them, private to its owner, salted, and identified by its
digest.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np

from fedapp.errors import DataError
from fedapp.home import PRIVATE, open_private, private_folder, write_atomically
from fedapp.messages.fields import Array, check_fields
from fedapp.records.codec import Codec, codec_of
from fedapp.records.document import UNREADABLE, Fields, from_document, to_document
from fedapp.records.journal import ABSENT, Journal, State, Stored
from fedapp.site.clock import SECONDS_A_DAY, read_clock
from fedapp.trees.divided import Part
from fedapp.trees.predict import Bits

STATE = "state"
SENT = "sent."
SURVIVES = ("Account", SENT)  # a rollback; beginnings of names
KEEP_DAYS = 7  # after which an interrupted run cannot be resumed: copies of its rows are deleted
PART_FILE = "part.json"
SALT_BYTES = CHECK_BYTES = 16
REPLY = "reply"
BYTES = codec_of(Array)
P = TypeVar("P", bound=Part)
R = TypeVar("R")


class NoStateError(KeyError):
    """State that a handler needs is missing: an earlier message has not come, or was another's.

    Its argument is the name of the field or record.
    """


@dataclass(slots=True)
class Store:
    """The state of one model at one site; changes stay in memory until ``commit``."""

    folder: Path
    journal: Journal | None = None  # None: of nothing, and never committed
    step: int = 0  # last committed step, 0 before the first
    attempt: int = 0  # start of the server that sent this step
    finished: bool = False  # the run has ended: the rows are deleted, and only its result is left
    role: str = ""  # that answered last in its order
    last: str = ""  # the last request's class, as ``roles.name_of`` names it
    may_roll_back: bool = False  # whether there is a checkpoint, or this step makes one
    _values: dict[str, Stored] = field(default_factory=dict)
    _kept: Sequence[str] | None = None  # what a rollback has left as it was

    @classmethod
    def open(cls, folder: Path, lasting: bool = False) -> Store:
        """Open the state as last written."""
        journal = Journal(folder / STATE, lasting)
        journal.refresh()
        return cls.of(journal)

    @classmethod
    def of(cls, journal: Journal) -> Store:
        """The last state of a journal."""
        store = cls._at(journal, journal.now)
        store.may_roll_back = journal.base is not None
        return store

    @classmethod
    def _at(cls, journal: Journal, state: State) -> Store:
        return cls(journal.path.parent, journal, **state.facts, _values=dict(state.values))

    def copy(self) -> Store:
        """The same state; changes of either are not the other's."""
        return replace(self, _values=dict(self._values))

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def read(self, name: str, codec: Codec) -> Any:
        """A value."""
        if (stored := self._values.get(name)) is None:
            raise NoStateError(name)
        return stored.read(codec)

    def write(self, name: str, codec: Codec, value: Any) -> None:
        """Assign a value."""
        self._values[name] = Stored(codec, value)

    def read_bytes(self, name: str) -> bytes:
        """The bytes under a name."""
        data: Array = self.read(name, BYTES)
        return data.tobytes()

    def write_bytes(self, name: str, data: bytes) -> None:
        """Store bytes; the same object under two names is written once."""
        stored = (one for one in self._values.values() if one.codec is BYTES)
        in_memory = (one for one in stored if one.value is not ABSENT)
        same = next((one for one in in_memory if one.value.base is data), None)
        self._values[name] = same or Stored(BYTES, np.frombuffer(data, dtype=np.uint8))

    def sent(self) -> list[int]:
        """Numbers of the questions whose letters are stored."""
        return [int(name.removeprefix(SENT)) for name in self._values if name.startswith(SENT)]

    def drop(self, name: str) -> None:
        """Delete a value, if it is there."""
        self._values.pop(name, None)

    def forget(self) -> None:
        """The run has ended: delete all values with arrays."""
        self._values = {name: value for name, value in self._values.items() if not value.has_arrays}
        self.finished = True

    def find(self, kind: type[R]) -> R | None:
        """The record of a class, or None if there is none."""
        if (stored := self._values.get(kind.__name__)) is None:
            return None
        record: R = stored.read(codec_of(kind))
        return record

    def get(self, kind: type[R]) -> R:
        """The record of a class."""
        if (record := self.find(kind)) is None:
            raise NoStateError(kind.__name__.lower())
        return record

    def put(self, record: object) -> None:
        """Store a record in place of that of its class."""
        self.write(type(record).__name__, codec_of(type(record)), record)

    @property
    def answered(self) -> int:
        """Last step with its changes here; 0 if there is none, or if the run has ended."""
        return 0 if self.finished else self.step

    def commit(
        self, step: int, attempt: int, reply: bytes, mark: int | None = None, defers: bool = False
    ) -> None:
        """Make the changes, together with the reply to the step, the last state.

        ``mark`` is a checkpoint whose state is the one before. With ``defers`` only the first step
        and the last are written at once.
        """
        assert self.journal is not None
        base, now = self.journal.base, self.journal.now
        if base and base.facts.get("step") == (base if self._kept else now).facts.get("step"):
            mark = None  # the server repeats its checkpoint in every message
        self.write_bytes(REPLY, reply)
        if self.finished:
            for number in self.sent():  # not sealed; only a rollback needs them
                self.drop(f"{SENT}{number}")
        self.step, self.attempt = step, attempt
        names = ("step", "attempt", "finished", "role", "last")
        state = State({name: getattr(self, name) for name in names}, self._values)
        if self.finished:
            self.journal.end(state)
        else:
            self.journal.append(state, mark, self._kept, defers and bool(now.facts))
        self._kept = None

    def roll_back(self, checkpoint: int) -> Store | None:
        """The state of this checkpoint; None if it was not stored."""
        journal = self.journal
        if journal is None or journal.base is None or journal.mark != checkpoint:
            return None
        names = [name for name in journal.now.values if name.startswith(SURVIVES)]
        store = self._at(journal, journal.since_base(names))
        store.may_roll_back, store._kept = True, names
        return store


class Stores:
    """States of sites; they stay in memory between two messages, and are on disk after each."""

    defers = False

    def __init__(self) -> None:
        self._journals: dict[Path, Journal] = {}

    def open(self, folder: Path, lasting: bool) -> Store:
        """State after the last step."""
        journal = self._journals.get(folder)
        if journal is None:
            journal = self._journals[folder] = Journal(folder / STATE, lasting)
        if not self.defers or not journal.now.facts:
            journal.refresh()
        return Store.of(journal)

    def locked(self, folder: Path) -> AbstractContextManager[Any]:
        """Make the folder, and lock the state in it."""
        return locked(folder)

    def ended(self, folder: Path) -> None:
        """Called once a run has ended."""
        self._journals.pop(folder, None)

    def write(self) -> None:
        """Write all states, before the server saves a checkpoint."""
        for journal in list(self._journals.values()):
            if journal.now.facts:  # else the first message was refused
                journal.write()


class LiveStores(Stores):
    """States of sites in the one process that receives all messages of a run.

    Most steps are written by ``write``, before the server saves a checkpoint.
    """

    defers = True

    def __init__(self) -> None:
        super().__init__()
        self._locks: dict[Path, Lock] = {}

    def locked(self, folder: Path) -> AbstractContextManager[Any]:
        if not (folder in self._journals and self._journals[folder].now.facts):
            private_folder(folder)
        return self._locks.setdefault(folder, Lock())


def drop_abandoned(site: Path, days: float) -> None:
    """Delete the states of models whose last step is older than `days`, finished or not.

    A part of a model stays: without it the other parties' parts are worthless. `site` is the folder
    of a site, with a folder per model.
    """
    time = read_clock(site.parents[1])
    for path in site.glob(f"*/{STATE}"):
        with suppress(FileNotFoundError):  # another process has deleted it
            is_old = time.file_age(path.stat().st_mtime) > days * SECONDS_A_DAY
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


def write_part(folder: Path, part: Part) -> None:
    """Write a party's part of a model, readable only by its owner."""
    write_atomically(folder / PART_FILE, sealed(to_document(part)), PRIVATE)


def sealed(document: Fields) -> bytes:
    """A part as its file has it.

    The salt keeps the digest from confirming a guessed threshold. A checksum over the whole part
    detects changes to the file.
    """
    salt = secrets.token_bytes(SALT_BYTES)
    salted = {**document, "salt": (salt + _check(salt, document)).hex()}
    return (json.dumps(salted) + "\n").encode()


def read_part(folder: Path, *kinds: type[P]) -> P:
    """Read what ``write_part`` wrote, of one of some kinds.

    Raises DataError if it is absent, outdated, changed, or of another kind.
    """
    path = folder / PART_FILE
    if not path.is_file():
        raise DataError("model must have a part at this party, got none: was it trained here?")
    try:
        document = json.loads(path.read_text())
        salt_and_check = bytes.fromhex(document.pop("salt"))
        is_whole = salt_and_check[SALT_BYTES:] == _check(salt_and_check[:SALT_BYTES], document)
    except UNREADABLE:
        is_whole = False
    if not is_whole:
        rule = "model's part must be as fedapp wrote it, got a file that was changed or is older"
        raise DataError(f"{rule}: restore {PART_FILE}, or train the model again")
    return from_document(document, *kinds)


def _check(salt: bytes, document: Fields) -> bytes:
    text = json.dumps(document, sort_keys=True).encode()
    return hashlib.blake2b(text, key=salt, digest_size=CHECK_BYTES).digest()


def part_digest(folder: Path) -> bytes:
    """Digest of a party's part of a model, 32 bytes."""
    return hashlib.blake2b((folder / PART_FILE).read_bytes(), digest_size=32).digest()


def sent_bits(sender: str, message: str, field: str, packed: Array, n_rows: int) -> Bits:
    """Unpack a bit for each of some rows; raises a ProtocolError if the bytes do not fit."""
    n_bytes = -(-n_rows // 8)
    rule = f"must be {n_bytes} bytes, got {len(packed)}"
    check_fields(sender, message, (field, len(packed) == n_bytes, rule))
    bits = np.unpackbits(packed).astype(bool)
    rule = f"must be 0 past the {n_rows} rows"
    check_fields(sender, message, (field, not bits[n_rows:].any(), rule))
    return bits[:n_rows]
