"""Splits by categories are the same in process and in Flower's simulation."""

import pytest

from fedapp.runs.local import run_local
from tests.federated import model_bytes, model_of, summary_of
from tests.moments import RUNS, text_columns
from tests.tables import write_rows


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pax", "secureboost"])
def test_flowers_simulation_gives_the_model_of_the_local_engine(
    settings, simulate, tmp_path, method
):
    data = write_rows(tmp_path / "text.csv", text_columns())
    given = {"data": str(data), "label": "y", "strategy": method, "allow-export": True}
    given |= {"parties": 3, "align": "ordered", "max-depth": 3, "max-bin": 8, **RUNS[method]}
    local, simulated = run_local(settings(**given)), simulate(settings(**given))
    assert model_bytes(simulated) == model_bytes(local)
    assert len(model_of(local).sets) > 3
    assert summary_of(simulated)["engine"] == "simulation"
    assert summary_of(simulated)["metrics"] == summary_of(local)["metrics"]
