"""The runs that have begun at a site: how many a day, and which its people have approved.

``$FEDAPP_HOME/sites/NAME/runs.json`` has an entry for every run whose first message has come in the
last days, whether it was answered or not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from fedapp.errors import ConfigError, WaitingError
from fedapp.home import home, write_whole
from fedapp.messages.fields import Request
from fedapp.site.config import SiteConfig
from fedapp.site.stores import KEEP_DAYS, SECONDS_A_DAY, locked

RUNS = "runs.json"
KEPT_SECONDS = KEEP_DAYS * SECONDS_A_DAY


@dataclass(frozen=True, slots=True)
class Run:
    """A run as its first message names it.

    Parameters
    ----------
    method, data : of the run; the site's table.
    asked : when its first message first came, seconds of Unix time.
    settings : what that message says, by name.
    approved : whether the site's people have approved it.
    begun : whether that message was answered, so that the site has a state of it.
    """

    method: str
    data: str
    asked: float
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    approved: bool = False
    begun: bool = False


def admit(config: SiteConfig, model_id: str, method: str, request: Request) -> None:
    """Note a run whose first message has come, and hold that it may begin.

    It is noted anew, so that it counts and waits again, where its state was deleted since, where
    it first asked too long ago, and where the site has another table by now.

    Raises
    ------
    ConfigError : more runs have begun on the table in a day than the site allows, or the message
        is not what it was when it first came.
    WaitingError : the site's people have yet to approve it.
    """
    folder, now = home() / "sites" / config.name, time.time()
    told = {name: getattr(request, name) for name in type(request).forms}
    plain = {name: one for name, one in told.items() if isinstance(one, str | int | float)}
    asked = Run(method, config.data, now, plain)
    with locked(folder):
        runs = runs_of(folder)
        run = runs.get(model_id)
        if run and not run.begun and run.data == config.data and _is_kept(run, now):
            _hold_same(config.name, run, asked)
        else:
            _check_number(config, runs, now)
            run, kept = asked, {key: run for key, run in runs.items() if _is_kept(run, now)}
            _write(folder, {**kept, model_id: run})
    if config.asks and not run.approved:
        way = f"fedapp site approve {model_id}; the run asks again until start-deadline"
        raise WaitingError(f"waits for approval at {config.name}: {way}")


def note_begun(name: str, model_id: str) -> None:
    """Note that a run was admitted and has a state here.

    Parameters
    ----------
    name : of the site.
    """
    _change(home() / "sites" / name, model_id, lambda run: replace(run, begun=True))


def approve(folder: Path, model_id: str) -> None:
    """Let a run that waits begin.

    Parameters
    ----------
    folder : of the site, under its home.
    """
    _change(folder, model_id, lambda run: replace(run, approved=True))


def runs_of(folder: Path) -> dict[str, Run]:
    """Runs by the id of their model."""
    path = folder / RUNS
    found = json.loads(path.read_text()) if path.exists() else {}
    return {key: Run(**run) for key, run in found.items()}


def _is_kept(run: Run, now: float) -> bool:
    return now - run.asked < KEPT_SECONDS


def _hold_same(site: str, run: Run, asked: Run) -> None:
    """A run is what the site's people were shown.

    Raises
    ------
    ConfigError : it is another one.
    """
    was, now = ({"strategy": one.method, **one.settings} for one in (run, asked))
    for name in {**was, **now}:
        if was.get(name) != now.get(name):
            rule = f"must be {was.get(name)}, as when the run first asked {site}"
            setting = name.replace("_", "-")
            raise ConfigError(f"{setting} {rule}, got {now.get(name)}; begin a new run")


def _check_number(config: SiteConfig, runs: Mapping[str, Run], now: float) -> None:
    most = config.limits["runs-per-day"]
    alike = (run for run in runs.values() if run.data == config.data)
    if sum(now - run.asked < SECONDS_A_DAY for run in alike) >= most:
        rule = f"must be <= {most} on one table in the node config of {config.name}"
        raise ConfigError(f"runs-per-day {rule}, got one more")


def _change(folder: Path, model_id: str, changed: Callable[[Run], Run]) -> None:
    with locked(folder):
        runs = runs_of(folder)
        _write(folder, {**runs, model_id: changed(runs[model_id])})


def _write(folder: Path, runs: Mapping[str, Run]) -> None:
    text = json.dumps({key: asdict(run) for key, run in runs.items()}, indent=1)
    write_whole(folder / RUNS, text.encode())
