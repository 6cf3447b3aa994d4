"""Tables larger than memory: scored by parts, with the results of one that is in memory."""

import re

import numpy as np
import pytest
from pyarrow import parquet, table

import fedapp
from fedapp.data import predictions
from fedapp.errors import FedappError
from fedapp.process import free_memory
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table, predicted_rows, write_explanation
from fedapp.runs.run import Run
from fedapp.site import policy
from tests.random_tables import random_case
from tests.tables import by_parts, made_columns, write_rows

VERSION_1 = "limit_in_bytes", "usage_in_bytes", "total_"
LACKING = r"must have 0\.0 GiB free for {} rows x \d columns, got 0\.0 GiB"
REFUSED = [
    ("bagging", 200, ": fedavg-linear, horizontal-forest, pax read a table by parts"),
    ("secureboost", 400, "$"),
]


@pytest.mark.by_default("1", "210")
@pytest.mark.parametrize("seed", [0, 1, 2, 8, 150, 210, 240])
def test_predictions_and_explanations_of_a_large_table_are_the_same_bytes(
    settings, tmp_path, monkeypatch, seed
):
    case = random_case(tmp_path / "random.csv", seed, "pax")
    run = Run(run_local(settings(strategy="pax", **case)).path)

    def written(name, group_rows):
        shap = tmp_path / f"{name}-shap.csv"
        write_explanation(run.to_xgboost(), predicted_rows(run.path, case["data"]), "", [], shap)
        files = [tmp_path / f"{name}{suffix}" for suffix in (".parquet", ".csv")]
        for file in files:
            assert predict_table(run.path, case["data"], "", file).n_rows
            monkeypatch.setattr(predictions, "GROUP_ROWS", group_rows)  # but of Parquet
        monkeypatch.setattr(predictions, "GROUP_ROWS", 2**20)
        return [file.read_bytes() for file in (*files, shap)]

    whole = written("whole", 2**20)
    by_parts(monkeypatch)
    assert written("parts", 11) == whole


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


@pytest.fixture
def without_memory(tmp_path, monkeypatch):
    """``without_memory(strategy)``: train where memory has no room for a table, nor a copy."""
    data = write_rows(tmp_path / "rows.csv", made_columns("binary:logistic"))
    given = {"data": str(data), "label": "y", "parties": 2, "num_boost_round": 1}
    monkeypatch.setattr(policy, "free_memory", lambda: 2**10)
    by_parts(monkeypatch)
    return lambda method, by=fedapp.run, **more: by(method, **given, **more, progress=False)


@pytest.mark.parametrize(("strategy", "n_rows", "way"), REFUSED)
def test_a_method_that_copies_a_table_needs_memory_for_it(without_memory, strategy, n_rows, way):
    rule = f"memory of party-1 {LACKING.format(n_rows)}, as {strategy} copies them{way}"
    with pytest.raises(FedappError, match=rule):
        without_memory(strategy)


def test_a_comparison_needs_memory_for_its_baselines(without_memory):
    rule = f"memory {LACKING.format(400)}, as baselines copy them: run each method by itself"
    with pytest.raises(FedappError, match=rule):
        without_memory(["pax"], by=fedapp.compare)


def test_a_run_is_without_the_baselines_that_memory_has_no_room_for(without_memory):
    run = without_memory("pax", baselines=True)
    rule = f"the baselines were left out: memory {LACKING.format(400)}, as baselines copy them"
    assert any(re.match(rule, warning) for warning in run.summary["warnings"])
    assert "baselines" not in run.summary
