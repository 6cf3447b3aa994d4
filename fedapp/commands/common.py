"""Shared by the commands: the console, ``-c`` and progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated

import typer
from rich.console import Console

from fedapp.errors import ConfigError
from fedapp.report.progress import Follower
from fedapp.settings import Value
from fedapp.start import INTERRUPTED

ENGINES = (
    "local (the parties are simulated in this process), simulation (in Flower's own runtime), or "
    "the name of a SuperLink in Flower's configuration."
)
# Tables are cut to the width of a terminal; a file or a pipe has none.
console = Console() if sys.stdout.isatty() else Console(width=120)

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--config", "-c", metavar="KEY=VALUE", help="Override a setting; may be repeated."
    ),
]
Folds = Annotated[
    int,
    typer.Option(help="Cross-validate: hold back each of so many parts of the rows in turn."),
]

command_began: ContextVar[float | None] = ContextVar("command_began", default=None)


def say(text: str) -> None:
    """Print a line without markup or wrapping."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def folded(overrides: Mapping[str, Value], folds: int) -> dict[str, Value]:
    """Add the settings of the first fold, if there are folds; ConfigError if ``-c`` has some."""
    if not folds:
        return dict(overrides)
    for name in sorted({"fold", "folds"} & set(overrides)):
        raise ConfigError(f"{name} must be omitted with --folds, which runs all of them")
    return {**overrides, "folds": folds, "fold": 1}


def new_follower() -> Follower:
    """A progress display, timed from the start of this command."""
    return Follower(console, command_began.get())


@contextmanager
def interruptible(what_now: Callable[[], str]) -> Iterator[None]:
    """Turn an interrupt into exit status 130, and print what is saved and how to resume."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        # The engine has a text if the run continues without this command.
        print(f"\ninterrupted: {str(stopped) or what_now()}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
