"""A site's log: what was asked of it, and what it answered, in lines that are only appended.

::

    log.jsonl   {"number": 2, "before": "5f1e...", "time": 1796000000.123, "event": ..., ...}
    log.head    number and digest of the last line, bytes of the log, time of its first line

in the site's folder, which its runs and its ``fedapp standing`` share: whoever writes a line holds
the lock of ``log.head``. The line is on the disk before ``append`` returns, and an answer leaves
after that. Half a line at the end, after what the head knows, is of a process that died: nothing
was answered, and the next line replaces it.

``before`` is the digest of the line before. An altered, removed or moved line breaks that chain,
and the head shows whether lines are cut off. Whatever happens to the file, the next line continues
from the head, so that a gap stays. Lines with a ``signature`` are signed by the site's key. A
signed line ``dropped`` bridges the lines that ``log-days`` has removed. Whoever has the site's key
can rewrite the whole log; only a signed line that somebody else keeps shows that.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from fedapp.errors import DataError
from fedapp.home import PRIVATE, open_private, private_folder, sync_folder
from fedapp.site.account import account_of
from fedapp.site.store import SECONDS_A_DAY, STATE, Store
from fedapp.site.trust import identity, signing_key

log = logging.getLogger("fedapp.site")

LOG, HEAD = "log.jsonl", "log.head"
DIGEST_BYTES = 16
FIRST = "0" * 2 * DIGEST_BYTES  # digest before the first line
HEAD_BYTES = 256
LABEL = b"fedapp log v1"  # before what is signed
SIGNATURE = b', "signature": "'
SIGNED = {"ended", "signed", "rekeyed", "dropped"}  # events


class LogError(OSError):
    """A line is not on the disk, so nothing may leave."""


@dataclass(frozen=True, slots=True)
class Head:
    """Where the log ends."""

    number: int = 0  # of the last line
    digest: str = FIRST
    end: int = 0  # bytes of the file
    since: float = 0.0  # time of the first line


def append(folder: Path, event: str, **fields: Any) -> bytes:
    """Write a line into the log in a site's folder, and return it.

    Raises LogError if it is not on the disk, as where that is full.
    """
    with _locked(folder) as (head_file, head):
        return _write(folder, head_file, head, event, fields)[0]


def sign(folder: Path, event: str, **fields: Any) -> bytes:
    """The same with the signature of the site's key, which covers all lines before."""
    key = signing_key(identity(folder.name, folder.parent.parent))
    with _locked(folder) as (head_file, head):
        return _write(folder, head_file, head, event, fields, key)[0]


def drop_old(folder: Path, days: int) -> None:
    """Remove lines of more than some days ago, at most once a day; 0: none."""
    oldest = time.time() - days * SECONDS_A_DAY
    if not days or _read_head(folder).since > oldest - SECONDS_A_DAY:
        return
    key = signing_key(identity(folder.name, folder.parent.parent))
    with _locked(folder) as (head_file, head):
        if not head.number or head.since > oldest - SECONDS_A_DAY:
            return
        last, digest, n_bytes, since = head.number, head.digest, 0, time.time()
        with (folder / LOG).open("rb") as file:
            for line in file:
                if (fields := _fields(line)) and fields["time"] > oldest:
                    last, digest, since = fields["number"] - 1, fields["before"], fields["time"]
                    break
                n_bytes += len(line)
        about = {"days": days, "last": last, "digest": digest}
        _, head = _write(folder, head_file, head, "dropped", about, key)
        new = folder / f".{LOG}"
        with (folder / LOG).open("rb") as old, open_private(new, "wb") as file:
            old.seek(n_bytes)
            shutil.copyfileobj(old, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(folder / LOG)
        sync_folder(folder)
        _write_head(head_file, replace(head, end=head.end - n_bytes, since=since))


@contextmanager
def _locked(folder: Path) -> Iterator[tuple[int, Head]]:
    """The head, for one writer at a time."""
    try:
        private_folder(folder)
        file = os.open(folder / HEAD, os.O_RDWR | os.O_CREAT, PRIVATE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file, _head(os.pread(file, HEAD_BYTES, 0))
        finally:
            os.close(file)
    except OSError as error:
        rule = f"log of {folder.name} must take a line before an answer leaves"
        raise LogError(
            error.errno or errno.EIO, f"{rule}, got: {error.strerror or error}"
        ) from error


def _read_head(folder: Path) -> Head:
    path = folder / HEAD
    return _head(path.read_bytes()) if path.exists() else Head()


def _head(text: bytes) -> Head:
    try:
        return Head(**json.loads(text))
    except (ValueError, TypeError):
        return Head()  # a new file, or one that is broken: all lines are read


def _write_head(file: int, head: Head) -> None:
    os.pwrite(file, json.dumps(asdict(head)).ljust(HEAD_BYTES).encode(), 0)


def _write(
    folder: Path,
    head_file: int,
    head: Head,
    event: str,
    fields: Mapping[str, Any],
    key: Ed25519PrivateKey | None = None,
) -> tuple[bytes, Head]:
    """Append a line, and move the head."""
    file = os.open(folder / LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE)
    try:
        if (size := os.fstat(file).st_size) != head.end:
            head = _caught_up(folder, file, head, size)
        now = round(time.time(), 3)
        about = {"number": head.number + 1, "before": head.digest, "time": now, "event": event}
        line = _line({**about, **fields}, key)
        try:
            if os.write(file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fdatasync(file)
        except OSError:
            os.ftruncate(file, head.end)
            raise
    finally:
        os.close(file)
    if not size:
        sync_folder(folder)
    end = head.end + len(line)
    head = Head(head.number + 1, line_digest(line), end, head.since or now)
    _write_head(head_file, head)
    return line, head


def _line(fields: Mapping[str, Any], key: Ed25519PrivateKey | None) -> bytes:
    if key is None:
        return json.dumps(fields).encode() + b"\n"
    text = json.dumps({**fields, "key": key.public_key().public_bytes_raw().hex()}).encode()
    return text[:-1] + SIGNATURE + key.sign(LABEL + text).hex().encode() + b'"}\n'


def _caught_up(folder: Path, file: int, head: Head, size: int) -> Head:
    """The head of a file that is not as the head says.

    A process that died has left half a line, which goes, or a line that the head lacks. Or else
    somebody has changed the file: the line that follows shows it.
    """
    if size < head.end:
        log.error("%s of %s is cut off: fedapp site log shows where", LOG, folder.name)
        if size and os.pread(file, 1, size - 1) != b"\n":
            size += os.write(file, b"\n")
        return replace(head, end=size)
    with os.fdopen(os.dup(file), "rb") as lines_after:
        lines_after.seek(head.end)
        for line in lines_after:
            if not line.endswith(b"\n"):
                os.ftruncate(file, head.end)
                break
            fields = _fields(line)
            if fields and not head.end:  # the head is lost
                head = Head(fields["number"] - 1, fields["before"], 0, fields["time"])
            head = replace(head, end=head.end + len(line))
            if fields and _follows(fields, head.number, head.digest):
                head = replace(head, number=fields["number"], digest=line_digest(line))
    return head


def line_digest(line: bytes) -> str:
    """Digest of a line, in the next one."""
    return hashlib.blake2b(line, digest_size=DIGEST_BYTES).hexdigest()


def _fields(line: bytes) -> dict[str, Any]:
    """Fields of a line; none if it is not one."""
    kinds = {"number": int, "before": str, "time": int | float, "event": str}
    try:
        fields = json.loads(line)
        is_line = all(isinstance(fields[name], kind) for name, kind in kinds.items())
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return fields if is_line else {}


def _follows(fields: Mapping[str, Any], number: int, digest: str) -> bool:
    return (fields["number"], fields["before"]) == (number + 1, digest)


# Checking


@dataclass(slots=True)
class Audit:
    """Lines of a log with their fields, as they are read; then ``faults`` has what is wrong."""

    path: Path
    heads: Sequence[tuple[str, int, str]] = ()  # what a line is known by; its number and digest
    key: str = ""  # the site's public key, hex
    answers: Counter[tuple[str, str]] | None = None  # by run and kind, as accounts have them
    faults: list[str] = field(default_factory=list)
    number: int = 0  # of the last line
    signed: int = 0  # number of the last signed line
    _dropped: set[tuple[int, str]] = field(default_factory=set)
    _key: str = ""  # of the signatures

    @classmethod
    def of_site(cls, folder: Path, heads: Sequence[tuple[str, int, str]] = ()) -> Audit:
        """With all that a site knows of its log; read before the log, which may grow."""
        head, answers = _read_head(folder), Counter[tuple[str, str]]()
        for path in folder.glob(f"*/{STATE}"):
            times = account_of(Store.open(path.parent)).times
            answers |= {(path.parent.name, kind): n for kind, n in times.items() if "." in kind}
        last = (HEAD, head.number, head.digest)
        key = signing_key(identity(folder.name, folder.parent.parent)).public_key()
        return cls(folder / LOG, (last, *heads), key.public_bytes_raw().hex(), answers)

    def __iter__(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        fault, missing, digest, start = "", 0, FIRST, (0, FIRST)
        opened, logged = set[str](), Counter[tuple[str, str]]()
        digests = dict[int, str]()  # of lines that heads name
        named = {number for _, number, _ in self.heads}
        with self.path.open("rb") as file:
            for place, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break  # of a process that died, unless the head knows of more
                fields = _fields(line)
                number = fields.get("number", 0)
                if not place and number > 1:
                    self.number, digest = start = number - 1, fields["before"]
                if missing and number == missing:
                    fault, missing = f"line {number} was moved", 0
                if not fault and not (fields and _follows(fields, self.number, digest)):
                    fault = _fault(self.number + 1, number, fields.get("before") == digest)
                    missing = self.number + 1 if number > self.number + 1 else 0
                self.number, digest = number or self.number + 1, line_digest(line)
                if number in named:
                    digests[number] = digest
                self._check_signature(line, fields)
                if "kind" in fields and fields["event"] == "answered":
                    logged[str(fields.get("run")), str(fields["kind"])] += 1
                elif fields.get("event") == "opened":
                    opened.add(str(fields.get("run")))
                yield line, fields
        if start[0] and start not in self._dropped:
            self.faults.insert(0, f"lines 1 to {start[0]} are missing")
        self.faults += filter(None, [fault])
        for what, number, expected in self.heads:
            if number > self.number:
                self.faults.append(f"lines {self.number + 1} to {number} are cut off ({what})")
            elif number > start[0] and digests.get(number) != expected:
                self.faults.append(f"line {number} is not the one in {what}")
        if self.key and self._key and self._key != self.key:
            self.faults.append("the key of the signatures is not the site's")
        for (run, kind), n in (self.answers or {}).items():
            if run in opened and logged[run, kind] < n:
                lacking = n - logged[run, kind]
                self.faults.append(f"{lacking} answers to {kind} of {run} have no line")

    def check(self) -> None:
        """Raise DataError if anything is wrong, once all lines are read."""
        if self.faults:
            rule = f"{self.path.name} must have every line as it was written"
            raise DataError(f"{rule}, got: {'; '.join(self.faults)}")

    def _check_signature(self, line: bytes, fields: Mapping[str, Any]) -> None:
        if "signature" not in fields and fields.get("event") not in SIGNED:
            return
        number, key = self.number, str(fields.get("key"))
        if not is_signed(line, key):
            self.faults.append(f"the signature of line {number} is wrong")
        elif self._key not in ("", key):
            self.faults.append(f"line {number} is signed by another key")
        else:
            self.signed, self._key = number, str(fields.get("next", key))
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


def is_signed(line: bytes, key: str) -> bool:
    """Whether a line ends in its signature by a public key, hex."""
    text, _, signature = line.rpartition(SIGNATURE)
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(signature.decode()[:128]), LABEL + text + b"}")
    except (InvalidSignature, ValueError):
        return False
    return signature[128:] == b'"}\n'
