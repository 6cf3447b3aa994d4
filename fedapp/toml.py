"""Parse TOML of untrusted files and commands."""

from __future__ import annotations

import tomllib
from typing import Any

from fedapp.errors import ConfigError

DEEPEST = 32  # nesting of tables and lists; fedapp's files have 4 levels at most


def read_toml(text: str, rule: str) -> dict[str, Any]:
    """Parse TOML; a ConfigError that begins with the rule if it is invalid or nested too deeply."""
    try:
        content = tomllib.loads(text)
        _check_depth(content, DEEPEST)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        why = error if isinstance(error, ValueError) else f"nested at most {DEEPEST} deep"
        raise ConfigError(f"{rule}: {why}") from None
    return content


def _check_depth(value: Any, deepest: int) -> None:
    """Refuse deep nesting by dotted keys; the parser itself only refuses deep lists."""
    if deepest < 0:
        raise RecursionError
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _check_depth(each, deepest - 1)
