"""Read a CSV file into an Arrow frame; check its first bytes, its quotes and its header."""

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

# First bytes of files that are not text, whatever their suffix.
OTHER_FILES = {
    b"PK\x03\x04": "an Excel or zip file: save the sheet as CSV",
    b"\xd0\xcf\x11\xe0": "an Excel file: save the sheet as CSV",
    b"PAR1": "a Parquet file: name it .parquet",
    b"\x1f\x8b": "a packed file: name it .gz",
    b"BZh": "a packed file: name it .bz2",
}
UTF16 = (b"\xff\xfe", b"\xfe\xff")
# In Arrow's error if a line, or a quoted field with line ends, does not fit in a block.
TOO_LONG = "straddling object"


def csv_text(path: Path, reader: Reader) -> TextFile:
    """Open a CSV file for locating errors; detects the delimiter if the reader sets none."""
    delimiter = reader.delimiter or delimiter_of(path, reader)
    return TextFile(path, replace(reader, delimiter=delimiter))


def read_csv(path: Path, roles: Roles, reader: Reader) -> Any:
    """Columns of a CSV file by their names in the file; ids, groups and labels as text.

    Raises DataError for another kind of file, an unclosed quote or a header without names;
    otherwise the exceptions of pyarrow and of reading a file.
    """
    with opened(path) as stream:
        first_bytes = stream.read(CHUNK_BYTES)
    rule = f"data file '{path.name}' must be a well-formed csv file, got"
    for mark, kind in OTHER_FILES.items():
        if first_bytes.startswith(mark):
            raise DataError(f"{rule} {kind}")
    if b"\0" in first_bytes and is_utf8(reader.encoding) and not first_bytes.startswith(UTF16):
        line = first_bytes[: first_bytes.index(b"\0")].count(b"\n") + 1
        way = "is it another kind of file, or UTF-16 (encoding=utf-16)?"
        raise DataError(
            f"{rule} NUL bytes: {way}", here=f"{rule} NUL bytes in line {line:,}: {way}"
        )
    try:
        frame = _csv_frame(path, roles, reader, line_ends=False)
    except pa.ArrowInvalid as error:
        if TOO_LONG in str(error) and not _has_quotes(path):
            raise
        # A block may end inside a quoted field with line ends; this slower mode allows for it.
        try:
            frame = _csv_frame(path, roles, reader, line_ends=True)
        except pa.ArrowInvalid as fault:
            if TOO_LONG not in str(fault):
                _check_closed(path)
            raise
    texts = [column for column in frame.columns if pa.types.is_string(column.type)]
    # An unclosed quote would join lines, so only fields with line ends are suspicious.
    if any("\n" in name for name in frame.column_names) or any(
        pc.any(pc.match_substring(column, "\n")).as_py() for column in texts
    ):
        _check_closed(path)
    if reader.has_header:
        _check_header(path, frame)
    return frame


def _check_header(path: Path, frame: Any) -> None:
    """Check that the first line has names: neither values of the columns nor other numbers."""
    names = with_names(name.strip() for name in frame.column_names)
    numbers = [name for name in names if name and is_number(name)]
    first = int(numbers[0]) if numbers and numbers[0] in ("0", "1") else 0
    # 0, 1, 2, ... or 1, 2, 3, ... are names that a tool gave to columns without.
    are_consecutive = numbers == [str(first + place) for place in range(len(numbers))]
    repeat = 2 * len(numbers) > len(names) and len(set(numbers)) < len(numbers)
    if numbers and not are_consecutive and (len(numbers) == len(names) or repeat):
        content = "a row of numbers"
    elif numbers and not are_consecutive and _repeats_values(frame, names):
        content = "a row of values"
    else:
        return
    rule = f"data file '{path.name}' must name its columns in the first line"
    way = f"put a line of {len(names)} names before it, as in a,b,y, or set header=false"
    raise DataError(f"{rule}, got {content} there: {way}")


def _repeats_values(frame: Any, names: Sequence[str]) -> bool:
    """Whether most text columns contain their own name as a value."""
    texts = [place for place, type in enumerate(frame.schema.types) if pa.types.is_string(type)]
    occurs = [
        pc.any(pc.equal(pc.utf8_trim_whitespace(frame.column(place)), names[place])).as_py()
        for place in texts
    ]
    return 2 * sum(map(bool, occurs)) > len(texts) > 0


def _has_quotes(path: Path) -> bool:
    """Whether the first block has a quote, so that a field may have line ends."""
    with opened(path) as stream:
        return b'"' in stream.read(BLOCK_BYTES)


def _check_closed(path: Path) -> None:
    with opened(path) as stream:
        n_quotes = sum(chunk.count(b'"') for chunk in iter(lambda: stream.read(CHUNK_BYTES), b""))
    if n_quotes % 2:
        rule = f"data file '{path.name}' must close every quote that it opens"
        raise DataError(f"{rule}, got an odd number of quotes")


def _csv_frame(path: Path, roles: Roles, reader: Reader, line_ends: bool) -> Any:
    text = csv_text(path, reader)
    names = text.written_header()
    texts = {roles.label, roles.id_column, roles.group} - {""}
    texts |= {one.name for one in reader.declared if is_read_as_text(one)}
    written_names = {one.rename: one.name for one in reader.declared if one.rename}
    texts = {written_names.get(name, name) for name in texts}
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
    """Open the text of a CSV file; runs of blanks become one, and lines are stripped."""
    if reader.delimiter != " ":
        return pa.input_stream(str(path), compression="detect")
    with opened(path) as stream:
        lines = (b" ".join(line.split()) for line in bounded_lines(stream))
        return io.BytesIO(b"\n".join(lines))
