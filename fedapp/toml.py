"""TOML from files and commands, which may be anybody's."""

from __future__ import annotations

import tomllib
from typing import Any

from fedapp.errors import ConfigError

DEEPEST = 32  # tables and lists in one another; fedapp's files have 4 at most


def read_toml(text: str, rule: str) -> dict[str, Any]:
    """Parse TOML; a ConfigError, which begins with the rule, where it is none or too deep."""
    try:
        found = tomllib.loads(text)
        _check_depth(found, DEEPEST)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        why = error if isinstance(error, ValueError) else f"nested at most {DEEPEST} deep"
        raise ConfigError(f"{rule}: {why}") from None
    return found


def _check_depth(value: Any, deepest: int) -> None:
    """Refuse what dotted keys nest too deeply, as the parser refuses lists."""
    if deepest < 0:
        raise RecursionError
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _check_depth(each, deepest - 1)
