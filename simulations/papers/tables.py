"""Shared by papers and benchmarks: rows of results, and tables that are printed and written."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as Grid

from fedapp.packages import versions
from fedapp.run_folder import RunFolder
from fedapp.runs.compare import other_code

Row = dict[str, Any]

console = Console() if sys.stdout.isatty() else Console(width=100)


def mean_of(rows: Sequence[Row], name: str) -> float:
    """Mean of a field, usually over the seeds."""
    return float(np.mean([row[name] for row in rows]))


def costs(summary: Mapping[str, Any]) -> Row:
    """Seconds of training, bytes both ways, and exchanges."""
    return {
        "seconds": summary["seconds"]["train"],
        "bytes": sum(summary["bytes"].values()),
        "exchanges": summary["exchanges"],
    }


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Group rows by the values of some fields, in order of appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def new_grid(heading: str, names: Sequence[str], n_texts: int) -> Grid:
    """An empty table for 80 characters; columns after the first ``n_texts`` are numbers."""
    grid = Grid(title=heading, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column, name in enumerate(names):
        grid.add_column(name, justify="left" if column < n_texts else "right", no_wrap=True)
    return grid


def write_tables(
    output: Path,
    module: str,
    start: float,
    packages: Sequence[str],
    tables: Mapping[str, Any],
    runs: Path | None = None,
) -> None:
    """Write ``tables.json`` with the command and package versions, and print where.

    Also prints which cached results are of other code. ``module`` is the command below
    ``simulations``, ``start`` a value of ``time.monotonic``; ``runs`` is the folder of the runs, if
    it is another one.
    """
    command = " ".join([f"python -m simulations.{module}", *sys.argv[1:]])
    package_versions = versions(("fedapp", "flwr", "numpy", *packages))
    document = {**tables, "command": command, "versions": package_versions}
    RunFolder(output).write_json("tables.json", document)
    spent = f"{time.monotonic() - start:.0f} seconds"
    console.print(f"{spent}; written to {output / 'tables.json'}", soft_wrap=True)
    if warning := other_code(runs or output):
        console.print(warning, soft_wrap=True)
