"""Settings that a command sets itself, and how a person says there what they say.

Each command, in a terminal and in Python, checks the settings that it is handed here; one that it
would overwrite is refused with the way, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedapp.errors import ConfigError

AGAIN = "the same command again continues"
OUTPUT = "--output names the folder"
METHOD = "the first argument names the method"
PLACED = "--data and --id, or predict-data in the sites' node configs, name the rows"
UNLOGGED = "fedapp run logs a model that it trains"
# Settings of a prediction with a divided model, which names the run, its rows and the way.
OF_PREDICTION = {
    "strategy": "--inference names the way",
    "model": "the argument RUN_DIR names it",
    "data": PLACED,
    "id": PLACED,
    "output": "--output names the file",
    "explain": "--explain names the rows",
    "resume": "the same command again begins again",
    "log": UNLOGGED,
}
SET_BY_COMMAND: Mapping[str, Mapping[str, str]] = {
    "run": {"strategy": METHOD},
    "compare": {
        "strategy": "the arguments name the methods",
        "run-dir": OUTPUT,
        "resume": AGAIN,
        "fold": "--folds runs all folds",
        "folds": "--folds runs all folds",
        "score-test": "it compares by the scores of test rows",
        "log": "fedapp run logs one run",
    },
    "tune": {
        "strategy": METHOD,
        "run-dir": OUTPUT,
        "resume": AGAIN,
        "score-test": "only the last run scores test rows",
    },
    "describe": {
        "strategy": "--vertical says how the columns are divided",
        "resume": "the same command again begins again",
        "log": UNLOGGED,
    },
    "predict": OF_PREDICTION,
    "federation activate": {
        **OF_PREDICTION,
        "strategy": "it is always standing",
        "standing.service": "--service names it",
        "standing.refresh": "--refresh is an option",
        "standing.none": "--none is an option",
    },
    "fit": {
        **dict.fromkeys(("data", "label", "weight", "base-margin", "id"), "fit has the rows"),
        "parties": "fit has the parties",
        "objective": "the labels of fit name it",
        "run-dir": "the estimator has the model",
        "resume": "warm_start continues",
    },
}


def check_set_by_command(command: str, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting that the command sets itself."""
    for name, way in SET_BY_COMMAND[command].items():
        if name in given:
            verb = command.rpartition(" ")[2]
            raise ConfigError(f"{name} must be omitted to {verb}: {way}, got {given[name]}")
