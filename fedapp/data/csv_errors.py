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
from typing import IO, Any, AnyStr, cast

from fedapp.data.schema import (
    MISSING,
    PLAIN,
    Reader,
    first,
    id_columns,
    joined_id,
    listed,
    plain_text,
    with_names,
)

DELIMITERS = (",", ";", "\t", "|")
# A row has to fit in one block: 8 MiB holds some 500,000 columns of numbers.
BLOCK_BYTES = 8 << 20
CHUNK_BYTES = 1 << 20
# What Arrow reads as a number, after blanks around it are stripped.
NUMBER = re.compile(
    r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?(nan|inf|infinity)", re.IGNORECASE | re.ASCII
)
FINITE = re.compile(r"[-+]?(?=\.?\d)\d*\.?\d*(e[-+]?\d{1,9})?", re.IGNORECASE | re.ASCII)
# The same with a decimal comma.
COMMA_NUMBER = re.compile(NUMBER.pattern.replace(r"\.", ","), re.IGNORECASE | re.ASCII)
# A number with commas or points as thousands separators, which no reader accepts.
WITH_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}((,\d{3})+(\.\d*)?|(\.\d{3})+(,\d*)?)", re.ASCII)
THOUSANDS_WAY = "remove the marks that set off thousands"
# A code, as E11.9 of ICD-10 or 0x1F.
CODE = re.compile(r"[a-z]{1,4}[-.]?\d[\w.-]*|0x[\da-f]+", re.IGNORECASE | re.ASCII)
MOST_SHOWN = 3  # columns in an error


@dataclass(frozen=True, slots=True)
class TextFile:
    """A CSV file in which errors are located."""

    path: Path
    reader: Reader  # with its delimiter
    # numbers, from 0, of the file's rows that the table has, as an array; None: all
    row_numbers: Any = None
    id_column: str = ""
    without: tuple[str, ...] = ()  # ids of rows that are passed over

    def header(self) -> list[str]:
        """Plain column names; see ``with_names``."""
        return with_names(self.written_header())

    def written_header(self) -> list[str]:
        """Column names as in the file."""
        _, fields = next(self._records(), (0, []))
        if self.reader.has_header:
            return fields
        return list(self.reader.columns) or [f"f{number}" for number in range(1, len(fields) + 1)]

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """First line and fields of each row; empty lines are skipped."""
        return ((line, fields) for line, fields, stays in self._rows() if stays)

    def _rows(self) -> Iterator[tuple[int, list[str], bool]]:
        """Every row, and whether it is not passed over."""
        rows = islice(self._records(), int(self.reader.has_header), None)
        names = [self.reader.of_column(name).rename or name for name in self.header()]
        columns, gone = id_columns(self.id_column), frozenset(self.without)
        if not gone or not {*columns} <= {*names}:
            yield from ((*row, True) for row in rows)
            return
        indices = [names.index(name) for name in columns]
        for line, fields in rows:
            parts = [plain_text("".join(fields[at : at + 1])) for at in indices]
            yield line, fields, joined_id(parts) not in gone

    def lines(self) -> Iterator[bytes]:
        """The file without the lines of the rows that are passed over, unpacked."""
        with opened(self.path) as stream:
            if not self.without:
                yield from bounded_lines(stream)
                return
            codec = "utf-8" if is_utf8(self.reader.encoding) else self.reader.encoding  # and mark
            text = io.TextIOWrapper(stream, codec, "surrogateescape", newline="")
            encode = codecs.getincrementalencoder(codec)("surrogateescape").encode
            rows, stays = self._rows(), True
            start, _, is_next = next(rows, (0, [], False))
            for at, line in enumerate(text, start=1):  # a row may have several
                if at == start:
                    stays = is_next
                    start, _, is_next = next(rows, (0, [], False))
                if stays:
                    yield encode(line)

    def first_line(self, bad: Any) -> str:
        """The line of the first bad row of the table, as in an error; `bad` is a boolean array."""
        row = int(bad.argmax())
        row = row if self.row_numbers is None else self.row_numbers[row]
        line, _ = next(islice(self.rows(), row, None))
        return f", first in line {line:,}"

    def faults(
        self,
        rule: str,
        tests: Mapping[str, Callable[[str], bool]],
        wanted: str,
        way: str = "",
        of_role: str = "",
    ) -> str:
        """The error for values that fail the test of their column: how many, and the first.

        A test takes a field without spaces around; `wanted`, a plural noun, is what passes. `way`
        is what to do, by default found from the values; `of_role` where they are of no feature.
        """
        names = self.header()
        n_rows = 0
        counts = Counter[str]()
        indices = {name: names.index(name) for name in tests}
        bad: dict[str, tuple[str, int]] = {}  # the first value and its line, by column
        for line, fields in self.rows():
            n_rows += 1
            for name, index in indices.items():
                if index < len(fields) and not tests[name]((value := fields[index]).strip()):
                    counts[name] += 1
                    bad.setdefault(name, (value, line))
        if not bad:  # this slower pass takes all that Arrow has refused
            return ""
        shown = []
        for name, (value, line) in islice(bad.items(), MOST_SHOWN):
            are = "are not " + wanted if counts[name] > 1 else "is not a " + wanted.rstrip("s")
            count = f"{counts[name]:,} of {n_rows:,} values of '{name}' {are}"
            shown.append(f"{count}, first {quoted(value)} in line {line:,}")
        if others := list(bad)[MOST_SHOWN:]:
            shown.append(f"and in {len(others)} more columns: {listed(others)}")
        few = all(2 * count < n_rows for count in counts.values())
        values = [value.strip() for value, _ in bad.values()]
        way = way or _way_out(values, [] if few else [*bad], of_role)
        return f"{rule}: {'; '.join(shown)}: {way}"

    def ragged(self) -> str:
        """The error for rows with too few or too many fields; empty if there are none."""
        due = len(self.header())
        widths = Counter[int]()
        fault = ""
        for line, row in self.rows():
            widths[len(row)] += 1
            if len(row) != due:
                fault = fault or f"got {len(row)} in line {line:,}"
        n_rows = widths.total()
        n_bad = widths.total() - widths[due]
        if n_bad > 1:
            fault += f" and other than {due} in {n_bad:,} of {n_rows:,} rows"
        rule = f"data file '{self.path}' must have the {due} fields of its first line in every"
        way = ": does the first line name every column?" if n_bad == n_rows else ""
        return f"{rule} row, {fault}{way}" if n_bad else ""

    def not_utf8(self) -> str:
        """The error for the first byte that is not UTF-8; empty if there is none."""
        if not is_utf8(self.reader.encoding):
            return ""
        offset, line = 0, 1
        with opened(self.path) as stream:
            for content in bounded_lines(stream):
                try:
                    content.decode()
                except UnicodeDecodeError as error:
                    offset = offset + error.start
                    value = content[error.start]
                    break
                offset, line = offset + len(content), line + 1
            else:
                return ""
        way = "save it as UTF-8, or name its encoding, as in encoding=latin-1"
        if not offset and value in (0xFE, 0xFF):
            way = "it looks like UTF-16: save it as UTF-8, or set encoding=utf-16"
        where = f"byte 0x{value:02x} in line {line:,} (byte {offset:,} of the text)"
        return f"data file '{self.path}' must be UTF-8, got {where}: {way}"

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        with opened(self.path) as stream:
            # A byte that cannot be decoded becomes a lone surrogate.
            text = io.TextIOWrapper(stream, _codec(self.reader), "surrogateescape", newline="")
            lines = islice(bounded_lines(text), self.reader.skip_lines, None)
            mark = self.reader.delimiter or ","
            reader = csv.reader(lines, delimiter=mark, skipinitialspace=mark == " ")
            line = self.reader.skip_lines
            for fields in reader:
                if fields:
                    # A blank at the end of a line is no separator.
                    yield line + 1, fields[:-1] if mark == " " and fields[-1] == "" else fields
                line = self.reader.skip_lines + reader.line_num


def _way_out(values: Sequence[str], exclude: Sequence[str], of_role: str) -> str:
    """How to make columns one type by their first bad values, or else to `exclude` them."""
    if any(map(WITH_THOUSANDS.fullmatch, values)):
        return THOUSANDS_WAY
    if commas := [value for value in values if is_number(value, ",")]:
        return way_of_marks(commas, ".")
    if of_role:
        return of_role
    code = next(filter(CODE.fullmatch, values), "")
    value = quoted(code or values[0]).replace("'", '"')
    schema = f'list it in a schema as missing = [{value}], or declare type = "category" there'
    if code:
        schema = f'declare type = "category" in a schema, or list it there as missing = [{value}]'
    if not exclude:
        correct = "correct them, or leave the field empty where a value is missing"
        return f"{schema}; or {correct}" if code else f"{correct}; {schema}"
    names = first(exclude).replace(", ", ",")
    return f"{schema}, or exclude the columns with drop-columns={names}"


def way_of_marks(values: Sequence[str], decimal: str) -> str:
    """What to do about numbers that have the mark that is not the ``decimal`` one."""
    # Three digits after every mark are thousands, where another decimal mark would divide them.
    if all(map(WITH_THOUSANDS.fullmatch, values)):
        return THOUSANDS_WAY
    if decimal == ",":
        return "write 0,5 for 0.5 and 1500 for 1.500, or set decimal=."
    example = next(value for value in values if not WITH_THOUSANDS.fullmatch(value))
    return f"it looks like a decimal comma, write {example.replace(',', '.')} or set decimal=,"


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


def is_finite(value: str) -> bool:
    """Whether a name is a number with digits, none that is missing or infinite."""
    return FINITE.fullmatch(value) is not None


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
