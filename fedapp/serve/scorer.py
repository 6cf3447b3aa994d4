"""Score rows from JSON by a run's model, as ``fedapp predict`` scores a file.

A value is a number, true or false, a text, or null for a missing value. In a numeric column a text
must be an ISO date or a boolean, as in a table. In a categorical column it is a name; an unknown
name counts as missing and is reported. `Scorer` has a whole model in memory; `DividedScorer` lets
the simulated parties of a divided model predict, in a run for each request.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from fedapp.client_app import SiteApp
from fedapp.data.predictions import by_class, columns_of_frame, in_codes_of, named_predictions
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, DataError, PartyError, did_you_mean, did_you_mean_path
from fedapp.home import RUNS, display_path, home, private_folder
from fedapp.runs.clean import predictions_folder
from fedapp.runs.engines import SIMULATED
from fedapp.runs.local import run_local
from fedapp.runs.predict import (
    Model,
    load_model,
    notes_on_range,
    parts_of,
    read_as_trained,
    summary_of,
)
from fedapp.runs.session import settings_to_predict
from fedapp.settings import Settings
from fedapp.site.store import LiveStores, Store, locked, read_part
from fedapp.trees.categories import Categories, names_of
from fedapp.trees.divided import categories_of, model_of
from fedapp.trees.forest.model import BaggedForest
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import Array

Row = Mapping[str, Any]
NUMBERS = {bool, int, float}
FOREST, BOOSTED = "one-round", "interactive"  # default inference with a divided model
SUFFIX = ".parquet"


class RowError(DataError):
    """A row, counted from 0, that cannot be scored; None where no single column is at fault."""

    def __init__(
        self, text: str, column: str | None = None, row: int | None = None, party: str | None = None
    ) -> None:
        super().__init__(text)
        self.column, self.row, self.party = column, row, party


class Scorer:
    """A whole model, loaded once from the folder of a finished run."""

    def __init__(self, run_dir: Path) -> None:
        self.model, self._predict = load_model(run_dir / "model.json")
        self._reader = read_as_trained(run_dir, "rows.parquet")["reader"]
        self.margin = self.model.margin_column if isinstance(self.model, Ensemble) else ""
        self.name, self.threshold = model_facts(run_dir)

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
        roles = Roles(base_margin=self.margin)
        categories = self.model.categories
        table = columns_of_frame(frame, self.model.columns, roles, self._reader, categories)
        coded = in_codes_of(table, categories)
        predictions = np.asarray(self._predict(self.model, coded.values, coded.base_margins))
        named = named_predictions(self.model.classes, self.model.n_outputs, predictions)
        answers = scored_rows(named, self.model.classes)
        notes = [note.text(True) for note in coded.notes] + notes_on_range(self.model, coded.values)
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


def as_frame(rows: Sequence[Row], columns: Sequence[str], party: str | None = None) -> Any:
    """The rows as a pyarrow.Table; `party` is None for a whole model.

    RowError if a row has other columns, or a column has values of several types.
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


# A row is an object of columns by party. Each request becomes a prediction run on the local engine
# with tables in memory: a party gets its columns, and the messages are those of ``fedapp predict``.
# All of it passes through this process, so nothing is hidden from it.
class DividedScorer:
    """A divided model of a simulated run.

    ``parts``, from ``parts_of``, names the parties that have its parts. ``inference`` is the way to
    predict, by default one-round for a forest, else interactive; ``overrides`` are settings of it.
    ConfigError if the run is not simulated, or inference or a setting does not fit the model;
    DataError if a part is not on this machine.
    """

    def __init__(
        self,
        run_dir: Path,
        parts: Mapping[str, Any],
        inference: str = "",
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        engine = summary_of(run_dir).get("engine", "")
        if engine not in SIMULATED:
            raise ConfigError(
                "run must be of engine local or simulation to be served, or have its whole model "
                f"in its folder, got one of engine {engine or 'unknown'} whose parts are at the "
                f"parties ({parts['active']} has the labels): every prediction is an exchange "
                "among them. fedapp predict RUN --inference interactive, one-round or eini asks "
                "them; a run with allow-export=true of every party writes the whole model"
            )
        names = sorted((parts["active"], *parts["passive"]))
        documents: dict[str, Mapping[str, Any]] = {}
        for name in names:
            try:
                documents[name] = read_part(home() / "sites" / name / parts["model_id"])
            except DataError as error:
                raise error.at(name) from None
        self._active = parts["active"]
        self._model = model_of(documents[self._active])
        # Columns that every row must have, by party.
        self.parties = {
            name: describe_columns(
                part["columns"], categories_of(part), part.get("base_margin", "")
            )
            for name, part in documents.items()
        }
        is_forest = isinstance(self._model, BaggedForest)
        self.inference = inference or (FOREST if is_forest else BOOSTED)
        if self.inference == FOREST and not is_forest:
            raise ConfigError(
                "inference must be interactive or eini for a boosted model, whose structure a "
                f"passive party does not know, got {FOREST}"
            )
        self._settings = self._settings_of(run_dir, parts, overrides or {})
        self.name, self.threshold = model_facts(run_dir)
        self._turn = Lock()

    def _settings_of(
        self, run_dir: Path, parts: Mapping[str, Any], overrides: Mapping[str, Any]
    ) -> Settings:
        """Settings of the prediction runs; row numbers serve as ids."""
        for name in overrides:
            if not name.startswith(f"{self.inference}."):
                raise ConfigError(f"-c must set what {self.inference} reads, got {name}")
        settings = {
            "data": ",".join(f"{name}=rows-of-{name}" for name in self.parties),
            "id": "",
            "label": "",
            "weight": "",
            "align": "ordered",
            **overrides,
            "strategy": self.inference,
        }
        return settings_to_predict(run_dir, parts, settings, f"rows{SUFFIX}", "local")

    @property
    def health(self) -> dict[str, Any]:
        """Where the model's parts are."""
        return {"parts_at": list(self.parties), "inference": self.inference}

    @property
    def schema(self) -> dict[str, Any]:
        """Parties, their columns, and the model's output."""
        return {
            "model": self.name,
            **answers_of(self._model),
            "threshold": self.threshold,
            "inference": self.inference,
            "parties": [
                {"name": name, "columns": columns} for name, columns in self.parties.items()
            ],
        }

    def answer(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Scores of rows, each an object of columns by party; see ``Scorer.answer``.

        Requests run one after the other. DataError also if a party is missing or unknown, or
        refuses its rows; PartyError if one failed.
        """
        for number, row in enumerate(rows):
            self._check_parties(row, number)
        frames = {
            name: as_frame([row[name] for row in rows], [one["name"] for one in columns], name)
            for name, columns in self.parties.items()
        }
        with self._turn:
            named, warnings = self._predicted(frames)
        return {"rows": scored_rows(named, self._model.classes), "warnings": warnings}

    def _check_parties(self, row: Row, number: int) -> None:
        parties = ", ".join(self.parties)
        for name in row:
            if name not in self.parties:
                rule = f"row {number} must name parties of the model ({parties}), got {name!r}"
                raise RowError(rule + did_you_mean(name, self.parties), None, number, name)
        for name in self.parties:
            if name not in row:
                rule = f"row {number} must name every party of the model ({parties})"
                raise RowError(f"{rule}, lacks {name!r}", None, number, name)
            if not isinstance(row[name], dict):
                rule = f"row {number} must have an object by column names for {name}"
                raise RowError(f"{rule}, got {type(row[name]).__name__}", None, number, name)

    def _predicted(
        self, frames: Mapping[str, Any]
    ) -> tuple[Mapping[str, np.ndarray[Any, Any]], Sequence[str]]:
        """Prediction columns by name, and warnings; leaves nothing on disk."""
        stores = TemporaryStores()
        app = SiteApp(stores=stores, frames=frames)
        private_folder(predictions_folder())
        try:
            with TemporaryDirectory(dir=predictions_folder(), prefix="serve-") as folder:
                settings = self._settings.model_copy(update={"run_dir": folder})
                run = run_local(settings, client_app=app)
                summary = run.summary
            site = home() / "sites" / self._active / summary["model_id"]
            table = parquet.read_table(site / f"predictions{SUFFIX}").drop_columns(["row"])
        except PartyError as error:
            if not error.refused:
                raise
            raise RowError(f"{error.party}: {error.reason}", party=error.party) from None
        finally:
            stores.drop()
        named = {name: table[name].to_numpy() for name in table.column_names}
        return named, summary["warnings"]


class TemporaryStores(LiveStores):
    """States of sites that are deleted after the run."""

    def __init__(self) -> None:
        super().__init__()
        self._folders: set[Path] = set()

    def open(self, folder: Path, lasting: bool) -> Store:
        self._folders.add(folder)
        return super().open(folder, lasting)

    def drop(self) -> None:
        """Delete the sites' folders, once no step works in them."""
        for folder in self._folders:
            with locked(folder):
                shutil.rmtree(folder)


def open_scorer(
    run_dir: Path, inference: str = "", overrides: Mapping[str, Any] | None = None
) -> Scorer | DividedScorer:
    """The scorer of a run's model; ``inference`` and ``overrides`` are only for a divided one.

    ConfigError if there is no model, or it cannot be served here or in this way.
    """
    path = run_dir / "model.json"
    if not path.is_file():
        rule = "model must be a file of a run that has finished"
        raise ConfigError(f"{rule}, got {display_path(path)}{did_you_mean_path(run_dir, RUNS)}")
    if parts := parts_of(run_dir):
        return DividedScorer(run_dir, parts, inference, overrides)
    for name, value in {"--inference": inference, "-c": overrides}.items():
        if value:
            rule = "must be omitted for a model that is whole in the run's folder"
            raise ConfigError(f"{name} {rule}, got {value}")
    return Scorer(run_dir)
