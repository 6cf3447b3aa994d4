"""Which runs lie in a folder, what sites keep of them, and what of it may go."""

from __future__ import annotations

import json
import re
import shutil
import time
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedapp.home import home
from fedapp.metrics import default_metric
from fedapp.run_folder import RunFolder, State
from fedapp.site.answer import MODEL_ID
from fedapp.site.part_file import PART
from fedapp.site.store import SECONDS_A_DAY

RUN_NAME = re.compile(r"\d{8}-\d{6}-(.+?)(-\d+)?")  # as ``new_run_dir`` makes it
UNFINISHED = frozenset({State.FAILED, State.INTERRUPTED, State.RESUMABLE})
STATE_DAYS = 7.0  # how long what a site keeps of a run is left alone, if nothing else is said
IN_USE_SECONDS = 3600.0  # a run elsewhere may still be working on a state so young


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
    runs : that failed or were interrupted.
    states : of sites.
    needed : parts among ``states`` that a finished run predicts with.
    kept : parts that stay, as nobody asked for all.
    """

    runs: tuple[FoundRun, ...]
    states: tuple[SiteState, ...]
    needed: tuple[SiteState, ...]
    kept: tuple[SiteState, ...]

    @property
    def n_bytes(self) -> int:
        """Of everything that may go."""
        return sum(run.n_bytes for run in self.runs) + sum(one.n_bytes for one in self.states)

    def carry_out(self) -> None:
        """Delete it."""
        for path in (*(run.path for run in self.runs), *(state.path for state in self.states)):
            shutil.rmtree(path)


def found_runs(parent: Path, deep: bool = False) -> list[FoundRun]:
    """The runs in a folder, the one that changed last first.

    Parameters
    ----------
    deep : also those one folder further down, where comparisons have theirs.
    """
    folders = [path for form in ("*", "*/*")[: 1 + deep] for path in parent.glob(form)]
    found = [
        _found(path)
        for path in folders
        if (path / "config.toml").is_file() or (path.is_dir() and RUN_NAME.fullmatch(path.name))
    ]
    return sorted(found, key=lambda run: run.changed, reverse=True)


def _found(path: Path) -> FoundRun:
    named = RUN_NAME.fullmatch(path.name)
    config = path / "config.toml"
    settings: dict[str, Any] = tomllib.loads(config.read_text()) if config.is_file() else {}
    summary, saved = (_json(path / name) for name in ("summary.json", "checkpoint.json"))
    n_bytes, times = _measured(path)
    return FoundRun(
        path=path,
        state=RunFolder(path).state,
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
    metric = default_metric(summary["objective"])
    value = (summary["metrics"].get("test") or {}).get(metric)
    return "" if value is None else f"{metric} {value:.4f}"


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def _measured(folder: Path) -> tuple[int, list[float]]:
    """Bytes of a folder, and when each file in it, or else the folder, was written."""
    stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
    times = [stat.st_mtime for stat in stats] or [folder.stat().st_mtime]
    return sum(stat.st_size for stat in stats), times


def site_states() -> list[SiteState]:
    """All that the sites of this machine keep of models; their keys are none of it."""
    folders = (path for path in (home() / "sites").glob("*/*") if path.is_dir())
    return [_state(path) for path in sorted(folders) if MODEL_ID.fullmatch(path.name)]


def _state(path: Path) -> SiteState:
    n_bytes, times = _measured(path)
    return SiteState(path, (path / PART).is_file(), n_bytes, max(times))


def plan(parent: Path, days: float | None = None, all_parts: bool = False) -> Cleaning:
    """What may go of the runs in a folder, of predictions that failed, and of the sites' states.

    A run that is going on, what it works with, and what a run that stays would resume from are
    left alone. Parts of models stay unless all are asked for, or their run goes.

    Parameters
    ----------
    days : only what has not changed for so long; by default unfinished runs of any age, and states
        of ``STATE_DAYS``.
    all_parts : parts of models too, also those that finished runs predict with.
    """
    now = time.time()
    runs = [*found_runs(parent, deep=True), *found_runs(predictions_folder())]
    before = now - (days or 0.0) * SECONDS_A_DAY
    going = {run.path for run in runs if run.state in UNFINISHED and run.changed <= before}
    gone = {run.model_id for run in runs if run.path in going} - {""}
    staying = {run.model_id for run in runs if run.path not in going}
    finished = {run.model_id for run in runs if run.state is State.FINISHED}
    begun = [run.begun for run in runs if run.state is State.RUNNING]
    idle = min([now - IN_USE_SECONDS, *begun])
    old = min(idle, now - (STATE_DAYS if days is None else days) * SECONDS_A_DAY)
    chosen: list[SiteState] = []
    kept: list[SiteState] = []
    for state in site_states():
        model = state.path.name
        if model in staying - finished or not (model in gone or state.changed <= old):
            continue
        keeps = state.is_part and not (all_parts or model in gone)
        (kept if keeps else chosen).append(state)
    needed = tuple(one for one in chosen if one.is_part and one.path.name in finished)
    return Cleaning(
        tuple(run for run in runs if run.path in going), tuple(chosen), needed, tuple(kept)
    )


def predictions_folder() -> Path:
    """Where runs that predict are written; those that end well are deleted."""
    return home() / "predictions"


def by_site(states: Iterable[SiteState]) -> Iterator[tuple[str, int, int]]:
    """Site, how many, how many bytes."""
    listed = list(states)
    for site in sorted({one.site for one in listed}):
        own = [one.n_bytes for one in listed if one.site == site]
        yield site, len(own), sum(own)
