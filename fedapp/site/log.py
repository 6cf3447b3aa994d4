"""A site's log: what was asked of it, and what it answered, in lines that are only appended.

::

    log.jsonl   {"number": 2, "before": "5f1e...", "time": 1796000000.123, "event": ..., ...}
    log.head    number and digest of the last line, and bytes of the log
    log-000000050000.jsonl  lines up to this number: a file of ``CLOSED_BYTES`` gets such a name

in the site's folder, which its runs and its ``fedapp serve --site`` share: whoever writes a line
holds the lock of ``log.head``. The line is on the disk before ``append`` returns, and an answer
leaves after that. Half a line at the end, after what the head knows, is of a process that died:
nothing was answered, and the next line replaces it.

``before`` is the digest of the line before. An altered, removed or moved line breaks that chain,
and the head shows whether lines are cut off. Whatever happens to the file, the next line continues
from the head, so that a gap stays. Lines of some events are signed by the site's key; such a line
``dropped`` bridges the lines that ``log-days`` has removed. Whoever has the site's key can rewrite
the whole log; only a signed line that somebody else keeps shows that.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedapp.errors import DataError
from fedapp.home import PRIVATE, private_folder, sync_folder, write_atomically
from fedapp.site.account import account_of
from fedapp.site.clock import SECONDS_A_DAY, STEP, read_clock
from fedapp.site.store import STATE, Store
from fedapp.site.trust import identity, signing_key

log = logging.getLogger("fedapp.site")

LOG, HEAD, CLOSED = "log.jsonl", "log.head", "log-{}.jsonl"
CLOSED_BYTES = 64_000_000  # of a file that gets no more lines: old lines go without a large copy
DIGEST_BYTES = 16
FIRST = "0" * 2 * DIGEST_BYTES  # digest before the first line
HEAD_BYTES = 256
TRIED_BYTES = 8192  # of an attempt, more than a block that the file may have left
LABEL = b"fedapp log v1"
SIGNED = {"ended", "signed", "rekeyed", "dropped"}  # events
KINDS = {"number": int, "before": str, "time": int | float, "event": str}


class LogError(OSError):
    """A line is not on the disk, so nothing may leave."""


def append(folder: Path, event: str, **fields: Any) -> bytes:
    """Write a line into the log in a site's folder, and return it.

    Raises LogError if it is not on the disk, as where that is full.
    """
    with _locked(folder) as writer:
        return writer.write(event, fields)


def check_takes(folder: Path) -> None:
    """Raise LogError if the log in a site's folder takes no line now."""
    with _locked(folder) as writer:
        writer.write("", {}, keeps=False)


def parts(path: Path) -> list[Path]:
    """The files of a log in order: those that were closed, by their last line's number, and it."""
    closed = path.parent.glob(CLOSED.format("*")) if path.name == LOG else ()
    return [*sorted(closed), path]


def drop_old(folder: Path, days: int) -> None:
    """Remove lines of more than some days ago, at most once a day; 0: none."""
    path, limit = folder / LOG, days * SECONDS_A_DAY
    if not days or not path.exists():
        return
    time = read_clock(folder.parents[1])
    with _locked(folder) as writer:
        with parts(path)[0].open("rb") as file:
            if time.age(_fields(file.readline()).get("time", 0.0)) < limit + SECONDS_A_DAY:
                return
        for part in parts(path):
            if not writer.drop(part, lambda line: time.age(line["time"]) < limit, days):
                break


@contextmanager
def _locked(folder: Path) -> Iterator[_Writer]:
    """Be the only writer of a log."""
    try:
        private_folder(folder)
        file = os.open(folder / HEAD, os.O_RDWR | os.O_CREAT, PRIVATE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield _Writer(folder, file, *_head(os.pread(file, HEAD_BYTES, 0)))
        finally:
            os.close(file)
    except OSError as error:
        rule = f"log of {folder.name} must take a line before an answer leaves"
        text = f"{rule}, got: {error.strerror or error}"
        raise LogError(error.errno or errno.EIO, text) from error


def _head(text: bytes) -> tuple[int, str, int]:
    try:
        number, digest, end = json.loads(text)
        return int(number), str(digest), int(end)
    except (ValueError, TypeError):
        return 0, FIRST, 0  # a new file, or one that is broken: all lines are read


@dataclass(slots=True)
class _Writer:
    folder: Path
    file: int  # of the head
    number: int  # of the last line
    digest: str
    end: int  # bytes of the log

    def write(self, event: str, fields: Mapping[str, Any], keeps: bool = True) -> bytes:
        """Append a line, and move the head; or only try whether the file takes one."""
        file = os.open(self.folder / LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE)
        try:
            is_new = self.catch_up(file) == 0
            time = read_clock(self.folder.parents[1])
            first = {"number": self.number + 1, "before": self.digest}
            first |= {"time": round(time.stamp, 3), "event": event}
            if abs(time.wall - time.stamp) > STEP:
                first["clock"] = round(time.wall, 3)
            line = _line({**first, **fields}, key_of(self.folder) if event in SIGNED else None)
            line = line if keeps else b" " * TRIED_BYTES  # half a line, if this process dies now
            try:
                if os.write(file, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if keeps:
                    os.fdatasync(file)
            except OSError:
                os.ftruncate(file, self.end)
                raise
            if not keeps:
                os.ftruncate(file, self.end)
                return line
        finally:
            os.close(file)
        if is_new:
            sync_folder(self.folder)
        self._add(line)
        self.move(self.end)
        if self.end >= CLOSED_BYTES and event != "dropped":
            path = self.folder / LOG
            path.rename(path.with_name(CLOSED.format(f"{self.number:012}")))
            path.touch(PRIVATE)
            sync_folder(self.folder)
            self.move(0)
        return line

    def drop(self, part: Path, stays: Callable[[Mapping[str, Any]], bool], days: int) -> bool:
        """Remove the old lines of a file of the log; whether that is the whole file."""
        is_open = part.name == LOG
        with part.open("rb+") as file:
            if is_open:
                self.catch_up(file.fileno())
                file.seek(0)
            n_bytes, last = 0, {"last": self.number, "digest": self.digest}
            for line in file:
                if (fields := _fields(line)) and stays(fields):
                    last = {"last": fields["number"] - 1, "digest": fields["before"]}
                    break
                n_bytes += len(line)
                if fields and not is_open:
                    last = {"last": fields["number"], "digest": line_digest(line)}
            if not n_bytes:
                return False
            self.write("dropped", {"days": days, **last})
            if not is_open and n_bytes == os.fstat(file.fileno()).st_size:
                part.unlink()
                sync_folder(self.folder)
                return True
            rest = memoryview(mmap(file.fileno(), 0, access=ACCESS_READ))[n_bytes:]
        write_atomically(part, rest, PRIVATE, lasting=True)
        sync_folder(self.folder)
        if is_open:
            self.move(end=len(rest))
        return False

    def move(self, end: int) -> None:
        """Write the head."""
        self.end = end
        text = json.dumps((self.number, self.digest, end)).ljust(HEAD_BYTES)
        os.pwrite(self.file, text.encode(), 0)

    def catch_up(self, file: int) -> int:
        """Move to the end of the file, if that is elsewhere; returns the file's size.

        A process that died has left half a line, which goes, or a line that the head lacks. Or else
        somebody has changed the file: the line that follows shows it.
        """
        size = os.fstat(file).st_size
        *closed, _ = parts(self.folder / LOG)
        if closed and not (self.number or size):  # the head is lost
            *_, line = closed[-1].read_bytes().splitlines(keepends=True)
            self.number, self.digest = _fields(line).get("number", 0), line_digest(line)
        elif closed and not size and closed[-1].name == CLOSED.format(f"{self.number:012}"):
            self.end = 0  # a process died after it had closed the file
        if size < self.end or (size and not self.end):
            site = self.folder.name
            log.error("%s or %s of %s was changed: see fedapp site log", LOG, HEAD, site)
        if size < self.end:
            self.end = size
            if size and os.pread(file, 1, size - 1) != b"\n":
                self.end += os.write(file, b"\n")
        elif size > self.end:
            with (self.folder / LOG).open("rb") as lines:
                lines.seek(self.end)
                for line in lines:
                    if not line.endswith(b"\n"):
                        os.ftruncate(file, self.end)
                        break
                    fields = _fields(line)
                    if fields and not self.end:  # the head is lost
                        self.number, self.digest = fields["number"] - 1, fields["before"]
                    if _follows(fields, self.number, self.digest):
                        self._add(line)
                    else:
                        self.end += len(line)
        return size

    def _add(self, line: bytes) -> None:
        self.number, self.digest = self.number + 1, line_digest(line)
        self.end += len(line)


def key_of(folder: Path) -> Ed25519PrivateKey:
    """The key that signs lines of the log in a site's folder."""
    return signing_key(identity(folder.name, folder.parent.parent))


def public_hex(key: Ed25519PrivateKey) -> str:
    """The public key, as lines have it."""
    return key.public_key().public_bytes_raw().hex()


def _line(fields: Mapping[str, Any], key: Ed25519PrivateKey | None) -> bytes:
    if key:
        fields = {**fields, "key": public_hex(key)}
        fields["signature"] = key.sign(_signable(fields)).hex()
    return json.dumps(fields).encode() + b"\n"


def _signable(fields: Mapping[str, Any]) -> bytes:
    """What a line's signature is of: all other fields, and by ``before`` all other lines."""
    return LABEL + json.dumps({k: fields[k] for k in fields if k != "signature"}).encode()


def is_signed(fields: Mapping[str, Any]) -> bool:
    """Whether a line has the signature of the key that it names."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(fields["key"]))
        key.verify(bytes.fromhex(fields["signature"]), _signable(fields))
    except (InvalidSignature, ValueError, KeyError, TypeError):
        return False
    return True


def line_digest(line: bytes) -> str:
    """Digest of a line, in the next one."""
    return hashlib.blake2b(line, digest_size=DIGEST_BYTES).hexdigest()


def _fields(line: bytes) -> dict[str, Any]:
    """Fields of a line; none if it is not one."""
    try:
        fields: dict[str, Any] = json.loads(line)
        is_line = all(isinstance(fields[name], kind) for name, kind in KINDS.items())
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return fields if is_line else {}


def _follows(fields: Mapping[str, Any], number: int, digest: str) -> bool:
    return (fields.get("number"), fields.get("before")) == (number + 1, digest)


@dataclass(slots=True)
class Audit:
    """Lines of a log with their fields, as they are read; then ``faults`` has what is wrong."""

    path: Path
    heads: Sequence[tuple[str, int, str]] = ()  # what has a line's number and digest, and these
    key: str = ""  # the site's public key, hex
    answers: Mapping[tuple[str, str], int] = field(default_factory=dict)  # by run and kind
    faults: list[str] = field(default_factory=list)
    number: int = 0  # of the last line
    signed: int = 0  # number of the last signed line
    _signer: str = ""
    _dropped: set[tuple[int, str]] = field(default_factory=set)

    @classmethod
    def of_site(cls, folder: Path, heads: Sequence[tuple[str, int, str]] = ()) -> Audit:
        """With what a site knows of its log, read before the log, which may grow."""
        answers = {
            (path.parent.name, kind): n
            for path in folder.glob(f"*/{STATE}")
            for kind, n in account_of(Store.open(path.parent)).times.items()
            if "." in kind  # else of letters
        }
        with _locked(folder) as writer:
            last = HEAD, writer.number, writer.digest
        is_lost = not writer.number and (folder / LOG).stat().st_size
        faults = [f"{HEAD} was lost"] if is_lost else []
        return cls(folder / LOG, (last, *heads), public_hex(key_of(folder)), answers, faults)

    def __iter__(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        fault, missing, digest, start = "", 0, FIRST, (0, FIRST)
        opened, logged = set[str](), Counter[tuple[str, str]]()
        for index, line in enumerate(self._lines()):
            if not line.endswith(b"\n"):
                break  # of a process that died, unless the head knows of more
            fields = _fields(line)
            number = fields.get("number", 0)
            if not index and number > 1:
                self.number, digest = start = number - 1, fields["before"]
            if missing and number == missing:
                fault, missing = f"line {number} was moved", 0
            if not (fault or _follows(fields, self.number, digest)):
                fault = _fault(self.number + 1, number, fields.get("before") == digest)
                missing = self.number + 1 if number > self.number + 1 else 0
            self.number, digest = number or self.number + 1, line_digest(line)
            for what, n, expected in self.heads:
                if n == number and expected != digest:
                    self.faults.append(f"line {n} is not the one in {what}")
            self._check_signature(fields)
            if fields.get("event") == "answered":
                logged[str(fields.get("run")), str(fields.get("kind"))] += 1
            elif fields.get("event") == "opened":
                opened.add(str(fields.get("run")))
            yield line, fields
        if start[0] and start not in self._dropped:
            self.faults.insert(0, f"lines 1 to {start[0]} are missing")
        self.faults += filter(None, [fault])
        for what, n, _ in self.heads:
            if n > self.number:
                self.faults.append(f"lines {self.number + 1} to {n} are cut off ({what})")
        if self.key and self._signer not in ("", self.key):
            self.faults.append("the key of the signatures is not the site's")
        for (run, kind), n in self.answers.items():
            if run in opened and (lacking := n - logged[run, kind]) > 0:
                self.faults.append(f"{lacking} answers to {kind} of {run} have no line")

    def _lines(self) -> Iterator[bytes]:
        """Lines of all files, the last of which may be closed meanwhile."""
        with self.path.open("rb") as last:
            inode = os.fstat(last.fileno()).st_ino
            for path in parts(self.path)[:-1]:
                if path.stat().st_ino != inode:
                    with path.open("rb") as file:
                        yield from file
            yield from last

    def check(self) -> None:
        """Raise DataError if anything is wrong, once all lines are read."""
        if self.faults:
            rule = f"{self.path.name} must have every line as it was written"
            raise DataError(f"{rule}, got: {'; '.join(self.faults)}")

    def _check_signature(self, fields: Mapping[str, Any]) -> None:
        if "signature" not in fields and fields.get("event") not in SIGNED:
            return
        if not is_signed(fields):
            self.faults.append(f"the signature of line {self.number} is wrong")
        elif self._signer not in ("", fields["key"]):
            self.faults.append(f"line {self.number} is signed by another key")
        else:
            self.signed, self._signer = self.number, fields.get("next", fields["key"])
            if fields["event"] == "dropped":
                self._dropped.add((fields["last"], fields["digest"]))


def _fault(due: int, number: int, follows: bool) -> str:
    """What is wrong where another line is due; ``follows``: it has the digest of the one before."""
    if not number or follows:
        return f"line {due} was altered"
    if number == due:
        return f"line {due - 1} was altered, or what line {due} says of it"
    if number < due:
        return f"line {number} is there twice, or was moved"
    return f"lines {due} to {number - 1} were removed"
