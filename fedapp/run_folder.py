"""The folder of a run: settings, lines of rounds and of messages, model, summary, checkpoint."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedapp import home as locks
from fedapp.config import Settings, defaults, flatten, load_settings
from fedapp.conversation import Checkpoint
from fedapp.data.datasets import by_party
from fedapp.errors import ConfigError, DataError, DivergedError, StoppedError, did_you_mean_path
from fedapp.home import RUNS, home, open_private, private_folder, read_toml, write_atomically
from fedapp.run_state import RunState
from fedapp.stage import Stage

# Errors of a run that was stopped from outside.
INTERRUPTIONS = frozenset({"SystemExit", "KeyboardInterrupt", StoppedError.__name__})
SCHEMA = "schema.toml"  # copy of the schema by which the run reads its tables
STOP = "stop"  # if it exists, the run stops after its round
MADE_FROM = "made-from.json"  # inputs of a run of a study, written before it begins


class State(StrEnum):
    """State of a run; a resumable one was interrupted after a checkpoint."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    RESUMABLE = "resumable"


class _SavedFacts(dict[str, Any]):
    """Content of a checkpoint; a missing name is a DataError, not a KeyError."""

    def __missing__(self, name: str) -> Any:
        rule = f"checkpoint must have {name!r}: another version of fedapp has begun this run"
        raise DataError(f"{rule}, and can resume it")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run's files, and how they are read and written."""

    path: Path

    @property
    def ledger(self) -> Path:
        """One line per message."""
        return self.path / "ledger.jsonl"

    @property
    def rounds(self) -> Path:
        """One line per round."""
        return self.path / "rounds.jsonl"

    def begin(self, settings: Settings) -> None:
        """Make the folder, write the settings and copy the schema; ConfigError if it has a run."""
        self.check_new()
        private_folder(self.path)
        self.write_settings(settings)
        for party, file in by_party(settings.schema_file).items():
            if (schema := Path(file)).is_file():
                write_atomically(schema_copy(self.path, party), schema.read_bytes())

    def write_settings(self, settings: Settings) -> None:
        """Write ``config.toml``."""
        self.write("config.toml", tomli_w.dumps(settings.as_config()))

    def check_new(self) -> None:
        """Raise ConfigError if the folder has a run."""
        if (self.path / "config.toml").exists():
            raise ConfigError(f"run-dir must be a new folder, got {self.path} which holds a run")

    def rewind(self, step: int, n_rounds: int) -> None:
        """Drop the lines of rounds and messages that were written after a checkpoint."""
        for path, last, key in ((self.rounds, n_rounds, "round"), (self.ledger, step, "step")):
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            whole = [line for line in lines if line.endswith("\n")]
            before = [line for line in whole if json.loads(line)[key] <= last]
            write_atomically(path, "".join(before).encode())

    def write(self, name: str, text: str) -> None:
        """Write one file of the folder."""
        write_atomically(self.path / name, text.encode())

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write one JSON file; NaN becomes null."""
        self.write(name, _indented(without_nan(content)) + "\n")

    @property
    def summary(self) -> dict[str, Any]:
        """Content of ``summary.json``, of a finished run."""
        summary: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return summary

    def add_to_summary(self, fields: Mapping[str, Any]) -> None:
        """Add or replace fields of ``summary.json``."""
        self.write_json("summary.json", {**self.summary, **fields})

    def set_total_seconds(self, seconds: float) -> None:
        """Set the total, to include what a command does before and after the run."""
        self.add_to_summary({"seconds": {**self.summary["seconds"], "total": round(seconds, 3)}})

    def add_round(self, line: Mapping[str, Any]) -> None:
        """Append a line to ``rounds.jsonl``."""
        with open_private(self.rounds, "a") as file:
            file.write(json.dumps(without_nan(line)) + "\n")

    def save(self, checkpoint: Checkpoint, state: RunState) -> None:
        """Write a checkpoint in place of the last one."""
        # A new name: the file that checkpoint.json names stays whole until it names another.
        arrays = f"checkpoint-{state.step}-{secrets.token_hex(4)}.npz"
        with open_private(self.path / arrays, "wb") as file:
            np.savez(file, allow_pickle=False, **checkpoint.arrays)
        facts = {**state.to_json(), "arrays": arrays, "facts": checkpoint.facts}
        try:
            text = json.dumps(facts, allow_nan=False)
        except ValueError:
            text = json.dumps(without_nan(facts))
        self.write("checkpoint.json", text)
        self._drop_checkpoints(keep=arrays)

    def saved(self) -> tuple[Checkpoint, RunState] | None:
        """The last checkpoint and its state, or None; reading a name it lacks is a DataError."""
        facts = self._saved_facts()
        if facts is None:
            return None
        with np.load(self.path / facts["arrays"], allow_pickle=False) as stored:
            arrays = _SavedFacts({name: stored[name] for name in stored.files})
        return Checkpoint(arrays, _SavedFacts(facts["facts"])), RunState.from_json(facts)

    def note(self, stage: Stage) -> None:
        """Write the run's current stage."""
        self.write_json("progress.json", asdict(stage))

    @property
    def stage(self) -> Stage | None:
        """The run's last stage, or None."""
        with suppress(FileNotFoundError):
            return Stage(**json.loads((self.path / "progress.json").read_text()))
        return None

    def forget_stage(self) -> None:
        """Delete the stage of an earlier attempt."""
        (self.path / "progress.json").unlink(missing_ok=True)

    @property
    def kept(self) -> RunState | None:
        """The state in the last checkpoint, or None."""
        facts = self._saved_facts()
        return RunState.from_json(facts) if facts else None

    def _saved_facts(self) -> _SavedFacts | None:
        with suppress(FileNotFoundError):
            return _SavedFacts(json.loads((self.path / "checkpoint.json").read_text()))
        return None

    def held(self) -> AbstractContextManager[None]:
        """Mark the run as running during the block, while this process lives; shared."""
        return locks.shared_lock(self.path)

    def written(self) -> AbstractContextManager[None]:
        """Like ``held``, for the only process that writes the folder; a second is refused."""
        return locks.writer_lock(self.path)

    @property
    def is_held(self) -> bool:
        """Whether the run is running on this machine; True if the file system has no locks."""
        return locks.is_held(self.path)

    @property
    def state(self) -> State:
        """State of the run."""
        return State.RUNNING if self.is_held else self.state_of_files

    @property
    def state_of_files(self) -> State:
        """State of the run, given that it is not running."""
        if (self.path / "summary.json").exists():
            return State.FINISHED
        if self.error not in ("", *INTERRUPTIONS):
            return State.FAILED
        has_checkpoint = (self.path / "checkpoint.json").exists()
        return State.RESUMABLE if has_checkpoint else State.INTERRUPTED

    def has_ended(self) -> bool:
        """Whether the run has written its end; a killed one has not."""
        return any((self.path / name).exists() for name in ("summary.json", "failure.json"))

    def check_unfinished(self) -> None:
        """Raise ConfigError if the run has finished."""
        if (self.path / "summary.json").exists():
            rule = f"resume must be the folder of an unfinished run, got {self.path}"
            raise ConfigError(f"{rule}, which has finished: its results are there")

    def forget_failure(self) -> None:
        """Delete what an earlier attempt wrote at its end."""
        for name in ("failure.json", STOP):
            (self.path / name).unlink(missing_ok=True)

    def ask_to_stop(self) -> None:
        """Ask the run to stop after its round."""
        self.write(STOP, "")

    @property
    def is_to_stop(self) -> bool:
        """Whether the run was asked to stop."""
        return (self.path / STOP).exists()

    @property
    def error(self) -> str:
        """Class name of the error that ended the run, or empty."""
        path = self.path / "failure.json"
        return str(json.loads(path.read_text())["error"]) if path.exists() else ""

    @property
    def was_stopped(self) -> bool:
        """Whether the run ended on request."""
        return self.error == StoppedError.__name__

    @property
    def diverged_after(self) -> int:
        """Finished rounds of a run that has diverged; else 0."""
        facts = self._saved_facts() if self.error == DivergedError.__name__ else None
        return int(facts["facts"]["rounds"]) if facts else 0

    def finish(self) -> None:
        """Delete files that only an unfinished run needs."""
        for name in ("checkpoint.json", "progress.json"):
            (self.path / name).unlink(missing_ok=True)
        self.forget_failure()
        self._drop_checkpoints()

    def _drop_checkpoints(self, keep: str = "") -> None:
        for path in self.path.glob("checkpoint-*.npz"):
            if path.name != keep:
                path.unlink()


def without_nan(value: Any) -> Any:
    """Replace NaN and infinities by None, for JSON."""
    if isinstance(value, Mapping):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _indented(value: Any, margin: str = "") -> str:
    """Like ``json.dumps`` with an indent, but plain lists take one line."""
    inner = margin + "  "
    if isinstance(value, dict) and value:
        lines = (f"{json.dumps(key)}: {_indented(each, inner)}" for key, each in value.items())
        return f"{{\n{inner}" + f",\n{inner}".join(lines) + f"\n{margin}}}"
    if isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        lines = (_indented(each, inner) for each in value)
        return f"[\n{inner}" + f",\n{inner}".join(lines) + f"\n{margin}]"
    return json.dumps(value)


def new_run_dir(strategy: str, parent: Path | None = None) -> Path:
    """An unused path for a run, named by time and strategy."""
    parent = parent or home() / "runs"
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{strategy}"
    path, n = parent / name, 1
    while path.exists():
        path, n = parent / f"{name}-{n}", n + 1
    return path


def schema_copy(folder: Path, party: str) -> Path:
    """Path of a run's copy of a party's schema, or without a name of the common one."""
    return folder / (f"schema-{party}.toml" if party else SCHEMA)


# Settings that a resumed run may change: they do not affect the model.
CHANGEABLE = {"log", "start-deadline", "exchange-deadline", "resend-after", "min-parties"}


def resumed_settings(settings: Settings) -> Settings:
    """The settings of the run to resume, or the given ones if ``resume`` is empty.

    Raises
    ------
    ConfigError : there is no such run, it has finished, or another value of a setting is given.
    """
    if not settings.resume:
        return settings
    path = Path(settings.resume).resolve() / "config.toml"
    if not path.is_file():
        hint = did_you_mean_path(Path(settings.resume), RUNS)
        raise ConfigError(f"resume must be the folder of a run, got {settings.resume}{hint}")
    RunFolder(path.parent).check_unfinished()
    stored = flatten(read_toml(path.read_text(), "config.toml of the run must be TOML"))
    if rounds := RunFolder(path.parent).diverged_after:  # resumed, it ends before that
        stored["num-boost-round"] = rounds
    place = {"run-dir": str(path.parent), "resume": str(path.parent)}
    overrides = {name: value for name, value in settings.changed.items() if name not in place}
    for name, value in overrides.items():
        if name not in CHANGEABLE and value != (before := stored.get(name, defaults()[name])):
            raise ConfigError(f"{name} must be the resumed run's, {before!r}, got {value!r}")
    changed = {name: overrides[name] for name in CHANGEABLE & set(overrides)}
    return load_settings({**stored, **changed, **place})
