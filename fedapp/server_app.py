"""The Flower ServerApp: run config -> strategy -> a run's folder."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedapp.deploy.warm import apply, slow_modes
from fedapp.errors import FedappError
from fedapp.process import leave_no_core, start_log
from fedapp.run_folder import RunFolder, new_run_dir, resumed_settings
from fedapp.settings import Settings, load_settings
from fedapp.terminal import Terminal
from strategies.run import check_read, engine_name, log, train

LOG_WIDTH = 100  # characters, of the table of scores

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and write the report unless a command that waits for the run does."""
    leave_no_core()
    if engine_name(grid) == "deployment":
        start_log("serverapp", context.run_id)
    else:  # a handler of the root logger would print Flower's lines twice
        log.addHandler(logging.StreamHandler(sys.stdout))
        log.setLevel(logging.INFO)
    apply("server" if engine_name(grid) == "deployment" else "simulation", grid)
    try:
        settings = load_settings(context.run_config)
        check_read(settings)
        train_alone(grid, settings)
    except FedappError:
        logging.getLogger("flwr").addFilter(in_one_sentence)
        raise


def in_one_sentence(record: logging.LogRecord) -> bool:
    """Log filter: Flower logs a FedappError without its traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, FedappError):
        record.msg = f"{type(error).__name__}: {error}"
        record.args = ()
        record.exc_info = None
    return True


def train_alone(grid: Grid, settings: Settings) -> RunFolder:
    """Train, log the run and write its report, as a command does for a simulated run."""
    settings = resumed_settings(settings)
    warnings = slow_modes(engine_name(grid))
    if not settings.run_dir:
        run_dir = str(new_run_dir(settings.strategy))
        settings = settings.model_copy(update={"run_dir": run_dir})
    folder = RunFolder(Path(settings.run_dir))
    # A held folder belongs to a command that logs and reports itself.
    is_logged = engine_name(grid) == "deployment" or not folder.path.exists() or not folder.is_held
    if not settings.log or not is_logged:
        train(grid, settings, warnings=warnings)
        if not folder.is_held:
            show(folder)
        return folder
    from fedapp.runs.logs import MLflowLog

    with MLflowLog(settings, folder, engine_name(grid), log.info) as logs:
        train(grid, settings, logs.before(None), warnings=warnings)
        logs.note()
        show(folder)
        logs.end()
    return folder


def show(folder: RunFolder) -> None:
    """Write a run's report and print its scores."""
    from fedapp.report import write_report
    from fedapp.report.summary import print_summary
    from fedapp.run_folder import read_run

    write_report(folder.path)
    print_summary(read_run(folder.path).summary, Terminal(width=LOG_WIDTH), folder.path)
