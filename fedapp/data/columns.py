"""Columns of a table: ``Columns.convert`` infers what each holds, and reads it.

A text column gets the first kind that fits all its values: numbers; booleans (true and false, yes
and no, y and n, in any case), converted to 1 and 0; ISO dates with or without a time of day,
converted to days since 1970 (in UTC if they have a zone) with a fraction; times of day, as 23:59;
otherwise categories. A mix of kinds is refused, and so is text that is nearly all distinct, unless
a schema declares the kind. The kind belongs to the model: tables of other parties and later tables
must have it too (``agreed``).

Names, of classes, categories and rows (ids), are texts, read by ``as_texts`` alone: without blanks
around, in Unicode's form NFC, and 1 for 1.0. They never come from a number that may be rounded.

By the rules of a schema, rows that share an id become one (``Groups``). A sum is rounded once
(``math.fsum``), so it depends on neither the order of the rows nor the machine. Missing values are
passed over; an id without any value has none, and a count of 0.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fedapp.arrays import Floats, Ints
from fedapp.data.convert import (
    DAYS,
    INFINITE_WAY,
    KINDS,
    Column,
    Converted,
    UntypedError,
    as_counted,
    as_numbers,
    convert,
    fill,
    holds_numbers,
)
from fedapp.data.csv_errors import TextFile
from fedapp.data.large import lasting
from fedapp.data.schema import MISSING, PLAIN, Declared, Reader, first, listed, plain_text
from fedapp.data.scratch import empty_table
from fedapp.errors import DataError
from fedapp.trees.categories import RARE, Categories, as_categories, entries_of

# What to do about values of no number, by the role of their column.
WAYS = {
    "event": "1 is an event, 0 is censored; let a schema have codes for other values, as "
    '[columns.event.codes] with dead = "1" and alive = "0"'
}
ALIKE = "write it alike everywhere, or let the schema of a table say its type"

Numbers = npt.NDArray[np.float64]
ADDED = ("number", "boolean")  # kinds of which there are sums and means
# Kinds that a rule takes; ``last`` and ``count`` take any.
TAKES: dict[str, tuple[str, ...]] = dict.fromkeys(("sum", "mean"), ADDED)
TAKES |= dict.fromkeys(("min", "max"), (*ADDED, *DAYS, "ordinal"))
LARGEST = float(np.finfo(np.float32).max)
RULE_WAY = 'as aggregate = "sum" (or count, mean, min, max, last) of a column'


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a table, or of a model, which read tables."""

    columns: tuple[Column, ...]
    reader: Reader
    trained: tuple[str, ...] = ()  # kinds of a model's columns

    @classmethod
    def of(cls, names: Sequence[str], reader: Reader = PLAIN) -> Columns:
        """Columns whose kinds follow from their schema or from the table that is read."""
        return cls(tuple(Column(name, reader.of_feature(name)) for name in names), reader)

    @classmethod
    def of_model(
        cls, names: Sequence[str], categories: Categories, reader: Reader, kinds: Sequence[str] = ()
    ) -> Columns:
        """Columns of a model, which later tables must have; without ``kinds`` they are numbers."""
        declared = {column.rename or column.name: column for column in reader.declared}
        columns = []
        for name, codes in zip(names, entries_of(categories, len(names)), strict=True):
            column = declared.get(name, Declared(name))
            if codes is not None:
                column = declared[name] = replace(column, type=column.type or "category")
            is_coded = codes is not None and column.type == "category"
            columns.append(Column(name, column, "category" if is_coded else "", codes))
        every = tuple(declared.values())
        reader = replace(reader, n_features=len(columns), tolerant=True, declared=every)
        numbers = ("number" if column.names is None else "category" for column in columns)
        return cls(tuple(columns), reader, tuple(kinds or numbers))

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the run."""
        return tuple(column.name for column in self.columns)

    @property
    def categories(self) -> Categories:
        """Names of the categories of each column."""
        return as_categories(column.names for column in self.columns)

    def convert(
        self, frame: Any, text: TextFile | None = None, groups: Groups | None = None
    ) -> tuple[Floats, list[Converted]]:
        """The columns of a pyarrow.Table as float32, shape (n_rows, n_columns), NaN is missing; and
        what became of each column. Of `groups` a row an id.

        Raises DataError if a value is not of its column's type, or infinite, or if a column is not
        of its kind in the model.
        """
        columns = self.columns
        if groups:
            columns = tuple(map(as_counted, columns))
        n_rows, errors = len(groups.ids) if groups else frame.num_rows, list[DataError]()
        values = empty_table(n_rows, len(columns))

        def put(column_id: int, read: Callable[[], Converted]) -> Converted:
            def reduced() -> Converted:
                return groups.reduced(read()) if groups else read()

            try:
                converted = reduced()
            except DataError as error:  # those of types are raised before it
                errors.append(error)
                return read()
            fill(values[:, column_id], converted.numbers)
            return lasting(frame, converted, reduced)

        every = convert_columns("feature", columns, frame, self.reader, text, put)
        if errors:
            raise errors[0]
        kinds = kinds_of(values, every) if self.trained else ()
        for name, due, kind in zip(self.names, self.trained, kinds, strict=False):
            if agreed((due, kind)) is None:
                rule = f"feature column {{}} must be {in_words(due)}, as in the model, got "
                raise DataError.naming(f"{rule}{in_words(kind)}: {ALIKE}", f"'{name}'")
        _check_finite(self.names, values, None if groups else text)
        return values, every


def kinds_of(values: Floats, columns: Sequence[Converted]) -> tuple[str, ...]:
    """The kind of each column, (n_rows, n_columns), by what it holds; empty without any value."""
    lows, highs = np.full((2, len(columns)), np.nan, np.float32)
    if len(values):
        lows, highs = np.fmin.reduce(values), np.fmax.reduce(values)
    kinds = []
    for column_id, (converted, low, high) in enumerate(zip(columns, lows, highs, strict=True)):
        column, numbers = converted.column, values[:, column_id]
        kind = column.kind if column.names or not np.isnan(low) else ""
        if kind == "number" and low >= 0 and high <= 1:
            is_binary = ((numbers == 0) | (numbers == 1) | np.isnan(numbers)).all()
            kind = "binary" if is_binary else kind
        elif kind == "ordinal":
            names = json.dumps(column.declared.categories).encode()
            kind = f"ordinal:{hashlib.blake2b(names, digest_size=8).hexdigest()}"
        kinds.append(kind)
    return tuple(kinds)


def agreed(kinds: Iterable[str]) -> str | None:
    """The kind of a column that is of these kinds in several tables; None if they differ.

    Numbers go with yes or no only where they are all 0 or 1.
    """
    of_values = {*kinds} - {""}
    if of_values in ({"boolean", "binary"}, {"number", "binary"}):
        of_values.remove("binary")
    return min(of_values, default="") if len(of_values) <= 1 else None


def in_words(kind: str) -> str:
    """A kind as a plural noun; of an ordinal with the beginning of its digest."""
    name, _, digest = kind.partition(":")
    return KINDS.get(name, (name, {}))[0] + (f" ({digest[:4]})" if digest else "")


def convert_columns(
    role: str,
    columns: Sequence[Column],
    frame: Any,
    reader: Reader,
    text: TextFile | None,
    use: Callable[[int, Callable[[], Converted]], Converted] = lambda _, read: read(),
) -> list[Converted]:
    """Read columns; raises one DataError for all that have no single type.

    ``use`` takes a column's number and what reads it, and returns what stays of it.
    """
    every, faults = list[Converted](), dict[str, UntypedError]()
    for column_id, column in enumerate(columns):
        try:
            index = frame.column_names.index(column.name)
            read = partial(convert, column, frame, index, reader, text is not None)
            every.append(use(column_id, read))
        except UntypedError as error:
            faults[column.name] = error
    if faults:
        raise _untyped(role, frame, faults, reader, text) from None
    return every


def _untyped(
    role: str, frame: Any, faults: dict[str, UntypedError], reader: Reader, text: TextFile | None
) -> DataError:
    """Error for columns of no single type; the table's owner also gets values and lines."""
    bad_bytes = [name for name in faults if pa.types.is_binary(frame[name].type)]
    if bad_bytes and text and (here := text.not_utf8()):
        rule = "data file must be UTF-8, got other bytes in {}"
        return DataError.naming(rule, listed(bad_bytes), here=here)
    wanted = next((fault.wanted for fault in faults.values() if fault.wanted), "")
    same = {name: fault for name, fault in faults.items() if fault.wanted == wanted}
    name, error = next(iter(same.items()))
    way, of_role = f": {error.way}" if error.way else "", ""
    if role == "feature" and not wanted:
        if not way:
            return _free_text(frame, same)
        rule = f"feature column {{}} must be read in one way, got {error.found}{way}"
        return DataError.naming(rule, f"'{name}'")
    if role == "feature":
        start = "feature columns must be of one type each"
        rule = f"{start}, got {wanted} and other text in {{}}: see fedapp data describe"
    else:
        of_role = WAYS.get(role, "correct them")
        way = way or f": {of_role}"
        start = f"{role} column must be {wanted}"
        rule = f"{role} column {{}} must be {wanted or 'whole numbers or text'}"
        rule, same = f"{rule}, got {error.found}{way}", {name: error}
    here = ""
    if text and wanted:
        here = text.faults(start, _tests_of(same, reader), wanted, error.way, of_role)
    return DataError.naming(rule, listed(same), here=here)


def _tests_of(
    faults: Mapping[str, UntypedError], reader: Reader
) -> dict[str, Callable[[str], bool]]:
    """Whether one field of a column, by its name in the file, is missing, or of the wanted type."""

    def test(declared: Declared, fits: Callable[[str], bool]) -> Callable[[str], bool]:
        absent, codes = {*MISSING, *reader.missing, *declared.missing}, dict(declared.codes)
        return lambda field: field in absent or fits(codes.get(plain_text(field), field))

    columns = {reader.of_feature(name): error.fits for name, error in faults.items()}
    return {declared.name: test(declared, fits) for declared, fits in columns.items() if fits}


def _free_text(frame: Any, columns: Mapping[str, UntypedError]) -> DataError:
    """Error for text with too many distinct values to be categories."""
    names = list(columns)
    more = f" and in {len(names) - 1} more" if len(names) > 1 else ""
    content = f"{columns[names[0]].found} in {{}}{more}"
    rule = f"feature columns of text must be categories, got {content}: exclude what is a name, an "
    rule += "id or free text with drop-columns={}, name it as the id, or let a schema say type = "
    rule += '"category"'
    if len(frame.column_names) == 1:
        rule += '; where blanks separate the fields, let it say separator = "blank"'
    return DataError.naming(rule, f"'{names[0]}'", first(names).replace(", ", ","))


def _check_finite(names: Sequence[str], values: Floats, text: TextFile | None) -> None:
    counts = (int(np.isinf(column).sum()) for column in values.T)
    bad = [f"{count} in '{name}'" for name, count in zip(names, counts, strict=True) if count]
    if bad:
        rule = "feature columns must be finite as float32, got {} infinite"
        line = text.first_line(reduce(np.logical_or, map(np.isinf, values.T))) if text else ""
        here = f"{rule.format(first(bad))}{line}: {INFINITE_WAY}"
        raise DataError.naming(rule, first(bad), here=here)


def columns_json(columns: Sequence[str], kinds: Sequence[str], categories: Categories) -> str:
    """Describe how values were converted to a model's numbers, as JSON; raises ValueError."""
    check_kinds(kinds, len(columns))
    encodings = {}
    every = kinds or ["number"] * len(columns)
    for column, kind, names in zip(
        columns, every, entries_of(categories, len(columns)), strict=True
    ):
        kind = "category" if names is not None else kind.partition(":")[0] or "number"
        entry_names = {"names": list(names)} if names else {}
        others = {"others": RARE} if names and RARE in names else {}
        encodings[column] = {"kind": kind, **KINDS[kind][1], **entry_names, **others}
    text = json.dumps({"missing": MISSING, "columns": encodings}, ensure_ascii=False, indent=1)
    return text + "\n"


def check_kinds(kinds: Sequence[str], n_columns: int) -> None:
    """Check kinds as `kinds_of` gives them; none are those of numbers. Raises ValueError."""
    others = {kind.partition(":")[0] for kind in kinds} - {"", *KINDS}
    if len(kinds) not in (0, n_columns) or others:
        raise ValueError(f"kinds must be known ones, one a column of {n_columns}")


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Rows of a table by their ids."""

    ids: npt.NDArray[np.str_]  # each once, in the order of their first rows
    rows: Ints  # all rows, those of an id one after the other; the last is its last event
    starts: Ints  # where those of each id begin in ``rows``

    @classmethod
    def of(cls, ids: npt.NDArray[np.str_], times: Numbers | None) -> Groups:
        """Group rows by id; `times` order those of an id, and the table where they are equal."""
        _, firsts, numbers = np.unique(ids, return_index=True, return_inverse=True)
        ranks = np.argsort(np.argsort(firsts))  # of each id by its first row
        rows = np.lexsort((times, ranks[numbers]) if times is not None else (ranks[numbers],))
        counts = np.bincount(ranks[numbers], minlength=len(firsts))
        return cls(ids[np.sort(firsts)], rows, np.cumsum(counts) - counts)

    @property
    def repeat(self) -> bool:
        """Whether some rows share their id."""
        return len(self.ids) < len(self.rows)

    def reduced(self, read: Converted) -> Converted:
        """A column that was read, one value an id; raises DataError if its rule does not fit."""
        column, rule = read.column, read.column.declared.aggregate or "last"
        if rule == "count":
            present = pc.invert(pc.is_null(read.numbers, nan_is_null=True)).cast(pa.float64())
            counts = self._reduced(np.add, np.asarray(present.to_numpy()))
            return Converted(pa.chunked_array([counts]), replace(column, kind="number", names=None))
        kind = column.kind
        if kind in ("label", "name"):
            kind = "number" if holds_numbers(read.numbers.type) else "category"
        if kind not in TAKES.get(rule, (kind,)):
            takes = " or ".join(KINDS[name][0] for name in TAKES[rule])
            rule = f'column {{}} must be {takes} for aggregate = "{rule}", got {KINDS[kind][0]}'
            raise DataError.naming(f"{rule}: last and count take any", f"'{column.name}'")
        if rule == "last":
            lasts = self.rows[np.append(self.starts[1:], len(self.rows)) - 1]
            return read._replace(numbers=read.numbers.take(pa.array(lasts)))
        values = as_numbers(read.numbers)
        if rule in ("min", "max"):
            extremes = self._reduced(np.fmin if rule == "min" else np.fmax, values)
            return read._replace(numbers=pa.chunked_array([extremes]))
        column = replace(column, kind="number") if kind == "boolean" else column
        sums = self._sums(values)
        if rule == "mean":
            present = self._reduced(np.add, (~np.isnan(values)).astype(np.float64))
            sums = sums / np.maximum(present, 1)
        return read._replace(numbers=pa.chunked_array([sums]), column=column)

    def _reduced(self, operation: np.ufunc, values: Numbers) -> Numbers:
        return np.asarray(operation.reduceat(values[self.rows], self.starts), dtype=np.float64)

    def _sums(self, values: Numbers) -> Numbers:
        """Sums of the values, NaN of none; infinite if a value is so as float32."""
        is_value, is_large = ~np.isnan(values), np.abs(values) > LARGEST
        addends = np.where(is_value & ~is_large, values, 0.0)[self.rows].tolist()
        ends = np.append(self.starts[1:], len(addends)).tolist()
        spans = zip(self.starts.tolist(), ends, strict=True)
        sums = np.array([math.fsum(addends[start:end]) for start, end in spans])
        sums[self._reduced(np.maximum, is_large.astype(np.float64)) > 0] = np.inf
        sums[self._reduced(np.maximum, is_value.astype(np.float64)) == 0] = np.nan
        return sums


def check_rules(groups: Groups, names: Collection[str], reader: Reader) -> None:
    """Check that each of these columns has a rule, if rows share their ids."""
    without = [name for name in names if not reader.of_feature(name).aggregate]
    if groups.repeat and without:
        rule = "columns {} must have a rule of the schema where rows share their id, "
        way = f'{RULE_WAY}, or be dropped by type = "drop"'
        raise DataError.naming(rule + way, listed(without))
