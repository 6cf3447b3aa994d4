"""The one harness of all studies: how they measure and print.

Benches compare a result with its reference first, then time it: warm-up, median of at least five,
and one JSON line (``print_line``). Papers have more, in ``paper.py``.
"""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet
from rich.console import Console
from rich.table import Table as Grid

from fedapp import metrics
from fedapp.data.table import Table
from fedapp.errors import ConfigError
from fedapp.home import app_folder
from fedapp.process import versions
from fedapp.runs.agreement import same_nodes
from fedapp.settings import Settings
from fedapp.trees.categories import Categories
from fedapp.trees.forest import levels
from fedapp.trees.forest.bagged import BaggedForest, grow_forest, leaf_values
from fedapp.trees.forest.cart import Rules, bin_columns, code_columns
from fedapp.trees.forest.label_codes import class_codes, number_codes
from fedapp.trees.losses import REGRESSION
from fedapp.trees.objective import n_outputs
from fedapp.trees.predict import Nodes
from fedapp.trees.sets import category_counts
from strategies.run import load_strategy

STATUS = "/proc/{process}/status"
PACKAGES = ("fedapp", "flwr", "numpy", "numba", "xgboost", "scikit-learn", "torch", "gmpy2", "phe")
SEED = 42
# Settings that all measured runs share.
BINARY = {"objective": "binary:logistic", "valid-fraction": 0.0, "seed": SEED}
T = TypeVar("T")
Row = dict[str, Any]
console = Console() if sys.stdout.isatty() else Console(width=160)
OBJECTIVES = dict(zip(("binary", "multiclass", "regression"), metrics.OBJECTIVES[:3], strict=True))


def peak_bytes(process: int | str = "self") -> int:
    """Peak memory of this process, in bytes, including shared libraries; on Linux also of another.

    On Linux, ``getrusage`` would report the peak inherited from the parent process.
    """
    status = Path(STATUS.format(process=process))
    if status.exists() or process != "self":
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def cpu_seconds() -> float:
    """CPU seconds of all threads and of the child processes that have ended."""
    return time.process_time() + children_seconds()


def children_seconds() -> float:
    """CPU seconds of the child processes that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a new process, so that its peak memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


@contextmanager
def looking(look: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call ``look`` every ``seconds`` while the block runs, and once at its end."""
    ended = threading.Event()

    def run() -> None:
        has_ended = False
        while not has_ended:
            has_ended = ended.wait(seconds)
            look()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def growth(before: Row, row: Row, size: str, figures: Iterable[str]) -> Row:
    """Exponents with which figures grow from one row to the next: 1 if they double with the size.

    A figure that one of the rows lacks is omitted.
    """
    numbers = [
        name
        for name in figures
        if all(isinstance(compared.get(name), int | float) for compared in (before, row))
    ]
    return {
        f"growth of {name}": math.log(row[name] / before[name]) / math.log(row[size] / before[size])
        for name in numbers
    }


def check_names(what: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise ConfigError if a name is not among those allowed."""
    for name in names:
        if name not in (choices := list(allowed)):
            raise ConfigError(f"{what} must be of {', '.join(choices)}, got {name!r}")


def repeated(functions: Sequence[Callable[[], T]], repeats: int = 5) -> list[list[T]]:
    """Results of each function over ``repeats``, in which all take turns, after a warm-up."""
    turns = [[function() for function in functions] for _ in range(repeats + 1)]
    return [list(results) for results in zip(*turns[1:], strict=True)]


def show(title: str, rows: Iterable[Row], columns: str, n_texts: int = 1) -> None:
    """Print a table; the first ``n_texts`` columns are texts, the others numbers.

    ``columns`` is like ``data; PAX=auc:.4f; MB=mb:.1f``: a heading, the field if it has another
    name, and its format. A row without the field has an empty cell; ``mb`` are its ``bytes`` in MB.
    """
    console.print(title, style="italic", soft_wrap=True)
    grid = Grid(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    fields = []
    for index, text in enumerate(columns.split("; ")):
        heading, is_named, field_text = text.partition("=")
        name, _, form = (field_text if is_named else heading).partition(":")
        fields.append((name, form))
        heading = heading if is_named else name
        grid.add_column(heading, justify="left" if index < n_texts else "right", no_wrap=True)
    for row in rows:
        values = {**row, "mb": row["bytes"] / 1e6} if row.get("bytes") is not None else row
        cells = ((values.get(name), form) for name, form in fields)
        grid.add_row(*("" if value is None else format(value, form) for value, form in cells))
    console.print(grid)


def print_line(bench: str, **figures: Any) -> None:
    """Print a bench's JSON line, with when, where and of which code and packages it is."""
    line = {"bench": bench, **figures, **provenance(), "versions": versions(PACKAGES)}
    print(json.dumps(line), flush=True)


def provenance() -> Row:
    """Date, commit and machine of a result, to be kept with it.

    A load above the number of cores: other programs used them as well.
    """
    today, load = datetime.now(UTC).date().isoformat(), round(os.getloadavg()[0], 2)
    return {"date": today, "commit": commit(), "cores": os.cpu_count(), "load": load}


def made(before: Mapping[str, Any], seconds: float) -> str:
    """The line above a table of results: when and where a command ran, and what it took.

    ``before`` is the ``provenance`` of its start.
    """
    machine = f"{before['cores']} cores, load {before['load']} to {provenance()['load']}"
    took = f"{seconds:.0f} s, {cpu_seconds():.0f} CPU seconds"
    return f"Date: {before['date']}. Commit: {before['commit']}. Machine: {machine} ({took})."


@functools.cache
def commit() -> str:
    """The commit of the code that this process began with."""
    git = ["git", "-C", str(app_folder()), "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(OSError):  # no git
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        return done.stdout.strip() or "unknown"
    return "unknown"


# Rows of results


def mean_of(rows: Sequence[Row], name: str) -> float:
    """Mean of a field, usually over the seeds."""
    return float(np.mean([row[name] for row in rows]))


def averaged(rows: Iterable[Row], *names: str) -> list[Row]:
    """A row for each combination of some fields: the first one, with the means of its numbers."""
    means = []
    for group in grouped(rows, *names).values():
        floats = [name for name, value in group[0].items() if isinstance(value, float | int)]
        others = [name for name in floats if name not in names]
        means.append({**group[0], **{name: mean_of(group, name) for name in others}})
    return means


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


def write_rows(
    path: Path,
    table: Table,
    rows: npt.NDArray[Any],
    labelled: bool = True,
    ids: Sequence[str] = (),
) -> str:
    """Write some rows of a table as Parquet, with the label y, and ids of the rows as id.

    Returns the setting ``data``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = zip(table.columns, table.values[rows].T, strict=True)
    arrays: Row = {"id": ids} if ids else {}
    arrays |= {name: np.ascontiguousarray(column) for name, column in columns}
    if labelled:
        assert table.labels is not None
        arrays["y"] = table.labels[rows]
    pa.parquet.write_table(pa.table(arrays), path)
    return str(path.resolve())


# Models that are compared with a run's


def pooled_forest(
    settings: Settings,
    columns: Sequence[str],
    values: npt.NDArray[np.float32],
    labels: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    categories: Categories = (),
) -> tuple[BaggedForest, levels.Rows, Nodes]:
    """Grow the forest of a run, with the same random draws, from all columns in one place.

    ``values``, ``labels`` and ``weights`` are of the training rows, in the run's order. Returns the
    forest, the rows it grew from, and the leaf of each row in each tree.
    """
    section: Any = load_strategy(settings.strategy).section_settings(settings)
    is_numbers = settings.objective == REGRESSION
    n_rows, n_columns = values.shape
    codes, unit = number_codes(labels) if is_numbers else (class_codes(labels), 1.0)
    widths = category_counts(categories, n_columns)
    bins = bin_columns(values, settings.max_bin, widths)
    counts = levels.row_counts(section.bootstrap, settings.seed, section.trees, n_rows)
    exact_weights = weights.astype(np.float64)
    rows = levels.Rows(code_columns(values, bins), bins, codes, exact_weights, counts)
    n_classes = 0 if is_numbers else int(labels.max()) + 1
    rules = Rules(
        section.criterion_for(settings.objective),
        n_classes,
        section.min_samples_split,
        section.min_samples_leaf,
        section.min_impurity_decrease / unit**2,
    )
    seeds = levels.column_seeds(settings.seed, n_columns)
    n_drawn = levels.n_features(section.max_features, n_columns)
    trees, sets, nodes = grow_forest(
        rows, values, seeds, n_drawn, section.max_depth, rules, section.max_features_per
    )
    sizes, width = np.array([len(tree) for tree in trees]), n_outputs(settings.objective, n_classes)
    leaves = leaf_values(nodes, counts, exact_weights, labels, sizes, n_classes, width)
    classes = tuple(map(str, range(n_classes)))
    model = BaggedForest(
        settings.objective, tuple(columns), classes, trees, leaves, sets, categories
    )
    return model, rows, nodes


def count_same_nodes(ours: Row, theirs: Row) -> int:
    """Number of nodes of two equal models; ValueError if they differ."""
    n_same, n_nodes = same_nodes(ours, theirs)
    if n_same < n_nodes:
        raise ValueError(f"nodes must be the same, got {n_same} of {n_nodes} equal")
    return n_nodes
