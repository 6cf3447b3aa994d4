"""Predict a table with the model of a finished run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from fedapp.data.datasets import dataset_names, read_source
from fedapp.data.load import Reader, Roles, build_table, read_frame
from fedapp.errors import ConfigError, DataError
from fedapp.linear import KIND as LINEAR
from fedapp.linear import LinearModel, load_linear, predict_linear
from fedapp.site.table import Table
from fedapp.trees import stacked
from fedapp.trees.model import Ensemble, load_model
from fedapp.trees.objective import Array, transform
from fedapp.trees.predict import predict_margins

Model = Ensemble | stacked.StackedModel | LinearModel
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
    if output.suffix not in {".csv", ".parquet"}:
        raise ConfigError(f"output must end in .csv or .parquet, got {output.name}")
    model, margins = _load(run_dir / "model.json")
    table = _read(data, model.columns, id_column)
    values = table.values[:, [table.columns.index(name) for name in model.columns]]
    predictions = transform(model.objective, margins(np.ascontiguousarray(values)))
    ids = np.arange(table.n_rows).astype(str) if table.ids is None else table.ids
    _write(output, id_column or "row", ids, _named(model, predictions))
    return table.n_rows


def _load(path: Path) -> tuple[Model, Callable[[Array], Array]]:
    """A model of any method, and what gives the margins of rows."""
    begins = KIND.match(path.read_text()) if path.is_file() else None
    if begins and begins[1] == stacked.KIND:
        model = stacked.load_stacked(path)
        return model, model.predict_margins
    if begins and begins[1] == LINEAR:
        linear = load_linear(path)
        return linear, partial(predict_linear, linear)
    ensemble = load_model(path)
    return ensemble, partial(predict_margins, ensemble)


def _read(data: str, columns: tuple[str, ...], id_column: str) -> Table:
    """A table that has the model's columns; of a file, only these are looked at."""
    if data in dataset_names():
        table = read_source(data, id_column=id_column)
        _check_columns(columns, table.columns)
        return table
    if id_column in columns:
        raise ConfigError(f"id must be no feature of the model, got {id_column}")
    reader = Reader(n_features=len(columns))
    frame = read_frame(Path(data), Roles(id_column=id_column), reader)
    _check_columns(columns, frame.column_names)
    others = [name for name in frame.column_names if name not in {*columns, id_column}]
    return build_table(frame, Roles(id_column=id_column, drop=tuple(others)))


def _check_columns(needed: Sequence[str], there: Sequence[str]) -> None:
    missing = [name for name in needed if name not in there]
    if missing:
        raise DataError(f"table must have the model's columns, lacks {', '.join(missing[:5])}")


def _named(model: Model, predictions: Array) -> dict[str, Array]:
    """A column a class, or one."""
    if not model.classes:
        return {"prediction": predictions[:, 0]}
    names = model.classes if model.n_outputs > 1 else model.classes[1:]
    return {f"probability_{name}": predictions[:, k] for k, name in enumerate(names)}


def _write(output: Path, id_name: str, ids: object, columns: Mapping[str, Array]) -> None:
    """Write CSV or Parquet."""
    import pyarrow
    from pyarrow import csv, parquet

    frame = pyarrow.table({id_name: ids, **columns})
    if output.suffix == ".csv":
        csv.write_csv(frame, output)
    else:
        parquet.write_table(frame, output)
