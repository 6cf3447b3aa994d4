"""Warnings about a table, to be read before a model is trained on it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fedapp.arrays import Floats
from fedapp.data.columns import Groups
from fedapp.data.convert import DAYS, SECONDS, Column, Converted, as_numbers
from fedapp.data.csv_errors import CHUNK_BYTES, DELIMITERS, TextFile, is_number, opened
from fedapp.data.schema import MISSING, MISSING_ELSEWHERE, Reader, first, listed
from fedapp.errors import LONGEST, WITHHELD, as_plain
from fedapp.trees.categories import Categories, names_of

MARKS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars", " ": "blanks"}
EXACT = 2**24  # float32 represents every whole number up to here
LOST_TIME = "times of day that float32 moves by up to 3 minutes (a day of 2024 is 19,800 and more)"
# A number with a currency, a percent sign or marks between its digits.
MARKED_NUMBER = re.compile(r"[$€£¥]? ?[-+]?\d{1,3}([,._' ]?\d{3})*([.,]\d+)? ?[$€£¥%]?", re.ASCII)
LIKE_NUMBERS = "numbers with marks, as in $1,200, 12% or 1_000, read as categories: write 1200"
MEASURE = re.compile(r"[-+]?\d+(?:[.,]\d+)? ?([^\W\d_]+[²³]?(?:/[^\W\d_]+)?)")  # 21 years, 5km/h
MOST_UNITS = 3  # of a column; more are letters of codes
MIXED_ZONES = "times with and without a zone, of which the latter are read as UTC"
LIKE_CODES = (
    "numbers written as 007, 0x1F or 1E2, read as 7, 31 and 100: where they are codes, let a "
    'schema say type = "category"'
)
CODED_NUMBER = re.compile(r"[-+]?0\d+(\.\d*)?|0x[\da-f]+|\d+e\d+", re.IGNORECASE | re.ASCII)
MAY_BE_CODE = re.compile(rb"(?<![\w.])(0[\dx]|\d+e\d)", re.IGNORECASE)  # a field of a file
MOST_READ = 200_000  # fields in which it is looked for
FEWEST_ROWS = 10  # with fewer, consecutive whole numbers or a high AUC occur by chance
FAR = 2.0  # times the range of all other values
ROUNDED = f"whole numbers beyond {EXACT:,} (2^24) that become others as float32"


@dataclass(frozen=True, slots=True)
class Note:
    """A warning about a table, or a fact of how it was read."""

    rule: str  # text, with ``{}`` for the columns
    columns: str = ""  # their names; empty if it is about none
    quotes_values: bool = False  # whether values, as names of categories, are beside them
    is_fact: bool = False  # whether it describes a conversion and asks for nothing

    def text(self, shares_names: bool) -> str:
        """The text as plain printable characters; column names only with `shares_names`."""
        text = self.rule.replace("{}", self.columns if shares_names else WITHHELD)
        return as_plain(text)


def note_on_groups(groups: Groups | None) -> list[Note]:
    """Note how many rows have become how many."""
    if groups is None or not groups.repeat:
        return []
    n_rows, n_ids = len(groups.rows), len(groups.ids)
    rule = f"{n_rows:,} rows are aggregated to {n_ids:,}, one an id, by the schema"
    return [Note(rule, is_fact=True)]


def notes_on_file(text: TextFile | None) -> list[Note]:
    """Note a separator that is no comma or was one of several, and spaces around column names."""
    if text is None:
        return []
    notes = []
    names = text.written_header()
    delimiter = text.reader.delimiter
    others = {*DELIMITERS} - {delimiter, text.reader.decimal}
    if delimiter != "," or any(mark in name for mark in others for name in names):
        what = MARKS.get(delimiter, repr(delimiter))
        rule = f"data file is read as one with {what} between its fields"
        notes.append(Note(rule, is_fact=True))
    trimmed = [name.strip() for name in names if name != name.strip()]
    if trimmed:
        rule = "spaces around the names of columns are removed: {}"
        notes.append(Note(rule, listed(trimmed), is_fact=True))
    return notes


def notes_on_types(columns: Sequence[Converted]) -> list[Note]:
    """Note columns that are converted, and values that become missing."""

    def is_of(read: Converted, *kinds: str) -> bool:
        return read.column.inferred and read.column.kind in kinds

    marked = "numbers or other values that the table marks as categories, read as categories"
    # Whether a column is noted, what it has, and whether that is a fact.
    groups: tuple[tuple[Callable[[Converted], bool], str, bool], ...] = (
        (lambda read: is_of(read, "boolean"), "yes or no, read as 1 or 0", True),
        (lambda read: is_of(read, *DAYS), "dates or times, read as days since 1970", True),
        (lambda read: read.trimmed, "spaces around values, removed", True),
        (lambda read: read.column.marked, marked, True),
        (lambda read: _is_like_numbers(read.column), LIKE_NUMBERS, False),
        (_loses_time, LOST_TIME, False),
        (lambda read: read.mixes_zones, MIXED_ZONES, False),
    )
    notes = [
        replace(note_on(noted, what), is_fact=is_fact)
        for is_noted, what, is_fact in groups
        if (noted := [read.column.name for read in columns if is_noted(read)])
    ]
    if measured := [text for read in columns if (text := _measured(read))]:
        rule = "feature columns {} have numbers with a unit, read as categories: write the number "
        rule += "only, and the unit in the column's name"
        notes.append(Note(rule, first(measured), quotes_values=True))
    inferred = {
        read.column.name: names
        for read in columns
        if (names := read.column.names) and read.column.inferred
    }
    words = notes_on_missing_words(inferred, "feature columns {} have")
    notes += [replace(note, quotes_values=True) for note in words]
    equal = "equal a number declared as missing but are written otherwise"
    for field, are in (("n_outside", "are none of its categories"), ("n_equal", equal)):
        for read in columns:
            if count := getattr(read, field):
                what = f"{count:,} values that {are}, read as missing"
                notes.append(note_on([read.column.name], what))
    with_words = [read for read in columns if read.words and read.column.names]
    if with_words:
        counts = sum((Counter(read.words) for read in with_words), Counter[str]())
        what = first([f"{word} in {count:,} rows" for word, count in counts.most_common()])
        what += ", read as missing: among the categories of a schema it is a name"
        notes.append(note_on([read.column.name for read in with_words], what))
    return notes


def notes_on_writing(text: TextFile | None, columns: Sequence[Converted]) -> list[Note]:
    """Note numbers of a CSV file that are written as codes are; its first rows are looked at."""
    if text is None:
        return []
    inferred = (read.column for read in columns if not read.column.declared.type)
    names = {column.name for column in inferred if column.kind == "number"}
    with opened(text.path) as stream:
        if not MAY_BE_CODE.search(stream.read(CHUNK_BYTES)):  # most files, without a slower pass
            return []
    reader, coded = text.reader, set[str]()
    header = [reader.of_column(name).rename or name for name in text.header()]
    for _, fields in islice(text.rows(), 1 + MOST_READ // len(header)):
        for name, field in zip(header, fields, strict=False):
            if name in names and CODED_NUMBER.fullmatch(field.strip()):
                coded.add(name)
    return [note_on([name for name in header if name in coded], LIKE_CODES)] if coded else []


def _is_like_numbers(column: Column) -> bool:
    """Whether most names of an inferred column would be numbers without their marks."""
    names = column.names or () if column.inferred else ()
    marked = [name for name in names if MARKED_NUMBER.fullmatch(name) and not is_number(name)]
    return 2 * len(marked) > len(names) > 0


def _measured(read: Converted) -> str:
    """An inferred column with an example and how many, if most of its names have a unit."""
    names = read.column.names or () if read.column.inferred else ()
    matches = [(code, MEASURE.fullmatch(name)) for code, name in enumerate(names)]
    units = {code: match[1].lower() for code, match in matches if match}
    if 2 * len(units) <= len(names) or len({*units.values()}) > min(MOST_UNITS, len(units) // 2):
        return ""
    n_rows = int(np.isin(as_numbers(read.numbers), list(units)).sum())
    return f"'{read.column.name}' ('{names[min(units)]}', in {n_rows:,} rows)"


def _loses_time(read: Converted) -> bool:
    """Whether float32 moves a time of day by more than a second."""
    if read.column.kind not in DAYS:
        return False
    days = as_numbers(read.numbers)
    return bool((np.abs(days - days.astype(np.float32)) > 1 / SECONDS).any())


def notes_on_labels(name: str, labels: npt.NDArray[Any] | None, reader: Reader) -> list[Note]:
    """Note class names that may mean "missing"."""
    if labels is None or labels.dtype.kind != "U" or reader.of_feature(name).type == "category":
        return []
    names = pc.unique(pa.array(labels)).to_pylist()
    return notes_on_missing_words({name: names}, "label column {} has")


def is_plain(text: str) -> bool:
    """Whether a text is printable and no longer than a note may be."""
    return text.isprintable() and len(text) <= LONGEST


def notes_on_features(
    columns: Sequence[str],
    values: Floats,
    exact: Callable[[str], npt.NDArray[np.float64]],
    categories: Categories = (),
) -> list[Note]:
    """Note features that cannot help a model, or that look like something else.

    `values` has shape (n_rows, n_columns); `exact` returns a column by name, before its conversion
    to float32. Category codes are not checked as numbers.
    """

    def is_rounded(numbers: npt.NDArray[np.float64]) -> bool:
        large = numbers[np.abs(numbers) > EXACT]
        return bool(((large == np.floor(large)) & (large.astype(np.float32) != large)).any())

    if len(values) < 2:
        return []
    low, high = np.fmin.reduce(values, axis=0), np.fmax.reduce(values, axis=0)
    spans = [
        (name, float(least), float(most))
        for name, least, most in zip(columns, low, high, strict=True)
    ]
    empty = [name for name, least, _ in spans if np.isnan(least)]
    constant = [name for name, least, most in spans if least == most]
    numbers = [span for at, span in enumerate(spans) if names_of(categories, at) is None]
    wide = [name for name, least, most in numbers if max(-least, most) >= EXACT]
    # The span of float32 values shows cheaply which columns may number the rows.
    n_rows = len(values)
    numbered = [
        name
        for name, least, most in numbers
        if n_rows >= FEWEST_ROWS
        and abs(most - least - (n_rows - 1)) <= 2 * float(np.spacing(np.float32(max(-least, most))))
        and numbers_rows(exact(name))
    ]
    outliers = [
        (name, code, count)
        for column_id, (name, least, most) in enumerate(spans)
        if names_of(categories, column_id) is None and least < most
        for code in (least, most)
        if (count := _n_of_code(values[:, column_id], code))
    ]
    groups = [
        (empty, "no value in any row"),
        (constant, "the same value in every row"),
        ([name for name in wide if is_rounded(exact(name))], ROUNDED),
        (numbered, "the numbers of the rows, of no use for other rows: see drop-columns"),
    ]
    notes = [note_on(names, what) for names, what in groups if names]
    if outliers:
        what = (
            "one value in 10 rows or more, far from all others: if it means no value, let a schema "
        )
        shown = first([f"'{name}' ({code:g} in {count:,} rows)" for name, code, count in outliers])
        note = Note(f"feature columns {{}} have {what}list it as missing", shown)
        notes.append(replace(note, quotes_values=True))
    return notes


def _n_of_code(column: Floats, code: float) -> int:
    """How often a column has its smallest or largest value, if that looks like a code."""
    is_code = column == code
    count = int(is_code.sum())
    if count < FEWEST_ROWS or code != np.floor(code):
        return 0
    others = column[~is_code & ~np.isnan(column)]
    if len(others) < FEWEST_ROWS or len(np.unique(others[: 10 * FEWEST_ROWS])) < FEWEST_ROWS:
        return 0
    low = float(others.min())
    high = float(others.max())
    return count if max(low - code, code - high) > FAR * (high - low) else 0


def n_sharing(ids: npt.NDArray[np.str_]) -> int:
    """Number of rows that share their id with another."""
    counts = pc.value_counts(pa.array(ids)).field("counts")
    return int(pc.sum(counts.filter(pc.greater(counts, 1))).as_py() or 0)


def notes_on_ids(name: str, ids: npt.NDArray[np.str_] | None, read: Converted | None) -> list[Note]:
    """Note spaces around ids, zeros before them, and ids of more than one row."""
    if ids is None or read is None:
        return []
    start, column = "id column {} has", f"'{name}'"
    notes, rules = [], []
    if read.trimmed:
        notes.append(Note(f"{start} spaces around values, removed", column, is_fact=True))
    if n_padded := pc.sum(pc.match_substring_regex(read.numbers, r"(^|,)0\d+(,|$)")).as_py():
        rules.append(
            f"zeros before the number in {n_padded:,} of {len(read.numbers):,} rows: 007 is "
            "another id than 7, so see that all parties write them"
        )
    if n_repeated := n_sharing(ids):
        rules.append(f"{n_repeated:,} of {len(ids):,} rows that share their id with another")
    return [*notes, *(Note(f"{start} {what}", column) for what in rules)]


def notes_on_numbered_ids(name: str, ids: npt.NDArray[np.str_]) -> list[Note]:
    """Note ids that count the rows from 0 or 1, in order."""
    counts = np.arange(len(ids)) + (ids[0] == "1")
    if len(ids) < FEWEST_ROWS or not np.array_equal(ids, counts.astype(str)):
        return []
    rule = "id column {} counts the rows of the table, so that rows are matched by their position: "
    return [Note(f"{rule}name a column that identifies them, if it is a row number", f"'{name}'")]


def note_on_unlabelled(
    name: str, n_unlabelled: int, n_rows: int, what: str, is_fact: bool
) -> list[Note]:
    """Note rows without a label; `what` says what becomes of them."""
    if not n_unlabelled:
        return []
    count = f"{n_unlabelled:,} of {n_rows:,} rows have no label in {{}}"
    return [Note(f"{count} and {what}", f"'{name}'", is_fact=is_fact)]


def notes_on_missing_words(columns: Mapping[str, Collection[str]], what: str) -> list[Note]:
    """Note category names that other readers take as missing.

    `columns` maps to the names in each; `what` starts the note, with ``{}`` for the columns.
    """
    words = {
        name: [word for word in (*MISSING[1:], *MISSING_ELSEWHERE) if word in names]
        for name, names in columns.items()
    }
    shown = [f"'{name}' ({', '.join(matches)})" for name, matches in words.items() if matches]
    if not shown:
        return []
    rule = f"{what} words that pandas takes for missing, read as names: where they mean no value, "
    return [Note(f"{rule}list them in a schema as missing", first(shown))]


def numbers_rows(numbers: npt.NDArray[np.float64]) -> bool:
    """Whether the values are distinct consecutive whole numbers, in any order."""
    if len(numbers) < FEWEST_ROWS or np.isnan(numbers).any():
        return False
    ordered = np.sort(numbers)
    return bool(ordered[0] == np.floor(ordered[0]) and (np.diff(ordered) == 1).all())


def note_on(names: Sequence[str], what: str) -> Note:
    """Note about feature columns, which have `what`."""
    is_single = len(names) == 1
    columns, has = ("feature column", "has") if is_single else ("feature columns", "have")
    return Note(f"{columns} {{}} {has} {what}", listed(names))
