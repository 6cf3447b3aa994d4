"""The folder of a run: settings, lines of rounds and of messages, model, summary, checkpoint.

Also what a run writes there of its progress (`RunState` in every checkpoint, `Stage` for whoever
waits), and the callbacks by which a command or a call follows it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, TypeVar

import tomli_w

from fedapp import home as locks
from fedapp.data.datasets import PREFIX, SUFFIX, by_party
from fedapp.data.schema import first
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
    home,
    naming,
    open_private,
    private_folder,
    write_atomically,
)
from fedapp.messages.fields import Request
from fedapp.records.codec import Codec, codec_of, fields_of, joined
from fedapp.records.journal import Journal, Stored
from fedapp.records.journal import State as Entry
from fedapp.run_files import (
    CONFIG,
    LEDGER,
    ROUNDS,
    STARTED,
    SUMMARY,
    VERSION,
    RoundInfo,
    RunFiles,
    Summary,
    checked_summary,
    faults_of,
    json_object,
)
from fedapp.settings import Settings, defaults, flatten, load_settings

# Errors of a run that was stopped from outside.
INTERRUPTIONS = frozenset({"SystemExit", "KeyboardInterrupt", StoppedError.__name__})
SCHEMA = "schema.toml"  # copy of the schema by which the run reads its tables
CHECKPOINT = "checkpoint"
STOP = "stop"  # if it exists, the run stops after its round
INPUTS_FILE = "made-from.json"  # inputs of a run of a study, written before it begins
# Settings that a resumed run may change: they do not affect the model.
CHANGEABLE = {"log", "start-deadline", "exchange-deadline", "resend-after", "min-parties"}
NOTED = 0.25  # seconds between two notes of exchanges of rounds
MOST_NAMED = 6  # parties in a stage's line

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


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run's files, and how they are read and written."""

    path: Path

    @property
    def ledger(self) -> Path:
        """One line per message."""
        return self.path / LEDGER

    @property
    def rounds(self) -> Path:
        """One line per round."""
        return self.path / ROUNDS

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
        return str(json_object(self.path / SUMMARY).get("ended", self.failure.get("ended", "")))

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
    def files(self) -> RunFiles:
        """Reader of the files, each read once."""
        return RunFiles(self.path)

    @property
    def summary(self) -> Summary:
        """Content of ``summary.json``, of a finished run."""
        return self.files.summary

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
        text = _indented(without_nan(summary)) + "\n"
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
        with open_private(self.rounds, "a") as file:
            file.write(json.dumps(without_nan(line)) + "\n")

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


def utc_now() -> str:
    """The time as run folders hold it: ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


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
        lines = (f"{json.dumps(key)}: {_indented(entry, inner)}" for key, entry in value.items())
        return f"{{\n{inner}" + f",\n{inner}".join(lines) + f"\n{margin}}}"
    if isinstance(value, list) and any(isinstance(entry, dict | list) for entry in value):
        lines = (_indented(entry, inner) for entry in value)
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
    RunFolder(path).check_unfinished()
    stored = flatten(RunFiles(path).config)
    if rounds := RunFolder(path).failure.get("rounds", 0):  # after which it has diverged
        stored["num-boost-round"] = rounds
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


class Stages:
    """Turns the exchanges of a run into stages; of those of rounds, one now and then is noted."""

    def __init__(self, note: Callable[[Stage], None], clock: Callable[[], float] = time.time):
        self._note, self._clock = note, clock
        self._phase, self._phase_began = "", 0.0
        self._noted_at = 0.0  # of an exchange of a round; 0: the next one is noted
        self._stage = Stage("", 0.0)

    def wait(self, doing: str) -> None:
        """Begin a stage without an exchange."""
        self._phase, self._phase_began = doing, self._clock()
        self._noted_at = 0.0
        self._note(Stage(doing, self._phase_began))

    def begin(self, request: Request, round_id: int, n_rounds: int) -> None:
        """Begin an exchange.

        ``round_id`` is from 1, and ignored if the request is not part of a round.
        """
        now = self._clock()
        if request.each_round:
            # May be n_rounds + 1: an exchange after the last round has that round's scores.
            self._phase = ""
            self._stage = Stage(request.doing, now, min(round_id, n_rounds), n_rounds)
            if now - self._noted_at < NOTED:
                return
            self._noted_at = now
        else:
            # Successive exchanges of one phase count as one stage.
            if request.doing != self._phase:
                self._phase, self._phase_began = request.doing, now
            self._stage = Stage(request.doing, self._phase_began)
            self._noted_at = 0.0
        self._note(self._stage)

    def name_waiting(self, parties: Sequence[str], away: Sequence[str] = ()) -> None:
        """Note the parties whose replies to the exchange are missing, and those not connected."""
        self._noted_at = 0.0
        doing = self._stage.doing
        doing += f"; waiting for {first(parties, MOST_NAMED)}" if parties else ""
        doing += f" ({first(away, MOST_NAMED)} not connected)" if away else ""
        self._note(replace(self._stage, doing=doing, waiting=parties))


# Called after every round, in order. If it returns False the run stops, and can be resumed.
OnRound = Callable[[RoundInfo], object]
Tell = Callable[[str], None]  # prints a line


class Watcher(Protocol):
    """Shows the progress of a command or a call and of its run."""

    @property
    def seconds(self) -> float:
        """Seconds since the command or the call began."""

    def begin(self, doing: str, ends: bool = False) -> None:
        """Show what is done from now on; with ``ends``, in place of the run's own stages."""

    def tell(self, text: str) -> None:
        """Print a line that stays."""

    def run(self, folder: RunFolder, metric: str) -> AbstractContextManager[None]:
        """A context during which the folder's run is shown; ``metric`` is the score shown first."""


class Silent:
    """A watcher that shows nothing."""

    def __init__(self) -> None:
        self._began = time.time()

    @property
    def seconds(self) -> float:
        """Since the call began."""
        return time.time() - self._began

    def begin(self, doing: str, ends: bool = False) -> None:
        """Nothing."""

    def tell(self, text: str) -> None:
        """Nothing."""

    def run(self, folder: RunFolder, metric: str) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()


QUIET = Silent()
