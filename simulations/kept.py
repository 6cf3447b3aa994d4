"""Results that stay on disk: what each was made from, and whether it can serve again.

Settings, tables and code decide on a result. One of other settings or of another table never
serves. One of other code does, so that a changed comment does not cost hours; :func:`other_code`
tells of it.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedapp.config import Settings, app_files, defaults, flatten
from fedapp.data.sources import by_party, party_sources
from fedapp.errors import ConfigError
from fedapp.home import private_folder
from fedapp.packages import versions
from fedapp.run_folder import MADE_FROM, RunFolder

TABLE, CODE = "table", "code"  # beside settings, among what a result was made from
KEY = "made_from"  # the first of a file that says it
# Settings that name a run but do not change what it finds.
NO_MATTER = {"run-dir", "resume"}
PACKAGES = ("fedapp", "strategies", "clients", "simulations")
LIBRARIES = ("flwr", "numpy", "scikit-learn", "torch", "xgboost")
MOST_NAMED = 6
UNTOLD = "made again, as what is there does not say what it was made from"

Tell = Callable[[str], None]


def made_from(settings: Settings) -> dict[str, Any]:
    """All that decides on a result: settings, and digests of tables and code."""
    config = flatten(settings.as_config())
    kept = {name: value for name, value in config.items() if name not in NO_MATTER}
    return {**kept, TABLE: table_digest(settings), CODE: code_digest()}


def read_made_from(path: Path) -> dict[str, Any] | None:
    """What a file says of it; None where there is no file, or one that does not say it."""
    if not path.is_file():
        return None
    found: dict[str, Any] | None = json.loads(path.read_text()).get(KEY)
    return found


def first_difference(asked: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """The first setting that differs, ``table`` as the last, or an empty text.

    Parameters
    ----------
    before : a setting that it does not know had its default.
    """
    names = sorted({*asked, *before} - {CODE}, key=lambda name: (name == TABLE, name))
    there = {**defaults(), **before}
    return next((name for name in names if asked.get(name) != there.get(name)), "")


def check_same(asked: Mapping[str, Any], before: Mapping[str, Any], folder: Path) -> None:
    """Hold that the runs in a folder were made from what is asked for; of any code.

    Raises
    ------
    ConfigError : names what differs, and the way out.
    """
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
    """Rows that a file holds, or that are made now and written to it.

    Parameters
    ----------
    path : so that a command that was interrupted goes on.
    settings : that decide on the rows, beside code and what the path names.
    tell : told of rows that are there but cannot serve, or are of other code.
    """
    asked, before = made_from(settings), read_made_from(path)
    differs = before is not None and first_difference(asked, before)
    if before is None or differs:
        if path.exists():
            told = UNTOLD if before is None else f"made again, as {differs} differs"
            tell(f"{path.name}: {told}")
        private_folder(path.parent)
        RunFolder(path.parent).write_json(path.name, {KEY: asked, "rows": list(make())})
    elif before[CODE] != asked[CODE]:
        tell(f"{path.name}: made before, by other code")
    return list(json.loads(path.read_text())["rows"])


def other_code(folder: Path) -> str:
    """One line that names the results below a folder that are of other code than today's, and how
    to have them made again; empty where there is none."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        with path.open() as file:
            says = KEY in file.read(len(KEY) + 8)
        if says and (read_made_from(path) or {}).get(CODE) != code_digest():
            whole = path.parent if path.name == MADE_FROM else path
            found.append(whole.relative_to(folder).as_posix())
    if not found:
        return ""
    more = len(found) - MOST_NAMED
    named = ", ".join(found[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    of = f"{len(found)} result{'s' if len(found) > 1 else ''} in {folder}"
    return f"of other code than today's: {of} ({named}); what is deleted there is made again"


def table_digest(settings: Settings) -> str:
    """Of the content of the files that ``data`` and ``schema`` name; nothing of a table that is
    known by its name."""
    sources = party_sources(settings.data, settings.parties).values() or [settings.data]
    return "".join(map(_file_digest, (*sources, *by_party(settings.schema_file).values())))


def _file_digest(source: str) -> str:
    if not Path(source).is_file():
        return ""
    found = Path(source).stat()
    return _content_digest(Path(source).resolve(), found.st_size, found.st_mtime_ns)


@functools.cache
def _content_digest(path: Path, size: int, changed: int) -> str:
    """Of a file, once for as long as its size and time stay."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


@functools.cache
def code_digest() -> str:
    """Of all sources, and of the versions of the libraries that compute with them."""
    digest = hashlib.blake2b(json.dumps(versions(LIBRARIES)).encode(), digest_size=16)
    for package in sorted(PACKAGES):
        for _, path in sorted(app_files(f"{package}/**/*.py").items()):
            digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()
