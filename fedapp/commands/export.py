"""``fedapp export``: a run's model for other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedapp.commands.common import console
from fedapp.errors import ConfigError
from fedapp.home import open_private, write_atomically

SUFFIXES = {"onnx": "model.onnx", "xgboost": "model.xgb.json", "sklearn": "model.joblib"}


def export(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run.")],
    to: Annotated[str, typer.Option(help="onnx, xgboost, or sklearn (forests).")] = "onnx",
    output: Annotated[
        Path | None, typer.Option(help="File to write; by default in the run's folder.")
    ] = None,
) -> None:
    """Write a run's model for other runtimes: as ONNX, for stock XGBoost, or scikit-learn."""
    from fedapp.api import load

    if to not in SUFFIXES:
        raise ConfigError(f"--to must be one of {', '.join(SUFFIXES)}, got {to!r}")
    run = load(run_dir)
    file = output or run.path / SUFFIXES[to]
    if to == "onnx":
        write_atomically(file, run.to_onnx())
    elif to == "sklearn":
        from joblib import dump

        with open_private(file, "wb") as opened:
            dump(run.to_sklearn(), opened)
    else:
        run.to_xgboost()
        if file.resolve() != run.path / SUFFIXES[to]:
            write_atomically(file, (run.path / SUFFIXES[to]).read_bytes())
    console.print(f"{file}", soft_wrap=True, highlight=False)
