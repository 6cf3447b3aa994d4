"""Locks on a run's folder: many processes can hold it, one writes it, or one deletes it.

Holders and writers share the lock of the folder; whoever deletes it has that lock exclusively.
Writers exclude each other by a lock file in the folder, so that a command can hold the folder while
its ServerApp, another process, writes it. Locks end with their process.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedapp.errors import ConfigError
from fedapp.home import PRIVATE, private_folder

LOCK = ".lock"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make a folder and share its lock during the block."""
    descriptor = _shared(folder)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def written(folder: Path) -> Iterator[None]:
    """Be the only writer of a folder during the block; raise ConfigError if there is another."""
    with held(folder):
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, PRIVATE)
        try:
            _lock_alone(descriptor, folder, may_lack_locks=True)
            yield
        finally:
            os.close(descriptor)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock a folder exclusively, to delete it; raise ConfigError if anybody holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock_alone(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def is_held(folder: Path) -> bool:
    """Whether a process on this machine holds a folder; True if the file system has no locks."""
    try:
        with alone(folder):
            return False
    except ConfigError:
        return True


def check_free(folder: Path) -> None:
    """Raise ConfigError if another process writes a folder."""
    with suppress(FileNotFoundError):
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
        try:
            _lock_alone(descriptor, folder, may_lack_locks=True)
        finally:
            os.close(descriptor)


def _lock_alone(descriptor: int, folder: Path, may_lack_locks: bool = False) -> None:
    """Lock an open file or folder exclusively, without waiting."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        rule = "must be free, got one that another process writes"
        raise ConfigError(f"run folder {rule}: {folder}") from None
    except OSError:
        if not may_lack_locks:
            rule = "must be on a file system with locks to be deleted"
            raise ConfigError(f"run folder {rule}, got {folder}") from None


def _shared(folder: Path) -> int:
    """Open a folder and share its lock."""
    while True:
        private_folder(folder)
        descriptor = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # of a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        # The previous owner of the lock may have deleted the folder.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                return descriptor
        os.close(descriptor)
