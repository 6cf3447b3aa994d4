"""The ``fedapp`` command: arguments in, texts on the terminal out.

A file has the commands of one errand, each a function whose docstring is its ``--help``. The room
knows nothing of how a run, a page or a folder is made: ``fedapp.runs``, ``fedapp.report`` and
``fedapp.deploy`` do that, imported when a command needs them. Read ``run`` first.
"""

from __future__ import annotations

import atexit
import errno
import logging
import platform
import signal
import sys
from contextlib import suppress
from typing import Annotated

import psutil
import typer
from typer import Option

from fedapp.commands.common import (
    Command,
    Group,
    PredictingCommand,
    SettingsCommand,
    TrainingCommand,
    command_began,
    if_interrupted,
    print_interrupted,
)
from fedapp.commands.data import data_app
from fedapp.commands.federation import federation_app
from fedapp.commands.predict import export, predict, serve
from fedapp.commands.run import compare, describe, run, settings, tune
from fedapp.commands.runs import audit, documents, report, runs_app
from fedapp.commands.site import site_app
from fedapp.errors import FedappError, RunFailedError, in_words
from fedapp.process import handle_stopping, interrupt, is_interrupted, leave_now, leaving
from fedapp.terminal import clean_streams, one_line

FULL = (errno.ENOSPC, errno.EDQUOT)
TRAIN, USE, OPERATE = "Train", "Use", "Operate"
cli = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Tree models trained across organisations that may not pool their rows.",
)
for _command, _class, _panel in (
    (run, TrainingCommand, TRAIN),
    (compare, TrainingCommand, TRAIN),
    (tune, TrainingCommand, TRAIN),
    (describe, SettingsCommand, TRAIN),
    (settings, Command, TRAIN),
    (predict, PredictingCommand, USE),
    (export, Command, USE),
    (report, Command, USE),
    (audit, Command, USE),
    (documents, Command, USE),
    (serve, Command, OPERATE),
):
    cli.command(cls=_class, rich_help_panel=_panel)(_command)
cli.add_typer(data_app, name="data", rich_help_panel=TRAIN)
cli.add_typer(runs_app, name="runs", rich_help_panel=USE)
cli.add_typer(site_app, name="site", rich_help_panel=OPERATE)
cli.add_typer(federation_app, name="federation", rich_help_panel=OPERATE)


def _show_version(wanted: bool) -> None:
    if wanted:
        from fedapp.process import versions

        numbers = {**versions(("fedapp", "flwr", "xgboost")), "python": platform.python_version()}
        print(", ".join(f"{name} {number}" for name, number in numbers.items()))
        raise typer.Exit


@cli.callback()
def _begin(
    version: Annotated[
        bool,
        Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the versions of fedapp, Flower, XGBoost and Python.",
        ),
    ] = False,
) -> None:
    """Tree models trained across organisations that may not pool their rows."""


def main() -> None:
    """Run the command; an interrupt prints what now, and exits with status 130."""
    clean_streams()
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.ERROR)
    logging.getLogger("fedapp.site").setLevel(logging.CRITICAL)
    command_began.set(psutil.Process().create_time())
    # At last, as Python's end takes a second, in which a signal would be the status.
    atexit.register(handle_stopping, signal.SIG_IGN)
    handle_stopping(interrupt)
    try:
        _carry_out()
    finally:
        # Also where a library made another error of the interrupt.
        if is_interrupted():
            print_interrupted()
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            leave_now()
        handle_stopping(leaving("the command has finished"))


def _carry_out() -> None:
    """Run the command; an error of fedapp prints one line and exits with status 1."""
    try:
        cli()
    except OSError as error:
        way_on = getattr(error, "__notes__", [])
        print(f"error: {'; '.join([in_words(error), *way_on])}", file=sys.stderr)
        if error.errno in FULL and (what_now := if_interrupted.get()):
            print(f"free some space; {what_now()}", file=sys.stderr)
        sys.exit(1)
    except FedappError as error:
        for line in error.log_lines if isinstance(error, RunFailedError) else ():
            print(line, file=sys.stderr)
        print(one_line(f"error: {error}"), file=sys.stderr)
        sys.exit(1)
