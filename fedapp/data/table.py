"""One party's table: features as numbers, labels, weights and ids, each checked; and its warnings.

``build_table`` makes it from an Arrow frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fedapp.arrays import Floats
from fedapp.data.columns import (
    WAYS,
    Columns,
    Groups,
    check_rules,
    convert_columns,
    in_words,
    kinds_of,
)
from fedapp.data.convert import (
    DAYS,
    Column,
    Converted,
    as_dates,
    as_numbers,
    as_text_array,
    fill,
    holds_numbers,
)
from fedapp.data.csv_errors import TextFile
from fedapp.data.labels import numbers_of
from fedapp.data.notes import (
    FEWEST_ROWS,
    Note,
    note_on_groups,
    note_on_unlabelled,
    notes_on_features,
    notes_on_file,
    notes_on_ids,
    notes_on_labels,
    notes_on_types,
    notes_on_writing,
)
from fedapp.data.schema import (
    NO_NAME,
    PLAIN,
    Declared,
    Reader,
    Roles,
    columns_of_role,
    first,
    listed,
)
from fedapp.data.scratch import side_by_side, taken
from fedapp.errors import DataError, did_you_mean
from fedapp.trees.categories import Categories, as_categories, chosen, names_of
from fedapp.trees.ranking import MOST_QUERIES, N_GRADES, numbered

Mask = npt.NDArray[np.bool_]
Labels = npt.NDArray[np.float64] | npt.NDArray[np.str_]
Times = npt.NDArray[np.float64] | npt.NDArray[np.datetime64]

MISSING_PARTITION = "missing"
# How a column of a role is read, and its field in a `Table`; the smallest value of one of numbers.
ROLES = {
    "label": ("label", "labels"),
    "id": ("name", "ids"),
    "partition": ("name", "partitions"),
    "group": ("name", "groups"),
    "test-from": ("", "times"),
    "weight": ("number", "weights"),
    "base-margin": ("number", "base_margins"),
    "event": ("number", ""),  # of the label, in whose sign it is
    "qid": ("name", ""),  # of the label, which is a code of both
}
NEEDS_ID = 'id must name the column whose rows the schema aggregates, as in id="customer"'
LEAST = {"weight": 0.0, "base-margin": -np.inf}
DROPPED = "are dropped before rows are held back or matched (missing-label=drop)"
# What to do about rows without a label.
UNLABELLED = "; missing-label=drop drops these rows"
LEAK_AUC = 0.99  # breast-cancer's best column has 0.975
MOST_RANKED = 100_000  # rows used for an AUC


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Rows of one table: features as numbers or category codes, and the columns with a role."""

    columns: tuple[str, ...]  # names of the features, in the order of the table
    values: Floats  # (n_rows, n_columns); NaN is missing, no value is infinite
    # (n_rows,), str: class names; None without a label column
    labels: Labels | None = None
    weights: Floats | None = None  # (n_rows,), >= 0; None means 1 for every row
    ids: npt.NDArray[np.str_] | None = None  # (n_rows,); None without an id column
    partitions: npt.NDArray[np.str_] | None = None  # (n_rows,): the column of a natural partition
    # warnings about the whole table, also if these are some of its rows
    notes: tuple[Note, ...] = ()
    categories: Categories = ()  # of each column, see ``fedapp.trees.categories``
    # columns whose categories come from a schema, not from the rows
    given: frozenset[str] = frozenset()
    base_margins: Floats | None = None  # (n_rows,): initial margins
    kinds: tuple[str, ...] = ()  # of the columns, see ``kinds_of``; empty for rows to predict
    is_ranked: bool = False  # whether labels are those of ``fedapp.trees.ranking``
    groups: npt.NDArray[np.str_] | None = None  # (n_rows,): whose rows are in one subset
    # (n_rows,): numbers, or datetime64 in UTC, by which rows are held back
    times: Times | None = None
    together: str = ""  # column whose rows are in one subset, of rows that are split
    n_read: int = 0  # rows that were aggregated to these, by id; 0 without rules

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.values)

    def in_order(self, columns: Sequence[str]) -> Table:
        """Reorder the columns; `columns` has the same names."""
        if tuple(columns) == self.columns:
            return self
        column_ids = [self.columns.index(name) for name in columns]
        every = (self.values[:, column_id] for column_id in column_ids)
        values = side_by_side(every, (self.n_rows, len(column_ids)))
        categories = chosen(self.categories, column_ids)
        kinds = tuple(self.kinds[column_id] for column_id in column_ids if self.kinds)
        return replace(
            self, columns=tuple(columns), values=values, categories=categories, kinds=kinds
        )

    def take(self, rows: npt.NDArray[np.int64]) -> Table:
        """Select rows, in this order."""
        fields: dict[str, Any] = {"values": taken(self.values, rows)}
        for _, field in ROLES.values():
            if field and (of_rows := getattr(self, field)) is not None:
                fields[field] = of_rows[rows]
        return replace(self, **fields)


def build_table(
    frame: Any, roles: Roles, text: TextFile | None = None, reader: Reader = PLAIN
) -> Table:
    """Build a table from a pyarrow.Table; raises DataError as `load_table` does."""
    check_columns(frame, roles)
    n_rows = frame.num_rows
    if roles.label and roles.drop_unlabelled:
        frame, text = _with_labels(frame, roles, reader, text)
    names = feature_columns(frame, roles)
    pairs = roles.named().items()
    read = {role: read_role(frame, role, name, reader, text) for role, name in pairs}
    groups = groups_of(frame, read, names, reader, text)
    values, converted = Columns.of(names, reader).convert(frame, text, groups)
    by_name = dict(zip(names, converted, strict=True))
    categories = as_categories(feature.column.names for feature in converted)
    rows = rows_of(read, roles, text, groups)
    notes = [
        *note_on_groups(groups),
        *notes_on_file(text),
        *note_on_unlabelled(roles.label, n_rows - frame.num_rows, n_rows, DROPPED, is_fact=True),
        *notes_on_types(converted),
        *notes_on_writing(text, converted),
        *notes_on_labels(roles.label, rows["labels"], reader),
        *notes_on_ids(roles.id_column, rows["ids"], read.get("id")),
        *notes_on_features(
            names, values, lambda name: as_numbers(by_name[name].numbers), categories
        ),
    ]
    return Table(
        names,
        values,
        notes=tuple(notes),
        categories=categories,
        given=frozenset(name for name in names if reader.gives_categories(name)),
        kinds=kinds_of(values, converted),
        n_read=len(groups.rows) if groups else 0,
        **rows,
    )


def groups_of(
    frame: Any,
    read: Mapping[str, Converted],
    features: Sequence[str],
    reader: Reader,
    text: TextFile | None,
) -> Groups | None:
    """Rows by id, if a schema aggregates them; raises DataError if a column has no rule."""
    if not reader.aggregates:
        return None
    if "id" not in read:
        raise DataError(NEEDS_ID)
    times = None
    if name := reader.order_by:
        if name not in frame.column_names:
            raise _absent("order-by column {} must be in the table", f"'{name}'", hint="")
        times = _as_times("order-by", read_role(frame, "order-by", name, reader, text), text)
    groups = Groups.of(_checked("id", read["id"], text), times)
    others = [converted.column.name for role, converted in read.items() if role != "id"]
    check_rules(groups, [*features, *others], reader)
    return groups


def rows_of(
    read: Mapping[str, Converted], roles: Roles, text: TextFile | None, groups: Groups | None
) -> dict[str, Any]:
    """Labels, weights and the like by their field in `Table`; raises DataError."""
    rows: dict[str, Any] = dict.fromkeys((field for _, field in ROLES.values() if field), None)
    if groups:
        text = None  # its lines are of the rows before
        rows["ids"] = groups.ids
        read = {role: groups.reduced(column) for role, column in read.items() if role != "id"}
    for role, converted in read.items():
        if field := ROLES[role][1]:
            rows[field] = _checked(role, converted, text)
    for role, name, what in (("event", roles.event, "times"), ("qid", roles.qid, "labels")):
        if name and rows["labels"] is None:
            rule = f"{role} column {{}} must be in the table with the {what}, which label names"
            raise DataError.naming(f"{rule}, got no label", listed([name]))
    if roles.event:
        rows["labels"] = _signed_times(rows["labels"], read["event"], roles, text)
    if roles.qid:
        rows["labels"] = _with_queries(rows["labels"], read["qid"], roles, text)
        rows["is_ranked"] = True
    return rows


def ids_of(frame: Any, name: str, reader: Reader, text: TextFile | None = None) -> Any:
    """Ids of all rows; raises DataError."""
    return _checked("id", read_role(frame, "id", name, reader, text), text)


def _signed_times(times: Labels, read: Converted, roles: Roles, text: TextFile | None) -> Labels:
    """Times, with the opposite sign in rows without an event; see ``losses.Loss.is_survival``."""
    if times.dtype.kind != "f":
        rule = "label column {} must be times with an event column, got text"
        raise DataError.naming(rule, listed([roles.label]))
    events = as_numbers(read.numbers)
    rule = "event column {} must be 1 (an event) or 0 (censored) in every row"
    _refuse(rule, roles.event, (events != 0) & (events != 1), text, f": {WAYS['event']}")
    # Compared as float32, as which losses compute.
    _refuse("label column {} must be times > 0", roles.label, times.astype(np.float32) <= 0, text)
    signed: Labels = np.copysign(times, events - 0.5)
    return signed


def _with_queries(grades: Labels, read: Converted, roles: Roles, text: TextFile | None) -> Labels:
    """Labels of ranked rows; see ``fedapp.trees.ranking``."""
    rule = f"label column {{}} must be whole numbers from 0 to {N_GRADES - 1} with a qid column"
    if (numbers := numbers_of(grades)) is None:
        raise DataError.naming(f"{rule}, got text", listed([roles.label]))
    others = (numbers != np.floor(numbers)) | (numbers < 0) | (numbers >= N_GRADES)
    _refuse(rule, roles.label, others, text)
    queries = numbered(_checked("qid", read, text))
    if (n_queries := int(queries.max()) + 1) > MOST_QUERIES:
        rule = f"qid column {{}} must have at most {MOST_QUERIES:,} values, got {n_queries:,}"
        raise DataError.naming(rule, listed([roles.qid]))
    return np.asarray(queries * N_GRADES + numbers, dtype=np.float64)


def read_role(
    frame: Any, role: str, name: str, reader: Reader, text: TextFile | None = None
) -> Converted:
    """The column of a role, or an id's columns as one; raises DataError.

    They are read by the rules of features and names.
    """
    kind = ROLES[role][0] if role in ROLES else ""
    names = columns_of_role(role, name)
    columns = [Column(part, reader.of_feature(part), kind) for part in names]
    parts = convert_columns(role, columns, frame, reader, text)
    return _joined(name, parts) if len(parts) > 1 else parts[0]


def _joined(name: str, parts: Sequence[Converted]) -> Converted:
    """Columns of an id as one, see ``joined_id``; a row without a part has none."""
    texts = [
        pc.replace_substring(pc.replace_substring(part.numbers, "\\", r"\\"), ",", r"\,")
        for part in parts
    ]
    ids = pc.binary_join_element_wise(*texts, ",")
    return Converted(ids, Column(name, Declared(name), "name"), any(part.trimmed for part in parts))


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
    row_numbers = np.flatnonzero(labelled)
    text = replace(text, row_numbers=row_numbers) if text else None
    return frame.filter(pa.array(labelled)), text


def feature_columns(frame: Any, roles: Roles) -> tuple[str, ...]:
    """Names of the columns without a role; raises DataError if one has no name, or there is none.

    A party that has only labels and ids may join the features of others.
    """
    others = {*(name for _, name in roles.columns()), *roles.drop}
    columns = tuple(name for name in frame.column_names if name not in others)
    nameless = [name for name in columns if name.startswith(NO_NAME)]
    if nameless:
        rule = "feature columns must have names, got {} without; a row number is not a feature: "
        raise DataError.naming(rule + "drop-columns={}", listed(nameless), ",".join(nameless))
    if not columns and not (roles.label and roles.id_column):
        rule = "table must have a feature column, got only {}"
        raise DataError.naming(rule, listed(frame.column_names))
    return columns


def check_columns(frame: Any, roles: Roles) -> None:
    """Check that the columns with a role are there, names distinct, and that there are rows."""
    names = frame.column_names
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        rule = "column names must be distinct, got {} more than once"
        raise DataError.naming(rule, listed(repeated))
    for role, name in roles.columns():
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
    if role == "partition":
        column = column.fill_null(MISSING_PARTITION)
    if role == "test-from":
        times = _as_times(role, read, text)
        return as_dates(times) if read.column.kind == "date" else times
    way = UNLABELLED if role == "label" else ""
    _refuse(f"{rule} have no missing values", name, is_missing(column), text, way)
    if not holds_numbers(column.type):
        return as_text_array(column)
    labels = as_numbers(column)
    _refuse(f"{rule} be finite", name, np.isinf(labels), text)
    return labels


def _as_times(role: str, read: Converted, text: TextFile | None) -> npt.NDArray[np.float64]:
    """Numbers, or days since 1970, of all rows; raises DataError."""
    name = read.column.name
    if read.column.kind not in ("number", *DAYS):
        rule = f"{role} column {{}} must be numbers or dates, got "
        raise DataError.naming(f"{rule}{in_words(read.column.kind)}", f"'{name}'")
    times = as_numbers(read.numbers)
    _refuse(f"{role} column {{}} must have a value", name, np.isnan(times), text)
    return times


def _refuse(rule: str, name: str, bad: Mask, text: TextFile | None, way: str = "") -> None:
    """Raise DataError if any row is bad."""
    if bad.any():
        count = f"{rule}, got {int(bad.sum())} of {len(bad)} rows"
        here = count.format(f"'{name}'") + (text.first_line(bad) if text else "") + way
        raise DataError.naming(count + way, listed([name]), here=here)


def notes_on_leaks(table: Table) -> list[Note]:
    """Note features of which a single one has an AUC above 0.99 for two classes.

    Missing values rank as the largest or the smallest. Categories are ranked by the share of their
    rows in the second class, if they have 10 rows or more on average.
    """
    step = 1 + table.n_rows // MOST_RANKED
    labels = np.array([]) if table.labels is None else table.labels
    classes, leaks = np.unique(labels[::step]), list[str]()
    if len(classes) != 2 or not np.isin(labels, classes).all():
        return []
    is_second = labels[::step] == classes[1]
    if min(is_second.sum(), (~is_second).sum()) < FEWEST_ROWS:
        return []
    for column_id, name in enumerate(table.columns):
        distinct, groups = np.unique(table.values[::step, column_id], return_inverse=True)
        seconds, sizes = (
            np.bincount(groups, weights).astype(float) for weights in (is_second, None)
        )
        order = np.arange(len(distinct))
        firsts = sizes - seconds
        if names_of(table.categories, column_id) is not None:
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
