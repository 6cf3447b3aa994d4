"""Log runs to MLflow, in addition to the run's folder.

The coordinator's side logs: the command or call for a simulated run, the ServerApp for a
deployment. A server that cannot be reached is refused before training. One that fails later is
dropped with a warning, and the run continues. For other tools see ``on_round``.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np

from fedapp.data.datasets import named_frames, write_tables
from fedapp.data.predictions import named_predictions, read_columns_of, score_names
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, StoppedError, as_plain, check_package, without_passwords
from fedapp.home import display_path, private_folder
from fedapp.process import versions
from fedapp.report.card import CARD
from fedapp.report.progress import Rounds
from fedapp.report.summary import score_rows
from fedapp.run_files import OnRound, RoundInfo, Summary
from fedapp.run_folder import RunFolder
from fedapp.runs.predict import check_predicted, load_model, parts_of, predict, warnings_on
from fedapp.sections import flatten
from fedapp.settings import Settings
from fedapp.terminal import Tell

log = logging.getLogger("fedapp")

PACKAGES = ("mlflow", "pandas")  # beyond fedapp's requirements
RUN_ID_FILE = "logs.json"  # in the run's folder: the run's id in MLflow
UNLOGGED_SETTINGS = {"run-dir", "resume", "log", "strategy"}
MLFLOW, MODEL = "mlflow", "model"  # the tool, and the model's name there
LONGEST = 500  # characters of a parameter that every store of MLflow accepts
# Where the environment does not set them: with MLflow's defaults a run waits for minutes, and its
# links are printed before the document of --json.
VARIABLES = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_UNSUPPORTED = re.compile(r"[^\w/. -]")
# Uploaded with a finished run.
FILES = ("model.json", "model.xgb.json", "columns.json", "report.html", CARD, "summary.json")


def check_packages() -> None:
    """Check that MLflow is installed; ConfigError says what to install."""
    for package in PACKAGES:
        check_package(package, f"for log={MLFLOW}", "log")


def round_values(info: RoundInfo) -> dict[str, Any]:
    """Numbers of a round: ``train/auc``, ``bytes/to_server``, ``exchanges`` (total so far) ..."""
    values = {name: value for name, value in info.items() if name not in ("round", "rounds")}
    return {name.replace(".", "/", 1): value for name, value in flatten(values).items()}


def final_values(summary: Summary) -> dict[str, float | None]:
    """Final scores (``final/test/auc``), baselines (``pooled/test/auc``), and total costs."""
    values: dict[str, float | None] = {"final/exchanges": summary["exchanges"]}
    for (model, split), scores in score_rows(summary):
        head = "final" if model == "federated" else model
        values |= {f"{head}/{split}/{name}": value for name, value in scores.items()}
    for group in ("seconds", "bytes"):
        values |= {f"final/{group}/{name}": value for name, value in summary[group].items()}
    return values


class MLflowLog:
    """A run's log in MLflow, during a ``with`` block.

    MLflow decides where it is: ``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME``, or what the
    process has set. Inside an active run it is a nested run.
    """

    run_id = ""
    location = ""  # for people; without passwords
    _warning = ""  # why the log was given up

    def __init__(self, settings: Settings, folder: RunFolder, engine: str, tell: Tell) -> None:
        """Open a run with its parameters and tags, or the run of an earlier attempt; ConfigError
        if MLflow cannot be reached."""
        check_packages()
        self._folder, self._tell = folder, tell
        path = folder.path / RUN_ID_FILE
        if settings.resume and path.is_file():
            self.run_id = json.loads(path.read_text())[MLFLOW]
        earlier = Rounds(folder.rounds_file, 0).new(tell) if settings.resume else []
        self._n_rounds = len(earlier)
        is_new = not self.run_id
        try:
            with _own_variables():
                self._open(settings, engine)
                for info in earlier if is_new else ():
                    self._log_round(info)
            private_folder(folder.path)
            folder.write_json(RUN_ID_FILE, {MLFLOW: self.run_id})
        except Exception as error:
            if self.location:
                with suppress(Exception), _own_variables():
                    self._close("FAILED")
            rule = "must be a tool that can be reached"
            way = "start the server, set MLFLOW_TRACKING_URI to its address, or leave out log"
            raise ConfigError(f"log={MLFLOW} {rule}: {_cause(error)}; {way}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            is_stopped = isinstance(error, StoppedError | KeyboardInterrupt)
            self._try(self._close, "KILLED" if is_stopped else "FAILED")

    def before(self, on_round: OnRound | None) -> OnRound:
        """A callback that logs a round and then calls `on_round`, if given."""

        def logged_first(info: RoundInfo) -> object:
            if info["round"] > self._n_rounds:
                self._try(self._log_round, info)
            return on_round(info) if on_round else None

        return logged_first

    def note(self) -> None:
        """Write into the summary where the run is logged, or that this failed."""
        if not self._warning:
            self._folder.add_to_summary({"logs": {MLFLOW: self.location}})
            return
        reported = self._folder.summary["warnings"]
        new = [] if self._warning in reported else [self._warning]
        self._folder.add_to_summary({"logs": {}, "warnings": [*reported, *new]})

    def end(self) -> None:
        """Log the scores, the model and the pages of a finished run."""
        if self._warning:
            return
        self._try(self._finish)
        if self._warning:
            self.note()
        else:
            self._tell(f"logged in {MLFLOW}: {self.location}")

    def _try(self, do: Callable[..., None], *given: Any) -> None:
        """Do something with the run in MLflow; give it up if that fails."""
        if self._warning:
            return
        with _own_variables():
            try:
                do(*given)
            except Exception as error:
                self._warning = f"log={MLFLOW} failed and is given up: {_cause(error)}"
                log.warning("%s", self._warning)
                self._tell(f"warning: {self._warning}")
                with suppress(Exception):
                    self._close("FAILED")

    def _open(self, settings: Settings, engine: str) -> None:
        import mlflow
        from mlflow.entities import Param

        from strategies.run import load_strategy

        path, is_new = self._folder.path, not self.run_id
        self._client = mlflow.MlflowClient()
        with self._active(self.run_id or None, path.name if is_new else None) as opened:
            self.run_id = str(opened.info.run_id)
            experiment = opened.info.experiment_id
        uri = without_passwords(mlflow.get_tracking_uri())
        self.location = f"run {self.run_id} of experiment {experiment} in {uri}"
        self._client.update_run(self.run_id, status="RUNNING")
        read = {*load_strategy(settings.strategy).settings_read(settings), "data", "label"}
        values = flatten(settings.as_config()) | {"data": named_frames(settings.data, path)}
        params = [
            Param(_name(name), as_plain(str(value), LONGEST))
            for name, value in values.items()
            if name in read - UNLOGGED_SETTINGS and value != ""
        ]
        self._client.log_batch(self.run_id, params=params if is_new else [])
        self._tag(
            strategy=settings.strategy,
            parties=settings.parties,
            engine=engine,
            version=versions(("fedapp",))["fedapp"],
            folder=display_path(path),
        )

    def _log_round(self, info: RoundInfo) -> None:
        self._measure(round_values(info), info["round"])

    def _finish(self) -> None:
        """Log scores, tags, the model and the files, and close the run."""
        summary, path = self._folder.summary, self._folder.path
        self._measure(final_values(summary), 0)
        names = ", ".join(party["name"] for party in summary["parties"])
        model_id, objective = summary["model_id"], summary["objective"]
        self._tag(objective=objective, model_id=model_id, party_names=names)
        if parts_of(path) is None:
            with self._active(self.run_id):
                _log_model(path / "model.json")
        for name in FILES:
            if (file := path / name).is_file():
                self._client.log_artifact(self.run_id, str(file))
        self._close("FINISHED")

    def _close(self, status: str) -> None:
        self._client.set_terminated(self.run_id, status)

    def _tag(self, **tags: object) -> None:
        from mlflow.entities import RunTag

        texts = {name: as_plain(str(value), LONGEST) for name, value in tags.items()}
        listed = [RunTag(f"fedapp.{name}", text) for name, text in texts.items()]
        self._client.log_batch(self.run_id, tags=listed)

    def _measure(self, values: Mapping[str, float | None], step: int) -> None:
        """Log the values that are finite numbers."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(_name(name), float(value), now, step)
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        ]
        self._client.log_batch(self.run_id, metrics=metrics)

    @contextmanager
    def _active(self, run_id: str | None, name: str | None = None) -> Iterator[Any]:
        """Make a run the active one during the block, without ending it."""
        import mlflow

        opened = mlflow.start_run(run_id=run_id, run_name=name, nested=True)
        try:
            yield opened
        finally:
            mlflow.end_run("RUNNING")


@contextmanager
def _own_variables() -> Iterator[None]:
    added = {name: value for name, value in VARIABLES.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _cause(error: Exception) -> str:
    return as_plain(without_passwords(f"{type(error).__name__}: {error}"))


def _name(name: str) -> str:
    """A name that every store accepts: some metrics contain @."""
    return _UNSUPPORTED.sub("_", name)


class LoadedModel:
    """A model of any method, from its model.json."""

    def __init__(self, path: Path) -> None:
        self._model = load_model(path)

    def predict(self, model_input: Any, params: Any = None) -> Any:
        """Predictions for a frame's rows as a pandas.DataFrame, with the columns that ``fedapp
        predict`` writes."""
        import pandas

        model = self._model
        with TemporaryDirectory() as folder:
            data = write_tables(model_input, Path(folder))
            table = read_columns_of(
                data, model.columns, Roles(), categories=model.categories, kinds=model.kinds
            )
        values = table.values
        check_predicted((), warnings_on(model, [table], values))
        predictions = np.asarray(predict(model, values))
        named = named_predictions(model.classes, model.n_outputs, predictions.astype(float))
        return pandas.DataFrame(named, index=getattr(model_input, "index", None))


def _load_pyfunc(path: str) -> LoadedModel:
    """Called by MLflow, which requires this name."""
    file = Path(path)
    return LoadedModel(file / "model.json" if file.is_dir() else file)


def _log_model(path: Path) -> None:
    """Log the model without pickle; loading it requires fedapp."""
    import mlflow
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema
    from mlflow.types.schema import AnyType

    model = load_model(path)
    anything = AnyType()  # type: ignore[no-untyped-call]
    # AnyType, since MLflow refuses integers and booleans for a column of doubles.
    inputs = Schema([ColSpec(anything, name) for name in model.columns])
    names = score_names(model.classes, model.n_outputs)
    outputs = Schema([ColSpec(DataType.double, name) for name in names])
    with warnings.catch_warnings():
        # An input example would disclose rows.
        warnings.filterwarnings("ignore", ".*An input example was not provided")
        mlflow.pyfunc.log_model(
            name=MODEL,
            loader_module="fedapp.runs.logs",
            data_path=str(path),
            signature=ModelSignature(inputs, outputs),
            pip_requirements=[f"fedapp=={versions(('fedapp',))['fedapp']}"],
        )
