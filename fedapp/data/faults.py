"""What is wrong in a text and where, in the words that its owner reads."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fedapp.data.places import BadBytes, RaggedRows, TextFault
from fedapp.data.schema import first, listed

MOST_TOLD = 3
DECIMAL_COMMA = re.compile(r"[-+]?\d+(\.\d{3})*,\d+", re.ASCII)


def not_utf8(name: str, bad: BadBytes) -> str:
    """A file whose bytes are no text.

    Parameters
    ----------
    name : of the file.
    """
    column = f", column '{bad.column}'" if bad.column else ""
    where = f"byte 0x{bad.value:02x} in line {bad.line:,}{column} (byte {bad.offset:,} of the text)"
    way = "save it as UTF-8"
    if not bad.offset and bad.value in (0xFE, 0xFF):
        way = f"it looks like UTF-16, {way}"
    return f"data file '{name}' must be UTF-8, got {where}: {way}"


def ragged(name: str, rows: RaggedRows) -> str:
    """Rows that are too short or too long."""
    found = f"got {rows.fields} in line {rows.line:,}"
    if rows.n_bad > 1:
        found += f" and other than {rows.due} in {rows.n_bad:,} of {rows.n_rows:,} rows"
    rule = f"data file '{name}' must have the {rows.due} fields of its first line in every row"
    return f"{rule}, {found}" + (
        ": does the first line name every column?" if rows.n_bad == rows.n_rows else ""
    )


def no_numbers(role: str, columns: Sequence[TextFault]) -> str:
    """Values of columns that are not numbers, and what to do about them.

    Parameters
    ----------
    role : "feature columns", "weight column".
    """
    told = "; ".join(str(column) for column in columns[:MOST_TOLD])
    others = [column.column for column in columns[MOST_TOLD:]]
    more = f"; and in {len(others)} more columns: {listed(others)}" if others else ""
    return f"{role} must be numbers: {told}{more}: {_way_out(columns)}"


def _way_out(columns: Sequence[TextFault]) -> str:
    """What makes numbers of them."""
    commas = [column for column in columns if DECIMAL_COMMA.fullmatch(column.value.strip())]
    if commas:
        point = commas[0].value.strip().replace(".", "").replace(",", ".")
        return f"it looks like a decimal comma, write {point}"
    if all(2 * column.n_bad < column.n_rows for column in columns):
        return "correct them, or leave the field empty where a value is missing"
    names = first([column.column for column in columns]).replace(", ", ",")
    return (
        f"encode them as numbers, or exclude them with drop-columns={names} "
        "(categorical columns are not supported yet)"
    )
