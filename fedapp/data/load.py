"""Reads one table from a CSV, Parquet or LIBSVM file.

A file becomes an Arrow frame (``read_frame``), a frame becomes a ``Table`` (``build_table``).
Errors name columns and counts, and of the file no more than its name.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from fedapp.errors import DataError
from fedapp.site.table import Table

MISSING = ("", "NA", "N/A", "nan", "NaN", "null", "?")
MISSING_GROUP = "missing"
LIBSVM_LABEL = "label"
FORMATS = {".csv": "csv", ".parquet": "parquet", ".libsvm": "libsvm", ".svm": "libsvm"}
PACKINGS = (".gz", ".bz2")
NO_NAME = "unnamed-"
# A row has to fit in one block: 8 MiB holds some 500,000 columns of numbers.
BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Roles:
    """Columns that are no features; an empty name means that there is no such column."""

    label: str = ""
    id_column: str = ""
    weight: str = ""
    group: str = ""
    drop: tuple[str, ...] = ()

    def named(self) -> dict[str, str]:
        """Role and column of those that are set, without the dropped ones."""
        names = (self.label, self.id_column, self.weight, self.group)
        roles = ("label", "id", "weight", "group")
        return {role: name for role, name in zip(roles, names, strict=True) if name}


@dataclass(frozen=True, slots=True)
class Reader:
    """How a file departs from one whose suffix and header line say it all.

    Parameters
    ----------
    format : "csv", "parquet" or "libsvm"; empty goes by the suffix.
    delimiter : one character, CSV alone.
    skip_lines : lines before the header, or before the first row where `columns` are given.
    columns : names for a CSV file without a header line.
    n_features : columns of a LIBSVM file; 0 means its highest index.
    """

    format: str = ""
    delimiter: str = ","
    skip_lines: int = 0
    columns: tuple[str, ...] = ()
    n_features: int = 0


PLAIN = Reader()


def load_table(
    path: Path,
    *,
    label: str = "",
    id_column: str = "",
    weight: str = "",
    group: str = "",
    drop: Sequence[str] = (),
) -> Table:
    """Read a table; every column without a role is a feature.

    Empty fields and NA, N/A, nan, NaN, null and ? are missing; booleans become 0 and 1. What a
    LIBSVM file leaves out is 0, not missing; its columns are f1, f2, ..., and its first token
    is the label whatever `label` says.

    Parameters
    ----------
    path : .csv, .parquet, .libsvm or .svm; all but Parquet also with .gz or .bz2.
    label, id_column, weight, group : names of columns; empty means none.
    drop : names of further columns that are no features.

    Returns
    -------
    Table : labels are float64 where all are numbers or booleans, else str; rows without a group
        are in the group "missing".

    Raises
    ------
    DataError : the file cannot be read, a named column is absent, a feature is text or infinite,
        or a label, id or weight breaks its rule.
    """
    roles = Roles(label, id_column, weight, group, tuple(drop))
    if file_format(path) == "libsvm":
        roles = replace(roles, label=label or LIBSVM_LABEL)
    return build_table(read_frame(path, roles), roles)


def file_format(path: Path) -> str:
    """Format by the file's suffix.

    Raises
    ------
    DataError : the suffix is not known.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKINGS:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in FORMATS:
        known, packed = ", ".join(FORMATS), " or ".join(PACKINGS)
        raise DataError(
            f"data file must end in {known} (or these with {packed}), got '{path.name}'"
        )
    return FORMATS[suffixes[-1]]


def read_frame(path: Path, roles: Roles, reader: Reader = PLAIN) -> Any:
    """Read a file's columns as they are.

    Returns
    -------
    pyarrow.Table : ids, groups and labels of a CSV file are read as text, then labels that are all
        numbers or booleans turned into float64.

    Raises
    ------
    DataError : the file is absent, cannot be read, or is malformed.
    """
    format = reader.format or file_format(path)
    read = {"csv": _read_csv, "parquet": _read_parquet, "libsvm": _read_libsvm}[format]
    try:
        if not path.is_file():
            raise DataError(f"data file must exist, got '{path.name}'")
        return _named(read(path, roles, reader))
    except (pa.ArrowException, OSError, EOFError, ValueError, OverflowError, zlib.error) as error:
        # Unchained: the reader's own text may quote a row or the path.
        rule = f"data file '{path.name}' must be a well-formed {format} file"
        raise DataError(f"{rule}, got {_fault(error)}") from None


def build_table(frame: Any, roles: Roles) -> Table:
    """Turn a frame into a table.

    Parameters
    ----------
    frame : pyarrow.Table.
    roles : columns that are no features.

    Raises
    ------
    DataError : see `load_table`.
    """
    _check_columns(frame, roles)
    others = {*roles.named().values(), *roles.drop}
    columns = tuple(name for name in frame.column_names if name not in others)
    nameless = [name for name in columns if name.startswith(NO_NAME)]
    if nameless:
        rule = "feature columns must have names, got {} without; a row number is no feature: "
        raise DataError.naming(rule + "drop-columns={}", _listed(nameless), ",".join(nameless))
    if not columns:
        found = _listed(frame.column_names)
        raise DataError.naming("table must have a feature column, got only {}", found)
    return Table(
        columns,
        _values(frame, columns),
        _labels(frame[roles.label], roles.label) if roles.label else None,
        _weights(frame[roles.weight], roles.weight) if roles.weight else None,
        _ids(frame[roles.id_column], roles.id_column) if roles.id_column else None,
        _texts(frame[roles.group]) if roles.group else None,
    )


def is_number(type: Any) -> bool:
    """Whether an Arrow type holds numbers, booleans or nothing but missing values."""
    if pa.types.is_dictionary(type):
        return is_number(type.value_type)
    tests = ("is_integer", "is_floating", "is_boolean", "is_decimal", "is_null")
    return any(getattr(pa.types, test)(type) for test in tests)


def _named(frame: Any) -> Any:
    """A column without a name gets one, so that it can be dropped."""
    names = enumerate(frame.column_names, start=1)
    return frame.rename_columns([name or f"{NO_NAME}{place}" for place, name in names])


def _read_csv(path: Path, roles: Roles, reader: Reader) -> Any:
    texts = {roles.label, roles.id_column, roles.group} - {""}
    with pa.input_stream(str(path), compression="detect") as stream:
        frame = pa.csv.read_csv(
            stream,
            read_options=pa.csv.ReadOptions(
                block_size=BLOCK_BYTES,
                skip_rows=reader.skip_lines,
                column_names=list(reader.columns) or None,
            ),
            parse_options=pa.csv.ParseOptions(delimiter=reader.delimiter),
            convert_options=pa.csv.ConvertOptions(
                null_values=list(MISSING),
                strings_can_be_null=True,
                column_types=dict.fromkeys(texts, pa.string()),
            ),
        )
    if not roles.label or frame.column_names.count(roles.label) != 1:
        return frame
    at = frame.column_names.index(roles.label)
    return frame.set_column(at, roles.label, _parsed(frame[roles.label]))


def _read_parquet(path: Path, roles: Roles, reader: Reader) -> Any:
    with pa.parquet.ParquetFile(path) as file:
        return file.read()


def _read_libsvm(path: Path, roles: Roles, reader: Reader) -> Any:
    from sklearn.datasets import load_svmlight_file

    matrix, labels = load_svmlight_file(
        str(path), n_features=reader.n_features or None, dtype=np.float32, zero_based=False
    )
    features = [pa.array(column) for column in matrix.toarray(order="F").T]
    names = [f"f{index}" for index in range(1, len(features) + 1)]
    return pa.Table.from_arrays(
        [pa.array(labels), *features], names=[roles.label or LIBSVM_LABEL, *names]
    )


def _fault(error: Exception) -> str:
    """What is wrong with a file, in words that quote nothing from it."""
    fields = re.search(r"Expected (\d+) columns, got (\d+)", str(error))
    if fields:
        return f"a row of {fields[2]} fields where {fields[1]} are due"
    if "Empty CSV file" in str(error):
        return "an empty file"
    return f"one that cannot be read ({type(error).__name__})"


def _parsed(column: Any) -> Any:
    """Text as float64 where every field is a number or a boolean; else as it is."""
    # "1." and "2." are names of classes, "1." and "2.5" are numbers.
    if pc.all(pc.ends_with(column, pattern=".")).as_py():
        return column
    trimmed = pc.utf8_trim_whitespace(column)
    for type in (pa.float64(), pa.bool_()):
        try:
            return trimmed.cast(type).cast(pa.float64())
        except pa.ArrowInvalid:
            continue
    return column


def _check_columns(frame: Any, roles: Roles) -> None:
    names = frame.column_names
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        rule = "column names must be distinct, got {} more than once"
        raise DataError.naming(rule, _listed(repeated))
    for role, name in roles.named().items():
        if name not in names:
            rule = f"{role} column {{}} must be in the table, got columns {{}}"
            raise DataError.naming(rule, _listed([name]), _listed(names))
    absent = [name for name in roles.drop if name not in names]
    if absent:
        rule = "drop-columns must be columns of the table ({}), got {}"
        raise DataError.naming(rule, _listed(names), _listed(absent))
    if frame.num_rows == 0:
        raise DataError("table must have at least one row, got 0")


def _values(frame: Any, columns: tuple[str, ...]) -> npt.NDArray[np.float32]:
    texts = [name for name in columns if not is_number(frame[name].type)]
    if texts:
        rule = "feature columns must be numbers, got text in {}: encode them as numbers, or list "
        rule += "them in drop-columns (categorical columns are not supported yet)"
        raise DataError.naming(rule, _listed(texts))
    values = np.empty((frame.num_rows, len(columns)), np.float32)
    infinite = {}
    for index, name in enumerate(columns):
        _fill(values[:, index], frame[name])
        infinite[name] = int(np.isinf(values[:, index]).sum())
    found = [f"{count} in '{name}'" for name, count in infinite.items() if count]
    if found:
        rule = "feature columns must be finite as float32, got {} infinite"
        raise DataError.naming(rule, _first(found))
    return values


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


def _labels(column: Any, name: str) -> npt.NDArray[np.float64] | npt.NDArray[np.str_]:
    rule = "label column {} must"
    if not is_number(column.type):
        _refuse(f"{rule} have no missing values", name, column.null_count, column)
        return _texts(column)
    labels = _numbers(column)
    _refuse(f"{rule} have no missing values", name, int(np.isnan(labels).sum()), labels)
    _refuse(f"{rule} be finite", name, int(np.isinf(labels).sum()), labels)
    return labels


def _weights(column: Any, name: str) -> npt.NDArray[np.float32]:
    if not is_number(column.type):
        raise DataError.naming("weight column {} must be numbers, got text", _listed([name]))
    weights = np.empty(len(column), np.float32)
    _fill(weights, column)
    bad = int((~np.isfinite(weights) | (weights < 0)).sum())
    _refuse("weight column {} must be finite and >= 0 in every row", name, bad, weights)
    return weights


def _ids(column: Any, name: str) -> npt.NDArray[np.str_]:
    _refuse("id column {} must have no missing values", name, column.null_count, column)
    return _texts(column)


def _refuse(rule: str, name: str, n_bad: int, rows: Any) -> None:
    if n_bad:
        raise DataError.naming(f"{rule}, got {n_bad} of {len(rows)} rows", _listed([name]))


def _listed(names: Iterable[str]) -> str:
    return _first([f"'{name}'" for name in names])


def _first(words: Sequence[str], limit: int = 20) -> str:
    """Words with commas; past the limit only how many more there are."""
    rest = f" and {len(words) - limit} more" if len(words) > limit else ""
    return ", ".join(words[:limit]) + rest
