"""One party's table: features as numbers, labels, weights and ids, each checked; and its warnings.

``build_table`` makes it from an Arrow frame. ``notes_on_*`` are warnings, to be read before a model
is trained on the table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fedapp.data.columns import Columns, fill, kinds_of
from fedapp.data.convert import (
    DAYS,
    SECONDS,
    Column,
    Converted,
    UntypedError,
    convert,
    holds_numbers,
)
from fedapp.data.csv_errors import DELIMITERS, TextFile, is_number
from fedapp.data.schema import (
    MISSING,
    MISSING_ELSEWHERE,
    NO_NAME,
    PLAIN,
    Reader,
    Roles,
    first,
    listed,
)
from fedapp.errors import LONGEST, WITHHELD, DataError, as_plain, did_you_mean
from fedapp.trees.categories import Categories, chosen, names_of

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.float64] | npt.NDArray[np.str_]

MISSING_GROUP = "missing"
MARKS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars", " ": "blanks"}
# How a column of a role is read, and its field in a `Table`; the smallest value of one of numbers.
ROLES = {
    "label": ("label", "labels"),
    "id": ("name", "ids"),
    "group": ("name", "groups"),
    "weight": ("number", "weights"),
    "base-margin": ("number", "base_margins"),
    "event": ("number", ""),  # of the label, in whose sign it is
}
LEAST = {"weight": 0.0, "base-margin": -np.inf}
DROPPED = "are dropped before rows are held back or matched (missing-label=drop)"
# What to do about rows without a label.
UNLABELLED = "; missing-label=drop drops these rows"
EXACT = 2**24  # float32 represents every whole number up to here
LOST_TIME = "times of day that float32 moves by up to 3 minutes (a day of 2024 is 19,800 and more)"
# A number with a currency, a percent sign or marks between its digits.
MARKED_NUMBER = re.compile(r"[$€£¥]? ?[-+]?\d{1,3}([,._' ]?\d{3})*([.,]\d+)? ?[$€£¥%]?", re.ASCII)
LIKE_NUMBERS = "numbers with marks, as in $1,200, 12% or 1_000, read as categories: write 1200"
FEWEST_ROWS = 10  # with fewer, consecutive whole numbers or a high AUC occur by chance
LEAK_AUC = 0.99  # breast-cancer's best column has 0.975
MOST_RANKED = 100_000  # rows used for an AUC
FAR = 2.0  # times the range of all other values
ROUNDED = f"whole numbers beyond {EXACT:,} (2^24) that become others as float32"
# Matches a note that describes a conversion and is not a warning.
FACT = re.compile(r"is read as one|, read as (?!missing)|, removed$|removed: |dropped bef|left out")


@dataclass(frozen=True, slots=True)
class Note:
    """One warning."""

    rule: str  # text, with ``{}`` for the columns
    columns: str = ""  # their names; empty if it is about none
    quotes_values: bool = False  # whether values, as names of categories, are beside them

    def text(self, shares_names: bool) -> str:
        """The text as plain printable characters; column names only with `shares_names`."""
        text = self.rule.replace("{}", self.columns if shares_names else WITHHELD)
        return as_plain(text)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Rows of one table: features as numbers or category codes, and the columns with a role."""

    columns: tuple[str, ...]  # names of the features, in the order of the table
    values: Floats  # (n_rows, n_columns); NaN is missing, no value is infinite
    # (n_rows,), str: class names; None without a label column
    labels: Labels | None = None
    weights: Floats | None = None  # (n_rows,), >= 0; None means 1 for every row
    ids: npt.NDArray[np.str_] | None = None  # (n_rows,); None without an id column
    groups: npt.NDArray[np.str_] | None = None  # (n_rows,): the column of a natural partition
    # warnings about the whole table, also if these are some of its rows
    notes: tuple[Note, ...] = ()
    categories: Categories = ()  # of each column, see ``fedapp.trees.sets``
    # columns whose categories come from a schema, not from the rows
    given: frozenset[str] = frozenset()
    base_margins: Floats | None = None  # (n_rows,): initial margins
    kinds: tuple[str, ...] = ()  # of the columns, see ``kinds_of``; empty for rows to predict

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.values)

    def in_order(self, columns: Sequence[str]) -> Table:
        """Reorder the columns; `columns` has the same names."""
        if tuple(columns) == self.columns:
            return self
        places = [self.columns.index(name) for name in columns]
        values = np.ascontiguousarray(self.values[:, places])
        categories = chosen(self.categories, places)
        kinds = tuple(self.kinds[place] for place in places if self.kinds)
        return replace(
            self, columns=tuple(columns), values=values, categories=categories, kinds=kinds
        )

    def take(self, rows: npt.NDArray[np.int64]) -> Table:
        """Select rows, in this order."""
        return replace(
            self,
            values=self.values[rows],
            labels=None if self.labels is None else self.labels[rows],
            weights=None if self.weights is None else self.weights[rows],
            ids=None if self.ids is None else self.ids[rows],
            groups=None if self.groups is None else self.groups[rows],
            base_margins=None if self.base_margins is None else self.base_margins[rows],
        )


def build_table(
    frame: Any, roles: Roles, text: TextFile | None = None, reader: Reader = PLAIN
) -> Table:
    """Build a table from a pyarrow.Table; raises DataError as `load_table` does."""
    check_columns(frame, roles)
    n_rows = frame.num_rows
    if roles.label and roles.drop_unlabelled:
        frame, text = _with_labels(frame, roles, reader, text)
    columns = Columns.fit(frame, feature_columns(frame, roles), reader, text)
    values, converted = columns.convert(frame, text)
    by_name = dict(zip(columns.names, converted, strict=True))
    rows, read = columns_with_a_role(frame, roles, reader, text)
    notes = [
        *notes_on_file(text),
        *note_on_unlabelled(roles.label, n_rows - frame.num_rows, n_rows, DROPPED),
        *notes_on_types(converted),
        *notes_on_labels(roles.label, rows["labels"], reader),
        *notes_on_ids(roles.id_column, rows["ids"], read.get("id")),
        *notes_on_features(
            columns.names, values, lambda name: _numbers(by_name[name].numbers), columns.categories
        ),
    ]
    return Table(
        columns.names,
        values,
        notes=tuple(notes),
        categories=columns.categories,
        given=frozenset(name for name in columns.names if reader.gives_categories(name)),
        kinds=kinds_of(values, converted),
        **rows,
    )


def columns_with_a_role(
    frame: Any, roles: Roles, reader: Reader, text: TextFile | None = None
) -> tuple[dict[str, Any], dict[str, Converted]]:
    """Labels, weights and the like by their field in `Table`, and as read, by role; DataError."""
    read = {
        role: read_role(frame, role, name, reader, text) for role, name in roles.named().items()
    }
    rows = {
        field: _checked(role, read[role], text) if role in read else None
        for role, (_, field) in ROLES.items()
        if field
    }
    if roles.event:
        rows["labels"] = _signed_times(rows["labels"], read["event"], roles, text)
    return rows, read


def _signed_times(
    times: Labels | None, read: Converted, roles: Roles, text: TextFile | None
) -> Labels:
    """Times, with the opposite sign in rows without an event; see ``losses.Loss.is_survival``."""
    if times is None:
        rule = (
            "event column {} must be in the table with the times, which label names, got no label"
        )
        raise DataError.naming(rule, listed([roles.event]))
    if times.dtype.kind != "f":
        rule = "label column {} must be times with an event column, got text"
        raise DataError.naming(rule, listed([roles.label]))
    events = _numbers(read.numbers)
    rule = "event column {} must be 1 (an event) or 0 (censored) in every row"
    _refuse(rule, roles.event, (events != 0) & (events != 1), text)
    # Compared as float32, as which losses compute.
    _refuse("label column {} must be times > 0", roles.label, times.astype(np.float32) <= 0, text)
    return np.copysign(times, events - 0.5)


def read_role(
    frame: Any, role: str, name: str, reader: Reader, text: TextFile | None = None
) -> Converted:
    """The column of a role, by the rules of features and names; raises DataError."""
    one = Column(name, reader.of_feature(name), ROLES[role][0])
    try:
        return convert(one, frame[name], reader, bool(text))
    except UntypedError as error:
        wanted = error.wanted or "whole numbers or text"
        here = text.not_utf8() if text else ""
        rule = f"{role} column {{}} must be {wanted}"
        if text and error.fits and error.way:
            here = f"{rule.format(listed([name]))}, got {error.found}: {error.way}"
        elif text and error.fits:
            here = text.faults(f"{role} column must be numbers", {name: is_number}, "numbers")
        way = f": {error.way}" if error.way else ""
        raise DataError.naming(
            f"{rule}, got {error.found}{way}", listed([name]), here=here
        ) from None


def is_missing(column: Any) -> Mask:
    """Boolean mask of the rows without a value: null, or NaN."""
    return np.asarray(pc.is_null(column, nan_is_null=True).to_numpy(), dtype=bool)


def _with_labels(
    frame: Any, roles: Roles, reader: Reader, text: TextFile | None
) -> tuple[Any, TextFile | None]:
    """Drop the rows without a label, from the frame and from the file's row numbers."""
    labelled = ~is_missing(read_role(frame, "label", roles.label, reader, text).numbers)
    if labelled.all():
        return frame, text
    if not labelled.any():
        rule = (
            f"label column {{}} must have a value in some row, got none in {len(labelled):,} rows"
        )
        raise DataError.naming(rule, listed([roles.label]))
    row_numbers = np.flatnonzero(labelled).tolist()
    text = replace(text, row_numbers=row_numbers) if text else None
    return frame.filter(pa.array(labelled)), text


def feature_columns(frame: Any, roles: Roles) -> tuple[str, ...]:
    """Names of the columns without a role; raises DataError if one has no name, or there is none.

    A party that has only labels and ids may join the features of others.
    """
    others = {*roles.named().values(), *roles.drop}
    columns = tuple(name for name in frame.column_names if name not in others)
    nameless = [name for name in columns if name.startswith(NO_NAME)]
    if nameless:
        rule = "feature columns must have names, got {} without; a row number is not a feature: "
        raise DataError.naming(rule + "drop-columns={}", listed(nameless), ",".join(nameless))
    if not columns and not (roles.label and roles.id_column):
        rule = "table must have a feature column, got only {}"
        raise DataError.naming(rule, listed(frame.column_names))
    return columns


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
        notes.append(Note(f"data file is read as one with {what} between its fields"))
    trimmed = [name.strip() for name in names if name != name.strip()]
    if trimmed:
        notes.append(Note("spaces around the names of columns are removed: {}", listed(trimmed)))
    return notes


def notes_on_types(columns: Sequence[Converted]) -> list[Note]:
    """Note columns that are converted, and values that become missing."""

    def names_of(test: Callable[[Column], bool]) -> list[str]:
        return [read.column.name for read in columns if test(read.column)]

    marked = "numbers or other values that the table marks as categories, read as categories"
    groups = [
        (names_of(lambda one: one.inferred and one.kind == "boolean"), "yes or no, read as 1 or 0"),
        (
            names_of(lambda one: one.inferred and one.kind in DAYS),
            "dates or times, read as days since 1970",
        ),
        ([read.column.name for read in columns if read.trimmed], "spaces around values, removed"),
        (names_of(lambda one: one.marked), marked),
        (names_of(_is_like_numbers), LIKE_NUMBERS),
        ([read.column.name for read in columns if _loses_time(read)], LOST_TIME),
    ]
    notes = [note_on(names, what) for names, what in groups if names]
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


def _is_like_numbers(one: Column) -> bool:
    """Whether most names of an inferred column would be numbers without their marks."""
    names = one.names or () if one.inferred else ()
    marked = [name for name in names if MARKED_NUMBER.fullmatch(name) and not is_number(name)]
    return 2 * len(marked) > len(names) > 0


def _loses_time(read: Converted) -> bool:
    """Whether float32 moves a time of day by more than a second."""
    if read.column.kind not in DAYS:
        return False
    days = _numbers(read.numbers)
    return bool((np.abs(days - days.astype(np.float32)) > 1 / SECONDS).any())


def notes_on_labels(name: str, labels: Labels | None, reader: Reader) -> list[Note]:
    """Note class names that may mean "missing"."""
    if labels is None or labels.dtype.kind != "U" or reader.of_feature(name).type == "category":
        return []
    return notes_on_missing_words({name: set(labels.tolist())}, "label column {} has")


def check_columns(frame: Any, roles: Roles) -> None:
    """Check that the columns with a role are there, names distinct, and that there are rows."""
    names = frame.column_names
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        rule = "column names must be distinct, got {} more than once"
        raise DataError.naming(rule, listed(repeated))
    for role, name in roles.named().items():
        if name not in names:
            rule = f"{role} column {{}} must be in the table, got columns {{}}"
            raise _absent(rule, listed([name]), listed(names), hint=did_you_mean(name, names))
    absent = [name for name in roles.drop if name not in names]
    if absent:
        rule = "drop-columns must be columns of the table ({}), got {}"
        raise _absent(rule, listed(names), listed(absent), hint=did_you_mean(absent[0], names))
    if frame.num_rows == 0:
        raise DataError("table must have at least one row, got 0")


def _absent(rule: str, *columns: str, hint: str) -> DataError:
    """Error for an unknown column; the suggestion is shown only to the table's owner."""
    return DataError(rule.format(*columns) + hint, outside=DataError.naming(rule, *columns).outside)


def _numbers(column: Any) -> npt.NDArray[np.float64]:
    out = np.empty(len(column), np.float64)
    fill(out, column)
    return out


def _checked(role: str, read: Converted, text: TextFile | None) -> Any:
    """A column with a role as an array; raises DataError if a row breaks the role's rule."""
    name = read.column.name
    column = read.numbers
    rule = f"{role} column {{}} must"
    if role in LEAST:
        numbers = np.empty(len(column), np.float32)
        least = LEAST[role]
        fill(numbers, column)
        bounds = "" if np.isinf(least) else f" and >= {least:g}"
        rule += f" be finite{bounds} in every row"
        _refuse(rule, name, ~np.isfinite(numbers) | (numbers < least), text)
        return numbers
    if role == "group":
        column = column.fill_null(MISSING_GROUP)
    way = UNLABELLED if role == "label" else ""
    _refuse(f"{rule} have no missing values", name, is_missing(column), text, way)
    if not holds_numbers(column.type):
        return np.asarray(column.to_numpy(), dtype=np.str_)
    labels = _numbers(column)
    _refuse(f"{rule} be finite", name, np.isinf(labels), text)
    return labels


def _refuse(rule: str, name: str, bad: Mask, text: TextFile | None, way: str = "") -> None:
    """Raise DataError if any row is bad."""
    if bad.any():
        count = f"{rule}, got {int(bad.sum())} of {len(bad)} rows"
        here = count.format(f"'{name}'") + (text.first_line(bad) if text else "") + way
        raise DataError.naming(count + way, listed([name]), here=here)


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
        for place, (name, least, most) in enumerate(spans)
        if names_of(categories, place) is None and least < most
        for code in (least, most)
        if (count := _n_of_code(values[:, place], code))
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


def notes_on_leaks(table: Table) -> list[Note]:
    """Note features of which a single one has an AUC above 0.99 for two classes.

    Missing values rank as the largest or the smallest. Categories are ranked by the share of their
    rows in the second class, if they have 10 rows or more on average.
    """
    step = 1 + table.n_rows // MOST_RANKED
    classes, labels = np.unique([] if table.labels is None else table.labels, return_inverse=True)
    is_second, leaks = labels[::step] == 1, list[str]()
    if len(classes) != 2 or min(is_second.sum(), (~is_second).sum()) < FEWEST_ROWS:
        return []
    for place, name in enumerate(table.columns):
        distinct, groups = np.unique(table.values[::step, place], return_inverse=True)
        seconds, sizes = (np.bincount(groups, one).astype(float) for one in (is_second, None))
        order = np.arange(len(distinct))
        firsts = sizes - seconds
        if names_of(table.categories, place) is not None:
            if sizes.mean() < FEWEST_ROWS:
                continue
            order = np.argsort(seconds / sizes)
        orders = np.stack([order, np.roll(order, int(np.isnan(distinct[-1])))])  # NaN is the last
        # Mann-Whitney: pairs with the row of the second class ranked higher; ties count half.
        below = np.cumsum(firsts[orders], axis=1) - firsts[orders] / 2
        aucs = (seconds[orders] * below).sum(axis=1) / (seconds.sum() * firsts.sum())
        if (auc := max(aucs.max(), 1 - aucs.min())) > LEAK_AUC:
            leaks.append(f"'{name}' ({auc:.4f})")
    rule = f"features that alone have an AUC above {LEAK_AUC} for the label: {{}}; if they are "
    rule += "known only after the label, exclude them with drop-columns"
    return [Note(rule, first(leaks))] if leaks else []


def notes_on_ids(name: str, ids: npt.NDArray[np.str_] | None, read: Converted | None) -> list[Note]:
    """Note spaces around ids, zeros before them, and ids of more than one row."""
    if ids is None or read is None:
        return []
    rules = []
    if read.trimmed:
        rules.append("spaces around values, removed")
    if n_padded := pc.sum(pc.match_substring_regex(read.numbers, r"^0\d+$")).as_py():
        rules.append(
            f"zeros before the number in {n_padded:,} of {len(ids):,} rows: 007 is another id than "
            "7, so see that all parties write them"
        )
    n_repeated = sum(count for count in Counter(ids.tolist()).values() if count > 1)
    if n_repeated:
        rules.append(f"{n_repeated:,} of {len(ids):,} rows that share their id with another")
    return [Note(f"id column {{}} has {what}", f"'{name}'") for what in rules]


def notes_on_numbered_ids(name: str, ids: npt.NDArray[np.str_]) -> list[Note]:
    """Note ids that count the rows from 0 or 1, in order."""
    counts = np.arange(len(ids)) + (ids[0] == "1")
    if len(ids) < FEWEST_ROWS or not np.array_equal(ids, counts.astype(str)):
        return []
    rule = "id column {} counts the rows of the table, so that rows are matched by their position: "
    return [Note(f"{rule}name a column that identifies them, if it is a row number", f"'{name}'")]


def note_on_unlabelled(name: str, n_unlabelled: int, n_rows: int, what: str) -> list[Note]:
    """Note rows without a label; `what` says what becomes of them."""
    if not n_unlabelled:
        return []
    count = f"{n_unlabelled:,} of {n_rows:,} rows have no label in {{}}"
    return [Note(f"{count} and {what}", f"'{name}'")]


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
    one = len(names) == 1
    columns, has = ("feature column", "has") if one else ("feature columns", "have")
    return Note(f"{columns} {{}} {has} {what}", listed(names))
