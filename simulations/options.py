"""Options of a study's command, as the signature of its function declares them."""

from __future__ import annotations

import argparse
import inspect
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any


def command(function: Callable[..., Any], words: Sequence[str] | None = None) -> Any:
    """Call a study's function with the options of a command line, which its signature declares.

    A default gives an option its type: False is a switch, a tuple takes several values, a whole
    number must be >= 1 (or >= 0 if the default is 0). ``*names`` are words without an option.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=inspect.getdoc(function), formatter_class=raw)
    words_of = ""
    for name, parameter in inspect.signature(function).parameters.items():
        flag, default = f"--{name.replace('_', '-')}", parameter.default
        if parameter.kind is parameter.VAR_POSITIONAL:
            parser.add_argument(words_of := name, nargs="*")
        elif isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            values = default if isinstance(default, tuple) else (default,)
            value, nargs = next(iter(values), ""), "+" if values is default else None
            kind = partial(whole, int(value != 0)) if isinstance(value, int) else type(value)
            shown = f"by default {shlex.join(map(str, values))}" if default else None
            parser.add_argument(flag, type=kind, nargs=nargs, default=default, help=shown)
    parsed = vars(parser.parse_args(words)).items()
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in parsed}
    return function(*options.pop(words_of, ()), **options)


def whole(least: int, text: str) -> int:
    """Parse a whole number."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, got {text}")
    return int(text)
