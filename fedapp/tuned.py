"""A finished search for the best settings, in Python and on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedapp.finished import Run, as_frame
from fedapp.finished_folder import FinishedFolder
from fedapp.home import write_whole
from fedapp.metrics import larger_is_better

TRIALS, SUMMARY, BEST = "trials.jsonl", "tune.json", "best"


@dataclass(frozen=True, slots=True)
class Trial:
    """A line of ``trials.jsonl``.

    Parameters
    ----------
    number : from 1.
    state : ``finished``; ``stopped`` by the budget; or ``interrupted`` with the command.
    settings : that were tried, by their names.
    score : of the validation rows; None where the trial did not finish.
    exchanges, bytes : that it took.
    seconds : of training; None where it did not finish.
    """

    number: int
    state: str
    settings: dict[str, Any]
    score: float | None
    exchanges: int
    bytes: int
    seconds: float | None = None


def read_trials(folder: Path) -> list[Trial]:
    """The trials of a search so far; a line that was not written whole is none."""
    path = folder / TRIALS
    text = path.read_text() if path.is_file() else ""
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        write_whole(path, "".join(lines[:-1]).encode())
    return [Trial(**json.loads(line)) for line in lines if line.endswith("\n")]


def ranked(trials: Sequence[Trial], metric: str) -> list[Trial]:
    """Trials with a score, best first; the first of equals."""
    scored = [one for one in trials if one.score is not None]
    sign = -1 if larger_is_better(metric) else 1
    return sorted(scored, key=lambda one: sign * (one.score or 0.0))


def best_of(trials: Sequence[Trial], metric: str) -> Trial | None:
    """The trial with the best score; None where none has one."""
    return next(iter(ranked(trials, metric)), None)


class Tuned(FinishedFolder):
    """A finished search.

    Parameters
    ----------
    path : of its folder.

    Raises
    ------
    ConfigError : the folder holds no search that has finished.

    Examples
    --------
    >>> import fedapp
    >>> found = fedapp.tune("pax", space={"eta": [0.1, 0.3]}, runs=2, num_boost_round=2)
    >>> found.best["eta"] in (0.1, 0.3)
    True
    >>> sorted(found.run.summary["metrics"])
    ['by_party', 'test', 'train', 'valid']
    """

    _kind, _files = "search", (SUMMARY,)

    @property
    def summary(self) -> dict[str, Any]:
        """The content of ``tune.json``: the best setting, its scores, what the search took."""
        return self._summary()

    @property
    def best(self) -> dict[str, Any]:
        """The best setting, by the settings' own names; with what was given for all trials."""
        return dict(self.summary["settings"])

    @property
    def run(self) -> Run:
        """The last run, of the best setting, which alone has test scores."""
        return Run(self.path / BEST)

    @property
    def trials(self) -> Any:
        """A record for each trial, best first, then those without a score: a pandas DataFrame where
        pandas is installed, else a list of dicts."""
        trials = read_trials(self.path)
        ordered = ranked(trials, self.summary["metric"])
        ordered += [one for one in trials if one.score is None]
        records = [
            {
                "trial": one.number,
                "state": one.state,
                "valid": one.score,
                **one.settings,
                "exchanges": one.exchanges,
                "bytes": one.bytes,
                "seconds": one.seconds,
            }
            for one in ordered
        ]
        return as_frame(records)
