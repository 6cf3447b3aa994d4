"""Tables larger than memory: scored by parts, with the results of one that is in memory."""

import re
from functools import partial

import numpy as np
import pytest
from pyarrow import parquet, table

import fedapp
from fedapp.data import predictions, scratch
from fedapp.errors import FedappError
from fedapp.process import free_memory
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table, predicted_rows
from fedapp.runs.run import Run, write_explanation
from fedapp.site import policy
from fedapp.trees import predict
from tests.random_tables import random_case
from tests.tables import made_columns, write_rows

VERSION_1 = "limit_in_bytes", "usage_in_bytes", "total_"
METHODS_OF_ROWS = {"pax": True, "bagging": False}
LACKING = r"must have 0\.0 GiB free for {} rows x \d columns, got 0\.0 GiB"
WAY = "as bagging copies them: fedavg-linear, horizontal-forest, pax read a table by parts"


@pytest.fixture
def by_parts(monkeypatch):
    """``by_parts()``: from now on, tables are larger than memory, and read some rows at a time."""

    def begin():
        monkeypatch.setattr(scratch, "LARGEST", 64)
        monkeypatch.setattr(scratch, "BATCH_BYTES", 2000)
        monkeypatch.setattr(predict, "BATCH_ROWS", 7)

    return begin


@pytest.mark.by_default("1", "210")
@pytest.mark.parametrize("seed", [0, 1, 2, 8, 150, 210, 240])
def test_predictions_and_explanations_of_a_large_table_are_the_same_bytes(
    settings, tmp_path, monkeypatch, by_parts, seed
):
    case = random_case(tmp_path / "random.csv", seed, "pax")
    run = Run(run_local(settings(strategy="pax", **case)).path)

    def written(name):
        shap = tmp_path / f"{name}-shap.csv"
        write_explanation(run, predicted_rows(run.path, case["data"]), "", [], shap)
        files = [tmp_path / f"{name}{suffix}" for suffix in (".parquet", ".csv")]
        for file in files:
            assert predict_table(run.path, case["data"], "", file).n_rows
            monkeypatch.setattr(predictions, "GROUP_ROWS", 11)  # but of Parquet
        monkeypatch.setattr(predictions, "GROUP_ROWS", 2**20)
        return [file.read_bytes() for file in (*files, shap)]

    whole = written("whole")
    by_parts()
    assert written("parts") == whole


def test_row_groups_are_those_of_pyarrow(tmp_path):
    n_rows = predictions.GROUP_ROWS + 1
    parquet.write_table(table({"a": np.zeros(n_rows, np.int8)}), tmp_path / "rows.parquet")
    with parquet.ParquetFile(tmp_path / "rows.parquet") as file:
        assert file.metadata.row_group(0).num_rows == predictions.GROUP_ROWS


def test_memory_that_is_free_is_that_of_the_smallest_control_group(tmp_path):
    versions = [(tmp_path, "max", "current", ""), (tmp_path / "memory", *VERSION_1)]
    for folder, limit, used, kind in versions:
        folder.mkdir(exist_ok=True)
        (folder / f"memory.{limit}").write_text("1000\n")
        (folder / f"memory.{used}").write_text("700\n")
        stat = f"{kind}inactive_file 100\n{kind}active_file 20\nanon 9\n"
        (folder / "memory.stat").write_text(stat)
    assert free_memory(tmp_path) == 1000 - 700 + 100 + 20
    assert free_memory() > 2**20


@pytest.mark.parametrize(("strategy", "is_read_by_parts"), METHODS_OF_ROWS.items())
def test_what_copies_a_table_that_memory_has_no_room_for_says_so_and_does_not_start(
    settings, tmp_path, monkeypatch, by_parts, strategy, is_read_by_parts
):
    data = write_rows(tmp_path / "rows.csv", made_columns("binary:logistic"))
    given = {"data": str(data), "label": "y", "parties": 2, "num_boost_round": 1}
    monkeypatch.setattr(policy, "free_memory", lambda: 2**10)
    by_parts()
    train = partial(fedapp.run, strategy, **given, baselines=True, progress=False)
    if is_read_by_parts:
        (note,) = (one for one in train().summary["warnings"] if "left out" in one)
        assert re.search(LACKING.format(400), note)
        return
    with pytest.raises(FedappError, match=f"memory of party-1 {LACKING.format(200)}.*{WAY}"):
        train()
