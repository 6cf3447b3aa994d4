"""Where in a CSV file something is: a slow pass over its text, when Arrow's fast one has failed.

Lines are counted from 1 with the header, as an editor counts them; a row of several lines, because
of quoted line ends, is at its first.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from fedapp.data.schema import MISSING, Reader, with_names

DELIMITERS = (";", "\t")
HEADER_BYTES = 8 << 20
CHUNK_BYTES = 1 << 20
# What Arrow reads as a number, blanks around it left aside.
NUMBER = re.compile(
    r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?(nan|inf|infinity)", re.IGNORECASE | re.ASCII
)
Record = tuple[int, list[str]]


@dataclass(frozen=True, slots=True)
class TextFault:
    """Values of one column that are not numbers.

    Parameters
    ----------
    n_bad, n_rows : of the column.
    value, line : the first of them, and where it is.
    """

    column: str
    n_bad: int
    n_rows: int
    value: str
    line: int

    def __str__(self) -> str:
        are = "is not a number" if self.n_bad == 1 else "are not numbers"
        count = f"{self.n_bad:,} of {self.n_rows:,} values of '{self.column}' {are}"
        return f"{count}, first {quoted(self.value)} in line {self.line:,}"


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Rows whose number of fields is not that of the header.

    Parameters
    ----------
    due : fields of the header.
    n_bad, n_rows : of the file.
    fields, line : of the first of them.
    """

    due: int
    n_bad: int
    n_rows: int
    fields: int
    line: int


@dataclass(frozen=True, slots=True)
class BadBytes:
    """Bytes that are not UTF-8.

    Parameters
    ----------
    value : the first such byte.
    offset : of it in the file, or in what is packed in it, from 0.
    line : of it.
    column : of it, empty where it is not known.
    """

    value: int
    offset: int
    line: int
    column: str


@dataclass(frozen=True, slots=True)
class TextFile:
    """A CSV file to look into.

    Parameters
    ----------
    path : with .gz or .bz2 where it is packed.
    reader : with its delimiter.
    """

    path: Path
    reader: Reader

    def header(self) -> list[str]:
        """Names of the columns; a nameless one as ``with_names`` calls it."""
        _, names = next(self._records(), (0, []))
        return with_names(self.reader.columns or names)

    def rows(self) -> Iterator[Record]:
        """The line at which each row begins, and its fields; empty lines are no rows."""
        records = self._records()
        if not self.reader.columns:
            next(records, None)
        yield from records

    def line_of(self, row: int) -> int:
        """The line of a row, numbered from 0."""
        return next(line for place, (line, _) in enumerate(self.rows()) if place == row)

    def no_numbers(self, columns: Sequence[str]) -> list[TextFault]:
        """Columns with values that are neither numbers nor missing."""
        names = self.header()
        places = [names.index(column) for column in columns]
        found: dict[int, tuple[str, int]] = {}
        counts: Counter[int] = Counter()
        n_rows = 0
        for line, fields in self.rows():
            n_rows += 1
            for place in places:
                if place < len(fields) and not is_number(value := fields[place]):
                    counts[place] += 1
                    found.setdefault(place, (value, line))
        return [
            TextFault(names[place], counts[place], n_rows, *found[place])
            for place in places
            if place in found
        ]

    def ragged_rows(self) -> RaggedRows | None:
        """Rows that are too short or too long, if there are any."""
        due, widths = len(self.header()), Counter[int]()
        fields = line = 0
        for at, row in self.rows():
            widths[len(row)] += 1
            if len(row) != due and not line:
                fields, line = len(row), at
        n_bad = widths.total() - widths[due]
        return RaggedRows(due, n_bad, widths.total(), fields, line) if n_bad else None

    def bad_bytes(self) -> BadBytes | None:
        """The first byte that is not UTF-8, if there is one."""
        found = _undecodable(self.path)
        if found is None:
            return None
        value, offset, line = found
        return BadBytes(value, offset, line, self._column_of_bad_byte())

    def _column_of_bad_byte(self) -> str:
        names = self.header()
        for _, fields in self._records():
            for name, field in zip(names, fields, strict=False):
                if any("\udc80" <= letter <= "\udcff" for letter in field):
                    return name.encode("utf-8", "replace").decode()
        return ""

    def _records(self) -> Iterator[Record]:
        with opened(self.path) as stream:
            # A byte that is not UTF-8 becomes a lone surrogate.
            text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
            for _ in range(self.reader.skip_lines):
                text.readline()
            reader = csv.reader(text, delimiter=self.reader.delimiter or ",")
            line = self.reader.skip_lines
            for fields in reader:
                if fields:
                    yield line + 1, fields
                line = self.reader.skip_lines + reader.line_num


def is_number(value: str) -> bool:
    """Whether a field is a number or missing."""
    return value in MISSING or NUMBER.fullmatch(value.strip(" \t")) is not None


def quoted(value: str) -> str:
    """A value as it is told: in quotes, cut where it is long."""
    shown = value.encode("utf-8", "replace").decode()
    return repr(shown if len(shown) <= 40 else f"{shown[:37]}...")


def delimiter_of(path: Path) -> str:
    """What stands between the fields: a comma, or what splits a header line that has none.

    Raises
    ------
    OSError, EOFError, zlib.error : the file cannot be read.
    """
    with opened(path) as stream:
        text = stream.read(HEADER_BYTES).decode("utf-8-sig", "replace")
    line = next((line for line in text.splitlines() if line.strip()), "")
    widths = {mark: len(_split(line, mark)) for mark in (",", *DELIMITERS)}
    return "," if widths[","] > 1 else max(widths, key=lambda mark: widths[mark])


def opened(path: Path) -> IO[bytes]:
    """A file's bytes, unpacked."""
    if path.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.open(path))
    return bz2.open(path) if path.suffix.lower() == ".bz2" else path.open("rb")


def _split(line: str, delimiter: str) -> list[str]:
    return next(csv.reader([line], delimiter=delimiter), [])


def _undecodable(path: Path) -> tuple[int, int, int] | None:
    """The first byte that is not UTF-8, its offset and its line."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done, line = 0, 1
    with opened(path) as stream:
        while True:
            chunk = stream.read(CHUNK_BYTES)
            held = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                # The decoder's own text is what it held back and this chunk.
                before = max(error.start - held, 0)
                place = done - held + error.start
                return error.object[error.start], place, line + chunk[:before].count(b"\n")
            if not chunk:
                return None
            done += len(chunk)
            line += chunk.count(b"\n")
