"""Describe a table and what a run would do with it, for `fedapp data describe`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tomli_w

from fedapp.data.convert import (
    EPOCH,
    Column,
    Converted,
    UntypedError,
    convert,
    holds_numbers,
    is_text,
)
from fedapp.data.datasets import source_frame
from fedapp.data.large import lasting
from fedapp.data.notes import (
    Note,
    note_on_unlabelled,
    notes_on_file,
    notes_on_types,
    notes_on_writing,
)
from fedapp.data.schema import SEPARATORS, Reader, Roles
from fedapp.data.table import DROPPED, read_role
from fedapp.errors import as_plain

LONGEST_EXAMPLE = 24
REFUSED = "are refused by a run; missing-label=drop drops them"
USES = {
    "number": "feature",
    "boolean": "feature, 1 or 0",
    "date": "feature, days since 1970",
    "time": "feature, days",
    "duration": "feature, days",
    "ordinal": "feature, in the order given",
    "category": "feature, categories",
}
COMMENT = """\
# What `fedapp data describe` found. Change it and name this file: schema = "FILE.toml".
# Of a column: type = "number", "category", "ordinal" (with order = [lowest, ..., highest]),
# "boolean", "date" or "drop"; missing = [values that mean none]; name = "in the run";
# categories = [the names all parties have]; codes = {value-in-the-file = "name"}.
"""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column, as in JSON."""

    name: str  # as in the table
    type: str  # as in a schema; `text` if none fits, `empty` without values
    missing: int  # rows without a value
    distinct: int  # distinct values
    range: list[float] | list[str]  # smallest and largest value, or first and last; empty of none
    example: str  # first value, as written
    in_a_run: str  # what a run does with it, or why it refuses it
    refused: bool  # whether a run refuses it

    @property
    def span(self) -> str:
        """The ends as a text."""
        return " .. ".join(f"{end:.6g}" if isinstance(end, float) else end for end in self.range)


@dataclass(frozen=True, slots=True)
class Description:
    """A table."""

    n_rows: int
    columns: tuple[TableColumn, ...]  # in the order of the file
    facts: tuple[str, ...]  # how the table was read
    warnings: tuple[str, ...]
    roles: Roles
    reader: Reader
    delimiter: str  # of a CSV file; empty for others
    refused: str = ""  # why a run refuses the table as a whole


def _texts(notes: Iterable[Note]) -> tuple[str, ...]:
    return tuple(note.text(shares_names=True) for note in notes)


def describe(source: str, roles: Roles, reader: Reader) -> Description:
    """Describe every column of what the setting ``data`` names (`source`)."""
    frame, roles, text, reader = source_frame(source, roles, reader)
    features: list[Converted] = []
    n_unlabelled, columns = 0, list[TableColumn]()
    used = {column: role for role, column in reversed(roles.columns())}  # its first role
    used |= dict.fromkeys(roles.drop, "dropped")
    for index, name in enumerate(frame.column_names):
        values = frame.column(index)
        role = used.get(name, "")
        try:
            column = Column(name, reader.of_feature(name))
            read = partial(convert, column, frame, index, reader, text is not None)
            converted = read()
            columns.append(_described(converted.column, values, converted.numbers, role))
            if not role:
                features.append(lasting(frame, converted, read))
            if role == "label":
                labels = read_role(frame, role, name, reader, text)
                n_unlabelled = _n_missing(labels.numbers)
        except UntypedError as error:
            n_missing = values.null_count
            if not (is_text(values.type) or holds_numbers(values.type)):
                values = pa.array(map(str, values.to_pylist())).filter(values.is_valid())
            n_distinct = len(pc.unique(values).drop_null())
            use = role or f"refused: {error.found}"  # only a feature is refused
            counts = n_missing, n_distinct, list[str]()
            columns.append(TableColumn(name, "text", *counts, _example(values), use, not role))
    what = DROPPED if roles.drop_unlabelled else REFUSED
    unlabelled = note_on_unlabelled(
        roles.label, n_unlabelled, frame.num_rows, what, is_fact=roles.drop_unlabelled
    )
    notes: list[Note] = [*notes_on_file(text), *unlabelled, *notes_on_types(features)]
    notes += notes_on_writing(text, features)
    return Description(
        frame.num_rows,
        tuple(columns),
        _texts(note for note in notes if note.is_fact),
        _texts(note for note in notes if not note.is_fact),
        roles,
        reader,
        text.reader.delimiter if text else "",
        refused="" if roles.drop_unlabelled or not n_unlabelled else "rows without a label",
    )


def schema_text(described: Description) -> str:
    """Schema of a table that was read without one, in TOML, to be edited.

    Lists no categories: any other name would count as missing.
    """
    reader, roles = described.reader, described.roles
    marks = {mark: name for name, mark in SEPARATORS.items()}
    head: dict[str, Any] = {
        "separator": marks.get(described.delimiter, ""),
        "header": reader.header,
        "names": list(reader.columns),
        "decimal": reader.decimal,
        "encoding": reader.encoding,
        "missing": [],
        "label": roles.label,
        "id": roles.id_column,
        "weight": roles.weight,
        "base-margin": roles.base_margin,
        "order-by": "",
        "event": "",
        "qid": "",
        "missing-label": "drop" if roles.drop_unlabelled else "refuse",
        "positive-label": "",
        "columns": {column.name: {"type": _type_of(column, roles)} for column in described.columns},
    }
    return COMMENT + tomli_w.dumps(head)


def _type_of(column: TableColumn, roles: Roles) -> str:
    """Type of a column in a schema; empty: by its values."""
    if column.name in roles.drop or (column.refused and column.type == "text"):
        return "drop"
    return "" if column.type in ("text", "empty") else column.type


def _described(column: Column, stored: Any, values: Any, role: str) -> TableColumn:
    n_missing, distinct = _n_missing(values), pc.unique(values)
    n_distinct = len(distinct) - _n_missing(distinct)
    kind = column.kind if n_missing < len(stored) else "empty"
    use = role or ("feature without values" if kind == "empty" else USES[kind])
    if not role and n_distinct == 1:
        use += ", the same in every row"
    ends = _ends(column, values) if n_distinct else []
    return TableColumn(
        column.name, kind, n_missing, n_distinct, ends, _example(stored), use, refused=False
    )


def _n_missing(values: Any) -> int:
    return int(pc.sum(pc.is_null(values, nan_is_null=True)).as_py() or 0)


def _ends(column: Column, values: Any) -> list[float] | list[str]:
    if column.names:
        return [as_plain(column.names[end], LONGEST_EXAMPLE) for end in (0, -1)]
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    numbers = np.asarray(values.drop_null().to_numpy(), dtype=np.float64)
    ends = [float(np.nanmin(numbers)), float(np.nanmax(numbers))]
    if column.kind == "date":
        epoch = np.datetime64(EPOCH.replace(tzinfo=None), "s")
        texts = (str(epoch + np.timedelta64(round(day * 86400), "s")) for day in ends)
        return [text.removesuffix("T00:00:00") for text in texts]
    return ends


def _example(column: Any) -> str:
    values = column.drop_null()
    if pa.types.is_binary(values.type):
        return ""
    return as_plain(str(values[0].as_py()), LONGEST_EXAMPLE) if len(values) else ""
