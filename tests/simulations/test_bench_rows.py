"""The bench of rows: the same table in one place and at the sites, and what is told of runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq

from simulations.bench.trees import ROWS_SITES, exponents, peaks_of, random_table, sites_tables
from simulations.study import peak_bytes


def test_sites_have_the_columns_of_the_table_and_one_its_label(tmp_path: Path) -> None:
    whole, nodes = random_table(40), sites_tables(tmp_path, "secureboost", 40)
    found = [pq.read_table(nodes[name]["data"]) for name in ROWS_SITES]
    assert [len(table.column_names) for table in found] == [12, 11]
    assert ["label" in node for node in nodes.values()] == [True, False]
    for table in found:
        assert all(table[name].equals(whole[name]) for name in table.column_names)
    assert {*whole.column_names} == {name for table in found for name in table.column_names}


def test_sites_of_pax_have_the_rows_of_the_table_with_all_columns(tmp_path: Path) -> None:
    whole, nodes = random_table(40), sites_tables(tmp_path, "pax", 40)
    found = [pq.read_table(nodes[name]["data"]) for name in ROWS_SITES]
    assert all("label" in node for node in nodes.values())
    for name in whole.column_names:
        both = np.concatenate([table[name].to_numpy() for table in found])
        np.testing.assert_array_equal(both, whole[name].to_numpy())


def test_growth_is_told_of_figures_that_are_numbers() -> None:
    lines = [
        {"rows": 10, "seconds": 1.0, "bytes": 5, "peak_bytes": {"bank": 7}},
        {"rows": 100, "seconds": 100.0, "bytes": 50, "peak_bytes": {"bank": 9}},
    ]
    assert exponents(lines)[1] == {
        **lines[1],
        "exponent_of_seconds": 2.0,
        "exponent_of_bytes": 1.0,
    }


def test_a_peak_is_that_of_the_largest_process_of_a_family() -> None:
    mine, gone = psutil.Process(), psutil.Process()
    gone._pid = 2**22 + 1  # no process has this number
    with peaks_of(lambda: {"bank": [gone, mine], "insurer": [gone]}) as peaks:
        pass
    assert peak_bytes() / 2 < peaks["bank"] < 2 * peak_bytes()
    assert [*peaks] == ["bank"]
