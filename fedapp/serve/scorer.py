"""Score rows from JSON by a run's model, as ``fedapp predict`` scores a file.

A value is a number, true or false, a text, or null for a missing value. In a numeric column a text
must be an ISO date or a boolean, as in a table. In a categorical column it is a name; an unknown
name counts as missing and is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fedapp.data.predictions import by_class, columns_of_frame, in_codes_of, named_predictions
from fedapp.data.schema import Roles
from fedapp.errors import DataError, did_you_mean
from fedapp.runs.predict import Model, load_model, notes_on_range, read_as_trained, summary_of
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import Array
from fedapp.trees.sets import Categories, names_of

Row = Mapping[str, Any]
NUMBERS = {bool, int, float}


class RowError(DataError):
    """A row that cannot be scored; None where no single column, row or party is at fault."""

    def __init__(
        self,
        message: str,
        column: str | None = None,
        row: int | None = None,  # counts from 0
        party: str | None = None,
    ) -> None:
        super().__init__(message)
        self.column, self.row, self.party = column, row, party


class Scorer:
    """A whole model, loaded once from the folder of a finished run."""

    def __init__(self, run_dir: Path) -> None:
        self.model, self._predict = load_model(run_dir / "model.json")
        self._reader = read_as_trained(run_dir, "rows.parquet")["reader"]
        self.margin = self.model.margin_column if isinstance(self.model, Ensemble) else ""
        self.name, self.threshold = told_of(run_dir)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have: the model's, and that of base margins if any."""
        return (*self.model.columns, *([self.margin] if self.margin else []))

    @property
    def health(self) -> dict[str, Any]:
        """Nothing beyond the model's name."""
        return {}

    @property
    def schema(self) -> dict[str, Any]:
        """Columns and the model's output."""
        return {
            "model": self.name,
            **answers_of(self.model),
            "threshold": self.threshold,
            "columns": told_columns(self.model.columns, self.model.categories, self.margin),
        }

    def answer(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Scores of one or more rows, named as in ``fedapp predict``.

        Returns
        -------
        ``rows`` has, for each, ``scores`` by name and, for a classifier, ``class``: the most likely
        one; of two, the second if its probability is above 0.5. ``warnings`` lists data issues.

        Raises
        ------
        DataError : a column is missing or unknown, or a value has the wrong type; a ``RowError`` if
            a single row or column is at fault.
        """
        frame = as_frame(rows, self.columns)
        roles = Roles(base_margin=self.margin)
        categories = self.model.categories
        table = columns_of_frame(frame, self.model.columns, roles, self._reader, categories)
        coded = in_codes_of(table, categories)
        predictions = np.asarray(self._predict(self.model, coded.values, coded.base_margins))
        named = named_predictions(self.model.classes, self.model.n_outputs, predictions)
        answers = scored_rows(named, self.model.classes)
        notes = [note.told(True) for note in coded.notes] + notes_on_range(self.model, coded.values)
        return {"rows": answers, "warnings": notes}


def told_of(run_dir: Path) -> tuple[str, float | None]:
    """A run's display name, and its threshold."""
    summary = summary_of(run_dir)
    name = f"{summary.get('strategy', 'model')}, {run_dir.resolve().name}"
    return name, (summary.get("threshold") or {}).get("value")


def answers_of(model: Model) -> dict[str, Any]:
    """A model's output: its objective, its classes, and the names of the scores."""
    nothing = np.empty((0, model.n_outputs), np.float32)
    return {
        "objective": model.objective,
        "classes": list(model.classes),
        "scores": list(named_predictions(model.classes, model.n_outputs, nothing)),
    }


def told_columns(names: Sequence[str], categories: Categories, margin: str) -> list[dict[str, Any]]:
    """Names and types of columns, the base margin's last; `margin` is empty for none."""
    columns: list[dict[str, Any]] = []
    for column_id, name in enumerate(names):
        categories_of_column = names_of(categories, column_id)
        column = {"name": name, "kind": "number", "missing_allowed": True}
        if categories_of_column is not None:
            column |= {"kind": "category", "categories": list(categories_of_column)}
        columns.append(column)
    if margin:
        columns.append({"name": margin, "kind": "base margin", "missing_allowed": False})
    return columns


def scored_rows(named: Mapping[str, Array], classes: Sequence[str]) -> list[dict[str, Any]]:
    """Scores of each row and, for a classifier, its most probable class."""
    columns = zip(*(column.tolist() for column in named.values()), strict=True)
    answers: list[dict[str, Any]] = [
        {"scores": dict(zip(named, each, strict=True))} for each in columns
    ]
    if classes:
        places = by_class(np.column_stack(list(named.values()))).argmax(axis=1)
        for each, place in zip(answers, places.tolist(), strict=True):
            each["class"] = classes[place]
    return answers


def as_frame(rows: Sequence[Row], columns: Sequence[str], party: str | None = None) -> Any:
    """The rows as a pyarrow.Table; `party` is None for a whole model.

    Raises
    ------
    RowError : a row has other columns, or a column has values of several types.
    """
    expected = set(columns)
    for number, row in enumerate(rows):
        if row.keys() == expected:
            continue
        owner = "the model" if party is None else party
        for name in row:
            if name not in columns:
                rule = f"row {number} must have only columns of {owner}, got {name!r}"
                raise RowError(rule + did_you_mean(name, columns), name, number, party)
        name = next(name for name in columns if name not in row)
        rule = f"row {number} must have all columns of {owner} (null: missing), lacks {name!r}"
        raise RowError(rule, name, number, party)
    return pa.table({name: _column(name, [row[name] for row in rows], party) for name in columns})


def _column(name: str, values: list[Any], party: str | None) -> Any:
    source = f"column {name!r}" if party is None else f"column {name!r} of {party}"
    kinds = {type(value) for value in values} - {type(None)}
    if not (kinds <= NUMBERS or kinds == {str}):
        present = [(row, value) for row, value in enumerate(values) if value is not None]
        expected = {str} if isinstance(present[0][1], str) else NUMBERS
        row, value = next((row, value) for row, value in present if type(value) not in expected)
        rule = "must be a number, true or false, a text or null, of one type in all rows"
        got = type(value).__name__
        raise RowError(f"{source} {rule}, got {got} in row {row}", name, row, party)
    if len(kinds) > 1:
        values = [None if value is None else float(value) for value in values]
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        rule = "must hold numbers below 2^63 or texts"
        raise RowError(f"{source} {rule}", name, party=party) from None
