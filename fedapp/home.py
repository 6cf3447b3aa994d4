"""Folders of fedapp on this machine, and private, atomic writes."""

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
    """A path to print: relative if it is below the working folder, else absolute."""
    whole, here = path.absolute(), Path.cwd()
    return str(whole.relative_to(here) if whole.is_relative_to(here) else whole)


def private_folder(path: Path) -> None:
    """Make a folder and its missing parents, readable by their owner only."""
    if path.is_dir():
        return
    missing = list(takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    for folder in reversed(missing):
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open a file; a new one is readable by its owner only. Text is UTF-8."""
    encoding = None if "b" in mode else "utf-8"
    return open(
        path, mode, encoding=encoding, opener=lambda name, flags: os.open(name, flags, PRIVATE)
    )


def write_new(
    path: Path, content: bytes | memoryview, mode: int = PRIVATE, lasting: bool = False
) -> None:
    """Write a new file that nobody can read before it has its mode; ``lasting`` calls fsync."""
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
    """Write a file atomically, with its mode from the start.

    With ``lasting`` the content survives a loss of power, and its name after ``sync_folder``.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    write_new(temporary, content, mode, lasting)
    temporary.replace(path)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def secret_at(path: Path, draw: Callable[[], bytes]) -> bytes:
    """Read a secret from a private file; draw and write it if there is none."""
    if not path.exists():
        private_folder(path.parent)
        drawn = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        write_new(drawn, draw())
        # Atomic; if two processes draw at the same time, the first one's secret stays.
        with suppress(FileExistsError):
            os.link(drawn, path)
        drawn.unlink()
    return path.read_bytes()
