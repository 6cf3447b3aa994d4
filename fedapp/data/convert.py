"""Columns of text, numbers, dates and categories as float32, by their kinds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fedapp.data.csv_errors import THOUSANDS_WAY, WITH_THOUSANDS, is_finite, is_number, way_of_marks
from fedapp.data.schema import MISSING, WHOLE_DECIMAL, Declared, Reader
from fedapp.data.scratch import batches
from fedapp.errors import DataError
from fedapp.trees.categories import MOST_CATEGORIES, RARE

BOOLEANS = {"true": 1, "yes": 1, "y": 1, "false": 0, "no": 0, "n": 0}
BITS_OF_WORDS = {"true": 1, "false": 0}  # of labels, where numbers are needed
BITS = {"1": 1, "0": 0}  # also booleans, where a schema says so
# How each kind is called in an error, and encoded as a number, for columns_json. A model stores the
# names of categories itself; an ordinal's kind ends in a digest of its names, as in ordinal:1f09.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "number": ("numbers", {}),
    "binary": ("numbers that are all 0 or 1", {}),
    "boolean": ("yes or no", {"values": BOOLEANS}),
    "date": ("dates", {"unit": "days since 1970-01-01"}),
    "time": ("times of day", {"unit": "days"}),
    "duration": ("durations", {"unit": "days"}),
    "ordinal": ("names in the order of a schema", {}),
    "category": ("names of categories", {}),
}
EXACT_WAY = "store them as whole numbers or text"
TYPE_WAY = "write them as numbers, dates or text, or exclude the column with drop-columns"
# Extension types whose values are of another type; values of others have a meaning of their own.
READ_AS = {b"arrow.json": pa.string(), b"arrow.bool8": pa.bool_()}
EXTENSION = b"ARROW:extension:name"  # of a field whose extension type is not registered
ONE_WAY = "write it in one way, or map it by codes of the column in a schema"
DATE = re.compile(
    r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?(?P<zone>Z|[-+]\d{2}(:?\d{2})?)?)?",
    re.ASCII,
)
TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d{1,9})?)?", re.ASCII)
DATES_WAY = "write them as 2024-12-31, or exclude the columns with drop-columns"
OTHER_DATE = re.compile(r"\d{1,2}([./-])\d{1,2}\1(\d{4}|\d{2})", re.ASCII)
WHOLE = re.compile(r"[-+]?\d{1,20}", re.ASCII)  # 20 digits: the largest uint64
TEXTS = ("string", "large_string", "string_view")  # pyarrow's names of text types
SECONDS = 86_400  # per day
UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # per second
DAYS = ("date", "time", "duration")
COUNTED = "counted"  # kind of a column of which only the number of values counts
AS_STORED = ("number", "boolean", "label", COUNTED)  # kinds that numbers of a file have already
BY_TEXT = ("category", "ordinal", "date", "boolean")  # declared kinds whose values are texts first
INEXACT = 2**53  # from here on a float64 stands for several whole numbers
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
INFINITE_WAY = (
    'leave the field empty where a value is missing, list it in a schema as missing = ["inf"], '
    "divide values beyond 3.4e38, or exclude the column with drop-columns"
)
# Text is not categorical if it has more than MANY_NAMES distinct values, in more than half of the
# rows, ...
MANY_NAMES = 1000
LARGEST_SHARE = 0.5
# ... or if nearly all values are distinct in more than FEW_ROWS rows.
FEW_ROWS = 20
LARGEST_SHARE_OF_FEW = 0.9


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
    # one of `KINDS`, or of a role: name, label; empty if it is inferred from each table
    kind: str = ""
    names: tuple[str, ...] | None = None  # of the categories, by code
    inferred: bool = False  # whether neither a schema nor the file's type gives the kind
    # whether the table, not a schema, marks values that are not text as categories
    marked: bool = False


class Converted(NamedTuple):
    """A column as it was read."""

    # pyarrow.ChunkedArray of numbers or codes; of a name's or label's kind also texts; of a feature
    # that is not in memory, what reads them
    numbers: Any
    column: Column  # with its kind
    trimmed: bool = False  # whether blanks around some value were removed
    # word of ``MISSING`` -> number of names that became missing because they equal it
    words: Mapping[str, int] = {}
    n_outside: int = 0  # values that became missing because they are not among the names
    # Text values that became missing because they equal a number declared as missing, but are
    # written differently.
    n_equal: int = 0
    mixes_zones: bool = False  # whether some dates or times have a zone and others have none


def holds_numbers(type: Any) -> bool:
    """Whether an Arrow type is numeric, boolean, or null."""
    tests = ("is_integer", "is_floating", "is_boolean", "is_decimal", "is_null")
    return any(getattr(pa.types, test)(type) for test in tests)


def is_text(type: Any) -> bool:
    """Whether an Arrow type is text."""
    return any(getattr(pa.types, f"is_{kind}")(type) for kind in TEXTS)


def decoded(table: Any) -> Any:
    """A pyarrow.Table with columns of types that Parquet has and that Arrow computes with.

    It has no run ends, views of text or bytes, decimals of a negative scale, or half floats.
    """
    columns = [_decoded(column) for column in table.columns]
    fields = zip(table.schema, columns, strict=True)
    schema = pa.schema([field.with_type(column.type) for field, column in fields])
    return pa.Table.from_arrays(columns, schema=schema)


def _decoded(column: Any) -> Any:
    type = column.type
    if pa.types.is_run_end_encoded(type):
        chunks = [pc.run_end_decode(chunk) for chunk in column.chunks]
        return _decoded(pa.chunked_array(chunks, type.value_type))
    if pa.types.is_dictionary(type) and pa.types.is_string_view(type.value_type):
        return column.cast(pa.dictionary(pa.int32(), pa.string()))
    if pa.types.is_string_view(type) or pa.types.is_binary_view(type):
        return column.cast(pa.large_string() if is_text(type) else pa.large_binary())
    if pa.types.is_decimal(type) and type.scale < 0 and type.precision - type.scale <= 76:
        return column.cast(pa.decimal256(76, 0))
    return column.cast(pa.float32()) if pa.types.is_float16(type) else column


def _readable(column: Any, field: Any) -> Any:
    """A column as numbers, text, times, or a dictionary of these; raises UntypedError if none."""
    type, about = column.type, field.metadata or {}
    if isinstance(type, pa.BaseExtensionType):
        about = {EXTENSION: type.extension_name.encode()}
        column = column.cast(type.storage_type)
    if extension := about.get(EXTENSION):
        if extension not in READ_AS:
            got = "values of an extension type, such as periods or intervals"
            raise UntypedError(got, way=TYPE_WAY)
        column = column.cast(READ_AS[extension])
    type = column.type
    type = type.value_type if pa.types.is_dictionary(type) else type
    is_time = pa.types.is_temporal(type) and not pa.types.is_interval(type)
    if not (holds_numbers(type) or is_text(type) or is_time):
        raise UntypedError("bytes, lists or other values that are no text", way=TYPE_WAY)
    return column


def convert(
    column: Column, frame: Any, index: int, reader: Reader, is_written: bool = False
) -> Converted:
    """Read a table's column, whose kind its schema says, its type or else its values.

    In files other than CSV, text that looks like numbers is a category. Raises UntypedError for
    values that are not of the column's kind, of two types, or free text.
    """
    try:
        values = _readable(frame.column(index), frame.schema.field(index))
        return _converted(column, values, reader, is_written)
    except pa.ArrowException:  # its text may quote a value
        raise UntypedError("values that Arrow cannot convert", way=TYPE_WAY) from None


def _converted(column: Column, values: Any, reader: Reader, is_written: bool) -> Converted:
    declared, column = column.declared, column if column.kind else _of_type(column, values.type)
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    type, absent = values.type, (*reader.missing, *declared.missing)
    if column.kind in DAYS and pa.types.is_temporal(type):
        days, is_span = _days(values), pa.types.is_time(type) or pa.types.is_duration(type)
        missing = () if is_span else map(repr, _days_by_date(absent).values())
        return Converted(null_missing_codes(days, missing, "."), column)
    by_text = column.kind != COUNTED and goes_by_text(type, declared)
    is_label = column.kind == "label"
    by_text |= is_label and pa.types.is_boolean(type) and not declared.aggregates_numbers
    by_text |= is_label and pa.types.is_integer(type) and _is_beyond(values)
    if column.kind in AS_STORED and holds_numbers(type) and not by_text:
        numbers = null_missing_codes(values, absent, reader.decimal)
        n_equal = numbers.null_count - values.null_count if is_written else 0
        return Converted(numbers, column, n_equal=n_equal)
    texts, trimmed, words = as_texts(values, declared, reader, is_written, column.names or ())
    decimal = "." if holds_numbers(type) else reader.decimal
    if not column.kind:
        kind = _kind_of(texts, type, decimal, is_written)
        column = replace(column, kind=kind, inferred=True)
    if column.kind == "category" and column.names is None:
        names = pc.unique(as_names(texts)).drop_null().to_pylist()
        column = replace(column, names=tuple(sorted(names)))
    if column.kind == "label":
        converted = _of_label(column, texts, reader, decimal, is_written)
    elif column.kind in ("category", "ordinal"):
        converted = _of_category(column, texts)
    elif column.kind in ("name", COUNTED):
        converted = Converted(as_names(texts) if column.kind == "name" else texts, column)
    else:
        converted = _of_numbers(column, texts, reader, decimal)
    return converted._replace(trimmed=trimmed, words=words)


def as_counted(column: Column) -> Column:
    """A column as it is read before rows that share an id become one: a count is of any values."""
    return replace(column, kind=COUNTED) if column.declared.aggregate == "count" else column


def _of_type(column: Column, type: Any) -> Column:
    """A column with its kind by its schema or its type in the file; empty if its values say it."""
    declared = column.declared
    if pa.types.is_dictionary(type):
        if not declared.type:
            marked = not is_text(type.value_type)
            return replace(
                column, kind="category", names=declared.categories or None, marked=marked
            )
        type = type.value_type
    if pa.types.is_temporal(type) and declared.type in ("", "date"):
        is_span = pa.types.is_duration(type), pa.types.is_time(type)
        kind = "duration" if is_span[0] else "time" if is_span[1] else "date"
        return replace(column, kind=kind, names=None, inferred=True)
    kind, names = declared.type, None
    if kind == "category":
        names = declared.categories or None
    elif not kind and holds_numbers(type) and not goes_by_text(type, declared):
        kind = "boolean" if pa.types.is_boolean(type) else "number"
    return replace(column, kind=kind, names=names)


def _of_label(
    column: Column, texts: Any, reader: Reader, decimal: str, is_written: bool
) -> Converted:
    """Labels as numbers where that changes no name of a class, otherwise as texts."""
    if column.declared.type == "category":
        return Converted(as_names(texts), column)
    if decimal != ".":
        values = _distinct(texts)
        others = [value for value in values if not is_number(value, decimal)]
        if others and all(map(is_number, others)) and not all(value[-1] == "." for value in values):
            fits = _tests(decimal)["number"]
            raise UntypedError("decimal points", "numbers", way_of_marks(others, decimal), fits)
        if not others:
            if column.declared.type != "number":
                check_thousands(column.name, values)
            texts = pc.replace_substring(texts, decimal, ".")
    names = texts
    with suppress(UntypedError):  # a measure may write a number in two ways, classes may not
        names = as_names(texts)
    with suppress(pa.ArrowInvalid):
        numbers = names.cast(pa.float64())
        distinct = _distinct(names)
        if len(distinct) <= MANY_NAMES:
            are_kept = (number_name(float(name)) == name for name in distinct)
            is_typed_name = not is_written and not all(map(is_finite, distinct))
            numbers = names if is_typed_name or not all(are_kept) else numbers
        absent = (*reader.missing, *column.declared.missing)
        return Converted(null_missing_codes(numbers, absent, "."), column)
    values = _distinct(pc.utf8_lower(names))
    if column.declared.aggregates_numbers and {*values} <= BITS_OF_WORDS.keys():
        names = names.cast(pa.bool_()).cast(pa.float64())
    return Converted(names, column)


def _of_category(column: Column, texts: Any) -> Converted:
    """Codes of names, or their places in an order."""
    declared, texts = column.declared, _as_whole(texts)
    if column.kind == "category" and declared.categories not in ((), column.names):
        # Of a model's names, those that the table's schema does not list are missing.
        is_listed = pc.is_in(texts, value_set=pa.array(declared.categories))
        texts = pc.if_else(is_listed, texts, pa.scalar(None, pa.string()))
    names = declared.categories if column.names is None else column.names
    if len(names) > MOST_CATEGORIES:
        raise UntypedError(f"{len(names):,} categories, more than {MOST_CATEGORIES:,}")
    numbers = pc.index_in(texts, value_set=pa.array(names, pa.string()))
    if column.kind == "category" and RARE in names:
        others = pc.and_(pc.is_null(numbers), pc.is_valid(texts))
        numbers = pc.if_else(others, pa.scalar(names.index(RARE), pa.int32()), numbers)
    return Converted(numbers, column, n_outside=int(numbers.null_count - texts.null_count))


def _of_numbers(column: Column, texts: Any, reader: Reader, decimal: str) -> Converted:
    try:
        numbers = _parsed(texts, column.kind, decimal)
    except pa.ArrowInvalid:
        fits = _tests(decimal)[column.kind]
        raise UntypedError("other values", f"{column.kind}s", fits=fits) from None
    if column.kind != "number":
        dates = map(DATE.fullmatch, _distinct(texts) if column.kind == "date" else ())
        zones = {match["zone"] is None for match in dates if match}
        return Converted(numbers, column, mixes_zones=len(zones) == 2)
    absent = (*reader.missing, *column.declared.missing)
    present = null_missing_codes(numbers, absent, reader.decimal)
    return Converted(present, column, n_equal=present.null_count - numbers.null_count)


def _parsed(texts: Any, kind: str, decimal: str) -> Any:
    """Text of one kind as numbers; raises pyarrow.ArrowInvalid if a value is of another."""
    if kind == "number":
        if decimal != ".":  # a point must not pass as a decimal comma
            texts = pc.replace_substring(pc.replace_substring(texts, ".", "?"), decimal, ".")
        return texts.cast(pa.float64())
    if kind == "time":
        times = pc.binary_join_element_wise("1970-01-01", texts, " ")
        return _days(times.cast(pa.timestamp("ns")))
    if kind == "boolean":
        numbers: Mapping[str, float] = BOOLEANS | BITS
        texts = pc.utf8_lower(_as_whole(texts))
    else:
        numbers = _days_by_date(_distinct(texts))
    indices = pc.index_in(texts, value_set=pa.array([*numbers], pa.string()))
    if indices.null_count > texts.null_count:
        raise pa.ArrowInvalid(kind)
    return pc.take(pa.array([*numbers.values()], pa.float64()), indices)


def check_thousands(name: str, values: Iterable[str]) -> None:
    """Check decimal commas, which look like marks of thousands if three digits follow each."""
    marked = [value for value in values if "," in value]
    if marked and all(map(WITH_THOUSANDS.fullmatch, marked)):
        rule = "column {} must have decimal commas (decimal=,), got three digits after every comma"
        way = f": {THOUSANDS_WAY}; where they are decimals, let a schema say type = "
        raise DataError.naming(f'{rule}{way}"number"', f"'{name}'")


def is_read_as_text(declared: Declared) -> bool:
    """Whether to read a CSV file's column as text."""
    return declared.type in BY_TEXT or bool(declared.codes or declared.missing)


def goes_by_text(type: Any, declared: Declared) -> bool:
    """Whether to convert values of an Arrow type to text first."""
    if holds_numbers(type) and not pa.types.is_boolean(type):
        return declared.type in BY_TEXT or bool(declared.codes)
    return is_read_as_text(declared)


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
    column: Any, declared: Declared, reader: Reader, is_written: bool, known: Sequence[str]
) -> tuple[Any, bool, dict[str, int]]:
    """Values as normalised text (see the module), and codes as the names that they stand for.

    Also whether some were trimmed, and the words that are missing values; see ``Converted``. Words
    such as NA are missing in files that are written (CSV) only, and not where the schema has them
    as categories or codes, or where a model has them as names (`known`). Raises UntypedError for
    durations, and for floats that are not exact.
    """
    column = null_missing_codes(column, (*reader.missing, *declared.missing), reader.decimal)
    if pa.types.is_floating(column.type):
        # 1.0 in a Parquet file must give the same name as 1 in a CSV file.
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
        if _is_beyond(column):
            raise UntypedError("floats beyond 2^53, which are not exact", way=EXACT_WAY)
        whole = column.cast(pa.int64(), safe=False)
        if pc.all(pc.equal(column, whole)).as_py() is not False:
            column = whole
    names = {*known, *declared.categories, *(code for code, _ in declared.codes)}
    if pa.types.is_temporal(column.type):
        column = _times_as_texts(column)
    elif pa.types.is_boolean(column.type) and names.isdisjoint(BITS_OF_WORDS):
        column = pc.if_else(column, "True", "False")  # as Python and pandas write them
    column = column.cast(pa.string())
    texts = pc.utf8_trim_whitespace(column)
    trimmed = pc.any(pc.not_equal(texts, column)).as_py() is True
    if pc.all(pc.string_is_ascii(texts)).as_py() is False:
        texts = pc.utf8_normalize(texts, "NFC")
    listed = {"", *reader.missing} - names | {*declared.missing}
    words = [word for word in MISSING if is_written and word not in names | listed]
    is_listed = bool(declared.codes or declared.missing or reader.missing)
    plain = _as_whole(texts) if is_listed else texts  # as a schema's codes and missing values are
    absent = pc.is_in(plain, value_set=pa.array([*words, *listed], pa.string()))
    counts: dict[str, int] = {}
    if pc.any(absent).as_py():
        pairs = pc.value_counts(texts.filter(absent)).to_pylist()
        counts = {pair["values"]: pair["counts"] for pair in pairs}
        texts = pc.if_else(absent, pa.scalar(None, pa.string()), texts)
    if declared.codes:
        indices = pc.index_in(plain, value_set=pa.array([code for code, _ in declared.codes]))
        named = pa.array([name for _, name in declared.codes]).take(indices.combine_chunks())
        texts = pa.chunked_array([pc.coalesce(named, texts.combine_chunks())])
    return texts, trimmed, {word: counts[word] for word in words if word in counts}


def as_names(texts: Any) -> Any:
    """Texts as names: 1 for 1.0; raises UntypedError if that makes two names one."""
    names = _as_whole(texts)
    if names is not texts and len(pc.unique(names)) < len(pc.unique(texts)):
        raise UntypedError("one number written as 1 and as 1.0", way=ONE_WAY)
    return names


def _as_whole(texts: Any) -> Any:
    """Texts with 1 for 1.0, as ``plain_text``."""
    if not pc.any(pc.match_substring(texts, ".0")).as_py():
        return texts
    return pc.replace_substring_regex(texts, f"^{WHOLE_DECIMAL.pattern}$", r"\1")


def _is_beyond(column: Any) -> bool:
    """Whether a float64 may stand for several whole numbers of a column."""
    ends = pc.min_max(column)
    low, high = ends["min"].as_py() or 0, ends["max"].as_py() or 0
    return bool(max(-low, high) >= INEXACT)


def number_name(value: float) -> str:
    """The name of a class that is a number; 1.0 and 1 are the same class."""
    return str(int(value)) if value.is_integer() else repr(value)


def is_date(value: str) -> bool:
    """Whether a text is a valid ISO date, with or without a time."""
    if not DATE.fullmatch(value):
        return False
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


def _distinct(texts: Any) -> list[str]:
    """The distinct texts of a column."""
    values: list[str] = pc.unique(texts).drop_null().to_pylist()
    return values


def _days_by_date(texts: Iterable[str]) -> dict[str, float]:
    """Days since 1970 of those texts that are ISO dates; UTC if they have no zone."""
    times = {text: datetime.fromisoformat(text) for text in texts if is_date(text)}
    zoned = (time.replace(tzinfo=time.tzinfo or UTC) for time in times.values())
    counts = pa.array([(time - EPOCH) // MICROSECOND for time in zoned], pa.int64())
    days = _days(counts.cast(pa.timestamp("us")))
    return dict(zip(times, days.to_pylist(), strict=True))


def day_number(value: str) -> float:
    """Days since 1970 of an ISO date; UTC if it has no zone."""
    return _days_by_date([value])[value]


def as_dates(days: npt.NDArray[np.float64]) -> npt.NDArray[np.datetime64]:
    """Days since 1970 as dates with microseconds."""
    return np.rint(days * SECONDS * 1e6).astype("M8[us]")


def _days(column: Any) -> Any:
    """Convert dates to days since 1970, times and durations to days.

    Whole days and the rest are divided on their own, so that all units give the same number.
    """
    type = column.type
    if pa.types.is_date(type):
        return column.cast(pa.date32(), safe=False).cast(pa.int32()).cast(pa.float64())
    counts = column.cast(pa.int32() if pa.types.is_time32(type) else pa.int64()).cast(pa.int64())
    a_day = SECONDS * UNITS[type.unit]
    whole = pc.divide(counts, a_day)
    rest = pc.subtract(counts, pc.multiply(whole, a_day)).cast(pa.float64())
    return pc.add(whole.cast(pa.float64()), pc.divide(rest, float(a_day)))


def _times_as_texts(column: Any) -> Any:
    """Texts of dates and times in UTC; a column has the same texts in every unit."""
    type = column.type
    if pa.types.is_duration(type):
        raise UntypedError("durations", way="write them as numbers or text")
    if pa.types.is_date(type):
        return column.cast(pa.date32(), safe=False).cast(pa.string())
    units = [pa.timestamp(unit) for unit in UNITS]
    if pa.types.is_time(type):
        units = [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")]
    for unit in units:
        with suppress(pa.ArrowInvalid):  # a finer unit is needed
            texts = column.cast(unit).cast(pa.string())
            break
    if pc.any(pc.starts_with(texts, "<")).as_py():  # what Arrow writes for years beyond 9999
        raise UntypedError("dates beyond the year 9999", way=TYPE_WAY)
    midnight = " 00:00:00"
    is_midnight = pc.all(pc.ends_with(texts, midnight)).as_py()
    return pc.replace_substring(texts, midnight, "") if is_midnight else texts


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


def as_numbers(column: Any) -> npt.NDArray[np.float64]:
    """A column of numbers as float64; missing is NaN."""
    column = column() if callable(column) else column
    numbers = np.empty(len(column), np.float64)
    fill(numbers, column)
    return numbers


def as_text_array(column: Any) -> npt.NDArray[np.str_]:
    """A column of texts as a numpy array, by slices, as Python's objects are large."""
    texts = np.empty(len(column), f"U{pc.max(pc.utf8_length(column)).as_py() or 1}")
    for rows in batches(len(texts), texts.itemsize):
        texts[rows] = column.slice(rows.start, rows.stop - rows.start).to_numpy()
    return texts


def _tests(decimal: str) -> dict[str, Callable[[str], bool]]:
    """By kind, whether a text is one."""
    return {
        "number": lambda value: value not in MISSING and is_number(value, decimal),
        "boolean": lambda value: value.lower() in BOOLEANS,
        "date": is_date,
        "time": lambda value: TIME.fullmatch(value) is not None,
    }


def _kind_of(texts: Any, type: Any, decimal: str, is_written: bool) -> str:
    """The first kind that fits all distinct texts; raises UntypedError if they are no names."""
    values, tests = _distinct(texts), _tests(decimal)
    if not is_written and not holds_numbers(type):
        del tests["number"]
    counts = {kind: sum(map(fits, values)) for kind, fits in tests.items()}
    for kind, count in counts.items():
        if count == len(values):
            return kind
    fits_number = tests.get("number")
    other = "," if decimal == "." else "."
    others = [value for value in values if not (fits_number and fits_number(value))]
    if fits_number and all(is_number(value, other) for value in others):
        marks = "commas" if other == "," else "points"
        raise UntypedError(
            f"decimal {marks}", "numbers", way_of_marks(others, decimal), fits_number
        )
    if all(OTHER_DATE.fullmatch(value) or is_date(value) for value in values):
        raise UntypedError("dates that are not ISO", "dates", DATES_WAY, is_date)
    for kind in ("number", "date"):
        if counts.get(kind):
            raise UntypedError(f"{kind}s and other text", f"{kind}s", fits=tests[kind])
    n_values = len(texts) - texts.null_count
    if is_nearly_distinct(len(values), n_values):
        raise UntypedError(f"{len(values):,} different texts in {n_values:,} rows")
    return "category"


def is_nearly_distinct(n_names: int, n_values: int) -> bool:
    """Whether text has too many distinct values to be categories or classes."""
    share = n_names / max(n_values, 1)
    many = n_names > MANY_NAMES and share > LARGEST_SHARE
    return many or (n_values > FEW_ROWS and share > LARGEST_SHARE_OF_FEW)
