"""Columns as numbers: ``Columns.fit`` infers what each holds, ``Columns.apply`` converts it.

A text column, stripped of blanks around values, gets the first type that fits all its values:
numbers; booleans (true and false, yes and no, y and n, in any case), converted to 1 and 0; ISO
dates, times of day or both, converted to days since 1970 (in UTC if they have a zone) with a
fraction; otherwise categories. A mix of types is refused, and so is text that is nearly all
distinct, unless a schema declares the type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fedapp.data.csv_errors import TextFile, is_number
from fedapp.data.schema import MISSING, PLAIN, Declared, Reader, first, listed
from fedapp.errors import DataError
from fedapp.trees.categories import (
    MOST_CATEGORIES,
    RARE,
    Categories,
    as_categories,
    entries_of,
    unlike,
)

Floats = npt.NDArray[np.float32]
Result = TypeVar("Result")

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
INFINITE_WAY = (
    'leave the field empty where a value is missing, list it in a schema as missing = ["inf"], '
    "divide values beyond 3.4e38, or exclude the column with drop-columns"
)
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


@dataclass(frozen=True, slots=True)
class Column:
    """What a column holds."""

    name: str  # in the run
    declared: Declared  # by a schema
    kind: str = ""  # one of `ENCODINGS`; empty if it is inferred from each table
    names: tuple[str, ...] | None = None  # of the categories, by code
    inferred: bool = False  # whether neither a schema nor the file's type gives the kind
    # whether the table, not a schema, marks values that are not text as categories
    marked: bool = False


class Converted(NamedTuple):
    """A column as numbers."""

    numbers: Any  # pyarrow.ChunkedArray of numbers or codes
    trimmed: bool = False  # whether blanks around some value were removed
    n_outside: int = 0  # values that became missing because they are not among the names
    # Text values that became missing because they equal a number declared as missing, but are
    # written differently.
    n_equal: int = 0


@dataclass(frozen=True, slots=True)
class Columns:
    """The features of a table, inferred once, and converted to numbers as often as asked."""

    columns: tuple[Column, ...]
    reader: Reader

    @classmethod
    def fit(
        cls, frame: Any, names: Sequence[str], reader: Reader = PLAIN, text: TextFile | None = None
    ) -> Columns:
        """Infer these columns of a pyarrow.Table, of which `text` is the file if it is CSV.

        Raises DataError if the values of a column are of two types, or free text.
        """

        def fitted(name: str) -> Column:
            return infer(name, frame[name], reader, bool(text))

        return cls(tuple(_each(names, fitted, frame, reader, text)), reader)

    @classmethod
    def of_model(cls, names: Sequence[str], categories: Categories, reader: Reader) -> Columns:
        """Columns of a model; a column of numbers may also hold booleans or dates."""
        declared = {one.rename or one.name: one for one in reader.declared}
        columns = []
        for name, codes in zip(names, entries_of(categories, len(names)), strict=True):
            one = declared.get(name, Declared(name))
            if codes is not None:
                one = declared[name] = replace(one, type=one.type or "category")
            is_coded = codes is not None and one.type == "category"
            columns.append(Column(name, one, "category" if is_coded else "", codes))
        every = tuple(declared.values())
        reader = replace(reader, n_features=len(columns), tolerant=True, declared=every)
        return cls(tuple(columns), reader)

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the run."""
        return tuple(one.name for one in self.columns)

    @property
    def categories(self) -> Categories:
        """Names of the categories of each column."""
        return as_categories(one.names for one in self.columns)

    def apply(self, frame: Any, text: TextFile | None = None) -> Floats:
        """The columns of a pyarrow.Table as float32, shape (n_rows, n_columns); NaN is missing."""
        return self.convert(frame, text)[0]

    def convert(self, frame: Any, text: TextFile | None = None) -> tuple[Floats, list[Converted]]:
        """Like `apply`, with what became of each column.

        Raises DataError if a value is not of its column's type, or infinite.
        """
        columns = {one.name: one for one in self.columns}

        def converted(name: str) -> Converted:
            return convert(columns[name], frame[name], self.reader, bool(text))

        every = _each(columns, converted, frame, self.reader, text)
        values = np.empty((frame.num_rows, len(every)), np.float32)
        for place, one in enumerate(every):
            fill(values[:, place], one.numbers)
        _check_finite(self.names, values, text)
        return values, every


def _each(
    names: Iterable[str],
    work: Callable[[str], Result],
    frame: Any,
    reader: Reader,
    text: TextFile | None,
) -> list[Result]:
    """Do the same with each column; raises one DataError for all that have no single type."""
    results, faults = list[Result](), dict[str, UntypedError]()
    for name in names:
        try:
            results.append(work(name))
        except UntypedError as error:
            faults[name] = error
    if faults:
        raise _untyped(frame, faults, reader, text)
    return results


def _untyped(
    frame: Any, faults: Mapping[str, UntypedError], reader: Reader, text: TextFile | None
) -> DataError:
    """Error for columns of no single type; the table's owner also gets values and lines."""
    bad_bytes = [name for name in faults if pa.types.is_binary(frame[name].type)]
    if bad_bytes and text and (here := text.not_utf8()):
        rule = "data file must be UTF-8, got other bytes in {}"
        return DataError.naming(rule, listed(bad_bytes), here=here)
    wanted = next((error.wanted for error in faults.values() if error.wanted), "")
    same_type = {name: error for name, error in faults.items() if error.wanted == wanted}
    if not wanted:
        return _free_text(frame, same_type)
    here, rule = "", "feature columns must be of one type each"
    if text is not None:
        tests = {
            reader.of_feature(name).name: _passes(error, reader.of_feature(name), reader)
            for name, error in same_type.items()
        }
        here = text.faults(rule, tests, wanted, next(iter(same_type.values())).way)
    rule += f", got {wanted} and other text in {{}}: see fedapp data describe"
    return DataError.naming(rule, listed(same_type), here=here)


def _passes(error: UntypedError, declared: Declared, reader: Reader) -> Callable[[str], bool]:
    """Test for one field: it is missing, or of the type expected of its column."""
    absent, codes = {*MISSING, *reader.missing, *declared.missing}, dict(declared.codes)
    fits = error.fits
    assert fits is not None
    return lambda value: value in absent or fits(codes.get(value, value))


def _free_text(frame: Any, columns: Mapping[str, UntypedError]) -> DataError:
    """Error for text with too many distinct values to be categories."""
    names = list(columns)
    more = f" and in {len(names) - 1} more" if len(names) > 1 else ""
    content = f"{columns[names[0]].found} in {{}}{more}"
    rule = f"feature columns of text must be categories, got {content}: exclude what is a name, an "
    rule += "id or free text with drop-columns={}, name it as the id, or let a schema say type = "
    rule += '"category"'
    if frame.num_columns == 1:
        rule += '; where blanks separate the fields, let it say separator = "blank"'
    return DataError.naming(rule, f"'{names[0]}'", first(names).replace(", ", ","))


def _check_finite(names: Sequence[str], values: Floats, text: TextFile | None) -> None:
    counts = (int(np.isinf(column).sum()) for column in values.T)
    bad = [f"{count} in '{name}'" for name, count in zip(names, counts, strict=True) if count]
    if bad:
        rule = "feature columns must be finite as float32, got {} infinite"
        line = text.first_line(np.isinf(values).any(axis=1)) if text else ""
        here = f"{rule.format(first(bad))}{line}: {INFINITE_WAY}"
        raise DataError.naming(rule, first(bad), here=here)


def fill(out: npt.NDArray[Any], column: Any) -> None:
    """Copy a column of numbers, chunk by chunk; missing becomes NaN."""
    # Types that Arrow cannot convert to a numpy array of numbers.
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    elif pa.types.is_decimal(column.type) or pa.types.is_null(column.type):
        column = column.cast(pa.float64())
    start = 0
    with np.errstate(over="ignore"):
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            out[start : start + len(chunk)] = chunk.to_numpy(zero_copy_only=False)
            start += len(chunk)


def columns_json(columns: Sequence[str], kinds: Sequence[str], categories: Categories) -> str:
    """Describe how values were converted to a model's numbers, as JSON; raises ValueError."""
    n_columns, encodings = len(columns), {}
    if len(kinds) != n_columns or not {*kinds} <= {*ENCODINGS}:
        raise ValueError(f"kinds must be known ones, one a column of {n_columns}")
    for column, kind, names in zip(columns, kinds, entries_of(categories, n_columns), strict=True):
        kind = kind if names is None else "category"
        entry_names = {"names": list(names)} if names else {}
        others = {"others": RARE} if names and RARE in names else {}
        encodings[column] = {"kind": kind, **ENCODINGS[kind], **entry_names, **others}
    text = json.dumps({"missing": MISSING, "columns": encodings}, ensure_ascii=False, indent=1)
    return text + "\n"


def holds_numbers(type: Any) -> bool:
    """Whether an Arrow type is numeric, boolean, or null."""
    tests = ("is_integer", "is_floating", "is_boolean", "is_decimal", "is_null")
    return any(getattr(pa.types, test)(type) for test in tests)


def is_text(type: Any) -> bool:
    """Whether an Arrow type is text."""
    return any(getattr(pa.types, f"is_{kind}")(type) for kind in TEXTS)


def infer(name: str, column: Any, reader: Reader = PLAIN, is_written: bool = True) -> Column:
    """What a pyarrow.ChunkedArray holds, by its schema, its type or else its values.

    In files other than CSV, text that looks like numbers is a category. Raises UntypedError for
    values of two types, or free text.
    """
    declared, is_dictionary = reader.of_feature(name), pa.types.is_dictionary(column.type)
    column = values_of(column)
    type, kind, names = column.type, declared.type, declared.categories
    is_temporal = pa.types.is_temporal(type) and kind in ("", "date")
    marked, inferred = is_dictionary and not kind and not is_text(type), False
    if is_dictionary and not kind:
        kind = "category"
    elif is_temporal:
        kind, inferred = "date", True
    elif holds_numbers(type) and not goes_by_text(type, declared):
        return Column(name, declared, "boolean" if pa.types.is_boolean(type) else "number")
    if kind not in ("", "category") or (kind and names):
        return Column(name, declared, kind, names if kind == "category" else None, inferred)
    texts, _ = as_texts(column, declared, reader.missing, reader.decimal)
    values = pc.unique(texts).drop_null().to_pylist()
    if not kind:
        kind, inferred = _kind_of(values, texts, type, reader.decimal, is_written), True
    names = tuple(sorted(values))
    return Column(name, declared, kind, names if kind == "category" else None, inferred, marked)


def _tests(type: Any, decimal: str) -> dict[str, Callable[[str], bool]]:
    """By kind, whether a text is one; `type` is that of the column before it became text."""
    point = "." if holds_numbers(type) else decimal
    return {
        "number": lambda value: is_number(value, point),
        "boolean": lambda value: value.lower() in BOOLEANS,
        "date": is_date,
    }


def _kind_of(values: list[str], texts: Any, type: Any, decimal: str, is_written: bool) -> str:
    """The first kind that fits all distinct values; raises UntypedError if they are no names."""
    tests = _tests(type, decimal)
    if not is_written and not holds_numbers(type):
        del tests["number"]
    counts = {kind: sum(map(fits, values)) for kind, fits in tests.items()}
    for kind, count in counts.items():
        if count == len(values):
            return kind
    is_one = tests.get("number")
    other, marks, way = (",", "commas", "") if decimal == "." else (".", "points", POINTS_WAY)
    if is_one and all(is_one(value) or is_number(value, other) for value in values):
        raise UntypedError(f"decimal {marks}", "numbers", way, fits=is_one)
    if all(OTHER_DATE.fullmatch(value) or is_date(value) for value in values):
        raise UntypedError("dates that are not ISO", "dates", DATES_WAY, is_date)
    for kind in ("number", "date"):
        if counts.get(kind):
            raise UntypedError(f"{kind}s and other text", f"{kind}s", fits=tests[kind])
    n_values = len(texts) - texts.null_count
    if is_nearly_distinct(len(values), n_values):
        raise UntypedError(f"{len(values):,} different texts in {n_values:,} rows")
    return "category"


def convert(one: Column, column: Any, reader: Reader, is_written: bool = False) -> Converted:
    """Numbers of a column; raises UntypedError if values are not of its kind."""
    declared, due = one.declared, one
    is_coded = one.names is not None or reader.missing or declared.missing or declared.codes
    are_numbers = pa.types.is_floating(column.type) or pa.types.is_integer(column.type)
    if are_numbers and not is_coded and {one.kind, declared.type} <= {"", "number"}:
        return Converted(column)  # as most columns are
    if not one.kind:
        one = infer(one.name, column, reader, is_written)
    column = values_of(column)
    absent = (*reader.missing, *declared.missing)
    if one.kind == "date" and pa.types.is_temporal(column.type):
        converted = Converted(_days(column, absent))
    elif (
        one.kind in ("number", "boolean")
        and holds_numbers(column.type)
        and not goes_by_text(column.type, declared)
    ):
        numbers = null_missing_codes(column, absent, reader.decimal)
        n_equal = numbers.null_count - column.null_count if is_written else 0
        converted = Converted(numbers, n_equal=n_equal)
    else:
        texts, trimmed = as_texts(column, declared, reader.missing, reader.decimal)
        converted = _of_text(one, texts, column.type, reader)._replace(trimmed=trimmed)
    if (one.names is None) != (due.names is None) and not pc.all(
        pc.is_null(converted.numbers, nan_is_null=True)
    ).as_py():
        raise unlike(one.name, due.names is not None)
    return converted


def _of_text(one: Column, texts: Any, type: Any, reader: Reader) -> Converted:
    """Numbers of a column of text; `type` is what it was before."""
    declared = one.declared
    if one.kind in ("category", "ordinal"):
        if one.kind == "category" and declared.categories not in ((), one.names):
            # Of a model's names, those that the table's schema does not list are missing.
            is_listed = pc.is_in(texts, value_set=pa.array(declared.categories))
            texts = pc.if_else(is_listed, texts, pa.scalar(None, pa.string()))
        names = declared.categories if one.names is None else one.names
        if len(names) > MOST_CATEGORIES:
            raise UntypedError(f"{len(names):,} categories, more than {MOST_CATEGORIES:,}")
        numbers = pc.index_in(texts, value_set=pa.array(names, pa.string()))
        if one.kind == "category" and RARE in names:
            others = pc.and_(pc.is_null(numbers), pc.is_valid(texts))
            numbers = pc.if_else(others, pa.scalar(names.index(RARE), pa.int32()), numbers)
        return Converted(numbers, n_outside=int(numbers.null_count - texts.null_count))
    try:
        numbers = _parsed(texts, one.kind, "." if holds_numbers(type) else reader.decimal)
    except pa.ArrowInvalid:
        fits = _tests(type, reader.decimal)[one.kind]
        raise UntypedError("other values", f"{one.kind}s", fits=fits) from None
    if one.kind != "number":
        return Converted(numbers)
    absent = (*reader.missing, *declared.missing)
    present = null_missing_codes(numbers, absent, reader.decimal)
    return Converted(present, n_equal=present.null_count - numbers.null_count)


def _parsed(texts: Any, kind: str, decimal: str) -> Any:
    """Text of one kind as numbers; raises pyarrow.ArrowInvalid if a value is of another."""
    if kind == "number":
        return numbers_of(texts, decimal)
    if kind == "boolean":
        numbers: Mapping[str, float] = BOOLEANS
        texts = pc.utf8_lower(texts)
    else:
        dates = filter(is_date, pc.unique(texts).drop_null().to_pylist())
        numbers = {date: _day(date) for date in dates}
    places = pc.index_in(texts, value_set=pa.array([*numbers], pa.string()))
    if places.null_count > texts.null_count:
        raise pa.ArrowInvalid(kind)
    return pc.take(pa.array([*numbers.values()], pa.float64()), places)


def numbers_of(texts: Any, decimal: str) -> Any:
    """Text as float64; raises pyarrow.ArrowInvalid if a value is no number."""
    if decimal != ".":  # a point must not pass as a decimal comma
        texts = pc.replace_substring(pc.replace_substring(texts, ".", "?"), decimal, ".")
    return texts.cast(pa.float64())


def is_read_as_text(declared: Declared) -> bool:
    """Whether to read a CSV file's column as text."""
    kinds = ("category", "ordinal", "date", "boolean")
    return declared.type in kinds or bool(declared.codes or declared.missing)


def goes_by_text(type: Any, declared: Declared) -> bool:
    """Whether to convert values of an Arrow type to text first."""
    if holds_numbers(type) and not pa.types.is_boolean(type):
        return declared.type in ("category", "ordinal", "date") or bool(declared.codes)
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
