"""Runs whose files are deleted once a study has read them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedapp.data.labels import class_ids
from fedapp.data.partition import SUBSETS
from fedapp.records.document import load
from fedapp.run_files import Summary
from fedapp.run_folder import RunFolder
from fedapp.runs.baselines import Floats
from fedapp.runs.clean import forget_model
from fedapp.runs.local import run_local
from fedapp.runs.tables import stacked_tables
from fedapp.settings import Settings, load_settings
from fedapp.trees.categories import recoded
from fedapp.trees.model import Ensemble
from fedapp.trees.predict import predict_margins


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Margins and labels of one subset."""

    margins: Floats  # (n_rows, n_outputs)
    labels: Floats  # (n_rows,): class ids, or numbers


@contextmanager
def temporary_run(settings: Settings) -> Iterator[RunFolder]:
    """A finished run in this process; its files are deleted after the block."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_local(settings.model_copy(update={"run_dir": f"{folder}/run"}))
        try:
            yield run
        finally:
            forget_model(run.summary["model_id"])


def run_and_load(overrides: Mapping[str, Any]) -> tuple[Settings, Ensemble, Summary]:
    """Run in this process and delete the files; returns settings, model and summary."""
    settings = load_settings(dict(overrides))
    with temporary_run(settings) as run:
        return settings, load(run.path / "model.json", Ensemble), run.summary


def score(settings: Settings, model: Ensemble) -> dict[str, Scored]:
    """Apply a model to the rows of a run, by subset."""
    table, rows = stacked_tables(settings)
    assert table.labels is not None
    values = recoded(table.values, table.categories, model.categories, table.columns)[0]
    labels = class_ids(table.labels, model.classes)
    scored = {}
    for subset in SUBSETS:
        row_ids = np.concatenate([by_subset[subset] for by_subset in rows.values()])
        scored[subset] = Scored(predict_margins(model, values[row_ids]), labels[row_ids])
    return scored
