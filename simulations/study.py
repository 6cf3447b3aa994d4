"""The one harness of all studies: how they measure and print.

A `Bench` compares results with their reference, measures, and has a JSON line for each case. Papers
have more, in ``paper.py``.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import multiprocessing
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet
from rich.console import Console
from rich.table import Table as Grid

from fedapp import metrics
from fedapp.arrays import Floats
from fedapp.crypto.workers import shared_workers
from fedapp.data.labels import class_ids
from fedapp.data.partition import SUBSETS
from fedapp.data.table import Table
from fedapp.errors import ConfigError
from fedapp.home import app_folder
from fedapp.process import versions
from fedapp.records.document import load
from fedapp.run_files import Summary
from fedapp.run_folder import RunFolder
from fedapp.runs.baselines import Pooled, baseline_rows, same_nodes, train_boosted
from fedapp.runs.clean import forget_model
from fedapp.runs.local import run_local
from fedapp.runs.tables import resolve_objective, stacked_tables
from fedapp.settings import Settings, load_settings
from fedapp.trees.categories import Categories, category_counts, recoded
from fedapp.trees.forest import bagged
from fedapp.trees.forest.bagged import BaggedForest, grow_forest, leaf_values
from fedapp.trees.forest.cart import Rules, bin_columns, class_codes, code_columns, number_codes
from fedapp.trees.losses import REGRESSION
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import n_outputs
from fedapp.trees.predict import Nodes, predict_margins
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
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


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


@contextmanager
def timed(*functions: tuple[Any, str]) -> Iterator[list[tuple[str, float, float]]]:
    """Name, start and end of each call, while the block runs, of functions by owner and name."""
    calls = list[tuple[str, float, float]]()

    def timing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                calls.append((name, start, time.perf_counter()))

        return call

    with ExitStack() as stack:
        for owner, name in functions:
            stack.enter_context(patch.object(owner, name, timing(name, getattr(owner, name))))
        yield calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A bench as data: what is compared, what is measured, and how it is printed.

    ``reference`` is called before anything is timed; it raises if a result is another. With
    ``repeats`` all cases take turns in this process, the first turn is a warm-up, and figures are
    medians. Without, a case is measured once, in a new process, so that its peak memory is its own.
    """

    cases: Sequence[Row]  # names and sizes of each line, the arguments of ``measure``
    measure: Callable[..., Row]
    reference: Callable[[], Row] = dict  # returns further fields of all lines
    repeats: int = 0
    sizes: Row = field(default_factory=dict)  # of all lines
    size: str = ""  # the field of a case with which figures grow
    base: Row = field(default_factory=dict)  # fields of earlier cases that others are compared with
    figures: tuple[str, ...] = ("seconds", "cpu_seconds")  # that are compared
    title: str = ""
    columns: str = ""  # of the table, see ``show``

    def lines(self) -> Iterator[Row]:
        """A line for each case, and then the table.

        ``growth of X`` is the exponent of the size with which X grows from the line before, 1 if X
        doubles with the size; ``ratio of X`` is to the line of ``base``.
        """
        fields, lines = self.reference(), list[Row]()
        measure = [partial(self.measure, **case) for case in self.cases]
        measured: Iterable[Row] = (apart(with_peak, each) for each in measure)
        if self.repeats:
            fields |= {"repeats": self.repeats}
            _, *turns = ([each() for each in measure] for _ in range(self.repeats + 1))
            measured = map(medians, zip(*turns, strict=True))
        for case, figures in zip(self.cases, measured, strict=True):
            line = {**case, **figures}
            others = {name: value for name, value in case.items() if name != self.size}
            if self.size and lines and others.items() <= lines[-1].items():
                line |= growth(lines[-1], line, self.size, self.figures)
            for other in lines if self.base else ():
                if {**case, **self.base}.items() <= other.items():
                    line |= ratios(other, line, self.figures)
            lines.append(line)
            yield {**self.sizes, **fields, **line}
        if self.columns:
            show(self.title, lines, self.columns)


def with_peak(measure: Callable[[], Row]) -> Row:
    """Figures, with the peak memory of this process."""
    figures = measure()
    return {"peak_bytes": peak_bytes(), **figures}


def medians(rows: Sequence[Row]) -> Row:
    """Medians of numbers; of any other field the last value."""
    return {
        name: statistics.median(row[name] for row in rows)
        if isinstance(last, int | float)
        else last
        for name, last in rows[-1].items()
    }


def numbers_of(rows: Sequence[Row], figures: Iterable[str]) -> list[str]:
    """Those of the figures that are numbers in each row."""
    return [name for name in figures if all(isinstance(row.get(name), int | float) for row in rows)]


def growth(before: Row, row: Row, size: str, figures: Iterable[str]) -> Row:
    """Exponents with which figures grow from one row to the next: 1 if they double with the size.

    A figure that one of the rows lacks is omitted.
    """
    return {
        f"growth of {name}": math.log(row[name] / before[name]) / math.log(row[size] / before[size])
        for name in numbers_of((before, row), figures)
    }


def ratios(base: Row, row: Row, figures: Iterable[str]) -> Row:
    """Figures of a row as parts of those of another."""
    return {f"ratio of {name}": row[name] / base[name] for name in numbers_of((base, row), figures)}


@contextmanager
def measured(settings: Settings) -> Iterator[tuple[RunFolder, Row]]:
    """A run in this process, and what it took; its files are deleted after the block."""
    start, cpu_start = time.perf_counter(), cpu_seconds()
    with temporary_run(settings) as run:
        seconds = time.perf_counter() - start
        shared_workers().close()  # whose seconds are counted then
        spent = cpu_seconds() - cpu_start
        yield run, {**figures_of(run.path), "cpu_seconds": spent, "seconds_in_all": seconds}


def run_once(settings: Settings) -> Row:
    """What a run in this process took."""
    with measured(settings) as (_, figures):
        return figures


def figures_of(run_dir: Path) -> Row:
    """What a run took, by its files; a tree's costs are medians without the first and last round.

    ``seconds`` are of training. The first tree also computes tables of masks.
    """
    run = RunFolder(run_dir)
    rounds = run.rounds[1:-1] or run.rounds[-1:]
    figures: Row = {**costs(run.summary), "messages": run.sums.n_messages.total()}
    for line in rounds[:1]:
        figures["seconds_a_tree"] = statistics.median(line["seconds"] for line in rounds)
        figures["bytes_a_tree"] = statistics.median(sum(line["bytes"].values()) for line in rounds)
    return figures | {"auc": run.summary["metrics"].get("test", {}).get("auc")}


def check_names(what: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise ConfigError if a name is not among those allowed."""
    for name in names:
        if name not in (choices := list(allowed)):
            raise ConfigError(f"{what} must be of {', '.join(choices)}, got {name!r}")


def show(title: str, rows: Iterable[Row], columns: str, n_texts: int = 1) -> None:
    """Print a table; the first ``n_texts`` columns are texts, the others numbers.

    ``columns`` is like ``data; PAX=auc:.4f; MB=mb:.1f``: a heading, the field if it has another
    name, and its format. A row without the field has an empty cell; ``mb`` are its ``bytes`` in MB,
    ``peak_mb`` its ``peak_bytes``.
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
        in_mb = {"mb": "bytes", "peak_mb": "peak_bytes"}
        numbers = {mb: row[name] / 1e6 for mb, name in in_mb.items() if row.get(name) is not None}
        values = row | numbers
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


@cache
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


def write_numbers(path: Path, n_rows: int, n_columns: int) -> str:
    """Write a table of numbers without ties, whose label depends on five of its columns."""
    rng = np.random.default_rng(SEED)
    values = rng.standard_normal((n_rows, n_columns)).astype(np.float32)
    margins = values[:, :4] @ np.array([1.0, -0.5, 0.5, 0.25]) + np.abs(values[:, 4]) - 1
    labels = (rng.random(n_rows) < 1 / (1 + np.exp(-margins))).astype(np.float64)
    columns = {f"x{column}": values[:, column] for column in range(n_columns)}
    pa.parquet.write_table(pa.table({**columns, "label": labels}), path)
    return str(path)


def random_table(n_rows: int, n_columns: int) -> pa.Table:
    """Draw numbers with ids; the label depends on columns before and after the first ten."""
    rng = np.random.default_rng(SEED)
    values = rng.standard_normal((n_columns, n_rows), dtype=np.float32)
    margins = values[0] - values[10] + values[1] * values[11] + 0.5 * values[12]
    labels = rng.random(n_rows) < 1 / (1 + np.exp(-margins))
    names = [f"x{column}" for column in range(len(values))]
    table = pa.table([*values, labels.astype(np.float64)], names=[*names, "label"])
    return table.append_column("id", pa.array(range(n_rows)).cast(pa.string()))


# Models that are compared with a run's


def pooled_forest(
    settings: Settings,
    columns: Sequence[str],
    values: npt.NDArray[np.float32],
    labels: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    categories: Categories = (),
) -> tuple[BaggedForest, bagged.Rows, Nodes]:
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
    counts = bagged.row_counts(section.bootstrap, settings.seed, section.trees, n_rows)
    exact_weights = weights.astype(np.float64)
    rows = bagged.Rows(code_columns(values, bins), bins, codes, exact_weights, counts)
    n_classes = 0 if is_numbers else int(labels.max()) + 1
    rules = Rules(
        section.criterion_for(settings.objective),
        n_classes,
        section.min_samples_split,
        section.min_samples_leaf,
        section.min_impurity_decrease / unit**2,
    )
    seeds = bagged.column_seeds(settings.seed, n_columns)
    n_drawn = bagged.n_features(section.max_features, n_columns)
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


def boosted_scores(
    settings: Settings, rows: Pooled, **parts: npt.NDArray[np.int64]
) -> dict[str, dict[str, float]]:
    """Scores of XGBoost, trained on the training rows, on some of the rows each."""
    trained = train_boosted(settings, rows)
    return {
        name: metrics.pooled(
            settings.objective, trained.margins(ids), rows.labels[ids], rows.weights[ids]
        )
        for name, ids in parts.items()
        if len(ids)
    }


def same_as_xgboost(settings: Settings, run_dir: Path) -> tuple[int, int]:
    """Equal nodes of a run's model and of XGBoost's on all rows, and nodes."""
    settings = resolve_objective(settings)
    booster = train_boosted(settings, baseline_rows(settings)[0]).booster
    model = json.loads((run_dir / "model.xgb.json").read_text())
    return same_nodes(model, json.loads(booster.save_raw("json")))


def compare_with_xgboost(settings: Settings, run_dir: Path) -> int:
    """Number of nodes of a run's model; ValueError unless all are XGBoost's."""
    n_same, n_nodes = same_as_xgboost(settings, run_dir)
    if n_same < n_nodes:
        raise ValueError(f"nodes must be the same, got {n_same} of {n_nodes} equal")
    return n_nodes


# Runs whose files are deleted once a study has read them


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Margins and labels of one subset."""

    margins: Floats  # (n_rows, n_outputs)
    labels: Floats  # (n_rows,): class ids, or numbers
    row_ids: npt.NDArray[np.int64]  # rows of the whole table


@contextmanager
def temporary_run(settings: Settings) -> Iterator[RunFolder]:
    """A finished run in this process; its files are deleted after the block."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_local(settings.model_copy(update={"run_dir": f"{folder}/run"}))
        try:
            yield run
        finally:
            forget_model(run.summary["model_id"])


def run_summary(config: Row) -> Summary:
    """The summary of a run in this process, whose files are deleted."""
    with temporary_run(load_settings(config)) as run:
        return run.summary


def run_and_load(overrides: Mapping[str, Any]) -> tuple[Settings, Ensemble, Summary]:
    """Run in this process and delete the files; returns settings, model and summary."""
    settings = load_settings(dict(overrides))
    with temporary_run(settings) as run:
        return settings, load(run.path / "model.json", Ensemble), run.summary


def score(settings: Settings, model: Ensemble) -> dict[str, Scored]:
    """Apply a model to the rows of a run, by subset."""
    table, rows = stacked_tables(settings)
    assert table.labels is not None
    values = recoded(table.values, table.categories, model.categories, table.columns)[0]
    labels = class_ids(table.labels, model.classes)
    scored = {}
    for subset in SUBSETS:
        row_ids = np.concatenate([by_subset[subset] for by_subset in rows.values()])
        scored[subset] = Scored(predict_margins(model, values[row_ids]), labels[row_ids], row_ids)
    return scored


def auc_or_rmse(
    labels: npt.NDArray[Any], margins: npt.NDArray[Any], has_classes: bool
) -> tuple[str, float]:
    """Name and value of the score of margins: AUC of two classes, RMSE of numbers."""
    if has_classes:
        from sklearn.metrics import roc_auc_score

        return "auc", float(roc_auc_score(labels, margins))
    return "rmse", float(np.sqrt(np.mean((labels - margins) ** 2)))


# Options of a study's command


def command(function: Callable[..., Any], words: Sequence[str] | None = None) -> Any:
    """Call a study's function with the options of a command line, which its signature declares.

    A default gives an option its type: False is a switch, a tuple takes several values, a whole
    number must be >= 1 (or >= 0 if the default is 0). ``*names`` are words without an option.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=inspect.getdoc(function), formatter_class=raw)
    words_of = ""
    for name, parameter in inspect.signature(function).parameters.items():
        flag, default = f"--{name.replace('_', '-')}", parameter.default
        if parameter.kind is parameter.VAR_POSITIONAL:
            parser.add_argument(words_of := name, nargs="*")
        elif isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            values = default if isinstance(default, tuple) else (default,)
            value, nargs = next(iter(values), ""), "+" if values is default else None
            kind = partial(whole, int(value != 0)) if isinstance(value, int) else type(value)
            shown = f"by default {shlex.join(map(str, values))}" if default else None
            parser.add_argument(flag, type=kind, nargs=nargs, default=default, help=shown)
    parsed = vars(parser.parse_args(words)).items()
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in parsed}
    return function(*options.pop(words_of, ()), **options)


def whole(least: int, text: str) -> int:
    """Parse a whole number."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, got {text}")
    return int(text)
