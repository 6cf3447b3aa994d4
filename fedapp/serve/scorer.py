"""Score rows from JSON by a run's model, as ``fedapp predict`` scores a file.

A value is of the kind that its column had in training: a number; true, false, "yes" or "no"; an ISO
date as a text; the name of a category. null is missing, and so is an unknown name, which is
reported. Times of day and durations are numbers of days. `Scorer` has a whole model in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fedapp.data.columns import Columns, in_words
from fedapp.data.convert import BOOLEANS, EPOCH, is_date
from fedapp.data.csv_errors import quoted
from fedapp.data.predictions import by_class, columns_of_frame, named_predictions
from fedapp.data.schema import Reader, Roles
from fedapp.errors import ConfigError, DataError, did_you_mean, did_you_mean_path
from fedapp.home import RUNS, display_path
from fedapp.run_files import summary_of, threshold_of
from fedapp.runs.predict import (
    Model,
    load_model,
    parts_of,
    read_as_trained,
    thresholds,
    warnings_on,
)
from fedapp.trees.categories import names_of
from fedapp.trees.objective import Floats

Row = Mapping[str, Any]
BITS = (0, 1)
DAYS = {"time": pa.time64("us"), "duration": pa.duration("us")}
MOST_DAYS = 10**6  # of a duration
DAY = timedelta(days=1) // timedelta(microseconds=1)


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
        model = self.model
        self._features = Columns.of_model(model.columns, model.categories, reader, model.kinds)
        self._reader = reader
        self.margin = model.margin_column
        self.run, summary = run_dir.resolve().name, summary_of(run_dir)
        self.name = f"{summary['strategy'] if summary else 'model'}, {self.run}"
        self.threshold = threshold_of(run_dir)
        self.version = hashlib.sha256((run_dir / "model.json").read_bytes()).hexdigest()[:12]

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
            "columns": describe_columns(self.model, self._features.trained, self.margin),
            "example": example_row(self.model, self._features.trained, self._reader, self.margin),
        }

    def score(
        self, columns: Mapping[str, Sequence[Any]]
    ) -> tuple[dict[str, Floats], list[str], dict[str, list[str]]]:
        """Scores, named as in ``fedapp predict``; of a classifier the most probable class of each
        row; and ``warnings`` of data issues. `columns` are as long as another.

        DataError if values cannot be scored; a ``RowError`` if one is not of its column's kind.
        """
        kinds = (*self._features.trained, *(["number"] if self.margin else []))
        frame = as_frame(columns, dict(zip(self.columns, kinds, strict=True)))
        table = columns_of_frame(frame, self._features, Roles(base_margin=self.margin))
        predictions = np.asarray(self._predict(self.model, table.values, table.base_margins))
        named = named_predictions(self.model.classes, self.model.n_outputs, predictions)
        notes = warnings_on(self.model, [table], table.values)
        return named, most_probable(named, self.model.classes), {"warnings": notes}


def answers_of(model: Model) -> dict[str, Any]:
    """A model's output: its objective, its classes, and the names of the scores."""
    nothing = np.empty((0, model.n_outputs), np.float32)
    return {
        "objective": model.objective,
        "classes": list(model.classes),
        "scores": list(named_predictions(model.classes, model.n_outputs, nothing)),
    }


def describe_columns(model: Model, kinds: Sequence[str], margin: str) -> list[dict[str, Any]]:
    """Names and kinds of columns, the base margin's last; `margin` is empty for none."""
    columns: list[dict[str, Any]] = []
    for column_id, (name, kind) in enumerate(zip(model.columns, kinds, strict=True)):
        of_column = names_of(model.categories, column_id)
        column = {"name": name, "kind": kind.partition(":")[0] or "number", "missing_allowed": True}
        columns.append(column if of_column is None else column | {"categories": list(of_column)})
    if margin:
        columns.append({"name": margin, "kind": "base margin", "missing_allowed": False})
    return columns


def example_row(model: Model, kinds: Sequence[str], reader: Reader, margin: str) -> dict[str, Any]:
    """A row that can be scored: the model's middle thresholds, and names that it knows."""
    points, row = thresholds(model), dict[str, Any]()
    for column_id, (name, kind) in enumerate(zip(model.columns, kinds, strict=True)):
        names = names_of(model.categories, column_id) or reader.of_feature(name).categories
        middle = float(np.median(points[column_id])) if column_id in points else 0.0
        row[name] = float(f"{middle:.6g}")
        if kind == "date":
            row[name] = str((EPOCH + timedelta(days=int(middle))).date())
        elif kind == "boolean":
            row[name] = "yes"
        elif kind == "binary":
            row[name] = 1
        elif names:
            row[name] = names[0]
    return row | ({margin: 0.0} if margin else {})


def most_probable(named: Mapping[str, Floats], classes: Sequence[str]) -> list[str]:
    """The most probable class of each row; none for a regression."""
    if not classes:
        return []
    class_ids = by_class(np.column_stack(list(named.values()))).argmax(axis=1)
    return [classes[class_id] for class_id in class_ids.tolist()]


def scored_rows(named: Mapping[str, Floats], classes: Sequence[str]) -> list[dict[str, Any]]:
    """Scores of each row and, for a classifier, its class, of which `classes` has one a row."""
    columns = zip(*(column.tolist() for column in named.values()), strict=True)
    answers: list[dict[str, Any]] = [
        {"scores": dict(zip(named, scores, strict=True))} for scores in columns
    ]
    for answer, name in zip(answers, classes, strict=bool(classes)):
        answer["class"] = name
    return answers


def columns_of_rows(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[Any]]:
    """The rows by column; a RowError if a row has other columns than these."""
    expected = set(names)
    for number, row in enumerate(rows):
        if row.keys() == expected:
            continue
        for name in row:
            if name not in expected:
                rule = f"row {number} must have only columns of the model, got {name!r}"
                raise RowError(rule + did_you_mean(name, names), name, number)
        name = next(name for name in names if name not in row)
        rule = f"row {number} must have all columns of the model (null: missing), lacks {name!r}"
        raise RowError(rule, name, number)
    return {name: [row[name] for row in rows] for name in names}


def as_frame(columns: Mapping[str, Sequence[Any]], kinds: Mapping[str, str]) -> Any:
    """Columns as a pyarrow.Table; a RowError if a value is not of its column's kind."""
    return pa.table({name: _column(name, kind, columns[name]) for name, kind in kinds.items()})


def _fits(kind: str, value: Any) -> bool:
    if isinstance(value, str):
        value = value.strip()
        is_known = value.lower() in BOOLEANS if kind == "boolean" else is_date(value)
        return is_known if kind in ("boolean", "date") else kind[:7] in ("categor", "ordinal", "")
    if isinstance(value, bool):
        return kind in ("boolean", "binary", "category", "")
    if not isinstance(value, int | float) or kind == "date":
        return False
    if kind in DAYS:
        return abs(value) < MOST_DAYS and (kind == "duration" or 0 <= value < 1)
    return value in BITS if kind == "boolean" else kind == "number" or abs(value) < float("inf")


def _column(name: str, kind: str, values: Sequence[Any]) -> Any:
    for row, value in enumerate(values):
        if value is not None and not _fits(kind, value):
            rule = f"column {name!r} must hold {in_words(kind or 'number')}, or null"
            got = quoted(value) if isinstance(value, str) else json.dumps(value)[:40]
            raise RowError(f"{rule}, got {got} in row {row}", name, row)
    try:
        return _array(kind, values)
    except (pa.ArrowException, OverflowError):
        rule = "must hold numbers below 2^63 or texts"
        raise RowError(f"column {name!r} {rule}", name) from None


def _array(kind: str, values: Sequence[Any]) -> Any:
    types = {type(value) for value in values} - {type(None)}
    if kind in ("category", "") and len(types) > 1:
        values = [None if value is None else _text(value) for value in values]
    elif kind == "boolean" and len(types) > 1:
        values = [value if value is None else _is_yes(value) for value in values]
    elif kind in DAYS:
        spans = [None if value is None else round(value * DAY) for value in values]
        return pa.array(spans, pa.int64()).cast(DAYS[kind])
    elif len(types) > 1:
        values = [None if value is None else float(value) for value in values]
    return pa.array(values)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_yes(value: Any) -> bool:
    return bool(BOOLEANS[value.strip().lower()] if isinstance(value, str) else value)


def open_scorer(run_dir: Path) -> Scorer:
    """The scorer of a run's model; a ConfigError if there is none, or its parts are at parties."""
    path = run_dir / "model.json"
    if not path.is_file():
        rule = "model must be a file of a run that has finished"
        raise ConfigError(f"{rule}, got {display_path(path)}{did_you_mean_path(run_dir, RUNS)}")
    if parts := parts_of(run_dir):
        raise ConfigError(
            "model must be whole in the run's folder to be served, got one whose parts are at the "
            f"parties ({parts.active} has the labels): after fedapp federation activate RUN their "
            "fedapp serve --site scores rows that they have matched; fedapp predict RUN predicts "
            "tables; a run with allow-export=true of every party writes the whole model"
        )
    return Scorer(run_dir)
