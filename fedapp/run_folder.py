"""The folder of a run: settings, lines of rounds and of messages, model, summary, checkpoint.

`RunFolder` reads and writes it, also to list, report or predict. A run writes its progress there
too: `RunState` in every checkpoint, `Stage` for a command that waits.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from fedapp import home as locks
from fedapp.data.datasets import PREFIX, SUFFIX, by_party
from fedapp.errors import (
    NEW_RUN,
    ConfigError,
    DataError,
    FedappError,
    StoppedError,
    did_you_mean_path,
)
from fedapp.home import (
    RUNS,
    Measured,
    home,
    measured,
    naming,
    open_private,
    private_folder,
    read_toml,
    write_atomically,
)
from fedapp.records.codec import Codec, codec_of, fields_of, joined
from fedapp.records.document import from_text, model_text
from fedapp.records.journal import Journal, Stored
from fedapp.records.journal import State as Entry
from fedapp.run_files import (
    AUDIT,
    CONFIG,
    LEDGER,
    ROUNDS,
    STARTED,
    SUMMARY,
    VERSION,
    Audit,
    LedgerSums,
    Message,
    RoundInfo,
    Summary,
    checked_lines,
    checked_summary,
    faults_of,
    json_object,
    json_text,
    sums_of_ledger,
    without_nan,
)
from fedapp.sections import flatten
from fedapp.settings import Settings, defaults, load_settings

# Errors of a run that was stopped from outside.
INTERRUPTIONS = frozenset({"SystemExit", "KeyboardInterrupt", StoppedError.__name__})
SCHEMA = "schema.toml"  # copy of the schema by which the run reads its tables
CHECKPOINT = "checkpoint"
STOP = "stop"  # if it exists, the run stops after its round
INPUTS_FILE = "made-from.json"  # inputs of a run of a study, written before it begins
# Settings that a resumed run may change: they do not affect the model.
CHANGEABLE = {"log", "start-deadline", "exchange-deadline", "resend-after", "min-parties"}
RUN_NAME = re.compile(r"\d{8}-\d{6}-(.+?)(-\d+)?")  # as ``new_run_dir`` makes it
INITIAL_MODEL = "init-model.ubj"  # given to an estimator in memory
R = TypeVar("R")


def is_of_a_beginning(name: str) -> bool:
    """Whether the folder of a run that has not begun may have a file of this name."""
    beginnings = (INPUTS_FILE, INITIAL_MODEL, "progress.json", "failure.json")
    return name in beginnings or (name.startswith(PREFIX) and name.endswith(SUFFIX))


class State(StrEnum):
    """State of a run; a resumable one was interrupted after a checkpoint."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    RESUMABLE = "resumable"


@dataclass
class RunFolder:
    """A run's folder: its files, and what they show.

    What a run writes while it goes on (its state, stage and failure) is read each time. Its other
    files are read once, and again after this object has written one; DataError if a file is missing
    or invalid.
    """

    path: Path

    @property
    def ledger_file(self) -> Path:
        """One line per message."""
        return self.path / LEDGER

    @property
    def rounds_file(self) -> Path:
        """One line per round."""
        return self.path / ROUNDS

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings by name, of ``config.toml``."""
        return flatten(read_toml(self._text(CONFIG), f"{CONFIG} must be TOML"))

    @cached_property
    def summary(self) -> Summary:
        """``summary.json``, of a finished run."""
        return checked_summary(self._text(SUMMARY))

    @cached_property
    def rounds(self) -> list[RoundInfo]:
        """``rounds.jsonl``."""
        return checked_lines(self._text(ROUNDS), ROUNDS, RoundInfo)

    @cached_property
    def ledger(self) -> list[Message]:
        """``ledger.jsonl``, one entry per message."""
        return checked_lines(self._text(LEDGER), LEDGER, Message)

    @property
    def sums(self) -> LedgerSums:
        """Sums of the ledger, also of a run that is running."""
        return sums_of_ledger(self.ledger_file)

    @cached_property
    def audit(self) -> Audit | None:
        """``audit.json``, or None."""
        if not (path := self.path / AUDIT).is_file():
            return None
        try:
            return from_text(model_text(path), Audit)
        except DataError as error:
            rule = f"{AUDIT} must be as fedapp audit wrote it, got another"
            raise DataError(f"{rule}: audit the run again ({error})") from error

    def _text(self, name: str) -> str:
        file = self.path / name
        if not file.is_file():
            entries = ", ".join(sorted(entry.name for entry in self.path.iterdir()))
            raise DataError(f"run folder must hold {name}, got {entries or 'an empty folder'}")
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{name} must be UTF-8, got {error.reason} at {error.start}") from error

    @property
    def threshold(self) -> float | None:
        """The proposed threshold; None without one, from few rows, or without a summary."""
        chosen = self.summary.get("threshold", {}) if self.has_finished else {}
        return None if chosen.get("few") else chosen.get("value")

    @property
    def _of_any_version(self) -> dict[str, Any]:
        """``summary.json``, also of another version of fedapp: what its run uses must stay."""
        return json_object(self.path / SUMMARY)

    @cached_property
    def method(self) -> str:
        """The method, also of a folder that has only its name; empty if it is unknown."""
        if self.has_begun and (method := self.settings.get("strategy")):
            return str(method)
        named = RUN_NAME.fullmatch(self.path.name)
        return named[1] if named else ""

    @cached_property
    def model_id(self) -> str:
        """Id of the model; empty before the first checkpoint, unless the run has failed."""
        if summary := self._of_any_version:
            return str(summary["model_id"])
        state = self.saved_state
        return state.model_id if state else str(self.failure.get("model_id", ""))

    @cached_property
    def measured(self) -> Measured:
        """Size and times of the files."""
        return measured(self.path)

    def begin(self, settings: Settings) -> None:
        """Make the folder, write the settings and copy the schema; ConfigError if it has a run."""
        self.check_new()
        private_folder(self.path)
        self.write_settings(settings)
        self.write(STARTED, utc_now())
        for party, file in by_party(settings.schema_file).items():
            if (schema := Path(file)).is_file():
                write_atomically(schema_copy(self.path, party), schema.read_bytes())

    def write_settings(self, settings: Settings) -> None:
        """Write ``config.toml``."""
        self.write(CONFIG, tomli_w.dumps(settings.as_config()))

    def check_new(self) -> None:
        """Raise ConfigError if the folder has a run."""
        if self.has_begun:
            raise ConfigError(f"run-dir must be a new folder, got {self.path} which holds a run")

    @property
    def started(self) -> str:
        """When the first attempt began, ISO 8601 in UTC; empty if it is not recorded."""
        file = self.path / STARTED
        return file.read_text() if file.is_file() else ""

    @property
    def ended(self) -> str:
        """When the last attempt ended, as ``started``; empty while it runs, or if it was killed."""
        return str((self._of_any_version or self.failure).get("ended", ""))

    @property
    def has_begun(self) -> bool:
        """Whether the folder has the settings of a run."""
        return (self.path / CONFIG).exists()

    @property
    def has_finished(self) -> bool:
        """Whether the run has written its results."""
        return (self.path / SUMMARY).exists()

    def rewind(self, step: int, n_rounds: int) -> None:
        """Drop the lines of rounds and messages that were written after a checkpoint."""
        files = (self.rounds_file, n_rounds, "round"), (self.ledger_file, step, "step")
        for path, last, key in files:
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            whole = [line for line in lines if line.endswith("\n")]
            before = [line for line in whole if json.loads(line)[key] <= last]
            write_atomically(path, "".join(before).encode())

    def write(self, name: str, text: str) -> None:
        """Write one file of the folder."""
        write_atomically(self.path / name, text.encode())
        self._forget()

    def _forget(self) -> None:
        for name in set(vars(self)) - {"path"}:
            vars(self).pop(name, None)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write one JSON file; NaN becomes null."""
        self.write(name, json_text(without_nan(content)) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json`` of a run that ends here.

        A field that readers would refuse is left out, with a warning, as a finished training must
        not be lost by it; without one that all runs have, the run can be resumed.
        """
        times = {"started": self.started, "ended": utc_now()}
        times = {name: time for name, time in times.items() if time}
        fields = without_nan({"version": VERSION, **summary, **times})
        if faults := faults_of(fields, SUMMARY, Summary):
            fields = {name: fields[name] for name in fields if name not in faults}
            fields["warnings"] = [*fields.get("warnings", []), *faults.values()]
        self._write_checked(fields)

    def _write_checked(self, summary: Mapping[str, Any]) -> None:
        assert not summary.keys() - Summary.__annotations__.keys(), "Summary declares every field"
        text = json_text(without_nan(summary)) + "\n"
        checked_summary(text)
        self.write(SUMMARY, text)

    def add_to_summary(self, fields: Mapping[str, Any]) -> None:
        """Add or replace fields of ``summary.json``."""
        self._write_checked({"version": VERSION, **self.summary, **fields})

    def set_total_seconds(self, seconds: float) -> None:
        """Set the total, to include what a command does before and after the run."""
        self.add_to_summary({"seconds": {**self.summary["seconds"], "total": round(seconds, 3)}})

    def add_round(self, line: Mapping[str, Any]) -> None:
        """Append a line to ``rounds.jsonl``."""
        with open_private(self.rounds_file, "a") as file:
            file.write(json.dumps(without_nan(line)) + "\n")
        self._forget()

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
    def saved_state(self) -> RunState | None:
        """The state in the last checkpoint, or None."""
        return Checkpoints(self.path).state

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
    def has_died(self) -> bool:
        """Whether the run's process, on this machine, has ended without a word."""
        has_stages = (self.path / "progress.json").exists()
        return has_stages and not locks.is_written(self.path) and not self.has_ended()

    @property
    def state(self) -> State:
        """State of the run."""
        return State.RUNNING if self.is_held else self.state_of_files

    @property
    def state_of_files(self) -> State:
        """State of the run, given that it is not running."""
        if self.has_finished:
            return State.FINISHED
        if self.error not in ("", *INTERRUPTIONS):
            return State.FAILED
        has_checkpoint = (self.path / CHECKPOINT).exists()
        return State.RESUMABLE if has_checkpoint else State.INTERRUPTED

    @property
    def way_on(self) -> str:
        """How the run is resumed; empty without a checkpoint, or if it has finished."""
        is_saved = (self.path / CHECKPOINT).exists() and not self.has_finished
        return f"resume={self.path} resumes the run" if is_saved else ""

    @contextmanager
    def resumable(self) -> Iterator[None]:
        """Add the way on to what a block raises: to the text, or as a note."""
        try:
            yield
        except FedappError as error:
            error.way_on = "" if NEW_RUN in str(error) else self.way_on
            raise
        except Exception as error:
            if way := self.way_on:
                error.add_note(way)
            raise

    def write_failure(self, error: str, message: str, **more: Any) -> None:
        """Write ``failure.json`` of an attempt that ends here."""
        failure = {"error": error, "message": message, "ended": utc_now(), **more}
        self.write_json("failure.json", failure)

    def has_ended(self) -> bool:
        """Whether the run has written its end; a killed one has not."""
        return self.has_finished or (self.path / "failure.json").exists()

    def check_unfinished(self) -> None:
        """Raise ConfigError if the run has finished."""
        if self.has_finished:
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
        return str(self.failure.get("error", ""))

    @property
    def failure(self) -> dict[str, Any]:
        """``error``, ``message``, ``ended``, ``model_id``, ``rounds`` of a failed run, or empty."""
        return json_object(self.path / "failure.json")

    def finish(self) -> None:
        """Delete files that only an unfinished run needs."""
        for path in (*self.path.glob(f"*{CHECKPOINT}*"), self.path / "progress.json"):
            path.unlink(missing_ok=True)
        self.forget_failure()


def existing_folder(run_dir: Path) -> Path:
    """A run's folder; DataError if there is none."""
    if not run_dir.is_dir():
        hint = did_you_mean_path(run_dir, RUNS)
        raise DataError(f"{run_dir}: run folder must be a folder, got none{hint}")
    return run_dir


def read_run(run_dir: Path) -> RunFolder:
    """Read a run's folder; DataError if a file is missing, invalid, or lacks a required field."""
    run = RunFolder(existing_folder(run_dir))
    try:
        _ = run.settings, run.summary, run.rounds, run.ledger, run.audit
    except (ConfigError, DataError) as error:
        raise DataError(f"{run_dir}: {error}") from error
    return run


def utc_now() -> str:
    """The time as run folders hold it: ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


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


def resumed_settings(settings: Settings) -> Settings:
    """The settings of the run to resume, or the given ones if ``resume`` is empty.

    ConfigError if there is no such run, it has finished, or another value of a setting is given.
    """
    if not settings.resume:
        return settings
    path = Path(settings.resume).resolve()
    if not (path / CONFIG).is_file():
        hint = did_you_mean_path(Path(settings.resume), RUNS)
        raise ConfigError(f"resume must be the folder of a run, got {settings.resume}{hint}")
    run = RunFolder(path)
    run.check_unfinished()
    stored = run.settings
    if rounds := run.failure.get("rounds", 0):  # after which it has diverged
        stored = {**stored, "num-boost-round": rounds}
    run_paths = {"run-dir": str(path), "resume": str(path)}
    overrides = {name: value for name, value in settings.changed.items() if name not in run_paths}
    for name, value in overrides.items():
        if name not in CHANGEABLE and value != (before := stored.get(name, defaults()[name])):
            raise ConfigError(f"{name} must be the resumed run's, {before!r}, got {value!r}")
    changed = {name: overrides[name] for name in CHANGEABLE & set(overrides)}
    return load_settings({**stored, **changed, **run_paths})


@dataclass(frozen=True, slots=True)
class RunState:
    """Progress of a run at one step."""

    model_id: str  # drawn when the run begins; the same in all attempts
    attempt: int = 0  # times the run was resumed
    step: int = 0  # of the last exchange that was begun
    exchanges: int = 0  # finished
    rounds: int = 0  # reported
    finished_rounds: int = 0  # a run that diverges afterwards may end with these
    left_out: tuple[Mapping[str, Any], ...] = ()  # excluded parties: party, step, reason
    warnings: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()  # how the tables were read
    asked: Mapping[str, int] = field(default_factory=dict)  # step of the last request, by party
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # of the tables, by party
    keys: Mapping[str, str] = field(default_factory=dict)  # fingerprints of the parties' keys
    bytes: tuple[int, int] = (0, 0)  # sent to the parties, and to the server
    seconds: tuple[float, float] = (0.0, 0.0)  # in all, and in training; of all attempts

    def has_lost(self, party: str) -> bool:
        """Whether a party is excluded."""
        return any(gone["party"] == party for gone in self.left_out)

    def gap(self, party: str) -> int:
        """Steps since a party was last asked."""
        # Before the parties' names are known, a gap is known only if all were last asked together.
        steps = set(self.asked.values()) or {0}
        return self.step - self.asked.get(party, steps.pop() if len(steps) == 1 else self.step)


class Checkpoints:
    """Checkpoints of a run, appended to one file: each writes only what differs from the last.

    The file is a journal (``fedapp.records.journal``), whose values are the fields of the method's
    state. ``lasting`` is for parties on other machines: they drop their states of a checkpoint as
    soon as a message names the next, which must survive a loss of power by then, so ``save`` calls
    ``fsync``. Simulated parties do not, and a simulation then resumes from what the disk has.
    """

    def __init__(self, folder: Path, lasting: bool = False) -> None:
        self._journal = Journal(folder / CHECKPOINT, lasting)
        self._journal.refresh()

    @property
    def state(self) -> RunState | None:
        """The run's state at the last checkpoint, or None."""
        facts = self._journal.now.facts
        with _written_by_another_version("run"):
            return RUN_STATE.decode(facts["run"], ()) if facts else None

    def read(self, kind: type[R]) -> R:
        """The method's state; raises DataError if another version of fedapp wrote it."""
        values = self._journal.now.values

        def read(name: str, codec: Codec) -> Any:
            with _written_by_another_version(name):
                return values[name].read(codec)

        return joined(kind, read)

    def save(self, state: RunState, of_method: object) -> None:
        """Write a checkpoint; raises OSError if it cannot, and the last one remains."""
        before = self._journal.now.values
        values = dict[str, Stored]()
        for name, codec in fields_of(type(of_method)).items():
            value = attrgetter(name)(of_method)
            is_same = name in before and before[name].value is value
            values[name] = before[name] if is_same else Stored(codec, value)
        self._append(state, values)

    def restart(self, state: RunState) -> None:
        """Write the last checkpoint again, with the state of a new attempt."""
        self._append(state, self._journal.now.values)

    def _append(self, state: RunState, values: Mapping[str, Stored]) -> None:
        with naming(self._journal.path):
            self._journal.append(Entry({"run": RUN_STATE.encode(state, [])}, values))


@contextmanager
def _written_by_another_version(name: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        rule = f"checkpoint must have {name!r}: another version of fedapp has begun this run"
        raise DataError(f"{rule}, and can resume it") from error


RUN_STATE = codec_of(RunState)


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a command or of a run."""

    doing: str  # such as "aligning the rows"
    since: float  # Unix time of its start
    round: int = 0  # from 1; 0 outside the rounds
    rounds: int = 0  # number of rounds; 0 outside of them
    waiting: Sequence[str] = ()  # parties whose replies are missing
    warnings: Sequence[str] = ()  # of what makes the run slow
