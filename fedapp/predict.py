"""Predict a table with the model of a finished run."""

from __future__ import annotations

import json
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
from fedapp.linear import LinearModel, linear_from_json, predict_linear
from fedapp.trees import bagged, stacked
from fedapp.trees.model import KIND as BOOSTED
from fedapp.trees.model import Ensemble, from_json, kind_of, model_text
from fedapp.trees.objective import Array, transform
from fedapp.trees.parts import PARTS
from fedapp.trees.predict import predict_margins

Model = Ensemble | bagged.BaggedForest | stacked.StackedModel | LinearModel
Predict = Callable[[Any, Array], Any]  # a model, and rows with NaN for missing, to predictions


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
    predictions = predict(model, table.values)
    named = named_predictions(model.classes, model.n_outputs, predictions)
    ids = np.arange(table.n_rows).astype(str) if table.ids is None else table.ids
    write_predictions(output, id_column or "row", ids, named)
    return table.n_rows


def parts_of(run_dir: Path) -> dict[str, Any] | None:
    """Where the parts of a run's model lie; None where the run's folder has the whole model."""
    path = run_dir / "model.json"
    text = path.read_text() if path.is_file() else ""
    if kind_of(text) != PARTS:
        return None
    found: dict[str, Any] = json.loads(text)
    return found


def _by_leaves(forest: bagged.BaggedForest, values: Array) -> Any:
    return forest.predictions(forest.leaves(values))


def _by_margins(margins: Callable[[Any, Array], Array]) -> Predict:
    return lambda model, values: transform(model.objective, margins(model, values))


_KINDS: dict[str, tuple[Callable[[str], Model], Predict]] = {
    BOOSTED: (from_json, _by_margins(predict_margins)),
    bagged.KIND: (bagged.from_json, _by_leaves),
    stacked.KIND: (stacked.from_json, _by_margins(stacked.StackedModel.predict_margins)),
    LINEAR: (linear_from_json, _by_margins(predict_linear)),
}


def _load(path: Path) -> tuple[Model, Predict]:
    """A model of any method, and what predicts rows; an unknown kind is read as a boosted model."""
    text = model_text(path)
    read, predict = _KINDS.get(kind_of(text), _KINDS[BOOSTED])
    return read(text), predict
