"""Horizontal parties of one machine, each with a file of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context

from fedapp.config import Settings
from fedapp.data.load import load_table
from fedapp.data.partition import SUBSETS, split_rows
from fedapp.data.schema import Roles
from fedapp.errors import DataError
from simulations.baselines import run_baselines
from simulations.local import run_local, site_contexts
from simulations.rows import stacked_tables

WriteTable = Callable[..., Path]
MakeSettings = Callable[..., Settings]
METHODS = ("pax", "bagging", "cyclic", "fedavg-linear")


@pytest.fixture
def files(write_table: WriteTable) -> dict[str, Path]:
    return {
        "bank": write_table("bank", 120, seed=1),
        "shop": write_table("shop", 60, seed=2),
    }


@pytest.fixture
def own_files(settings: MakeSettings, files: dict[str, Path]) -> MakeSettings:
    def make(strategy: str = "pax", **more: object) -> Settings:
        data = ",".join(f"{name}={path}" for name, path in files.items())
        given = {"data": data, "label": "y", "parties": 2, **more}
        return settings(strategy=strategy, **given)

    return make


def contexts_of(files: dict[str, Path]) -> list[Context]:
    own = {
        "label": "y",
        "draws-secret": "none",
        "allow": ",".join(METHODS),
    }  # rows are drawn as in a simulation
    return site_contexts({"name": name, "data": str(path), **own} for name, path in files.items())


@pytest.mark.parametrize("strategy", METHODS)
def test_the_model_is_that_of_a_deployment_with_the_same_tables(
    own_files: MakeSettings, files: dict[str, Path], strategy: str
) -> None:
    here = run_local(own_files(strategy, subsample=0.7))
    there = run_local(own_files(strategy, subsample=0.7), contexts_of(files))
    text = (here.path / "model.json").read_bytes()
    assert text == (there.path / "model.json").read_bytes()
    parties = json.loads((here.path / "summary.json").read_text())["parties"]
    assert parties == [{"name": "bank", "rows": 86}, {"name": "shop", "rows": 43}]


def test_the_baselines_have_the_rows_that_the_run_held_back(
    own_files: MakeSettings, files: dict[str, Path]
) -> None:
    settings = own_files()
    table, rows = stacked_tables(settings)
    fractions = settings.test_fraction, settings.valid_fraction
    for name, path in files.items():
        own = load_table(path, Roles(label="y"))
        split = split_rows(own.n_rows, *fractions, settings.seed)
        for subset in SUBSETS:
            held = own.take(getattr(split, subset))
            assert np.array_equal(table.values[rows[name][subset]], held.values)
            assert table.labels is not None
            assert np.array_equal(table.labels[rows[name][subset]], held.labels)


def test_every_party_trains_alone_on_its_file(own_files: MakeSettings) -> None:
    found = run_baselines(own_files())
    assert list(found["alone"]) == ["bank", "shop"]
    assert found["alone"]["bank"] != found["alone"]["shop"] != found["pooled"]


def test_columns_that_differ_are_refused_by_name(
    own_files: MakeSettings, files: dict[str, Path], write_table: WriteTable
) -> None:
    write_table("shop", 60, seed=2, b=None, c=range(60))
    rule = "^shop: columns must be those of bank, got 'b' is missing, 'c', which bank does not have"
    with pytest.raises(DataError, match=rule):
        run_local(own_files())
    with pytest.raises(DataError, match=rule):
        run_baselines(own_files())


def test_class_names_of_one_file_and_numbers_of_the_other_are_classes_of_both(
    own_files: MakeSettings, files: dict[str, Path], write_table: WriteTable
) -> None:
    write_table("shop", 60, seed=2, y=["0", "one"] * 30)
    table, _ = stacked_tables(own_files())
    assert table.labels is not None
    assert set(table.labels.tolist()) == {"0", "1", "one"}
