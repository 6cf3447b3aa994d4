"""The bench of Federated Forest: what it holds before it times, and what it makes of seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp.data.datasets import read_source
from fedapp.data.schema import Roles
from fedapp.runs.baselines import join_tables, pooled_forest
from fedapp.trees.forest.model import from_json
from simulations.bench import trees as bench


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a fraction of a second."""
    small = {"DATA": "breast-cancer", "COPIES": 2, "TREES": 10, "DEPTH": 3, "REPEATS": 1}
    for name, value in small.items():
        monkeypatch.setattr(bench, f"FOREST_{name}", value)


def test_rows_come_so_many_times(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    bench.write_copies("wine", 3, path)
    once, many = read_source("wine"), read_source(str(path), Roles(label="y"))
    np.testing.assert_array_equal(many.values, np.tile(once.values, (3, 1)))
    assert many.labels is not None
    assert once.labels is not None
    assert many.labels.tolist() == once.labels.tolist() * 3


@pytest.mark.usefixtures("_short")
def test_the_forest_is_that_of_the_joined_table_and_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    bench.write_copies("breast-cancer", 1, path)
    settings = bench.forest_settings(path, bench.EXACT, "ordered", keeps_model=True)
    table, _, _ = join_tables(settings)
    given = (array[table.split.train] for array in (table.values, table.labels, table.weights))
    model = from_json(bench.run_once(settings).model)
    pooled, _, _ = pooled_forest(settings, model.columns, *given)
    assert bench.check_same(model, pooled) == sum(map(len, pooled.trees)) > 10 * 5
    for changed in ("threshold", "left"):
        trees = [tree.copy() for tree in pooled.trees]
        trees[4][changed][0] += 1
        with pytest.raises(
            ValueError, match="trees must be those of the joined table, got another tree 4"
        ):
            bench.check_same(model, replace(pooled, trees=tuple(trees)))
    values = *pooled.values[:-1], pooled.values[-1] + 0.5
    with pytest.raises(ValueError, match="got another tree 9"):
        bench.check_same(model, replace(pooled, values=values))


def test_another_accuracy_is_refused() -> None:
    bench.check_accuracy(0.955, 0.96)
    with pytest.raises(ValueError, match=r"accuracy must be within 0.01 of theirs, got -0.0200"):
        bench.check_accuracy(0.94, 0.96)


def test_seconds_are_those_from_a_request_to_the_last_reply() -> None:
    lines = [("level", 1, 1.0), ("level", 1, 1.5), ("split", 2, 1.75), ("split", 2, 2.0)]
    lines += [("level", 3, 2.0), ("level", 3, 4.0)]
    ledger = [{"type": kind, "step": step, "seconds": at} for kind, step, at in lines]
    assert bench.seconds_by_message(ledger) == {"level": 2.5, "split": 0.25}


def test_ratios_are_of_medians() -> None:
    def run(seconds: float) -> bench.TimedRun:
        told: dict[str, Any] = {"seconds": {"train": seconds / 2}, "exchanges": 3}
        return bench.TimedRun(seconds, {**told, "bytes": {"to_parties": 1, "to_server": 2}}, [], "")

    found = bench.forest_ratios([run(9.0), run(3.0), run(4.0)], [1.0, 2.0, 8.0])
    assert (found["seconds"], found["seconds_sklearn"]) == (4.0, 2.0)
    assert (found["ratio"], found["ratio_train"], found["bytes"]) == (2.0, 1.0, 3)


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("align", bench.ALIGNMENTS)
def test_a_line_has_what_was_run(align: str, tmp_path: Path) -> None:
    found = bench.measure_forest(64, align)
    assert (found["rows"], found["columns"], found["repeats"]) == (2 * 569, 30, 1)
    assert found["accuracy"] == pytest.approx(found["accuracy_sklearn"][0], abs=0.01)
    assert found["nodes_as_pooled"] > 10 * 5
    assert 0 < found["seconds_train"] < found["seconds"]
    assert sum(found["seconds_by_message"].values()) <= found["seconds"]
    assert not list((tmp_path / "home" / "sites").glob("*/*/"))
