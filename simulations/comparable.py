"""What methods must have in common to be compared, and the folder of a comparison."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.config import Settings, Value, flatten, load_settings, settings_named
from fedapp.data.partition import SUBSETS
from fedapp.data.sources import party_sources
from fedapp.errors import ConfigError
from fedapp.home import private_folder
from fedapp.run_folder import RunFolder
from fedapp.server_app import check_read, load_strategy
from fedapp.studies import CLAIM
from simulations.baselines import BY_COLUMNS, BY_ROWS, baseline_rows, baselines_of
from simulations.kept import TABLE, check_same, table_digest

# Settings of a comparison that its lines and facts name.
STATED = {"strategy", "data", "seed", "parties", "objective", "run-dir", "resume"}
# Settings that every method of a comparison must read: they decide on columns and scores.
ALL_READ = ("eval-metric", "base-margin")


def check_comparable(runs: Sequence[Settings], n_seeds: int) -> None:
    """Hold, before a table is read, that methods can be compared as they are asked for.

    Raises
    ------
    ConfigError : a method is named twice, does not run once, cannot hold back the same rows, or
        goes on from a model.
    """
    if n_seeds < 1:
        raise ConfigError(f"seeds must be >= 1, got {n_seeds}")
    if model := next((run.init_model for run in runs if run.init_model), ""):
        rule = "must be empty in a comparison, whose baselines begin without a model"
        raise ConfigError(f"init-model {rule}, got {model}")
    if runs[0].log:
        rule = "must be empty in a comparison (fedapp run logs its run)"
        raise ConfigError(f"log {rule}, got {runs[0].log}")
    for name, count in Counter(run.strategy for run in runs).items():
        if count > 1:
            raise ConfigError(
                f"strategies must be named once each, got {name} {count} times; "
                f"--seeds {count} makes {count} runs of every method"
            )
    kinds = _kinds(runs)
    if len(kinds) > 1 and party_sources(runs[0].data, runs[0].parties):
        raise ConfigError(
            f"data must be one table to split, because {_beside(kinds)} cannot hold back the same "
            f"rows of tables of their own; got {runs[0].data!r}"
        )


def same_rows(runs: Sequence[Settings]) -> dict[str, int]:
    """Numbers of the rows that train, validate and test each of these runs, the same in all.

    Raises
    ------
    ConfigError : they do not have the same rows, or there are no test rows.
    DataError : a table breaks a rule.
    """
    kinds = _kinds(runs)
    splits = {kind: baseline_rows(run)[0].in_table_order().split for kind, run in kinds.items()}
    first = next(iter(splits.values()))
    if not len(first.test):
        raise ConfigError(
            f"test-fraction must leave test rows to compare by, got {runs[0].test_fraction}"
        )
    for subset in SUBSETS:
        n_rows = sorted(len(getattr(split, subset)) for split in splits.values())
        if n_rows[0] != n_rows[-1]:
            rule = f"must deal out all {n_rows[-1]} rows that {subset}, because {_beside(kinds)}"
            left = f"{n_rows[-1] - n_rows[0]} of them are left over"
            raise ConfigError(f"partition {rule} has them all, got '{runs[0].partition}': {left}")
    assert all(np.array_equal(split.test, first.test) for split in splits.values())
    return {subset: len(getattr(first, subset)) for subset in SUBSETS}


def _kinds(runs: Sequence[Settings]) -> dict[str, Settings]:
    """The first run whose parties have rows, and the first whose parties have columns."""
    return {baselines_of(run.strategy).split_by: run for run in reversed(runs)}


def _beside(kinds: Mapping[str, Settings]) -> str:
    """A method of each kind, in words."""
    return f"{kinds[BY_ROWS].strategy} beside {kinds[BY_COLUMNS].strategy}"


def settings_of_all(strategies: Sequence[str], overrides: Mapping[str, Value]) -> list[Settings]:
    """Settings of every method, each with all that are given.

    Raises
    ------
    ConfigError : a setting breaks its rule, or none of the methods reads it.
    """
    given: dict[str, Value] = {}
    for strategy in strategies:
        given |= settings_named(overrides, strategy)
    runs = [load_settings({**given, "strategy": strategy}) for strategy in strategies]
    read = {name for run in runs for name in load_strategy(run.strategy).settings_read(run)}
    for name in sorted(set(given) - read):
        check_read(load_settings({"strategy": strategies[0], name: given[name]}), [name])
    return runs


def read_alone(run: Settings) -> Settings:
    """The settings with the defaults of those that the method does not read."""
    read = {*load_strategy(run.strategy).settings_read(run), *ALL_READ}
    return load_settings({name: value for name, value in run.changed.items() if name in read})


def unread_settings(
    changed: Mapping[str, Value], runs: Sequence[Settings]
) -> dict[str, tuple[str, ...]]:
    """Names of those that a method does not read, by method."""
    read = {run.strategy: load_strategy(run.strategy).settings_read(run) for run in runs}
    return {one: tuple(name for name in changed if name not in read[one]) for one in read}


def comparison_folder(
    settings: Settings, engine: str, kind: str = "compare", more: Mapping[str, Any] | None = None
) -> Path:
    """Where a comparison of these settings goes: the same for the same table and settings only.

    Methods and seeds do not count, so that more of them go on with the runs that are there.

    Parameters
    ----------
    kind : what its name begins with.
    more : what else decides.
    """
    text = json.dumps({**_identity(settings, engine), **(more or {})}, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    name = Path(settings.data.split(",")[0].rpartition("=")[2]).stem
    return Path("runs") / f"{kind}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-{digest}"


def claim_folder(
    output: Path, settings: Settings, engine: str, more: Mapping[str, Any] | None = None
) -> None:
    """Make the folder of a comparison, or hold that the runs in it are of the same one.

    Parameters
    ----------
    more : what else decides on the runs.

    Raises
    ------
    ConfigError : names the first setting that differs, both values, and the way out.
    """
    asked, path = {**_identity(settings, engine), **(more or {})}, output / CLAIM
    check_same(asked, json.loads(path.read_text()) if path.exists() else asked, output)
    private_folder(output)
    RunFolder(output).write_json(CLAIM, asked)


def _identity(settings: Settings, engine: str) -> dict[str, Any]:
    """All that decides on the runs of a comparison, but for methods and seeds."""
    config = flatten(settings.as_config())
    kept = {name: config[name] for name in config if name not in STATED - {"data"}}
    stated = {"parties": settings.parties, "objective": settings.objective}
    return {**kept, **stated, "engine": engine, TABLE: table_digest(settings)}
