"""``--help``: what arguments are, and the methods as ``strategies`` has them."""

from __future__ import annotations

import inspect
import sys
from typing import Any, get_type_hints

import click
from rich.console import Console
from rich.panel import Panel
from rich.table import Table as Grid
from typer.core import TyperArgument, TyperCommand, TyperOption

SHORT = {"label": "Label column", "id": "Column that names the rows", "parties": "How many"}


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
    """One with options that are short for settings, whose help lists the methods that train."""

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        for name, what in SHORT.items():
            text = f"{what}, short for -c {name}=."
            self.params.append(TyperOption(param_decls=[f"--{name}"], multiple=True, help=text))

    def invoke(self, context: click.Context) -> Any:
        """With the short options among the settings."""
        given = {name: context.params.pop(name) or () for name in SHORT}
        pairs = [f"{name}={value}" for name, values in given.items() for value in values]
        context.params["config"] = [*(context.params["config"] or ()), *pairs]
        return super().invoke(context)

    def format_help(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The usual, and the methods."""
        super().format_help(context, formatter)
        _print_methods("Methods for the same columns, different rows", "horizontal")
        _print_methods("Methods for the same rows, different columns", "vertical")


class PredictingCommand(Command):
    """One whose help lists the ways to predict with a divided model."""

    def format_help(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The usual, and the ways."""
        super().format_help(context, formatter)
        _print_methods("Ways to predict with a model that is divided among parties", "inference")


def _print_methods(title: str, family: str) -> None:
    """A family's methods and what the first lines of their modules say, framed as the options."""
    from fedapp.messages.methods import all_methods
    from fedapp.server_app import load_strategy

    grid = Grid.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold cyan")
    for name in (name for name, method in all_methods().items() if method.family == family):
        said = (sys.modules[load_strategy(name).__module__].__doc__ or "").partition("\n")[0]
        said = (said.partition(": ")[2] or said).rstrip(".")
        grid.add_row(name, said[:1].upper() + said[1:])
    Console().print(Panel(grid, title=title, title_align="left", border_style="dim"))
