"""Which runs lie in a folder, what sites keep of them, and what of it may go."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedapp.config import defaults, flatten
from fedapp.errors import ConfigError
from fedapp.folder_locks import LOCK, alone
from fedapp.home import home, shown
from fedapp.metrics import watched_metric
from fedapp.run_folder import MADE_FROM, RunFolder, State
from fedapp.site.answer import MODEL_ID
from fedapp.site.part_file import PART_FILE
from fedapp.site.stores import KEEP_DAYS, SECONDS_A_DAY
from fedapp.studies import CLAIM, COMPARISON, FOLDS, SEARCH
from fedapp.toml import read_toml

RUN_NAME = re.compile(r"\d{8}-\d{6}-(.+?)(-\d+)?")  # as ``new_run_dir`` makes it
UNFINISHED = frozenset({State.FAILED, State.INTERRUPTED, State.RESUMABLE})
IN_USE_SECONDS = 3600.0  # a run elsewhere may still be working on a state so young
BROKEN = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ConfigError,
)  # what reading a run may raise

Tell = Callable[[str], None]


def _silent(text: str) -> None:
    """For those who do not want to know what was skipped."""


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run's folder from the outside.

    Parameters
    ----------
    score : on the test rows, ``auc 0.9891``; empty where there is none.
    n_bytes : of all its files.
    begun, changed : when its first and its last file were written, seconds since 1970.
    model_id : empty before the first checkpoint.
    """

    path: Path
    state: State
    method: str
    data: str
    score: str
    n_bytes: int
    begun: float
    changed: float
    model_id: str


@dataclass(frozen=True, slots=True)
class SiteState:
    """What a site keeps of one model, with its part of the model or without."""

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
    """What may go.

    Parameters
    ----------
    parent : folder of the runs.
    runs : that failed or were interrupted.
    states : of sites.
    needed : parts among ``states`` that a finished run predicts with.
    kept : parts that stay, as nobody asked for all.
    finished : models of finished runs.
    """

    parent: Path
    runs: tuple[FoundRun, ...]
    states: tuple[SiteState, ...]
    needed: tuple[SiteState, ...]
    kept: tuple[SiteState, ...]
    finished: frozenset[str]

    @property
    def n_bytes(self) -> int:
        """Of everything that may go."""
        return sum(run.n_bytes for run in self.runs) + sum(one.n_bytes for one in self.states)

    def carry_out(self, tell: Tell = _silent) -> int:
        """Delete what is still as it was, and say how many bytes that were.

        Parameters
        ----------
        tell : told of what has changed since, and stays.
        """
        n_bytes = 0
        for run in self.runs:
            with _skipping(run.path, tell):
                delete_run(run.path, run)
                n_bytes += run.n_bytes
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
    """Tell of a folder that cannot be read or must not go, and go on."""
    try:
        yield
    except BROKEN as error:
        tell(f"skipped: {shown(path)}: {error}")


def delete_run(path: Path, as_found: FoundRun | None = None) -> None:
    """Delete the folder of an unfinished run, as nobody holds it.

    Parameters
    ----------
    as_found : how it must still be.

    Raises
    ------
    ConfigError : it is another folder than that, or somebody holds it.
    """
    check_own(path)
    with alone(path):
        _check_flat(path)
        found = _found(path, RunFolder(path).state_of_files)
        if found.state not in UNFINISHED or (as_found and found != as_found):
            raise ConfigError("run folder must be as it was listed, got a changed one")
        shutil.rmtree(path)


def check_own(path: Path) -> None:
    """Hold that a folder is a run's.

    Raises
    ------
    ConfigError : it is a symbolic link, or its ``config.toml`` is not that of a run.
    OSError, ValueError : it cannot be read.
    """
    if path.is_symlink():
        raise ConfigError("run folder must be no symbolic link, got one")
    config = path / "config.toml"
    if not config.is_file():
        # Made by a command that was stopped before it began the run.
        for name in (one.name for one in path.iterdir()):
            if name not in (LOCK, MADE_FROM) and not name.startswith(".config.toml."):
                raise ConfigError(f"run folder must have a config.toml, got {name}")
        return
    settings = flatten(read_toml(config.read_text(), "config.toml must be TOML"))
    if unknown := sorted(set(settings) - set(defaults())):
        raise ConfigError(f"config.toml must hold settings of fedapp, got {unknown[0]}")
    if "strategy" not in settings:
        raise ConfigError("config.toml must name a strategy, got none")


def _check_flat(path: Path) -> None:
    """Hold that a run's folder holds no other, in which somebody may keep runs."""
    if below := [one.name for one in path.iterdir() if one.is_dir()]:
        raise ConfigError(f"run folder must hold no folder to be deleted, got {below[0]}")


def found_runs(
    parent: Path, deep: bool = False, tell: Tell = _silent, with_groups: bool = False
) -> list[FoundRun]:
    """The runs in a folder, the one that changed last first.

    Parameters
    ----------
    deep : also those one folder further down, where comparisons have theirs.
    with_groups : also comparisons, searches and cross-validations, each as a whole.
    tell : told of links, and of what looks like a run and is none, or cannot be read.
    """
    found = []
    for path in _folders(parent, deep, tell):
        with _skipping(path, tell):
            if (path / CLAIM).is_file():
                found += [_group(path)] if with_groups else []
            elif RUN_NAME.fullmatch(path.name) or (path / "config.toml").is_file():
                check_own(path)
                found.append(_found(path, RunFolder(path).state))
    return sorted(found, key=lambda run: run.changed, reverse=True)


def _folders(parent: Path, deep: bool, tell: Tell) -> Iterator[Path]:
    """Folders in a folder, and in these; links are not followed."""
    children: list[Path] = []
    with _skipping(parent, tell):
        children = sorted(parent.iterdir()) if parent.is_dir() else []
    for path in children:
        if not path.is_dir():
            continue
        if path.is_symlink():
            tell(f"skipped: {shown(path)}: a symbolic link")
            continue
        yield path
        if deep:
            yield from _folders(path, False, tell)


def _group(path: Path) -> FoundRun:
    """A comparison, a search or a cross-validation from the outside."""
    compared, search, folds = (_json(path / name) for name in (COMPARISON, SEARCH, FOLDS))
    method, metric, value = "unfinished comparison, search or folds", "", None
    if compared:
        best = next(line for line in compared["lines"] if line["n_bytes"] is not None)
        methods = [name for each in compared["methods"].values() for name in each]
        method = f"comparison of {', '.join(methods)}"
        metric = f"{best['name']} {compared['metric']}"
        value = sum(best["scores"]) / len(best["scores"])
    elif search:
        method, metric = f"search, {search['strategy']}", search["metric"]
        value = search["test"].get(metric)
    elif folds:
        method, metric = f"{folds['folds']} folds, {folds['strategy']}", folds["metric"]
        value = folds["scores"]["federated test"][metric]["mean"]
    found, (n_bytes, times) = compared or search or folds, _measured(path)
    state = State.FINISHED if found else State.INTERRUPTED
    data = (found or _json(path / CLAIM))["data"]
    score = "" if value is None else f"{metric} {value:.4f}"
    return FoundRun(path, state, method, data, score, n_bytes, min(times), max(times), "")


def _found(path: Path, state: State) -> FoundRun:
    named = RUN_NAME.fullmatch(path.name)
    config = path / "config.toml"
    text = config.read_text() if config.is_file() else ""
    settings = read_toml(text, "config.toml must be TOML")
    summary, saved = (_json(path / name) for name in ("summary.json", "checkpoint.json"))
    n_bytes, times = _measured(path)
    return FoundRun(
        path=path,
        state=state,
        method=settings.get("strategy") or (named[1] if named else ""),
        data=str(summary.get("data") or settings.get("data", "")),
        score=_score(summary),
        n_bytes=n_bytes,
        begun=min(times),
        changed=max(times),
        model_id=str(summary.get("model_id") or saved.get("model_id", "")),
    )


def _score(summary: dict[str, Any]) -> str:
    if not summary:
        return ""
    metric = watched_metric(summary["objective"], summary.get("eval_metrics") or ())
    value = (summary["metrics"].get("test") or {}).get(metric)
    return "" if value is None else f"{metric} {value:.4f}"


def _json(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text()) if path.is_file() else {}
    if not isinstance(found, dict):
        raise TypeError(f"{path.name} must hold an object, got {type(found).__name__}")
    return found


def _measured(folder: Path) -> tuple[int, list[float]]:
    """Bytes of a folder, and when each file in it, or else the folder, was written."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
    stats = [path.lstat() for path in files]
    times = [stat.st_mtime for stat in stats] or [folder.stat().st_mtime]
    return sum(stat.st_size for stat in stats), times


def site_states() -> list[SiteState]:
    """All that the sites of this machine keep of models; their keys are none of it."""
    folders = (path for path in (home() / "sites").glob("*/*") if path.is_dir())
    found = []
    for path in sorted(folders):
        with suppress(FileNotFoundError):  # a run of another process changes or has deleted it
            if MODEL_ID.fullmatch(path.name):
                found.append(_state(path))
    return found


def forget_model(model_id: str) -> None:
    """Delete all that the sites of this machine keep of a model, their parts of it too."""
    # Only this model's folders: other processes create and delete those of theirs meanwhile.
    for path in (home() / "sites").glob(f"*/{model_id}"):
        shutil.rmtree(path)


def _state(path: Path) -> SiteState:
    n_bytes, times = _measured(path)
    return SiteState(path, (path / PART_FILE).is_file(), n_bytes, max(times))


def _all_runs(parent: Path, tell: Tell = _silent) -> list[FoundRun]:
    """Those in a folder, of comparisons too, and predictions."""
    return [
        *found_runs(parent, deep=True, tell=tell),
        *found_runs(predictions_folder(), tell=tell),
    ]


def plan(
    parent: Path,
    days: float | None = None,
    all_parts: bool = False,
    tell: Tell = _silent,
) -> Cleaning:
    """What may go of the runs in a folder, of predictions that failed, and of the sites' states.

    A run that is going on, what it works with, and what a run that stays would resume from are
    left alone. Parts of models stay unless all are asked for, or their run goes.

    Parameters
    ----------
    days : only what has not changed for so long; by default unfinished runs of any age, and states
        of ``KEEP_DAYS``.
    all_parts : parts of models too, also those that finished runs predict with.
    tell : told of what is skipped, and why.
    """
    now = time.time()
    runs = _all_runs(parent, tell)
    before = now - (days or 0.0) * SECONDS_A_DAY
    going = set()
    for run in runs:
        if run.state in UNFINISHED and run.changed <= before:
            with _skipping(run.path, tell):
                _check_flat(run.path)
                going.add(run.path)
    gone = {run.model_id for run in runs if run.path in going} - {""}
    staying = {run.model_id for run in runs if run.path not in going}
    finished = {run.model_id for run in runs if run.state is State.FINISHED}
    begun = [run.begun for run in runs if run.state is State.RUNNING]
    idle = min([now - IN_USE_SECONDS, *begun])
    old = min(idle, now - (KEEP_DAYS if days is None else days) * SECONDS_A_DAY)
    chosen: list[SiteState] = []
    kept: list[SiteState] = []
    for state in site_states():
        model = state.path.name
        if model in staying - finished or not (model in gone or state.changed <= old):
            continue
        keeps = state.is_part and not (all_parts or model in gone)
        (kept if keeps else chosen).append(state)
    needed = tuple(one for one in chosen if one.is_part and one.path.name in finished)
    unfinished = tuple(run for run in runs if run.path in going)
    return Cleaning(parent, unfinished, tuple(chosen), needed, tuple(kept), frozenset(finished))


def predictions_folder() -> Path:
    """Where runs that predict are written; those that end well are deleted."""
    return home() / "predictions"
