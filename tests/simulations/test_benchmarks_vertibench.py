"""Vertical methods over VertiBench's splits."""

import json

import numpy as np
import pytest

from fedapp.data.partition import partition_columns
from simulations.papers import vertibench as bench
from simulations.papers.vertibench import column_order


def test_a_split_is_the_same_again_and_the_table_deals_its_columns_out_so():
    table = bench.drawn_table("wine", 100)
    point = bench.Point("wine", "importance", 1.0)
    split = bench.split_of(point, table)
    assert split == bench.split_of(point, table)
    order, columns = column_order(split)
    rng = np.random.default_rng(0)
    dealt = partition_columns(columns, len(order), bench.N_PARTIES, rng)
    assert [tuple(order[place] for place in party) for party in dealt] == list(split)


@pytest.mark.parametrize("method", bench.METHODS)
def test_settings_of_every_method_can_be_read(method):
    point = bench.Point("wine", "importance", 1.0)
    settings = bench.settings_of(point, method, "wine.parquet", "sizes:9,2,1,1")
    own = settings.sections["secureboost"]
    assert (own["key-bits"], own["insecure-small-key"]) == (2048, False)
    assert (settings.parties, settings.columns) == (4, "sizes:9,2,1,1")


@pytest.mark.slow
def test_scores_do_not_move_with_the_split(tmp_path, monkeypatch):
    ends = {"ALPHAS": (0.1, 100.0), "BETAS": (0.0, 1.0)}
    small = {"KEY_BITS": 256, "ROWS": 120, "TREES": 2, **ends}
    small["COMMON"] = {**bench.COMMON, "secureboost.insecure-small-key": True}
    for name, value in small.items():
        monkeypatch.setattr(bench, name, value)
    bench.main(data=("breast-cancer",), output=tmp_path)
    tables = json.loads((tmp_path / "tables.json").read_text())
    assert len(tables["rows"]) == 8
    for row in tables["rows"]:
        assert row["method"] != "SecureBoost" or abs(row["score"] - row["pooled"]) < 1e-6
    assert not list(tmp_path.glob("*.parquet"))
