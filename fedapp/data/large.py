"""Files with more values than memory, whose columns are read one by one.

What converts columns, and notes on them, sees one column of all rows, so it is the same code for
every table.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from fedapp.data import scratch
from fedapp.data.convert import Converted
from fedapp.data.csv_errors import BLOCK_BYTES, opened

PIECE_BYTES = 8 * BLOCK_BYTES  # of a text that is parsed at a time
# The types that Arrow infers for a CSV file's column, in the order in which it tries them.
INFERRED = [pa.null(), pa.int64(), pa.bool_(), pa.date32(), pa.time32("s")]
INFERRED += [pa.timestamp(unit, zone) for zone in (None, "UTC") for unit in ("s", "ns")]
INFERRED += [pa.float64(), pa.string(), pa.binary()]
# In Arrow's error if a line, or a quoted field with line ends, does not fit in a block.
TOO_LONG = "straddling object"
OTHER_VALUE = re.compile(r"In CSV column #(\d+)")  # in Arrow's error

# Of a text, whether it is the first with the header, and types of columns: its pyarrow.Table.
Parse = Callable[[Any, bool, Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class LargeFrame:
    """What is used of a pyarrow.Table, whose columns are read whenever they are asked for."""

    schema: Any  # of types and metadata as in the file
    num_rows: int
    column: Callable[[int], Any]  # by its index

    @property
    def column_names(self) -> list[str]:
        """Names of the columns."""
        return list(self.schema.names)

    def __getitem__(self, name: str) -> Any:
        return self.column(self.schema.names.index(name))

    def rename_columns(self, names: Sequence[str]) -> LargeFrame:
        """The same columns under other names."""
        fields = map(pa.Field.with_name, self.schema, names)
        return replace(self, schema=pa.schema([*fields]))

    def filter(self, mask: Any) -> LargeFrame:
        """The rows where a boolean mask is true."""
        mask = pa.array(mask)
        return LargeFrame(
            self.schema, mask.true_count, lambda index: self.column(index).filter(mask)
        )


def lasting(frame: Any, converted: Converted, read: Callable[[], Converted]) -> Converted:
    """What became of a column, without its numbers if all columns' would not fit into memory."""
    if not isinstance(frame, LargeFrame):
        return converted
    return converted._replace(numbers=lambda: read().numbers)


def read_pieces(
    pieces: Callable[[], Iterator[bytes]], parse: Parse, types: Mapping[str, Any]
) -> Any:
    """Parse the text of a CSV file by pieces into one pyarrow.Table, which is on disk.

    Columns have the types that Arrow infers from all rows, but for those of `types`. It would keep
    the whole text until it has inferred them. If pieces differ, all are parsed again.
    """
    types, inferred, names = dict(types), set[str](), list[str]()

    def parsed() -> Iterator[Any]:
        for number, piece in enumerate(pieces()):
            part = parse(pa.BufferReader(piece), number == 0, types)
            names[:] = names or part.column_names
            if part.column_names != names:
                raise pa.ArrowInvalid(names)
            yield part

    while True:
        try:
            parts = scratch.stored(parsed())
        except pa.ArrowInvalid as error:
            # Types that differ have either one that has all values, the last, or only text.
            column = OTHER_VALUE.search(str(error))
            name = names[int(column[1])] if column and inferred else ""
            if name not in inferred:
                raise
            types[name] = pa.string()
            inferred.remove(name)
            continue
        differing = dict[str, Any]()
        for index, name in enumerate(names):
            type_ids = {INFERRED.index(part.schema.types[index]) for part in parts} - {0}
            if len(type_ids) > 1:
                differing[name] = INFERRED[max(type_ids)]
        if not differing:
            return pa.concat_tables(parts, promote_options="default")
        types |= differing
        inferred |= differing.keys()


def pieces_of(stream: Any, delimiter: str, n_skipped: int) -> Iterator[bytes]:
    """The text of a stream in pieces of whole rows; the first begins with `n_skipped` other lines.

    Each but the last has two more lines at least. Raises pyarrow.ArrowInvalid if a row is too long.
    """
    rest, is_first, mark = b"", True, re.escape(delimiter)
    # As Arrow reads it: a quote that does not begin a field is a character of it.
    field = rf'(?:"(?:[^"]++|"")*+"[^{mark}\r\n]*+|[^"{mark}\r\n][^{mark}\r\n]*+)?+'
    rows = rf"(?:{field}(?:{mark}{field})*+[\r\n])*+"
    others = rf"(?:[^\r\n]*+(?:\r\n?|\n)){{{n_skipped}}}"
    while chunk := stream.read(PIECE_BYTES):
        rest += chunk
        text = rest.lstrip(b"\r\n")  # Arrow passes over empty lines
        end = 1 + max(rest.rfind(b"\n"), rest.rfind(b"\r"))
        if max(text.count(b"\n"), text.count(b"\r")) < n_skipped + 2:
            end = 0
        elif b'"' in rest:
            whole = re.match((others * is_first + rows).encode(), rest)
            end = whole.end() if whole else 0
        if end:
            yield rest[:end]
            rest, is_first = rest[end:], False
        elif len(rest) > PIECE_BYTES + 2 * BLOCK_BYTES:
            raise pa.ArrowInvalid(TOO_LONG)
    if rest.strip(b"\r\n") or is_first:
        yield rest


def is_long(path: Path) -> bool:
    """Whether a text, unpacked, has more bytes than memory shall hold."""
    with opened(path) as stream:
        stream.seek(scratch.LARGEST)
        return bool(stream.read(1))


class Unread(io.RawIOBase):
    """A file of pieces that are made while it is read; none is empty."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.pieces, self.rest = pieces, memoryview(b"")

    def readable(self) -> bool:
        """Whether it can be read."""
        return True

    def readinto(self, out: Any) -> int:
        """Read at most as many bytes as `out` has; 0 at the end."""
        self.rest = self.rest or memoryview(next(self.pieces, b""))
        n_bytes = min(len(out), len(self.rest))
        out[:n_bytes], self.rest = self.rest[:n_bytes], self.rest[n_bytes:]
        return n_bytes
