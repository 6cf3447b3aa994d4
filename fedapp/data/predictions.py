"""Tables to predict, and the predictions as they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.build import build_table
from fedapp.data.datasets import dataset_names, read_source
from fedapp.data.load import read_frame, text_file
from fedapp.data.schema import Reader, Roles
from fedapp.errors import ConfigError, DataError
from fedapp.site.table import Table

Array = npt.NDArray[Any]
SUFFIXES = (".csv", ".parquet")


def read_columns_of(data: str, columns: Sequence[str], id_column: str) -> Table:
    """A table with a model's columns in the model's order; no others of a file are looked at.

    Raises
    ------
    DataError : the table lacks a column, or breaks a rule.
    ConfigError : there is no such table, or the ids are a feature.
    """
    if data in dataset_names():
        return _only(read_source(data, id_column=id_column), columns)
    if id_column in columns:
        raise ConfigError(f"id must be no feature of the model, got {id_column}")
    reader = Reader(n_features=len(columns))
    frame = read_frame(Path(data), Roles(id_column=id_column), reader)
    _check_columns(columns, frame.column_names)
    kept = {*columns, id_column}
    others = [name for name in frame.column_names if name not in kept]
    roles = Roles(id_column=id_column, drop=tuple(others))
    return _only(build_table(frame, roles, text_file(Path(data))), columns)


def named_predictions(
    classes: Sequence[str], n_outputs: int, predictions: Array
) -> dict[str, Array]:
    """A column a class, one for two classes, or one for a regression.

    Parameters
    ----------
    predictions : float32, shape (n_rows, n_outputs).
    """
    if not classes:
        return {"prediction": predictions[:, 0]}
    names = classes if n_outputs > 1 else classes[1:]
    return {f"probability_{name}": predictions[:, k] for k, name in enumerate(names)}


def write_predictions(output: Path, id_name: str, ids: Array, columns: Mapping[str, Array]) -> None:
    """Write a line for every row.

    Raises
    ------
    ConfigError : unknown kind of output.
    """
    import pyarrow
    from pyarrow import csv, parquet

    check_suffix(output)
    frame = pyarrow.table({id_name: ids, **columns})
    if output.suffix == ".csv":
        csv.write_csv(frame, output)
    else:
        parquet.write_table(frame, output)


def check_suffix(output: Path) -> None:
    """Refuse a kind of output that cannot be written."""
    if output.suffix not in SUFFIXES:
        raise ConfigError(f"output must end in .csv or .parquet, got {output.name}")


def _only(table: Table, columns: Sequence[str]) -> Table:
    """The table without other features."""
    _check_columns(columns, table.columns)
    places = {name: place for place, name in enumerate(table.columns)}
    values = np.ascontiguousarray(table.values[:, [places[name] for name in columns]])
    # Without the notes: what is odd in rows to train on is not in rows to predict.
    return Table(tuple(columns), values, table.labels, table.weights, table.ids, table.groups)


def _check_columns(needed: Sequence[str], there: Sequence[str]) -> None:
    known = set(there)
    missing = [name for name in needed if name not in known]
    if missing:
        rule = "table must have the model's columns, lacks {}"
        raise DataError.naming(rule, ", ".join(missing[:5]))
