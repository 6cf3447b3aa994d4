"""What a comparison or a search returns in Python: several runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

from rich.table import Table

from fedapp.home import display_path
from fedapp.metrics import larger_is_better
from fedapp.report.summary import (
    COST_NAMES,
    cost_cells,
    score_text,
    terminal_table,
    value_text,
)
from fedapp.runs.clean import COMPARISON, SEARCH
from fedapp.runs.run import Finished, Run, as_frame
from fedapp.settings import Value
from fedapp.terminal import Terminal

PAGE, BEST = "comparison.html", "best"  # of a comparison; the folder of a search's best run
STUDY = "study.log"  # the trials of a search, in Optuna's journal
NUMBER = "number"  # attribute of a trial: its number in the search, from 1
DIGITS = 4  # significant ones of a drawn number, so that the command to repeat it stays short


class Compared(Finished):
    """A finished comparison of methods: runs on the same rows, and their scores.

    It prints the table of ``fedapp compare``, also in a notebook. Its folder ``path`` has the page,
    ``comparison.html``.

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

    def __repr__(self) -> str:
        from fedapp.report.comparison import score_tables

        text = StringIO()
        console = Terminal(file=text, width=200, color_system=None, force_jupyter=False)
        console.print(self.summary.get("verdict", ""), markup=False, soft_wrap=True)
        console.print(*score_tables(self.summary["table"]))
        return f"{super().__repr__()}\n{text.getvalue().rstrip()}"

    def _repr_html_(self) -> str:
        from fedapp.report.comparison import difference_html, score_html

        records, verdict = self.summary["table"], escape(self.summary.get("verdict", ""))
        tables = score_html(records) + difference_html(records)
        return f"<p>{verdict}</p>{tables}<small>{escape(display_path(self.path))}</small>"


@dataclass(frozen=True, slots=True)
class Trial:
    """A finished trial of a search."""

    number: int  # from 1
    settings: dict[str, Any]  # those that were searched
    score: float  # watched score on the validation rows
    exchanges: int  # number of exchanges
    bytes: int  # sent both ways
    seconds: float  # of training

    @property
    def record(self) -> dict[str, Any]:
        """A flat record: the number, the score on the validation rows, settings and costs."""
        costs = {"exchanges": self.exchanges, "bytes": self.bytes, "seconds": self.seconds}
        return {"trial": self.number, "valid": self.score, **self.settings, **costs}


def finished_trials(study: Any) -> list[Any]:
    """Trials that have a score, by their numbers in the search."""
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    return sorted(trials, key=lambda trial: int(trial.user_attrs[NUMBER]))


def settings_of_trial(trial: Any) -> dict[str, Value]:
    """A trial's settings; floats have ``DIGITS`` digits and are within their domains."""
    return {name: _rounded(trial.params[name], trial.distributions[name]) for name in trial.params}


def _rounded(value: Value, domain: Any) -> Value:
    """A drawn float with ``DIGITS`` digits, within its domain; all others as they are."""
    if not isinstance(value, float) or hasattr(domain, "choices"):
        return value
    return float(min(max(float(f"{value:.{DIGITS}g}"), domain.low), domain.high))


def read_trials(folder: Path) -> list[Trial]:
    """The finished trials of a search."""
    from optuna import load_study
    from optuna.storages import JournalStorage, journal

    if not (path := folder / STUDY).is_file():
        return []
    storage = JournalStorage(journal.JournalFileBackend(str(path)))
    return trials_of(load_study(study_name=None, storage=storage))


def trials_of(study: Any) -> list[Trial]:
    """The finished trials of a study in a folder."""
    return [
        Trial(settings=settings_of_trial(trial), score=trial.value, **trial.user_attrs)
        for trial in finished_trials(study)
    ]


def repeat_command(search: Mapping[str, Any]) -> str:
    """The command that repeats the best trial, from the content of ``tune.json``."""
    words = ["fedapp", "run", search["strategy"]]
    words += ["--engine", search["engine"]] if search["engine"] != "local" else []
    for name, value in search["settings"].items():
        words += ["-c", f"{name}={value_text(value)}"]
    return shlex.join(words)


def ranked(trials: Sequence[Trial], metric: str) -> list[Trial]:
    """Trials, best first; ties keep their order."""
    sign = -1 if larger_is_better(metric) else 1
    return sorted(trials, key=lambda trial: sign * trial.score)


def trial_table(trials: Sequence[Trial], metric: str) -> Table:
    """One line per trial, best first."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.settings))
    rows = [
        [str(trial.number), score_text(trial.score)]
        + [str(trial.settings.get(name, "")) for name in names]
        + cost_cells(trial.record)
        for trial in ranked(trials, metric)
    ]
    return terminal_table(["trial", f"valid {metric}", *names, *COST_NAMES], rows, 0, 0)


class Tuned(Finished):
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
        """A record for each trial, best first; a DataFrame if pandas is installed."""
        trials = ranked(read_trials(self.path), self.summary["metric"])
        return as_frame([trial.record for trial in trials])
