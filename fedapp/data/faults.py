"""Error messages about the values of a table, as its owner reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedapp.data.places import BadBytes, RaggedRows, TextFault, is_number, quoted
from fedapp.data.schema import first, listed
from fedapp.errors import DataError

MOST_SHOWN = 3


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
    return (
        f"feature columns must be of one type each: {_shown(columns)}: {way or _way_out(columns)}"
    )


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
        point = commas[0].value.strip().replace(".", "").replace(",", ".")
        return f"it looks like a decimal comma, write {point} or set decimal=,"
    value = quoted(columns[0].value.strip()).replace("'", '"')
    schema = f'list it in a schema as missing = [{value}], or declare type = "category" there'
    if all(2 * column.n_bad < column.n_rows for column in columns):
        return f"correct them, or leave the field empty where a value is missing; {schema}"
    names = first([column.column for column in columns]).replace(", ", ",")
    return f"{schema}, or exclude the columns with drop-columns={names}"
