"""SecureBoost: XGBoost's own trees over columns of several parties, under encryption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost

from fedapp.config import Settings
from fedapp.data.datasets import read_source
from fedapp.data.partition import split_rows
from fedapp.site.columns import common_order
from fedapp.site.labels import class_ids, class_names
from fedapp.trees.model import load_model
from simulations.baselines import xgboost_parameters
from simulations.engines import run_local
from tests.reference import compare_trees
from tests.test_exactness import made_table
from tests.transcript import summary_of

MakeSettings = Callable[..., Settings]
OBJECTIVES = ["binary:logistic", "multi:softprob", "reg:squarederror"]


@pytest.fixture
def vertical(settings: MakeSettings) -> MakeSettings:
    """Settings of a run of two parties under a small key whose model is joined at the end."""

    def make(**more: Any) -> Settings:
        given = {
            "strategy": "secureboost",
            "parties": 2,
            "secureboost__key_bits": 512,
            "secureboost__insecure_small_key": True,
            "allow_export": True,
            "max_bin": 32,
            **more,
        }
        return settings(**given)

    return make


def pooled(settings: Settings) -> xgboost.Booster:
    """XGBoost on the joined table, its rows in the order of the run."""
    table = read_source(settings.data, label=settings.label, weight=settings.weight)
    assert table.labels is not None
    order = common_order(np.arange(table.n_rows).astype(str).tolist(), settings.seed)
    split = split_rows(table.n_rows, settings.test_fraction, settings.valid_fraction, settings.seed)
    labels = class_ids(table.labels, class_names(table.labels, settings.objective))
    rows = order[split.train]
    weights = np.ones(table.n_rows, np.float32) if table.weights is None else table.weights
    values, truth, counted = table.values[rows], labels[rows], weights[rows]
    parameters = xgboost_parameters(settings, labels, counted, truth)
    cuts = xgboost.QuantileDMatrix(values, truth, max_bin=settings.max_bin)
    matrix = xgboost.QuantileDMatrix(
        values, truth, weight=counted, max_bin=settings.max_bin, ref=cuts
    )
    return xgboost.train(parameters, matrix, settings.num_boost_round)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("parties", [2, 3])
def test_the_joined_model_is_xgboosts_on_the_joined_table(
    vertical: MakeSettings, tmp_path: Path, objective: str, parties: int
) -> None:
    data = made_table(tmp_path / "made.csv", objective, n_values=40, n_rows=400)
    run = vertical(
        data=str(data or tmp_path / "made.csv"),
        label="y",
        objective=objective,
        parties=parties,
        num_boost_round=4,
        max_depth=3,
        align="ordered",
    )
    folder = run_local(run)
    found = compare_trees(load_model(folder.path / "model.json"), pooled(run))
    assert found.n_trees == summary_of(folder)["trees"]
    assert found.differing == 0
    assert found.leaf_error <= 1e-6
