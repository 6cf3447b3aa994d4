"""What the commands share: the console, ``-c``, and where and by what a run is carried out."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedapp.commands.engines import SIMULATED, check_engine, engine_of
from fedapp.config import Settings
from fedapp.errors import ConfigError, FedappError
from fedapp.folder_locks import check_free
from fedapp.home import shown
from fedapp.packages import check_extra
from fedapp.report.progress import Follower
from fedapp.run_folder import RunFolder, new_run_dir
from fedapp.start import INTERRUPTED

RUNS = Path("runs")
# Tables are cut to the width of a terminal; a file or a pipe has none.
console = Console() if sys.stdout.isatty() else Console(width=120)

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--config", "-c", metavar="KEY=VALUE", help="Override a setting; may be repeated."
    ),
]


def run_dir_of(settings: Settings, engine: str, parent: Path = RUNS) -> str:
    """Where the run is written, by default a new folder in ``parent``; a SuperLink elsewhere
    chooses a place of its own."""
    if not settings.run_dir and engine not in SIMULATED:
        return ""
    run_dir = Path(settings.run_dir or new_run_dir(settings.strategy, parent)).resolve()
    if not settings.resume:
        RunFolder(run_dir).check_new()
    run_dir.mkdir(parents=True, exist_ok=True)
    return str(run_dir)


@contextmanager
def passing(run_dir: str, stays: bool) -> Iterator[None]:
    """Delete a run's folder when the block has ended well; else keep it, and say where it is.

    Parameters
    ----------
    run_dir : empty where the folder lies on another machine.
    stays : whether it is kept anyway.
    """
    try:
        yield
    except FedappError:
        if run_dir:
            print(f"the run that failed is kept in {shown(Path(run_dir))}", file=sys.stderr)
        raise
    if run_dir and not stays:
        shutil.rmtree(run_dir)


def check_method(settings: Settings, engine: str) -> None:
    """Hold that the engine is known, and that the method trains, is set well, and can run here.

    Raises
    ------
    ConfigError : it is not.
    """
    from fedapp.messages.methods import all_methods
    from fedapp.server_app import load_strategy

    check_engine(engine)
    strategy = load_strategy(settings.strategy)
    if not all_methods()[settings.strategy].trains:
        rule = f"must be one that trains (fedapp predict --inference {settings.strategy} predicts)"
        raise ConfigError(f"strategy {rule}, got {settings.strategy!r}")
    strategy.check_settings(settings)
    if engine in SIMULATED:
        check_extra(settings.strategy)


def check_tables(settings: Settings, engine: str, follower: Follower) -> None:
    """Hold the tables to all rules of a run, where they lie here, before anything is started.

    Raises
    ------
    DataError, ConfigError : a table breaks one.
    """
    if engine in SIMULATED:
        from simulations.checks import check_tables

        follower.begin("reading and checking the tables")
        check_tables(settings)


command_began: ContextVar[float | None] = ContextVar("command_began", default=None)


def new_follower() -> Follower:
    """What shows where this command is, from its start on."""
    return Follower(console, command_began.get())


def carry_out(settings: Settings, engine: str, follower: Follower) -> RunFolder | None:
    """Have an engine carry out a run, and show where it is; its folder, where that is known here.

    Parameters
    ----------
    settings : with the run's folder, where it lies on this machine.
    engine : see ``engine_of``.
    """
    run = engine_of(engine, follower.begin)
    if not settings.run_dir:
        return run(settings)
    folder = RunFolder(Path(settings.run_dir))
    check_free(folder.path)  # before Flower is started
    with folder.held(), follower.run(folder, settings.watched_metric):
        return run(settings)


@contextmanager
def interruptible(what_now: Callable[[], str]) -> Iterator[None]:
    """Where the block is interrupted, print what is left and how to go on; end with status 130.

    Parameters
    ----------
    what_now : the text, asked for then.
    """
    try:
        yield
    except KeyboardInterrupt as stopped:
        # An engine knows more where the run goes on without this command.
        told = str(stopped) or what_now()
        print(f"\ninterrupted: {told}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
