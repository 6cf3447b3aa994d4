"""What papers' experiments and benchmarks share: rows of results, tables printed and in a file."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as Grid

from fedapp.packages import versions
from fedapp.run_folder import RunFolder

Row = dict[str, Any]

console = Console() if sys.stdout.isatty() else Console(width=100)


def mean_of(rows: Sequence[Row], name: str) -> float:
    """Mean over the seeds."""
    return float(np.mean([row[name] for row in rows]))


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by the values of some fields, in order of appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def kept(path: Path, make: Callable[[], Sequence[Row]]) -> list[Row]:
    """Rows that a file holds, or that are made now and written to it.

    Parameters
    ----------
    path : named by all that decides on the rows; so a command that was interrupted goes on.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        RunFolder(path.parent).write_json(path.name, {"rows": list(make())})
    return list(json.loads(path.read_text())["rows"])


def new_grid(heading: str, names: Sequence[str], n_texts: int) -> Grid:
    """An empty table narrow enough for 80 characters; columns after the texts are numbers."""
    grid = Grid(title=heading, box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for place, name in enumerate(names):
        grid.add_column(name, justify="left" if place < n_texts else "right", no_wrap=True)
    return grid


def write_tables(
    output: Path, module: str, start: float, packages: Sequence[str], tables: Mapping[str, Any]
) -> None:
    """Write ``tables.json``: with the command, and the versions of packages; print where.

    Parameters
    ----------
    output : folder.
    module : of the command, below ``simulations``.
    start : of the command, by ``time.monotonic``.
    """
    command = " ".join([f"python -m simulations.{module}", *sys.argv[1:]])
    found = versions(("fedapp", "flwr", "numpy", *packages))
    document = {**tables, "command": command, "versions": found}
    RunFolder(output).write_json("tables.json", document)
    spent = f"{time.monotonic() - start:.0f} seconds"
    console.print(f"{spent}; written to {output / 'tables.json'}", soft_wrap=True)
