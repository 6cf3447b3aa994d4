"""The frame of a CSV file: how it begins, its quotes, and its columns."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from fedapp.data.places import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    TextFile,
    bounded_lines,
    delimiter_of,
    is_number,
    is_utf8,
    opened,
)
from fedapp.data.schema import MISSING, Reader, Roles, with_names
from fedapp.data.typed import is_read_as_text
from fedapp.errors import DataError

# How files begin that are no text, whatever their names say.
OTHER_FILES = {
    b"PK\x03\x04": "an Excel or zip file: save the sheet as CSV",
    b"\xd0\xcf\x11\xe0": "an Excel file: save the sheet as CSV",
    b"PAR1": "a Parquet file: name it .parquet",
    b"\x1f\x8b": "a packed file: name it .gz",
    b"BZh": "a packed file: name it .bz2",
}
UTF16 = (b"\xff\xfe", b"\xfe\xff")
# Arrow's words for a line, or a quoted field of several, that does not fit in a block.
TOO_LONG = "straddling object"


def csv_text(path: Path, reader: Reader) -> TextFile:
    """What to look into for the place of an error.

    Raises
    ------
    OSError, EOFError, zlib.error : it cannot be read.
    """
    delimiter = reader.delimiter or delimiter_of(path, reader)
    return TextFile(path, replace(reader, delimiter=delimiter))


def read_csv(path: Path, roles: Roles, reader: Reader) -> Any:
    """The columns of a CSV file by their written names; ids, groups and labels as text.

    Raises
    ------
    DataError : the file is of another kind, a quote is not closed, or the first line is a row.
    pyarrow.ArrowException, OSError, EOFError, ValueError, zlib.error : it cannot be read.
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
    try:
        frame = _csv_frame(path, roles, reader, line_ends=False)
    except pa.ArrowInvalid as error:
        if TOO_LONG in str(error) and not _has_quotes(path):
            raise
        # A block may end within a quoted field of several lines; slower, they are looked for.
        frame = _csv_frame_of_lines(path, roles, reader)
    _check_quotes(path, frame)
    if reader.has_header:
        _check_header(path, frame)
    return frame


def _check_header(path: Path, frame: Any) -> None:
    """Check that a first line names columns: it has neither their values nor other numbers."""
    names = with_names(name.strip() for name in frame.column_names)
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


def _csv_frame_of_lines(path: Path, roles: Roles, reader: Reader) -> Any:
    """The same where fields have line ends; if it cannot be read, an open quote may be why."""
    try:
        return _csv_frame(path, roles, reader, line_ends=True)
    except pa.ArrowInvalid as error:
        if TOO_LONG not in str(error):
            _check_closed(path)
        raise


def _has_quotes(path: Path) -> bool:
    """Whether the first block of a file has a quote, so that a field may hold line ends."""
    with opened(path) as stream:
        return b'"' in stream.read(BLOCK_BYTES)


def _check_quotes(path: Path, frame: Any) -> None:
    """Hold that every quote that is opened is closed, where a field has line ends."""
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
    text = csv_text(path, reader)
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
