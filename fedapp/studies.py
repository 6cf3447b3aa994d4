"""Finished comparisons, searches and cross-validations, in Python and on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedapp.finished import Run, as_frame
from fedapp.finished_folder import FinishedFolder
from fedapp.home import write_atomically
from fedapp.metrics import larger_is_better

# Summaries; the page of a comparison; trials of a search, and the folder of its best run.
COMPARISON, FOLDS, SEARCH = "comparison.json", "folds.json", "tune.json"
PAGE, TRIALS, BEST = "comparison.html", "trials.jsonl", "best"
CLAIM = "compared.json"  # in every folder of several runs: the inputs that they share


class Compared(FinishedFolder):
    """A finished comparison of methods: runs on the same rows, and their scores.

    Its folder ``path`` has the page, ``comparison.html``.
    Examples
    --------
    >>> import fedapp
    >>> found = fedapp.compare(["pax", "bagging"], seeds=2, num_boost_round=2, max_depth=2)
    >>> {"strategy", "auc", "logloss", "difference", "ties"} <= set(found.scores)
    True
    """

    _kind, _files = "comparison", (COMPARISON,)

    @property
    def scores(self) -> Any:
        """A record for each method and baseline, best first: means over the runs, and the paired
        ``difference`` to the best method; a DataFrame if pandas is installed."""
        return as_frame(self.summary["table"])

    @property
    def runs(self) -> dict[str, list[Run]]:
        """The runs of each method, in the order of seeds and folds."""
        named = {line["name"]: line["runs"] for line in self.summary["lines"] if line["runs"]}
        return {name: [Run(self.path / run) for run in runs] for name, runs in named.items()}


class Folds(FinishedFolder):
    """A finished cross-validation: a run for each fold, and their scores.
    Examples
    --------
    >>> import fedapp
    >>> found = fedapp.run("pax", folds=2, num_boost_round=2, max_depth=2)
    >>> sorted(found.scores["federated test"]["auc"])
    ['mean', 'sd', 'values']
    >>> [run.summary["metrics"]["test"]["auc"] for run in found.runs] == found.scores[
    ...     "federated test"
    ... ]["auc"]["values"]
    True
    """

    _kind, _files = "cross-validation", (FOLDS,)

    @property
    def scores(self) -> dict[str, Any]:
        """``mean``, ``sd`` and ``values`` by fold, by model and rows (``federated test``), by
        score."""
        return dict(self.summary["scores"])

    @property
    def runs(self) -> list[Run]:
        """The runs in the order of the folds."""
        return [Run(self.path / name) for name in self.summary["runs"]]


@dataclass(frozen=True, slots=True)
class Trial:
    """A line of ``trials.jsonl``."""

    number: int  # from 1
    state: str  # "finished", "stopped" by the budget, or "interrupted" with the command
    settings: dict[str, Any]
    score: float | None  # on the validation rows; None if the trial did not finish
    exchanges: int
    bytes: int
    seconds: float | None = None  # of training; None if the trial did not finish


def read_trials(folder: Path) -> list[Trial]:
    """The trials of a search so far; an incomplete last line is dropped."""
    path = folder / TRIALS
    text = path.read_text() if path.is_file() else ""
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        write_atomically(path, "".join(lines[:-1]).encode())
    return [Trial(**json.loads(line)) for line in lines if line.endswith("\n")]


def ranked(trials: Sequence[Trial], metric: str) -> list[Trial]:
    """Trials, best first, those without a score last; ties keep their order."""
    sign = -1 if larger_is_better(metric) else 1
    return sorted(trials, key=lambda one: (one.score is None, sign * (one.score or 0.0)))


def best_of(trials: Sequence[Trial], metric: str) -> Trial | None:
    """The trial with the best score, or None."""
    return next((one for one in ranked(trials, metric) if one.score is not None), None)


class Tuned(FinishedFolder):
    """A finished search for the best settings.
    Examples
    --------
    >>> import fedapp
    >>> found = fedapp.tune("pax", space={"eta": [0.1, 0.3]}, runs=2, num_boost_round=2)
    >>> found.best["eta"] in (0.1, 0.3)
    True
    >>> sorted(found.run.summary["metrics"])
    ['by_party', 'test', 'train', 'valid']
    """

    _kind, _files = "search", (SEARCH,)

    @property
    def best(self) -> dict[str, Any]:
        """The best settings, with those given for all trials."""
        return dict(self.summary["settings"])

    @property
    def run(self) -> Run:
        """The last run, with the best settings; only it has test scores."""
        return Run(self.path / BEST)

    @property
    def trials(self) -> Any:
        """A record for each trial, best first, those without a score last: a pandas DataFrame if
        pandas is installed, else a list of dicts."""
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
            for one in ranked(read_trials(self.path), self.summary["metric"])
        ]
        return as_frame(records)
