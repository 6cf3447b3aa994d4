"""``--help``: what arguments are, and the methods as ``strategies`` has them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

import click
from rich.console import Console
from rich.panel import Panel
from rich.table import Table as Grid
from typer.core import TyperArgument, TyperCommand

SAME_COLUMNS, SAME_ROWS = "same columns, different rows", "same rows, different columns"


class Command(TyperCommand):
    """A command whose help says what its arguments are."""

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        # click 8.5 has a help of its own for arguments, and so drops the one that typer set.
        hints = get_type_hints(inspect.unwrap(named["callback"]), include_extras=True)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and not parameter.help:
                (info,) = hints[str(parameter.name)].__metadata__
                parameter.help = info.help


class TrainingCommand(Command):
    """One whose help lists the methods that train."""

    def format_help(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The usual, and the methods."""
        from fedapp.server_app import methods
        from strategies.vertical import VerticalStrategy

        super().format_help(context, formatter)
        for title, is_vertical in ((SAME_COLUMNS, False), (SAME_ROWS, True)):
            chosen = {
                name: strategy
                for name, strategy in methods(predict=False).items()
                if issubclass(strategy, VerticalStrategy) == is_vertical
            }
            _print_list(f"Methods for the {title}", dict(_described(chosen)))


class PredictingCommand(Command):
    """One whose help lists the ways to predict with a divided model."""

    def format_help(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The usual, and the ways."""
        from fedapp.server_app import methods

        super().format_help(context, formatter)
        found = dict(_described(methods(predict=True)))
        _print_list("Ways to predict with a model that is divided among parties", found)


def _described(chosen: Mapping[str, type]) -> Iterator[tuple[str, str]]:
    """Names, and what the first lines of their modules say."""
    for name, strategy in chosen.items():
        said = (sys.modules[strategy.__module__].__doc__ or "").partition("\n")[0]
        said = (said.partition(": ")[2] or said).rstrip(".")
        yield name, said[:1].upper() + said[1:]


def _print_list(title: str, lines: Mapping[str, str]) -> None:
    """In a frame as that of the options."""
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold cyan")
    for name, said in lines.items():
        grid.add_row(name, said)
    Console().print(Panel(grid, title=title, title_align="left", border_style="dim"))
