"""Files and folders that people name as outputs: one rule for all of them.

An output has an ending of its kind, is in a folder that exists, is none of the files that are read,
and replaces only a file of its kind. ``check_output`` says so before any work, ``home.replacing``
writes the file whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fedapp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of files that fedapp writes where people say."""

    what: str  # as in "a new file or ..."
    suffixes: tuple[str, ...]
    # Whether fedapp wrote a file, which may be replaced; by default they look like anybody's.
    is_ours: Callable[[Path], bool] = lambda _: False


def check_output(
    path: Path, kind: Kind, inputs: Iterable[str | Path] = (), name: str = "output"
) -> None:
    """Check a file that is to be written; ConfigError. ``inputs`` need not exist."""
    path, shown = path.resolve(), path
    if shown.suffix not in kind.suffixes:
        raise ConfigError(f"{name} must end in {' or '.join(kind.suffixes)}, got {shown}")
    if not path.parent.is_dir():
        way = f"mkdir -p '{path.parent}' makes it"
        raise ConfigError(f"{name} must be in a folder that exists, got {shown}: {way}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{name} must be in a folder that can be written, got {shown}")
    if not path.exists():
        return
    if not path.is_file():
        raise ConfigError(f"{name} must be a file, got {shown}, which is none")
    for source in inputs:
        if os.path.exists(source) and path.samefile(source):
            rule = f"{name} must be another file than {source}, which is read"
            raise ConfigError(f"{rule}, got {shown}")
    if path.stat().st_size and not kind.is_ours(path):
        rule = f"{name} must be a new file, or {kind.what} that fedapp wrote"
        raise ConfigError(f"{rule}, got {shown}, which is another: name a new one")


def check_output_folder(path: Path, own: Callable[[str], bool], what: str) -> None:
    """Check that a folder is new or empty, but for files whose names are its ``own``."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ConfigError(f"{what} must be a folder, got the file {path}")
    others = sorted(e.name for e in path.iterdir() if not (e.name.startswith(".") or own(e.name)))
    if others:
        rule = f"{what} must be a new or an empty folder"
        raise ConfigError(f"{rule}, got {path}, which has {others[0]}")


def begins_with(*marks: bytes, within: int = 4096) -> Callable[[Path], bool]:
    """Whether the beginning of a file has all these marks."""

    def is_ours(path: Path) -> bool:
        with path.open("rb") as file:
            head = file.read(within)
        return all(mark in head for mark in marks)

    return is_ours
