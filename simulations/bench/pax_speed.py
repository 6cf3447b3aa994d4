"""How fast PAX trains, beside pooled XGBoost and XGBoost's own federated plugin.

PAX: ``seconds.train`` of a run in this process: sketches and all trees, with messages encoded and
checked, and each party's state written to disk after every round. XGBoost: ``QuantileDMatrix`` and
``train``. The plugin: the same in three worker processes connected by a server on this machine,
from a barrier to the end of the last worker. Reading the table does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet
import xgboost
from rich.console import Console

from fedapp import metrics
from fedapp.data.datasets import find_dataset, locate, read_source
from fedapp.data.labels import class_ids, class_names
from fedapp.data.schema import Roles
from fedapp.runs.baselines import count_same_nodes, temporary_run, xgboost_parameters
from fedapp.settings import Settings, load_settings
from fedapp.site.table import share_rows
from simulations.bench import BINARY, SEED, peak_bytes, show, tell
from simulations.bench.federated_plugin import Work, check_plugin, train_federated

N_PARTIES, N_TRAIN, N_TEST, N_COLUMNS = 3, 20_000, 10_000, 23
N_TREES, MAX_BIN, ETA, DEPTHS = 20, 255, 0.3, (4, 6)
REPEATS, THREADS = 5, 2
# Three workers share two cores; with two threads each they took ten times as long.
WORKER_THREADS = 1
# The test AUC of pooled XGBoost varies by 0.007 as max-bin goes from 251 to 259, so the AUC of PAX
# is compared with the mean over these values.
WORST_AUC_DIFFERENCE, NEARBY_BINS = 0.003, range(251, 260)

POOLED, PLUGIN = "XGBoost, pooled", "XGBoost, plugin"

Rows = npt.NDArray[np.float32]
console = Console()


@dataclass(frozen=True, slots=True, eq=False)
class Subsets:
    """Training rows by party, and the test rows of all."""

    values: tuple[Rows, ...]
    labels: tuple[Rows, ...]
    test_values: Rows
    test_labels: Rows


@dataclass(frozen=True, slots=True)
class Measured:
    """One line of the result."""

    method: str
    depth: int
    seconds: float
    # Of all threads. PAX: from reading the table to the written summary; pooled XGBoost: of what
    # ``seconds`` counts; plugin: None.
    cpu_seconds: float | None
    auc: float
    messages: int = 0
    n_bytes: int = 0


def write_table(folder: Path) -> tuple[str, str]:
    """Setting ``data`` and its name; writes a synthetic table if default-credit is missing."""
    if locate(find_dataset("default-credit").files[0]):
        return "default-credit", "default-credit"
    path = write_rows(folder / "synthetic.parquet", N_TRAIN + N_TEST, N_COLUMNS)
    return path, "synthetic, of the size of default-credit"


def write_rows(path: Path, n_rows: int, n_columns: int) -> str:
    """Write a table of numbers without ties, whose label depends on five of its columns."""
    rng = np.random.default_rng(SEED)
    values = rng.standard_normal((n_rows, n_columns)).astype(np.float32)
    margins = values[:, :4] @ np.array([1.0, -0.5, 0.5, 0.25]) + np.abs(values[:, 4]) - 1
    labels = (rng.random(n_rows) < 1 / (1 + np.exp(-margins))).astype(np.float64)
    columns = {f"x{column}": values[:, column] for column in range(n_columns)}
    pa.parquet.write_table(pa.table({**columns, "label": labels}), path)
    return str(path)


def settings_of(data: str, depth: int, bins: str, parties: int = N_PARTIES) -> Settings:
    config = {
        "strategy": "pax",
        "data": data,
        **BINARY,
        "label": "label" if Path(data).suffix else "",
        "parties": parties,
        "test-fraction": N_TEST / (N_TRAIN + N_TEST),
        "num-boost-round": N_TREES,
        "max-depth": depth,
        "max-bin": MAX_BIN,
        "eta": ETA,
        "pax.bins": bins,
    }
    return load_settings(config)


def read_rows(settings: Settings) -> Subsets:
    table = read_source(settings.data, Roles(label=settings.label))
    assert table.labels is not None
    labels = class_ids(table.labels, class_names(table.labels, settings.objective))
    shares = share_rows(table, settings.holdout, settings.partition, settings.parties)
    train, test = shares["train"], np.sort(np.concatenate(shares["test"]))
    return Subsets(
        tuple(table.values[rows] for rows in train),
        tuple(labels[rows].astype(np.float32) for rows in train),
        table.values[test],
        labels[test].astype(np.float32),
    )


def run_pax(settings: Settings) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Summary of a run with its CPU seconds, model as XGBoost's JSON, and number of messages."""
    cpu_start = time.process_time()
    with temporary_run(settings) as run:
        summary = {**run.summary, "cpu_seconds": time.process_time() - cpu_start}
        model = json.loads((run.path / "model.xgb.json").read_text())
        return summary, model, len(run.ledger.read_text().splitlines())


def measure_pax(settings: Settings, repeats: int) -> Measured:
    """Medians over the runs, after a warm-up."""
    runs = [run_pax(settings) for _ in range(repeats + 1)][1:]
    summary, _, n_messages = runs[-1]
    seconds = statistics.median(summary["seconds"]["train"] for summary, _, _ in runs)
    cpu_seconds = statistics.median(summary["cpu_seconds"] for summary, _, _ in runs)
    method = f"PAX, {settings.sections['pax']['bins']}"
    auc = summary["metrics"]["test"]["auc"]
    n_bytes = sum(summary["bytes"].values())
    return Measured(method, settings.max_depth, seconds, cpu_seconds, auc, n_messages, n_bytes)


def train_pooled(parameters: Mapping[str, Any], rows: Subsets) -> tuple[float, float, Any]:
    """Seconds, CPU seconds, and the booster trained on all parties' rows."""
    values, labels = np.concatenate(rows.values), np.concatenate(rows.labels)
    start, cpu_start = time.perf_counter(), time.process_time()
    matrix = xgboost.QuantileDMatrix(values, labels, max_bin=parameters["max_bin"], nthread=THREADS)
    booster = xgboost.train(dict(parameters), matrix, N_TREES)
    return time.perf_counter() - start, time.process_time() - cpu_start, booster


def measure_pooled(settings: Settings, rows: Subsets, repeats: int) -> Measured:
    parameters = parameters_of(settings, rows)
    runs = [train_pooled(parameters, rows) for _ in range(repeats + 1)][1:]
    seconds, cpu_seconds = (statistics.median(run[figure] for run in runs) for figure in (0, 1))
    margins = runs[-1][2].predict(xgboost.DMatrix(rows.test_values), output_margin=True)
    return Measured(POOLED, settings.max_depth, seconds, cpu_seconds, test_auc(margins, rows))


def parameters_of(settings: Settings, rows: Subsets, threads: int = THREADS) -> dict[str, Any]:
    labels = np.concatenate(rows.labels)
    parameters = xgboost_parameters(settings, labels, np.ones_like(labels), labels)
    return {**parameters, "nthread": threads}


def test_auc(margins: Rows, rows: Subsets) -> float:
    """Test AUC as a run computes it."""
    labels = rows.test_labels
    weights = np.ones_like(labels)
    return metrics.pooled("binary:logistic", margins.reshape(-1, 1), labels, weights)["auc"]


def check_against_xgboost(data: str, depth: int) -> int:
    """Check that one party's model equals pooled XGBoost; return the number of nodes."""
    settings = settings_of(data, depth, "equal", parties=1)
    whole = read_rows(settings)
    *_, booster = train_pooled(parameters_of(settings, whole), whole)
    _, model, _ = run_pax(settings)
    return count_same_nodes(model, json.loads(booster.save_raw("json")))


def measure_plugin(
    all_settings: Mapping[int, Settings], rows: Subsets, repeats: int
) -> tuple[list[Measured], int]:
    """Measure XGBoost's plugin at every depth; also the peak memory of a worker in bytes."""
    parameters = {
        depth: parameters_of(settings, rows, WORKER_THREADS)
        for depth, settings in all_settings.items()
    }
    works = [
        Work(values, labels, rows.test_values, parameters, N_TREES, MAX_BIN, repeats)
        for values, labels in zip(rows.values, rows.labels, strict=True)
    ]
    trained, peak = train_federated(works)
    lines = [
        Measured(PLUGIN, depth, one.seconds, None, test_auc(one.margins, rows))
        for depth, one in trained.items()
    ]
    return lines, peak


def ratios(lines: Sequence[Measured]) -> list[dict[str, Any]]:
    """Add ratios to XGBoost's seconds at the same depth; None if that was not measured."""
    times = {(line.method, line.depth): line.seconds for line in lines}
    records = []
    for line in lines:
        others = [times.get((method, line.depth)) for method in (POOLED, PLUGIN)]
        each = [other and line.seconds / other for other in others]
        records.append({**asdict(line), **dict(zip(("/ pooled", "/ plugin"), each, strict=True))})
    return records


def rows_of(lines: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for line in lines:
        each = [line[ratio] and f"{line[ratio]:.2f}" for ratio in ("/ pooled", "/ plugin")]
        sent = [str(line["messages"]), f"{line['n_bytes'] / 1e6:.1f}"] if line["messages"] else []
        cpu_seconds = line["cpu_seconds"] and f"{line['cpu_seconds']:.3f}"
        times = [f"{line['seconds']:.3f}", cpu_seconds or ""]
        cells = [*times, *(ratio or "" for ratio in each), f"{line['auc']:.5f}"]
        yield [line["method"], str(line["depth"]), *cells, *sent]


def measure(data: str, repeats: int, with_plugin: bool) -> tuple[list[Measured], int | None]:
    """Check, then time, every method at every depth."""
    lines = []
    all_settings = {depth: settings_of(data, depth, "share") for depth in DEPTHS}
    rows = read_rows(all_settings[DEPTHS[0]])
    for depth, settings in all_settings.items():
        n_nodes = check_against_xgboost(data, depth)
        console.print(f"depth {depth}: one party equals pooled XGBoost in all {n_nodes} nodes")
        lines.append(measure_pooled(settings, rows, repeats))
        parameters, aucs = parameters_of(settings, rows), []
        for n_bins in NEARBY_BINS:
            *_, booster = train_pooled({**parameters, "max_bin": n_bins}, rows)
            margins = booster.predict(xgboost.DMatrix(rows.test_values), output_margin=True)
            aucs.append(test_auc(margins, rows))
        auc = float(np.mean(aucs))
        for bins in ("share", "equal"):
            lines.append(measure_pax(settings_of(data, depth, bins), repeats))
            difference = lines[-1].auc - auc
            console.print(f"{lines[-1].method}: AUC {difference:+.5f} from pooled")
            if abs(difference) > (limit := WORST_AUC_DIFFERENCE):
                raise RuntimeError(f"AUC must be within {limit} of pooled, got {difference:+.5f}")
    plugin, peak = measure_plugin(all_settings, rows, repeats) if with_plugin else ([], None)
    return [*lines, *plugin], peak


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--without-plugin", action="store_true")
    options = parser.parse_args(words)
    if not options.without_plugin:
        check_plugin()
    with tempfile.TemporaryDirectory() as folder:
        data, name = write_table(Path(folder))
        lines, plugin_peak = measure(data, options.repeats, not options.without_plugin)
    lines.sort(key=lambda line: line.depth)
    records = ratios(lines)
    sizes = f"{N_PARTIES} parties, {N_TRAIN} x {N_COLUMNS}, {N_TREES} trees, {MAX_BIN} bins"
    header = ["method", "depth", "sec.", "CPU", "/ pooled", "/ plugin", "AUC", "messages", "MB"]
    show(f"{name}: {sizes}, median of {options.repeats}", header, rows_of(records))
    tell(
        "pax_speed",
        ("fedapp", "xgboost", "numpy", "flwr"),
        data=name,
        parties=N_PARTIES,
        rows=N_TRAIN,
        columns=N_COLUMNS,
        trees=N_TREES,
        max_bin=MAX_BIN,
        seed=SEED,
        repeats=options.repeats,
        by=["method", "depth"],
        lines=records,
        # Of this process: the server, three parties, and pooled XGBoost.
        peak_bytes=peak_bytes(),
        plugin_worker_peak_bytes=plugin_peak,
    )


if __name__ == "__main__":
    main()
