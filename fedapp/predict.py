"""Predict a table with the model of a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedapp.data.datasets import read_source
from fedapp.errors import ConfigError, DataError
from fedapp.trees.model import Ensemble, load_model
from fedapp.trees.objective import Array, transform
from fedapp.trees.predict import predict_margins


def predict_table(run_dir: Path, data: str, id_column: str, output: Path) -> int:
    """Write a line of predictions for every row.

    A column a class for multi-class models, else ``prediction``: the probability of the second
    class, or the value. Columns of the table that the model does not know are left out.

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
    model = load_model(run_dir / "model.json")
    table = read_source(data, label="", id_column=id_column, weight="", group="", drop=())
    missing = [name for name in model.columns if name not in table.columns]
    if missing:
        raise DataError(f"table must have the model's columns, lacks {', '.join(missing[:5])}")
    values = table.values[:, [table.columns.index(name) for name in model.columns]]
    predictions = transform(model.objective, predict_margins(model, np.ascontiguousarray(values)))
    ids = np.arange(table.n_rows).astype(str) if table.ids is None else table.ids
    _write(output, id_column or "row", ids, _named(model, predictions))
    return table.n_rows


def _named(model: Ensemble, predictions: Array) -> dict[str, Array]:
    """A column a class, or one."""
    if model.n_outputs == 1:
        return {"prediction": predictions[:, 0]}
    return {f"probability_{name}": predictions[:, k] for k, name in enumerate(model.classes)}


def _write(output: Path, id_name: str, ids: object, columns: Mapping[str, Array]) -> None:
    """Write CSV or Parquet."""
    import pyarrow
    from pyarrow import csv, parquet

    frame = pyarrow.table({id_name: ids, **columns})
    if output.suffix == ".csv":
        csv.write_csv(frame, output)
    else:
        parquet.write_table(frame, output)
