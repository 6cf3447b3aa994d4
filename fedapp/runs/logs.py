"""Log runs to MLflow, in addition to the run's folder.

The coordinator's side logs: the command or call for a simulated run, the ServerApp for a
deployment. A server that cannot be reached is refused before training. One that fails later is
dropped with a warning, and the run continues. For other tools see ``on_round``.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fedapp.data.datasets import named_frames, write_tables
from fedapp.data.predictions import named_predictions, read_columns_of
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, StoppedError, as_plain, check_package, without_passwords
from fedapp.home import display_path, private_folder
from fedapp.process import versions
from fedapp.report.card import CARD
from fedapp.report.progress import Rounds
from fedapp.report.summary import score_rows
from fedapp.run_files import RoundInfo, Summary
from fedapp.run_folder import OnRound, RunFolder
from fedapp.runs.predict import check_predicted, load_model, parts_of, warnings_on
from fedapp.settings import Settings, Value, flatten

log = logging.getLogger("fedapp")

PACKAGES = ("mlflow", "pandas")  # beyond fedapp's requirements
RUN_ID_FILE = "logs.json"  # in the run's folder: the run's id in MLflow
UNLOGGED_SETTINGS = {"run-dir", "resume", "log", "strategy"}
MLFLOW, MODEL = "mlflow", "model"  # the tool, and the model's name there
LONGEST = 500  # characters of a parameter that every store of MLflow accepts
ANSWER_SECONDS = 3.0  # timeout of the check; MLflow itself retries for minutes
_UNSUPPORTED = re.compile(r"[^\w/. -]")
Notify = Callable[[str], None]
# Uploaded with a finished run.
FILES = ("model.json", "model.xgb.json", "columns.json", "report.html", CARD, "summary.json")


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """A run before it starts."""

    path: Path  # its folder
    params: Mapping[str, Value]  # the settings that its method reads
    tags: Mapping[str, str]  # method, number of parties, engine, version and folder, as fedapp.NAME


def round_values(info: RoundInfo) -> dict[str, float]:
    """Numbers of a round: ``train/auc``, ``bytes/to_server``, ``exchanges`` (total so far) ..."""
    values: dict[str, Any] = {
        "trees": info["trees"],
        "leaves": info["leaves"],
        "exchanges": info["exchanges"],
        "seconds": info["seconds"],
        **{f"train/{name}": value for name, value in info["train"].items()},
        **{f"valid/{name}": value for name, value in info["valid"].items()},
        **{f"bytes/{name}": value for name, value in info["bytes"].items()},
    }
    return _finite(values)


def final_values(summary: Summary) -> dict[str, float]:
    """Final scores (``final/test/auc``), baselines (``pooled/test/auc``), and total costs."""
    values: dict[str, Any] = {}
    for (model, split), scores in score_rows(summary):
        head = "final" if model == "federated" else model
        values |= {f"{head}/{split}/{name}": value for name, value in scores.items()}
    values |= {f"final/seconds/{name}": value for name, value in summary["seconds"].items()}
    values |= {f"final/bytes/{name}": value for name, value in summary["bytes"].items()}
    return _finite({**values, "final/exchanges": summary["exchanges"]})


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: float(value) for name, value in values.items() if value is not None}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def final_tags(summary: Mapping[str, Any]) -> dict[str, str]:
    """Tags that are known only at a run's end."""
    tags = {
        "objective": summary["objective"],
        "model_id": summary["model_id"],
        "party_names": ", ".join(party["name"] for party in summary["parties"]),
    }
    return {f"fedapp.{name}": str(value) for name, value in tags.items()}


def files_of(folder: RunFolder) -> Iterator[Path]:
    """The run's files that are uploaded, if they exist."""
    for name in FILES:
        if (path := folder.path / name).is_file():
            yield path


class Log:
    """A run's log in MLflow, or none; `n_rounds` rounds were logged by earlier attempts."""

    def __init__(self, run: ToMLflow | None, n_rounds: int, tell: Notify) -> None:
        self._run = run
        self._n_rounds = n_rounds
        self._tell = tell
        self._warning = ""

    def before(self, on_round: OnRound | None) -> OnRound | None:
        """A callback that logs a round and then calls `on_round`, if given."""
        if self._run is None:
            return on_round

        def logged_first(info: RoundInfo) -> object:
            if info["round"] > self._n_rounds:
                self._try(lambda run: run.round(info))
            return on_round(info) if on_round else None

        return logged_first

    def note(self, folder: RunFolder) -> None:
        """Write into the summary where the run is logged, or that this failed."""
        if self._run is not None:
            folder.add_to_summary({"logs": {MLFLOW: self._run.location}})
        elif self._warning:
            reported = folder.summary["warnings"]
            warnings = [*reported, *(text for text in [self._warning] if text not in reported)]
            folder.add_to_summary({"logs": {}, "warnings": warnings})

    def end(self, folder: RunFolder) -> None:
        """Log the scores, the model and the pages of a finished run."""
        if self._run is None:
            return
        self._try(lambda run: run.end(folder))
        if self._run is None:
            self.note(folder)
        else:
            self._tell(f"logged in {MLFLOW}: {self._run.location}")

    def fail(self, is_stopped: bool) -> None:
        """Mark the run as ended without a model."""
        self._try(lambda run: run.fail(is_stopped))

    def _try(self, do: Callable[[ToMLflow], None]) -> None:
        """Do something with the run in MLflow; drop it if that fails."""
        if (run := self._run) is None:
            return
        try:
            do(run)
        except Exception as error:
            self._run = None
            self._warning = f"log={MLFLOW} failed and is given up: {_cause(error)}"
            log.warning("%s", self._warning)
            self._tell(f"warning: {self._warning}")
            with suppress(Exception):
                run.fail(is_stopped=False)


def check_packages() -> None:
    """Check that MLflow is installed; ConfigError says what to install."""
    for package in PACKAGES:
        check_package(package, f"for log={MLFLOW}", "log")


@contextmanager
def logged(settings: Settings, folder: RunFolder, engine: str, tell: Notify) -> Iterator[Log]:
    """Log the run that the block makes; ConfigError if MLflow cannot be reached."""
    check_packages()
    path = folder.path / RUN_ID_FILE
    run_id = json.loads(path.read_text())[MLFLOW] if settings.resume and path.is_file() else ""
    earlier = Rounds(folder.rounds, 0).new(tell) if settings.resume else []
    run = None
    try:
        run = ToMLflow(_described(settings, folder, engine), run_id)
        if not run_id:
            for info in earlier:
                run.round(info)
        private_folder(folder.path)
        folder.write_json(RUN_ID_FILE, {MLFLOW: run.run_id})
    except Exception as error:
        if run is not None:
            with suppress(Exception):
                run.fail(is_stopped=False)
        rule = "must be a tool that can be reached"
        raise ConfigError(f"log={MLFLOW} {rule}: {_cause(error)}") from None
    log_of_run = Log(run, len(earlier), tell)
    try:
        yield log_of_run
    except BaseException as error:
        log_of_run.fail(isinstance(error, StoppedError | KeyboardInterrupt))
        raise


def _described(settings: Settings, folder: RunFolder, engine: str) -> LoggedRun:
    """The settings and tags of a run, before it starts."""
    from strategies.run import load_strategy

    read = load_strategy(settings.strategy).settings_read(settings)
    reads = {*read, "data", "label"} - UNLOGGED_SETTINGS
    values = {name: value for name, value in flatten(settings.as_config()).items() if name in reads}
    values["data"] = named_frames(settings.data, folder.path)
    tags = {
        "strategy": settings.strategy,
        "parties": str(settings.parties),
        "engine": engine,
        "version": versions(("fedapp",))["fedapp"],
        "folder": display_path(folder.path),
    }
    params = {name: value for name, value in values.items() if value != ""}
    return LoggedRun(folder.path, params, {f"fedapp.{name}": value for name, value in tags.items()})


def _cause(error: Exception) -> str:
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return as_plain(without_passwords(f"{kind}{error}"))


class LoadedModel:
    """A model of any method, from its model.json."""

    def __init__(self, path: Path) -> None:
        self._model, self._predict = load_model(path)

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
        predictions = np.asarray(self._predict(model, values, None))
        named = named_predictions(model.classes, model.n_outputs, predictions.astype(float))
        return pandas.DataFrame(named, index=getattr(model_input, "index", None))


def _load_pyfunc(path: str) -> LoadedModel:
    """Called by MLflow, which requires this name."""
    file = Path(path)
    return LoadedModel(file / "model.json" if file.is_dir() else file)


# MLflow decides where it is: ``MLFLOW_TRACKING_URI``, ``MLFLOW_EXPERIMENT_NAME``, or what the
# process has set. Inside an active run it is a nested run.
class ToMLflow:
    """A run in MLflow: parameters, a step per round, tags, files, and the model."""

    run_id: str  # identifies a resumed run
    location: str  # where it is, for people; without passwords

    def __init__(self, run: LoggedRun, run_id: str) -> None:
        """Open a new run with its parameters and tags, or the run `run_id` if not empty."""
        import mlflow
        from mlflow.entities import Param, RunTag

        _check_answers()
        self._client = mlflow.MlflowClient()
        with self._active(run_id or None, None if run_id else run.path.name) as opened:
            self.run_id = str(opened.info.run_id)
            experiment = opened.info.experiment_id
        uri = without_passwords(mlflow.get_tracking_uri())
        self.location = f"run {self.run_id} of experiment {experiment} in {uri}"
        self._client.update_run(self.run_id, status="RUNNING")
        params = [Param(_name(name), _param_text(value)) for name, value in run.params.items()]
        tags = [RunTag(name, _param_text(value)) for name, value in run.tags.items()]
        self._client.log_batch(self.run_id, params=[] if run_id else params, tags=tags)

    def round(self, info: RoundInfo) -> None:
        """Log a finished round."""
        self._log(round_values(info), info["round"])

    def end(self, folder: RunFolder) -> None:
        """Log scores, tags, the model and the files, and close the run."""
        from mlflow.entities import RunTag

        summary = folder.summary
        self._log(final_values(summary), 0)
        tags = [RunTag(name, _param_text(value)) for name, value in final_tags(summary).items()]
        self._client.log_batch(self.run_id, tags=tags)
        if parts_of(folder.path) is None:
            with self._active(self.run_id):
                _log_model(folder.path / "model.json")
        for path in files_of(folder):
            self._client.log_artifact(self.run_id, str(path))
        self._client.set_terminated(self.run_id, "FINISHED")

    def fail(self, is_stopped: bool) -> None:
        """Close a run without a model: stopped or failed."""
        _check_answers()
        self._client.set_terminated(self.run_id, "KILLED" if is_stopped else "FAILED")

    def _log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        _check_answers()
        now = int(time.time() * 1000)
        metrics = [Metric(_name(name), value, now, step) for name, value in values.items()]
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


def _check_answers() -> None:
    """Check that the tracking server responds, with any status; else ConfigError."""
    import httpx
    import mlflow

    uri = mlflow.get_tracking_uri()
    if not uri.startswith(("http://", "https://")):
        return
    try:
        httpx.head(uri, timeout=ANSWER_SECONDS, verify=False)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"{without_passwords(uri)} must answer within {ANSWER_SECONDS:.0f} s, got "
            f"{str(error) or type(error).__name__}; start the server, set MLFLOW_TRACKING_URI to "
            "its address, or leave out log=mlflow"
        ) from None


def _log_model(path: Path) -> None:
    """Log the model without pickle; loading it requires fedapp."""
    import mlflow
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema
    from mlflow.types.schema import AnyType

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
            loader_module="fedapp.runs.logs",
            data_path=str(path),
            signature=signature,
            pip_requirements=[f"fedapp=={versions(('fedapp',))['fedapp']}"],
        )


def _name(name: str) -> str:
    """A name that every store accepts: some metrics contain @."""
    return _UNSUPPORTED.sub("_", name)


def _param_text(value: object) -> str:
    return as_plain(str(value), LONGEST)
