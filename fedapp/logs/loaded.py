"""A logged model as ``mlflow.pyfunc`` loads it."""

from __future__ import annotations

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fedapp.data.frames import write_tables
from fedapp.data.predictions import in_codes_of, named_predictions, read_columns_of
from fedapp.data.schema import Roles
from fedapp.predict import load_model, notes_on_range


class Loaded:
    """A model of any method, from its model.json."""

    def __init__(self, path: Path) -> None:
        self._model, self._predict = load_model(path)

    def predict(self, model_input: Any, params: Any = None) -> Any:
        """Predictions for a frame's rows, with the columns that ``fedapp predict`` writes.

        Returns
        -------
        pandas.DataFrame : ``probability_CLASS`` of every class, or of the second of two; or
        ``prediction``.
        """
        import pandas

        model = self._model
        with TemporaryDirectory() as folder:
            data = write_tables(model_input, Path(folder))
            table = read_columns_of(data, model.columns, Roles(), categories=model.categories)
        values = in_codes_of(table, model.categories).values
        for note in notes_on_range(model, values):
            warnings.warn(note, stacklevel=3)
        predictions = np.asarray(self._predict(model, values, None))
        named = named_predictions(model.classes, model.n_outputs, predictions.astype(float))
        return pandas.DataFrame(named, index=getattr(model_input, "index", None))


def _load_pyfunc(path: str) -> Loaded:
    """Called by MLflow, which requires this name."""
    file = Path(path)
    return Loaded(file / "model.json" if file.is_dir() else file)
