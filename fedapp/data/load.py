"""Reads one table from a CSV, Parquet or LIBSVM file.

A file becomes an Arrow frame (``read_frame``), a frame becomes a ``Table`` (``build_table``).
Errors name columns and counts, and of the file no more than its name; to the table's owner they
also say where in a text the error is, and quote a value.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from fedapp.data.build import build_table
from fedapp.data.faults import not_utf8, ragged
from fedapp.data.places import TextFile, delimiter_of, is_number
from fedapp.data.registry import REGISTRY
from fedapp.data.schema import MISSING, NO_ROLES, PACKINGS, PLAIN, Reader, Roles, with_names
from fedapp.data.table import Table
from fedapp.errors import DataError

LIBSVM_LABEL = "label"
FORMATS = {".csv": "csv", ".parquet": "parquet", ".libsvm": "libsvm", ".svm": "libsvm"}
# A row has to fit in one block: 8 MiB holds some 500,000 columns of numbers.
BLOCK_BYTES = 8 << 20
CANNOT_READ = (
    *(pa.ArrowException, OSError, EOFError, ValueError, OverflowError, zlib.error, csv.Error),
)


def load_table(path: Path, roles: Roles = NO_ROLES) -> Table:
    """Read a table; every column without a role is a feature.

    Empty fields and NA, N/A, nan, NaN, null and ? are missing; booleans become 0 and 1. Fields of a
    CSV file are separated by commas, or by what splits a header line without any: semicolons or
    tabs. What a LIBSVM file leaves out is 0, not missing; its columns are f1, f2, ..., and its
    first token is the label whatever `roles` say.

    Parameters
    ----------
    path : .csv, .parquet, .libsvm or .svm; all but Parquet also with .gz or .bz2.
    roles : of its columns.

    Returns
    -------
    Table : labels are float64 where all are numbers or booleans, else str; rows without a group
        are in the group "missing".

    Raises
    ------
    DataError : the file cannot be read, a named column is absent, a feature is text or infinite,
        or a label, id or weight breaks its rule.
    """
    if file_format(path) == "libsvm":
        roles = replace(roles, label=roles.label or LIBSVM_LABEL)
    return build_table(read_frame(path, roles), roles, text_file(path))


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
        sets = [
            name for name, one in REGISTRY.items() for file in one.files if path.name in file.names
        ]
        hint = f"; this file's data set is known by the name {sets[0]}" if sets else ""
        raise DataError(
            f"data file must end in {known} (or these with {packed}), got '{path.name}'{hint}"
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
    _check_is_file(path)
    try:
        frame = read(path, roles, reader)
        if format == "csv" and not reader.columns:
            _check_header(path, frame.column_names)
        return frame.rename_columns(with_names(frame.column_names))
    except PermissionError:
        rule = f"data file '{path.name}' must be readable for the user that runs this"
        raise DataError(f"{rule}, got permission denied") from None
    except CANNOT_READ as error:
        # Unchained: the reader's own text may quote a row or the path.
        raise _malformed(path, format, reader, error) from None


def column_names(path: Path) -> tuple[str, ...]:
    """Names of a file's columns, without its rows where that can be.

    Raises
    ------
    DataError : see `read_frame`.
    """
    format = file_format(path)
    if format == "libsvm":
        return tuple(read_frame(path, Roles()).column_names)
    _check_is_file(path)
    try:
        if text := text_file(path):
            return tuple(text.header())
        with pa.parquet.ParquetFile(path) as file:
            return tuple(with_names(file.schema_arrow.names))
    except CANNOT_READ as error:
        raise _malformed(path, format, PLAIN, error) from None


def text_file(path: Path, reader: Reader = PLAIN) -> TextFile | None:
    """What to look into for the place of an error; None for a file that is no CSV.

    Raises
    ------
    OSError, EOFError, zlib.error : it cannot be read.
    """
    if (reader.format or file_format(path)) != "csv":
        return None
    delimiter = reader.delimiter or ("," if reader.columns else delimiter_of(path))
    return TextFile(path, replace(reader, delimiter=delimiter))


def _check_is_file(path: Path) -> None:
    if path.is_dir():
        raise DataError(f"data file must be a file, got the folder '{path.name}'")
    if not path.is_file():
        raise DataError(f"data file must exist, got '{path.name}'")


def _check_header(path: Path, names: Sequence[str]) -> None:
    """Hold that a first line names columns, and is no row.

    Raises
    ------
    DataError : it holds numbers, other than those that number the columns.
    """
    numbers = [name for name in names if name and is_number(name)]
    begin = int(numbers[0]) if numbers and numbers[0] in ("0", "1") else 0
    are_places = numbers == [str(begin + place) for place in range(len(numbers))]
    repeat = 2 * len(numbers) > len(names) and len(set(numbers)) < len(numbers)
    if not are_places and (len(numbers) == len(names) or repeat):
        rule = f"data file '{path.name}' must name its columns in the first line"
        way = f"put a line of {len(names)} names before it, as in a,b,y"
        raise DataError(f"{rule}, got a row of numbers there: {way}")


def _read_csv(path: Path, roles: Roles, reader: Reader) -> Any:
    try:
        frame = _csv_frame(path, roles, reader, line_ends=False)
    except pa.ArrowInvalid:
        # A block may end within a quoted field of several lines; slower, they are looked for.
        frame = _csv_frame(path, roles, reader, line_ends=True)
    if not roles.label or frame.column_names.count(roles.label) != 1:
        return frame
    at = frame.column_names.index(roles.label)
    return frame.set_column(at, roles.label, _parsed(frame[roles.label]))


def _csv_frame(path: Path, roles: Roles, reader: Reader, line_ends: bool) -> Any:
    """The columns of a CSV file, whose fields may hold line ends anywhere, or within a block."""
    texts = {roles.label, roles.id_column, roles.group} - {""}
    text = text_file(path, reader)
    assert text is not None
    with pa.input_stream(str(path), compression="detect") as stream:
        return pa.csv.read_csv(
            stream,
            read_options=pa.csv.ReadOptions(
                block_size=BLOCK_BYTES,
                skip_rows=reader.skip_lines,
                column_names=list(reader.columns) or None,
            ),
            parse_options=pa.csv.ParseOptions(
                delimiter=text.reader.delimiter, newlines_in_values=line_ends
            ),
            convert_options=pa.csv.ConvertOptions(
                null_values=list(MISSING),
                strings_can_be_null=True,
                column_types=dict.fromkeys(texts, pa.string()),
            ),
        )


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


def _malformed(path: Path, format: str, reader: Reader, error: Exception) -> DataError:
    """What is wrong with a file: in words that quote nothing from it, and where for its owner."""
    rule = f"data file '{path.name}' must be a well-formed {format} file, got"
    fields = re.search(r"Expected (\d+) columns, got (\d+)", str(error))
    if fields:
        fault = f"a row of {fields[2]} fields where {fields[1]} are due"
    elif "Empty CSV file" in str(error):
        fault = "an empty file"
    elif "invalid UTF8" in str(error) or isinstance(error, UnicodeDecodeError):
        fault = "bytes that are not UTF-8"
    elif isinstance(error, EOFError | zlib.error):
        fault = "a packed file that is damaged or ends too early"
    else:
        fault = f"one that cannot be read ({type(error).__name__})"
    return DataError(f"{rule} {fault}", here=_place_of_fault(path, format, reader))


def _place_of_fault(path: Path, format: str, reader: Reader) -> str:
    """Where in a text the fault is; empty where that cannot be told."""
    if format != "csv":
        return ""
    try:
        text = text_file(path, reader)
        assert text is not None
        if bad := text.bad_bytes():
            return not_utf8(path.name, bad)
        rows = text.ragged_rows()
    except CANNOT_READ:
        return ""
    return ragged(path.name, rows) if rows else ""
