"""Rows as JSON writes them, scored by a run's model as ``fedapp predict`` scores those of a file.

A value is a number, true or false, a text, or null, which means that there is none. In a column of
numbers a text must be a date (ISO) or a boolean, as in a table; in one of categories it is a name,
and a name that the model does not know counts as missing, and is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fedapp.data.categories import names_of
from fedapp.data.predictions import by_class, columns_of_frame, in_codes_of, named_predictions
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, DataError
from fedapp.home import shown
from fedapp.names import near
from fedapp.predict import load_model, parts_of, summary_of, trained_settings
from fedapp.site.config import table_settings
from fedapp.trees.model import Ensemble

Row = Mapping[str, Any]
NUMBERS = {bool, int, float}


class RowError(DataError):
    """A row that cannot be scored.

    Parameters
    ----------
    message : the rule, with the column.
    column, row : at fault; the row counts from 0. None where it is no single one.
    """

    def __init__(self, message: str, column: str | None = None, row: int | None = None) -> None:
        super().__init__(message)
        self.column, self.row = column, row


class Scorer:
    """A whole model, loaded once.

    Parameters
    ----------
    run_dir : folder of a finished run.

    Raises
    ------
    ConfigError : it holds no model, or one whose parts lie at the parties.
    """

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / "model.json"
        if not path.is_file():
            rule = "model must be a file of a run that has finished"
            raise ConfigError(f"{rule}, got {shown(path)}")
        if parts := parts_of(run_dir):
            raise ConfigError(_parts_rule(parts))
        self.model, self._predict = load_model(path)
        trained = trained_settings(run_dir)
        self._reader = table_settings({**trained, "data": "rows.parquet"}, is_shared=True)["reader"]
        self.margin = self.model.margin_column if isinstance(self.model, Ensemble) else ""
        summary = summary_of(run_dir)
        self.name = f"{summary.get('strategy', 'model')}, {run_dir.resolve().name}"
        self.threshold = (summary.get("threshold") or {}).get("value")

    @property
    def columns(self) -> tuple[str, ...]:
        """What every row must have: the model's columns, and that of base margins if it has one."""
        return (*self.model.columns, *([self.margin] if self.margin else []))

    @property
    def schema(self) -> dict[str, Any]:
        """Columns, what they hold, and what the model answers."""
        categories = self.model.categories
        columns: list[dict[str, Any]] = []
        for place, name in enumerate(self.model.columns):
            names = names_of(categories, place)
            column = {"name": name, "kind": "number", "missing_allowed": True}
            if names is not None:
                column |= {"kind": "category", "categories": list(names)}
            columns.append(column)
        if self.margin:
            columns.append({"name": self.margin, "kind": "base margin", "missing_allowed": False})
        nothing = np.empty((0, self.model.n_outputs), np.float32)
        named = named_predictions(self.model.classes, self.model.n_outputs, nothing)
        return {
            "model": self.name,
            "objective": self.model.objective,
            "classes": list(self.model.classes),
            "scores": list(named),
            "threshold": self.threshold,
            "columns": columns,
        }

    def answer(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Scores of rows, one or more, under the names that ``fedapp predict`` writes.

        Returns
        -------
        ``rows`` has, for each, ``scores`` by name and, for a model of classes, ``class``: the most
        probable one, of two the second where its probability is above 0.5. ``warnings`` says what
        is odd about the values.

        Raises
        ------
        DataError : a row lacks a column or has one that the model does not know, or a value is of
            the wrong type; a ``RowError`` where it is one row or one column.
        """
        frame = self._frame(rows)
        roles = Roles(base_margin=self.margin)
        categories = self.model.categories
        table = columns_of_frame(frame, self.model.columns, roles, self._reader, categories)
        told = in_codes_of(table, categories)
        found = np.asarray(self._predict(self.model, told.values, told.base_margins))
        named = named_predictions(self.model.classes, self.model.n_outputs, found)
        scores = [
            dict(zip(named, each, strict=True))
            for each in zip(*(column.tolist() for column in named.values()), strict=True)
        ]
        answers: list[dict[str, Any]] = [{"scores": each} for each in scores]
        if classes := self.model.classes:
            for each, place in zip(answers, by_class(found).argmax(axis=1).tolist(), strict=True):
                each["class"] = classes[place]
        return {"rows": answers, "warnings": [note.told(True) for note in told.notes]}

    def _frame(self, rows: Sequence[Row]) -> Any:
        """The rows as columns of one type each."""
        wanted = self.columns
        for number, row in enumerate(rows):
            if row.keys() != set(wanted):
                self._refuse_names(row, number)
        return pa.table({name: _column(name, [row[name] for row in rows]) for name in wanted})

    def _refuse_names(self, row: Row, number: int) -> None:
        """Raise the error on a row's columns."""
        for name in row:
            if name not in self.columns:
                rule = f"row {number} must have columns of the model alone, got {name!r}"
                raise RowError(rule + near(name, self.columns), name, number)
        name = next(name for name in self.columns if name not in row)
        rule = f"row {number} must have all columns of the model (null: missing), lacks {name!r}"
        raise RowError(rule, name, number)


def _column(name: str, values: list[Any]) -> Any:
    """Values as an Arrow array.

    Raises
    ------
    RowError : they are not of one type that a table has.
    """
    kinds = {type(value) for value in values} - {type(None)}
    if not (kinds <= NUMBERS or kinds == {str}):
        known = [(row, value) for row, value in enumerate(values) if value is not None]
        wanted = {str} if isinstance(known[0][1], str) else NUMBERS
        row, value = next((row, value) for row, value in known if type(value) not in wanted)
        rule = "must be a number, true or false, a text or null, of one type in all rows"
        got = type(value).__name__
        raise RowError(f"column {name!r} {rule}, got {got} in row {row}", name, row)
    if len(kinds) > 1:
        values = [None if value is None else float(value) for value in values]
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        raise RowError(f"column {name!r} must hold numbers below 2^63 or texts", name) from None


def _parts_rule(parts: Mapping[str, Any]) -> str:
    """Why a divided model is not served, and what can be done."""
    return (
        "run must have its whole model in its folder to be served, got one whose parts lie at the "
        f"parties ({parts['active']} has the labels): every prediction is an exchange among them. "
        "fedapp predict RUN --inference interactive, one-round or eini asks them; a run with "
        "allow-export=true of every party writes the whole model"
    )
