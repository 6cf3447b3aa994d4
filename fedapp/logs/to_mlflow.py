"""A run in MLflow: parameters, one step per round, tags, files, and the model with its signature.

MLflow decides where it is: ``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME``, or what the process
has set. Inside an active run it is a nested run.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.models import ModelSignature
from mlflow.types import ColSpec, DataType, Schema
from mlflow.types.schema import AnyType

from fedapp.errors import ConfigError, as_plain
from fedapp.logs.logger import (
    LoggedRun,
    files_of,
    final_tags,
    final_values,
    round_values,
    without_password,
)
from fedapp.packages import versions
from fedapp.predict import load_model, parts_of
from fedapp.run_folder import RoundInfo, RunFolder

LONGEST = 500  # characters of a parameter that every store accepts
ANSWER_SECONDS = 3.0  # timeout of the check; MLflow itself retries for minutes
MODEL = "model"
_UNSUPPORTED = re.compile(r"[^\w/. -]")


class ToMLflow:
    """Implements ``fedapp.logs.logger.Logger``."""

    def __init__(self, run: LoggedRun, run_id: str) -> None:
        _check_answers()
        self._client = mlflow.MlflowClient()
        with self._active(run_id or None, None if run_id else run.path.name) as opened:
            self.run_id = str(opened.info.run_id)
            experiment = opened.info.experiment_id
        uri = without_password(mlflow.get_tracking_uri())
        self.place = f"run {self.run_id} of experiment {experiment} in {uri}"
        self._client.update_run(self.run_id, status="RUNNING")
        params = [Param(_name(name), _text(value)) for name, value in run.params.items()]
        tags = [RunTag(name, _text(value)) for name, value in run.tags.items()]
        self._client.log_batch(self.run_id, params=[] if run_id else params, tags=tags)

    def round(self, info: RoundInfo) -> None:
        self._log(round_values(info), info["round"])

    def end(self, folder: RunFolder) -> None:
        """Scores, tags, the model and the files."""
        summary = folder.summary
        self._log(final_values(summary), 0)
        tags = [RunTag(name, _text(value)) for name, value in final_tags(summary).items()]
        self._client.log_batch(self.run_id, tags=tags)
        if parts_of(folder.path) is None:
            with self._active(self.run_id):
                _log_model(folder.path / "model.json")
        for path in files_of(folder):
            self._client.log_artifact(self.run_id, str(path))
        self._client.set_terminated(self.run_id, "FINISHED")

    def fail(self, is_stopped: bool) -> None:
        _check_answers()
        self._client.set_terminated(self.run_id, "KILLED" if is_stopped else "FAILED")

    def _log(self, values: Mapping[str, float], step: int) -> None:
        _check_answers()
        now = int(time.time() * 1000)
        metrics = [Metric(_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    @contextmanager
    def _active(self, run_id: str | None, name: str | None = None) -> Iterator[Any]:
        """Make a run the active one during the block, without ending it."""
        opened = mlflow.start_run(run_id=run_id, run_name=name, nested=True)
        try:
            yield opened
        finally:
            mlflow.end_run("RUNNING")


def _check_answers() -> None:
    """Check that the tracking server responds, with any status; else ConfigError."""
    uri = mlflow.get_tracking_uri()
    if not uri.startswith(("http://", "https://")):
        return
    try:
        httpx.head(uri, timeout=ANSWER_SECONDS, verify=False)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"{without_password(uri)} must answer within {ANSWER_SECONDS:.0f} s, got "
            f"{str(error) or type(error).__name__}; start the server, set MLFLOW_TRACKING_URI to "
            "its address, or leave out log=mlflow"
        ) from None


def _log_model(path: Path) -> None:
    """Log the model without pickle; loading it requires fedapp."""
    model, _ = load_model(path)
    anything = AnyType()  # type: ignore[no-untyped-call]
    # AnyType, since MLflow refuses integers and booleans for a column of doubles.
    inputs = Schema([ColSpec(anything, name) for name in model.columns])
    names = model.classes if model.n_outputs > 1 else model.classes[1:]
    outputs = [f"probability_{name}" for name in names] or ["prediction"]
    signature = ModelSignature(
        inputs, Schema([ColSpec(DataType.double, output) for output in outputs])
    )
    with warnings.catch_warnings():
        # An input example would disclose rows.
        warnings.filterwarnings("ignore", ".*An input example was not provided")
        mlflow.pyfunc.log_model(
            name=MODEL,
            loader_module="fedapp.logs.loaded",
            data_path=str(path),
            signature=signature,
            pip_requirements=[f"fedapp=={versions(('fedapp',))['fedapp']}"],
        )


def _name(name: str) -> str:
    """A name that every store accepts: some metrics contain @."""
    return _UNSUPPORTED.sub("_", name)


def _text(value: object) -> str:
    return as_plain(str(value), LONGEST)


LOGGER = ToMLflow
