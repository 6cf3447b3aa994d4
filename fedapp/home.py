"""Where fedapp keeps things on this machine, and how it writes them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

RUNS = Path("runs")  # where a command writes runs, below the working folder
PRIVATE, PRIVATE_FOLDER = 0o600, 0o700


def home() -> Path:
    """``$FEDAPP_HOME``, by default ``~/.fedapp``: sites' state, Flower's files, data."""
    return Path(os.environ.get("FEDAPP_HOME") or Path.home() / ".fedapp").expanduser()


def shown(path: Path) -> str:
    """A path as it is printed: from the working folder where it lies in it, else the whole."""
    whole, here = path.absolute(), Path.cwd()
    return str(whole.relative_to(here) if whole.is_relative_to(here) else whole)


def private_folder(path: Path) -> None:
    """Make a folder, and those above it that are not there, for their owner alone."""
    if path.is_dir():
        return
    missing = list(takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    for folder in reversed(missing):
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open a file that, where it is new, only its owner can read; text is UTF-8."""
    encoding = None if "b" in mode else "utf-8"
    return open(
        path, mode, encoding=encoding, opener=lambda name, flags: os.open(name, flags, PRIVATE)
    )


def write_new(
    path: Path, content: bytes | memoryview, mode: int = PRIVATE, lasting: bool = False
) -> None:
    """Write a new file that nobody can read before it has its mode.

    Parameters
    ----------
    lasting : whether it is on the disk itself afterwards, and outlives a loss of power.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(content)
        if lasting:
            file.flush()
            os.fsync(descriptor)


def write_whole(
    path: Path, content: bytes | memoryview, mode: int = PRIVATE, lasting: bool = False
) -> None:
    """Write a file so that it is there whole or not at all, and with its mode from the first.

    Parameters
    ----------
    lasting : as for ``write_new``; the file's name too once ``sync_folder`` was called.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    write_new(temporary, content, mode, lasting)
    temporary.replace(path)


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def secret_at(path: Path, draw: Callable[[], bytes]) -> bytes:
    """What a file of its owner alone holds; drawn when it is first asked for."""
    if not path.exists():
        private_folder(path.parent)
        drawn = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        write_new(drawn, draw())
        # Whole or not at all, and the first of two that draw one at the same time.
        with suppress(FileExistsError):
            os.link(drawn, path)
        drawn.unlink()
    return path.read_bytes()
