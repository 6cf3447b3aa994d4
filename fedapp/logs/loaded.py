"""A logged model as MLflow loads it: the function that ``mlflow.pyfunc`` calls."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedapp.data.predictions import named_predictions
from fedapp.frames import placed
from fedapp.predict import load_model, predict_by_text
from fedapp.trees.text import model_text


class Loaded:
    """A model of any method.

    Parameters
    ----------
    path : of its model.json.
    """

    def __init__(self, path: Path) -> None:
        self._text = model_text(path)
        self._model, _ = load_model(path)

    def predict(self, model_input: Any, params: Any = None) -> Any:
        """Predictions of a frame's rows in the columns that ``fedapp predict`` writes.

        Returns
        -------
        pandas.DataFrame : ``probability_CLASS`` of every class, or of the second of two; or
        ``prediction``.
        """
        import pandas

        with TemporaryDirectory() as folder:
            found = predict_by_text(self._text, placed(model_input, Path(folder)))
        model = self._model
        named = named_predictions(model.classes, model.n_outputs, found.astype(float))
        return pandas.DataFrame(named, index=getattr(model_input, "index", None))


def _load_pyfunc(path: str) -> Loaded:
    """Called by MLflow, by this name."""
    found = Path(path)
    return Loaded(found / "model.json" if found.is_dir() else found)
