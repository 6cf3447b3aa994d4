"""What is wrong in a text and where, in the words that its owner reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedapp.data.places import BadBytes, RaggedRows, TextFault, is_number, quoted
from fedapp.data.schema import first, listed
from fedapp.errors import DataError

MOST_TOLD = 3


def not_utf8(name: str, bad: BadBytes) -> str:
    """A file whose bytes are no text.

    Parameters
    ----------
    name : of the file.
    """
    column = f", column '{bad.column}'" if bad.column else ""
    where = f"byte 0x{bad.value:02x} in line {bad.line:,}{column} (byte {bad.offset:,} of the text)"
    way = "save it as UTF-8, or name its encoding, as in encoding=latin-1"
    if not bad.offset and bad.value in (0xFE, 0xFF):
        way = "it looks like UTF-16: save it as UTF-8, or set encoding=utf-16"
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
    role : "weight column".
    """
    return f"{role} must be numbers: {_told(columns)}: {_way_out(columns)}"


def mixed_types(columns: Sequence[TextFault], way: str = "") -> str:
    """Features with values of two types, and what to do about them.

    Parameters
    ----------
    way : what to do, where that is known.
    """
    return f"feature columns must be of one type each: {_told(columns)}: {way or _way_out(columns)}"


def many_names(columns: Mapping[str, str]) -> DataError:
    """Features of text that are no categories, as nearly every row has a text of its own.

    Parameters
    ----------
    columns : what was found in each.
    """
    names = list(columns)
    found = next(iter(columns.values()))
    more = f" and in {len(names) - 1} more" if len(names) > 1 else ""
    rule = f"feature columns of text must be categories, got {found} in {{}}{more}: exclude what "
    rule += "is a name, an id or free text with drop-columns={}, name it as the id, or let a "
    rule += 'schema say type = "category"'
    return DataError.naming(rule, f"'{names[0]}'", first(names).replace(", ", ","))


def _told(columns: Sequence[TextFault]) -> str:
    told = "; ".join(str(column) for column in columns[:MOST_TOLD])
    others = [column.column for column in columns[MOST_TOLD:]]
    return told + (f"; and in {len(others)} more columns: {listed(others)}" if others else "")


def _way_out(columns: Sequence[TextFault]) -> str:
    """What makes them of one type."""
    commas = [column for column in columns if is_number(column.value.strip(), ",")]
    if commas:
        point = commas[0].value.strip().replace(".", "").replace(",", ".")
        return f"it looks like a decimal comma, write {point} or set decimal=,"
    value = quoted(columns[0].value.strip()).replace("'", '"')
    schema = f'list it in a schema as missing = [{value}], or declare type = "category" there'
    if all(2 * column.n_bad < column.n_rows for column in columns):
        return f"correct them, or leave the field empty where a value is missing; {schema}"
    names = first([column.column for column in columns]).replace(", ", ",")
    return f"{schema}, or exclude the columns with drop-columns={names}"
