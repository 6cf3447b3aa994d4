"""``fedapp run``: train a model."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedapp.commands.common import (
    ENGINES,
    Folds,
    Overrides,
    console,
    folded,
    interruptible,
    new_follower,
)
from fedapp.home import display_path
from fedapp.metrics import AT_THRESHOLD
from fedapp.report.progress import checkpoint_text
from fedapp.report.summary import (
    print_summary,
    print_warning,
    read_run,
    score_names,
    score_text,
)
from fedapp.runs.engines import SIMULATED
from fedapp.runs.session import Training
from fedapp.settings import parse_overrides

NOTHING_SAVED = "nothing was saved yet; the same command begins anew"


def run(
    strategy: Annotated[
        str,
        typer.Argument(help="The method: one of those below."),
    ],
    config: Overrides = None,
    engine: Annotated[
        str,
        typer.Option(help=ENGINES),
    ] = "local",
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Also train on pooled rows, and each party alone.")
    ] = False,
    folds: Folds = 0,
) -> None:
    """Train a model and write the run's folder; with --folds a run for each fold."""
    if folds:
        _cross_validate(strategy, config, engine, baselines, folds)
        return
    follower = new_follower()
    training = Training(strategy, {}, engine, baselines, follower)
    with interruptible(lambda: what_now(training)), follower.alive():
        training.given = parse_overrides(config or [])
        folder = training.carry_out()
    if folder:
        print_summary(read_run(folder.path).summary, console, folder.path)


def _cross_validate(
    strategy: str, config: list[str] | None, engine: str, baselines: bool, folds: int
) -> None:
    from fedapp.runs.compare import CrossValidation, other_code
    from fedapp.runs.run import FOLDS, Folds

    follower = new_follower()
    all_folds = CrossValidation(strategy, {}, engine, baselines, follower)

    def left() -> str:
        if all_folds.folder is None:
            return NOTHING_SAVED
        where = shlex.quote(display_path(all_folds.folder.path))
        return f"finished folds are saved; the same command with -c run-dir={where} goes on"

    with interruptible(left), follower.alive():
        all_folds.given = folded(parse_overrides(config or []), folds)
        folder = all_folds.carry_out()
    console.print(_fold_table(Folds(folder.path).scores))
    where = display_path(folder.path / FOLDS)
    console.print(f"mean ± standard deviation over {folds} folds: {where}", soft_wrap=True)
    if warning := other_code(folder.path):
        print_warning(console, warning)


def _fold_table(scores: Mapping[str, Any]) -> Table:
    """Mean and standard deviation over the folds, by score, and by model and rows."""
    scores = {name: line for name, line in scores.items() if line}
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("score", no_wrap=True)
    for place, name in enumerate(scores):
        table.add_column(escape(name), justify="right", style=None if place else "bold")
    for name in score_names(list(scores.values())):
        if name not in AT_THRESHOLD:
            spreads = [line.get(name, {}) for line in scores.values()]
            texts = [(score_text(each.get("mean")), score_text(each.get("sd"))) for each in spreads]
            table.add_row(name, *(f"{mean} ± {sd}" for mean, sd in texts))
    return table


def what_now(training: Training) -> str:
    """What an interrupted command has saved, and the command that resumes it."""
    folder, engine = training.folder, training.engine
    where = display_path(folder.path) if folder else ""
    if folder and (folder.path / "summary.json").exists():
        again = shlex.join(["fedapp", "report", where])
        return f"the run is complete and saved in {where}; its page is written by\n  {again}"
    if engine not in SIMULATED:
        return f"the run may have begun; its state is shown by\n  flwr list {engine}"
    if folder is None or not (folder.path / "config.toml").exists():
        return NOTHING_SAVED
    words = ["fedapp", "run", training.strategy, "--engine", engine]
    words += ["--baselines"] if training.baselines else []
    words += ["-c", f"resume={where}"]
    state = folder.kept
    saved = f"saved up to {checkpoint_text(state)} in {where}" if state else "nothing was saved yet"
    return f"{saved}; to resume:\n  {shlex.join(words)}"
