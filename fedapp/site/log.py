"""A site's log: lines that are only appended, each with the digest of the one before.

::

    {"number": 2, "before": "5f1e...", "time": 1796000000.123, "event": ..., ...}

A line is on the disk before ``append`` returns. A line that was altered, removed or put elsewhere
breaks the chain; lines that are missing at the end do not show in it. Half a line at the end is
left by a process that died while it wrote: nothing was answered, and the next process removes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedapp.errors import DataError
from fedapp.home import PRIVATE, private_folder

DIGEST_BYTES = 16
FIRST = "0" * 2 * DIGEST_BYTES  # digest before the first line


class Log:
    """The log, open for one process at a time."""

    def __init__(self, path: Path) -> None:
        private_folder(path.parent)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise DataError(f"{path.name} must be of one process, got one that has it") from None
        self._number, self._before, self._end = 0, FIRST, 0
        for line, fields in lines(path):
            self._number, self._before = fields["number"], digest_of(line)
            self._end += len(line)
        os.ftruncate(self._file, self._end)

    def append(self, event: str, **fields: Any) -> None:
        """Write a line; raises OSError if it is not on the disk, as where that is full."""
        if (size := os.fstat(self._file).st_size) < self._end:
            raise OSError(f"{self.path.name} must have {self._end} bytes, got {size}: restart")
        if size > self._end:  # a line that could be neither finished nor removed
            os.ftruncate(self._file, self._end)
        number, now = self._number + 1, round(time.time(), 3)
        head = {"number": number, "before": self._before, "time": now, "event": event}
        line = json.dumps({**head, **fields}, ensure_ascii=False).encode() + b"\n"
        try:
            if os.write(self._file, line) < len(line):
                raise OSError(f"{self.path.name} must have room for a line, got a full disk")
            os.fdatasync(self._file)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._number, self._before, self._end = number, digest_of(line), self._end + len(line)

    def close(self) -> None:
        """Let another process have the log."""
        os.close(self._file)


def lines(path: Path) -> Iterator[tuple[bytes, Mapping[str, Any]]]:
    """Whole lines of a log and their fields; raises DataError at the first that breaks the chain.

    Half a line at the end is left out.
    """
    number, before = 0, FIRST
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            number += 1
            try:
                fields = json.loads(line)
                fits = fields["number"] == number and fields["before"] == before
            except (ValueError, KeyError, TypeError):
                fits = False
            if not fits:
                rule = f"{path.name} must have every line as it was written"
                got = f"got line {number} or the one before altered or missing"
                raise DataError(f"{rule}, {got}: move it elsewhere to begin another")
            before = digest_of(line)
            yield line, fields


def digest_of(line: bytes) -> str:
    """Digest of a line, in the next one."""
    return hashlib.blake2b(line, digest_size=DIGEST_BYTES).hexdigest()
