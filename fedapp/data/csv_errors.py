"""Locate errors in a CSV file by a slow pass over its text, after Arrow's fast reader has failed.

Lines count from 1 and include the header, as in an editor. A row that spans several lines, because
of quoted line ends, is located at its first.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, AnyStr, cast

from fedapp.data.schema import MISSING, PLAIN, Reader, first, listed, with_names
from fedapp.errors import DataError

DELIMITERS = (",", ";", "\t", "|")
# A row has to fit in one block: 8 MiB holds some 500,000 columns of numbers.
BLOCK_BYTES = 8 << 20
CHUNK_BYTES = 1 << 20
# What Arrow reads as a number, after blanks around it are stripped.
NUMBER = re.compile(
    r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?(nan|inf|infinity)", re.IGNORECASE | re.ASCII
)
# The same with a decimal comma.
COMMA_NUMBER = re.compile(NUMBER.pattern.replace(r"\.", ","), re.IGNORECASE | re.ASCII)
# A number with commas or points as thousands separators, which no reader accepts.
WITH_THOUSANDS = re.compile(r"[-+]?\d{1,3}((,\d{3})+(\.\d*)?|(\.\d{3})+(,\d*)?)", re.ASCII)
MOST_SHOWN = 3  # columns in an error
Record = tuple[int, list[str]]  # line and fields


@dataclass(frozen=True, slots=True)
class TextFault:
    """Values of one column that are not of the wanted type."""

    column: str
    n_bad: int
    n_rows: int
    value: str  # the first bad value
    line: int  # its line
    wanted: str = "numbers"  # plural noun

    def __str__(self) -> str:
        one = f"is not a {self.wanted.removesuffix('s')}"
        are = one if self.n_bad == 1 else f"are not {self.wanted}"
        count = f"{self.n_bad:,} of {self.n_rows:,} values of '{self.column}' {are}"
        return f"{count}, first {quoted(self.value)} in line {self.line:,}"


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Rows whose number of fields differs from the header's."""

    due: int  # fields of the header
    n_bad: int
    n_rows: int
    fields: int  # of the first bad row
    line: int  # its line


@dataclass(frozen=True, slots=True)
class BadBytes:
    """The first byte that is not UTF-8."""

    value: int
    offset: int  # in the unpacked file, from 0
    line: int
    column: str  # empty if unknown


@dataclass(frozen=True, slots=True)
class TextFile:
    """A CSV file in which errors are located."""

    path: Path
    reader: Reader  # with its delimiter
    # numbers, from 0, of the file's rows that the table has; None: all
    row_numbers: Sequence[int] | None = None

    def header(self) -> list[str]:
        """Column names without spaces around; ``with_names`` names a column without one."""
        return with_names(name.strip() for name in self.written_header())

    def written_header(self) -> list[str]:
        """Column names as in the file."""
        _, fields = next(self._records(), (0, []))
        if self.reader.has_header:
            return fields
        return list(self.reader.columns) or [f"f{place}" for place in range(1, len(fields) + 1)]

    def rows(self) -> Iterator[Record]:
        """First line and fields of each row; empty lines are skipped."""
        records = self._records()
        if self.reader.has_header:
            next(records, None)
        yield from records

    def line_of(self, row: int) -> int:
        """The line of a row of the table, numbered from 0."""
        wanted = row if self.row_numbers is None else self.row_numbers[row]
        return next(line for place, (line, _) in enumerate(self.rows()) if place == wanted)

    def faults(self, columns: Mapping[str, Callable[[str], bool]], wanted: str) -> list[TextFault]:
        """Columns with values that fail their test; `wanted` is a plural noun.

        The test of each column name takes a field without spaces around.
        """
        names = self.header()
        tests = [(names.index(column), test) for column, test in columns.items()]
        first: dict[int, tuple[str, int]] = {}
        counts: Counter[int] = Counter()
        n_rows = 0
        for line, fields in self.rows():
            n_rows += 1
            for place, test in tests:
                if place < len(fields) and not test((value := fields[place]).strip()):
                    counts[place] += 1
                    first.setdefault(place, (value, line))
        return [
            TextFault(names[place], counts[place], n_rows, *first[place], wanted)
            for place, _ in tests
            if place in first
        ]

    def ragged_rows(self) -> RaggedRows | None:
        """Rows with too few or too many fields; None if there are none."""
        due, widths = len(self.header()), Counter[int]()
        fields = line = 0
        for at, row in self.rows():
            widths[len(row)] += 1
            if len(row) != due and not line:
                fields, line = len(row), at
        n_bad = widths.total() - widths[due]
        return RaggedRows(due, n_bad, widths.total(), fields, line) if n_bad else None

    def bad_bytes(self) -> BadBytes | None:
        """The first byte that is not UTF-8; None if there is none."""
        bad = _undecodable(self.path)
        if bad is None:
            return None
        names = self.header()
        columns = (
            name.encode("utf-8", "replace").decode()
            for _, fields in self._records()
            for name, field in zip(names, fields, strict=False)
            if any("\udc80" <= letter <= "\udcff" for letter in field)  # see _records
        )
        return BadBytes(*bad, next(columns, ""))

    def _records(self) -> Iterator[Record]:
        with opened(self.path) as stream:
            # A byte that cannot be decoded becomes a lone surrogate.
            text = io.TextIOWrapper(stream, _codec(self.reader), "surrogateescape", newline="")
            lines = bounded_lines(text)
            for _ in range(self.reader.skip_lines):
                next(lines, "")
            mark = self.reader.delimiter or ","
            reader = csv.reader(lines, delimiter=mark, skipinitialspace=mark == " ")
            line = self.reader.skip_lines
            for fields in reader:
                if fields:
                    # A blank at the end of a line is no separator.
                    yield line + 1, fields[:-1] if mark == " " and fields[-1] == "" else fields
                line = self.reader.skip_lines + reader.line_num


def bounded_lines(text: IO[AnyStr]) -> Iterator[AnyStr]:
    """Iterate over lines; raises csv.Error at a line longer than a block, without reading on."""
    while line := text.readline(BLOCK_BYTES + 1):
        if len(line) > BLOCK_BYTES:
            raise csv.Error(f"line longer than {BLOCK_BYTES} characters")
        yield line


def is_utf8(encoding: str) -> bool:
    """Whether an encoding name is an alias of UTF-8."""
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


def _codec(reader: Reader) -> str:
    """Encoding of the text; skips the mark of byte order."""
    return "utf-8-sig" if is_utf8(reader.encoding) else reader.encoding


def is_number(value: str, decimal: str = ".") -> bool:
    """Whether a field is a number or missing."""
    form = NUMBER if decimal == "." else COMMA_NUMBER
    return value in MISSING or form.fullmatch(value.strip(" \t")) is not None


def is_number_somehow(value: str) -> bool:
    """Whether a field is a number with a decimal point or comma, and any thousands separators."""
    is_plain = is_number(value) or is_number(value, ",")
    return is_plain or WITH_THOUSANDS.fullmatch(value.strip(" \t")) is not None


def quoted(value: str) -> str:
    """A value in quotes, shortened if long."""
    shown = value.encode("utf-8", "replace").decode()
    return repr(shown if len(shown) <= 40 else f"{shown[:37]}...")


def delimiter_of(path: Path, reader: Reader = PLAIN) -> str:
    """The mark that splits the first line into most fields; in a tie, the earlier of `DELIMITERS`.

    A decimal comma is no delimiter. Blanks are one only if the reader says so.
    """
    with opened(path) as stream:
        text = io.TextIOWrapper(stream, _codec(reader), "replace", newline="")
        lines = islice(bounded_lines(text), reader.skip_lines, None)
        first_line = next((line for line in lines if line.strip()), "")
    marks = [mark for mark in DELIMITERS if mark != reader.decimal]
    return max(marks, key=lambda mark: len(next(csv.reader([first_line], delimiter=mark), [])))


def opened(path: Path) -> IO[bytes]:
    """Open a file for reading bytes, unpacked."""
    return cast(IO[bytes], gzip.open(path)) if path.suffix.lower() == ".gz" else path.open("rb")


def _undecodable(path: Path) -> tuple[int, int, int] | None:
    """The first byte that is not UTF-8, its offset and its line."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done, line = 0, 1
    with opened(path) as stream:
        while True:
            chunk = stream.read(CHUNK_BYTES)
            n_pending = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                # error.object is the decoder's pending bytes followed by this chunk.
                before = max(error.start - n_pending, 0)
                place = done - n_pending + error.start
                return error.object[error.start], place, line + chunk[:before].count(b"\n")
            if not chunk:
                return None
            done += len(chunk)
            line += chunk.count(b"\n")


# Error messages, as the table's owner reads them.


def not_utf8(name: str, bad: BadBytes) -> str:
    """Error for bytes of the file `name` that are not UTF-8."""
    column = f", column '{bad.column}'" if bad.column else ""
    where = f"byte 0x{bad.value:02x} in line {bad.line:,}{column} (byte {bad.offset:,} of the text)"
    way = "save it as UTF-8, or name its encoding, as in encoding=latin-1"
    if not bad.offset and bad.value in (0xFE, 0xFF):
        way = "it looks like UTF-16: save it as UTF-8, or set encoding=utf-16"
    return f"data file '{name}' must be UTF-8, got {where}: {way}"


def ragged(name: str, rows: RaggedRows) -> str:
    """Error for rows with too few or too many fields."""
    count = f"got {rows.fields} in line {rows.line:,}"
    if rows.n_bad > 1:
        count += f" and other than {rows.due} in {rows.n_bad:,} of {rows.n_rows:,} rows"
    rule = f"data file '{name}' must have the {rows.due} fields of its first line in every row"
    way = ": does the first line name every column?" if rows.n_bad == rows.n_rows else ""
    return f"{rule}, {count}{way}"


def no_numbers(role: str, columns: Sequence[TextFault]) -> str:
    """Error for values that are not numbers; `role` is, for example, "weight column"."""
    return f"{role} must be numbers: {_shown(columns)}: {_way_out(columns)}"


def mixed_types(columns: Sequence[TextFault], way: str = "") -> str:
    """Error for features with values of two types; `way` is what to do about it."""
    way = way or _way_out(columns)
    return f"feature columns must be of one type each: {_shown(columns)}: {way}"


def many_names(columns: Mapping[str, str]) -> DataError:
    """Error for text features with too many distinct values; `columns` maps each to the reason."""
    names = list(columns)
    reason = next(iter(columns.values()))
    more = f" and in {len(names) - 1} more" if len(names) > 1 else ""
    rule = f"feature columns of text must be categories, got {reason} in {{}}{more}: exclude what "
    rule += "is a name, an id or free text with drop-columns={}, name it as the id, or let a "
    rule += 'schema say type = "category"'
    return DataError.naming(rule, f"'{names[0]}'", first(names).replace(", ", ","))


def _shown(columns: Sequence[TextFault]) -> str:
    shown = "; ".join(str(column) for column in columns[:MOST_SHOWN])
    others = [column.column for column in columns[MOST_SHOWN:]]
    return shown + (f"; and in {len(others)} more columns: {listed(others)}" if others else "")


def _way_out(columns: Sequence[TextFault]) -> str:
    """Suggest how to make the values one type."""
    commas = [column for column in columns if is_number(column.value.strip(), ",")]
    if commas:
        point = commas[0].value.strip().replace(",", ".")
        return f"it looks like a decimal comma, write {point} or set decimal=,"
    if any(WITH_THOUSANDS.fullmatch(column.value.strip()) for column in columns):
        return "remove the marks that set off thousands"
    value = quoted(columns[0].value.strip()).replace("'", '"')
    schema = f'list it in a schema as missing = [{value}], or declare type = "category" there'
    if all(2 * column.n_bad < column.n_rows for column in columns):
        return f"correct them, or leave the field empty where a value is missing; {schema}"
    names = first([column.column for column in columns]).replace(", ", ",")
    return f"{schema}, or exclude the columns with drop-columns={names}"
