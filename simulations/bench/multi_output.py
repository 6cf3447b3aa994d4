"""One tree a round for all classes beside a tree for each: what they cost, and how they score."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from fedapp.crypto.workers import shared_workers
from fedapp.data.datasets import find_dataset, read_source
from fedapp.data.schema import Roles
from fedapp.runs.baselines import baseline_rows, train_boosted
from fedapp.settings import load_settings
from fedapp.trees.size import MultiStrategy
from simulations.passing import temporary_run
from simulations.study import SEED, Row, apart, costs, count_same_nodes, cpu_seconds, write_rows

REAL, REAL_CLASSES = "kddcup99", 23
TEXTS = "protocol_type", "service", "flag"  # columns of categories, which XGBoost refuses here
FEWEST = 20  # rows of a class, if it has as many
ROWS = 2000
N_COLUMNS, INFORMATIVE = 20, (0, 1, 2, 10, 11, 12)  # half of them at either party
COMMON: Row = {
    "strategy": "secureboost",
    "objective": "multi:softprob",
    "label": "y",
    "parties": 2,
    "columns": "even",
    "align": "ordered",
    "allow-export": True,
    "secureboost.insecure-small-key": True,
    "valid-fraction": 0.0,
    "test-fraction": 0.25,
    "max-depth": 4,
    "max-bin": 32,
    "eta": 0.3,
    "seed": SEED,
}
WARM_UP: Row = {"num-boost-round": 1, "max-depth": 2, "max-bin": 4}


def made_table(n_classes: int, n_rows: int, path: Path) -> str:
    """Write a table of numbers whose classes depend on columns of both parties."""
    rng = np.random.default_rng([SEED, n_classes])
    values = rng.standard_normal((n_rows, N_COLUMNS)).astype(np.float32)
    parts = np.concatenate((values[:, INFORMATIVE], np.abs(values[:, INFORMATIVE])), axis=1)
    scores = parts @ rng.normal(size=(parts.shape[1], n_classes)) + rng.gumbel(
        size=(n_rows, n_classes)
    )
    columns: Row = {f"x{column}": values[:, column] for column in range(N_COLUMNS)}
    pa.parquet.write_table(pa.table({**columns, "y": scores.argmax(axis=1)}), path)
    return str(path)


def real_table(n_rows: int, path: Path) -> str:
    """Write rows of the network connections, of every class ``FEWEST`` if there are as many."""
    table = read_source(REAL, Roles(find_dataset(REAL).label, drop=TEXTS))
    assert table.labels is not None
    order = np.random.default_rng(SEED).permutation(table.n_rows)
    labels = np.unique(table.labels[order], return_inverse=True)[1]
    ranks = np.empty(len(order), dtype=np.int64)  # of each row within its class
    for label in range(int(labels.max()) + 1):
        ranks[labels == label] = np.arange((labels == label).sum())
    first = np.argsort(np.minimum(ranks, FEWEST), kind="stable")[:n_rows]
    return write_rows(path, table, order[first])


def measured(config: Row, rounds: int) -> Row:
    """Train after a warm-up, compare with XGBoost node for node; costs and test scores."""
    with temporary_run(load_settings({**config, **WARM_UP})):
        pass
    settings, before = load_settings({**config, "num-boost-round": rounds}), cpu_seconds()
    with temporary_run(settings) as run:
        shared_workers().close()  # whose seconds are counted then
        spent = cpu_seconds() - before
        booster = train_boosted(settings, baseline_rows(settings)[0]).booster
        model = json.loads((run.path / "model.xgb.json").read_text())
        nodes = count_same_nodes(model, json.loads(booster.save_raw("json")))
        summary: Any = run.summary
    test = summary["metrics"]["test"]
    scores = {name: test[name] for name in ("mlogloss", "accuracy")}
    return {**costs(summary), "cpu_seconds": spent, "nodes": nodes, **scores}


def multi_output(
    classes: tuple[int, ...] = (4, 7, REAL_CLASSES), key_bits: int = 1024, quick: bool = False
) -> Iterator[Row]:
    """A line for each number of classes and way: seconds, CPU seconds, bytes, scores of test rows.

    Tables are made, but for 23 classes, which are those of kddcup99 (in $FEDAPP_DATA). Every model
    is compared with XGBoost's, node for node. ``--quick`` takes a tenth of the rows and two rounds.
    """
    n_rows, n_rounds = (ROWS // 10, 2) if quick else (ROWS, 5)
    with tempfile.TemporaryDirectory() as folder:
        for n_classes in classes:
            path = Path(folder) / f"{n_classes}.parquet"
            is_real = n_classes == REAL_CLASSES
            data = real_table(n_rows, path) if is_real else made_table(n_classes, n_rows, path)
            for strategy in get_args(MultiStrategy):
                how = {"data": data, "multi-strategy": strategy, "secureboost.key-bits": key_bits}
                row = {"classes": n_classes, "strategy": strategy, "rows": n_rows, "key": key_bits}
                yield {**row, **apart(measured, {**COMMON, **how}, n_rounds)}
