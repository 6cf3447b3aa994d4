"""Read tables to predict; name, score and write predictions."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.columns import Columns
from fedapp.data.convert import Converted
from fedapp.data.csv_errors import TextFile
from fedapp.data.datasets import source_frame
from fedapp.data.notes import Note, note_on_groups, notes_on_file
from fedapp.data.read import read_frame, text_file
from fedapp.data.schema import PLAIN, REGISTRY, Reader, Roles, id_columns
from fedapp.data.table import (
    NEEDS_ID,
    Table,
    check_columns,
    groups_of,
    is_missing,
    read_role,
    rows_of,
)
from fedapp.errors import CONTROL, DataError
from fedapp.home import Kind, replacing
from fedapp.trees.categories import Categories

Array = npt.NDArray[Any]
MOST_HEADER = 1 << 20  # characters of a first line
GROUP_ROWS = 1 << 20  # written at once: a row group of pyarrow
FORMULA = re.compile(r"\s*[-=+@\uff0d\uff1d\uff0b\uff20]")  # also at full width
NUMBER = re.compile(r"[-+]?(\d+[.,]?\d*|[.,]\d+)([eE][-+]?\d+)?", re.ASCII)


def read_columns_of(
    data: str,
    columns: Sequence[str],
    roles: Roles,
    foreign: str = "",
    reader: Reader = PLAIN,
    categories: Categories = (),
    kinds: Sequence[str] = (),
) -> Table:
    """Read a model's columns in the model's order and its category codes, and no other features.

    Parameters
    ----------
    roles : ids; labels and weights are read if the table has them in every row. Weights are read
        only with labels, unless `roles` has no label. Base margins are required.
    foreign : a column that no table of this party may have.
    reader : from a schema; declared columns may be absent.
    categories : of the model's columns; other values count as missing, which is noted.
    kinds : of the model's columns; a column of another is refused.
    """
    if data in REGISTRY:
        frame, roles, text, reader = source_frame(data, replace(roles, label=""))
        model = Columns.of_model(columns, categories, reader, kinds)
        return columns_of_frame(frame, model, roles, text)
    if {*id_columns(roles.id_column)} & {*columns}:
        raise DataError.naming("id must not be a feature of the model, got {}", roles.id_column)
    model = Columns.of_model(columns, categories, reader, kinds)
    if reader.aggregates and not roles.id_column:
        raise DataError(NEEDS_ID)
    frame = read_frame(Path(data), roles, model.reader)
    return columns_of_frame(frame, model, roles, text_file(Path(data), reader), foreign)


def columns_of_frame(
    frame: Any, model: Columns, roles: Roles, text: TextFile | None = None, foreign: str = ""
) -> Table:
    """Read a model's columns from a pyarrow.Table, of which `text` is the file if it is CSV."""
    names = model.names
    present = set(frame.column_names)
    if missing := [name for name in names if name not in present]:
        rule = "table must have the model's columns, lacks {}"
        raise DataError.naming(rule, ", ".join(missing[:5]))
    others = present.difference(names)
    if foreign in others:
        rule = "table must not have the label column {}: is it the table of the party with labels?"
        raise DataError.naming(rule, f"'{foreign}'")
    if roles.base_margin and roles.base_margin not in present:
        rule = "table must have the base-margin column {}, as the model was trained with it"
        raise DataError.naming(rule, f"'{roles.base_margin}'")
    check_columns(frame, replace(roles, label="", weight="", event="", qid="", drop=()))
    notes, named, read = notes_on_file(text), roles.named(), dict[str, Converted]()

    def n_empty(role: str) -> int:
        read[role] = read_role(frame, role, named[role], model.reader, text)
        return int(is_missing(read[role].numbers).sum())

    # Labels and weights only from columns that fill every row. Without their event or query, nobody
    # knows what labels are.
    of_labels = [role for role in ("label", "event", "qid") if role in named]
    full = [role for role in of_labels if named[role] in others and not n_empty(role)]
    if not roles.label or full != of_labels:
        weight = "" if roles.label else roles.weight
        roles = replace(roles, label="", event="", qid="", weight=weight)
    why = ""
    if roles.weight and roles.weight not in others:
        why = "is none of the table beside its features"
    elif roles.weight and (count := n_empty("weight")):
        why = f"has no value in {count:,} of {frame.num_rows:,} rows"
    if why:
        notes.append(Note(f"scores are unweighted: weight column {{}} {why}", f"'{roles.weight}'"))
        roles = replace(roles, weight="")
    read = {
        role: read.get(role) or read_role(frame, role, name, model.reader, text)
        for role, name in roles.named().items()
    }
    groups = groups_of(frame, read, names, model.reader, text) if roles.id_column else None
    notes += note_on_groups(groups)
    values, converted = model.convert(frame, text, groups)
    rule = "values of {} are no category of the model, and count as missing"
    notes += [
        Note(f"{column.n_outside:,} {rule}", f"'{name}'")
        for name, column in zip(names, converted, strict=True)
        if column.n_outside
    ]
    rows = rows_of(read, roles, text, groups)
    table = Table(names, values, notes=tuple(notes), categories=model.categories, **rows)
    return replace(table, n_read=len(groups.rows)) if groups else table


def score_names(classes: Sequence[str], n_outputs: int) -> list[str]:
    """Names of the columns of predictions: one per class, one for two classes or a regression."""
    names = classes if n_outputs > 1 else classes[1:]
    return [f"probability_{name}" for name in names] if classes else ["prediction"]


def named_predictions(
    classes: Sequence[str], n_outputs: int, predictions: Array
) -> dict[str, Array]:
    """Columns of float32 predictions, shape (n_rows, n_outputs), by their `score_names`."""
    return dict(zip(score_names(classes, n_outputs), predictions.T, strict=True))


def by_class(predictions: Array) -> Array:
    """Probability of each class, shape (n_rows, n_classes), also for two classes."""
    two = predictions.shape[1] == 1
    return np.hstack([1 - predictions, predictions]) if two else predictions


def most_probable(classes: Sequence[str], predictions: Array) -> list[str]:
    """The most probable class of each row; none for a regression."""
    class_ids = by_class(predictions).argmax(axis=1).tolist() if classes else ()
    return [classes[class_id] for class_id in class_ids]


def unmatched_note(n_unmatched: int, n_asked: int) -> str:
    """How many rows have no prediction. Their ids must not appear in a log."""
    return f"{n_unmatched:,} of {n_asked:,} rows were not matched"


def write_predictions(
    output: Path, id_name: str, ids: Array | None, columns: Mapping[str, Array]
) -> None:
    """Write one row per prediction to a file that `check_output` allows, some rows at a time.

    Without ``ids`` rows are numbered from 0. Texts of a CSV file are made `harmless`, those of a
    Parquet file are exact.
    """
    import pyarrow
    from pyarrow import csv as arrow_csv
    from pyarrow import parquet

    is_csv = output.suffix == ".csv"
    names, n_rows = [id_name, *columns], len(next(iter(columns.values())))
    if is_csv:
        names = list(map(harmless, names))
    kind, writer = arrow_csv.CSVWriter if is_csv else parquet.ParquetWriter, None
    with replacing(output) as file, ExitStack() as stack:
        for start in range(0, max(1, n_rows), GROUP_ROWS):
            rows = slice(start, min(start + GROUP_ROWS, n_rows))
            named = np.arange(start, rows.stop).astype(str) if ids is None else ids[rows]
            if is_csv:
                named = np.array(list(map(harmless, named.tolist())))
            arrays = [named, *(column[rows] for column in columns.values())]
            part = pyarrow.Table.from_arrays(list(map(pyarrow.array, arrays)), names)
            writer = writer or stack.enter_context(kind(file, part.schema))
            writer.write_table(part)


def _has_columns_of_predictions(path: Path) -> bool:
    """Whether a file has the columns of predictions, or of SHAP values, and an id before them."""
    import pyarrow
    from pyarrow import parquet

    try:
        if path.suffix == ".parquet":
            names = parquet.read_schema(path).names[1:]
        else:
            with path.open(encoding="utf-8", newline="") as file:
                names = next(csv.reader([file.readline(MOST_HEADER)]), [])[1:]
    except (pyarrow.ArrowException, UnicodeDecodeError, csv.Error):
        return False
    scores = all(name == "prediction" or name.startswith("probability_") for name in names)
    return bool(names) and (scores or names[-1].split(" ")[-1] == "bias")


PREDICTIONS = Kind("a file of predictions", (".csv", ".parquet"), _has_columns_of_predictions)


def harmless(text: str) -> str:
    """A text of a CSV file that a spreadsheet takes for no formula, and a terminal for no command.

    An apostrophe goes before what begins like a formula and is no number; control characters become
    question marks.
    """
    plain = CONTROL.sub("?", text)
    return f"'{plain}" if FORMULA.match(plain) and not NUMBER.fullmatch(plain) else plain
