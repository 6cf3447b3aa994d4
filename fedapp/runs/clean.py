"""List runs and site states, and decide which can be deleted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fedapp.errors import ConfigError, DataError
from fedapp.home import (
    LOCK,
    Measured,
    display_path,
    exclusive_lock,
    home,
    measured,
    private_folder,
)
from fedapp.metrics import watched_metric
from fedapp.report.progress import QUIET
from fedapp.run_files import CONFIG, ROUNDS, SUMMARY, ListedRun, json_object
from fedapp.run_folder import CHECKPOINT, INPUTS_FILE, RUN_NAME, RunFolder, State
from fedapp.settings import defaults
from fedapp.site.answer import MODEL_ID
from fedapp.site.clock import SECONDS_A_DAY, read_clock
from fedapp.site.store import KEEP_DAYS, PART_FILE
from fedapp.terminal import Tell

UNFINISHED = frozenset({State.FAILED, State.INTERRUPTED, State.RESUMABLE})
REFUSALS = (ConfigError.__name__, DataError.__name__)  # errors of runs that are refused
IN_USE_SECONDS = 3600.0  # a run on another machine may still use a younger state
# What reading a broken run may raise.
BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, ConfigError, DataError)
T = TypeVar("T")
COMPARISON, SEARCH = "comparison.json", "tune.json"  # summaries
CLAIM = "compared.json"  # in every folder of several runs: the inputs that they share


@dataclass(frozen=True, slots=True)
class SiteState:
    """A site's state of one model, with or without its part of the model."""

    path: Path
    is_part: bool
    n_bytes: int
    changed: float

    @property
    def site(self) -> str:
        """Name of the party."""
        return self.path.parent.name


@dataclass(frozen=True, slots=True)
class Cleaning:
    """Runs and site states to delete."""

    parent: Path  # folder of the runs
    runs: tuple[RunFolder, ...]  # failed or interrupted
    states: tuple[SiteState, ...]
    needed: tuple[SiteState, ...]  # those of ``states`` that a finished run predicts with
    retained: tuple[SiteState, ...]  # parts that stay without ``all_parts``
    finished: frozenset[str]  # ids of the models of finished runs

    @property
    def n_bytes(self) -> int:
        """Total size of the runs and states."""
        of_runs = sum(run.measured.n_bytes for run in self.runs)
        return of_runs + sum(state.n_bytes for state in self.states)

    def carry_out(self, tell: Tell = QUIET.tell) -> int:
        """Delete what has not changed since it was listed; returns the number of bytes."""
        n_bytes = 0
        for run in self.runs:
            with _skipping(run.path, tell):
                delete_run(run.path, run.measured)
                n_bytes += run.measured.n_bytes
        staying = {run.model_id for run in _all_runs(self.parent)} - self.finished
        for state in self.states:
            with _skipping(state.path, tell):
                if state.path.name in staying or _state(state.path) != state:
                    raise ConfigError("it has changed or is in use")
                shutil.rmtree(state.path)
                n_bytes += state.n_bytes
        return n_bytes


@contextmanager
def _skipping(path: Path, tell: Tell) -> Iterator[None]:
    """Report a folder that cannot be read or deleted, and continue."""
    try:
        yield
    except BROKEN as error:
        tell(f"skipped: {display_path(path)}: {error}")


@contextmanager
def folder_of_runs(path: Path, keeps: Callable[[], object] = bool) -> Iterator[None]:
    """Make a folder in which a block runs something, and undo that if it is refused at once.

    What the block made is deleted where a setting, a table or a party's refusal ends it before a
    run in the folder has trained, and ``keeps`` names nothing else to keep.
    """
    folders = [each for each in (path.absolute(), *path.absolute().parents) if not each.exists()]
    private_folder(path)
    before = {*path.iterdir()}
    try:
        yield
    except BaseException as error:
        new = {*path.iterdir()} - before if path.is_dir() else set[Path]()
        runs = [RunFolder(each) for each in (path, *new) if each.is_dir()]
        is_refused = isinstance(error, ConfigError | DataError) or getattr(error, "refused", False)
        is_refused = is_refused or any(run.error in REFUSALS for run in runs)
        if is_refused and not (keeps() or any(run.is_held or _has_trained(run) for run in runs)):
            for run in runs:
                if run.model_id:
                    forget_model(run.model_id)
            for each in new:
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        with suppress(OSError):  # a folder that has something stays
            for each in folders:
                each.rmdir()
        raise


def _has_trained(run: RunFolder) -> bool:
    """Whether a run has a result, a round, or what it can be resumed from."""
    files = [run.path / name for name in (SUMMARY, ROUNDS, CHECKPOINT)]
    return any(file.is_file() and file.stat().st_size for file in files)


def delete_run(path: Path, listed: Measured | None = None) -> None:
    """Delete the folder of an unfinished run; ConfigError if it is in use, or has changed since its
    files were ``listed``."""
    check_run_folder(path)
    with exclusive_lock(path):
        _check_flat(path)
        run = RunFolder(path)
        if run.state_of_files not in UNFINISHED or (listed and run.measured != listed):
            raise ConfigError("run folder must be as it was listed, got a changed one")
        shutil.rmtree(path)


def check_run_folder(path: Path) -> None:
    """Raise ConfigError if a folder is not a run's."""
    if path.is_symlink():
        raise ConfigError("run folder must be no symbolic link, got one")
    run = RunFolder(path)
    if not run.has_begun:
        # A command that was stopped before the run began leaves no more than these.
        for name in (entry.name for entry in path.iterdir()):
            if name not in (LOCK, INPUTS_FILE) and not name.startswith(f".{CONFIG}."):
                raise ConfigError(f"run folder must have a {CONFIG}, got {name}")
        return
    if unknown := sorted(set(run.settings) - set(defaults())):
        raise ConfigError(f"{CONFIG} must hold settings of fedapp, got {unknown[0]}")
    if "strategy" not in run.settings:
        raise ConfigError(f"{CONFIG} must name a strategy, got none")


def _check_flat(path: Path) -> None:
    """Check that a run's folder has no folders, in which somebody may keep runs."""
    if folders := [entry.name for entry in path.iterdir() if entry.is_dir()]:
        raise ConfigError(f"run folder must hold no folder to be deleted, got {folders[0]}")


def run_folders(parent: Path, deep: bool = False, tell: Tell = QUIET.tell) -> list[RunFolder]:
    """The runs in a folder, by their ends or starts, latest first.

    `tell` gets each skipped folder, and why; ``deep`` adds those one folder further down, in
    comparisons.
    """
    runs = _each(parent, deep, tell, _run_in)
    return sorted(runs, key=lambda run: (run.ended or run.started, run.path.name), reverse=True)


def list_runs(parent: Path, deep: bool = False, tell: Tell = QUIET.tell) -> list[ListedRun]:
    """Like ``run_folders``, as lines, with one for each comparison and each search."""
    lines = _each(parent, deep, tell, _line)
    return sorted(
        lines,
        key=lambda line: (line["ended"] or line["started"] or "", Path(line["run"]).name),
        reverse=True,
    )


def _each(parent: Path, deep: bool, tell: Tell, read: Callable[[Path], T | None]) -> list[T]:
    folders = list[T]()
    for path in _folders(parent, deep, tell):
        with _skipping(path, tell):
            if (one := read(path)) is not None:
                folders.append(one)
    return folders


def _run_in(path: Path) -> RunFolder | None:
    """The run of a folder, as it is now; None if the folder has none, or several."""
    run = RunFolder(path)
    if (path / CLAIM).is_file() or not (RUN_NAME.fullmatch(path.name) or run.has_begun):
        return None
    check_run_folder(path)
    _ = run.measured, run.method, run.model_id
    return run


def _folders(parent: Path, deep: bool, tell: Tell) -> Iterator[Path]:
    """Folders in a folder, and with ``deep`` in these; links are not followed."""
    children: list[Path] = []
    with _skipping(parent, tell):
        children = sorted(parent.iterdir()) if parent.is_dir() else []
    for path in children:
        if not path.is_dir():
            continue
        if path.is_symlink():
            tell(f"skipped: {display_path(path)}: a symbolic link")
            continue
        yield path
        if deep:
            yield from _folders(path, False, tell)


def _line(path: Path) -> ListedRun | None:
    if (path / CLAIM).is_file():
        return _line_of_several(path)
    if (run := _run_in(path)) is None:
        return None
    settings = run.settings if run.has_begun else {}
    summary = json_object(path / SUMMARY)  # also of another version
    metric, value = "", None
    if summary:
        metric = watched_metric(summary["objective"], summary.get("eval_metrics") or ())
        value = (summary["metrics"].get("test") or {}).get(metric)
    return {
        "run": str(path),
        "state": run.state,
        "method": run.method,
        "data": str(summary.get("data") or settings.get("data", "")),
        "metric": metric,
        "test_score": value,
        "bytes": run.measured.n_bytes,
        "started": run.started or None,
        "ended": run.ended or None,
    }


def _line_of_several(path: Path) -> ListedRun:
    """The line of a comparison or a search."""
    compared, search = (json_object(path / name) for name in (COMPARISON, SEARCH))
    method, metric, value = "unfinished comparison or search", "", None
    if compared:
        best = next(line for line in compared["lines"] if line["n_bytes"] is not None)
        methods = [name for names in compared["methods"].values() for name in names]
        method = f"comparison of {', '.join(methods)}"
        metric = f"{best['name']} {compared['metric']}"
        value = sum(best["scores"]) / len(best["scores"])
    elif search:
        method, metric = f"search, {search['strategy']}", search["metric"]
        value = search["test"].get(metric)
    summary = compared or search
    runs = [RunFolder(config.parent) for config in path.glob(f"*/{CONFIG}")]
    return {
        "run": str(path),
        "state": State.FINISHED if summary else State.INTERRUPTED,
        "method": method,
        "data": (summary or json_object(path / CLAIM))["data"],
        "metric": metric,
        "test_score": value,
        "bytes": measured(path).n_bytes,
        "started": min((run.started for run in runs), default="") or None,
        "ended": max((run.ended for run in runs), default="") or None,
    }


def site_states() -> list[SiteState]:
    """States of models at the sites of this machine; keys are not among them."""
    folders = (path for path in (home() / "sites").glob("*/*") if path.is_dir())
    states = []
    for path in sorted(folders):
        with suppress(FileNotFoundError):  # another process changes or deletes it
            if MODEL_ID.fullmatch(path.name):
                states.append(_state(path))
    return states


def forget_model(model_id: str) -> None:
    """Delete the states of a model at the sites of this machine, with their parts of it."""
    # Only this model's folders: other processes create and delete theirs meanwhile.
    for path in (home() / "sites").glob(f"*/{model_id}"):
        shutil.rmtree(path)


def _state(path: Path) -> SiteState:
    n_bytes, _, changed = measured(path)
    return SiteState(path, (path / PART_FILE).is_file(), n_bytes, changed)


def _all_runs(parent: Path, tell: Tell = QUIET.tell) -> list[RunFolder]:
    """Runs in a folder and in its comparisons, and runs that predict."""
    runs = run_folders(parent, deep=True, tell=tell)
    return [*runs, *run_folders(predictions_folder(), tell=tell)]


def plan(parent: Path, all_parts: bool = False, tell: Tell = QUIET.tell) -> Cleaning:
    """Decide which runs in a folder, failed predictions and site states can be deleted.

    Running runs and what they use stay, and so does what a remaining run would resume from. Parts
    of models stay unless ``all_parts`` is set or their run is deleted, too. States go that have
    not changed for ``KEEP_DAYS``.
    """
    time = read_clock(home())
    if time.fault:
        tell(f"{time.fault}. Until then no state grows older")
    runs = _all_runs(parent, tell)
    states_of_runs = {run.path: run.state for run in runs}  # a run may end meanwhile
    deleted = set()
    for run in runs:
        if states_of_runs[run.path] in UNFINISHED:
            with _skipping(run.path, tell):
                _check_flat(run.path)
                deleted.add(run.path)
    deleted_models = {run.model_id for run in runs if run.path in deleted} - {""}
    model_ids = {run.model_id for run in runs if run.path not in deleted}
    finished = {run.model_id for run in runs if states_of_runs[run.path] is State.FINISHED}
    # A state that changed after a running run began may be that run's.
    starts = [run.measured.began for run in runs if states_of_runs[run.path] is State.RUNNING]
    idle = min([time.shown - IN_USE_SECONDS, *starts])
    states: list[SiteState] = []
    parts: list[SiteState] = []
    for state in site_states():
        model = state.path.name
        is_old = time.file_age(state.changed) >= KEEP_DAYS * SECONDS_A_DAY and state.changed <= idle
        if model in model_ids - finished or not (model in deleted_models or is_old):
            continue
        keeps = state.is_part and not (all_parts or model in deleted_models)
        (parts if keeps else states).append(state)
    needed = tuple(state for state in states if state.is_part and state.path.name in finished)
    unfinished = tuple(run for run in runs if run.path in deleted)
    return Cleaning(parent, unfinished, tuple(states), needed, tuple(parts), frozenset(finished))


def predictions_folder() -> Path:
    """Folder of runs that predict; only failed ones stay."""
    return home() / "predictions"
