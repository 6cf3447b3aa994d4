"""HybridTree against what parties can train without it, on sets split by rows and by columns.

Source of the method: Li et al. 2024 (arXiv:2310.11865); the paper's sets and splits are not at
hand. A host has labels and a quarter of the columns; two guests have the other columns, each for
half of the rows, drawn independently, so a quarter of the rows is at both and a quarter at neither.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

import fedapp
from fedapp.data.datasets import read_source
from fedapp.data.table import Table
from fedapp.errors import listed
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from simulations.study import Row, averaged, console, costs, show, write_tables

DATA = "default-credit,spambase"
SEEDS = (42, 1, 2)
ROWS, ROUNDS, QUICK_ROWS, QUICK_ROUNDS = 4000, 40, 400, 3
TEST, HOST_COLUMNS, GUEST_ROWS = 0.25, 0.25, 0.5
PARTIES = ("host", "one", "two")
COMMON: Row = {"objective": "binary:logistic", "label": "y", "test-fraction": 0.0}
COMMON |= {"valid-fraction": 0.0, "early-stopping-rounds": 0, "eta": 0.1, "max-bin": 32}
KEY: Row = {"key-bits": 512, "insecure-small-key": True}
OUTPUT = Path("runs/benchmarks/hybrid_tree")
NOTES = """\
AUC of test rows, a quarter of all. All: every test row of the host. Both: those that both guests
have. SecureBoost trains on the training rows that all three parties have, and scores only such
rows; others are scored by the host's model. PAX: three parties with the host's columns, and labels,
of a third of the training rows each. One place: XGBoost on all columns of all rows. Keys of 512
bits; the model does not depend on these."""
Rows = npt.NDArray[np.int64]


def main(
    quick: bool = False,
    data: str = DATA,
    seeds: tuple[int, ...] = SEEDS,
    output: Path = OUTPUT,
) -> None:
    """Train every model on every set and seed, print the scores of test rows, and write them."""
    start = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    seeds = seeds[:1] if quick else seeds
    rows = [
        row
        for name in listed(data)
        for seed in seeds
        for row in compared(name, seed, quick, output)
    ]
    means = averaged(rows, "data", "model")
    columns = "data; model; AUC, all=all:.4f; AUC, both=both:.4f; sec.=seconds:.1f; exchanges:.0f"
    show("HybridTree and others", means, columns, 2)
    write_tables(output, "hybrid_tree", start, {"rows": rows, "means": means, "notes": NOTES})


def compared(name: str, seed: int, quick: bool, output: Path) -> list[Row]:
    """Scores of all models on one set and seed."""
    rng = np.random.default_rng(seed)
    whole, n_rows = read_source(name), QUICK_ROWS if quick else ROWS
    table = whole.take(np.sort(rng.permutation(whole.n_rows)[:n_rows]))
    n_rows, n_columns = table.values.shape
    order = rng.permutation(n_columns)
    n_host = max(1, round(HOST_COLUMNS * n_columns))
    host, others = np.sort(order[:n_host]), np.sort(order[n_host:])
    is_test = rng.random(n_rows) < TEST
    has: dict[str, npt.NDArray[np.bool_]] = {
        guest: np.less(rng.random(n_rows), GUEST_ROWS) for guest in PARTIES[1:]
    }
    everything = np.arange(n_columns)
    files = {guest: (np.flatnonzero(has[guest]), others, False) for guest in has}
    both = has["one"] & has["two"]
    files |= {
        f"{kind}-{part}": (rows, columns, True)
        for part, rows in (("train", np.flatnonzero(~is_test)), ("test", np.flatnonzero(is_test)))
        for kind, columns in (("host", host), ("all", everything))
    }
    files["both-test"] = np.flatnonzero(is_test & both), host, True
    folder = output / f"{name}-{seed}"
    folder.mkdir(exist_ok=True)
    for file, (rows, columns, is_labelled) in files.items():
        write(folder / f"{file}.csv", table, rows, columns, is_labelled)
    assert table.labels is not None
    truth = np.unique(table.labels, return_inverse=True)[1][is_test]
    return scored(folder, truth, both[is_test], {"data": name, "seed": seed}, quick)


def scored(
    folder: Path, truth: Rows, is_both: npt.NDArray[np.bool_], about: Row, quick: bool
) -> list[Row]:
    """Train the models of one split and score its test rows."""
    paths = {path.stem: str(path) for path in folder.glob("*.csv")}
    guests = {guest: paths[guest] for guest in PARTIES[1:]}
    rounds = {"num-boost-round": QUICK_ROUNDS if quick else ROUNDS, "seed": about["seed"]}
    whole = {"strategy": "pax", "parties": 1, "drop-columns": "id"}
    vertical: Row = {"id": "id", "data": ",".join([paths["host-train"], *guests.values()])}
    plans: Mapping[str, tuple[Row, str]] = {
        "HybridTree": ({"strategy": "hybrid-tree", "hybrid-tree": KEY, **vertical}, "host"),
        "host alone": ({**whole, "data": paths["host-train"]}, "host"),
        "PAX, host's columns": ({**whole, "parties": 3, "data": paths["host-train"]}, "host"),
        "SecureBoost, rows of all": (
            {"strategy": "secureboost", "secureboost": KEY, **vertical, "parties": 3},
            "both",
        ),
        "one place": ({**whole, "data": paths["all-train"]}, "all"),
    }
    rows, scores = list[Row](), dict[str, npt.NDArray[np.float64]]()
    for model, (settings, kind) in plans.items():
        run_dir = folder / f"run-{len(rows)}"
        config = {**COMMON, **rounds, **settings, "run-dir": str(run_dir)}
        done = run_local(load_settings({"parties": 3, **config}))
        table = paths[f"{kind}-test"]
        names = [party["name"] for party in done.summary["parties"]]
        each = dict(zip(names, [table, *guests.values()], strict=False))
        test = each if "id" in config else table
        predicted = fedapp.load(run_dir).predict_proba(test, id=config.get("id", ""))[:, 1]
        if kind == "both":
            of_both, predicted = predicted, scores["host alone"].copy()
            predicted[is_both] = of_both
        scores[model] = predicted
        console.print(f"{about['data']}, seed {about['seed']}: {model}")
        auc = {"all": area(truth, predicted), "both": area(truth[is_both], predicted[is_both])}
        rows.append({**about, "model": model, **auc, **costs(done.summary)})
    return rows


def write(path: Path, table: Table, rows: Rows, columns: Rows, is_labelled: bool) -> None:
    """A CSV of some rows and columns, with ids, and labels as 0 and 1."""
    assert table.labels is not None
    labels = np.unique(table.labels, return_inverse=True)[1]
    lines = [",".join(["id", *(f"c{column}" for column in columns), *["y"] * is_labelled])]
    for row in rows.tolist():
        cells = [
            "" if np.isnan(value) else repr(float(value)) for value in table.values[row, columns]
        ]
        lines.append(",".join([f"r{row}", *cells, *[str(labels[row])] * is_labelled]))
    path.write_text("\n".join(lines) + "\n")


def area(truth: Sequence[int] | Rows, scores: npt.NDArray[np.float64]) -> float:
    """AUC by ranks, equal scores sharing theirs."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    is_positive = np.asarray(truth) == 1
    n_positive, n_negative = int(is_positive.sum()), int((~is_positive).sum())
    total = float(ranks[is_positive].sum())
    return (total - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative)
