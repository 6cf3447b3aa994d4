"""Reads one table from a CSV, Parquet or LIBSVM file.

A file becomes an Arrow frame (``read_frame``), a frame becomes a ``Table`` (``build_table``).
Errors name columns and counts, and of the file no more than its name; to the table's owner they
also say where in a text the error is, and quote a value.
"""

from __future__ import annotations

import base64
import csv
import io
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet

from fedapp.data.build import build_table
from fedapp.data.faults import not_utf8, ragged
from fedapp.data.places import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    TextFile,
    bounded_lines,
    delimiter_of,
    is_number,
    is_utf8,
    opened,
    quoted,
)
from fedapp.data.registry import REGISTRY
from fedapp.data.schema import (
    MISSING,
    NO_ROLES,
    PACKINGS,
    PLAIN,
    Declared,
    Reader,
    Roles,
    listed,
    with_names,
)
from fedapp.data.table import Table
from fedapp.data.typed import (
    POINTS_WAY,
    THOUSANDS,
    as_texts,
    goes_by_text,
    has_thousands_alone,
    holds_numbers,
    is_read_as_text,
    is_text,
    values_of,
    with_point,
    without,
)
from fedapp.errors import DataError
from fedapp.names import near

LIBSVM_LABEL = "label"
FORMATS = {".csv": "csv", ".txt": "csv", ".tsv": "csv", ".data": "csv"}
FORMATS |= {".parquet": "parquet", ".libsvm": "libsvm", ".svm": "libsvm"}
CANNOT_READ = (
    *(pa.ArrowException, OSError, EOFError, ValueError, OverflowError, zlib.error, csv.Error),
)
# How files begin that are no text, whatever their names say.
OTHER_FILES = {
    b"PK\x03\x04": "an Excel or zip file: save the sheet as CSV",
    b"\xd0\xcf\x11\xe0": "an Excel file: save the sheet as CSV",
    b"PAR1": "a Parquet file: name it .parquet",
    b"\x1f\x8b": "a packed file: name it .gz",
    b"BZh": "a packed file: name it .bz2",
}
ARROW_SCHEMA = b"ARROW:schema"  # of a Parquet file: the types that its writer had, in base64
UTF16 = (b"\xff\xfe", b"\xfe\xff")


def load_table(path: Path, roles: Roles = NO_ROLES, reader: Reader = PLAIN) -> Table:
    """Read a table; every column without a role is a feature.

    Empty fields and NA, N/A, nan, NaN, null and ? are missing. Fields of a CSV file are separated
    by what splits its first lines alike: commas, semicolons, tabs, bars or runs of blanks; its
    quotes are double. Numbers, booleans and dates become numbers, other text the codes of its
    categories (``fedapp.data.typed``). What a LIBSVM file leaves out is 0, not missing; its columns
    are f1, f2, ..., and its first token is the label whatever `roles` say.

    Parameters
    ----------
    path : .csv (.txt, .tsv, .data), .parquet, .libsvm or .svm; all but Parquet also with .gz or
        .bz2.
    roles : of its columns.
    reader : what a schema says of the file.

    Returns
    -------
    Table : labels are float64 where all are numbers or booleans, else str; rows without a group
        are in the group "missing".

    Raises
    ------
    DataError : the file cannot be read, a named column is absent, a feature is of mixed types,
        infinite, or text that is no category, or a label, id or weight breaks its rule.
    """
    if (reader.format or file_format(path)) == "libsvm":
        roles = replace(roles, label=roles.label or LIBSVM_LABEL)
    frame = read_frame(path, roles, reader)
    return build_table(frame, roles, text_file(path, reader), reader)


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
        if format == "csv":
            _check_text(path, reader)
        frame = read(path, roles, reader)
        names = with_names(name.strip() for name in frame.column_names)
        if format == "csv" and reader.has_header:
            _check_header(path, frame, names)
        frame = frame.rename_columns(_renamed(names, reader))
        return _with_roles(frame, roles, reader, is_written=format == "csv")
    except PermissionError:
        rule = f"data file '{path.name}' must be readable for the user that runs this"
        raise DataError(f"{rule}, got permission denied") from None
    except CANNOT_READ as error:
        # Unchained: the reader's own text may quote a row or the path.
        raise _malformed(path, format, reader, error) from None


def column_names(path: Path, reader: Reader = PLAIN) -> tuple[str, ...]:
    """Names of a file's columns, without its rows where that can be.

    Raises
    ------
    DataError : see `read_frame`.
    """
    format = reader.format or file_format(path)
    if format == "libsvm":
        return tuple(read_frame(path, Roles(), reader).column_names)
    _check_is_file(path)
    try:
        if text := text_file(path, reader):
            return tuple(_renamed(text.header(), reader))
        with pa.parquet.ParquetFile(path) as file:
            return tuple(_renamed(with_names(file.schema_arrow.names), reader))
    except CANNOT_READ as error:
        raise _malformed(path, format, reader, error) from None


def text_file(path: Path, reader: Reader = PLAIN) -> TextFile | None:
    """What to look into for the place of an error; None for a file that is no CSV.

    Raises
    ------
    OSError, EOFError, zlib.error : it cannot be read.
    """
    if (reader.format or file_format(path)) != "csv":
        return None
    delimiter = reader.delimiter or delimiter_of(path, reader)
    return TextFile(path, replace(reader, delimiter=delimiter))


def _renamed(names: Iterable[str], reader: Reader) -> list[str]:
    """Names of columns as a run knows them.

    Raises
    ------
    DataError : a declared column is not there.
    """
    there = list(names)
    absent = [one.name for one in reader.declared if one.name not in there]
    if absent and not reader.tolerant:
        rule = "columns of the schema must be in the table, got {} that are not; the table has {}"
        hint = near(absent[0], there)
        outside = DataError.naming(rule, *absent[:1], listed(there)).outside
        raise DataError(rule.format(listed(absent), listed(there)) + hint, outside=outside)
    return [reader.of_column(name).rename or name for name in there]


def _check_is_file(path: Path) -> None:
    if path.is_dir():
        raise DataError(f"data file must be a file, got the folder '{path.name}'")
    if not path.is_file():
        raise DataError(f"data file must exist, got '{path.name}'")


def _check_text(path: Path, reader: Reader) -> None:
    """Hold that a file begins as text does.

    Raises
    ------
    DataError : it is of another kind, or has NUL bytes.
    """
    with opened(path) as stream:
        begin = stream.read(CHUNK_BYTES)
    rule = f"data file '{path.name}' must be a well-formed csv file, got"
    for mark, found in OTHER_FILES.items():
        if begin.startswith(mark):
            raise DataError(f"{rule} {found}")
    if b"\0" in begin and is_utf8(reader.encoding) and not begin.startswith(UTF16):
        line = begin[: begin.index(b"\0")].count(b"\n") + 1
        way = "is it another kind of file, or UTF-16 (encoding=utf-16)?"
        raise DataError(
            f"{rule} NUL bytes: {way}", here=f"{rule} NUL bytes in line {line:,}: {way}"
        )


def _check_header(path: Path, frame: Any, names: Sequence[str]) -> None:
    """Hold that a first line names columns, and is no row.

    Raises
    ------
    DataError : it holds numbers, other than those that number the columns, or, beside numbers,
        texts most of which are values of their own columns.
    """
    numbers = [name for name in names if name and is_number(name)]
    begin = int(numbers[0]) if numbers and numbers[0] in ("0", "1") else 0
    are_places = numbers == [str(begin + place) for place in range(len(numbers))]
    repeat = 2 * len(numbers) > len(names) and len(set(numbers)) < len(numbers)
    if numbers and not are_places and (len(numbers) == len(names) or repeat):
        found = "a row of numbers"
    elif numbers and not are_places and _repeats_values(frame, names):
        found = "a row of values"
    else:
        return
    rule = f"data file '{path.name}' must name its columns in the first line"
    way = f"put a line of {len(names)} names before it, as in a,b,y, or set header=false"
    raise DataError(f"{rule}, got {found} there: {way}")


def _repeats_values(frame: Any, names: Sequence[str]) -> bool:
    """Whether most names of columns of text are values of these columns."""
    texts = [place for place, type in enumerate(frame.schema.types) if pa.types.is_string(type)]
    found = [
        pc.any(pc.equal(pc.utf8_trim_whitespace(frame.column(place)), names[place])).as_py()
        for place in texts
    ]
    return 2 * sum(map(bool, found)) > len(texts) > 0


def _read_csv(path: Path, roles: Roles, reader: Reader) -> Any:
    try:
        frame = _csv_frame(path, roles, reader, line_ends=False)
    except pa.ArrowInvalid as error:
        if TOO_LONG in str(error) and not _has_quotes(path):
            raise
        # A block may end within a quoted field of several lines; slower, they are looked for.
        frame = _csv_frame_of_lines(path, roles, reader)
    _check_quotes(path, frame)
    return frame


def _csv_frame_of_lines(path: Path, roles: Roles, reader: Reader) -> Any:
    """The same where fields have line ends; if it cannot be read, an open quote may be why."""
    try:
        return _csv_frame(path, roles, reader, line_ends=True)
    except pa.ArrowInvalid as error:
        if TOO_LONG not in str(error):
            _check_closed(path)
        raise


def _with_roles(frame: Any, roles: Roles, reader: Reader, is_written: bool) -> Any:
    """Columns that are no features without what a schema declares as missing, and the label with
    names in place of codes; as numbers where all are."""
    for name in roles.named().values():
        if frame.column_names.count(name) == 1:
            declared, at = reader.of_feature(name), frame.column_names.index(name)
            field, column = name, values_of(frame[name])
            if name == roles.label:
                field, column = _label(column, reader, declared, is_written)
            absent = (*reader.missing, *declared.missing)
            frame = frame.set_column(at, field, without(column, absent, reader.decimal))
    return frame


def _label(column: Any, reader: Reader, declared: Declared, is_written: bool) -> tuple[Any, Any]:
    """The field and the values of labels: names or, where a file writes text, numbers if all are.

    Raises
    ------
    DataError : see `_with_points`.
    """
    name, decimal = declared.rename or declared.name, reader.decimal
    is_parsed = is_written or goes_by_text(column.type, declared)
    if not is_parsed and not (reader.missing and is_text(column.type)):
        return name, column
    texts, _ = as_texts(column, declared, reader.missing, decimal)
    if declared.type == "category" or not is_parsed:
        return name, texts
    if decimal != "." and not holds_numbers(column.type):
        return _with_points(name, texts, decimal)
    return name, _parsed(texts)


# Arrow's words for a line, or a quoted field of several, that does not fit in a block.
TOO_LONG = "straddling object"


def _has_quotes(path: Path) -> bool:
    """Whether the first block of a file has a quote, so that a field may hold line ends."""
    with opened(path) as stream:
        return b'"' in stream.read(BLOCK_BYTES)


def _check_quotes(path: Path, frame: Any) -> None:
    """Hold that every quote that is opened is closed, where a field has line ends.

    Raises
    ------
    DataError : the file has an odd number of them.
    """
    columns = [column for column in frame.columns if pa.types.is_string(column.type)]
    in_names = any("\n" in name for name in frame.column_names)
    if not in_names and not any(
        pc.any(pc.match_substring(column, "\n")).as_py() for column in columns
    ):
        return
    _check_closed(path)


def _check_closed(path: Path) -> None:
    """Hold that a file's quotes are of an even number."""
    with opened(path) as stream:
        n_quotes = sum(chunk.count(b'"') for chunk in iter(lambda: stream.read(CHUNK_BYTES), b""))
    if n_quotes % 2:
        rule = f"data file '{path.name}' must close every quote that it opens"
        raise DataError(f"{rule}, got an odd number of quotes")


def _csv_frame(path: Path, roles: Roles, reader: Reader, line_ends: bool) -> Any:
    """The columns of a CSV file, whose fields may hold line ends anywhere, or within a block."""
    text = text_file(path, reader)
    assert text is not None
    names = text.written_header()
    texts = {roles.label, roles.id_column, roles.group} - {""}
    texts |= {one.name for one in reader.declared if is_read_as_text(one)}
    own = {one.rename: one.name for one in reader.declared if one.rename}
    texts = {own.get(name, name) for name in texts}
    with _unpacked(path, text.reader) as stream:
        return pa.csv.read_csv(
            stream,
            read_options=pa.csv.ReadOptions(
                block_size=BLOCK_BYTES,
                skip_rows=reader.skip_lines,
                column_names=None if reader.has_header else names,
                encoding=reader.encoding,
            ),
            parse_options=pa.csv.ParseOptions(
                delimiter=text.reader.delimiter, newlines_in_values=line_ends
            ),
            convert_options=pa.csv.ConvertOptions(
                null_values=[*MISSING, *reader.missing],
                strings_can_be_null=True,
                decimal_point=reader.decimal,
                column_types={name: pa.string() for name in names if name.strip() in texts},
            ),
        )


def _unpacked(path: Path, reader: Reader) -> Any:
    """A CSV file's text; of runs of blanks one each, and none around a line."""
    if reader.delimiter != " ":
        return pa.input_stream(str(path), compression="detect")
    with opened(path) as stream:
        lines = (b" ".join(line.split()) for line in bounded_lines(stream))
        return io.BytesIO(b"\n".join(lines))


def _read_parquet(path: Path, roles: Roles, reader: Reader) -> Any:
    with pa.parquet.ParquetFile(path) as file:
        frame, written = file.read(), (file.metadata.metadata or {}).get(ARROW_SCHEMA)
    if written is None:
        return frame
    # Parquet gives categories back as such if they are text, and others as their plain values.
    schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(written)))
    for place, (name, type) in enumerate(zip(frame.column_names, schema.types, strict=False)):
        column = frame.column(place)
        if pa.types.is_dictionary(type) and not pa.types.is_dictionary(column.type):
            frame = frame.set_column(place, name, column.dictionary_encode())
    return frame


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


def _with_points(label: str, texts: Any, decimal: str) -> tuple[Any, Any]:
    """A label column of text whose numbers have decimal commas: its field, and its values.

    Raises
    ------
    DataError : numbers have decimal points.
    """
    values = pc.unique(texts).drop_null().to_pylist()
    others = [value for value in values if not is_number(value, decimal)]
    if not others:
        metadata = {THOUSANDS: b""} if has_thousands_alone(values) else None
        field = pa.field(label, pa.float64(), metadata=metadata)
        return field, with_point(texts, decimal).cast(pa.float64())
    if all(map(is_number, others)) and not all(value.endswith(".") for value in values):
        rule = "label column {} must have decimal commas (decimal=,), got decimal points"
        here = f"{rule.format(listed([label]))}, as {quoted(others[0])}: {POINTS_WAY}"
        raise DataError.naming(f"{rule}: {POINTS_WAY}", listed([label]), here=here)
    return label, _parsed(texts)


def _parsed(texts: Any) -> Any:
    """Text as float64 where every value is a number or a boolean; else as it is."""
    # "1." and "2." are names of classes, "1." and "2.5" are numbers.
    if pc.all(pc.ends_with(texts, pattern=".")).as_py():
        return texts
    for type in (pa.float64(), pa.bool_()):
        try:
            return texts.cast(type).cast(pa.float64())
        except pa.ArrowInvalid:
            continue
    return texts


def _malformed(path: Path, format: str, reader: Reader, error: Exception) -> DataError:
    """What is wrong with a file: in words that quote nothing from it, and where for its owner."""
    rule = f"data file '{path.name}' must be a well-formed {format} file, got"
    fields = re.search(r"Expected (\d+) columns, got (\d+)", str(error))
    way = "is a quote not closed, or is it another kind of file?"
    if TOO_LONG in str(error) or "line longer" in str(error):
        return DataError(f"{rule} a line longer than {BLOCK_BYTES >> 20} MiB: {way}")
    if "field larger than" in str(error):
        return DataError(
            f"{rule} a field of more than {csv.field_size_limit():,} characters: {way}"
        )
    if fields:
        fault = f"a row of {fields[2]} fields where {fields[1]} are due"
    elif "Empty CSV file" in str(error):
        fault = "an empty file"
    elif not is_utf8(reader.encoding) and isinstance(error, UnicodeError | OSError):
        fault = f"bytes that are not {reader.encoding}"
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
