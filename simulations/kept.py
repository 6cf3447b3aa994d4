"""Cached results on disk, with the inputs they were computed from.

The inputs are settings, tables and code. A result with other settings or another table is never
reused. One of other code is, so that a changed comment does not cost hours; :func:`other_code`
reports it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedapp.data.datasets import by_party, party_sources
from fedapp.errors import ConfigError
from fedapp.home import private_folder
from fedapp.packages import versions
from fedapp.run_folder import INPUTS_FILE, RunFolder
from fedapp.settings import Settings, app_files, defaults, flatten

TABLE, CODE = "table", "code"  # inputs beside the settings
KEY = "made_from"  # first key of a file with inputs
# Settings that name a run but do not affect its result.
NO_MATTER = {"run-dir", "resume"}
PACKAGES = ("fedapp", "strategies", "clients", "simulations")
LIBRARIES = ("flwr", "numpy", "scikit-learn", "torch", "xgboost")
MOST_NAMED = 6
UNTOLD = "made again, as what is there does not say what it was made from"

Tell = Callable[[str], None]


def made_from(settings: Settings) -> dict[str, Any]:
    """Inputs of a result: settings, and digests of tables and code."""
    config = flatten(settings.as_config())
    inputs = {name: value for name, value in config.items() if name not in NO_MATTER}
    return {**inputs, TABLE: table_digest(settings), CODE: code_digest()}


def read_made_from(path: Path) -> dict[str, Any] | None:
    """Inputs in a result's file; None if there is no file, or it has none."""
    if not path.is_file():
        return None
    inputs: dict[str, Any] | None = json.loads(path.read_text()).get(KEY)
    return inputs


def first_difference(asked: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """Name of the first setting that differs, ``table`` coming last; empty if none does."""
    names = sorted({*asked, *before} - {CODE}, key=lambda name: (name == TABLE, name))
    cached = {**defaults(), **before}  # a setting added since then had its default
    return next((name for name in names if asked.get(name) != cached.get(name)), "")


def check_same(asked: Mapping[str, Any], before: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError if the runs in a folder have other settings or another table."""
    if name := first_difference(asked, before):
        values = f"{before.get(name, defaults().get(name))!r} as in {folder}, got "
        values += repr(asked.get(name))
        if name == TABLE:
            values = f"that of the runs in {folder}, got one with another content"
        way = "delete that folder, or name another"
        raise ConfigError(f"{name} must be {values}; {way}")


def kept(
    path: Path, settings: Settings, make: Callable[[], Sequence[Mapping[str, Any]]], tell: Tell
) -> list[dict[str, Any]]:
    """Read a file's cached rows if their inputs are the same; else make and write them.

    Parameters
    ----------
    settings : inputs of the rows, beside the code and what the path names.
    tell : called if cached rows are invalid, or of other code.
    """
    asked, before = made_from(settings), read_made_from(path)
    differs = before is not None and first_difference(asked, before)
    if before is None or differs:
        if path.exists():
            why = UNTOLD if before is None else f"made again, as {differs} differs"
            tell(f"{path.name}: {why}")
        private_folder(path.parent)
        RunFolder(path.parent).write_json(path.name, {KEY: asked, "rows": list(make())})
    elif before[CODE] != asked[CODE]:
        tell(f"{path.name}: made before, by other code")
    return list(json.loads(path.read_text())["rows"])


def other_code(folder: Path) -> str:
    """A line that names results below a folder by other code than today's; empty if none is."""
    names = []
    for path in sorted(folder.rglob("*.json")):
        with path.open() as file:
            has_inputs = KEY in file.read(len(KEY) + 8)  # it is the first key
        if has_inputs and (read_made_from(path) or {}).get(CODE) != code_digest():
            result = path.parent if path.name == INPUTS_FILE else path
            names.append(result.relative_to(folder).as_posix())
    if not names:
        return ""
    more = len(names) - MOST_NAMED
    shown = ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    count = f"{len(names)} result{'s' if len(names) > 1 else ''} in {folder}"
    return f"of other code than today's: {count} ({shown}); what is deleted there is made again"


def table_digest(settings: Settings) -> str:
    """Digests of the files that ``data`` and ``schema`` name; empty for a data set's name."""
    sources = party_sources(settings.data, settings.parties).values() or [settings.data]
    names = (*sources, *by_party(settings.schema_file).values())
    files = [Path(name).resolve() for name in names if Path(name).is_file()]
    stats = [file.stat() for file in files]
    return "".join(
        _content_digest(file, stat.st_size, stat.st_mtime_ns)
        for file, stat in zip(files, stats, strict=True)
    )


@functools.cache
def _content_digest(path: Path, size: int, changed: int) -> str:
    """Digest of a file; cached while its size and modification time stay the same."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


@functools.cache
def code_digest() -> str:
    """Digest of all sources, and of the versions of the numerical libraries."""
    digest = hashlib.blake2b(json.dumps(versions(LIBRARIES)).encode(), digest_size=16)
    for package in sorted(PACKAGES):
        for _, path in sorted(app_files(f"{package}/**/*.py").items()):
            digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()
