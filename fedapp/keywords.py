"""Settings as Python writes them: ``reg_lambda=1.0``, ``drop_columns=["id"]``,
``pax={"bins": "equal"}``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from fedapp.config import Value, defaults, flatten, settings_named
from fedapp.errors import ConfigError
from fedapp.trees.custom import CUSTOM, Functions, metric_name
from fedapp.trees.objective import AUTO

# Where a name in Python is not the setting's with underscores.
IN_PYTHON = {"lambda": "reg_lambda", "alpha": "reg_alpha"}
SETTING = re.compile(r"(?<![\w./-])(?:--)?([a-z]+(?:-[a-z]+)*(?:\.[a-z]+(?:-[a-z]+)*)?)(?![\w./-])")
UNKNOWN = re.compile(r"^[\w.-]+(?= is not a setting)")


def settings_of(strategy: str, given: Mapping[str, Any]) -> dict[str, Value]:
    """Settings by their names, nested ones joined by a dot.

    Parameters
    ----------
    strategy : whose settings come to mind first where a name is wrong.
    given : by their names in Python, a mapping for a method's own; None is the default.

    Raises
    ------
    ConfigError : a name that is no setting, with the one that is spelled alike; or a value that no
        setting can have.
    """
    flat: Mapping[str, Any] = flatten(_kebab(given))
    with told_in_python():
        named = settings_named(
            {name: flat[name] for name in flat if flat[name] is not None}, strategy
        )
    usual = defaults()
    return {name: _as_value(_in_python(name), value, usual[name]) for name, value in named.items()}


def functions_of(given: Mapping[str, Any]) -> tuple[dict[str, Any], Functions]:
    """Settings with names in place of functions, and the functions.

    Parameters
    ----------
    given : by their names in Python or their own; ``objective`` and ``eval_metric`` may be
        functions, the latter also one in a list.

    Raises
    ------
    ConfigError : there is more than one metric that is a function.
    """
    found, functions = dict(given), Functions()
    if callable(objective := given.get("objective")):
        found["objective"], functions = CUSTOM, Functions(objective)
    name = "eval-metric" if "eval-metric" in given else "eval_metric"
    asked = given.get(name)
    listed = list(asked) if isinstance(asked, Sequence) and not isinstance(asked, str) else [asked]
    own = [each for each in listed if callable(each)]
    if len(own) > 1:
        raise ConfigError(f"eval-metric must have one function at most, got {len(own)}")
    if own:
        found[name] = [metric_name(each) if callable(each) else each for each in listed]
        functions = Functions(functions.objective, own[0])
    return found, functions


def check_functions(functions: Functions, engine: str, baselines: bool = False) -> None:
    """Hold that functions stay in this process.

    Raises
    ------
    ConfigError : they would have to be sent, or the baselines to know them.
    """
    if functions == Functions():
        return
    if engine != "local":
        rule = "must be names with this engine, whose parties are other processes: functions are"
        raise ConfigError(
            f"objective and eval-metric {rule} never sent, and engine='local' calls them, "
            f"got a function with engine={engine!r}"
        )
    if baselines:
        rule = "must be False where objective or eval-metric is a function"
        raise ConfigError(f"baselines {rule}, got True")


def _kebab(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same with hyphens, sections too; constraints are mappings, but no sections."""
    sections = {name.partition(".")[0] for name in defaults() if "." in name}
    found = {}
    for name, value in given.items():
        setting = name.rstrip("_").replace("_", "-")
        is_section = isinstance(value, Mapping) and setting in sections
        if isinstance(value, Mapping) and not is_section:
            sign = "=" if setting == "schema" else ":"
            value = ",".join(f"{key}{sign}{each}" for key, each in value.items())
        found[setting] = _kebab(value) if is_section else value
    return found


def python_name(setting: str) -> str:
    """A general setting's name as Python writes it."""
    return IN_PYTHON.get(setting, setting.replace("-", "_"))


def _in_python(setting: str) -> str:
    """A setting's name as Python writes it."""
    section, dot, name = setting.rpartition(".")
    if dot:
        return f"{section.replace('-', '_')}={{{name.replace('-', '_')!r}: ...}}"
    return python_name(setting)


@contextmanager
def told_in_python(others: Mapping[str, str] | None = None) -> Iterator[None]:
    """Where the block raises an error on a setting, have it name settings as Python does.

    Parameters
    ----------
    others : what the caller calls settings, by their names, where that is something else still.
    """
    try:
        yield
    except ConfigError as error:
        called = others or {}

        def renamed(match: re.Match[str]) -> str:
            name = match[1]
            is_hint = text[: match.start()].endswith((" did you mean ", " or "))
            if name not in defaults() or not (match.start() == 0 or "-" in name or is_hint):
                return match[0]
            return called.get(name, _in_python(name))

        text = UNKNOWN.sub(lambda match: _in_python(match[0]), str(error))
        error.args = (SETTING.sub(renamed, text),)
        raise


def _as_value(name: str, value: object, usual: Value) -> Value:
    """A value as a run config holds it: lists are texts with commas between."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if name == "drop_columns" and (split := [each for each in value if "," in str(each)]):
            rule = f"{name} must be names without commas, got {split[0]!r}"
            raise ConfigError(f'{rule}: a schema drops a column by its type = "drop"')
        value = ",".join(_entry(each) for each in value)
    if name == "positive_label" and isinstance(value, bool):
        value = int(value)  # a label of booleans has the classes 0 and 1
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(usual, str) and usual != AUTO and is_number:
        return str(value)  # a column may be called 54
    if not isinstance(value, bool | int | float | str):
        kind = type(value).__name__
        raise ConfigError(f"{name} must be a text, a number, a truth value or a list, got {kind}")
    return value


def _entry(value: object) -> str:
    """One entry of a list, which may be a list of columns."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(str, value))}]"
    return str(value)
