"""Options of a study's command, as the signature of its function declares them.

``--help`` reads a study's source instead of importing it, which takes seconds.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Option:
    """A parameter of a study: its default, or None for words without an option."""

    name: str
    default: Any = None


def command(function: Callable[..., Any], words: Sequence[str] | None = None) -> Any:
    """Call a study's function with the options of a command line, which its signature declares.

    A default gives an option its type: False is a switch, a tuple takes several values, a whole
    number must be >= 1 (or >= 0 if the default is 0). ``*names`` are words without an option.
    """
    parameters = inspect.signature(function).parameters.values()
    options = [
        Option(
            parameter.name,
            None if parameter.kind is parameter.VAR_POSITIONAL else parameter.default,
        )
        for parameter in parameters
    ]
    parsed = vars(parser(inspect.getdoc(function), options).parse_args(words)).items()
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in parsed}
    several = [
        value for option in options if option.default is None for value in values.pop(option.name)
    ]
    return function(*several, **values)


def parser(description: str | None, options: Sequence[Option]) -> argparse.ArgumentParser:
    """The parser of a study's options."""
    raw = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=description, formatter_class=raw)
    for option in options:
        flag, default = f"--{option.name.replace('_', '-')}", option.default
        if default is None:
            arguments.add_argument(option.name, nargs="*")
        elif isinstance(default, bool):
            arguments.add_argument(flag, action="store_true")
        else:
            values = default if isinstance(default, tuple) else (default,)
            value, nargs = next(iter(values), ""), "+" if values is default else None
            kind = partial(whole, int(value != 0)) if isinstance(value, int) else type(value)
            shown = f"by default {shlex.join(map(str, values))}" if default else None
            arguments.add_argument(flag, type=kind, nargs=nargs, default=default, help=shown)
    return arguments


def whole(least: int, text: str) -> int:
    """Parse a whole number."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, got {text}")
    return int(text)


class Constants(ast.NodeTransformer):
    """Replaces the names of constants by their values, and paths by their texts."""

    def __init__(self, file: ast.Module) -> None:
        self.values = {
            target.id: node.value
            for node in file.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self.visit(self.values[node.id]) if node.id in self.values else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        is_path = isinstance(node.func, ast.Name) and node.func.id == "Path"
        return self.visit(node.args[0]) if is_path else node


def described(path: Path, name: str) -> argparse.ArgumentParser | None:
    """The parser of a function in a file that is not imported; None if that takes an import."""
    file = ast.parse(path.read_text())
    functions = {node.name: node for node in file.body if isinstance(node, ast.FunctionDef)}
    if (function := functions.get(name)) is None:
        return None
    constants, arguments = Constants(file), function.args
    options = [Option(arguments.vararg.arg)] if arguments.vararg else []
    names = [*arguments.args, *arguments.kwonlyargs]
    with suppress(ValueError):  # a default that is no literal
        for argument, default in zip(
            names, [*arguments.defaults, *filter(None, arguments.kw_defaults)], strict=True
        ):
            value = ast.literal_eval(constants.visit(default))
            options.append(Option(argument.arg, value))
        return parser(ast.get_docstring(function), options)
    return None
