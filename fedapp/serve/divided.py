"""Score rows by a divided model whose parties are simulated on this machine.

A row is an object of columns by party. Each request becomes a prediction run on the local engine
with tables in memory: a party gets its columns, and the messages are those of ``fedapp predict``.
All of it passes through this process, so nothing is hidden from it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import numpy as np
from pyarrow import parquet

from fedapp.client_app import SiteApp
from fedapp.errors import ConfigError, DataError, PartyError, did_you_mean, did_you_mean_path
from fedapp.home import RUNS, display_path, home, private_folder
from fedapp.runs.clean import predictions_folder
from fedapp.runs.engines import SIMULATED
from fedapp.runs.predict import parts_of, summary_of
from fedapp.runs.session import settings_to_predict
from fedapp.serve.scorer import (
    Row,
    RowError,
    Scorer,
    answers_of,
    as_frame,
    scored_rows,
    told_columns,
    told_of,
)
from fedapp.settings import Settings
from fedapp.site.store import LiveStores, Store, locked, read_part
from fedapp.trees.divided import categories_of, model_of
from fedapp.trees.forest.model import BaggedForest

FOREST, BOOSTED = "one-round", "interactive"  # default inference
SUFFIX = ".parquet"


class DividedScorer:
    """A divided model of a simulated run.

    Parameters
    ----------
    parts : the parties that have its parts, from ``parts_of``.
    inference : empty selects one-round for a forest, else interactive.
    overrides : settings of that way to predict.

    Raises
    ------
    ConfigError : the run is not simulated, or inference or a setting does not fit the model.
    DataError : a part is not on this machine.
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
            name: told_columns(part["columns"], categories_of(part), part.get("base_margin", ""))
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
        self.name, self.threshold = told_of(run_dir)
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

        Requests run one after the other.

        Raises
        ------
        DataError : a party or column is missing or unknown, or a party refuses its rows; a
            ``RowError`` if a single row, column or party is at fault.
        PartyError : a party failed.
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
                rule = (
                    f"row {number} must name every party of the model ({parties}), lacks {name!r}"
                )
                raise RowError(rule, None, number, name)
            if not isinstance(row[name], dict):
                rule = f"row {number} must have an object by column names for {name}"
                raise RowError(f"{rule}, got {type(row[name]).__name__}", None, number, name)

    def _predicted(
        self, frames: Mapping[str, Any]
    ) -> tuple[Mapping[str, np.ndarray[Any, Any]], Sequence[str]]:
        """Prediction columns by name, and warnings; leaves nothing on disk."""
        from fedapp.runs.engines import run_local

        stores = PassingStores()
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


class PassingStores(LiveStores):
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
    """The scorer of a run's model.

    Parameters
    ----------
    inference, overrides : only for a divided model; see ``DividedScorer``.

    Raises
    ------
    ConfigError : there is no model, or it cannot be served here or in this way.
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
