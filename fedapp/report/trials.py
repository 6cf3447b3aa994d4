"""Trials of a search on the terminal, best first, and the command that repeats the best."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedapp.report.summary import human_bytes, human_seconds, score_text
from fedapp.studies import Trial, ranked


def trial_table(trials: Sequence[Trial], metric: str) -> Table:
    """One line per trial; trials without a score come last."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.settings))
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("trial", f"valid {metric}", *names, "exchanges", "bytes", "train"):
        table.add_column(escape(name), justify="right", overflow="fold")
    for place, trial in enumerate(ranked(trials, metric)):
        table.add_row(
            str(trial.number),
            trial.state if trial.score is None else score_text(trial.score),
            *(escape(str(trial.settings.get(name, ""))) for name in names),
            f"{trial.exchanges:,}",
            human_bytes(trial.bytes),
            "" if trial.seconds is None else human_seconds(trial.seconds),
            style="bold" if not place and trial.score is not None else None,
        )
    return table


def repeating(found: Mapping[str, Any]) -> str:
    """The command that repeats the best trial, from the content of ``tune.json``."""
    words = ["fedapp", "run", found["strategy"]]
    words += ["--engine", found["engine"]] if found["engine"] != "local" else []
    for name, value in found["settings"].items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        words += ["-c", f"{name}={text}"]
    return shlex.join(words)
