"""Score rows from JSON by a run's model, as ``fedapp predict`` scores a file.

A value is a number, true or false, a text, or null for a missing value. In a numeric column a text
must be an ISO date or a boolean, as in a table. In a categorical column it is a name; an unknown
name counts as missing and is reported. `Scorer` has a whole model in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fedapp.data.columns import Columns
from fedapp.data.predictions import by_class, columns_of_frame, named_predictions
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, DataError, did_you_mean, did_you_mean_path
from fedapp.home import RUNS, display_path
from fedapp.runs.predict import (
    Model,
    load_model,
    notes_on_range,
    parts_of,
    read_as_trained,
    summary_of,
)
from fedapp.trees.categories import Categories, names_of
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import Array

Row = Mapping[str, Any]
NUMBERS = {bool, int, float}


class RowError(DataError):
    """A row, counted from 0, that cannot be scored; None where no single column is at fault."""

    def __init__(self, text: str, column: str | None = None, row: int | None = None) -> None:
        super().__init__(text)
        self.column, self.row = column, row


class Scorer:
    """A whole model, loaded once from the folder of a finished run."""

    def __init__(self, run_dir: Path) -> None:
        self.model, self._predict = load_model(run_dir / "model.json")
        reader = read_as_trained(run_dir, "rows.parquet")["reader"]
        coding = self.model.categories, reader, self.model.kinds
        self._features = Columns.of_model(self.model.columns, *coding)
        self.margin = self.model.margin_column if isinstance(self.model, Ensemble) else ""
        self.name, self.threshold = model_facts(run_dir)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have: the model's, and that of base margins if any."""
        return (*self.model.columns, *([self.margin] if self.margin else []))

    @property
    def schema(self) -> dict[str, Any]:
        """Columns and the model's output."""
        return {
            "model": self.name,
            **answers_of(self.model),
            "threshold": self.threshold,
            "columns": describe_columns(self.model.columns, self.model.categories, self.margin),
        }

    def answer(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Scores of one or more rows, named as in ``fedapp predict``.

        ``rows`` has, for each, ``scores`` by name and, for a classifier, ``class``: the most likely
        one; of two, the second if its probability is above 0.5. ``warnings`` lists data issues.
        DataError if a column is missing or unknown, or a value has the wrong type; a ``RowError``
        if a single row or column is at fault.
        """
        frame = as_frame(rows, self.columns)
        table = columns_of_frame(frame, self._features, Roles(base_margin=self.margin))
        predictions = np.asarray(self._predict(self.model, table.values, table.base_margins))
        named = named_predictions(self.model.classes, self.model.n_outputs, predictions)
        answers = scored_rows(named, self.model.classes)
        notes = [note.text(True) for note in table.notes] + notes_on_range(self.model, table.values)
        return {"rows": answers, "warnings": notes}


def model_facts(run_dir: Path) -> tuple[str, float | None]:
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


def describe_columns(
    names: Sequence[str], categories: Categories, margin: str
) -> list[dict[str, Any]]:
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


def as_frame(rows: Sequence[Row], columns: Sequence[str]) -> Any:
    """The rows as a pyarrow.Table.

    RowError if a row has other columns, or a column has values of several types.
    """
    expected = set(columns)
    for number, row in enumerate(rows):
        if row.keys() == expected:
            continue
        for name in row:
            if name not in columns:
                rule = f"row {number} must have only columns of the model, got {name!r}"
                raise RowError(rule + did_you_mean(name, columns), name, number)
        name = next(name for name in columns if name not in row)
        rule = f"row {number} must have all columns of the model (null: missing), lacks {name!r}"
        raise RowError(rule, name, number)
    return pa.table({name: _column(name, [row[name] for row in rows]) for name in columns})


def _column(name: str, values: list[Any]) -> Any:
    kinds = {type(value) for value in values} - {type(None)}
    if not (kinds <= NUMBERS or kinds == {str}):
        present = [(row, value) for row, value in enumerate(values) if value is not None]
        expected = {str} if isinstance(present[0][1], str) else NUMBERS
        row, value = next((row, value) for row, value in present if type(value) not in expected)
        rule = "must be a number, true or false, a text or null, of one type in all rows"
        got = type(value).__name__
        raise RowError(f"column {name!r} {rule}, got {got} in row {row}", name, row)
    if len(kinds) > 1:
        values = [None if value is None else float(value) for value in values]
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        rule = "must hold numbers below 2^63 or texts"
        raise RowError(f"column {name!r} {rule}", name) from None


def open_scorer(run_dir: Path) -> Scorer:
    """The scorer of a run's model; a ConfigError if there is none, or its parts are at parties."""
    path = run_dir / "model.json"
    if not path.is_file():
        rule = "model must be a file of a run that has finished"
        raise ConfigError(f"{rule}, got {display_path(path)}{did_you_mean_path(run_dir, RUNS)}")
    if parts := parts_of(run_dir):
        raise ConfigError(
            "model must be whole in the run's folder to be served, got one whose parts are at the "
            f"parties ({parts['active']} has the labels): every prediction is an exchange among "
            "them. fedapp predict RUN --inference interactive, one-round or eini asks them; a run "
            "with allow-export=true of every party writes the whole model"
        )
    return Scorer(run_dir)
