"""Results of a comparison, of a search or of a study, in one folder.

What has finished with the same settings and data is read again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedapp.data.schema import first
from fedapp.errors import ConfigError
from fedapp.home import app_files, check_output_folder, private_folder
from fedapp.process import versions
from fedapp.run_files import SUMMARY, json_object
from fedapp.run_folder import INPUTS_FILE, RunFolder, State, is_of_a_beginning, read_run
from fedapp.runs.clean import CLAIM, delete_run
from fedapp.runs.tables import table_files
from fedapp.sections import flatten
from fedapp.settings import Settings, defaults
from fedapp.terminal import Tell

Engine = Callable[[Settings], RunFolder]
Inputs = Mapping[str, Any]
# Settings that runs of one folder may differ in, or that do not affect a result.
VARIED = {"strategy", "seed", "parties", "objective", "run-dir", "resume"}
NO_MATTER = {"run-dir", "resume"}
TABLE, CODE = "table", "code"
KEY = "made_from"  # first key of a file with inputs
PACKAGES = ("fedapp", "strategies", "clients", "simulations")
LIBRARIES = ("flwr", "numpy", "scikit-learn", "torch", "xgboost")
MOST_NAMED = 6  # results of other code
NO_INPUTS = "made again, as what is there does not say what it was made from"


# A result is written with its inputs: settings, tables and code. One with other settings or another
# table is never reused. One of other code is, so that a changed comment does not cost hours.
@dataclass(frozen=True, slots=True)
class Series:
    """Runs and other results in a folder; `tell` is called with a line about each."""

    folder: Path
    tell: Tell

    def claim(self, settings: Settings, engine: str, more: Inputs | None = None) -> None:
        """Write whose the folder is; ConfigError if it is of another series."""
        inputs = identity(settings, engine, more)
        path = self.folder / CLAIM
        check_same(inputs, json_object(path) or inputs, self.folder)
        RunFolder(self.folder).write_json(CLAIM, inputs)

    def run(self, settings: Settings, engine: Engine) -> dict[str, Any]:
        """The summary of a run, which is run or resumed unless it has finished; ConfigError if the
        run in its folder has other settings or another table."""
        folder = (self.folder / (name := name_of(settings))).resolve()
        run, asked = RunFolder(folder), inputs_of(settings)
        before = read_inputs(folder / INPUTS_FILE)
        is_finished = run.has_finished
        paths = {"run_dir": str(folder)}
        if before and (is_finished or run.state is State.RESUMABLE):
            check_same(asked, before, folder)
            code = "" if before[CODE] == asked[CODE] else ", by other code"
            self.tell(f"{name}: {'finished before' if is_finished else 'goes on'}{code}")
            if is_finished:
                return dict(read_run(folder).summary)
            paths["resume"] = str(folder)
        else:
            if folder.exists():
                if before is None:
                    self.tell(f"{name}: {NO_INPUTS}")
                    (folder / SUMMARY).unlink(missing_ok=True)  # finished: not deleted
                delete_run(folder)
            private_folder(folder)
            run.write_json(INPUTS_FILE, {KEY: asked})
        engine(settings.model_copy(update=paths))
        self.tell(f"{name}: done")
        return dict(read_run(folder).summary)

    def rows(
        self, name: str, settings: Settings, make: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> list[dict[str, Any]]:
        """Rows of the file ``name.json``, made and written unless those in it have the same
        inputs."""
        path = self.folder / f"{name}.json"
        asked = inputs_of(settings)
        before = read_inputs(path)
        differs = before is not None and first_difference(asked, before)
        if before is None or differs:
            if path.exists():
                why = NO_INPUTS if before is None else f"made again, as {differs} differs"
                self.tell(f"{path.name}: {why}")
            private_folder(path.parent)
            RunFolder(path.parent).write_json(path.name, {KEY: asked, "rows": list(make())})
        elif before[CODE] != asked[CODE]:
            self.tell(f"{path.name}: made before, by other code")
        return list(json_object(path)["rows"])


def check_series_folder(folder: Path | None) -> None:
    """Check, before any work, that a folder is new or of a series."""
    if folder and not (folder / CLAIM).is_file():
        check_output_folder(folder, is_of_a_beginning, "output")


def name_of(settings: Settings, name: str = "") -> str:
    """Name of a result: by default the method, with seed and fold."""
    fold = f"-fold-{settings.fold}" if settings.fold else ""
    return f"{name or settings.strategy}-{settings.seed}{fold}"


def default_folder(
    settings: Settings, engine: str, kind: str = "compare", more: Inputs | None = None
) -> Path:
    """Default folder of a series: a digest of the table, the settings and ``more``.

    Methods and seeds are not part of it, so that a comparison with more of them reuses its runs.
    """
    text = json.dumps(identity(settings, engine, more), sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    name = Path(settings.data.split(",")[0].rpartition("=")[2]).stem
    return Path("runs") / f"{kind}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-{digest}"


def identity(settings: Settings, engine: str, more: Inputs | None = None) -> dict[str, Any]:
    """Inputs that all runs of a series share: all but methods and seeds, and ``more``."""
    config = flatten(settings.as_config())
    inputs = {name: config[name] for name in config if name not in VARIED}
    resolved = {"parties": settings.parties, "objective": settings.objective, "engine": engine}
    return {**inputs, **resolved, TABLE: table_digest(settings), **(more or {})}


def inputs_of(settings: Settings) -> dict[str, Any]:
    """Inputs of a result: settings, and digests of tables and code."""
    config = flatten(settings.as_config())
    inputs = {name: value for name, value in config.items() if name not in NO_MATTER}
    return {**inputs, TABLE: table_digest(settings), CODE: code_digest()}


def read_inputs(path: Path) -> dict[str, Any] | None:
    """Inputs in a result's file; None if there is no file, or it has none."""
    return json_object(path).get(KEY)


def first_difference(asked: Inputs, before: Inputs) -> str:
    """Name of the first setting that differs, ``table`` coming last; empty if none does."""
    names = sorted({*asked, *before} - {CODE}, key=lambda name: (name == TABLE, name))
    cached = {**defaults(), **before}  # a setting added since then had its default
    return next((name for name in names if asked.get(name) != cached.get(name)), "")


def check_same(asked: Inputs, before: Inputs, folder: Path) -> None:
    """Raise ConfigError if the runs in a folder have other settings or another table."""
    if name := first_difference(asked, before):
        values = f"{before.get(name, defaults().get(name))!r} as in {folder}, got "
        values += repr(asked.get(name))
        if name == TABLE:
            values = f"that of the runs in {folder}, got one with another content"
        raise ConfigError(f"{name} must be {values}; delete that folder, or name another")


def other_code(folder: Path) -> str:
    """A line that names results below a folder by other code than today's; empty if none is."""
    names = []
    for path in sorted(folder.rglob("*.json")):
        with path.open() as file:
            has_inputs = KEY in file.read(len(KEY) + 8)  # it is the first key
        if has_inputs and (read_inputs(path) or {}).get(CODE) != code_digest():
            result = path.parent if path.name == INPUTS_FILE else path
            names.append(result.relative_to(folder).as_posix())
    if not names:
        return ""
    count = f"{len(names)} result{'s' if len(names) > 1 else ''} in {folder}"
    shown = first(names, MOST_NAMED)
    return f"of other code than today's: {count} ({shown}); what is deleted there is made again"


def table_digest(settings: Settings) -> str:
    """Digests of the files that ``data`` and ``schema`` name; empty for a data set's name."""
    stats = [(file, file.stat()) for file in table_files(settings)]
    return "".join(_content_digest(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)


@functools.cache
def _content_digest(path: Path, size: int, changed: int) -> str:
    """Digest of a file; cached while its size and modification time stay the same."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


@functools.cache
def code_digest() -> str:
    """Digest of all sources, and of the versions of the numerical libraries."""
    digest = hashlib.blake2b(json.dumps(versions(LIBRARIES)).encode(), digest_size=16)
    for pattern in (*(f"{package}/**/*.py" for package in sorted(PACKAGES)), "fedapp/**/*.toml"):
        for _, path in sorted(app_files(pattern).items()):
            digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()
