"""Read tables to predict; name, score and write predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.csv_errors import TextFile
from fedapp.data.datasets import dataset_names, read_source
from fedapp.data.read import read_frame, text_file
from fedapp.data.schema import PLAIN, Declared, Reader, Roles
from fedapp.data.table import Note, Table, build_table, is_unlabelled, notes_on_file
from fedapp.errors import ConfigError, DataError
from fedapp.home import open_private
from fedapp.trees.categories import Categories, chosen, recoded

Array = npt.NDArray[Any]
SUFFIXES = (".csv", ".parquet")


def read_columns_of(
    data: str,
    columns: Sequence[str],
    roles: Roles,
    foreign: str = "",
    reader: Reader = PLAIN,
    categories: Categories = (),
) -> Table:
    """Read a model's columns in the model's order, and no other features.

    Parameters
    ----------
    roles : ids; labels and weights are read if the table has them in every row. Weights are read
        only with labels, unless `roles` has no label. Base margins are required.
    foreign : a column that no table of this party may have.
    reader : from a schema; declared columns may be absent.
    categories : of the model's columns; those with names are read as categories.
    """
    if data in dataset_names():
        unlabelled = replace(roles, label="")
        return _only(read_source(data, unlabelled), columns)
    if roles.id_column in columns:
        raise DataError.naming("id must not be a feature of the model, got {}", roles.id_column)
    reader = _of_model(reader, columns, categories)
    frame = read_frame(Path(data), roles, reader)
    return _of_frame(frame, columns, roles, reader, text_file(Path(data), reader), foreign)


def columns_of_frame(
    frame: Any, columns: Sequence[str], roles: Roles, reader: Reader, categories: Categories
) -> Table:
    """Read a model's columns from a pyarrow.Table; see ``read_columns_of``."""
    return _of_frame(frame, columns, roles, _of_model(reader, columns, categories))


def _of_frame(
    frame: Any,
    columns: Sequence[str],
    roles: Roles,
    reader: Reader,
    text: TextFile | None = None,
    foreign: str = "",
) -> Table:
    """Build the table of a model's columns; `text` is the file of the frame."""
    _check_columns(columns, frame.column_names)
    if foreign and foreign in set(frame.column_names) - set(columns):
        rule = "table must not have the label column {}: is it the table of the party with labels?"
        raise DataError.naming(rule, f"'{foreign}'")
    if roles.base_margin and roles.base_margin not in frame.column_names:
        rule = "table must have the base-margin column {}, as the model was trained with it"
        raise DataError.naming(rule, f"'{roles.base_margin}'")
    # Labels and weights only from columns that fill every row.
    names = set(frame.column_names) - set(columns)
    full = {name for name in names if not frame[name].null_count}
    labels = frame[roles.label] if roles.label in full else None
    label = "" if labels is None or is_unlabelled(labels).any() else roles.label
    is_scored = bool(label) or not roles.label
    weight = roles.weight if is_scored and roles.weight in full else ""
    present = replace(roles, label=label, weight=weight)
    used = {*columns, *present.named().values()}
    others = [name for name in frame.column_names if name not in used]
    present = replace(present, drop=tuple(others))
    notes = [*notes_on_file(text), *_note_on_weights(frame, roles, present)]
    return _only(build_table(frame, present, text, reader), columns, notes)


def _of_model(reader: Reader, columns: Sequence[str], categories: Categories) -> Reader:
    """Declare the model's categorical columns as categories."""
    categorical = {
        name for name, names in zip(columns, categories, strict=False) if names is not None
    }
    declared = {one.rename or one.name: one for one in reader.declared}
    for name in categorical:
        one = declared.get(name, Declared(name))
        declared[name] = replace(one, type=one.type or "category")
    return replace(
        reader, n_features=len(columns), tolerant=True, declared=tuple(declared.values())
    )


def in_codes_of(table: Table, categories: Categories) -> Table:
    """Convert categories to a model's codes, and note names that the model lacks.

    Such values become missing. Raises DataError if a column is text and numeric in the model, or
    the reverse.
    """
    values, unseen = recoded(table.values, table.categories, categories, table.columns)
    counts = zip(table.columns, unseen.tolist(), strict=True)
    rule = "values of {} are no category of the model, and count as missing"
    notes = [Note(f"{count:,} {rule}", f"'{name}'") for name, count in counts if count]
    return replace(table, values=values, categories=categories, notes=(*table.notes, *notes))


def _note_on_weights(frame: Any, roles: Roles, present: Roles) -> list[Note]:
    """Note that scores are unweighted, as the weight column is absent or incomplete."""
    is_scored = bool(present.label) or not roles.label
    if not is_scored or not roles.weight or present.weight:
        return []
    why = "is none of the table beside its features"
    if roles.weight in frame.column_names and (n_empty := frame[roles.weight].null_count):
        why = f"has no value in {n_empty:,} of {frame.num_rows:,} rows"
    return [Note(f"scores are unweighted: weight column {{}} {why}", f"'{roles.weight}'")]


def named_predictions(
    classes: Sequence[str], n_outputs: int, predictions: Array
) -> dict[str, Array]:
    """One column per class, one for two classes, or one for regression.

    `predictions` is float32, shape (n_rows, n_outputs).
    """
    if not classes:
        return {"prediction": predictions[:, 0]}
    names = classes if n_outputs > 1 else classes[1:]
    return {f"probability_{name}": predictions[:, k] for k, name in enumerate(names)}


def by_class(predictions: Array) -> Array:
    """Probability of each class, shape (n_rows, n_classes), also for two classes."""
    two = predictions.shape[1] == 1
    return np.hstack([1 - predictions, predictions]) if two else predictions


def unmatched_note(n_unmatched: int, n_asked: int) -> str:
    """How many rows have no prediction. Their ids must not appear in a log."""
    return f"{n_unmatched:,} of {n_asked:,} rows were not matched"


def write_predictions(output: Path, id_name: str, ids: Array, columns: Mapping[str, Array]) -> None:
    """Write one row per prediction; raises ConfigError for an unknown suffix."""
    import pyarrow
    from pyarrow import csv, parquet

    check_suffix(output)
    frame = pyarrow.table({id_name: ids, **columns})
    write = csv.write_csv if output.suffix == ".csv" else parquet.write_table
    with open_private(output, "wb") as file:
        write(frame, file)


def check_suffix(output: Path) -> None:
    """Check that predictions can be written in this format."""
    if output.suffix not in SUFFIXES:
        raise ConfigError(f"output must end in .csv or .parquet, got {output.name}")


def _only(table: Table, columns: Sequence[str], notes: Sequence[Note] = ()) -> Table:
    """Keep only these features, and replace the notes."""
    _check_columns(columns, table.columns)
    places = {name: place for place, name in enumerate(table.columns)}
    taken = [places[name] for name in columns]
    values = np.ascontiguousarray(table.values[:, taken])
    # Not the table's notes: they warn about rows to train on.
    return replace(
        table,
        columns=tuple(columns),
        values=values,
        notes=tuple(notes),
        categories=chosen(table.categories, taken),
        kinds=(),
    )


def _check_columns(needed: Sequence[str], present: Sequence[str]) -> None:
    names = set(present)
    missing = [name for name in needed if name not in names]
    if missing:
        rule = "table must have the model's columns, lacks {}"
        raise DataError.naming(rule, ", ".join(missing[:5]))
