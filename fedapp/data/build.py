"""Turns an Arrow frame into a ``Table``: features, labels, weights, ids, each held to its rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fedapp.data.categories import Categories
from fedapp.data.faults import no_numbers, not_utf8
from fedapp.data.notes import Note, note_on_ids, notes_on_features
from fedapp.data.places import TextFile, is_number
from fedapp.data.schema import NO_NAME, Roles, first, listed
from fedapp.data.table import Table
from fedapp.errors import DataError
from fedapp.names import near

MISSING_GROUP = "missing"
DELIMITERS = {";": "semicolons", "\t": "tabs"}
Mask = npt.NDArray[np.bool_]


def build_table(frame: Any, roles: Roles, text: TextFile | None = None) -> Table:
    """Turn a frame into a table.

    Parameters
    ----------
    frame : pyarrow.Table.
    roles : columns that are not features.
    text : the CSV file that the frame is of, to say where in it an error is.

    Raises
    ------
    DataError : see `load_table`.
    """
    _check_columns(frame, roles)
    others = {*roles.named().values(), *roles.drop}
    columns = tuple(name for name in frame.column_names if name not in others)
    nameless = [name for name in columns if name.startswith(NO_NAME)]
    if nameless:
        rule = "feature columns must have names, got {} without; a row number is not a feature: "
        raise DataError.naming(rule + "drop-columns={}", listed(nameless), ",".join(nameless))
    if not columns:
        found = listed(frame.column_names)
        raise DataError.naming("table must have a feature column, got only {}", found)
    values, categories = _values(frame, columns, text)
    ids = _ids(frame[roles.id_column], roles.id_column, text) if roles.id_column else None
    notes = notes_on_features(columns, values, lambda name: _numbers(frame[name]), categories)
    return Table(
        columns,
        values,
        _labels(frame[roles.label], roles.label, text) if roles.label else None,
        _weights(frame[roles.weight], roles.weight, text) if roles.weight else None,
        ids,
        _texts(frame[roles.group]) if roles.group else None,
        notes=(
            *notes_on_file(text),
            *([] if ids is None else note_on_ids(roles.id_column, ids)),
            *notes,
        ),
        categories=categories,
    )


def notes_on_file(text: TextFile | None) -> list[Note]:
    """What is odd about how a table is written: that fields are not separated by commas."""
    if text is None or text.reader.delimiter not in DELIMITERS:
        return []
    mark = DELIMITERS[text.reader.delimiter]
    return [Note(f"data file is read as one with {mark} between its fields")]


def holds_numbers(type: Any) -> bool:
    """Whether an Arrow type holds numbers, booleans or nothing but missing values."""
    if pa.types.is_dictionary(type):
        return holds_numbers(type.value_type)
    tests = ("is_integer", "is_floating", "is_boolean", "is_decimal", "is_null")
    return any(getattr(pa.types, test)(type) for test in tests)


def _check_columns(frame: Any, roles: Roles) -> None:
    names = frame.column_names
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        rule = "column names must be distinct, got {} more than once"
        raise DataError.naming(rule, listed(repeated))
    for role, name in roles.named().items():
        if name not in names:
            rule = f"{role} column {{}} must be in the table, got columns {{}}"
            raise _absent(rule, listed([name]), listed(names), hint=near(name, names))
    absent = [name for name in roles.drop if name not in names]
    if absent:
        rule = "drop-columns must be columns of the table ({}), got {}"
        raise _absent(rule, listed(names), listed(absent), hint=near(absent[0], names))
    if frame.num_rows == 0:
        raise DataError("table must have at least one row, got 0")


def _absent(rule: str, *columns: str, hint: str) -> DataError:
    """A column that is not there, and for those who may know the names, what may be meant."""
    return DataError(rule.format(*columns) + hint, outside=DataError.naming(rule, *columns).outside)


def _values(
    frame: Any, columns: tuple[str, ...], text: TextFile | None
) -> tuple[npt.NDArray[np.float32], Categories]:
    """Numbers, and codes of categories with their names."""
    texts = [name for name in columns if not holds_numbers(frame[name].type)]
    mixed = [name for name in texts if _is_mixed(frame[name])]
    if mixed:
        raise _no_numbers(frame, mixed, text)
    values = np.empty((frame.num_rows, len(columns)), np.float32)
    categories: list[tuple[str, ...] | None] = []
    infinite = {}
    for index, name in enumerate(columns):
        column, names = frame[name], None
        if not holds_numbers(column.type):
            column, names = encoded(column)
        _fill(values[:, index], column)
        categories.append(names)
        infinite[name] = int(np.isinf(values[:, index]).sum())
    found = [f"{count} in '{name}'" for name, count in infinite.items() if count]
    if found:
        rule = "feature columns must be finite as float32, got {} infinite"
        line = _first_line(np.asarray(np.isinf(values).any(axis=1)), text)
        here = rule.format(first(found)) + line
        raise DataError.naming(rule, first(found), here=here)
    return values, tuple(categories) if any(names is not None for names in categories) else ()


def _is_mixed(column: Any) -> bool:
    """Whether some of a column's values are numbers, and others are not."""
    if not pa.types.is_string(column.type):
        return not pa.types.is_dictionary(column.type)
    values = pc.unique(column).drop_null().to_pylist()
    n_numbers = sum(is_number(value) for value in values)
    return 0 < n_numbers < len(values)


def encoded(column: Any) -> tuple[Any, tuple[str, ...]]:
    """A column of text as codes, and the names that they stand for, sorted by text.

    Parameters
    ----------
    column : pyarrow.ChunkedArray of text, or of a dictionary of text.
    """
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    column = column.cast(pa.string())
    names = pc.unique(column).drop_null()
    names = names.take(pc.sort_indices(names))
    return pc.index_in(column, value_set=names), tuple(names.to_pylist())


def _no_numbers(frame: Any, texts: Sequence[str], text: TextFile | None) -> DataError:
    """Feature columns of text, and for their owner, which values are none in which line."""
    rule = "feature columns must be numbers, got text in {}: encode them as numbers, or list "
    rule += "them in drop-columns (categorical columns are not supported yet)"
    if text is None:
        return DataError.naming(rule, listed(texts))
    if any(pa.types.is_binary(frame[name].type) for name in texts) and (bad := text.bad_bytes()):
        rule = "data file must be UTF-8, got other bytes in {}"
        return DataError.naming(rule, listed(texts), here=not_utf8(text.path.name, bad))
    faults = text.no_numbers(texts)
    here = no_numbers("feature columns", faults) if faults else ""
    return DataError.naming(rule, listed(texts), here=here)


def _fill(out: npt.NDArray[Any], column: Any) -> None:
    """Copy a column of numbers, chunk by chunk; missing becomes NaN."""
    column = _plain(column)
    start = 0
    with np.errstate(over="ignore"):
        for chunk in column.chunks:
            out[start : start + len(chunk)] = chunk.to_numpy(zero_copy_only=False)
            start += len(chunk)


def _plain(column: Any) -> Any:
    """The column in a type that numpy has."""
    type = column.type
    if pa.types.is_dictionary(type):
        return _plain(column.cast(type.value_type))
    if pa.types.is_boolean(type):
        return column.cast(pa.int8())
    if pa.types.is_decimal(type) or pa.types.is_null(type):
        return column.cast(pa.float64())
    return column


def _numbers(column: Any) -> npt.NDArray[np.float64]:
    out = np.empty(len(column), np.float64)
    _fill(out, column)
    return out


def _texts(column: Any) -> npt.NDArray[np.str_]:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    filled = column.cast(pa.string()).fill_null(MISSING_GROUP)
    return np.asarray(filled.to_numpy(), dtype=np.str_)


def _labels(
    column: Any, name: str, text: TextFile | None
) -> npt.NDArray[np.float64] | npt.NDArray[np.str_]:
    rule = "label column {} must"
    if not holds_numbers(column.type):
        _refuse(f"{rule} have no missing values", name, _missing(column), text)
        return _texts(column)
    labels = _numbers(column)
    _refuse(f"{rule} have no missing values", name, np.isnan(labels), text)
    _refuse(f"{rule} be finite", name, np.isinf(labels), text)
    return labels


def _weights(column: Any, name: str, text: TextFile | None) -> npt.NDArray[np.float32]:
    if not holds_numbers(column.type):
        faults = text.no_numbers([name]) if text else []
        here = no_numbers("weight column", faults) if faults else ""
        rule = "weight column {} must be numbers, got text"
        raise DataError.naming(rule, listed([name]), here=here)
    weights = np.empty(len(column), np.float32)
    _fill(weights, column)
    rule = "weight column {} must be finite and >= 0 in every row"
    _refuse(rule, name, ~np.isfinite(weights) | (weights < 0), text)
    return weights


def _ids(column: Any, name: str, text: TextFile | None) -> npt.NDArray[np.str_]:
    _refuse("id column {} must have no missing values", name, _missing(column), text)
    return _texts(column)


def _missing(column: Any) -> Mask:
    """Which values are missing."""
    return np.asarray(pc.is_null(column).to_numpy(), dtype=bool)


def _refuse(rule: str, name: str, bad: Mask, text: TextFile | None) -> None:
    """Raise where a row is bad."""
    if bad.any():
        told = f"{rule}, got {int(bad.sum())} of {len(bad)} rows"
        here = told.format(f"'{name}'") + _first_line(bad, text)
        raise DataError.naming(told, listed([name]), here=here)


def _first_line(bad: Mask, text: TextFile | None) -> str:
    """Where the first bad row is, in a text."""
    return f", first in line {text.line_of(int(bad.argmax())):,}" if text else ""
