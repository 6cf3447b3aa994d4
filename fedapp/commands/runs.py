"""``fedapp runs``: what is in ./runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table as Grid

from fedapp.commands.common import console, say
from fedapp.home import RUNS

MOST = 20


def runs(
    show_all: Annotated[
        bool, typer.Option("--all", help=f"More than the last {MOST}, and those of comparisons.")
    ] = False,
) -> None:
    """List runs, comparisons, searches and folds in ./runs: state, test score, size."""
    from fedapp.report.summary import human_bytes
    from fedapp.run_folder import State
    from fedapp.runs.clean import list_runs

    listed = list_runs(RUNS, deep=show_all, tell=say, with_groups=True)
    shown = listed if show_all else listed[:MOST]
    if not listed:
        console.print(f"no runs in {RUNS}")
        return
    grid = Grid("run", "state", "method", "data", "test score", "size", "changed", box=None)
    grid.columns[0].overflow = "fold"
    for run in shown:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed))
        cells = (str(run.path.relative_to(RUNS)), run.state, run.method, Path(run.data).name)
        grid.add_row(*map(escape, cells), run.score, human_bytes(run.n_bytes), when)
    console.print(grid)
    if len(shown) < len(listed):
        console.print(f"{len(listed) - len(shown)} more: fedapp runs --all")
    resumable = [run for run in shown if run.state is State.RESUMABLE]
    for run in resumable[:1]:
        command = f"fedapp run {run.method} -c resume={run.path}"
        say(f"to resume: {command}")
