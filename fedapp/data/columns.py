"""Infer the type of a column: numbers, booleans, dates or categories.

A text column, stripped of blanks around values, gets the first type that fits all its values:
numbers; booleans (true and false, yes and no, y and n, in any case), converted to 1 and 0; ISO
dates, times of day or both, converted to days since 1970 (in UTC if they have a zone) with a
fraction; otherwise categories. A mix of types is refused, and so is text that is nearly all
distinct, unless a schema declares the type.
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

from fedapp.data.csv_errors import is_number
from fedapp.data.schema import MISSING, Declared
from fedapp.trees.categories import MOST_CATEGORIES, Categories, entries_of

BOOLEANS = {"true": 1, "yes": 1, "y": 1, "false": 0, "no": 0, "n": 0}
# How each kind is encoded as a number, for columns_json; a model stores the category names itself.
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
WHOLE = re.compile(r"[-+]?\d{1,20}", re.ASCII)  # 20 digits: the largest uint64
TEXTS = ("string", "large_string", "string_view")  # pyarrow's names of text types
SECONDS = 86_400.0  # per day
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Text is not categorical if it has more than MANY_NAMES distinct values, in more than half of the
# rows, ...
MANY_NAMES = 1000
LARGEST_SHARE = 0.5
# ... or if nearly all values are distinct in more than FEW_ROWS rows.
FEW_ROWS = 20
LARGEST_SHARE_OF_FEW = 0.9
# Hint for numbers such as 0.5 if decimal commas are declared.
POINTS_WAY = "write 0,5 for 0.5 and 1500 for 1.500, or set decimal=."


class UntypedError(Exception):
    """A column has no single type; becomes a DataError where the file is known.

    `found` describes the values without quoting any. If only some differ, `wanted` is "numbers",
    "dates" or "booleans", and `fits` tests one value. `way` is what to do about it.
    """

    def __init__(
        self, found: str, wanted: str = "", way: str = "", fits: Callable[[str], bool] | None = None
    ) -> None:
        super().__init__(found)
        self.found, self.wanted, self.way, self.fits = found, wanted, way, fits


@dataclass(frozen=True, slots=True, eq=False)
class ConvertedColumn:
    """A column as numbers."""

    column: Any  # pyarrow.ChunkedArray of numbers or category codes
    kind: str = "number"  # "number", "boolean", "date", "ordinal" or "category"
    names: tuple[str, ...] | None = None  # of the categories; None for other kinds
    trimmed: bool = False  # whether blanks around some value were removed
    n_outside: int = 0  # values that became missing because they are not declared
    # whether the file's type or a schema gives the kind, not the text of the values
    said: bool = False
    # whether the table, not a schema, marks values that are not text as categories
    marked: bool = False
    # Text values that became missing because they equal a number declared as missing, but are
    # written differently.
    n_equal: int = 0


def columns_json(columns: Sequence[str], kinds: Sequence[str], categories: Categories) -> str:
    """Describe how values were converted to a model's numbers, as JSON; raises ValueError."""
    n_columns, encodings = len(columns), {}
    if len(kinds) != n_columns or not {*kinds} <= {*ENCODINGS}:
        raise ValueError(f"kinds must be known ones, one a column of {n_columns}")
    for column, kind, names in zip(columns, kinds, entries_of(categories, n_columns), strict=True):
        kind = kind if names is None else "category"
        entry_names = {"names": list(names)} if names else {}
        encodings[column] = {"kind": kind, **ENCODINGS[kind], **entry_names}
    text = json.dumps({"missing": MISSING, "columns": encodings}, ensure_ascii=False, indent=1)
    return text + "\n"


def holds_numbers(type: Any) -> bool:
    """Whether an Arrow type is numeric, boolean, or null."""
    tests = ("is_integer", "is_floating", "is_boolean", "is_decimal", "is_null")
    return any(getattr(pa.types, test)(type) for test in tests)


def is_text(type: Any) -> bool:
    """Whether an Arrow type is text."""
    return any(getattr(pa.types, f"is_{kind}")(type) for kind in TEXTS)


def typed(
    column: Any,
    declared: Declared,
    missing: tuple[str, ...] = (),
    decimal: str = ".",
    is_written: bool = True,
) -> ConvertedColumn:
    """Convert a column, a pyarrow.ChunkedArray, to numbers or codes.

    Raises UntypedError if its values are of two types, not of the declared one, or free text.

    Parameters
    ----------
    missing : values that mean "missing", besides ``MISSING`` and the column's.
    decimal : of numbers in text.
    is_written : whether the file writes numbers as text, as CSV does; in other files, text that
        looks like numbers is a category.
    """
    is_dictionary = pa.types.is_dictionary(column.type)
    column = values_of(column)
    absent = (*missing, *declared.missing)
    marked = is_dictionary and not declared.type and not is_text(column.type)
    if pa.types.is_temporal(column.type) and declared.type in ("", "date") and not marked:
        return ConvertedColumn(_days(column, absent), "date")
    are_numbers = holds_numbers(column.type)
    if are_numbers and not is_dictionary and not goes_by_text(column.type, declared):
        numbers = null_missing_codes(column, absent, decimal)
        kind = "boolean" if pa.types.is_boolean(column.type) else "number"
        n_equal = numbers.null_count - column.null_count if is_written else 0
        return ConvertedColumn(numbers, kind, said=True, n_equal=n_equal)
    texts, trimmed = as_texts(column, declared, missing, decimal)
    if is_dictionary and not declared.type:
        declared = Declared(declared.name, type="category")
    if declared.type == "ordinal":
        codes, n_outside = _coded(texts, declared.categories)
        return ConvertedColumn(codes, "ordinal", trimmed=trimmed, n_outside=n_outside, said=True)
    if declared.type == "category":
        names = declared.categories or tuple(sorted(pc.unique(texts).drop_null().to_pylist()))
        codes, n_outside = _coded(texts, names)
        return ConvertedColumn(
            codes, "category", names, trimmed, n_outside, said=True, marked=marked
        )
    point = "." if are_numbers else decimal
    inferred = _infer(texts, declared.type, point, trimmed, is_written or are_numbers)
    if inferred.kind != "number":
        return inferred
    numbers = null_missing_codes(inferred.column, absent, decimal)
    return replace(
        inferred, column=numbers, n_equal=numbers.null_count - inferred.column.null_count
    )


def _needs_text(declared: Declared) -> bool:
    """Whether values are names or codes."""
    return declared.type in ("category", "ordinal", "date") or bool(declared.codes)


def is_read_as_text(declared: Declared) -> bool:
    """Whether to read a CSV file's column as text."""
    return _needs_text(declared) or declared.type == "boolean" or bool(declared.missing)


def goes_by_text(type: Any, declared: Declared) -> bool:
    """Whether to convert values of an Arrow type to text first."""
    if holds_numbers(type) and not pa.types.is_boolean(type):
        return _needs_text(declared)
    return is_read_as_text(declared)


def values_of(column: Any) -> Any:
    """Decode a dictionary column to its values."""
    if pa.types.is_dictionary(column.type):
        return column.cast(column.type.value_type)
    return column


def null_missing_codes(column: Any, absent: Iterable[str], decimal: str) -> Any:
    """Replace numbers that equal a missing-value code by null; other columns stay as they are.

    `absent` are codes as in a schema, with this `decimal`; those that are not numbers are ignored.
    """
    type = column.type
    if not (pa.types.is_integer(type) or pa.types.is_floating(type) or pa.types.is_decimal(type)):
        return column
    numbers = column.cast(pa.float64()) if pa.types.is_decimal(type) else column
    codes = []
    for code in absent:
        if code in MISSING or not is_number(code, decimal):
            continue
        text = code.strip().replace(decimal, ".")
        # Compared as integers: beyond 2**53 different ones are equal as floats.
        is_whole = WHOLE.fullmatch(text) and pa.types.is_integer(type)
        with suppress(pa.ArrowInvalid, OverflowError):  # out of range of this column's type
            codes.append(pa.scalar(int(text) if is_whole else float(text), numbers.type))
    if not codes:
        return column
    is_absent = pc.is_in(numbers, value_set=pa.array(codes, numbers.type))
    return pc.if_else(is_absent, pa.scalar(None, type), column)


def as_texts(
    column: Any, declared: Declared, missing: tuple[str, ...], decimal: str = "."
) -> tuple[Any, bool]:
    """Convert values to stripped text, and codes to names; also whether any value was stripped.

    `decimal` is that of the numbers among the missing-value codes. Raises UntypedError for binary
    or nested columns.
    """
    if pa.types.is_binary(column.type) or pa.types.is_nested(column.type):
        raise UntypedError("values that are no text")
    column = null_missing_codes(column, (*missing, *declared.missing), decimal)
    texts, trimmed = trimmed_texts(column)
    absent = pa.array([*MISSING, *missing, *declared.missing])
    texts = pc.if_else(pc.is_in(texts, value_set=absent), pa.scalar(None, pa.string()), texts)
    if declared.codes:
        indices = pc.index_in(texts, value_set=pa.array([code for code, _ in declared.codes]))
        named = pa.array([name for _, name in declared.codes]).take(indices.combine_chunks())
        texts = pa.chunked_array([pc.coalesce(named, texts.combine_chunks())])
    return texts, trimmed


def trimmed_texts(column: Any) -> tuple[Any, bool]:
    """Convert values to stripped text; also whether any value was stripped."""
    if pa.types.is_floating(column.type):
        # 1.0 in a Parquet file must give the same name as 1 in a CSV file.
        whole = column.cast(pa.int64(), safe=False)
        if pc.all(pc.equal(column, whole)).as_py() is not False:
            column = whole
    column = column.cast(pa.string())
    texts = pc.utf8_trim_whitespace(column)
    return texts, pc.any(pc.not_equal(texts, column)).as_py() is True


def _coded(texts: Any, names: tuple[str, ...]) -> tuple[Any, int]:
    """Index of each value among the names, and the number of values not among them."""
    if len(names) > MOST_CATEGORIES:
        raise UntypedError(f"{len(names):,} categories, more than {MOST_CATEGORIES:,}")
    codes = pc.index_in(texts, value_set=pa.array(names, pa.string()))
    return codes, int(codes.null_count - texts.null_count)


def _infer(
    texts: Any, declared: str, decimal: str, trimmed: bool, may_be_numbers: bool
) -> ConvertedColumn:
    """Convert text to the declared type, or to the first type that fits all values."""
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
            column = _converted(texts, kind, decimal)
            return ConvertedColumn(column, kind, None, trimmed, said=bool(declared))
    if declared:
        raise UntypedError("other values", f"{declared}s", fits=tests[declared])
    _check_text(values, len(texts) - texts.null_count, counts, tests, decimal)
    names = tuple(sorted(values))
    return ConvertedColumn(_coded(texts, names)[0], "category", names, trimmed)


def _check_text(
    values: list[str],
    n_values: int,
    counts: dict[str, int],
    tests: dict[str, Callable[[str], bool]],
    decimal: str,
) -> None:
    """Check that distinct values can be category names."""
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
    """Whether text has too many distinct values to be categories or classes."""
    share = n_names / max(n_values, 1)
    many = n_names > MANY_NAMES and share > LARGEST_SHARE
    return many or (n_values > FEW_ROWS and share > LARGEST_SHARE_OF_FEW)


def is_date(value: str) -> bool:
    """Whether a text is a valid ISO date, with or without a time."""
    if not DATE.fullmatch(value):
        return False
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


def _converted(texts: Any, kind: str, decimal: str) -> Any:
    """Convert text of one type to numbers."""
    if kind == "boolean":
        lower = pc.utf8_lower(texts)
        indices = pc.index_in(lower, value_set=pa.array(list(BOOLEANS)))
        return pc.take(pa.array(list(BOOLEANS.values())), indices)
    if kind == "date":
        values = pc.unique(texts).drop_null()
        days = pa.array([_day(value) for value in values.to_pylist()], pa.float64())
        return pc.take(days, pc.index_in(texts, value_set=values))
    return numbers_of(texts, decimal)


def numbers_of(texts: Any, decimal: str) -> Any:
    """Convert text that is all numbers to float64."""
    return pc.replace_substring(texts, decimal, ".").cast(pa.float64())


def _day(value: str) -> float:
    """Days since 1970 of an ISO date; UTC if it has no zone."""
    time = datetime.fromisoformat(value)
    return (time.replace(tzinfo=time.tzinfo or UTC) - EPOCH) / timedelta(days=1)


def _days(column: Any, absent: Iterable[str]) -> Any:
    """Convert dates to days since 1970, times and durations to days; apply missing values."""
    type = column.type
    missing = [repr(_day(code)) for code in absent if is_date(code)]
    if pa.types.is_date(type):
        days = column.cast(pa.date32()).cast(pa.int32()) if pa.types.is_date64(type) else column
        return null_missing_codes(days.cast(pa.int32()).cast(pa.float64()), missing, ".")
    unit = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[type.unit]
    whole = pa.int32() if pa.types.is_time32(type) else pa.int64()
    days = pc.divide(column.cast(whole).cast(pa.float64()), SECONDS * unit)
    return null_missing_codes(days, missing, ".") if pa.types.is_timestamp(type) else days
