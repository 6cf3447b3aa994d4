"""Log runs to MLflow, TensorBoard and Weights & Biases, in addition to the run's folder.

The coordinator's side logs: the command or call for a simulated run, the ServerApp for a
deployment. A tool that cannot be reached is refused before training. One that fails later is
dropped with a warning, and the run continues.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np

from fedapp.data.datasets import named_frames, write_tables
from fedapp.data.predictions import named_predictions, read_columns_of
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, StoppedError, as_plain, check_package
from fedapp.home import display_path, private_folder
from fedapp.process import versions
from fedapp.report.card import CARD
from fedapp.report.progress import Rounds
from fedapp.report.summary import score_rows
from fedapp.run_folder import OnRound, RoundInfo, RunFolder
from fedapp.runs.predict import load_model, notes_on_range, parts_of
from fedapp.settings import Settings, Value, flatten

log = logging.getLogger("fedapp")

# Packages of each tool, beyond fedapp's requirements.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "mlflow": ("mlflow", "pandas"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}
RUN_IDS_FILE = "logs.json"  # in the run's folder: run ids by tool
UNLOGGED_SETTINGS = {"run-dir", "resume", "log", "strategy"}
TENSORBOARD, MODEL, PROJECT = "tensorboard", "model", "fedapp"  # names in the tools
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


class Logger(Protocol):
    """A run in a tool, opened on construction."""

    run_id: str  # assigned by the tool; identifies a resumed run
    place: str  # where it is, for people; without passwords

    def __init__(self, run: LoggedRun, run_id: str) -> None:
        """Open a new run with its parameters and tags, or the run `run_id` if not empty."""

    def round(self, info: RoundInfo) -> None:
        """Log a finished round."""

    def end(self, folder: RunFolder) -> None:
        """Log the results of a finished run, and close it."""

    def fail(self, is_stopped: bool) -> None:
        """Close a run without a model: stopped or failed."""


def without_passwords(text: str) -> str:
    """Remove user names and passwords from URLs in a text."""
    return re.sub(r"//[^/@\s]*@", "//", text)


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


def final_values(summary: Mapping[str, Any]) -> dict[str, float]:
    """Final scores (``final/test/auc``), baselines (``pooled/test/auc``), and total costs."""
    values: dict[str, Any] = {}
    for model, split, scores in score_rows(dict(summary)):
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


class Logs:
    """The tools to which a run is logged; `n_rounds` rounds were logged by earlier attempts."""

    def __init__(self, loggers: Mapping[str, Logger], n_rounds: int, tell: Notify) -> None:
        self._open = dict(loggers)
        self._n_rounds = n_rounds
        self._tell = tell
        self._warnings: list[str] = []

    def before(self, on_round: OnRound | None) -> OnRound | None:
        """A callback that logs a round and then calls `on_round`, if given."""
        if not self._open:
            return on_round

        def logged_first(info: RoundInfo) -> object:
            if info["round"] > self._n_rounds:
                self._each(lambda logger: logger.round(info))
            return on_round(info) if on_round else None

        return logged_first

    def note(self, folder: RunFolder) -> None:
        """Write into the summary where the run is logged, and which tools failed."""
        if not self._open and not self._warnings:
            return
        reported = folder.summary["warnings"]
        warnings = [*reported, *(text for text in self._warnings if text not in reported)]
        places = {name: logger.place for name, logger in self._open.items()}
        folder.add_to_summary({"logs": places, "warnings": warnings})

    def end(self, folder: RunFolder) -> None:
        """Log the scores, the model and the pages of a finished run."""
        n_failed = len(self._warnings)
        self._each(lambda logger: logger.end(folder))
        if len(self._warnings) > n_failed:
            self.note(folder)
        for name, logger in self._open.items():
            self._tell(f"logged in {name}: {logger.place}")

    def fail(self, is_stopped: bool) -> None:
        """Mark the run as ended without a model."""
        self._each(lambda logger: logger.fail(is_stopped))

    def _each(self, do: Callable[[Logger], None]) -> None:
        """Call `do` with every tool; drop those that fail."""
        for name, logger in list(self._open.items()):
            try:
                do(logger)
            except Exception as error:
                del self._open[name]
                text = f"log={name} failed and is given up: {_cause(error)}"
                self._warnings.append(text)
                log.warning("%s", text)
                self._tell(f"warning: {text}")
                with suppress(Exception):
                    logger.fail(is_stopped=False)


def check_packages(names: Sequence[str]) -> None:
    """Check that the tools' packages are installed; ConfigError says what to install."""
    for name in names:
        for package in PACKAGES[name]:
            check_package(package, f"for log={name}", "log")


@contextmanager
def logged(settings: Settings, folder: RunFolder, engine: str, tell: Notify) -> Iterator[Logs]:
    """Log the run that the block makes to the tools that the settings name; ConfigError if one is
    not installed or cannot be reached."""
    check_packages(settings.logs)
    path = folder.path / RUN_IDS_FILE
    run_ids = json.loads(path.read_text()) if settings.resume and path.is_file() else {}
    earlier = Rounds(folder.rounds, 0).new(tell) if settings.resume else []
    loggers: dict[str, Logger] = {}
    try:
        for name in settings.logs:
            run = _described(settings, folder, engine)
            loggers[name] = LOGGERS[name](run, run_ids.get(name, ""))
            if name not in run_ids:
                for info in earlier:
                    loggers[name].round(info)
            run_ids[name] = loggers[name].run_id
        private_folder(folder.path)
        folder.write_json(RUN_IDS_FILE, run_ids)
    except Exception as error:
        for logger in loggers.values():
            with suppress(Exception):
                logger.fail(is_stopped=False)
        rule = "must be a tool that can be reached"
        raise ConfigError(f"log={name} {rule}: {_cause(error)}") from None
    logs = Logs(loggers, len(earlier), tell)
    try:
        yield logs
    except BaseException as error:
        logs.fail(isinstance(error, StoppedError | KeyboardInterrupt))
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
            table = read_columns_of(data, model.columns, Roles(), categories=model.categories)
        values = table.values
        for note in notes_on_range(model, values):
            warnings.warn(note, stacklevel=3)
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
    """Parameters, a step per round, tags, files, and the model with its signature."""

    def __init__(self, run: LoggedRun, run_id: str) -> None:
        import mlflow
        from mlflow.entities import Param, RunTag

        _check_answers()
        self._client = mlflow.MlflowClient()
        with self._active(run_id or None, None if run_id else run.path.name) as opened:
            self.run_id = str(opened.info.run_id)
            experiment = opened.info.experiment_id
        uri = without_passwords(mlflow.get_tracking_uri())
        self.place = f"run {self.run_id} of experiment {experiment} in {uri}"
        self._client.update_run(self.run_id, status="RUNNING")
        params = [Param(_name(name), _param_text(value)) for name, value in run.params.items()]
        tags = [RunTag(name, _param_text(value)) for name, value in run.tags.items()]
        self._client.log_batch(self.run_id, params=[] if run_id else params, tags=tags)

    def round(self, info: RoundInfo) -> None:
        self._log(round_values(info), info["round"])

    def end(self, folder: RunFolder) -> None:
        """Scores, tags, the model and the files."""
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


# ``tensorboard --logdir runs`` shows all runs side by side: numbers by round, parameters, and the
# model card as text.
class ToTensorBoard:
    """Event files in the subfolder ``tensorboard`` of the run's folder."""

    def __init__(self, run: LoggedRun, run_id: str) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        path = run.path / TENSORBOARD
        self.run_id, self.place = TENSORBOARD, f"tensorboard --logdir {display_path(path)}"
        self._writer = EventFileWriter(str(path))
        if not run_id:
            self._add(hparams_pb(dict(run.params)), 0)
            self._add(_text("fedapp", _table(run.tags)), 0)

    def round(self, info: RoundInfo) -> None:
        self._add(_scalars(round_values(info)), info["round"])
        self._writer.flush()

    def end(self, folder: RunFolder) -> None:
        """Log scores and the model card; the model stays in the run's folder."""
        from tensorboard.plugins.hparams import api_pb2

        summary = folder.summary
        self._add(_scalars(final_values(summary)), 0)
        self._add(_text("fedapp/end", _table(final_tags(summary))), 0)
        if (card := folder.path / CARD).is_file():
            self._add(_text("model-card", card.read_text(encoding="utf-8")), 0)
        self._close(api_pb2.STATUS_SUCCESS)

    def fail(self, is_stopped: bool) -> None:
        """Close the run; TensorBoard does not distinguish stopped from failed."""
        from tensorboard.plugins.hparams import api_pb2

        self._close(api_pb2.STATUS_FAILURE)

    def _close(self, status: Any) -> None:
        from tensorboard.compat.proto import summary_pb2
        from tensorboard.plugins.hparams import metadata as of_params
        from tensorboard.plugins.hparams import plugin_data_pb2

        end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
        about = plugin_data_pb2.HParamsPluginData(session_end_info=end)
        value = summary_pb2.Summary.Value(
            tag=of_params.SESSION_END_INFO_TAG,
            metadata=of_params.create_summary_metadata(about),
            tensor=of_params.NULL_TENSOR,
        )
        self._add(summary_pb2.Summary(value=[value]), 0)
        self._writer.close()

    def _add(self, summary: Any, step: int) -> None:
        from tensorboard.compat.proto import event_pb2

        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))


def _scalars(values: Mapping[str, float]) -> Any:
    from tensorboard.compat.proto import summary_pb2

    value = summary_pb2.Summary.Value
    return summary_pb2.Summary(
        value=[value(tag=name, simple_value=number) for name, number in values.items()]
    )


def _text(tag: str, text: str) -> Any:
    """A Markdown text in the format of TensorBoard's text plugin."""
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2
    from tensorboard.plugins.text import metadata as of_text

    about = of_text.create_summary_metadata(display_name="", description="")
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode()])
    tensor.tensor_shape.dim.add(size=1)
    value = summary_pb2.Summary.Value(tag=tag, metadata=about, tensor=tensor)
    return summary_pb2.Summary(value=[value])


def _table(tags: Mapping[str, str]) -> str:
    lines = (f"| {name} | {value} |" for name, value in tags.items())
    return "\n".join(["| tag | value |", "| --- | --- |", *lines])


# wandb decides where it is: ``WANDB_MODE``, ``WANDB_PROJECT``, ``WANDB_DIR`` and others. Nothing is
# sent about this machine: no code, host, git state or console output.
class ToWandb:
    """Weights & Biases: configuration, a step per round, tags, and an artifact with the files."""

    def __init__(self, run: LoggedRun, run_id: str) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run_id or None,
            resume="allow" if run_id else None,
            name=run.path.name,
            config={**run.params, **run.tags},
            tags=[run.tags["fedapp.strategy"]],
            reinit="create_new",
            settings=wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
            ),
        )
        self.run_id = str(self._run.id)
        offline = f"{display_path(Path(self._run.settings.sync_dir))}, to be sent by wandb sync"
        self.place = offline if self._run.offline else str(self._run.url)

    def round(self, info: RoundInfo) -> None:
        self._run.log(round_values(info), step=info["round"])

    def end(self, folder: RunFolder) -> None:
        """Log scores in the summary, and the files."""
        import wandb

        summary = folder.summary
        self._run.summary.update({**final_values(summary), **final_tags(summary)})
        artifact = wandb.Artifact(f"model-{summary['model_id']}", type="model")
        for path in files_of(folder):
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)
        self._run.finish()

    def fail(self, is_stopped: bool) -> None:
        """Finish with an exit code other than 0."""
        self._run.finish(exit_code=1)


LOGGERS: Mapping[str, type[Logger]] = {
    "mlflow": ToMLflow,
    "tensorboard": ToTensorBoard,
    "wandb": ToWandb,
}
