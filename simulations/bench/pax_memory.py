"""How much memory a party with a million rows takes to train PAX.

The party runs in a new process. Its peak memory includes Python and its libraries, reading the
Parquet file, sketch and trees, and the server of the run, which is in the same process. Pooled
XGBoost in another process is the reference for the model, node for node, for memory and for time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from rich.console import Console

from fedapp.data.schema import Roles
from fedapp.histograms.bins import code_type
from fedapp.runs.baselines import count_same_nodes
from fedapp.settings import Settings, load_settings
from simulations.bench import BINARY, SEED, apart, cpu_seconds, peak_bytes, show, tell

N_ROWS, N_COLUMNS = 1_000_000, 28
N_TREES, DEPTH, MAX_BIN = 5, 6, 255
CHUNK_ROWS = 100_000
MOST_BYTES = 2 << 30

console = Console()


@dataclass(frozen=True, slots=True)
class Measured:
    """Model and costs of one process."""

    peak: int  # bytes
    ready: int  # bytes, peak before the first row was read: Python and its libraries
    seconds: float  # of training, including the sketch
    cpu: float  # seconds of all threads, including reading the table
    tree_seconds: list[float]  # empty if not known
    sent: dict[str, int]  # exchanges, messages and bytes; empty for XGBoost
    model: str  # XGBoost's JSON


def write_table(path: Path, n_rows: int) -> None:
    rng = np.random.default_rng(SEED)
    names = [f"x{column}" for column in range(N_COLUMNS)]
    schema = pa.schema([*((name, pa.float32()) for name in names), ("label", pa.float64())])
    with pa.parquet.ParquetWriter(path, schema) as writer:
        for _ in range(n_rows // CHUNK_ROWS):
            values = rng.standard_normal((N_COLUMNS, CHUNK_ROWS), dtype=np.float32)
            margins = values[0] - 0.5 * values[1] + values[2] * values[3]
            labels = rng.random(CHUNK_ROWS) < 1 / (1 + np.exp(-margins))
            writer.write_table(pa.table([*values, labels.astype(np.float64)], schema=schema))


def settings_of(path: Path) -> Settings:
    """Settings of one party that has the whole table."""
    config = {
        "strategy": "pax",
        **BINARY,
        "data": str(path),
        "label": "label",
        "parties": 1,
        "test-fraction": 0.0,
        "num-boost-round": N_TREES,
        "max-depth": DEPTH,
        "max-bin": MAX_BIN,
    }
    return load_settings(config)


def binned_bytes(n_rows: int) -> int:
    """Size of the binned table that a party holds while it trains; no value is missing."""
    dtype, _ = code_type(MAX_BIN, any_missing=False)
    return n_rows * N_COLUMNS * np.dtype(dtype).itemsize


def train_pax(path: Path) -> Measured:
    from fedapp.runs.baselines import temporary_run

    ready, cpu_start = peak_bytes(), cpu_seconds()
    with temporary_run(settings_of(path)) as run:
        cpu, summary = cpu_seconds() - cpu_start, run.summary
        each = [json.loads(line)["seconds"] for line in run.rounds.read_text().splitlines()]
        n_messages = len(run.ledger.read_text().splitlines())
        model = (run.path / "model.xgb.json").read_text()
    sent = {"exchanges": summary["exchanges"], "messages": n_messages}
    sent["bytes"] = sum(summary["bytes"].values())
    seconds = summary["seconds"]["train"]
    return Measured(peak_bytes(), ready, seconds, cpu, each, sent, model)


def train_pooled(path: Path) -> Measured:
    import xgboost

    from fedapp.data.datasets import read_source
    from fedapp.runs.baselines import xgboost_parameters

    settings, ready, cpu_start = settings_of(path), peak_bytes(), cpu_seconds()
    table = read_source(str(path), Roles(label="label"))
    parameters = xgboost_parameters(settings, table.labels, np.ones(table.n_rows), table.labels)
    start = time.perf_counter()
    matrix = xgboost.QuantileDMatrix(table.values, table.labels, max_bin=MAX_BIN)
    booster = xgboost.train(parameters, matrix, N_TREES)
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu_start
    return Measured(peak_bytes(), ready, seconds, cpu, [], {}, booster.save_raw("json").decode())


def print_both(party: Measured, pooled: Measured, n_rows: int) -> None:
    rows = []
    for method, measured in (("PAX, one party and server", party), ("XGBoost, pooled", pooled)):
        peaks = [f"{n_bytes / 2**20:.0f}" for n_bytes in (measured.peak, measured.ready)]
        ratios = [f"{measured.seconds / pooled.seconds:.2f}", f"{measured.cpu / pooled.cpu:.2f}"]
        times = [f"{measured.seconds:.2f}", f"{measured.cpu:.2f}"]
        rows.append([method, *peaks, *itertools.chain(*zip(times, ratios, strict=True))])
    title = f"{n_rows:,} x {N_COLUMNS} at one party, {N_TREES} trees of depth {DEPTH}"
    header = ("", "peak MiB", "of it libraries", "seconds", "/ pooled", "CPU", "/ pooled")
    show(title, header, rows)
    seconds = ", ".join(f"{measured:.2f}" for measured in party.tree_seconds)
    console.print(f"binned table {binned_bytes(n_rows) / 2**20:.0f} MiB; seconds a tree {seconds}")
    console.print("the first tree's include the sketch")
    within = "below" if party.peak < MOST_BYTES else "ABOVE"
    console.print(f"peak memory is {within} {MOST_BYTES / 2**30:.0f} GiB")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=N_ROWS, help=f"a multiple of {CHUNK_ROWS}")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        write_table(path, options.rows)
        pooled, party = apart(train_pooled, path), apart(train_pax, path)
    n_nodes = count_same_nodes(json.loads(party.model), json.loads(pooled.model))
    console.print(f"the party's model equals pooled XGBoost in all {n_nodes} nodes")
    print_both(party, pooled, options.rows)
    tell(
        "pax_memory",
        ("fedapp", "xgboost", "numpy", "flwr"),
        rows=options.rows,
        columns=N_COLUMNS,
        trees=N_TREES,
        depth=DEPTH,
        max_bin=MAX_BIN,
        seed=SEED,
        same_nodes=n_nodes,
        peak_bytes=party.peak,
        library_bytes=party.ready,
        binned_bytes=binned_bytes(options.rows),
        seconds=party.seconds,
        cpu_seconds=party.cpu,
        tree_seconds=statistics.median(party.tree_seconds),
        **party.sent,
        pooled={
            "peak_bytes": pooled.peak,
            "seconds": pooled.seconds,
            "cpu_seconds": pooled.cpu,
            "ratio": party.seconds / pooled.seconds,
            "cpu_ratio": party.cpu / pooled.cpu,
        },
    )


if __name__ == "__main__":
    main()
