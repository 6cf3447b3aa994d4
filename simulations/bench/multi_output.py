"""One tree a round for all classes beside a tree for each: what they cost, and how they score."""

from __future__ import annotations

import itertools
import tempfile
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from fedapp.data.datasets import find_dataset, read_source
from fedapp.data.schema import Roles
from fedapp.settings import load_settings
from fedapp.trees.limits import MultiStrategy
from simulations.study import SEED, Bench, Row, compare_with_xgboost, measured, run_once, write_rows

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


def train(classes: int, strategy: str, rows: int, rounds: int, key_bits: int) -> Row:
    """Train after a warm-up, compare with XGBoost node for node; costs and test scores."""
    with tempfile.TemporaryDirectory() as folder:
        write = real_table if classes == REAL_CLASSES else partial(made_table, classes)
        config: Row = {**COMMON, "data": write(rows, Path(folder) / "rows.parquet")}
        config |= {"multi-strategy": strategy, "secureboost.key-bits": key_bits}
        run_once(load_settings({**config, **WARM_UP}))
        settings = load_settings({**config, "num-boost-round": rounds})
        with measured(settings) as (run, figures):
            test = run.summary["metrics"]["test"]
            figures |= {name: test[name] for name in ("mlogloss", "accuracy")}
            return {**figures, "nodes": compare_with_xgboost(settings, run.path)}


def multi_output(
    classes: tuple[int, ...] = (4, 7, REAL_CLASSES), key_bits: int = 1024, quick: bool = False
) -> Bench:
    """A line for each number of classes and way: seconds, CPU seconds, bytes, scores of test rows.

    Tables are made, but for 23 classes, which are those of kddcup99 (in $FEDAPP_DATA). Every model
    is compared with XGBoost's, node for node. ``--quick`` takes a tenth of the rows and two rounds.
    """
    n_rows, n_rounds = (ROWS // 10, 2) if quick else (ROWS, 5)
    ways = itertools.product(classes, get_args(MultiStrategy))
    return Bench(
        cases=[{"classes": n_classes, "strategy": strategy} for n_classes, strategy in ways],
        measure=partial(train, rows=n_rows, rounds=n_rounds, key_bits=key_bits),
        sizes={"rows": n_rows, "key": key_bits},
        title=f"{n_rows:,} rows, {n_rounds} rounds",
        columns="classes; strategy; seconds:.1f; CPU seconds=cpu_seconds:.1f; MB=mb:.1f; nodes; "
        "mlogloss:.3f; accuracy:.3f",
    )
