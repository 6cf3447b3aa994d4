"""What PAX costs beside XGBoost: seconds, memory, bytes, and scores under masks, floors and noise.

Each bench is the function of its name, whose docstring says what it measures, and has its sizes
above it. Heavy libraries are imported in functions: a bench that reports memory must not load them.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from fedapp import metrics
from fedapp.data.datasets import find_dataset, locate, read_source
from fedapp.data.labels import class_ids, class_names
from fedapp.data.schema import Roles
from fedapp.histograms.bins import code_type
from fedapp.run_files import Summary
from fedapp.runs.baselines import xgboost_parameters
from fedapp.settings import Settings, load_settings
from fedapp.site.table import share_rows
from simulations.bench.plugin import (
    SPEED_TREES,
    PluginWork,
    Rows,
    check_plugin,
    train_booster,
    train_federated,
)
from simulations.bench.trees import MeasuredRun, run_once, write_numbers
from simulations.passing import Scored, run_and_load, score
from simulations.study import (
    BINARY,
    SEED,
    Row,
    apart,
    check_names,
    console,
    count_same_nodes,
    cpu_seconds,
    peak_bytes,
    repeated,
    show,
)

SPEED_PARTIES, N_TRAIN, N_TEST, SPEED_COLUMNS = 3, 20_000, 10_000, 23
SPEED_BINS, SPEED_ETA, SPEED_DEPTHS = 255, 0.3, (4, 6)
SPEED_REPEATS, SPEED_THREADS, LOOPS = 9, 2, 2_000
# Three workers share two cores; with two threads each they took ten times as long.
WORKER_THREADS = 1
# The test AUC of pooled XGBoost varies by 0.007 as max-bin goes from 251 to 259, so the AUC of PAX
# is compared with the mean over these values.
WORST_AUC_DIFFERENCE, NEARBY_BINS = 0.003, range(251, 260)

POOLED, PLUGIN = "XGBoost, pooled", "XGBoost, plugin"


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

    def summary_of(sums: str, n_trees: int) -> Summary:
        return run_once(secure_settings(data, sums, parties, n_trees)).summary

    kinds = [(sums, n_trees) for sums in AGGREGATIONS for n_trees in (1, trees)]
    runs = dict(
        zip(kinds, repeated([partial(summary_of, *kind) for kind in kinds], repeats), strict=True)
    )
    for sums in AGGREGATIONS:
        first, last = runs[sums, 1], runs[sums, trees]
        short, whole = (
            statistics.median(summary["seconds"]["train"] for summary in summaries)
            for summaries in (first, last)
        )
        sent, all_sent = (sum(summaries[0]["bytes"].values()) for summaries in (first, last))
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
) -> Row:
    """What an epsilon costs PAX: scores on test rows by epsilon.

    Each cell trains the private model with several seeds, each of which holds out other rows, and
    scores it on these rows without noise (the scores that a run reports are noisy). References: the
    model under secure aggregation without noise, with PAX's usual settings; and the same trees at
    an epsilon of 1000, which shows what drawing them costs.
    """
    check_names("data", data, PRIVATE_DATA)
    usual = {"num-boost-round": 50, "max-depth": 6, "eta": 0.3}
    shape = {"num-boost-round": rounds, "max-depth": depth, "eta": PRIVATE_ETA}
    shape |= {"privacy.delta": DELTA}
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
    sizes = {"rounds": rounds, "depth": depth, "eta": PRIVATE_ETA, "delta": DELTA}
    return {"lines": lines, "seeds": seeds, "parties": PRIVATE_PARTIES, **sizes}
