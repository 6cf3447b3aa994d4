"""Settings as people write them: ``-c name=value`` on the command line, keywords in Python."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np

from fedapp.errors import ConfigError, check_rules
from fedapp.home import read_toml
from fedapp.known_names import setting_of
from fedapp.sections import flatten
from fedapp.settings import Value, check_names, defaults, settings_named
from fedapp.trees.custom import CUSTOM, Functions, metric_name
from fedapp.trees.objective import AUTO

# Names in Python that are not the setting's with underscores.
IN_PYTHON = {"lambda": "reg_lambda", "alpha": "reg_alpha"}
# A setting's name in an error text: not part of a path, a number or a longer word.
_WORDS = r"[a-z]+\d?(?:-[a-z]+)*"
SETTING = re.compile(rf"(?<![\w./-])(?:--)?({_WORDS}(?:\.{_WORDS})?)(?![\w./-])")
UNKNOWN = re.compile(r"^[\w.-]+(?= is not a setting| must be omitted for )")


def parse_overrides(pairs: Iterable[str]) -> dict[str, Value]:
    """Read ``key=value`` pairs, each key with one value; a value that is no TOML is a text."""
    overrides: dict[str, Value] = {}
    for pair in pairs:
        written, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"a setting must be written as key=value, got {pair}")
        name = written.strip().replace("_", "-")
        try:
            value = read_toml(f"value = {text}", "value")["value"]
        except ConfigError:
            value = text
        default = defaults().get(name)
        if isinstance(default, str) and default != AUTO and not isinstance(value, str):
            value = text.strip()  # a column may be called 54
        value = value if isinstance(value, bool | int | float) else str(value)
        first = overrides.setdefault(name, value)
        if first is not value and first != value:  # nan is unequal to itself
            raise ConfigError(f"{name} must be given once, got {overrides[name]} and {text}")
    return overrides


_ONE_TABLE = "data has rows and labels in one table, and label is a column's name, as in "
_ONE_TABLE += "fedapp.run(..., data=X.assign(target=y), label='target'); estimators have fit(X, y)"
_UNPACKED = "settings are arguments of their own, as in eta=0.1, max_depth=4 or **{}"
# Arguments of other libraries, which are no settings, and what is written in their place.
OF_OTHERS = {
    **dict.fromkeys(("X", "y"), _ONE_TABLE),
    **dict.fromkeys(("params", "config", "settings"), _UNPACKED),
    **dict.fromkeys(("verbose", "verbosity", "verbose_eval"), "progress=True shows progress"),
}


def check_arguments(given: Iterable[str]) -> None:
    """Raise ConfigError for an argument of another library, with the call that is right here."""
    for name in given:
        if way := OF_OTHERS.get(name):
            raise ConfigError(f"{name} must be omitted: {way.format(name)}")


def settings_of(
    strategy: str, given: Mapping[str, Any], keywords: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Value]:
    """Convert keyword arguments to settings by their full names; None is the default.

    ConfigError if a name is unknown, or a value has a type that no setting has; it names settings
    as in ``keywords``, if they are there.
    """
    check_arguments(given)
    flat = in_kebab_case(given)
    with naming_python_keywords(keywords):
        named = settings_named(flat, strategy)
    return {
        name: _as_value(keywords.get(name, _in_python(name)), value, defaults()[name])
        for name, value in named.items()
    }


def in_kebab_case(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments by names as in files, those of sections with a dot; without None."""
    flat: Mapping[str, Any] = flatten(_kebab(given))
    return {name: value for name, value in flat.items() if value is not None}


def check_parameters(
    values: Mapping[str, Any], parameters: Collection[str], settings: Mapping[str, str], method: str
) -> None:
    """Raise ConfigError for a name that is no parameter; ``settings`` are those of parameters."""
    unknown = [key for key in values if key.partition("__")[0] not in parameters]
    check_arguments(unknown)
    for name in unknown:
        setting = setting_of(name, defaults(), method)
        check_names({setting: values[name]}, method)
        near = next((key for key in settings if settings[key] == setting), "")
        way = f"; did you mean {near}?" if near else ": it follows from fit, or is in settings"
        raise ConfigError(f"parameters must be the estimator's, got {name}{way}")


def functions_of(given: Mapping[str, Any]) -> tuple[dict[str, Any], Functions]:
    """Replace functions in settings by names; returns the settings and the functions.

    ``objective`` and ``eval_metric`` may be functions, the latter also one function in a list.
    """
    named, functions = dict(given), Functions()
    if callable(objective := given.get("objective")):
        named["objective"], functions = CUSTOM, Functions(objective)
    name = "eval-metric" if "eval-metric" in given else "eval_metric"
    value = given.get(name)
    metrics = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    callables = [metric for metric in metrics if callable(metric)]
    if len(callables) > 1:
        raise ConfigError(f"eval-metric must have one function at most, got {len(callables)}")
    if callables:
        named[name] = [metric_name(metric) if callable(metric) else metric for metric in metrics]
        functions = Functions(functions.objective, callables[0])
    return named, functions


def check_functions(functions: Functions, engine: str, baselines: bool = False) -> None:
    """Raise ConfigError if functions would have to leave this process, or reach the baselines."""
    if functions == Functions():
        return
    rule = "be names with this engine, whose parties are other processes: functions are never sent"
    rule += ", and engine='local' calls them"
    got = f"a function with engine={engine!r}"
    check_rules(
        ("objective and eval-metric", engine == "local", rule, got),
        ("baselines", not baselines, "be False where objective or eval-metric is a function", True),
    )


def _kebab(given: Mapping[str, Any]) -> dict[str, Any]:
    """Names with hyphens, also in sections; other mappings (constraints, schema) become texts."""
    sections = {name.partition(".")[0] for name in defaults() if "." in name}
    named = {}
    for name, value in given.items():
        setting = name.rstrip("_").replace("_", "-")
        is_section = isinstance(value, Mapping) and setting in sections
        if isinstance(value, Mapping) and not is_section:
            sign = "=" if setting == "schema" else ":"
            value = ",".join(f"{key}{sign}{entry}" for key, entry in value.items())
        named[setting] = _kebab(value) if is_section else value
    return named


def python_name(setting: str) -> str:
    """A setting's keyword in Python; it is in no section."""
    return IN_PYTHON.get(setting, setting.replace("-", "_"))


def _in_python(setting: str) -> str:
    """A setting's keyword in Python, as ``pax={'bins': ...}`` if it is in a section."""
    section, dot, name = setting.rpartition(".")
    if dot:
        return f"{section.replace('-', '_')}={{{name.replace('-', '_')!r}: ...}}"
    return python_name(setting)


@contextmanager
def naming_python_keywords(
    others: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[None]:
    """Let ConfigErrors name settings by their keywords in Python, or as in ``others``."""
    try:
        yield
    except ConfigError as error:

        def renamed(match: re.Match[str]) -> str:
            # A plain word such as "label" is a setting only as the subject or in a hint.
            name = match[1]
            is_hint = text[: match.start()].endswith((" did you mean ", " nearest is ", " or "))
            if name not in defaults() or not (match.start() == 0 or "-" in name or is_hint):
                return match[0]
            return others.get(name, _in_python(name))

        text = UNKNOWN.sub(lambda match: others.get(match[0], _in_python(match[0])), str(error))
        error.args = (SETTING.sub(renamed, text),)
        raise


def _as_value(name: str, value: object, default: Value) -> Value:
    """Convert a value for a run config; lists become texts with commas."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if name == "drop_columns" and (split := [entry for entry in value if "," in str(entry)]):
            rule = f"{name} must be names without commas, got {split[0]!r}"
            raise ConfigError(f'{rule}: a schema drops a column by its type = "drop"')
        # An entry may be a list itself: columns that may interact.
        value = ",".join(
            f"[{','.join(map(str, entry))}]"
            if isinstance(entry, Sequence) and not isinstance(entry, str)
            else str(entry)
            for entry in value
        )
    if name == "positive_label" and isinstance(value, bool):
        return str(value)  # a label of booleans has the classes False and True
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, str) and default != AUTO and is_number:
        return str(value)  # a column may be called 54
    if not isinstance(value, bool | int | float | str):
        kind = type(value).__name__
        raise ConfigError(f"{name} must be a text, a number, a truth value or a list, got {kind}")
    return value
