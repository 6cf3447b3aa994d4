"""How long a Federated Forest takes, beside scikit-learn's random forest on the joined table.

Two parties, ten times the rows of spambase, encoded labels, a run in this process: messages are
encoded, sealed, checked and kept on the disk by both. Before anything is timed, the joined forest
is held against the one that ``fedapp.trees.forest.model`` grows in one place, node for node, and
its accuracy on the training rows against that of scikit-learn, whose draws are others.

``ratio`` counts the whole run, from reading the table to the written report: alignment, training,
scores. ``ratio_train`` counts the messages of the training alone. Both are against
``RandomForestClassifier.fit``, which reads, aligns and scores nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet
from sklearn.ensemble import RandomForestClassifier

from fedapp.data.datasets import read_source
from fedapp.runs.baselines import join_tables, pooled_forest, temporary_run
from fedapp.settings import Settings, load_settings
from fedapp.trees.forest.model import BaggedForest, from_json
from simulations.bench import peak_bytes, tell

DATA, TIMES, PARTIES = "spambase", 10, 2
TREES, DEPTH, MAX_FEATURES, SEED, REPEATS, THREADS = 32, 8, "sqrt", 42, 5, 2
EXACT = 65535  # bins: a cut wherever scikit-learn may place one
WORST_ACCURACY_DIFFERENCE = 0.01
ALIGNMENTS = ("ordered", "psi")

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """Wall time, summary and ledger of a run, and its model."""

    seconds: float  # from the call to its return
    summary: Row
    ledger: list[Row]
    model: str  # model.json, complete if the master keeps the model


def write_rows(name: str, times: int, path: Path) -> None:
    """Write a data set ``times`` times over as Parquet, with the label y."""
    table = read_source(name)
    assert table.labels is not None
    columns = {f"x{number}": np.tile(column, times) for number, column in enumerate(table.values.T)}
    pa.parquet.write_table(pa.table({**columns, "y": np.tile(table.labels, times)}), path)


def settings_of(data: Path, max_bin: int, align: str, keeps_model: bool = False) -> Settings:
    """Settings of a run without test rows."""
    config = {
        "strategy": "federated-forest",
        "data": str(data),
        "label": "y",
        "parties": PARTIES,
        "columns": "even",
        "align": align,
        "allow-export": keeps_model,
        "test-fraction": 0.0,
        "valid-fraction": 0.0,
        "seed": SEED,
        "max-bin": max_bin,
        "federated-forest.trees": TREES,
        "federated-forest.max-depth": DEPTH,
        "federated-forest.max-features": MAX_FEATURES,
        "federated-forest.master-keeps-model": keeps_model,
    }
    return load_settings(config)


def run_once(settings: Settings) -> Run:
    """Train in this process and leave no files."""
    start = time.perf_counter()
    with temporary_run(settings) as run:
        seconds = time.perf_counter() - start
        ledger = [json.loads(line) for line in run.ledger.read_text().splitlines()]
        return Run(seconds, run.summary, ledger, (run.path / "model.json").read_text())


# The reference


def check_same(model: BaggedForest, other: BaggedForest) -> int:
    """Check that two forests are equal node for node; return the number of nodes.

    Raises
    ------
    ValueError : they differ.
    """
    n_nodes = 0
    pairs = zip(model.trees, other.trees, model.values, other.values, strict=True)
    for tree, (ours, theirs, mine, yours) in enumerate(pairs):
        same = len(ours) == len(theirs) and bool((mine == yours).all())
        if not same or (ours != theirs).any():
            raise ValueError(f"trees must be those of the joined table, got another tree {tree}")
        n_nodes += len(ours)
    return n_nodes


def check_accuracy(ours: float, theirs: float) -> None:
    """Compare the accuracy on the training rows with scikit-learn's.

    Raises
    ------
    ValueError : it differs by more than ``WORST_ACCURACY_DIFFERENCE``.
    """
    difference, limit = ours - theirs, WORST_ACCURACY_DIFFERENCE
    if abs(difference) > limit:
        raise ValueError(f"accuracy must be within {limit} of theirs, got {difference:+.4f}")


def fit_theirs(
    values: npt.NDArray[np.float32], labels: npt.NDArray[np.float32], seed: int
) -> tuple[float, float]:  # seconds of scikit-learn's fit, accuracy on the training rows
    forest = RandomForestClassifier(
        TREES, max_depth=DEPTH, max_features=MAX_FEATURES, n_jobs=THREADS, random_state=seed
    )
    start = time.perf_counter()
    forest.fit(values, labels)
    return time.perf_counter() - start, float(forest.score(values, labels))


# The result


def seconds_by_message(ledger: Sequence[Row]) -> dict[str, float]:
    """Seconds in which some party handled a message, by type."""
    spent: Counter[str] = Counter()
    for step in sorted({line["step"] for line in ledger}):
        lines = [line for line in ledger if line["step"] == step]
        spent[lines[0]["type"]] += lines[-1]["seconds"] - lines[0]["seconds"]
    return {kind: round(seconds, 4) for kind, seconds in spent.items()}


def measure(max_bin: int, align: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        write_rows(DATA, TIMES, path)
        exported = settings_of(path, max_bin, align, keeps_model=True)
        table, _, _ = join_tables(exported)
        train = table.split.train
        values, labels = table.values[train], table.labels[train]
        model = from_json(run_once(exported).model)
        pooled, _, _ = pooled_forest(exported, model.columns, values, labels, table.weights[train])
        n_nodes, timed = check_same(model, pooled), settings_of(path, max_bin, align)
        # In turn, so that a busy machine is one for both; the first of each warms up.
        pairs = [
            (run_once(timed), fit_theirs(values, labels, SEED + repeat))
            for repeat in range(REPEATS + 1)
        ]
    runs = [run for run, _ in pairs[1:]]
    accuracies = [accuracy for _, (_, accuracy) in pairs[1:]]
    accuracy = runs[-1].summary["metrics"]["train"]["accuracy"]
    check_accuracy(accuracy, statistics.fmean(accuracies))
    costs = compared(runs, [seconds for _, (seconds, _) in pairs[1:]])
    return {
        "data": f"{DATA} x {TIMES}",
        "parties": PARTIES,
        "rows": len(train),
        "columns": values.shape[1],
        "trees": TREES,
        "depth": DEPTH,
        "max_bin": max_bin,
        "max_features": MAX_FEATURES,
        "align": align,
        "seed": SEED,
        "nodes_as_pooled": n_nodes,
        "accuracy": accuracy,
        "accuracy_sklearn": accuracies,
        **costs,
        # Of this process: the server, both parties, and scikit-learn.
        "peak_bytes": peak_bytes(),
    }


def compared(runs: Sequence[Run], theirs: Sequence[float]) -> Row:
    """Medians of both, and their ratios."""
    seconds = statistics.median(run.seconds for run in runs)
    train = statistics.median(run.summary["seconds"]["train"] for run in runs)
    middle = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    fit = statistics.median(theirs)
    return {
        "repeats": len(runs),
        "seconds": seconds,
        "seconds_train": train,
        "seconds_sklearn": fit,
        "ratio": seconds / fit,
        "ratio_train": train / fit,
        "seconds_by_message": seconds_by_message(middle.ledger),
        "exchanges": middle.summary["exchanges"],
        "messages": len(middle.ledger),
        "bytes": sum(middle.summary["bytes"].values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-bin", type=int, default=EXACT)
    parser.add_argument("--align", choices=ALIGNMENTS, default=ALIGNMENTS[0])
    options = parser.parse_args()
    packages = "fedapp", "flwr", "scikit-learn", "numpy", "numba"
    tell("federated_forest", packages, **measure(options.max_bin, options.align))


if __name__ == "__main__":
    main()
