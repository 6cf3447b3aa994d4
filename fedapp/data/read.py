"""Read one table from a CSV, Parquet or LIBSVM file.

``read_frame`` reads a file into an Arrow frame, ``build_table`` turns that into a ``Table``. Of a
CSV file the first bytes, the quotes and the header are checked. Errors name columns and counts, and
the file without its folder. Only the table's owner also sees lines and values.
"""

from __future__ import annotations

import base64
import csv
import io
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet

from fedapp.data import scratch
from fedapp.data.convert import check_thousands, decoded, is_read_as_text
from fedapp.data.csv_errors import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    TextFile,
    delimiter_of,
    is_number,
    is_utf8,
    opened,
)
from fedapp.data.large import TOO_LONG, LargeFrame, Unread, is_long, pieces_of, read_pieces
from fedapp.data.libsvm import LIBSVM_LABEL, LIBSVM_QID, read_libsvm
from fedapp.data.notes import Note
from fedapp.data.schema import (
    MISSING,
    NO_ROLES,
    PACKED,
    PLAIN,
    REGISTRY,
    Reader,
    Roles,
    id_columns,
    joined_id,
    listed,
    plain_text,
    with_names,
)
from fedapp.data.table import Table, build_table, ids_of
from fedapp.errors import ConfigError, DataError, did_you_mean
from fedapp.process import free_memory

FORMATS = {".csv": "csv", ".txt": "csv", ".tsv": "csv", ".data": "csv"}
PARQUET = ".parquet"
FORMATS |= {PARQUET: "parquet", ".libsvm": "libsvm", ".svm": "libsvm"}
CANNOT_READ = pa.ArrowException, OSError, EOFError, ValueError, OverflowError, zlib.error, csv.Error
ARROW_SCHEMA = b"ARROW:schema"  # of a Parquet file: the types that its writer had, in base64
# First bytes of files that are not text, whatever their suffix.
OTHER_FILES = {
    b"PK\x03\x04": "an Excel or zip file: save the sheet as CSV",
    b"\xd0\xcf\x11\xe0": "an Excel file: save the sheet as CSV",
    b"PAR1": "a Parquet file: name it .parquet",
    b"\x1f\x8b": "a packed file: name it .gz",
    b"BZh": "a bzip2 file: unpack it",
}
UTF16 = (b"\xff\xfe", b"\xfe\xff")
FILE_OR_FOLDER = f"a file, or a folder with {PARQUET} files"


def load_table(path: Path, roles: Roles = NO_ROLES, reader: Reader = PLAIN) -> Table:
    """Read a table; every column without a role is a feature.

    Empty fields and NA, N/A, nan, NaN, null and ? are missing. Of a CSV file the first line says
    whether commas, semicolons, tabs or bars separate the fields; quotes are double. Numbers,
    booleans and dates become numbers, other text becomes category codes (``fedapp.data.columns``).
    In a LIBSVM file absent entries are 0, not missing; its columns are f1, f2, ..., and its first
    token is the label whatever `roles` say; a role may name ``qid``, as in ``2 qid:7 1:0.5``.

    Parameters
    ----------
    path : .csv (.txt, .tsv, .data), .parquet, .libsvm or .svm; all but Parquet also with .gz.

    Returns
    -------
    Table : labels are float64 if all are numbers or booleans, otherwise str; rows without a value
        of a natural partition's column are in the partition "missing".

    Raises
    ------
    DataError : the file cannot be read, a named column is absent, a feature is of mixed types,
        infinite, or free text, or a label, id or weight breaks its rule.
    """
    if (reader.format or file_format(path)) == "libsvm":
        roles = replace(roles, label=roles.label or LIBSVM_LABEL)
    frame = read_frame(path, roles, reader)
    table = build_table(frame, roles, text_file(path, reader, roles), reader)
    if not roles.without:
        return table
    n_rows = read_frame(path, replace(roles, without=()), reader).num_rows
    count = f"{n_rows - frame.num_rows:,} of {n_rows:,} rows are left out, by ids of without"
    return replace(table, notes=(Note(count, is_fact=True), *table.notes))


def table_of_frame(frame: Any, roles: Roles = NO_ROLES, reader: Reader = PLAIN) -> Table:
    """Build a table from a pyarrow.Table, as if read from a Parquet file; see `load_table`."""
    frame = decoded(frame).rename_columns(with_names(frame.column_names))
    return build_table(frame, roles, None, reader)


def read_ids(files: str, id_column: str) -> tuple[str, ...]:
    """Ids in CSV files, which commas separate, sorted; raises ConfigError or DataError."""
    if files and not id_column:
        way = "without one, delete the rows"
        raise ConfigError(f"id must name the column of the ids in {files}, got none: {way}")
    ids = set[str]()
    for path in (Path(file.strip()) for file in files.split(",") if files):
        _check_is_file(path)
        text = csv_text(path, PLAIN)
        names = text.header()
        rows = (dict(zip(names, fields, strict=False)) for _, fields in text.rows())
        columns = id_columns(id_column)
        parts = ([plain_text(row.get(name, "")) for name in columns] for row in rows)
        of_file = {joined_id(fields) for fields in parts if all(fields)}
        if not of_file:
            rule = f"file of ids '{path}' must have a first line with the id column, and an id"
            # Without such a line, the first name is an id.
            raise DataError(rule, here=f"{rule}, as in {id_column}; got columns {listed(names)}")
        ids |= of_file
    return tuple(sorted(ids))


def file_format(path: Path) -> str:
    """Format by the file's suffix, Parquet in a folder; raises DataError for an unknown one."""
    if path.is_dir():
        return "parquet"
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == PACKED:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in FORMATS:
        allowed = ", ".join(FORMATS)
        files = [(name, file.names) for name, of in REGISTRY.items() for file in of.files]
        sets = [name for name, names in files if path.name in names]
        hints = [f"this file's data set is known by the name {name}" for name in sets]
        hint = (*hints, "save a sheet, or a table of another program, as CSV")[0]
        rule = f"data file must end in {allowed} (or these with {PACKED})"
        raise DataError(f"{rule}, got '{path}'; {hint}")
    return FORMATS[suffixes[-1]]


def read_frame(path: Path, roles: Roles, reader: Reader = PLAIN) -> Any:
    """Read a file's columns into a pyarrow.Table without converting any; names are plain.

    Ids, groups and labels of a CSV file are text. Raises DataError if the file is absent or
    malformed.
    """
    format = reader.format or file_format(path)
    read = {"csv": read_csv, "parquet": _read_parquet, "libsvm": read_libsvm}[format]
    _check_is_file(path)
    try:
        frame = read(path, roles, reader)
        frame = frame.rename_columns(_renamed(with_names(frame.column_names), reader))
        has_ids = {*id_columns(roles.id_column)} <= {*frame.column_names}
        if roles.without and format == "parquet" and has_ids:
            ids = ids_of(frame, roles.id_column, reader)
            frame = frame.filter(~np.isin(ids, roles.without))
        return frame
    except PermissionError:
        rule = f"data file '{path}' must be readable for the user that runs this"
        raise DataError(f"{rule}, got permission denied") from None
    except CANNOT_READ as error:
        # Unchained: the reader's text may quote a row or the path.
        raise _malformed(path, format, reader, error) from None


def column_names(path: Path, reader: Reader = PLAIN) -> tuple[str, ...]:
    """Names of a file's columns, without reading its rows where possible; raises DataError."""
    format = reader.format or file_format(path)
    if format == "libsvm":
        return tuple(read_frame(path, Roles(qid=LIBSVM_QID), reader).column_names)
    _check_is_file(path)
    try:
        if text := text_file(path, reader):
            return tuple(_renamed(text.header(), reader))
        with pa.parquet.ParquetFile(parquet_files(path)[0]) as file:
            return tuple(_renamed(with_names(file.schema_arrow.names), reader))
    except CANNOT_READ as error:
        raise _malformed(path, format, reader, error) from None


def text_file(path: Path, reader: Reader = PLAIN, roles: Roles = NO_ROLES) -> TextFile | None:
    """Open a CSV file for locating errors; None for other formats. Raises OSError and the like."""
    is_csv = (reader.format or file_format(path)) == "csv"
    return csv_text(path, reader, roles) if is_csv else None


def _renamed(names: Iterable[str], reader: Reader) -> list[str]:
    """Rename columns as the schema says."""
    present = list(names)
    absent = [column.name for column in reader.declared if column.name not in present]
    if absent and not reader.tolerant:
        rule = "columns of the schema must be in the table, got {} that are not; the table has {}"
        hint = did_you_mean(absent[0], present)
        outside = DataError.naming(rule, *absent[:1], listed(present)).outside
        raise DataError(rule.format(listed(absent), listed(present)) + hint, outside=outside)
    return [reader.of_column(name).rename or name for name in present]


def _check_is_file(path: Path) -> None:
    if not has_table(path):
        is_folder = path.is_dir()
        rule = f"be {FILE_OR_FOLDER}, got the folder" if is_folder else "exist, got"
        raise DataError(f"data file must {rule} '{path}'")


def parquet_files(path: Path) -> list[Path]:
    """A file itself, or the Parquet files of a folder, in the order of their names."""
    if not path.is_dir():
        return [path]
    files = (file for file in path.iterdir() if not file.name.startswith((".", "_")))
    return sorted(file for file in files if file.suffix.lower() == PARQUET and file.is_file())


def has_table(path: Path) -> bool:
    """Whether a path is a file, or a folder with Parquet files."""
    return any(file.is_file() for file in parquet_files(path))


def file_version(path: Path) -> tuple[int | str, ...]:
    """Time of the last change and size of a table's file, or of each in a folder, with its name."""
    try:
        files = parquet_files(path)
        stats = [file.stat() for file in files if file.is_file()]
    except (OSError, ValueError):
        return ()
    names = [file.name for file in files] if path.is_dir() else []
    return *names, *chain(*((stat.st_mtime_ns, stat.st_size) for stat in stats))


def _read_parquet(path: Path, roles: Roles, reader: Reader) -> Any:
    files = parquet_files(path)
    footers, schemas, versions = list[Any](), list[Any](), file_version(path)
    if others := [file for file in path.glob("[!._]*") if file not in files]:
        rule = f"data folder '{path}' must have {PARQUET} files only, as others are not read"
        raise DataError(rule, here=f"{rule}, got '{min(others).name}'")
    for file in files:
        with pa.parquet.ParquetFile(file) as part:
            footers.append(part.metadata)
            schemas.append(_written_schema(part))
            schema = part.schema_arrow
        if schemas[-1] != schemas[0]:
            rule = f"data folder '{path}' must have files of the same columns and types, got others"
            raise DataError(rule, here=f"{rule} in '{file.name}'")
    n_rows, parts = sum(footer.num_rows for footer in footers), [*zip(files, footers, strict=True)]
    if not scratch.is_large(n_rows, len(schema)):
        return pa.concat_tables([_parquet_columns(*part) for part in parts])

    def read(index: int) -> Any:
        try:
            columns = pa.concat_tables([_parquet_columns(*part, index) for part in parts])
        except CANNOT_READ as error:
            if file_version(path) == versions:
                raise _malformed(path, "parquet", reader, error) from None
        if file_version(path) != versions:
            raise DataError(f"data file '{path}' must stay as it is while it is read")
        return columns.column(0)

    return LargeFrame(schema, n_rows, read)


def _written_schema(file: Any) -> Any:
    """The types that the writer of a Parquet file had."""
    written = (file.metadata.metadata or {}).get(ARROW_SCHEMA)
    if written is None:
        return file.schema_arrow
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(written)))


def _parquet_columns(path: Path, footer: Any, index: int | None = None) -> Any:
    """All columns of a Parquet file, or one."""
    with pa.parquet.ParquetFile(path, metadata=footer) as file:
        schema, names = _written_schema(file), file.schema_arrow.names
        frame = file.read() if index is None else _stored_column(file, names[index])
    if index is not None:
        # Besides `a`, Arrow reads what is named `a.b`.
        frame = frame.select([frame.column_names.index(names[index])])
        schema = pa.schema([schema.field(index)])
    frame = decoded(frame)
    # pyarrow restores dictionary columns of text only; others come back as plain values.
    for at, (name, type) in enumerate(zip(frame.column_names, schema.types, strict=False)):
        column = frame.column(at)
        if pa.types.is_dictionary(type) and not pa.types.is_dictionary(column.type):
            column = column.cast(type.value_type).dictionary_encode()
            frame = frame.set_column(at, name, column)
    return frame


def _stored_column(file: Any, name: str) -> Any:
    """A column of a Parquet file, which is on disk."""
    if not file.metadata.num_rows:
        return file.read([name])
    # An iterator keeps the bytes of all its groups.
    n_rows, groups = max(1, scratch.BATCH_BYTES // 8), range(file.num_row_groups)
    batches = (each for group in groups for each in file.iter_batches(n_rows, [group], [name]))
    return pa.concat_tables(scratch.stored(pa.Table.from_batches([each]) for each in batches))


def _malformed(path: Path, format: str, reader: Reader, error: Exception) -> DataError:
    """Error for an unreadable file; quotes nothing from it, except its place to the owner."""
    rule = f"data file '{path}' must be a well-formed {format} file, got"
    fields = re.search(r"Expected (\d+) columns, got (\d+)", str(error))
    way = "is a quote not closed, or is it another kind of file?"
    if TOO_LONG in str(error) or "line longer" in str(error):
        return DataError(f"{rule} a line longer than {BLOCK_BYTES >> 20} MiB: {way}")
    if "field larger than" in str(error):
        most = csv.field_size_limit()
        return DataError(f"{rule} a field of more than {most:,} characters: {way}")
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
    here = ""
    if format == "csv":
        with suppress(*CANNOT_READ):
            text = csv_text(path, reader)
            here = text.not_utf8() or text.ragged()
    return DataError(f"{rule} {fault}", here=here)


def csv_text(path: Path, reader: Reader, roles: Roles = NO_ROLES) -> TextFile:
    """Open a CSV file for locating errors; detects the delimiter if the reader sets none."""
    delimiter = reader.delimiter or delimiter_of(path, reader)
    reader = replace(reader, delimiter=delimiter)
    return TextFile(path, reader, None, roles.id_column, roles.without)


def read_csv(path: Path, roles: Roles, reader: Reader) -> Any:
    """Columns of a CSV file by their names in the file; ids, groups and labels as text.

    Raises DataError for another kind of file, an unclosed quote or a header without names;
    otherwise the exceptions of pyarrow and of reading a file.
    """
    with opened(path) as stream:
        first_bytes = stream.read(CHUNK_BYTES)
    rule = f"data file '{path}' must be a well-formed csv file, got"
    for mark, kind in OTHER_FILES.items():
        if first_bytes.startswith(mark):
            raise DataError(f"{rule} {kind}")
    if b"\0" in first_bytes and is_utf8(reader.encoding) and not first_bytes.startswith(UTF16):
        line = first_bytes[: first_bytes.index(b"\0")].count(b"\n") + 1
        way = "is it another kind of file, or UTF-16 (encoding=utf-16)?"
        here = f"{rule} NUL bytes in line {line:,}: {way}"
        raise DataError(f"{rule} NUL bytes: {way}", here=here)
    try:
        frame = _csv_frame(path, roles, reader, line_ends=False)
    except pa.ArrowInvalid as error:
        with opened(path) as stream:
            has_quotes = b'"' in stream.read(BLOCK_BYTES)  # so a field may have line ends
        if TOO_LONG in str(error) and not has_quotes:
            raise
        # A block may end inside a quoted field with line ends; this slower mode allows for it.
        try:
            frame = _csv_frame(path, roles, reader, line_ends=True)
        except pa.ArrowInvalid as fault:
            if TOO_LONG not in str(fault):
                _check_closed(path)
            raise
    texts = (at for at, type in enumerate(frame.schema.types) if pa.types.is_string(type))
    # An unclosed quote would join lines, so only fields with line ends are suspicious.
    if any("\n" in name for name in frame.column_names) or any(
        pc.any(pc.match_substring(frame.column(at), "\n")).as_py() for at in texts
    ):
        _check_closed(path)
    if reader.has_header:
        _check_header(path, frame)
    # The rows to predict may be few; the model knows what its columns hold.
    if reader.decimal == "," and not reader.tolerant:
        _check_commas(path, roles, reader, frame)
    return frame


def _check_commas(path: Path, roles: Roles, reader: Reader, frame: Any) -> None:
    """Check the text of columns of numbers whose decimal commas may set off thousands."""

    def may_be_thousands(name: str, column: Any) -> bool:
        declared = reader.of_column(name)
        is_used = (declared.rename or name) not in roles.drop and declared.type != "number"
        if not is_used or not pa.types.is_floating(column.type):
            return False
        scaled = pc.multiply(column, 1000)
        away = pc.abs(pc.subtract(scaled, pc.round(scaled)))
        return pc.any(pc.greater(away, 1e-3)).as_py() is False

    written = frame.column_names
    plain = dict(zip(written, with_names(written), strict=True))
    names = [name for name in plain if written.count(name) == 1]
    if names := [name for name in names if may_be_thousands(plain[name], frame[name])]:
        texts = _csv_frame(path, roles, reader, True, names)
        for name in names:
            values = pc.unique(pc.utf8_trim_whitespace(texts[name]))
            check_thousands(plain[name], values.to_pylist())


def _check_header(path: Path, frame: Any) -> None:
    """Check that the first line has names, not numbers."""
    names = with_names(frame.column_names)
    numbers = [name for name in names if name and is_number(name)]
    first = int(numbers[0]) if numbers and numbers[0] in ("0", "1") else 0
    # 0, 1, 2, ... or 1, 2, 3, ... are names that a tool gave to columns without.
    are_consecutive = numbers == [str(first + offset) for offset in range(len(numbers))]
    repeat = 2 * len(numbers) > len(names) and len(set(numbers)) < len(numbers)
    if numbers and not are_consecutive and (len(numbers) == len(names) or repeat):
        rule = f"data file '{path}' must name its columns in the first line"
        way = f"put a line of {len(names)} names before it, as in a,b,y, or set header=false"
        raise DataError(f"{rule}, got a row of numbers there: {way}")


def _chunks(path: Path) -> Iterator[bytes]:
    with opened(path) as stream:
        yield from iter(lambda: stream.read(CHUNK_BYTES), b"")


def _check_closed(path: Path) -> None:
    if sum(chunk.count(b'"') for chunk in _chunks(path)) % 2:
        rule = f"data file '{path}' must close every quote that it opens"
        raise DataError(f"{rule}, got an odd number of quotes")


def _csv_frame(
    path: Path, roles: Roles, reader: Reader, line_ends: bool, only: Sequence[str] = ()
) -> Any:
    """The columns, or ``only`` some of them as text."""
    text = csv_text(path, reader, roles)
    written = text.written_header()
    names = _renamed(with_names(written), reader)
    texts = {roles.label, *id_columns(roles.id_column), roles.partition, roles.group}
    are_texts = [name in texts or is_read_as_text(reader.of_feature(name)) for name in names]
    types = {name: pa.string() for name, as_text in zip(written, are_texts, strict=True) if as_text}
    types = dict.fromkeys(only, pa.string()) or types
    is_large = is_long(path)
    if is_large and len({*written}) < len(written):
        _check_memory(path)
        is_large = False

    def parse(stream: Any, is_first: bool, types: Mapping[str, Any]) -> Any:
        names = None if is_first and reader.has_header else written
        return pa.csv.read_csv(
            stream,
            read_options=pa.csv.ReadOptions(
                block_size=BLOCK_BYTES,
                skip_rows=reader.skip_lines if is_first else 0,
                column_names=names,
                encoding="utf8" if is_large else reader.encoding,
            ),
            parse_options=pa.csv.ParseOptions(
                delimiter=text.reader.delimiter, newlines_in_values=line_ends
            ),
            convert_options=pa.csv.ConvertOptions(
                null_values=[*MISSING, *reader.missing],
                decimal_point=reader.decimal,
                column_types=types,
                include_columns=only,
            ),
        )

    def pieces() -> Iterator[bytes]:
        with _unpacked(text) as stream:
            if not is_utf8(reader.encoding):
                stream = pa.transcoding_input_stream(stream, reader.encoding, "utf8")
            yield from pieces_of(stream, text.reader.delimiter, reader.skip_lines)

    if is_large:
        frame = read_pieces(pieces, parse, types)
        return LargeFrame(frame.schema, frame.num_rows, frame.column)
    with _unpacked(text) as stream:
        return parse(stream, True, types)


def _check_memory(path: Path) -> None:
    """Check that a text fits into memory as it is and as columns."""
    sizes = 3 * sum(map(len, _chunks(path))), free_memory()
    if sizes[0] > sizes[1]:
        needed, free = (f"{size / 2**30:.1f} GiB" for size in sizes)
        rule = f"memory must have {needed} free for data file '{path}', as columns that share their"
        way = "name them apart, or save it as Parquet"
        raise DataError(f"{rule} name are read whole, got {free}: {way}")


def _unpacked(text: TextFile) -> Any:
    """Open the text of a CSV file; runs of blanks become one, and lines are stripped."""
    is_blank, lines = text.reader.delimiter == " ", text.lines()
    if not (is_blank or text.without):
        return pa.input_stream(str(text.path), compression="detect")
    if is_blank:
        lines = (b" ".join(line.split()) + b"\n" for line in lines)
    return pa.PythonFile(io.BufferedReader(Unread(lines), CHUNK_BYTES), "r")
