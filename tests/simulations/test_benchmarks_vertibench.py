"""Vertical methods over VertiBench's splits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp.data.partition import partition_columns
from simulations.papers import vertibench as bench
from simulations.papers.vertibench import column_order
from simulations.study import Row


def row(method: str, kind: str, value: float, score: float) -> Row:
    costs = {"seconds": value + 1, "bytes": 1e6, "exchanges": 9, "metric": "auc", "icor": -0.2}
    place = {"data": "waveform", "method": method, "kind": kind, "value": value}
    return {**place, "columns": [3, 1], "score": score, "pooled": 0.9, **costs}


@pytest.fixture
def rows() -> list[Row]:
    scores = {("importance", 0.1): 0.9, ("importance", 1.0): 0.9, ("correlation", 0.0): 0.89}
    return [
        row(method, kind, value, score)
        for (kind, value), score in scores.items()
        for method in bench.METHODS
    ]


def test_a_split_is_the_same_again_and_the_table_deals_its_columns_out_so() -> None:
    table = bench.drawn_table("wine", 100)
    point = bench.Point("wine", "importance", 1.0)
    split = bench.split_of(point, table)
    assert split == bench.split_of(point, table)
    order, columns = column_order(split)
    rng = np.random.default_rng(0)
    dealt = partition_columns(columns, len(order), bench.N_PARTIES, rng)
    assert [tuple(order[place] for place in party) for party in dealt] == list(split)


@pytest.mark.parametrize("method", bench.METHODS)
@pytest.mark.parametrize("quick", [True, False])
def test_keys_are_small_in_quick_runs_alone(method: str, quick: bool) -> None:
    point = bench.Point("wine", "importance", 1.0)
    settings = bench.settings_of(point, method, "wine.parquet", "sizes:9,2,1,1", quick)
    own = settings.sections["secureboost"]
    assert (own["key-bits"], own["insecure-small-key"]) == ((512, True) if quick else (2048, False))
    assert (settings.parties, settings.columns) == (4, "sizes:9,2,1,1")


def test_differences_are_the_largest_over_all_splits(rows: list[Row]) -> None:
    first, second = bench.differences(rows)
    assert (first["method"], second["method"]) == tuple(bench.METHODS)
    for found in (first, second):
        assert found["between_splits"] == pytest.approx(0.01)
        assert found["from_pooled"] == pytest.approx(0.01)


@pytest.mark.slow
def test_scores_do_not_move_with_the_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small: dict[str, Any] = {"FOREST_TREES": 2, "QUICK_BITS": 256, "QUICK_ROWS": 120}
    for name, value in small.items():
        monkeypatch.setattr(bench, name, value)
    bench.main(quick=True, data="breast-cancer", output=tmp_path)
    tables = json.loads((tmp_path / "quick" / "tables.json").read_text())
    assert len(tables["rows"]) == 8
    secureboost = next(one for one in tables["differences"] if one["method"] == "SecureBoost")
    assert secureboost["from_pooled"] < 1e-6
    assert not list((tmp_path / "quick").glob("*.parquet"))
