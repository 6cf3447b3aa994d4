"""Log runs to MLflow, TensorBoard and Weights & Biases, in addition to the run's folder.

The coordinator's side logs: the command or call for a simulated run, the ServerApp for a
deployment. A tool that cannot be reached is refused before training. One that fails later is
dropped with a warning, and the run continues.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module

from fedapp.data.frames import named_frames
from fedapp.errors import ConfigError, StoppedError, as_plain
from fedapp.home import display_path, private_folder
from fedapp.logs.logger import LoggedRun, Logger, without_password
from fedapp.packages import check_package, versions
from fedapp.report.progress import Rounds
from fedapp.run_folder import OnRound, RoundInfo, RunFolder
from fedapp.settings import Settings, flatten

log = logging.getLogger("fedapp")

# Packages of each tool, beyond fedapp's requirements.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "mlflow": ("mlflow", "pandas"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}
KEPT = "logs.json"  # in the run's folder: run ids by tool
UNLOGGED_SETTINGS = {"run-dir", "resume", "log", "strategy"}
Tell = Callable[[str], None]


class Logs:
    """The tools to which a run is logged; `n_rounds` rounds were logged by earlier attempts."""

    def __init__(self, loggers: Mapping[str, Logger], n_rounds: int, tell: Tell) -> None:
        self._open, self._n_rounds, self._tell = dict(loggers), n_rounds, tell
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
def logged(settings: Settings, folder: RunFolder, engine: str, tell: Tell) -> Iterator[Logs]:
    """Log the run that the block makes to the tools that the settings name.

    Raises
    ------
    ConfigError : a tool is not installed or cannot be reached.
    """
    check_packages(settings.logs)
    path = folder.path / KEPT
    run_ids = json.loads(path.read_text()) if settings.resume and path.is_file() else {}
    earlier = Rounds(folder.rounds, 0).new(tell) if settings.resume else []
    loggers: dict[str, Logger] = {}
    try:
        for name in settings.logs:
            run = _described(settings, folder, engine)
            loggers[name] = _opened(name, run, run_ids.get(name, ""))
            if name not in run_ids:
                for info in earlier:
                    loggers[name].round(info)
            run_ids[name] = loggers[name].run_id
        private_folder(folder.path)
        folder.write_json(KEPT, run_ids)
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


def _opened(name: str, run: LoggedRun, run_id: str) -> Logger:
    opened: Logger = import_module(f"fedapp.logs.to_{name}").LOGGER(run, run_id)
    return opened


def _described(settings: Settings, folder: RunFolder, engine: str) -> LoggedRun:
    """The settings and tags of a run, before it starts."""
    from fedapp.server_app import load_strategy

    reads = {
        *load_strategy(settings.strategy).settings_read(settings),
        "data",
        "label",
    } - UNLOGGED_SETTINGS
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
    return as_plain(without_password(f"{kind}{error}"))
