"""Score rows from JSON by a run's model, as ``fedapp predict`` scores a file.

A value is of the kind that its column had in training: a number; true, false, "yes" or "no"; an ISO
date as a text; the name of a category. null is missing, and so is an unknown name, which is
reported. Times of day and durations are numbers of days. `Scorer` has a whole model in memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from threading import Semaphore
from typing import Any

import numpy as np
import pyarrow as pa
from starlette.concurrency import run_in_threadpool

from fedapp.arrays import Doubles, Floats
from fedapp.data.columns import Columns, in_words
from fedapp.data.convert import BOOLEANS, EPOCH, is_date
from fedapp.data.csv_errors import quoted
from fedapp.data.predictions import columns_of_frame, most_probable, named_predictions, score_names
from fedapp.data.schema import Roles
from fedapp.data.table import Table
from fedapp.errors import ConfigError, did_you_mean_path
from fedapp.home import RUNS, display_path
from fedapp.run_folder import RunFolder
from fedapp.runs.predict import (
    load_model,
    parts_of,
    predict,
    read_as_trained,
    thresholds,
    warnings_on,
)
from fedapp.serve.http import RefusedError, RowError
from fedapp.serve.v2 import CLASS, Answered, Asked, Tensor
from fedapp.trees.categories import names_of
from fedapp.trees.curves import Curve, boosted, curves_of, explained, intercepts_of

SCORED_AT_ONCE = 4  # admitted requests beyond 4 wait
NUMBERS = ("number", "binary", "time", "duration", "base margin")  # kinds that hold numbers
BITS = (0, 1)
DAYS = {"time": pa.time64("us"), "duration": pa.duration("us")}
MOST_DAYS = 10**6  # of a duration
DAY = timedelta(days=1) // timedelta(microseconds=1)


class Scorer:
    """A whole model, loaded once from the folder of a finished run; see ``fedapp.serve.v2.Served``.

    Rows are scored in threads.
    """

    def __init__(self, run_dir: Path) -> None:
        self.model = load_model(run_dir / "model.json")
        self._reader = read_as_trained(run_dir, "rows.parquet")["reader"]
        model, self._turns = self.model, Semaphore(SCORED_AT_ONCE)
        self._features = Columns.of_model(
            model.columns, model.categories, self._reader, model.kinds
        )
        self.margin = model.margin_column
        self.name, run = run_dir.resolve().name, RunFolder(run_dir)
        self.title = f"{run.summary['strategy'] if run.has_finished else 'model'}, {self.name}"
        self.threshold = run.threshold
        self.version = hashlib.sha256((run_dir / "model.json").read_bytes()).hexdigest()[:12]
        self.scores = score_names(model.classes, model.n_outputs)
        self.inputs: Sequence[Tensor] = list(map(_input, self._described))
        classes = [Tensor(CLASS, "BYTES")] if model.classes else []
        self.outputs: Sequence[Tensor] = [*(Tensor(name, "FP32") for name in self.scores), *classes]

    @property
    def schema(self) -> dict[str, Any]:
        """Columns and the model's output."""
        return {
            "model": self.title,
            "objective": self.model.objective,
            "classes": list(self.model.classes),
            "scores": self.scores,
            "threshold": self.threshold,
            "columns": self._described,
            "example": self._example,
        }

    @property
    def _described(self) -> list[dict[str, Any]]:
        """Names and kinds of columns, the base margin's last."""
        columns: list[dict[str, Any]] = []
        for column_id, (name, kind) in enumerate(self._kinds):
            names = names_of(self.model.categories, column_id)
            kind = kind.partition(":")[0] or "number"
            column = {"name": name, "kind": kind, "missing_allowed": True}
            columns.append(column if names is None else column | {"categories": list(names)})
        if self.margin:
            columns.append({"name": self.margin, "kind": "base margin", "missing_allowed": False})
        return columns

    @property
    def _example(self) -> dict[str, Any]:
        """A row that can be scored: the model's middle thresholds, and names that it knows."""
        points, row = thresholds(self.model), dict[str, Any]()
        for column_id, (name, kind) in enumerate(self._kinds):
            names = names_of(self.model.categories, column_id)
            names = names or self._reader.of_feature(name).categories
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
        return row | ({self.margin: 0.0} if self.margin else {})

    @property
    def _kinds(self) -> Iterable[tuple[str, str]]:
        """Each column of the model, and its kind in training."""
        return zip(self.model.columns, self._features.trained, strict=True)

    def score(
        self, columns: Mapping[str, Sequence[Any]]
    ) -> tuple[dict[str, Floats], list[str], dict[str, list[str]]]:
        """Scores, named as in ``fedapp predict``; of a classifier the most probable class of each
        row; and ``warnings`` of data issues. `columns` are as long as another.

        DataError if values cannot be scored; a ``RowError`` if one is not of its column's kind.
        """
        table = self._table(columns)
        predictions = np.asarray(predict(self.model, table.values, table.base_margins))
        named = named_predictions(self.model.classes, self.model.n_outputs, predictions)
        notes = warnings_on(self.model, [table], table.values)
        return named, most_probable(self.model.classes, predictions), {"warnings": notes}

    def _table(self, columns: Mapping[str, Sequence[Any]]) -> Table:
        kinds = dict(self._kinds) | ({self.margin: "number"} if self.margin else {})
        frame = as_frame(columns, kinds)
        return columns_of_frame(frame, self._features, Roles(base_margin=self.margin))

    @cached_property
    def _curves(self) -> tuple[Doubles, list[Curve]]:
        model = boosted(self.model)
        return intercepts_of(model), curves_of(model)

    def _explained(self, columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
        try:
            intercepts, curves = self._curves
        except ConfigError as error:
            raise RefusedError(422, f"explain must be left out for this model: {error}") from None
        table = self._table(columns)
        return explained(self.model.classes, intercepts, curves, table.values, table.base_margins)

    async def answer(self, asked: Asked) -> Answered:
        """Scores; raises RefusedError for a way or purpose: it has one way, and no log."""
        for name, text in (("purpose", asked.purpose), ("way", asked.way)):
            if text:
                rule = f"{name} must be left out for a model that is whole"
                raise RefusedError(422, f"{rule}, got {text[:40]!r}")

        def scored() -> Answered:
            with self._turns:
                facts = self._explained(asked.columns) if asked.explains else ()
                return Answered(*self.score(asked.columns), facts)

        return await run_in_threadpool(scored)

    async def ready(self) -> str:
        """No reason why it is not: it is loaded."""
        return ""


def _input(column: Mapping[str, Any]) -> Tensor:
    is_number = column["kind"] in NUMBERS and "categories" not in column
    datatype = "FP64" if is_number else "BOOL" if column["kind"] == "boolean" else "BYTES"
    return Tensor(column["name"], datatype)


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
        raise RowError(f"column {name!r} must hold numbers below 2^63 or texts", name) from None


def _array(kind: str, values: Sequence[Any]) -> Any:
    types = {type(value) for value in values} - {type(None)}
    if kind in ("category", "") and len(types) > 1:
        values = [None if value is None else _text(value) for value in values]
    elif kind == "boolean" and len(types) > 1:
        texts = (v.strip().lower() if isinstance(v, str) else v for v in values)
        values = [v if v is None else bool(BOOLEANS.get(v, v)) for v in texts]
    elif kind in DAYS:
        spans = [None if value is None else round(value * DAY) for value in values]
        return pa.array(spans, pa.int64()).cast(DAYS[kind])
    elif len(types) > 1:
        values = [None if value is None else float(value) for value in values]
    return pa.array(values)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
