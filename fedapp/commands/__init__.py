"""The ``fedapp`` command: arguments in, texts on the terminal out.

A file has the commands of one errand, each a function whose docstring is its ``--help``. The room
knows nothing of how a run, a page or a folder is made: ``fedapp.runs``, ``fedapp.report`` and
``fedapp.deploy`` do that, imported when a command needs them. Read ``run`` first.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Annotated

import psutil
import typer

from fedapp.commands.common import (
    Command,
    PredictingCommand,
    SettingsCommand,
    TrainingCommand,
    command_began,
)
from fedapp.commands.data import metrics
from fedapp.commands.predict import activate, export, predict, serve, standing
from fedapp.commands.run import compare, describe, retrain, run, settings, tune
from fedapp.commands.runs import audit, clean, documents, report, runs
from fedapp.commands.site import key, trust
from fedapp.errors import FedappError, RunFailedError, in_words
from fedapp.process import INTERRUPTED, STOPPING, handle_stopping

cli = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Tree models trained across organisations that may not pool their rows.",
)
cli.command(cls=TrainingCommand)(run)
cli.command(cls=TrainingCommand)(compare)
cli.command(cls=TrainingCommand)(tune)
cli.command(cls=SettingsCommand)(describe)
cli.command(cls=PredictingCommand)(predict)
for _command in (
    retrain,
    settings,
    report,
    documents,
    audit,
    export,
    activate,
    standing,
    serve,
    metrics,
    runs,
    clean,
    key,
    trust,
):
    cli.command(cls=Command)(_command)


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
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the versions of fedapp, Flower, XGBoost and Python.",
        ),
    ] = False,
) -> None:
    """Tree models trained across organisations that may not pool their rows."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; later signals must not disturb the end of what the command began."""
    for stopping in STOPPING:
        signal.signal(stopping, signal.SIG_IGN)
    raise KeyboardInterrupt


def _leave() -> None:
    """Exit at once: a party in this process, or its worker, may compute for minutes."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


def main() -> None:
    """Run the command; an error of fedapp prints one line and exits with status 1."""
    from fedapp.commands.data import data_app
    from fedapp.commands.site import app_app, federation_app, site_app

    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.ERROR)
    logging.getLogger("fedapp.site").setLevel(logging.CRITICAL)
    cli.add_typer(app_app, name="app")
    cli.add_typer(data_app, name="data")
    cli.add_typer(site_app, name="site")
    cli.add_typer(federation_app, name="federation")
    handle_stopping(_interrupt)
    command_began.set(psutil.Process().create_time())
    try:
        cli()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            _leave()
        raise
    except OSError as error:
        print(f"error: {in_words(error)}", file=sys.stderr)
        sys.exit(1)
    except FedappError as error:
        for line in error.log_lines if isinstance(error, RunFailedError) else ():
            print(line, file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
