"""What a table holds and what a run would do with it, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tomli_w

from fedapp.data.build import DROPPED, is_unlabelled, notes_on_file, notes_on_types
from fedapp.data.datasets import dataset_names, source_frame
from fedapp.data.load import text_file
from fedapp.data.notes import Note, note_on_unlabelled
from fedapp.data.schema import Declared, Reader, Roles
from fedapp.data.schema_file import SEPARATORS
from fedapp.data.typed import EPOCH, Typed, UntypedError, typed

LONGEST_EXAMPLE = 24
REFUSED = "are refused by a run; missing-label=drop drops them"
USES = {
    "number": "feature",
    "boolean": "feature, 1 or 0",
    "date": "feature, days since 1970",
    "ordinal": "feature, in the order given",
    "category": "feature, categories",
}


@dataclass(frozen=True, slots=True)
class Described:
    """One column.

    Parameters
    ----------
    name : in the run.
    type : one of those of a schema, "text" where it is none, "empty" without a value.
    n_missing, n_distinct : rows without a value, and values.
    span : least and largest value, or first and last name; empty without a value.
    example : the first value, as it is written.
    use : what a run does with it, or why it is refused.
    refused : whether a run refuses it.
    names : of its categories.
    """

    name: str
    type: str
    n_missing: int
    n_distinct: int
    span: str
    example: str
    use: str
    refused: bool = False
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Description:
    """A table.

    Parameters
    ----------
    columns : all of them, in the order of the file.
    notes : what is said of how the table is read.
    roles, reader : by which it was read.
    delimiter : of a CSV file; empty for others.
    refused : why a run refuses the table as a whole; empty where it does not.
    """

    n_rows: int
    columns: tuple[Described, ...]
    notes: tuple[str, ...]
    roles: Roles
    reader: Reader
    delimiter: str
    refused: str = ""


def describe(source: str, roles: Roles, reader: Reader) -> Description:
    """Look at every column of a table.

    Parameters
    ----------
    source : as the setting ``data``.

    Raises
    ------
    ConfigError, DataError : there is no such table, or it cannot be read.
    """
    frame, roles, reader = source_frame(source, roles, reader)
    text = None if source in dataset_names() else text_file(Path(source), reader)
    found: dict[str, Typed] = {}
    columns = []
    for place, name in enumerate(frame.column_names):
        column = frame.column(place)
        try:
            one = typed(
                column, reader.of_feature(name), reader.missing, reader.decimal, text is not None
            )
            found[name] = one
            columns.append(_described(name, column, one, _role(name, roles)))
        except UntypedError as error:
            columns.append(_refused(name, column, error, _role(name, roles)))
    features = {name: one for name, one in found.items() if not _role(name, roles)}
    n_unlabelled = int(is_unlabelled(frame[roles.label]).sum()) if roles.label in found else 0
    told = roles.label, n_unlabelled, frame.num_rows
    unlabelled = note_on_unlabelled(*told, DROPPED if roles.drop_unlabelled else REFUSED)
    notes: list[Note] = [*notes_on_file(text), *unlabelled, *notes_on_types(features)]
    return Description(
        frame.num_rows,
        tuple(columns),
        tuple(note.told(shares_names=True) for note in notes),
        roles,
        reader,
        text.reader.delimiter if text else "",
        refused="" if roles.drop_unlabelled or not n_unlabelled else "rows without a label",
    )


def schema_text(described: Description) -> str:
    """The schema of a table as it was found, in TOML, to be changed.

    Categories and the values of text are not listed, but for the names of a category, of which
    others than those named would count as missing.
    """
    reader, roles = described.reader, described.roles
    marks = {mark: name for name, mark in SEPARATORS.items()}
    head: dict[str, Any] = {
        "separator": marks.get(described.delimiter, ""),
        "header": reader.header,
        "names": list(reader.columns),
        "decimal": reader.decimal,
        "encoding": reader.encoding,
        "missing": list(reader.missing),
        "label": roles.label,
        "id": roles.id_column,
        "weight": roles.weight,
        "base-margin": roles.base_margin,
        "missing-label": "drop" if roles.drop_unlabelled else "refuse",
        "positive-label": "",
        "columns": {
            one.name if not (own := reader.of_feature(one.name)).rename else own.name: _section(
                one, own, described.roles
            )
            for one in described.columns
        },
    }
    return COMMENT + tomli_w.dumps(head)


COMMENT = """\
# What `fedapp data describe` found. Change it and name this file: schema = "FILE.toml".
# Of a column: type = "number", "category", "ordinal" (with order = [lowest, ..., highest]),
# "boolean", "date" or "drop"; missing = [values that mean none]; name = "in the run";
# categories = [the names all parties have]; codes = {value-in-the-file = "name"}.
"""


def _section(one: Described, declared: Declared, roles: Roles) -> dict[str, Any]:
    """What the schema says of a column."""
    own = declared.type or one.type
    if one.name in roles.drop or (one.refused and one.type == "text"):
        own = "drop"
    section: dict[str, Any] = {"type": "" if own in ("text", "empty") else own}
    lists: Mapping[str, Sequence[str]] = {
        "order" if declared.type == "ordinal" else "categories": declared.categories,
        "missing": declared.missing,
    }
    section |= {field: list(names) for field, names in lists.items() if names}
    if declared.rename:
        section["name"] = declared.rename
    if declared.codes:
        section["codes"] = dict(declared.codes)
    return section


def _role(name: str, roles: Roles) -> str:
    """What a column is for, where it is no feature."""
    if name in roles.drop:
        return "dropped"
    return next((role for role, column in roles.named().items() if column == name), "")


def _described(name: str, column: Any, one: Typed, role: str) -> Described:
    n_rows, names = len(column), one.names or ()
    values = one.column
    n_missing = int(values.null_count) + _n_nan(values)
    distinct = pc.unique(values).drop_null()
    n_distinct = len(distinct) - min(_n_nan(distinct), 1)
    kind = one.kind if n_missing < n_rows else "empty"
    use = role or ("feature without values" if kind == "empty" else USES[kind])
    if not role and n_distinct == 1:
        use += ", the same in every row"
    span = _span(one, values) if n_distinct else ""
    return Described(
        name, kind, n_missing, n_distinct, span, _example(column), use, names=tuple(names)
    )


def _refused(name: str, column: Any, error: UntypedError, role: str) -> Described:
    """A column that is of no type; no matter where it has a role."""
    use = role or f"refused: {error.found}"
    n_distinct = len(pc.unique(column).drop_null())
    return Described(
        name, "text", column.null_count, n_distinct, "", _example(column), use, refused=not role
    )


def _n_nan(values: Any) -> int:
    if not pa.types.is_floating(values.type):
        return 0
    return int(pc.sum(pc.is_nan(values)).as_py() or 0)


def _span(one: Typed, values: Any) -> str:
    """Least and largest value."""
    if one.names:
        return f"{_cut(one.names[0])} .. {_cut(one.names[-1])}"
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    known = np.asarray(values.drop_null().to_numpy(), dtype=np.float64)
    low, high = np.nanmin(known), np.nanmax(known)
    if one.kind == "date":
        return " .. ".join(_written_day(day) for day in (low, high))
    return f"{low:.6g} .. {high:.6g}"


def _written_day(day: float) -> str:
    """A day since 1970 as a date."""
    seconds = np.datetime64(EPOCH.replace(tzinfo=None), "s") + np.timedelta64(
        round(day * 86400), "s"
    )
    text = str(seconds)
    return text.removesuffix("T00:00:00")


def _example(column: Any) -> str:
    """The first value, as it is written."""
    known = column.drop_null()
    if pa.types.is_binary(known.type):
        return ""
    return _cut(str(known[0].as_py())) if len(known) else ""


def _cut(text: str) -> str:
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return shown if len(shown) <= LONGEST_EXAMPLE else f"{shown[: LONGEST_EXAMPLE - 3]}..."
