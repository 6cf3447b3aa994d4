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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, AnyStr, cast

from fedapp.data.schema import MISSING, PLAIN, Reader, with_names

DELIMITERS = ("\t", ";", "|", ",", " ")  # by rank, where more than one would do
HEADER_BYTES = 8 << 20
FIRST_LINES = 20
FIRST_BYTES = 1 << 16
# A row has to fit in one block: 8 MiB holds some 500,000 columns of numbers.
BLOCK_BYTES = 8 << 20
CHUNK_BYTES = 1 << 20
# What Arrow reads as a number, blanks around it left aside.
NUMBER = re.compile(
    r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?(nan|inf|infinity)", re.IGNORECASE | re.ASCII
)
# A number with a decimal comma, thousands set off by points.
COMMA_NUMBER = re.compile(
    r"[-+]?(\d+,?\d*|,\d+|[1-9]\d{0,2}(\.\d{3})+(,\d*)?)(e[-+]?\d+)?|[-+]?(nan|inf|infinity)",
    re.IGNORECASE | re.ASCII,
)
# A number with a decimal point, thousands set off by commas, which nothing reads.
WITH_THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?", re.ASCII)
Record = tuple[int, list[str]]


@dataclass(frozen=True, slots=True)
class TextFault:
    """Values of one column that are not as they should be.

    Parameters
    ----------
    n_bad, n_rows : of the column.
    value, line : the first of them, and where it is.
    wanted : what the values should be, in the plural.
    """

    column: str
    n_bad: int
    n_rows: int
    value: str
    line: int
    wanted: str = "numbers"

    def __str__(self) -> str:
        one = f"is not a {self.wanted.removesuffix('s')}"
        are = one if self.n_bad == 1 else f"are not {self.wanted}"
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
    kept : numbers of the rows that a table has of the file, from 0; None where it has all.
    """

    path: Path
    reader: Reader
    kept: Sequence[int] | None = None

    def header(self) -> list[str]:
        """Names of the columns without spaces around; a nameless one as ``with_names`` calls it."""
        return with_names(name.strip() for name in self.written_header())

    def written_header(self) -> list[str]:
        """Names of the columns as the file has them."""
        _, fields = next(self._records(), (0, []))
        if self.reader.has_header:
            return fields
        return list(self.reader.columns) or [f"f{place}" for place in range(1, len(fields) + 1)]

    def rows(self) -> Iterator[Record]:
        """The line at which each row begins, and its fields; empty lines are no rows."""
        records = self._records()
        if self.reader.has_header:
            next(records, None)
        yield from records

    def line_of(self, row: int) -> int:
        """The line of a row of the table, numbered from 0."""
        wanted = row if self.kept is None else self.kept[row]
        return next(line for place, (line, _) in enumerate(self.rows()) if place == wanted)

    def faults(self, columns: Mapping[str, Callable[[str], bool]], wanted: str) -> list[TextFault]:
        """Columns with values that do not pass their test.

        Parameters
        ----------
        columns : test of a column, by its name; it takes a field without spaces around.
        wanted : what passes, in the plural.
        """
        names = self.header()
        tests = [(names.index(column), test) for column, test in columns.items()]
        found: dict[int, tuple[str, int]] = {}
        counts: Counter[int] = Counter()
        n_rows = 0
        for line, fields in self.rows():
            n_rows += 1
            for place, test in tests:
                if place < len(fields) and not test((value := fields[place]).strip()):
                    counts[place] += 1
                    found.setdefault(place, (value, line))
        return [
            TextFault(names[place], counts[place], n_rows, *found[place], wanted)
            for place, _ in tests
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
            # A byte that cannot be decoded becomes a lone surrogate.
            encoding = "utf-8-sig" if is_utf8(self.reader.encoding) else self.reader.encoding
            text = io.TextIOWrapper(stream, encoding, "surrogateescape", newline="")
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
    """Lines of a text.

    Raises
    ------
    csv.Error : one is longer than a block; no more of it is read.
    """
    while line := text.readline(BLOCK_BYTES + 1):
        if len(line) > BLOCK_BYTES:
            raise csv.Error(f"line longer than {BLOCK_BYTES} characters")
        yield line


def is_utf8(encoding: str) -> bool:
    """Whether a name of an encoding is one of UTF-8's."""
    return codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")


def is_number(value: str, decimal: str = ".") -> bool:
    """Whether a field is a number or missing.

    Parameters
    ----------
    decimal : a point, or a comma with points before every three digits or none.
    """
    form = NUMBER if decimal == "." else COMMA_NUMBER
    return value in MISSING or form.fullmatch(value.strip(" \t")) is not None


def is_number_somehow(value: str) -> bool:
    """Whether a field is a number with a decimal point or comma, thousands set off or not."""
    is_plain = is_number(value) or is_number(value, ",")
    return is_plain or WITH_THOUSANDS.fullmatch(value.strip(" \t")) is not None


def quoted(value: str) -> str:
    """A value as it is told: in quotes, cut where it is long."""
    shown = value.encode("utf-8", "replace").decode()
    return repr(shown if len(shown) <= 40 else f"{shown[:37]}...")


def delimiter_of(path: Path, reader: Reader = PLAIN) -> str:
    """What separates the fields: what splits the first lines into equally many, else the first one.

    Blanks do so only where commas do not split the first line. Decimal commas separate nothing.

    Raises
    ------
    OSError, EOFError, zlib.error : the file cannot be read.
    """
    with opened(path) as stream:
        read = stream.read(FIRST_BYTES)
        if read.count(b"\n") < FIRST_LINES + reader.skip_lines:
            read += stream.read(HEADER_BYTES)
    text = read.decode("utf-8-sig" if is_utf8(reader.encoding) else reader.encoding, "replace")
    found = text.splitlines()[reader.skip_lines :]
    if len(read) >= FIRST_BYTES and len(found) > 1:
        found.pop()  # it may be cut
    lines = [line for line in found if line.strip()][:FIRST_LINES]
    if not lines:
        return ","
    widths = {mark: [len(split(line, mark)) for line in lines] for mark in DELIMITERS}
    if reader.decimal == ",":
        widths[","] = [1]
    alike = [mark for mark in DELIMITERS if len(set(widths[mark])) == 1 and widths[mark][0] > 1]
    if alike and (alike[0] != " " or widths[","][0] == 1):
        return alike[0]
    if widths[","][0] > 1:
        return ","
    return max(DELIMITERS[:-1], key=lambda mark: widths[mark][0])


def split(line: str, delimiter: str) -> list[str]:
    """Fields of one line."""
    if delimiter == " ":
        line = line.strip()
    return next(csv.reader([line], delimiter=delimiter, skipinitialspace=delimiter == " "), [])


def opened(path: Path) -> IO[bytes]:
    """A file's bytes, unpacked."""
    if path.suffix.lower() == ".gz":
        return cast(IO[bytes], gzip.open(path))
    return bz2.open(path) if path.suffix.lower() == ".bz2" else path.open("rb")


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
