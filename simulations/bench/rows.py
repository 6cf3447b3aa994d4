"""How vertical methods grow with the rows: seconds and memory at 10^4, 10^5 and 10^6 of them.

Two parties with ten columns each train in a process of their own for each number of rows, so its
peak is all that both held, with the server of the run and Python itself. SecureBoost grows trees of
depth 3 on 32 bins, once on all rows and once on those that GOSS draws; Federated Forest grows trees
under coded labels; private set intersection aligns ids that both have. The exponent is that of the
growth from the number of rows before: 1 where ten times the rows cost ten times as much. Seconds
are those of a clock and those of the processor, of all threads together; set-up and keys count.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from fedapp.config import load_settings
from fedapp.crypto.workers import n_cores
from fedapp.packages import versions
from simulations.bench import exponent, peak_bytes

ROWS = (10_000, 100_000, 1_000_000)
COLUMNS = (10, 10)  # active, passive
MAX_BIN, DEPTH, N_TREES, SEED = 32, 3, 3, 42
TEST_ROWS = 0.1  # of all
METHODS = ("secureboost", "goss", "federated-forest", "psi")

Line = dict[str, Any]


def write_table(path: Path, n_rows: int) -> None:
    """Rows by chance; their label follows columns of both parties."""
    rng = np.random.default_rng(SEED)
    values = rng.standard_normal((sum(COLUMNS), n_rows), dtype=np.float32)
    margins = values[0] - values[10] + values[1] * values[11] + 0.5 * values[12]
    labels = rng.random(n_rows) < 1 / (1 + np.exp(-margins))
    names = [f"x{place}" for place in range(len(values))]
    table = pa.table([*values, labels.astype(np.float64)], names=[*names, "label"])
    pa.parquet.write_table(
        table.append_column("id", pa.array(range(n_rows)).cast(pa.string())), path
    )


def config_of(method: str, n_trees: int, key_bits: int, folder: Path) -> Line:
    """The run's settings."""
    shared = {
        "data": str(folder / "rows.parquet"),
        "label": "label",
        "id": "id",
        "parties": 2,
        "columns": "sizes:" + ",".join(map(str, COLUMNS)),
        "objective": "binary:logistic",
        "test-fraction": TEST_ROWS,
        "valid-fraction": 0.0,
        "seed": SEED,
        "max-depth": DEPTH,
        "run-dir": str(folder / "run"),
    }
    if method in ("federated-forest", "psi"):
        forest = {"trees": 1 if method == "psi" else n_trees, "max-depth": DEPTH}
        align = "psi" if method == "psi" else "ordered"
        return {
            **shared,
            "strategy": "federated-forest",
            "align": align,
            "federated-forest": forest,
        }
    boosted = {"strategy": "secureboost", "align": "ordered", "max-bin": MAX_BIN}
    own = {"key-bits": key_bits, "insecure-small-key": True, "goss": method == "goss"}
    return {**shared, **boosted, "num-boost-round": n_trees, "secureboost": own}


def train(method: str, n_rows: int, n_trees: int, key_bits: int) -> Line:
    """One run, in this process."""
    from simulations.local import run_local

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["FEDAPP_HOME"] = str(folder / "home")
        write_table(folder / "rows.parquet", n_rows)
        ready, began = peak_bytes(), time.process_time()
        run = run_local(load_settings(config_of(method, n_trees, key_bits, folder)))
        summary = run.summary
        seconds = [json.loads(line)["seconds"] for line in run.rounds.read_text().splitlines()]
        ledger = [json.loads(line) for line in run.ledger.read_text().splitlines()]
        shutil.rmtree(folder / "home")
    return {
        "bench": "rows",
        "method": method,
        "rows": n_rows,
        "trees": n_trees,
        "key_bits": key_bits,
        "cores": n_cores(),
        "seconds": summary["seconds"]["total"],
        "cpu_seconds": time.process_time() - began,
        # The first lays out tables of masks.
        "seconds_a_tree": min(seconds[1:] or seconds, default=None),
        "peak_bytes": peak_bytes(),
        "ready_bytes": ready,
        "bytes": sum(summary["bytes"].values()),
        "largest_message": max(line["bytes"] for line in ledger),
        "auc": summary["metrics"]["test"].get("auc"),
        "seed": SEED,
        "load": os.getloadavg()[0],
        "versions": versions(("fedapp", "flwr", "gmpy2", "numba")),
    }


def apart(function: Callable[..., Line], *given: Any) -> Line:
    """A call in a process of its own, whose peak is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, given)


def exponents(lines: Sequence[Line]) -> list[Line]:
    """Lines of one method with how each grew from the one before."""
    found = [lines[0]]
    for before, line in pairwise(lines):
        sizes = before["rows"], line["rows"]
        grown = {
            f"exponent_of_{what}": exponent((before[what], line[what]), sizes)
            for what in ("seconds", "cpu_seconds", "peak_bytes", "bytes")
        }
        found.append({**line, **grown})
    return found


def main() -> None:
    """Print a JSON line for each method and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--trees", type=int, default=N_TREES)
    parser.add_argument("--key-bits", type=int, default=2048)
    given = parser.parse_args()
    for method in given.methods:
        lines: list[Line] = []
        for n_rows in sorted(given.rows):
            lines.append(apart(train, method, n_rows, given.trees, given.key_bits))
            print(json.dumps(exponents(lines)[-1]), flush=True)


if __name__ == "__main__":
    main()
