"""Models trained and predicted under encryption by small keys, and what is predicted."""

import csv
from pathlib import Path

import numpy as np

from fedapp.home import home
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from tests.federated import summary_of

KINDS_OF_MODELS = ("secureboost", "federated-forest")
SMALL = {"key_bits": 512, "insecure_small_key": True}
SMALL_KEY = {f"secureboost__{name}": value for name, value in SMALL.items()}
EINI = {f"eini__{name}": value for name, value in {**SMALL, "unguarded": True}.items()}


def inference(settings, trained, **more):
    """Settings of a run that predicts the rows the model was trained on, interactively."""
    model = summary_of(RunFolder(Path(trained.run_dir)))["model_id"]
    given = {"data": trained.data, "parties": trained.parties, "model": model}
    return settings(**{"strategy": "interactive", **given, **more})


def encrypted(settings, trained, **more):
    """Settings of an encrypted prediction of the rows the model was trained on."""
    plain = {"align": "ordered", "columns": trained.columns, **EINI, **more}
    return inference(settings, trained, **plain).model_copy(update={"strategy": "eini"})


def scored(settings, trained, way="interactive", **more):
    """Predictions of the rows the model was trained on."""
    more = {"align": "ordered", "columns": trained.columns, **more}
    if way == "eini":
        return written(summary_of(run_local(encrypted(settings, trained, **more))))
    return written(summary_of(run_local(inference(settings, trained, strategy=way, **more))))


def written(summary):
    """Predictions as the active party has them."""
    return read_scores(
        home() / "sites" / summary["active"] / summary["model_id"] / "predictions.csv"
    )


def read_scores(path):
    """Predictions in a file, without the rows' ids."""
    with path.open() as file:
        return np.array([list(map(float, row[1:])) for row in list(csv.reader(file))[1:]])
