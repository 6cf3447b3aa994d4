"""What a comparison or a search returns in Python: several runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from fedapp.home import display_path, write_atomically
from fedapp.report.summary import Trial, ranked
from fedapp.runs.clean import COMPARISON, SEARCH
from fedapp.runs.run import Finished, Run, as_frame

# The page of a comparison; trials of a search, and the folder of its best run.
PAGE, TRIALS, BEST = "comparison.html", "trials.jsonl", "best"


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
        from fedapp.report.comparison import score_table

        text = StringIO()
        console = Console(file=text, width=200, color_system=None, force_jupyter=False)
        console.print(score_table(self.summary["table"]))
        return f"{super().__repr__()}\n{text.getvalue().rstrip()}"

    def _repr_html_(self) -> str:
        from fedapp.report.comparison import score_html

        path = escape(display_path(self.path))
        return f"{score_html(self.summary['table'])}<small>{path}</small>"


def read_trials(folder: Path) -> list[Trial]:
    """The trials of a search so far; an incomplete last line is dropped."""
    path = folder / TRIALS
    text = path.read_text() if path.is_file() else ""
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        write_atomically(path, "".join(lines[:-1]).encode())
    return [Trial(**json.loads(line)) for line in lines if line.endswith("\n")]


def best_of(trials: Sequence[Trial], metric: str) -> Trial | None:
    """The trial with the best score, or None."""
    return next((trial for trial in ranked(trials, metric) if trial.score is not None), None)


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
        """A record for each trial, best first, those without a score last: a pandas DataFrame if
        pandas is installed, else a list of dicts."""
        records = [
            {
                "trial": trial.number,
                "state": trial.state,
                "valid": trial.score,
                **trial.settings,
                "exchanges": trial.exchanges,
                "bytes": trial.bytes,
                "seconds": trial.seconds,
            }
            for trial in ranked(read_trials(self.path), self.summary["metric"])
        ]
        return as_frame(records)
