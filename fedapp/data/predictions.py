"""Tables to predict, and the predictions as they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp import metrics
from fedapp.data.build import build_table, is_unlabelled, notes_on_file
from fedapp.data.categories import Categories, chosen, recoded
from fedapp.data.datasets import dataset_names, read_source
from fedapp.data.labels import class_ids, label_texts
from fedapp.data.load import read_frame, text_file
from fedapp.data.notes import Note
from fedapp.data.places import TextFile
from fedapp.data.schema import PLAIN, Declared, Reader, Roles
from fedapp.data.table import Table
from fedapp.errors import ConfigError, DataError
from fedapp.home import open_private
from fedapp.trees.objective import Objective, margins_of

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
    """A table with a model's columns in the model's order; no others of a file are looked at.

    Parameters
    ----------
    roles : ids; labels and weights where the table has them for every row, else it is read without;
        weights count only beside labels, unless no labels are asked for. Base margins it must have.
    foreign : a column that no table of this party has.
    reader : what a schema says of the table; of its columns some may be absent.
    categories : of the model's columns; those with names are read as categories, whatever their
        values look like.

    Raises
    ------
    DataError : the table lacks a column, has the foreign one, or breaks a rule, or the ids are a
        feature; or it lacks base margins.
    ConfigError : there is no such table.
    """
    if data in dataset_names():
        known = replace(roles, label="")
        return _only(read_source(data, known), columns)
    if roles.id_column in columns:
        raise DataError.naming("id must not be a feature of the model, got {}", roles.id_column)
    reader = _of_model(reader, columns, categories)
    frame = read_frame(Path(data), roles, reader)
    return _of_frame(frame, columns, roles, reader, text_file(Path(data), reader), foreign)


def columns_of_frame(
    frame: Any, columns: Sequence[str], roles: Roles, reader: Reader, categories: Categories
) -> Table:
    """Rows in memory, as those of a file that is no text; see ``read_columns_of``.

    Parameters
    ----------
    frame : pyarrow.Table.

    Raises
    ------
    DataError : it lacks a column, or breaks a rule.
    """
    return _of_frame(frame, columns, roles, _of_model(reader, columns, categories))


def _of_frame(
    frame: Any,
    columns: Sequence[str],
    roles: Roles,
    reader: Reader,
    text: TextFile | None = None,
    foreign: str = "",
) -> Table:
    """The columns of a frame that a model has; ``text`` is the file that it is of."""
    _check_columns(columns, frame.column_names)
    if foreign and foreign in set(frame.column_names) - set(columns):
        rule = "table must not have the label column {}: is it the table of the party with labels?"
        raise DataError.naming(rule, f"'{foreign}'")
    if roles.base_margin and roles.base_margin not in frame.column_names:
        rule = "table must have the base-margin column {}, as the model was trained with it"
        raise DataError.naming(rule, f"'{roles.base_margin}'")
    known = _known_roles(frame, roles, columns)
    kept = {*columns, *known.named().values()}
    others = [name for name in frame.column_names if name not in kept]
    known = replace(known, drop=tuple(others))
    notes = [*notes_on_file(text), *_note_on_weights(frame, roles, known)]
    return _only(build_table(frame, known, text, reader), columns, notes)


def _of_model(reader: Reader, columns: Sequence[str], categories: Categories) -> Reader:
    """The reader, which knows that some columns hold categories."""
    found = {name for name, names in zip(columns, categories, strict=False) if names is not None}
    declared = {one.rename or one.name: one for one in reader.declared}
    for name in found:
        one = declared.get(name, Declared(name))
        declared[name] = replace(one, type=one.type or "category")
    return replace(
        reader, n_features=len(columns), tolerant=True, declared=tuple(declared.values())
    )


def in_codes_of(table: Table, categories: Categories) -> Table:
    """The table with a model's codes of categories, and with notes on names that the model does
    not have, which count as missing.

    Parameters
    ----------
    categories : of the model's columns, which are the table's.

    Raises
    ------
    DataError : a column holds text where the model has numbers, or numbers where it has categories.
    """
    values, unseen = recoded(table.values, table.categories, categories, table.columns)
    found = zip(table.columns, unseen.tolist(), strict=True)
    rule = "values of {} are no category of the model, and count as missing"
    notes = [Note(f"{count:,} {rule}", f"'{name}'") for name, count in found if count]
    return replace(table, values=values, categories=categories, notes=(*table.notes, *notes))


def _known_roles(frame: Any, roles: Roles, columns: Sequence[str]) -> Roles:
    """Without labels and weights where there is no such column, or it does not fill every row."""
    names = set(frame.column_names) - set(columns)
    full = {name for name in names if not frame[name].null_count}
    labels = frame[roles.label] if roles.label in full else None
    label = "" if labels is None or is_unlabelled(labels).any() else roles.label
    is_scored = bool(label) or not roles.label
    weight = roles.weight if is_scored and roles.weight in full else ""
    return replace(roles, label=label, weight=weight)


def _note_on_weights(frame: Any, roles: Roles, known: Roles) -> list[Note]:
    """That rows have labels but no weights, as the column is not there or does not fill them."""
    is_scored = bool(known.label) or not roles.label
    if not is_scored or not roles.weight or known.weight:
        return []
    why = "is none of the table beside its features"
    if roles.weight in frame.column_names and (n_empty := frame[roles.weight].null_count):
        why = f"has no value in {n_empty:,} of {frame.num_rows:,} rows"
    return [Note(f"scores are unweighted: weight column {{}} {why}", f"'{roles.weight}'")]


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


def by_class(predictions: Array) -> Array:
    """A probability a class, shape (n_rows, n_classes), of two classes too."""
    two = predictions.shape[1] == 1
    return np.hstack([1 - predictions, predictions]) if two else predictions


def prediction_scores(
    objective: Objective,
    classes: Sequence[str],
    predictions: Array,
    labels: Array,
    weights: Array | None,
    threshold: float | None,
) -> tuple[dict[str, float], str]:
    """Scores of predictions by the labels of their rows; where there are none, why not.

    Parameters
    ----------
    predictions : shape (n_rows, n_outputs).
    labels : names or numbers, as in a ``Table``.
    weights : of the rows; None: 1 each.
    threshold : of two classes, a probability; None where none was chosen.
    """
    if classes and (others := set(np.unique(label_texts(labels)).tolist()) - set(classes)):
        return {}, f"no scores: the label has {len(others)} values that are no class of the model"
    if not classes and labels.dtype.kind == "U":
        return {}, "no scores: the label must be numbers for a regression"
    given = (
        margins_of(objective, predictions.astype(np.float64)),
        class_ids(labels, classes),
        np.ones(len(labels), np.float32) if weights is None else weights,
    )
    scores = metrics.pooled(objective, *given)
    if threshold is not None:
        margin = float(np.log(threshold) - np.log1p(-threshold)) if threshold else -np.inf
        scores |= metrics.scores_from_margin(*given, margin) | {"threshold": threshold}
    return scores, ""


def unmatched_note(n_unmatched: int, n_asked: int) -> str:
    """How many rows have no prediction; which ones stands in no log."""
    return f"{n_unmatched:,} of {n_asked:,} rows were not matched"


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
    write = csv.write_csv if output.suffix == ".csv" else parquet.write_table
    with open_private(output, "wb") as file:
        write(frame, file)


def check_suffix(output: Path) -> None:
    """Refuse a kind of output that cannot be written."""
    if output.suffix not in SUFFIXES:
        raise ConfigError(f"output must end in .csv or .parquet, got {output.name}")


def _only(table: Table, columns: Sequence[str], notes: Sequence[Note] = ()) -> Table:
    """The table without other features, and with these notes alone."""
    _check_columns(columns, table.columns)
    places = {name: place for place, name in enumerate(table.columns)}
    taken = [places[name] for name in columns]
    values = np.ascontiguousarray(table.values[:, taken])
    # Without its own notes: what is odd in rows to train on is not in rows to predict.
    return replace(
        table,
        columns=tuple(columns),
        values=values,
        notes=tuple(notes),
        categories=chosen(table.categories, taken),
        kinds=(),
    )


def _check_columns(needed: Sequence[str], there: Sequence[str]) -> None:
    known = set(there)
    missing = [name for name in needed if name not in known]
    if missing:
        rule = "table must have the model's columns, lacks {}"
        raise DataError.naming(rule, ", ".join(missing[:5]))
