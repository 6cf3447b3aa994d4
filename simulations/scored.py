"""A simulated run, and the exact scores of its model: on rows that are all in one place."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.config import Settings, load_settings
from fedapp.data.categories import recoded
from fedapp.data.labels import class_ids
from fedapp.home import home
from fedapp.trees.model import Ensemble, load_model
from fedapp.trees.predict import predict_margins
from simulations.local import run_local
from simulations.rows import stacked_tables

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Rows of one subset under a model.

    Parameters
    ----------
    margins : float32, shape (n_rows, n_outputs).
    labels : float32, shape (n_rows,): class ids, or numbers.
    """

    margins: Array
    labels: Array


def trained(overrides: Mapping[str, Any]) -> tuple[Settings, Ensemble, dict[str, Any]]:
    """One run in this process, of which no file is left: settings, model, summary."""
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings({**overrides, "run-dir": str(Path(folder) / "run")})
        run = run_local(settings)
        summary, model = run.summary, load_model(run.path / "model.json")
    for party in summary["parties"]:
        shutil.rmtree(home() / "sites" / party["name"] / summary["model_id"])
    return settings, model, summary


def score(settings: Settings, model: Ensemble) -> dict[str, Scored]:
    """A model on the rows of a run, by subset."""
    table, rows = stacked_tables(settings)
    assert table.labels is not None
    values = recoded(table.values, table.categories, model.categories, table.columns)[0]
    labels = class_ids(table.labels, model.classes)
    found = {}
    for subset in ("train", "valid", "test"):
        own = np.concatenate([each[subset] for each in rows.values()])
        found[subset] = Scored(predict_margins(model, values[own]), labels[own])
    return found
