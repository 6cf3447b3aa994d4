"""How fast PAX trains, beside pooled XGBoost and XGBoost's own federated plugin.

PAX: ``seconds.train`` of a run in this process, that is sketches and all trees, messages encoded,
checked, and kept on the disk by every party. XGBoost: ``QuantileDMatrix`` and ``train``. The
plugin: the same in three worker processes that a server on 127.0.0.1 connects, from a barrier to
the end of the last one. Nothing counts the reading of the table.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet
import xgboost
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid

from fedapp import metrics
from fedapp.config import Settings, load_settings
from fedapp.data.datasets import find_dataset, locate, read_source
from fedapp.home import home
from fedapp.site.labels import class_ids, class_names
from fedapp.site.rows import Holdout, share_rows
from simulations.baselines import xgboost_parameters
from simulations.engines import run_local

N_PARTIES, N_TRAIN, N_TEST, N_COLUMNS = 3, 20_000, 10_000, 23
N_TREES, MAX_BIN, ETA, DEPTHS = 20, 255, 0.3, (4, 6)
SEED, REPEATS, THREADS = 42, 5, 2
# One thread a worker: three workers share two cores, and with two threads each they only get slower.
WORKER_THREADS = 1
WORST_AUC_DIFFERENCE, LEAF_TOLERANCE = 0.003, 1e-6
SERVER_SECONDS = 30
LOCALHOST = "127.0.0.1"

Rows = npt.NDArray[np.float32]
console = Console()


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The rows of every party, and the test rows of all."""

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
    auc: float
    messages: int = 0
    n_bytes: int = 0


def write_table(folder: Path) -> tuple[str, str]:
    """The setting ``data``, and what to call it; makes a table where default-credit is not here."""
    if locate(find_dataset("default-credit").files[0]):
        return "default-credit", "default-credit"
    rng = np.random.default_rng(SEED)
    values = rng.standard_normal((N_TRAIN + N_TEST, N_COLUMNS)).astype(np.float32)
    margins = values[:, :4] @ np.array([1.0, -0.5, 0.5, 0.25]) + values[:, 4] * values[:, 5] - 1
    labels = (rng.random(len(values)) < 1 / (1 + np.exp(-margins))).astype(np.float64)
    columns = {f"x{place}": values[:, place] for place in range(N_COLUMNS)}
    path = folder / "synthetic.parquet"
    pa.parquet.write_table(pa.table({**columns, "label": labels}), path)
    return str(path), "synthetic, of the size of default-credit"


def settings_of(data: str, depth: int, bins: str, parties: int = N_PARTIES) -> Settings:
    """The run's settings."""
    config = {
        "strategy": "pax",
        "data": data,
        "label": "label" if Path(data).suffix else "",
        "parties": parties,
        "test-fraction": N_TEST / (N_TRAIN + N_TEST),
        "valid-fraction": 0.0,
        "seed": SEED,
        "num-boost-round": N_TREES,
        "max-depth": depth,
        "max-bin": MAX_BIN,
        "eta": ETA,
        "pax.bins": bins,
    }
    return load_settings(config)


def read_rows(settings: Settings) -> Parts:
    """The same rows as the parties of a run have."""
    table = read_source(settings.data, label=settings.label)
    assert table.labels is not None
    labels = class_ids(table.labels, class_names(table.labels, settings.objective))
    holdout = Holdout(settings.test_fraction, settings.valid_fraction, settings.seed)
    shares = share_rows(table, holdout, settings.partition, settings.parties)
    train, test = shares["train"], np.sort(np.concatenate(shares["test"]))
    return Parts(
        tuple(table.values[rows] for rows in train),
        tuple(labels[rows].astype(np.float32) for rows in train),
        table.values[test],
        labels[test].astype(np.float32),
    )


def run_pax(settings: Settings) -> tuple[dict[str, Any], dict[str, Any], int]:
    """One run: its summary, its model as XGBoost's JSON, the number of its messages."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = str(Path(folder) / "run")
        run = run_local(settings.model_copy(update={"run_dir": run_dir}))
        summary = json.loads((run.path / "summary.json").read_text())
        model = json.loads((run.path / "model.xgb.json").read_text())
        n_messages = len(run.ledger.read_text().splitlines())
    for party in summary["parties"]:
        shutil.rmtree(home() / "sites" / party["name"] / summary["model_id"])
    return summary, model, n_messages


def measure_pax(settings: Settings) -> Measured:
    """Median of the runs after a warm-up."""
    runs = [run_pax(settings) for _ in range(REPEATS + 1)][1:]
    summary, _, n_messages = runs[-1]
    seconds = statistics.median(summary["seconds"]["train"] for summary, _, _ in runs)
    method = f"PAX, bins {settings.sections['pax']['bins']}"
    auc = summary["metrics"]["test"]["auc"]
    n_bytes = sum(summary["bytes"].values())
    return Measured(method, settings.max_depth, seconds, auc, n_messages, n_bytes)


def train_pooled(parameters: Mapping[str, Any], rows: Parts) -> tuple[float, Any]:
    """Seconds, and the booster of all parties' rows."""
    values, labels = np.concatenate(rows.values), np.concatenate(rows.labels)
    start = time.perf_counter()
    matrix = xgboost.QuantileDMatrix(values, labels, max_bin=MAX_BIN, nthread=THREADS)
    booster = xgboost.train(dict(parameters), matrix, N_TREES)
    return time.perf_counter() - start, booster


def measure_pooled(settings: Settings, rows: Parts) -> Measured:
    """Median of the runs after a warm-up."""
    parameters = parameters_of(settings, rows)
    runs = [train_pooled(parameters, rows) for _ in range(REPEATS + 1)][1:]
    seconds = statistics.median(seconds for seconds, _ in runs)
    auc = test_auc(runs[-1][1].predict(test_matrix(rows), output_margin=True), rows)
    return Measured("XGBoost, pooled", settings.max_depth, seconds, auc)


def parameters_of(settings: Settings, rows: Parts, threads: int = THREADS) -> dict[str, Any]:
    """The run's settings as XGBoost takes them."""
    labels = np.concatenate(rows.labels)
    parameters = xgboost_parameters(settings, labels, np.ones_like(labels), labels)
    return {**parameters, "nthread": threads}


def test_matrix(rows: Parts) -> Any:
    return xgboost.DMatrix(rows.test_values)


def test_auc(margins: Rows, rows: Parts) -> float:
    """As the run counts it."""
    labels = rows.test_labels
    weights = np.ones_like(labels)
    return metrics.pooled("binary:logistic", margins.reshape(-1, 1), labels, weights)["auc"]


def check_against_xgboost(data: str, depth: int, rows: Parts) -> int:
    """Hold one party's model against pooled XGBoost node for node; returns the number of nodes."""
    settings = settings_of(data, depth, "equal", parties=1)
    whole = read_rows(settings)
    _, booster = train_pooled(parameters_of(settings, whole), whole)
    _, model, _ = run_pax(settings)
    pairs = zip(_trees(model), _trees(json.loads(booster.save_raw("json"))), strict=True)
    return sum(_same_nodes(ours, theirs) for ours, theirs in pairs)


def _trees(model: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = model["learner"]["gradient_booster"]["model"]["trees"]
    return found


def _same_nodes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> int:
    """Walk two trees from their roots; their nodes may be numbered differently."""
    pairs, n_nodes = [(0, 0)], 0
    while pairs:
        mine, other = pairs.pop()
        n_nodes += 1
        children = [
            [tree[side][node] for side in ("left_children", "right_children")]
            for tree, node in ((ours, mine), (theirs, other))
        ]
        is_leaf = children[0][0] == -1
        assert is_leaf == (children[1][0] == -1), "trees must have one shape"
        values = ours["split_conditions"][mine], theirs["split_conditions"][other]
        if is_leaf:
            np.testing.assert_allclose(*values, rtol=LEAF_TOLERANCE)
            continue
        for name in ("split_indices", "default_left"):
            assert ours[name][mine] == theirs[name][other], f"{name} must be equal"
        assert np.float32(values[0]) == np.float32(values[1]), "thresholds must be equal"
        pairs += zip(*children, strict=True)
    return n_nodes
