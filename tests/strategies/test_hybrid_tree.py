"""HybridTree: a host's trees, continued by guests with more columns for some of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.runs.local import run_local
from fedapp.settings import Settings
from tests.conftest import MakeSettings
from tests.hybrid import Reference, assert_same, trees_of
from tests.pooled import made_columns, write_rows

N_ROWS = 240
OBJECTIVES = ("binary:logistic", "multi:softprob", "reg:squarederror")
MakeRun = Callable[..., Settings]


@pytest.fixture
def made(settings: MakeSettings, tmp_path: Path) -> MakeRun:
    """``made(objective, first, second, **more)``: a run of a host and guests with some rows."""

    def make(
        objective: str = "reg:squarederror",
        *guests: Sequence[int] | range,
        n_rows: int = N_ROWS,
        **more: Any,
    ) -> Settings:
        table = made_columns(objective, n_rows)
        ids = np.array([f"r{number * 7919 % 10007}" for number in range(n_rows)])
        parts = [("host", range(n_rows), "ab"), ("one", guests[0], "cd"), ("two", guests[1], "ce")]
        for name, rows, columns in parts:
            given = {column: table[column][list(rows)] for column in columns}
            given |= {"y": table["y"][list(rows)]} if name == "host" else {}
            write_rows(tmp_path / f"{name}.csv", {"id": ids[list(rows)], **given})
        files = ",".join(str(tmp_path / f"{name}.csv") for name, *_ in parts)
        usual = {"data": files, "id": "id", "label": "y", "objective": objective, "parties": 3}
        usual |= {"num_boost_round": 3, "max_depth": 4, "max_bin": 16, "eta": 0.3}
        usual |= {"hybrid_tree__key_bits": 512, "hybrid_tree__insecure_small_key": True}
        return settings(strategy="hybrid-tree", **{**usual, **more})

    return make


def reference_of(settings: Settings) -> Reference:
    files = dict(zip(("party-1", "party-2", "party-3"), settings.data.split(","), strict=True))
    tables = {
        name: load_table(Path(file), Roles("y" if name == "party-1" else "", "id"))
        for name, file in files.items()
    }
    return Reference(settings, tables)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    ("one", "two"),
    [(range(110), range(110, 200)), (range(150), range(60, 240))],
    ids=["disjoint guests", "guests that overlap"],
)
def test_the_trees_are_those_of_one_place(
    made: MakeRun, objective: str, one: range, two: range
) -> None:
    settings = made(objective, one, two)
    folder = run_local(settings)
    assert assert_same(trees_of(folder), reference_of(settings).trees) > 20
