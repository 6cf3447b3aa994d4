"""``fedapp run``: train a model."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fedapp.commands.common import (
    Overrides,
    carry_out,
    check_method,
    check_tables,
    console,
    interruptible,
    new_follower,
    run_dir_of,
)
from fedapp.commands.engines import HELP as ENGINES
from fedapp.commands.engines import SIMULATED, told
from fedapp.config import Settings, load_settings, parse_overrides
from fedapp.errors import ConfigError
from fedapp.home import shown
from fedapp.report.progress import Follower, kept_text
from fedapp.run_folder import RunFolder, resumed_settings


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
    follower, begun = new_follower(), Begun(strategy, engine, baselines)
    with interruptible(begun.what_now), follower.alive():
        follower.begin("reading the settings")
        settings = _checked(strategy, config or [], engine, baselines)
        check_tables(settings, engine, follower)
        settings = settings.model_copy(update={"run_dir": run_dir_of(settings, engine)})
        begun.folder = RunFolder(Path(settings.run_dir)) if settings.run_dir else None
        follower.tell(told(engine))
        earlier = begun.earlier_seconds
        folder = carry_out(settings, engine, follower)
        if folder is None or not (folder.path / "summary.json").exists():
            follower.tell("The run has finished; its folder lies where the ServerApp runs.")
            return
        if baselines:
            follower.begin("training the baselines")
            _add_baselines(folder, settings)
        if engine in SIMULATED:
            follower.begin("explaining the model on test rows")
            _add_contributions(folder, settings)
        _finish(folder, follower, earlier)
    _show(folder)


@dataclass(slots=True)
class Begun:
    """What is known of a command when it is interrupted.

    Parameters
    ----------
    strategy, engine, baselines : as given.
    folder : of the run; None before there is one, and where it lies on another machine.
    """

    strategy: str
    engine: str
    baselines: bool
    folder: RunFolder | None = None

    @property
    def earlier_seconds(self) -> float:
        """Seconds of the attempts that the run goes on from."""
        kept = self.folder.kept if self.folder else None
        return kept.seconds[0] if kept else 0.0

    def what_now(self) -> str:
        """What was saved, and the command that goes on from there."""
        path = self.folder.path if self.folder else None
        where = shown(path) if path else ""
        if path and (path / "summary.json").exists():
            again = shlex.join(["fedapp", "report", where])
            return f"the run is complete and saved in {where}; its page is written by\n  {again}"
        if self.engine not in SIMULATED:
            return f"the run may have begun; its state is told by\n  flwr list {self.engine}"
        if self.folder is None or not (self.folder.path / "config.toml").exists():
            return "nothing was saved yet; the same command begins anew"
        words = ["fedapp", "run", self.strategy, "--engine", self.engine]
        words += ["--baselines"] if self.baselines else []
        words += ["-c", f"resume={where}"]
        kept = self.folder.kept
        saved = f"saved up to {kept_text(kept)} in {where}" if kept else "nothing was saved yet"
        return f"{saved}; to resume:\n  {shlex.join(words)}"


def _checked(strategy: str, config: list[str], engine: str, baselines: bool) -> Settings:
    """The settings of the run."""

    settings = load_settings({**parse_overrides(config), "strategy": strategy})
    if settings.init_model and engine in SIMULATED:
        path = str(Path(settings.init_model).resolve())
        settings = settings.model_copy(update={"init_model": path})
    settings = resumed_settings(settings)
    check_method(settings, engine)
    if baselines and settings.init_model:
        rule = "must be empty with --baselines, which begin without a model"
        raise ConfigError(f"init-model {rule}, got {settings.init_model}")
    if baselines and engine not in SIMULATED:
        raise ConfigError(f"--baselines must have all rows in one place, got --engine {engine}")
    return settings


def _add_baselines(folder: RunFolder, settings: Settings) -> None:
    """Write the baselines into the summary."""
    from simulations.baselines import run_baselines

    folder.add_to_summary({"baselines": run_baselines(settings)})


def _finish(folder: RunFolder, follower: Follower, earlier: float) -> None:
    """Write the page; the total time is that of this command and of earlier attempts."""
    from fedapp.server_app import write_report

    follower.begin("writing the report")
    folder.set_total_seconds(earlier + follower.seconds)  # for the page
    write_report(folder)
    folder.set_total_seconds(earlier + follower.seconds)


def _add_contributions(folder: RunFolder, settings: Settings) -> None:
    """Write into the summary what moves the predictions of the test rows, which all lie here."""
    from simulations.contributions import contributions

    folder.add_to_summary({"contributions": contributions(settings, folder.path)})


def _show(folder: RunFolder) -> None:
    """Print a run's summary and where it lies."""
    from fedapp.report.summary import print_summary, read_run

    print_summary(read_run(folder.path).summary, console, folder.path)
