"""What the commands share: the console, ``-c``, what shows where a command is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated

import typer
from rich.console import Console

from fedapp.config import Value
from fedapp.errors import ConfigError
from fedapp.report.progress import Follower
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
    """Print a line as it is."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def folded(overrides: Mapping[str, Value], folds: int) -> dict[str, Value]:
    """The settings with those of the first of all folds; as they are where there are no folds.

    Raises
    ------
    ConfigError : ``-c`` names a fold as well.
    """
    if not folds:
        return dict(overrides)
    for name in sorted({"fold", "folds"} & set(overrides)):
        raise ConfigError(f"{name} must be omitted with --folds, which runs all of them")
    return {**overrides, "folds": folds, "fold": 1}


def new_follower() -> Follower:
    """What shows where this command is, from its start on."""
    return Follower(console, command_began.get())


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
