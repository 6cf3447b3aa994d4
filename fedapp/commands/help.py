"""``--help``: descriptions of the arguments, and lists of the methods."""

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
    """A command whose help describes its arguments."""

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        # click 8.5 also has a help for arguments, and so drops the one that typer set.
        hints = get_type_hints(inspect.unwrap(named["callback"]), include_extras=True)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and not parameter.help:
                (info,) = hints[str(parameter.name)].__metadata__
                parameter.help = info.help


class TrainingCommand(Command):
    """A command with short options for settings; its help lists the methods that train."""

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        for name, what in SHORT.items():
            text = f"{what}, short for -c {name}=."
            self.params.append(TyperOption(param_decls=[f"--{name}"], multiple=True, help=text))

    def invoke(self, context: click.Context) -> Any:
        """Add the short options to the settings."""
        given = {name: context.params.pop(name) or () for name in SHORT}
        pairs = [f"{name}={value}" for name, values in given.items() for value in values]
        context.params["config"] = [*(context.params["config"] or ()), *pairs]
        return super().invoke(context)

    def format_help(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Format the help, and append the methods."""
        super().format_help(context, formatter)
        _print_methods("Methods for the same columns, different rows", "horizontal")
        _print_methods("Methods for the same rows, different columns", "vertical")


class PredictingCommand(Command):
    """A command whose help lists the ways to predict with a divided model."""

    def format_help(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Format the help, and append the ways."""
        super().format_help(context, formatter)
        _print_methods("Ways to predict with a model that is divided among parties", "inference")


def _print_methods(title: str, family: str) -> None:
    """Print a family's methods and the first lines of their modules, framed like the options."""
    from fedapp.messages.fields import all_methods
    from fedapp.server_app import load_strategy

    grid = Grid.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold cyan")
    for name in (name for name, method in all_methods().items() if method.family == family):
        title_line = (sys.modules[load_strategy(name).__module__].__doc__ or "").partition("\n")[0]
        text = (title_line.partition(": ")[2] or title_line).rstrip(".")
        grid.add_row(name, text[:1].upper() + text[1:])
    Console().print(Panel(grid, title=title, title_align="left", border_style="dim"))
