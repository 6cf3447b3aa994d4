"""Runs in MLflow, TensorBoard and Weights & Biases, beside the run's own folder.

The coordinator's side logs: the command or the call for a simulated run, the ServerApp for one
between organisations. A tool that cannot be reached is refused before training; one that fails
later is given up with a warning, and the run goes on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module

from fedapp.config import Settings, flatten
from fedapp.errors import ConfigError, StoppedError, as_plain
from fedapp.frames import named_frames
from fedapp.home import private_folder, shown
from fedapp.logs.logger import LoggedRun, Logger, without_password
from fedapp.packages import check_package, versions
from fedapp.report.progress import Rounds
from fedapp.run_folder import RunFolder
from fedapp.watch import OnRound, RoundInfo

log = logging.getLogger("fedapp")

# What each tool needs, beside what fedapp does.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "mlflow": ("mlflow", "pandas"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}
KEPT = "logs.json"  # in the run's folder: the names that the tools have given it
UNTOLD = {"run-dir", "resume", "log", "strategy"}
Tell = Callable[[str], None]


class Logs:
    """The tools in which a run is logged.

    Parameters
    ----------
    loggers : by their names, opened.
    n_rounds : logged before, by an attempt that this one goes on from.
    tell : told where the run is logged, and what is given up.
    """

    def __init__(self, loggers: Mapping[str, Logger], n_rounds: int, tell: Tell) -> None:
        self._open, self._n_rounds, self._tell = dict(loggers), n_rounds, tell
        self._warnings: list[str] = []

    def before(self, on_round: OnRound | None) -> OnRound | None:
        """A callback that logs a round, and calls another one where there is one."""
        if not self._open:
            return on_round

        def logged_first(info: RoundInfo) -> object:
            if info["round"] > self._n_rounds:
                self._each(lambda logger: logger.round(info))
            return on_round(info) if on_round else None

        return logged_first

    def note(self, folder: RunFolder) -> None:
        """Write into the summary where the run is logged, and what failed of it."""
        if not self._open and not self._warnings:
            return
        told = folder.summary["warnings"]
        warnings = [*told, *(text for text in self._warnings if text not in told)]
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
        """Say that the run has ended without a model."""
        self._each(lambda logger: logger.fail(is_stopped))

    def _each(self, do: Callable[[Logger], None]) -> None:
        """Have every tool do something; one that fails is given up."""
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
    """Hold that what tools need is installed.

    Raises
    ------
    ConfigError : it is not; says what to install.
    """
    for name in names:
        for package in PACKAGES[name]:
            check_package(package, f"for log={name}", "log")


@contextmanager
def logged(settings: Settings, folder: RunFolder, engine: str, tell: Tell) -> Iterator[Logs]:
    """Log the run that the block makes, in the tools that the settings name.

    Parameters
    ----------
    folder : of the run, which may not have begun yet.
    engine : what carries the messages.

    Raises
    ------
    ConfigError : a tool is not installed, or cannot be reached.
    """
    check_packages(settings.logs)
    path = folder.path / KEPT
    kept = json.loads(path.read_text()) if settings.resume and path.is_file() else {}
    earlier = Rounds(folder.rounds, 0).new(tell) if settings.resume else []
    loggers: dict[str, Logger] = {}
    try:
        for name in settings.logs:
            loggers[name] = _opened(name, _described(settings, folder, engine), kept.get(name, ""))
            if name not in kept:
                for info in earlier:
                    loggers[name].round(info)
            kept[name] = loggers[name].run_id
        private_folder(folder.path)
        folder.write_json(KEPT, kept)
    except Exception as error:
        for opened in loggers.values():
            with suppress(Exception):
                opened.fail(is_stopped=False)
        rule = "must be a tool that can be reached"
        raise ConfigError(f"log={name} {rule}: {_cause(error)}") from None
    logs = Logs(loggers, len(earlier), tell)
    try:
        yield logs
    except BaseException as error:
        logs.fail(isinstance(error, StoppedError | KeyboardInterrupt))
        raise


def _opened(name: str, run: LoggedRun, run_id: str) -> Logger:
    """A tool that is ready for rounds."""
    opened: Logger = import_module(f"fedapp.logs.to_{name}").LOGGER(run, run_id)
    return opened


def _described(settings: Settings, folder: RunFolder, engine: str) -> LoggedRun:
    """What is known of a run before it begins."""
    from fedapp.server_app import load_strategy

    reads = {*load_strategy(settings.strategy).settings_read(settings), "data", "label"} - UNTOLD
    values = {name: value for name, value in flatten(settings.as_config()).items() if name in reads}
    values["data"] = named_frames(settings.data, folder.path)
    tags = {
        "strategy": settings.strategy,
        "parties": str(settings.parties),
        "engine": engine,
        "version": versions(("fedapp",))["fedapp"],
        "folder": shown(folder.path),
    }
    params = {name: value for name, value in values.items() if value != ""}
    return LoggedRun(folder.path, params, {f"fedapp.{name}": told for name, told in tags.items()})


def _cause(error: Exception) -> str:
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return as_plain(without_password(f"{kind}{error}"))
