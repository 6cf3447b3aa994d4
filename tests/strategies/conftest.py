"""What both files of tests of Fed-EINI train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.encrypted import SMALL, MakeSettings, Train, Trained
from tests.trained import TrainOnce
from tests.trees.test_exactness import made_table


@pytest.fixture(params=[pytest.param("secureboost", marks=pytest.mark.slow), "federated-forest"])
def strategy(request: pytest.FixtureRequest) -> str:
    """Both kinds of models; by default the kind that is trained sooner."""
    return str(request.param)


@pytest.fixture
def train(settings: MakeSettings, strategy: str, tmp_path: Path, trained_once: TrainOnce) -> Train:
    """``train(objective, **more)``: a trained model of 6 trees of depth 3, and its settings."""

    def make(objective: str = "binary:logistic", **more: Any) -> Trained:
        data = tmp_path / f"{objective[:5]}.csv"
        if not data.exists():
            made_table(data, objective, n_values=40, n_rows=60)
        run = {"data": str(data), "label": "y", "objective": objective, "parties": 2}
        run |= {"max_depth": 3, "num_boost_round": 6, "align": "ordered", "columns": "random"}
        run |= {f"secureboost__{name}": value for name, value in SMALL.items()}
        run |= {"federated_forest__trees": 6, "federated_forest__max_depth": 3}
        trained = settings(strategy=strategy, **{**run, **more})
        return trained, trained_once(trained)

    return make
