"""``fedapp run``: train a model."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from fedapp.commands.common import ENGINES, Overrides, console, interruptible, new_follower
from fedapp.config import parse_overrides
from fedapp.engines import SIMULATED
from fedapp.home import shown
from fedapp.report.progress import kept_text
from fedapp.run_folder import RunFolder
from fedapp.session import Training


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
) -> None:
    """Train a model and write the run's folder."""
    follower = new_follower()
    training = Training(strategy, {}, engine, baselines, follower)
    with interruptible(lambda: what_now(training)), follower.alive():
        training.given = parse_overrides(config or [])
        folder = training.carry_out()
    if folder:
        _show(folder)


def what_now(training: Training) -> str:
    """What an interrupted command has saved, and the one that goes on from there."""
    folder, engine = training.folder, training.engine
    where = shown(folder.path) if folder else ""
    if folder and (folder.path / "summary.json").exists():
        again = shlex.join(["fedapp", "report", where])
        return f"the run is complete and saved in {where}; its page is written by\n  {again}"
    if engine not in SIMULATED:
        return f"the run may have begun; its state is told by\n  flwr list {engine}"
    if folder is None or not (folder.path / "config.toml").exists():
        return "nothing was saved yet; the same command begins anew"
    words = ["fedapp", "run", training.strategy, "--engine", engine]
    words += ["--baselines"] if training.baselines else []
    words += ["-c", f"resume={where}"]
    kept = folder.kept
    saved = f"saved up to {kept_text(kept)} in {where}" if kept else "nothing was saved yet"
    return f"{saved}; to resume:\n  {shlex.join(words)}"


def _show(folder: RunFolder) -> None:
    """Print a run's summary and where it lies."""
    from fedapp.report.summary import print_summary, read_run

    print_summary(read_run(folder.path).summary, console, folder.path)
