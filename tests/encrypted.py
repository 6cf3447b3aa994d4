"""Models trained and predicted under encryption by small keys, for tests of Fed-EINI."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedapp.run_folder import RunFolder
from fedapp.settings import Settings
from tests.strategies.test_interactive import inference
from tests.trained import TrainOnce
from tests.trees.test_exactness import made_table

MakeSettings = Callable[..., Settings]
Simulate = Callable[[Settings], RunFolder]
Trained = tuple[Settings, RunFolder]
Train = Callable[..., Trained]
KINDS_OF_MODELS = ("secureboost", "federated-forest")
# For what goes the same way with both: by default the kind that is trained sooner.
MOSTLY_FORESTS = (
    pytest.param("secureboost", marks=pytest.mark.slow),
    "federated-forest",
)
SMALL = {"key_bits": 512, "insecure_small_key": True}


def trainer(settings: MakeSettings, strategy: str, folder: Path, trained_once: TrainOnce) -> Train:
    """``train(objective, **more)``: a trained model of 6 trees of depth 3, and its settings."""

    def make(objective: str = "binary:logistic", **more: Any) -> Trained:
        data = folder / f"{objective[:5]}.csv"
        if not data.exists():
            made_table(data, objective, n_values=40, n_rows=60)
        given = {"data": str(data), "label": "y", "objective": objective, "parties": 2}
        given |= {"max_depth": 3, "num_boost_round": 6, "align": "ordered", "columns": "random"}
        given |= {f"secureboost__{name}": value for name, value in SMALL.items()}
        given |= {"federated_forest__trees": 6, "federated_forest__max_depth": 3}
        trained = settings(strategy=strategy, **{**given, **more})
        return trained, trained_once(trained)

    return make


def encrypted(settings: MakeSettings, trained: Settings, **more: Any) -> Settings:
    """Settings of an encrypted prediction of the rows the model was trained on."""
    given = {f"eini__{name}": value for name, value in {**SMALL, "unguarded": True}.items()}
    plain = {"align": "ordered", "columns": trained.columns, **given, **more}
    return inference(settings, trained, **plain).model_copy(update={"strategy": "eini"})
