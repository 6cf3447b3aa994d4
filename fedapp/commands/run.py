"""``fedapp run``: train a model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fedapp.commands.common import (
    SIMULATED,
    Overrides,
    check_method,
    console,
    engine_of,
    run_dir_of,
)
from fedapp.config import Settings, load_settings, parse_overrides
from fedapp.errors import ConfigError
from fedapp.run_folder import RunFolder, resumed_settings


def run(
    strategy: Annotated[
        str,
        typer.Argument(
            help="pax, fedxgbllr, bagging, cyclic, fedavg-linear, secureboost or federated-forest."
        ),
    ],
    config: Overrides = None,
    engine: Annotated[
        str,
        typer.Option(help="local (this process), simulation (Flower's), or a SuperLink's name."),
    ] = "simulation",
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Also train on pooled rows, and each party alone.")
    ] = False,
) -> None:
    """Train a model and write the run's folder."""
    from fedapp.server_app import write_report

    settings = load_settings({**parse_overrides(config or []), "strategy": strategy})
    settings = resumed_settings(settings)
    check_method(settings, engine)
    if baselines and engine not in SIMULATED:
        raise ConfigError(f"--baselines must have all rows in one place, got --engine {engine}")
    settings = settings.model_copy(update={"run_dir": run_dir_of(settings, engine)})
    with followed(settings):
        folder = engine_of(engine)(settings)
    if not (folder.path / "summary.json").exists():
        console.print("The run has finished; its folder lies where the ServerApp runs.")
        return
    if baselines:
        _add_baselines(folder, settings)
    write_report(folder)
    _show(folder)


@contextmanager
def followed(settings: Settings) -> Iterator[None]:
    """Show progress while the block runs."""
    from fedapp.metrics import default_metric
    from fedapp.report.progress import follow
    from fedapp.server_app import load_strategy

    ended = threading.Event()
    thread = threading.Thread(
        target=follow,
        args=(
            RunFolder(Path(settings.run_dir)).rounds,
            load_strategy(settings.strategy).most_rounds(settings),
            default_metric(settings.objective),
            console,
            lambda: not ended.is_set(),
        ),
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _add_baselines(folder: RunFolder, settings: Settings) -> None:
    """Write the baselines into the summary."""
    from simulations.baselines import run_baselines

    summary = json.loads((folder.path / "summary.json").read_text())
    folder.write_json("summary.json", {**summary, "baselines": run_baselines(settings)})


def _show(folder: RunFolder) -> None:
    """Print a run's summary and where it lies."""
    from fedapp.report.summary import print_summary, read_run

    print_summary(read_run(folder.path).summary, console, folder.path)
