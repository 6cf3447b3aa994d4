"""Tables larger than memory: a run computes what it computes of the same rows in memory."""

import numpy as np
import pytest

from fedapp.data import allocator, scratch
from fedapp.histograms import bins
from fedapp.records import journal
from fedapp.runs.local import run_local
from tests.federated import lines_of, model_bytes
from tests.tables import made_columns, trial, write_rows

NUMBERS = "reg:squarederror"
DRAWS = {"subsample": 0.7, "colsample_bytree": 0.7}
MASKED = {"pax__aggregation": "secure"}
OTHERS = {
    "drawn": DRAWS,
    "masked": {**MASKED, "objective": "multi:softprob"},
    "one sum": MASKED,
    "newton": {**MASKED, "objective": "reg:pseudohubererror"},
    "additive": {"pax__additive": True},
    "merged": {"least_bin_rows": 5, "weight": "w"},
    "hazards": {"objective": "survival:cox", "event": "died"},
    "medians": {"objective": "reg:absoluteerror", **MASKED},
    "forest": {"strategy": "horizontal-forest", "horizontal_forest__trees": 3},
}


@pytest.fixture
def as_large(monkeypatch):
    """``as_large()``: from now on every table is larger than memory, and has threads and groups."""

    def begin():
        for name, value in {"LARGEST": 0, "LARGEST_ARRAY": 2**9, "BATCH_BYTES": 2**11}.items():
            monkeypatch.setattr(scratch, name, value)
        for name, value in {"FEWEST_CELLS": 1, "GROUP_CELLS": 1, "n_cores": lambda: 3}.items():
            monkeypatch.setattr(bins, name, value)
        monkeypatch.setattr(journal, "LARGE", 0)

    return begin


def results(settings):
    run = run_local(settings)
    rounds = [{**line, "seconds": 0} for line in lines_of(run.path / "rounds.jsonl")]
    return model_bytes(run), rounds


@pytest.fixture
def large_run(settings, tmp_path):
    """Settings of a run over rows with weights, categories and missing values, or over times."""

    def make(objective="binary:logistic", strategy="pax", **more):
        label = {"survival:cox": "time"}.get(objective, "y")
        path = tmp_path / "rows.csv"
        if label == "time":
            trial(path, 200)
            more["drop_columns"] = "w"
        else:
            kind = NUMBERS if objective.startswith("reg") else objective
            rng = np.random.default_rng(1)
            town = [f"t{code}" for code in rng.integers(0, 7, 300)]
            columns = {"town": town, **made_columns(kind, 300)}
            columns["w"] = rng.integers(0, 3, 300) / 2 if "weight" in more else np.ones(300)
            write_rows(path, columns)
        given = {"data": str(path), "label": label, "objective": objective, "parties": 2}
        return settings(strategy=strategy, **given, **more)

    return make


@pytest.mark.parametrize("more", OTHERS.values(), ids=OTHERS)
def test_a_table_larger_than_memory_gives_the_model_of_one_in_memory(large_run, as_large, more):
    expected = results(large_run(**more))
    as_large()
    assert results(large_run(**more)) == expected


def test_a_model_is_continued_on_a_table_larger_than_memory(large_run, as_large):
    first = run_local(large_run())
    more = {"init_model": str(first.path / "model.json"), "least_bin_rows": 5}
    expected = results(large_run(**more))
    as_large()
    assert results(large_run(**more)) == expected


def test_all_that_a_party_computes_of_a_large_table_is_mapped_from_files(
    large_run, as_large, monkeypatch
):
    in_memory, use, used = allocator.current(), allocator.use, []

    def noted(kind):
        used.append(kind is not in_memory)
        use(kind)

    as_large()
    monkeypatch.setattr(allocator, "use", noted)
    run_local(large_run(num_boost_round=1))
    # Each answer begins with an allocator that maps, and ends with the one before.
    assert used.count(True) >= used.count(False) - 2 > 5
