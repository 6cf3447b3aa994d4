"""Conditions under which methods can be compared, and the folder of a comparison."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.data.datasets import party_sources
from fedapp.data.partition import SUBSETS
from fedapp.errors import ConfigError
from fedapp.home import private_folder
from fedapp.run_folder import RunFolder
from fedapp.server_app import check_read, load_strategy
from fedapp.settings import Settings, Value, flatten, load_settings, settings_named
from fedapp.studies import CLAIM
from simulations.baselines import BY_COLUMNS, BY_ROWS, baseline_rows, baselines_of
from simulations.kept import TABLE, check_same, table_digest

# Settings that the lines and facts of a comparison show, or that differ between its runs.
STATED = {"strategy", "data", "seed", "parties", "objective", "run-dir", "resume"}
# Settings that every method of a comparison must read: they affect columns and scores.
ALL_READ = ("eval-metric", "base-margin")


def check_comparable(runs: Sequence[Settings], n_seeds: int) -> None:
    """Raise ConfigError if methods cannot be compared; no table is read yet."""
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
    """Check that all runs have the same rows, and return the size of each subset.

    Raises
    ------
    ConfigError : the rows differ, or there are no test rows.
    DataError : a table is invalid.
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
            unused = f"{n_rows[-1] - n_rows[0]} of them are left over"
            raise ConfigError(f"partition {rule} has them all, got '{runs[0].partition}': {unused}")
    assert all(np.array_equal(split.test, first.test) for split in splits.values())
    return {subset: len(getattr(first, subset)) for subset in SUBSETS}


def _kinds(runs: Sequence[Settings]) -> dict[str, Settings]:
    """The first run whose parties share rows, and the first whose parties share columns."""
    return {baselines_of(run.strategy).split_by: run for run in reversed(runs)}


def _beside(kinds: Mapping[str, Settings]) -> str:
    """A method of each kind, for error texts."""
    return f"{kinds[BY_ROWS].strategy} beside {kinds[BY_COLUMNS].strategy}"


def settings_of_all(strategies: Sequence[str], overrides: Mapping[str, Value]) -> list[Settings]:
    """Settings of every method, with all overrides; ConfigError if no method reads one."""
    named: dict[str, Value] = {}
    for strategy in strategies:
        named |= settings_named(overrides, strategy)
    runs = [load_settings({**named, "strategy": strategy}) for strategy in strategies]
    read = {name for run in runs for name in load_strategy(run.strategy).settings_read(run)}
    for name in sorted(set(named) - read):
        check_read(load_settings({"strategy": strategies[0], name: named[name]}), [name])
    return runs


def read_alone(run: Settings) -> Settings:
    """Reset the settings that the method does not read to their defaults."""
    read = {*load_strategy(run.strategy).settings_read(run), *ALL_READ}
    return load_settings({name: value for name, value in run.changed.items() if name in read})


def unread_settings(
    changed: Mapping[str, Value], runs: Sequence[Settings]
) -> dict[str, tuple[str, ...]]:
    """Changed settings that each method does not read, by method."""
    read = {run.strategy: load_strategy(run.strategy).settings_read(run) for run in runs}
    return {one: tuple(name for name in changed if name not in read[one]) for one in read}


def comparison_folder(
    settings: Settings, engine: str, kind: str = "compare", more: Mapping[str, Any] | None = None
) -> Path:
    """Default folder of a comparison: a digest of the table, the settings and ``more``.

    Methods and seeds are not part of it, so that a comparison with more of them reuses its runs.
    """
    text = json.dumps({**_identity(settings, engine), **(more or {})}, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    name = Path(settings.data.split(",")[0].rpartition("=")[2]).stem
    return Path("runs") / f"{kind}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-{digest}"


def claim_folder(
    output: Path, settings: Settings, engine: str, more: Mapping[str, Any] | None = None
) -> None:
    """Make the folder of a comparison; ConfigError if it has runs of other settings."""
    inputs, path = {**_identity(settings, engine), **(more or {})}, output / CLAIM
    check_same(inputs, json.loads(path.read_text()) if path.exists() else inputs, output)
    private_folder(output)
    RunFolder(output).write_json(CLAIM, inputs)


def _identity(settings: Settings, engine: str) -> dict[str, Any]:
    """All inputs of the runs of a comparison except methods and seeds."""
    config = flatten(settings.as_config())
    inputs = {name: config[name] for name in config if name not in STATED - {"data"}}
    resolved = {"parties": settings.parties, "objective": settings.objective}
    return {**inputs, **resolved, "engine": engine, TABLE: table_digest(settings)}
