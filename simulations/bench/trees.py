"""What training trees costs, beside XGBoost and scikit-learn: seconds, memory, bytes and scores.

Each bench is the function of its name (``python -m simulations bench NAME``), whose docstring says
what it measures, and has its sizes above it. ``pax_*`` and ``privacy`` measure PAX, ``rows`` all
tree methods as tables grow, ``federated_forest`` and ``fedxgbllr_epoch`` one method each. Heavy
libraries are imported in functions: a bench that reports memory must not load those of another.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import pyarrow.parquet

from fedapp import metrics
from fedapp.data.datasets import find_dataset, locate, read_source
from fedapp.data.labels import class_ids, class_names
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError
from fedapp.histograms.bins import code_type
from fedapp.kernels import n_cores
from fedapp.records.document import from_text
from fedapp.run_folder import RunFolder
from fedapp.runs.baselines import (
    Scored,
    join_tables,
    run_and_load,
    score,
    temporary_run,
    xgboost_parameters,
)
from fedapp.runs.flower import free_ports
from fedapp.runs.local import run_local
from fedapp.settings import Settings, flatten, load_settings
from fedapp.site.table import share_rows
from fedapp.trees.forest.model import BaggedForest
from simulations.deployment import DRAWS, Deployment
from simulations.study import (
    BINARY,
    SEED,
    Row,
    apart,
    check_names,
    console,
    count_same_nodes,
    cpu_seconds,
    growth,
    looking,
    peak_bytes,
    pooled_forest,
    repeated,
    show,
    write_rows,
)

if TYPE_CHECKING:
    from fedapp.trees.head import HeadRows
    from fedapp.trees.stacked import Floats, HeadShape, Kind


SPEED_PARTIES, N_TRAIN, N_TEST, SPEED_COLUMNS = 3, 20_000, 10_000, 23
SPEED_TREES, SPEED_BINS, SPEED_ETA, SPEED_DEPTHS = 20, 255, 0.3, (4, 6)
SPEED_REPEATS, SPEED_THREADS, LOOPS = 9, 2, 2_000
# Three workers share two cores; with two threads each they took ten times as long.
WORKER_THREADS = 1
# The test AUC of pooled XGBoost varies by 0.007 as max-bin goes from 251 to 259, so the AUC of PAX
# is compared with the mean over these values.
WORST_AUC_DIFFERENCE, NEARBY_BINS = 0.003, range(251, 260)

POOLED, PLUGIN = "XGBoost, pooled", "XGBoost, plugin"

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Subsets:
    """Training rows by party, and the test rows of all."""

    values: tuple[Rows, ...]
    labels: tuple[Rows, ...]
    test_values: Rows
    test_labels: Rows

    @property
    def pooled(self) -> tuple[Rows, Rows]:
        """Values and labels of all parties' training rows."""
        return np.concatenate(self.values), np.concatenate(self.labels)


def write_speed_table(folder: Path) -> tuple[str, str]:
    """Setting ``data`` and its name; writes a synthetic table if default-credit is missing."""
    if locate(find_dataset("default-credit").files[0]):
        return "default-credit", "default-credit"
    path = write_numbers(folder / "synthetic.parquet", N_TRAIN + N_TEST, SPEED_COLUMNS)
    return path, "synthetic, of the size of default-credit"


def write_numbers(path: Path, n_rows: int, n_columns: int) -> str:
    """Write a table of numbers without ties, whose label depends on five of its columns."""
    rng = np.random.default_rng(SEED)
    values = rng.standard_normal((n_rows, n_columns)).astype(np.float32)
    margins = values[:, :4] @ np.array([1.0, -0.5, 0.5, 0.25]) + np.abs(values[:, 4]) - 1
    labels = (rng.random(n_rows) < 1 / (1 + np.exp(-margins))).astype(np.float64)
    columns = {f"x{column}": values[:, column] for column in range(n_columns)}
    pa.parquet.write_table(pa.table({**columns, "label": labels}), path)
    return str(path)


def speed_settings(data: str, depth: int, bins: str, parties: int = SPEED_PARTIES) -> Settings:
    config: Row = {"strategy": "pax", "data": data, **BINARY}
    config |= {"label": "label" if Path(data).suffix else "", "parties": parties}
    config |= {"test-fraction": N_TEST / (N_TRAIN + N_TEST), "num-boost-round": SPEED_TREES}
    config |= {"max-depth": depth, "max-bin": SPEED_BINS, "eta": SPEED_ETA, "pax.bins": bins}
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


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A finished run whose files are deleted."""

    seconds: float  # by the clock, from the call to its return
    cpu_seconds: float  # from reading the table to the written summary
    summary: Row
    n_messages: int
    model: str  # model.json, complete if the master keeps the model
    xgboost: Row | None  # the model as XGBoost's JSON, if it has that form

    @property
    def costs(self) -> Row:
        return {
            "seconds": self.summary["seconds"]["train"],
            "cpu_seconds": self.cpu_seconds,
            "exchanges": self.summary["exchanges"],
            "messages": self.n_messages,
            "bytes": sum(self.summary["bytes"].values()),
        }


def run_once(settings: Settings) -> MeasuredRun:
    """Train in this process and leave no files."""
    start, cpu_start = time.perf_counter(), cpu_seconds()
    with temporary_run(settings) as run:
        spent = time.perf_counter() - start, cpu_seconds() - cpu_start
        n_messages = len(run.ledger.read_text().splitlines())
        model, path = (run.path / "model.json").read_text(), run.path / "model.xgb.json"
        trees = json.loads(path.read_text()) if path.exists() else None
        return MeasuredRun(*spent, run.summary, n_messages, model, trees)


def pax_line(runs: Sequence[MeasuredRun], loop: float) -> Row:
    """Costs and score of the last run, with medians of seconds over all; ``loop`` is CPU time."""
    line: Row = {**runs[-1].costs, "auc": runs[-1].summary["metrics"]["test"]["auc"]}
    for name in ("seconds", "cpu_seconds"):
        line[name] = statistics.median(run.costs[name] for run in runs)
    return {**line, "message_in_loops": line["cpu_seconds"] / line["messages"] / loop}


def reference_loop() -> float:
    """CPU seconds of what any message has to do: JSON, small arrays, calls of functions."""
    start, array = time.process_time(), np.zeros(1000)
    for number in range(LOOPS):
        text = json.dumps({"name": "GrowReply", "step": number, "shape": [4, 1000, 2]})
        total = float(array.sum()) + len(json.loads(text)) + len(array.tobytes())
        assert total > 0
    return (time.process_time() - start) / LOOPS


def train_booster(
    parameters: Mapping[str, Any], values: Rows, labels: Rows
) -> tuple[tuple[float, float], float, Any]:
    """Start and end, CPU seconds, and XGBoost's model."""
    import xgboost

    # perf_counter is a clock of the system, so times of different processes are comparable.
    start, cpu_start = time.perf_counter(), time.process_time()
    bins, threads = parameters["max_bin"], parameters["nthread"]
    matrix = xgboost.QuantileDMatrix(values, labels, max_bin=bins, nthread=threads)
    booster = xgboost.train(dict(parameters), matrix, SPEED_TREES)
    return (start, time.perf_counter()), time.process_time() - cpu_start, booster


def pooled_line(runs: Sequence[Any], rows: Subsets) -> Row:
    import xgboost

    seconds = statistics.median(end - start for (start, end), _, _ in runs)
    margins = runs[-1][2].predict(xgboost.DMatrix(rows.test_values), output_margin=True)
    cpu = statistics.median(cpu for _, cpu, _ in runs)
    return {"seconds": seconds, "cpu_seconds": cpu, "auc": test_auc(margins, rows)}


def parameters_of(
    settings: Settings, rows: Subsets, threads: int = SPEED_THREADS
) -> dict[str, Any]:
    _, labels = rows.pooled
    parameters = xgboost_parameters(settings, labels, np.ones_like(labels), labels)
    return {**parameters, "nthread": threads}


def test_auc(margins: Rows, rows: Subsets) -> float:
    """Test AUC as a run computes it."""
    labels = rows.test_labels
    weights = np.ones_like(labels)
    return metrics.pooled("binary:logistic", margins.reshape(-1, 1), labels, weights)["auc"]


def check_against_xgboost(data: str, depth: int) -> int:
    """Check that one party's model equals pooled XGBoost; return the number of nodes."""
    settings = speed_settings(data, depth, "equal", parties=1)
    whole = read_rows(settings)
    *_, booster = train_booster(parameters_of(settings, whole), *whole.pooled)
    model = run_once(settings).xgboost
    assert model is not None
    return count_same_nodes(model, json.loads(booster.save_raw("json")))


def train_plugin(
    all_settings: Mapping[int, Settings], rows: Subsets
) -> tuple[dict[int, tuple[float, Rows]], int]:
    """Train with XGBoost's plugin at every depth; see ``train_federated``."""
    parameters = {
        depth: parameters_of(settings, rows, WORKER_THREADS)
        for depth, settings in all_settings.items()
    }
    works = [
        PluginWork(values, labels, rows.test_values, parameters, repeats=3)
        for values, labels in zip(rows.values, rows.labels, strict=True)
    ]
    return train_federated(works)


def measure_speed(data: str, repeats: int, with_plugin: bool) -> tuple[list[Row], int | None]:
    """Check, then time, every method at every depth; they take turns."""
    all_settings = {depth: speed_settings(data, depth, "share") for depth in SPEED_DEPTHS}
    rows = read_rows(all_settings[SPEED_DEPTHS[0]])
    calls: dict[tuple[str, int], Callable[[], Any]] = {("loop", 0): reference_loop}
    if with_plugin:
        calls[PLUGIN, 0] = partial(train_plugin, all_settings, rows)
    for depth, settings in all_settings.items():
        n_nodes = check_against_xgboost(data, depth)
        console.print(f"depth {depth}: one party equals pooled XGBoost in all {n_nodes} nodes")
        calls[POOLED, depth] = partial(train_booster, parameters_of(settings, rows), *rows.pooled)
        for bins in ("share", "equal"):
            calls[f"PAX, {bins}", depth] = partial(run_once, speed_settings(data, depth, bins))
    runs = dict(zip(calls, repeated([*calls.values()], repeats), strict=True))
    expected = {depth: nearby_auc(settings, rows) for depth, settings in all_settings.items()}
    loop, plugin, lines = statistics.median(runs.pop(("loop", 0))), runs.pop((PLUGIN, 0), []), []
    for (method, depth), results in runs.items():
        line = pooled_line(results, rows) if method == POOLED else pax_line(results, loop)
        lines.append({"method": method, "depth": depth, **line})
        if method != POOLED:
            check_auc(line["auc"] - expected[depth], method)
    for depth in SPEED_DEPTHS if plugin else ():
        seconds = statistics.median(trained[depth][0] for trained, _ in plugin)
        auc = test_auc(plugin[-1][0][depth][1], rows)
        lines.append({"method": PLUGIN, "depth": depth, "seconds": seconds, "auc": auc})
    return lines, max((peak for _, peak in plugin), default=None)


def nearby_auc(settings: Settings, rows: Subsets) -> float:
    """Mean test AUC of pooled XGBoost with numbers of bins around the run's."""
    import xgboost

    parameters, aucs = parameters_of(settings, rows), []
    for n_bins in NEARBY_BINS:
        *_, booster = train_booster({**parameters, "max_bin": n_bins}, *rows.pooled)
        margins = booster.predict(xgboost.DMatrix(rows.test_values), output_margin=True)
        aucs.append(test_auc(margins, rows))
    return float(np.mean(aucs))


def check_auc(difference: float, method: str) -> None:
    console.print(f"{method}: AUC {difference:+.5f} from pooled")
    if abs(difference) > (limit := WORST_AUC_DIFFERENCE):
        raise RuntimeError(f"AUC must be within {limit} of pooled, got {difference:+.5f}")


def pax_speed(repeats: int = SPEED_REPEATS, without_plugin: bool = False) -> Row:
    """How fast PAX trains, beside pooled XGBoost and XGBoost's own federated plugin.

    PAX: ``seconds.train`` of a run in this process: sketches and all trees, with messages encoded
    and checked, and the states of all written to disk now and then. XGBoost:
    ``QuantileDMatrix`` and ``train``. The plugin: the same in three worker processes connected by a
    server on this machine, from a barrier to the end of the last worker. Reading the table does not
    count. All take turns. ``loops`` is the CPU time of a message and of what begins and ends a run,
    in passes of a loop of JSON and small arrays, which a busy or another machine changes as much.
    """
    if not without_plugin:
        check_plugin()
    with tempfile.TemporaryDirectory() as folder:
        data, name = write_speed_table(Path(folder))
        lines, plugin_peak = measure_speed(data, repeats, not without_plugin)
    lines.sort(key=lambda line: line["depth"])
    times = {(line["method"], line["depth"]): line["seconds"] for line in lines}
    for line in lines:
        for ratio, method in (("/ pooled", POOLED), ("/ plugin", PLUGIN)):
            other = times.get((method, line["depth"]))
            line[ratio] = line["seconds"] / other if other else None
    record: Row = {"data": name, "parties": SPEED_PARTIES, "rows": N_TRAIN}
    record |= {"columns": SPEED_COLUMNS, "trees": SPEED_TREES, "max_bin": SPEED_BINS, "seed": SEED}
    columns = "method; depth; sec.=seconds:.3f; CPU=cpu_seconds:.3f; / pooled:.2f; / plugin:.2f; "
    columns += "AUC=auc:.5f; messages; loops=message_in_loops:.0f; MB=mb:.1f"
    show(f"median of {repeats}: {record}", lines, columns)
    # The peak is of this process: the server, three parties, and pooled XGBoost.
    peaks = {"peak_bytes": peak_bytes(), "plugin_worker_peak_bytes": plugin_peak}
    return {**record, "repeats": repeats, "lines": lines, **peaks}


# pax_memory

MEMORY_ROWS, MEMORY_COLUMNS = 1_000_000, 28
MEMORY_TREES, MEMORY_DEPTH, MEMORY_BINS = 5, 6, 255
CHUNK_ROWS = 100_000
MEMORY_LIMIT = 2 << 30


def write_memory_table(path: Path, n_rows: int) -> None:
    rng = np.random.default_rng(SEED)
    names = [f"x{column}" for column in range(MEMORY_COLUMNS)]
    schema = pa.schema([*((name, pa.float32()) for name in names), ("label", pa.float64())])
    with pa.parquet.ParquetWriter(path, schema) as writer:
        for _ in range(n_rows // CHUNK_ROWS):
            values = rng.standard_normal((MEMORY_COLUMNS, CHUNK_ROWS), dtype=np.float32)
            margins = values[0] - 0.5 * values[1] + values[2] * values[3]
            labels = rng.random(CHUNK_ROWS) < 1 / (1 + np.exp(-margins))
            writer.write_table(pa.table([*values, labels.astype(np.float64)], schema=schema))


def memory_settings(path: Path) -> Settings:
    """Settings of one party that has the whole table."""
    config: Row = {"strategy": "pax", **BINARY, "data": str(path), "label": "label", "parties": 1}
    config |= {"test-fraction": 0.0, "num-boost-round": MEMORY_TREES, "max-depth": MEMORY_DEPTH}
    config |= {"max-bin": MEMORY_BINS}
    return load_settings(config)


def binned_bytes(n_rows: int) -> int:
    """Size of the binned table that a party holds while it trains; no value is missing."""
    dtype, _ = code_type(MEMORY_BINS, any_missing=False)
    return n_rows * MEMORY_COLUMNS * np.dtype(dtype).itemsize


def train_pax(path: Path) -> Row:
    """Costs of a run of one party; ``library_bytes``: peak before the first row was read."""
    ready, run = peak_bytes(), run_once(memory_settings(path))
    return {**run.costs, "library_bytes": ready, "peak_bytes": peak_bytes(), "model": run.xgboost}


def train_pooled_memory(path: Path) -> Row:
    import xgboost

    settings, ready, cpu_start = memory_settings(path), peak_bytes(), cpu_seconds()
    table = read_source(str(path), Roles(label="label"))
    parameters = xgboost_parameters(settings, table.labels, np.ones(table.n_rows), table.labels)
    start = time.perf_counter()
    matrix = xgboost.QuantileDMatrix(table.values, table.labels, max_bin=MEMORY_BINS)
    booster = xgboost.train(parameters, matrix, MEMORY_TREES)
    seconds = {"seconds": time.perf_counter() - start, "cpu_seconds": cpu_seconds() - cpu_start}
    peaks = {"peak_bytes": peak_bytes(), "library_bytes": ready}
    return {**seconds, **peaks, "model": json.loads(booster.save_raw("json"))}


def pax_memory(rows: int = MEMORY_ROWS) -> Row:
    """How much memory a party with a million rows takes to train PAX.

    The party runs in a new process. Its peak memory includes Python and its libraries, reading the
    Parquet file, sketch and trees, and the server of the run, which is in the same process. Pooled
    XGBoost in another process is the reference for the model, node for node, for memory and for
    time. ``--rows`` is a multiple of 100,000.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        write_memory_table(path, rows)
        pooled, party = apart(train_pooled_memory, path), apart(train_pax, path)
    n_nodes = count_same_nodes(party.pop("model"), pooled.pop("model"))
    console.print(f"the party's model equals pooled XGBoost in all {n_nodes} nodes")
    pooled |= {"ratio": party["seconds"] / pooled["seconds"]}
    pooled |= {"cpu_ratio": party["cpu_seconds"] / pooled["cpu_seconds"]}
    shown = [{"method": "PAX, one party and server", **party}, {"method": POOLED, **pooled}]
    shown = [{**row, "MiB": row["peak_bytes"] / 2**20} for row in shown]
    columns = "method; peak MiB=MiB:.0f; seconds:.2f; CPU=cpu_seconds:.2f; PAX / pooled=ratio:.2f"
    title = f"{rows:,} x {MEMORY_COLUMNS}, {MEMORY_TREES} trees of depth {MEMORY_DEPTH}"
    show(title, shown, columns)
    within = "below" if party["peak_bytes"] < MEMORY_LIMIT else "ABOVE"
    console.print(f"peak memory is {within} {MEMORY_LIMIT / 2**30:.0f} GiB")
    record: Row = {"rows": rows, "columns": MEMORY_COLUMNS, "trees": MEMORY_TREES}
    record |= {"depth": MEMORY_DEPTH, "max_bin": MEMORY_BINS, "seed": SEED, "same_nodes": n_nodes}
    return {**record, **party, "binned_bytes": binned_bytes(rows), "pooled": pooled}


# pax_secure

SECURE_BINS, SECURE_DEPTH = 255, 6
PLAIN, EQUAL, SECURE = "plain, share", "plain, equal", "secure"
AGGREGATIONS = {
    PLAIN: {"pax.aggregation": "plain", "pax.bins": "share"},
    EQUAL: {"pax.aggregation": "plain", "pax.bins": "equal"},
    SECURE: {"pax.aggregation": "secure"},
}


def secure_settings(data: str, sums: str, parties: int, trees: int) -> Settings:
    config: Row = {"data": data, "label": "label", **BINARY, "parties": parties}
    config |= {"num-boost-round": trees, "max-depth": SECURE_DEPTH, "max-bin": SECURE_BINS}
    config |= {"test-fraction": 0.1, **AGGREGATIONS[sums]}
    return load_settings(config)


def measure_secure(data: str, parties: int, trees: int, repeats: int) -> Iterator[Row]:
    """Medians; runs of one tree and of all trees separate the set-up from trees."""

    def summary_of(sums: str, n_trees: int) -> Row:
        return run_once(secure_settings(data, sums, parties, n_trees)).summary

    kinds = [(sums, n_trees) for sums in AGGREGATIONS for n_trees in (1, trees)]
    runs = dict(
        zip(kinds, repeated([partial(summary_of, *kind) for kind in kinds], repeats), strict=True)
    )
    for sums in AGGREGATIONS:
        first, last = runs[sums, 1], runs[sums, trees]
        short, whole = (
            statistics.median(summary["seconds"]["train"] for summary in each)
            for each in (first, last)
        )
        sent, all_sent = (sum(each[0]["bytes"].values()) for each in (first, last))
        a_tree, bytes_a_tree = (whole - short) / (trees - 1), (all_sent - sent) / (trees - 1)
        line: Row = {"sums": sums, "seconds_a_tree": a_tree, "bytes_a_tree": bytes_a_tree}
        line |= {"begin_seconds": short - a_tree, "begin_bytes": sent - bytes_a_tree}
        yield {
            **line,
            "exchanges": last[0]["exchanges"],
            "auc": last[0]["metrics"]["test"]["auc"],
        }


def pax_secure(
    rows: int = 20_000, columns: int = 23, parties: int = 3, trees: int = 20, repeats: int = 5
) -> Row:
    """What secure aggregation costs PAX: seconds and bytes a tree, beside plain sums.

    Bins by shares of the rows (``share``) send less than ``max-bin`` bins at every party
    (``equal``), which masked sums need. Runs of all three variants take turns, so that other load
    on the machine affects all alike. First, the model under masks is checked to equal that of one
    party with all rows. At least 5 columns and 2 trees.
    """
    with tempfile.TemporaryDirectory() as folder:
        data = write_numbers(Path(folder) / "rows.parquet", rows, columns)
        models = [run_once(secure_settings(data, SECURE, n, 2)).xgboost for n in (1, parties)]
        if models[0] != models[1]:
            raise RuntimeError(f"the model must be that of one party, got another with {parties}")
        lines = list(measure_secure(data, parties, trees, repeats))
    by_name = {line["sums"]: line["seconds_a_tree"] for line in lines}
    for line in lines:
        for heading, plain in (("/ share", PLAIN), ("/ equal", EQUAL)):
            line[heading] = line["seconds_a_tree"] / by_name[plain]
    shown = "sums; s a tree=seconds_a_tree:.4f; / share:.2f; / equal:.2f; bytes a tree=bytes_a_tree"
    shown += (
        ":.0f; s before=begin_seconds:.2f; bytes before=begin_bytes:.0f; exchanges; AUC=auc:.4f"
    )
    show(f"{parties} parties, {rows:,} x {columns}, depth {SECURE_DEPTH}", lines, shown)
    record = {"rows": rows, "columns": columns, "parties": parties, "trees": trees}
    return {**record, "repeats": repeats, "lines": lines}


# pax_floor

SETS = ("breast-cancer", "ionosphere", "spambase", "higgs-11k", "default-credit")
FLOORS = (0, 5, 20)


def pax_floor(
    data: tuple[str, ...] = SETS,
    aggregation: tuple[str, ...] = ("plain", "secure"),
    parties: int = 3,
    rounds: int = 50,
) -> Iterator[Row]:
    """What merged bins cost PAX: the test AUC by the fewest rows of a non-empty bin.

    ``python -m simulations bench pax_floor`` prints a JSON line a data set (of two classes),
    aggregation and floor.
    """
    for name, sums, min_rows in itertools.product(data, aggregation, FLOORS):
        settings: Row = {"data": name, "objective": "binary:logistic", "parties": parties}
        settings |= {"num-boost-round": rounds, "preset": "xgboost", "least-bin-rows": min_rows}
        auc = run_and_load({**settings, "pax.aggregation": sums})[2]["metrics"]["test"]["auc"]
        line = {"data": name, "aggregation": sums, "parties": parties, "rounds": rounds}
        yield {**line, "least_bin_rows": min_rows, "auc": auc}


# privacy

PRIVATE_DATA: dict[str, Row] = {
    "adult": {},
    "default-credit": {},
    "abalone": {"objective": "reg:squarederror", "privacy.clip": 5.0},
}
EPSILONS, NO_NOISE = (0.5, 1.0, 2.0, 4.0, 8.0), 1000.0
PRIVATE_ROUNDS, PRIVATE_DEPTH, PRIVATE_ETA, DELTA, PRIVATE_PARTIES = 100, 4, 0.2, 1e-5, 3


def private_score(how: Row, seeds: int) -> Row:
    """Mean score on test rows over seeds, and its standard deviation if there are several."""
    scores = []
    for seed in range(seeds):
        common = {"parties": PRIVATE_PARTIES, "seed": seed, "pax.aggregation": "secure"}
        loaded, model, _ = run_and_load({**common, **how})
        metric, value = test_score(score(loaded, model)["test"], bool(model.classes))
        scores.append(value)
    spread = statistics.stdev(scores) if seeds > 1 else None
    return {"metric": metric, "mean": statistics.mean(scores), "deviation": spread}


def test_score(scored: Scored, has_classes: bool) -> tuple[str, float]:
    """AUC of two classes, RMSE of numbers."""
    from sklearn.metrics import roc_auc_score

    if has_classes:
        return "auc", float(roc_auc_score(scored.labels, scored.margins[:, 0]))
    return "rmse", float(np.sqrt(np.mean((scored.labels - scored.margins[:, 0]) ** 2)))


def privacy(
    data: tuple[str, ...] = tuple(PRIVATE_DATA),
    epsilons: tuple[float, ...] = EPSILONS,
    seeds: int = 5,
    rounds: int = PRIVATE_ROUNDS,
    depth: int = PRIVATE_DEPTH,
    eta: float = PRIVATE_ETA,
) -> Row:
    """What an epsilon costs PAX: scores on test rows by epsilon.

    Each cell trains the private model with several seeds, each of which holds out other rows, and
    scores it on these rows without noise (the scores that a run reports are noisy). References: the
    model under secure aggregation without noise, with PAX's usual settings; and the same trees at
    an epsilon of 1000, which shows what drawing them costs.
    """
    check_names("data", data, PRIVATE_DATA)
    usual = {"num-boost-round": 50, "max-depth": 6, "eta": 0.3}
    shape = {"num-boost-round": rounds, "max-depth": depth, "eta": eta, "privacy.delta": DELTA}
    lines: list[Row] = []
    for name in data:
        private = {"data": name, **PRIVATE_DATA[name]}
        open_settings = {key: private[key] for key in private if key != "privacy.clip"}
        masked = private_score({**open_settings, **usual}, seeds)
        lines.append({"data": name, "epsilon": 0.0, **masked})
        for epsilon in (*epsilons, NO_NOISE):
            scored = private_score({**private, **shape, "privacy.epsilon": epsilon}, seeds)
            lines.append({"data": name, "epsilon": epsilon, **scored})
    columns = "data; metric; epsilon:g; mean:.4f; deviation:.4f"
    show("an epsilon of 0 has no noise, one of 1000 next to none", lines, columns, 2)
    sizes = {"rounds": rounds, "depth": depth, "eta": eta, "delta": DELTA}
    return {"lines": lines, "seeds": seeds, "parties": PRIVATE_PARTIES, **sizes}


# rows

ROW_COUNTS = (10_000, 100_000, 1_000_000)
ROWS_COLUMNS = (10, 10)  # active, passive
ROWS_PARTIES = len(ROWS_COLUMNS)
ROWS_BINS, ROWS_DEPTH, ROWS_TREES = 32, 3, 3
TEST_ROWS = 0.1  # of all
ROWS_METHODS = ("secureboost", "goss", "federated-forest", "psi", "pax")
GROWN = ROWS_METHODS[:4]  # by default
ALLOWED = "pax,secureboost,federated-forest"
PAX_BINS, PAX_DEPTH = 255, 6
ENGINES = ("local", "simulation", "deployment")
ROWS_SITES = ("bank", "insurer")
LOOK_SECONDS = 0.2


def random_table(n_rows: int, n_columns: int = sum(ROWS_COLUMNS)) -> pa.Table:
    """Draw a random table; labels depend on columns of both parties."""
    rng = np.random.default_rng(SEED)
    values = rng.standard_normal((n_columns, n_rows), dtype=np.float32)
    margins = values[0] - values[10] + values[1] * values[11] + 0.5 * values[12]
    labels = rng.random(n_rows) < 1 / (1 + np.exp(-margins))
    names = [f"x{column}" for column in range(len(values))]
    table = pa.table([*values, labels.astype(np.float64)], names=[*names, "label"])
    return table.append_column("id", pa.array(range(n_rows)).cast(pa.string()))


def config_of(method: str, n_trees: int, key_bits: int, parties: int = ROWS_PARTIES) -> Row:
    shared = {**BINARY, "parties": parties, "test-fraction": TEST_ROWS}
    if method == "pax":
        method_settings = {"strategy": "pax", "max-bin": PAX_BINS, "max-depth": PAX_DEPTH}
        return {**shared, **method_settings, "num-boost-round": n_trees}
    if method in ("federated-forest", "psi"):
        n_grown = 1 if method == "psi" else n_trees
        forest = {"trees": n_grown, "max-depth": ROWS_DEPTH, "master-keeps-model": True}
        method_settings = {
            "strategy": "federated-forest",
            "align": "psi" if method == "psi" else "ordered",
        }
        return {**shared, **method_settings, "federated-forest": forest}
    boosted = {"strategy": "secureboost", "align": "ordered", "max-bin": ROWS_BINS}
    boosted |= {"max-depth": ROWS_DEPTH}
    method_settings = {"key-bits": key_bits, "insecure-small-key": True, "goss": method == "goss"}
    return {**shared, **boosted, "num-boost-round": n_trees, "secureboost": method_settings}


def sites_tables(folder: Path, method: str, n_rows: int) -> dict[str, dict[str, Any]]:
    """Write each site's columns or rows of the table; return the node configs."""
    table, nodes = random_table(n_rows), {}
    by_columns = method != "pax"
    for index, name in enumerate(ROWS_SITES):
        first = sum(ROWS_COLUMNS[:index])
        names = [f"x{number}" for number in range(first, first + ROWS_COLUMNS[index])]
        site_table = table.select(["id", *names, *(["label"] if not index else [])])
        if not by_columns:
            site_table = table.slice(index * (n_rows // 2), n_rows // 2)
        pa.parquet.write_table(site_table, folder / f"{name}.parquet")
        nodes[name] = {"data": str(folder / f"{name}.parquet"), "id": "id", "allow-export": "true"}
        nodes[name] |= {"label": "label"} if not (index and by_columns) else {}
        nodes[name] |= {"allow-insecure": "true", "allow": ALLOWED, **DRAWS}
    return nodes


def train_rows(
    method: str, n_rows: int, engine: str, n_trees: int, key_bits: int, parties: int, columns: int
) -> Row:
    """Run by the local engine in this process, then by another one, to the same model."""
    settings = config_of(method, n_trees, key_bits, parties)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["FEDAPP_HOME"] = str(folder / "home")
        if engine == "deployment":
            if "federated-forest" in settings:
                # Across sites, the server draws the columns of a node by a secret seed.
                settings["federated-forest"]["max-features"] = "all"
            deployment = Deployment(folder / "sites", sites_tables(folder, method, n_rows))
            ready, cpu_start = peak_bytes(), time.process_time()
            run = deployment.locally(folder / "run", settings)
        else:
            # One table, of which the parties have rows or columns
            path = folder / "rows.parquet"
            pa.parquet.write_table(random_table(n_rows, columns), path)
            settings |= {"data": str(path), "label": "label", "id": "id"}
            if method != "pax":
                sizes = "sizes:" + ",".join(map(str, ROWS_COLUMNS))
                settings |= {"columns": sizes, "allow-export": True}
            ready, cpu_start = peak_bytes(), time.process_time()
            run = run_local(load_settings({**settings, "run-dir": str(folder / "run")}))
        measured = run_figures(run)
        measured |= {"cpu_seconds": time.process_time() - cpu_start, "peak_bytes": peak_bytes()}
        model = (run.path / "model.json").read_bytes()
        shutil.rmtree(folder / "home")
        if engine != "local":
            if engine == "simulation":
                run, peaks = simulated(settings, folder / "simulated")
            else:
                run, peaks = deployed(deployment, settings, folder / "across")
            same = model == (run.path / "model.json").read_bytes()
            assert same, "the model must be that of the local engine"
            measured = {
                **run_figures(run),
                "local_seconds": measured["seconds"],
                "peak_bytes": peaks,
            }
    record: Row = {"engine": engine, "method": method, "rows": n_rows, "columns": columns}
    record |= {"parties": parties, "trees": n_trees, "key_bits": key_bits}
    record |= {"cores": n_cores(), **measured, "ready_bytes": ready, "seed": SEED}
    return record


def run_figures(run: RunFolder) -> Row:
    """Costs and score of a run, from its folder."""
    summary = run.summary
    seconds = [json.loads(line)["seconds"] for line in run.rounds.read_text().splitlines()]
    ledger = [json.loads(line) for line in run.ledger.read_text().splitlines()]
    return {
        "seconds": summary["seconds"]["total"],
        # The first tree also computes tables of masks.
        "seconds_a_tree": min(seconds[1:] or seconds, default=None),
        "exchanges": summary["exchanges"],
        "bytes": sum(summary["bytes"].values()),
        "largest_message": max(line["bytes"] for line in ledger),
        "auc": summary["metrics"]["test"].get("auc"),
    }


def simulated(settings: Row, run_dir: Path) -> tuple[RunFolder, Row]:
    """Run Flower's simulation; also the peak memory of its largest process."""
    from fedapp.runs.flower import run_simulation

    process = psutil.Process()
    with peaks_of(lambda: {"largest process": process.children(recursive=True)}) as peaks:
        run = run_simulation(load_settings({**settings, "run-dir": str(run_dir)}))
    return run, peaks


def deployed(deployment: Deployment, settings: Row, run_dir: Path) -> tuple[RunFolder, Row]:
    """Run across sites; also the peak memory of the largest process of each and the coordinator."""
    words = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in flatten(settings).items()
    }

    def families() -> dict[str, list[psutil.Process]]:
        return {name: deployment.family(name) for name in ("coordinator", *ROWS_SITES)}

    with deployment.running(), peaks_of(families) as peaks:
        return deployment.train(run_dir, words), peaks


@contextmanager
def peaks_of(
    families: Callable[[], Mapping[str, Sequence[psutil.Process]]],
) -> Iterator[dict[str, int]]:
    """Peak memory in bytes of the largest process of each family, while the block runs."""
    peaks = dict[str, int]()

    def look() -> None:
        for name, members in families().items():
            for process in members:
                with suppress(psutil.NoSuchProcess, FileNotFoundError, KeyError):
                    peaks[name] = max(peaks.get(name, 0), peak_bytes(process.pid))

    with looking(look, LOOK_SECONDS):
        yield peaks


def rows(
    rows: tuple[int, ...] = ROW_COUNTS,
    methods: tuple[str, ...] = GROWN,
    engine: str = ENGINES[0],
    trees: int = ROWS_TREES,
    key_bits: int = 2048,
    parties: int = ROWS_PARTIES,
    columns: int = sum(ROWS_COLUMNS),
) -> Iterator[Row]:
    """How methods grow with the rows: seconds and memory at 10^4, 10^5 and 10^6 of them.

    Two parties with ten columns each train in a process of their own for each number of rows, so
    its peak is all that both held, with the server of the run and Python itself. SecureBoost grows
    trees of depth 3 on 32 bins, once on all rows and once on those that GOSS draws; Federated
    Forest grows trees under coded labels; private set intersection aligns ids that both have. The
    growth is an exponent, from the number of rows before: 1 where ten times the rows cost ten times
    as much. Seconds are those of a clock and those of the processor, of all threads together;
    set-up and keys count. PAX on one machine may have other ``--parties`` and ``--columns`` (13 or
    more).

    With ``--engine simulation`` Flower's simulation trains after the local engine, with ``--engine
    deployment`` a SuperLink and two sites with tables of their own, all on this machine. The model
    must be the local engine's, byte for byte. It then reports seconds of a clock, and the
    peak of the largest process of all, or of the coordinator and of each site.
    """
    check_names("methods", methods, ROWS_METHODS)
    check_names("engine", [engine], ENGINES)
    is_pax_here = methods == ("pax",) and engine != "deployment"
    if (parties, columns) != (ROWS_PARTIES, sum(ROWS_COLUMNS)) and not is_pax_here:
        rule = "--parties and --columns must be 2 and 20 but for PAX on one machine"
        raise ConfigError(f"{rule}, got {parties} and {columns}")
    # What ends the command ends what it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    figures = ("seconds", "cpu_seconds", "peak_bytes", "bytes")
    for method in methods:
        before: Row = {}
        for n_rows in sorted(rows):
            arguments = (method, n_rows, engine, trees, key_bits, parties, columns)
            line = apart(train_rows, *arguments)
            yield {**line, **growth(before, line, "rows", figures)}
            before = line


# XGBoost's federated plugin: a server and one worker process a party

Parameters = Mapping[int, Mapping[str, Any]]

LOCALHOST = "127.0.0.1"
WITH_PLUGIN = "xgboost==3.2.0"  # later wheels lack the plugin too
SERVER_SECONDS = 30
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class PluginWork:
    """What a worker trains; the test rows are the same at every worker."""

    values: Rows
    labels: Rows
    test_values: Rows
    parameters: Parameters  # by name of the configuration
    repeats: int  # timed trainings of each configuration, after a warm-up


def has_plugin() -> bool:
    """Whether the installed XGBoost was built with the plugin."""
    import xgboost

    return bool(xgboost.build_info().get("USE_FEDERATED"))


def check_plugin() -> None:
    """Check that the installed XGBoost was built with the plugin."""
    if not has_plugin():
        raise SystemExit(
            "xgboost must be built with the federated plugin, which the wheel of xgboost-cpu "
            "lacks. In an environment of its own, which has fedapp: pip uninstall xgboost-cpu, "
            f"then pip install {WITH_PLUGIN}. --without-plugin measures the rest"
        )


def train_federated(works: Sequence[PluginWork]) -> tuple[dict[int, tuple[float, Rows]], int]:
    """Train at all workers together by XGBoost's federated plugin; call ``check_plugin`` first.

    Source: ``xgboost.federated`` of the wheel (FederatedTracker, gRPC without TLS). Its server
    listens on every interface, whatever its settings, for as long as the benchmark trains. Returns,
    by name of the configuration, median seconds from the barrier to the end of the last worker, and
    the margins of the test rows; and the largest peak memory of a worker in bytes.
    """
    spawn = multiprocessing.get_context("spawn")
    barrier, replies = spawn.Barrier(len(works)), spawn.Queue()
    with _server(len(works)) as port:
        workers = [
            spawn.Process(target=_work, args=(work, rank, len(works), port, barrier, replies))
            for rank, work in enumerate(works)
        ]
        for worker in workers:
            worker.start()
        results = [replies.get() for _ in works]
        for worker in workers:
            worker.join()
    trained = {}
    for name in works[0].parameters:
        # A repeat takes from the first start to the last end of a worker.
        seconds = [
            max(end for _, end in repeat) - min(start for start, _ in repeat)
            for repeat in zip(*(spans[name] for spans, _, _ in results), strict=True)
        ]
        trained[name] = statistics.median(seconds), results[0][1][name]
    return trained, max(peak for _, _, peak in results)


@contextmanager
def _server(n_workers: int) -> Iterator[int]:
    """Run the process that connects the workers; yield its port."""
    (port,) = free_ports(1)
    spawn = multiprocessing.get_context("spawn")
    server = spawn.Process(target=_serve, args=(n_workers, port), daemon=True)
    server.start()
    deadline = time.monotonic() + SERVER_SECONDS

    def is_listening() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((LOCALHOST, port)) == 0

    try:
        while not is_listening():
            if time.monotonic() > deadline or not server.is_alive():
                raise RuntimeError(f"the federated server must listen within {SERVER_SECONDS} s")
            time.sleep(POLL_SECONDS)
        yield port
    finally:
        server.terminate()
        server.join()


def _serve(n_workers: int, port: int) -> None:
    from xgboost.federated import run_federated_server

    # The server prints to standard output, which is for the benchmark's lines.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    run_federated_server(n_workers=n_workers, port=port)


def _work(
    work: PluginWork, rank: int, n_workers: int, port: int, barrier: Any, replies: Any
) -> None:
    """Send a worker's time spans and margins by configuration, and its peak memory."""
    import xgboost

    spans: dict[int, list[tuple[float, float]]] = {}
    margins = {}
    with xgboost.collective.CommunicatorContext(
        dmlc_communicator="federated",
        federated_server_address=f"{LOCALHOST}:{port}",
        federated_world_size=n_workers,
        federated_rank=rank,
    ):
        for name, parameters in work.parameters.items():
            spans[name] = []
            for _ in range(work.repeats + 1):
                barrier.wait()
                span, _, booster = train_booster(parameters, work.values, work.labels)
                spans[name].append(span)
            del spans[name][0]  # the warm-up
            margins[name] = booster.predict(xgboost.DMatrix(work.test_values), output_margin=True)
    replies.put((spans, margins, peak_bytes()))


# federated_forest

FOREST_DATA, FOREST_COPIES, FOREST_PARTIES = "spambase", 10, 2
FOREST_TREES, FOREST_DEPTH, FOREST_FEATURES, FOREST_REPEATS, FOREST_THREADS = 32, 8, "sqrt", 5, 2
EXACT = 65535  # bins: a cut wherever scikit-learn may place one
WORST_ACCURACY_DIFFERENCE = 0.01
ALIGNMENTS = ("ordered", "psi")


def forest_settings(data: Path, max_bin: int, align: str, keeps_model: bool = False) -> Settings:
    """Settings of a run without test rows."""
    config: Row = {"strategy": "federated-forest", "data": str(data), "label": "y"}
    config |= {"parties": FOREST_PARTIES, "columns": "even", "align": align}
    config |= {"allow-export": keeps_model, "test-fraction": 0.0, "valid-fraction": 0.0}
    config |= {"seed": SEED, "max-bin": max_bin, "federated-forest.trees": FOREST_TREES}
    config |= {"federated-forest.max-depth": FOREST_DEPTH}
    config |= {"federated-forest.max-features": FOREST_FEATURES}
    config |= {"federated-forest.master-keeps-model": keeps_model}
    return load_settings(config)


def check_same(model: BaggedForest, other: BaggedForest) -> int:
    """Check that two forests are equal node for node; return the number of nodes."""
    n_nodes = 0
    pairs = zip(model.trees, other.trees, model.values, other.values, strict=True)
    for tree, (ours, theirs, mine, yours) in enumerate(pairs):
        same = len(ours) == len(theirs) and bool((mine == yours).all())
        if not same or (ours != theirs).any():
            raise ValueError(f"trees must be those of the joined table, got another tree {tree}")
        n_nodes += len(ours)
    return n_nodes


def fit_theirs(
    values: npt.NDArray[np.float32], labels: npt.NDArray[np.float32], seed: int
) -> tuple[float, float]:  # seconds of scikit-learn's fit, accuracy on the training rows
    from sklearn.ensemble import RandomForestClassifier

    forest = RandomForestClassifier(
        FOREST_TREES,
        max_depth=FOREST_DEPTH,
        max_features=FOREST_FEATURES,
        n_jobs=FOREST_THREADS,
        random_state=seed,
    )
    start = time.perf_counter()
    forest.fit(values, labels)
    return time.perf_counter() - start, float(forest.score(values, labels))


def forest_ratios(runs: Sequence[MeasuredRun], theirs: Sequence[float]) -> Row:
    """Medians of both, and their ratios."""
    seconds = statistics.median(run.seconds for run in runs)
    train = statistics.median(run.costs["seconds"] for run in runs)
    fit, cpu = statistics.median(theirs), statistics.median(run.cpu_seconds for run in runs)
    record: Row = {**runs[0].costs, "repeats": len(runs), "seconds": seconds, "cpu_seconds": cpu}
    record |= {"seconds_train": train, "seconds_sklearn": fit}
    return {**record, "ratio": seconds / fit, "ratio_train": train / fit}


def federated_forest(max_bin: int = EXACT, align: str = ALIGNMENTS[0]) -> Row:
    """How long a Federated Forest takes, beside scikit-learn's random forest on the joined table.

    Two parties, ten times the rows of spambase, encoded labels, a run in this process: messages are
    encoded, sealed, checked and kept on the disk by both. Before anything is timed, the joined
    forest is compared with the one that ``fedapp.trees.forest.model`` grows in one place, node for
    node, and its accuracy on the training rows against that of scikit-learn, whose draws are
    others.

    ``ratio`` counts the whole run, from reading the table to the written report: alignment,
    training, scores. ``ratio_train`` counts the messages of the training alone. Both are against
    ``RandomForestClassifier.fit``, which reads, aligns and scores nothing.
    """
    check_names("align", [align], ALIGNMENTS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        whole = read_source(FOREST_DATA)
        write_rows(path, whole, np.tile(np.arange(whole.n_rows), FOREST_COPIES))
        exported = forest_settings(path, max_bin, align, keeps_model=True)
        table, _, _ = join_tables(exported)
        train = table.split.train
        values, labels = table.values[train], table.labels[train]
        model = from_text(run_once(exported).model, BaggedForest)
        pooled, _, _ = pooled_forest(exported, model.columns, values, labels, table.weights[train])
        n_nodes, timed = check_same(model, pooled), forest_settings(path, max_bin, align)
        seeds = itertools.count(SEED)
        functions: list[Callable[[], Any]] = [lambda: run_once(timed)]
        functions.append(lambda: fit_theirs(values, labels, next(seeds)))
        runs, theirs = repeated(functions, FOREST_REPEATS)
    accuracy = runs[-1].summary["metrics"]["train"]["accuracy"]
    difference = accuracy - statistics.fmean(each for _, each in theirs)
    if abs(difference) > (limit := WORST_ACCURACY_DIFFERENCE):
        raise ValueError(f"accuracy must be within {limit} of theirs, got {difference:+.4f}")
    record: Row = {"data": f"{FOREST_DATA} x {FOREST_COPIES}", "parties": FOREST_PARTIES}
    record |= {"rows": len(train), "columns": values.shape[1], "trees": FOREST_TREES}
    record |= {"depth": FOREST_DEPTH, "max_bin": max_bin, "max_features": FOREST_FEATURES}
    record |= {"align": align, "seed": SEED, "nodes_as_pooled": n_nodes, "accuracy": accuracy}
    record |= {"accuracy_sklearn": [each for _, each in theirs]}
    record |= forest_ratios(runs, [seconds for seconds, _ in theirs])
    # Of this process: the server, both parties, and scikit-learn.
    return {**record, "peak_bytes": peak_bytes()}


# fedxgbllr_epoch

HEAD_ROWS, HEAD_TREES, HEAD_COLUMNS = 50_000, 500, 20
HEAD_PARTIES, HEAD_CHANNELS, HEAD_BATCH = 5, 64, 64
HEAD_REPEATS, HEAD_EPOCHS = 5, 1
WORST_RATIO, HEAD_BYTES = 1.2, 1 << 30
HEADS: tuple[Kind, ...] = ("cnn", "cnn3", "fcnn")
# 64 channels at each of 500 trees are 32,000 numbers a row.
PARTS_OF: dict[Kind, int] = {"cnn": 1, "cnn3": 20, "fcnn": 1}


def plain_head(shape: HeadShape, weights: Floats) -> Any:
    """The paper's heads in torch's layers."""
    import torch
    from torch import nn

    from fedapp.trees.stacked import split_weights

    class PlainHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = shape.kind == "fcnn"
            if self.flat:
                self.first: nn.Module = nn.Linear(shape.n_columns, shape.width)
            else:
                stride = shape.patch_size if shape.kind == "cnn" else 1
                padding = 0 if shape.kind == "cnn" else 1
                self.first = nn.Conv1d(1, shape.channels, shape.patch_size, stride, padding)
            self.second = nn.Linear(shape.n_hidden, 1)
            layers = list(split_weights(shape, weights))
            if not self.flat:
                # torch flattens the hidden layer channel by channel, fedapp party by party.
                by_place = layers[2].reshape(1, shape.n_patches, shape.channels)
                layers[2] = by_place.transpose(0, 2, 1)
            for parameter, values in zip(self.parameters(), layers, strict=True):
                parameter.data = torch.tensor(np.ascontiguousarray(values)).reshape(parameter.shape)

        def forward(self, outputs: torch.Tensor) -> torch.Tensor:  # margins, (n_rows, 1)
            hidden = self.first(outputs if self.flat else outputs[:, None])
            margins: torch.Tensor = self.second(torch.relu(hidden).flatten(1))
            return margins

        def biases(self) -> Floats:
            """Biases of both layers, the parameters whose order is the same as in fedapp's head."""
            return np.concatenate([p.detach().numpy() for p in self.parameters() if p.ndim == 1])

    return PlainHead()


def plain_epochs(shape: HeadShape, weights: Floats, rows: HeadRows) -> Floats:
    """Train by the plain loop; return the biases."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    head = plain_head(shape, weights)
    outputs, labels = torch.from_numpy(rows.outputs), torch.from_numpy(rows.labels)
    adam = torch.optim.Adam(head.parameters(), lr=0.001, betas=(0.5, 0.999))
    rng = np.random.default_rng(SEED)
    for _ in range(HEAD_EPOCHS):
        order = torch.from_numpy(rng.permutation(len(labels)))
        for start in range(0, len(order), HEAD_BATCH):
            batch = order[start : start + HEAD_BATCH]
            margins = head(outputs[batch])[:, 0]
            loss = binary_cross_entropy_with_logits(margins, labels[batch])
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
    biases: Floats = head.biases()
    return biases


def our_epochs(shape: HeadShape, weights: Floats, rows: HeadRows) -> Floats:
    """Train by ``fit_head``; return the biases."""
    from fedapp.trees.head import Training, fit_head
    from fedapp.trees.stacked import split_weights

    training = Training(HEAD_EPOCHS, HEAD_BATCH, 0.001, 0.5, 0.999, 0, "cpu")
    rng = np.random.default_rng(SEED)
    fitted, _ = fit_head("binary:logistic", shape, weights, rows, training, rng)
    _, first, _, second = split_weights(shape, fitted)
    return np.concatenate((first, second))


def measure_epoch(kind: Kind, all_rows: int) -> dict[str, float]:
    """Median seconds of an epoch of each loop, run in turn after a warm-up."""
    import torch

    from fedapp.trees.head import HeadRows
    from fedapp.trees.stacked import HeadShape, initial_weights

    torch.set_num_threads(1)
    shape = HeadShape(kind, HEAD_PARTIES, HEAD_TREES // HEAD_PARTIES, 1, HEAD_CHANNELS)
    rng, n_rows = np.random.default_rng(SEED), all_rows // PARTS_OF[kind]
    outputs = rng.normal(scale=0.1, size=(n_rows, HEAD_TREES)).astype(np.float32)
    labels = (outputs[:, :50].sum(axis=1) > 0).astype(np.float32)
    ones, zero, one = np.ones_like(labels), np.zeros(1, np.float32), np.float32(1)
    rows = HeadRows(outputs, labels, ones, zero, one)
    weights = initial_weights(shape, SEED)
    loops = (our_epochs, plain_epochs)
    # Compare after ten steps: over an epoch, rounding errors can move a row across a ReLU's kink.
    n = 10 * HEAD_BATCH
    few = HeadRows(outputs[:n], labels[:n], ones[:n], zero, one)
    ours, plain = (loop(shape, weights, few) for loop in loops)
    np.testing.assert_allclose(ours, plain, atol=1e-4)
    assert np.abs(ours).max() > 1e-3

    def seconds_of(loop: Callable[..., Floats]) -> float:
        start = time.perf_counter()
        loop(shape, weights, rows)
        return time.perf_counter() - start

    times = repeated([partial(seconds_of, loop) for loop in loops], HEAD_REPEATS)
    ours_took, plain_took = map(statistics.median, times)
    ratio = ours_took / plain_took
    console.print(
        f"{kind}: {ours_took:.3f} s an epoch of {n_rows} rows, plain torch {plain_took:.3f} s, "
        f"ratio {ratio:.2f}"
    )
    return {"rows": n_rows, "seconds": ours_took, "plain_seconds": plain_took, "ratio": ratio}


def train_party(n_rows: int) -> dict[str, Any]:
    """Peak memory and seconds of a run of one party with all rows, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(SEED)
        values = rng.standard_normal((HEAD_COLUMNS, n_rows), dtype=np.float32)
        labels = values[0] - 0.5 * values[1] + values[2] * values[3] > rng.normal(size=n_rows)
        columns = {f"x{place}": column for place, column in enumerate(values)}
        path = Path(folder) / "rows.parquet"
        pa.parquet.write_table(pa.table({**columns, "label": labels.astype(np.float64)}), path)
        del values, columns
        config = {"strategy": "fedxgbllr", "data": str(path), "label": "label", "parties": 1}
        config |= {"test-fraction": 0.0, "valid-fraction": 0.0, "run-dir": f"{folder}/run"}
        config |= {"fedxgbllr.trees": HEAD_TREES, "fedxgbllr.rounds": 2, "fedxgbllr.epochs": 1}
        summary = run_local(load_settings({**config, "seed": SEED})).summary
    return {"peak_bytes": peak_bytes(), "seconds": summary["seconds"]["train"]}


def fedxgbllr_epoch(rows: int = HEAD_ROWS) -> Row:
    """What an epoch of FedXGBllr's head takes, and how much memory 50,000 rows x 500 trees.

    Seconds: an epoch of ``fit_head`` against a plain training loop with torch's own layers, over
    the same tensors in the same order; both must end in the same weights. Memory: one party that
    has all rows goes from its table to its finished model in a new process; the peak includes the
    server of the run and all libraries.
    """
    memory = apart(train_party, rows)
    within = "below" if memory["peak_bytes"] < HEAD_BYTES else "ABOVE"
    peak = f"peak memory {memory['peak_bytes'] / 2**20:.0f} MiB"
    console.print(f"{peak}, {within} {HEAD_BYTES / 2**30:.0f} GiB")
    epochs = {kind: measure_epoch(kind, rows) for kind in HEADS}
    worst = max(epoch["ratio"] for epoch in epochs.values())
    within = "within" if worst <= WORST_RATIO else "ABOVE"
    console.print(f"the worst ratio is {within} {WORST_RATIO}")
    record: Row = {"rows": rows, "trees": HEAD_TREES, "parties": HEAD_PARTIES}
    record |= {"batch": HEAD_BATCH, "seed": SEED, "repeats": HEAD_REPEATS}
    return {**record, "outputs_bytes": 4 * rows * HEAD_TREES, **memory, "epochs": epochs}
