"""Predict a table with the model of a finished run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.data.predictions import (
    check_suffix,
    named_predictions,
    read_columns_of,
    write_predictions,
)
from fedapp.linear import KIND as LINEAR
from fedapp.linear import LinearModel, load_linear, predict_linear
from fedapp.trees import bagged, stacked
from fedapp.trees.model import Ensemble, load_model
from fedapp.trees.objective import Array, transform
from fedapp.trees.parts import PARTS
from fedapp.trees.predict import predict_margins

Model = Ensemble | bagged.BaggedForest | stacked.StackedModel | LinearModel
# What a model that is no boosted ensemble begins with.
KIND = re.compile(r'\{"format":\d+,"kind":"([^"]*)"')


def predict_table(run_dir: Path, data: str, id_column: str, output: Path) -> int:
    """Write a line of predictions for every row.

    A column ``probability_<class>`` for every class of a multi-class model and for the second
    class of a binary one, ``prediction`` for a regression. Columns of the table that the model does
    not know are left out.

    Parameters
    ----------
    run_dir : folder of a finished run.
    data : a built-in name, a registry name or a file.
    id_column : column that names the rows; without one they are numbered from 0.
    output : ``.csv`` or ``.parquet``.

    Returns
    -------
    Number of rows.

    Raises
    ------
    DataError : no model, or the table lacks columns of the model.
    ConfigError : unknown kind of output.
    """
    check_suffix(output)
    model, predict = _load(run_dir / "model.json")
    table = read_columns_of(data, model.columns, id_column)
    predictions = predict(table.values)
    named = named_predictions(model.classes, model.n_outputs, predictions)
    ids = np.arange(table.n_rows).astype(str) if table.ids is None else table.ids
    write_predictions(output, id_column or "row", ids, named)
    return table.n_rows


def parts_of(run_dir: Path) -> dict[str, Any] | None:
    """Where the parts of a run's model lie; None where the run's folder has the whole model."""
    path = run_dir / "model.json"
    begins = KIND.match(path.read_text()) if path.is_file() else None
    if not begins or begins[1] != PARTS:
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _load(path: Path) -> tuple[Model, Callable[[Array], Any]]:
    """A model of any method, and what predicts rows."""
    begins = KIND.match(path.read_text()) if path.is_file() else None
    if begins and begins[1] == bagged.KIND:
        forest = bagged.from_json(path.read_text())
        return forest, lambda values: forest.predictions(forest.leaves(values))
    if begins and begins[1] == stacked.KIND:
        stack = stacked.load_stacked(path)
        return stack, lambda values: transform(stack.objective, stack.predict_margins(values))
    if begins and begins[1] == LINEAR:
        linear = load_linear(path)
        return linear, lambda values: transform(linear.objective, predict_linear(linear, values))
    ensemble = load_model(path)
    return ensemble, lambda values: transform(ensemble.objective, predict_margins(ensemble, values))
