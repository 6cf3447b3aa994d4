"""What a column's values are: numbers, booleans, dates, or names of categories.

A column of text, whose spaces around the values are removed, is of the first type that fits all its
values: numbers; booleans (true and false, yes and no, y and n, in any case), which become 1 and 0;
ISO dates, times of day or both, which become days since 1970 (UTC where they have a zone) with
their fraction; else categories. Values of two types in one column are refused, and so is text that
is nearly all distinct, unless a schema declares the type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fedapp.data.categories import MOST_CATEGORIES, Categories, entries_of
from fedapp.data.places import is_number
from fedapp.data.schema import MISSING, Declared

BOOLEANS = {"true": 1, "yes": 1, "y": 1, "false": 0, "no": 0, "n": 0}
# What each kind of column becomes as a number; names of categories are the model's.
ENCODINGS: dict[str, dict[str, Any]] = {
    "number": {},
    "boolean": {"values": BOOLEANS},
    "date": {"unit": "days since 1970-01-01"},
    "ordinal": {},
    "category": {},
}
DATE = re.compile(
    r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[-+]\d{2}(:?\d{2})?)?)?", re.ASCII
)
DATES_WAY = "write them as 2024-12-31, or exclude the columns with drop-columns"
OTHER_DATE = re.compile(r"\d{1,2}([./-])\d{1,2}\1(\d{4}|\d{2})", re.ASCII)
WHOLE = re.compile(r"[-+]?\d{1,20}", re.ASCII)  # of a column of 64 bits
TEXTS = ("string", "large_string", "string_view")  # as pyarrow calls its types
SECONDS = 86_400.0  # of a day
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Text with more names is no category where most rows have one of their own ...
MANY_NAMES = 1000
LARGEST_SHARE = 0.5
# ... and in a small table where nearly all have.
FEW_ROWS = 20
LARGEST_SHARE_OF_FEW = 0.9
# Key in the metadata of a field: all points of its numbers were read as marks of thousands.
THOUSANDS = b"thousands"
# What to do about numbers such as 0.5 where those such as 0,5 are said to be.
POINTS_WAY = "write 0,5 for 0.5, or set decimal=."


class UntypedError(Exception):
    """A column's values are of no one type; the data error is made where the file is known.

    Parameters
    ----------
    found : what they are, in words that quote none of them.
    wanted : "numbers", "dates" or "booleans", which other values are not; empty where all values
        are at fault.
    way : what to do about it.
    fits : whether one value is as wanted.
    """

    def __init__(
        self, found: str, wanted: str = "", way: str = "", fits: Callable[[str], bool] | None = None
    ) -> None:
        super().__init__(found)
        self.found, self.wanted, self.way, self.fits = found, wanted, way, fits


@dataclass(frozen=True, slots=True, eq=False)
class Typed:
    """A column as numbers.

    Parameters
    ----------
    column : pyarrow.ChunkedArray of numbers, or of codes of categories.
    kind : "number", "boolean", "date", "ordinal" or "category".
    names : of the categories; None for other kinds.
    trimmed : whether spaces were removed around some value.
    n_outside : values that became missing, as they are none of those declared.
    said : whether the kind is the file's own or declared, and not found in text.
    marked : whether they are categories because the table, not a schema, says so of values that
        are no text.
    thousands : whether all points are read as marks of thousands, and no number has a comma.
    n_equal : values of text that became missing, as they are written otherwise than a number that
        means that there is none, but equal it.
    """

    column: Any
    kind: str = "number"
    names: tuple[str, ...] | None = None
    trimmed: bool = False
    n_outside: int = 0
    said: bool = False
    marked: bool = False
    thousands: bool = False
    n_equal: int = 0


def columns_json(columns: Sequence[str], kinds: Sequence[str], categories: Categories) -> str:
    """How the values of each column become the numbers that a model was trained on.

    Raises
    ------
    ValueError : the kinds are not those of the columns.
    """
    n_columns, found = len(columns), {}
    if len(kinds) != n_columns or not {*kinds} <= {*ENCODINGS}:
        raise ValueError(f"kinds must be known ones, one a column of {n_columns}")
    for column, kind, names in zip(columns, kinds, entries_of(categories, n_columns), strict=True):
        kind = kind if names is None else "category"
        given = {"names": list(names)} if names else {}
        found[column] = {"kind": kind, **ENCODINGS[kind], **given}
    text = json.dumps({"missing": MISSING, "columns": found}, ensure_ascii=False, indent=1)
    return text + "\n"


def holds_numbers(type: Any) -> bool:
    """Whether an Arrow type holds numbers, booleans or nothing but missing values."""
    tests = ("is_integer", "is_floating", "is_boolean", "is_decimal", "is_null")
    return any(getattr(pa.types, test)(type) for test in tests)


def is_text(type: Any) -> bool:
    """Whether an Arrow type holds text."""
    return any(getattr(pa.types, f"is_{kind}")(type) for kind in TEXTS)


def typed(
    column: Any,
    declared: Declared,
    missing: tuple[str, ...] = (),
    decimal: str = ".",
    is_written: bool = True,
) -> Typed:
    """A column as numbers or codes.

    Parameters
    ----------
    column : pyarrow.ChunkedArray, as the file has it.
    declared : what a schema says of it.
    missing : values that mean that there is none, beside ``MISSING`` and the column's own.
    decimal : of numbers in text.
    is_written : whether the file writes its numbers as text, as CSV does; in other files, text that
        looks like numbers is still text: the names of categories.

    Raises
    ------
    UntypedError : its values are of two types, of another than the one declared, or no category.
    """
    is_dictionary = pa.types.is_dictionary(column.type)
    column = values_of(column)
    absent = (*missing, *declared.missing)
    marked = is_dictionary and not declared.type and not is_text(column.type)
    if pa.types.is_temporal(column.type) and declared.type in ("", "date") and not marked:
        return Typed(_days(column, absent), "date")
    are_numbers = holds_numbers(column.type)
    if are_numbers and not is_dictionary and not goes_by_text(column.type, declared):
        known = without(column, absent, decimal)
        kind = "boolean" if pa.types.is_boolean(column.type) else "number"
        n_equal = known.null_count - column.null_count if is_written else 0
        return Typed(known, kind, said=True, n_equal=n_equal)
    texts, trimmed = as_texts(column, declared, missing, decimal)
    if is_dictionary and not declared.type:
        declared = Declared(declared.name, type="category")
    if declared.type == "ordinal":
        codes, n_outside = _coded(texts, declared.categories)
        return Typed(codes, "ordinal", trimmed=trimmed, n_outside=n_outside, said=True)
    if declared.type == "category":
        names = declared.categories or _names(texts)
        codes, n_outside = _coded(texts, names)
        return Typed(codes, "category", names, trimmed, n_outside, said=True, marked=marked)
    point = "." if are_numbers else decimal
    found = _found(texts, declared.type, point, trimmed, is_written or are_numbers)
    if found.kind != "number":
        return found
    known = without(found.column, absent, decimal)
    return replace(found, column=known, n_equal=known.null_count - found.column.null_count)


def _needs_text(declared: Declared) -> bool:
    """Whether values stand for others."""
    return declared.type in ("category", "ordinal", "date") or bool(declared.codes)


def is_read_as_text(declared: Declared) -> bool:
    """Whether a CSV file's column is to be read as it is written."""
    return _needs_text(declared) or declared.type == "boolean" or bool(declared.missing)


def goes_by_text(type: Any, declared: Declared) -> bool:
    """Whether values of an Arrow type are looked at as text."""
    if holds_numbers(type) and not pa.types.is_boolean(type):
        return _needs_text(declared)
    return is_read_as_text(declared)


def values_of(column: Any) -> Any:
    """A column that is written as a dictionary and places in it as the values it stands for."""
    if pa.types.is_dictionary(column.type):
        return column.cast(column.type.value_type)
    return column


def without(column: Any, absent: Iterable[str], decimal: str) -> Any:
    """A column of numbers without those that equal one that means that there is no value.

    Parameters
    ----------
    column : of another type, it stays as it is.
    absent : as a schema writes them; those that are no numbers are passed over.
    decimal : in these.
    """
    type = column.type
    if not (pa.types.is_integer(type) or pa.types.is_floating(type) or pa.types.is_decimal(type)):
        return column
    numbers = column.cast(pa.float64()) if pa.types.is_decimal(type) else column
    found = []
    for code in absent:
        if code in MISSING or not is_number(code, decimal):
            continue
        text = code.strip()
        if decimal != ".":
            text = text.replace(".", "").replace(decimal, ".")
        is_whole = WHOLE.fullmatch(text) and pa.types.is_integer(type)
        with suppress(pa.ArrowInvalid, OverflowError):  # none of this column's type equals it
            found.append(pa.scalar(int(text) if is_whole else float(text), numbers.type))
    if not found:
        return column
    is_absent = pc.is_in(numbers, value_set=pa.array(found, numbers.type))
    return pc.if_else(is_absent, pa.scalar(None, type), column)


def as_texts(
    column: Any, declared: Declared, missing: tuple[str, ...], decimal: str = "."
) -> tuple[Any, bool]:
    """Values as text without spaces around, with names in place of codes; whether some had spaces.

    Parameters
    ----------
    decimal : of the numbers among the values that mean that there is none.

    Raises
    ------
    UntypedError : they are no text.
    """
    if pa.types.is_binary(column.type) or pa.types.is_nested(column.type):
        raise UntypedError("values that are no text")
    column = without(column, (*missing, *declared.missing), decimal)
    texts, trimmed = trimmed_texts(column)
    absent = pa.array([*MISSING, *missing, *declared.missing])
    texts = pc.if_else(pc.is_in(texts, value_set=absent), pa.scalar(None, pa.string()), texts)
    if declared.codes:
        found = pc.index_in(texts, value_set=pa.array([code for code, _ in declared.codes]))
        named = pa.array([name for _, name in declared.codes]).take(found.combine_chunks())
        texts = pa.chunked_array([pc.coalesce(named, texts.combine_chunks())])
    return texts, trimmed


def trimmed_texts(column: Any) -> tuple[Any, bool]:
    """Values as text without spaces around; whether some had spaces."""
    if pa.types.is_floating(column.type):
        # 1.0 in a file of another kind is the name 1 in this one.
        whole = column.cast(pa.int64(), safe=False)
        if pc.all(pc.equal(column, whole)).as_py() is not False:
            column = whole
    column = column.cast(pa.string())
    texts = pc.utf8_trim_whitespace(column)
    return texts, pc.any(pc.not_equal(texts, column)).as_py() is True


def _names(texts: Any) -> tuple[str, ...]:
    """Distinct values, sorted."""
    return tuple(sorted(pc.unique(texts).drop_null().to_pylist()))


def _coded(texts: Any, names: tuple[str, ...]) -> tuple[Any, int]:
    """The place of each value among names, and how many are none of them."""
    if len(names) > MOST_CATEGORIES:
        raise UntypedError(f"{len(names):,} categories, more than {MOST_CATEGORIES:,}")
    codes = pc.index_in(texts, value_set=pa.array(names, pa.string()))
    return codes, int(codes.null_count - texts.null_count)


def _found(texts: Any, declared: str, decimal: str, trimmed: bool, may_be_numbers: bool) -> Typed:
    """Text as the first type that fits all values, or as the one declared."""
    values = pc.unique(texts).drop_null().to_pylist()
    tests: dict[str, Callable[[str], bool]] = {
        "number": lambda value: is_number(value, decimal),
        "boolean": lambda value: value.lower() in BOOLEANS,
        "date": is_date,
    }
    if not may_be_numbers and not declared:
        del tests["number"]
    wanted = [declared] if declared else list(tests)
    counts = {kind: sum(map(tests[kind], values)) for kind in wanted}
    for kind, count in counts.items():
        if count == len(values):
            return Typed(
                _converted(texts, kind, decimal),
                kind,
                None,
                trimmed,
                said=bool(declared),
                thousands=kind == "number" and decimal == "," and has_thousands_alone(values),
            )
    if declared:
        raise UntypedError("other values", f"{declared}s", fits=tests[declared])
    _check_text(values, len(texts) - texts.null_count, counts, tests, decimal)
    names = tuple(sorted(values))
    return Typed(_coded(texts, names)[0], "category", names, trimmed)


def _check_text(
    values: list[str],
    n_values: int,
    counts: dict[str, int],
    tests: dict[str, Callable[[str], bool]],
    decimal: str,
) -> None:
    """Hold that distinct values are the names of categories."""
    other, marks, way = (",", "commas", "") if decimal == "." else (".", "points", POINTS_WAY)
    if "number" in tests and all(
        tests["number"](value) or is_number(value, other) for value in values
    ):
        raise UntypedError(f"decimal {marks}", "numbers", way, fits=tests["number"])
    if values and all(OTHER_DATE.fullmatch(value) or is_date(value) for value in values):
        raise UntypedError("dates that are not ISO", "dates", DATES_WAY, is_date)
    for kind in ("number", "date"):
        if 0 < counts.get(kind, 0) < len(values):
            raise UntypedError(f"{kind}s and other text", f"{kind}s", fits=tests[kind])
    if is_nearly_distinct(len(values), n_values):
        raise UntypedError(f"{len(values):,} different texts in {n_values:,} rows")


def is_nearly_distinct(n_names: int, n_values: int) -> bool:
    """Whether text has too many different values for names of categories or classes."""
    share = n_names / max(n_values, 1)
    many = n_names > MANY_NAMES and share > LARGEST_SHARE
    return many or (n_values > FEW_ROWS and share > LARGEST_SHARE_OF_FEW)


def is_date(value: str) -> bool:
    """Whether a text is an ISO date, with or without a time, that the calendar has."""
    if not DATE.fullmatch(value):
        return False
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


def _converted(texts: Any, kind: str, decimal: str) -> Any:
    """Text of one type as numbers."""
    if kind == "boolean":
        lower = pc.utf8_lower(texts)
        found = pc.index_in(lower, value_set=pa.array(list(BOOLEANS)))
        return pc.take(pa.array(list(BOOLEANS.values())), found)
    if kind == "date":
        values = pc.unique(texts).drop_null()
        days = pa.array([_day(value) for value in values.to_pylist()], pa.float64())
        return pc.take(days, pc.index_in(texts, value_set=values))
    if decimal != ".":
        texts = with_point(texts, decimal)
    return texts.cast(pa.float64())


def has_thousands_alone(values: list[str]) -> bool:
    """Whether numbers with decimal commas have points and no commas: 1.500 is read as 1500."""
    return any("." in value for value in values) and not any("," in value for value in values)


def with_point(texts: Any, decimal: str) -> Any:
    """Numbers as text with a decimal point, without marks of thousands."""
    return pc.replace_substring(pc.replace_substring(texts, ".", ""), decimal, ".")


def _day(value: str) -> float:
    """Days since 1970 of an ISO date; UTC where it names no zone."""
    time = datetime.fromisoformat(value)
    return (time.replace(tzinfo=time.tzinfo or UTC) - EPOCH) / timedelta(days=1)


def _days(column: Any, absent: Iterable[str]) -> Any:
    """Dates as days since 1970, times and durations in days; those that mean none are gone."""
    type = column.type
    none = [repr(_day(code)) for code in absent if is_date(code)]
    if pa.types.is_date(type):
        days = column.cast(pa.date32()).cast(pa.int32()) if pa.types.is_date64(type) else column
        return without(days.cast(pa.int32()).cast(pa.float64()), none, ".")
    unit = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[type.unit]
    whole = pa.int32() if pa.types.is_time32(type) else pa.int64()
    days = pc.divide(column.cast(whole).cast(pa.float64()), SECONDS * unit)
    return without(days, none, ".") if pa.types.is_timestamp(type) else days
