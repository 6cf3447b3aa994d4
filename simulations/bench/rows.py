"""How methods grow with the rows: seconds and memory at 10^4, 10^5 and 10^6 of them.

Two parties with ten columns each train in a process of their own for each number of rows, so its
peak is all that both held, with the server of the run and Python itself. SecureBoost grows trees of
depth 3 on 32 bins, once on all rows and once on those that GOSS draws; Federated Forest grows trees
under coded labels; private set intersection aligns ids that both have. The exponent is that of the
growth from the number of rows before: 1 where ten times the rows cost ten times as much. Seconds
are those of a clock and those of the processor, of all threads together; set-up and keys count.

With ``--engine simulation`` Flower's simulation trains after the local engine, with ``--engine
deployment`` a SuperLink and two sites with tables of their own, all on this machine. The model must
be the local engine's, byte for byte. What is told then is the seconds of a clock, and the peak of
the largest process of all, or of the coordinator and of each site.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet

from fedapp.kernels import n_cores
from fedapp.run_folder import RunFolder
from fedapp.settings import flatten, load_settings
from simulations.bench import BINARY, SEED, apart, exponent, looking, peak_bytes, tell
from simulations.deployment import DRAWS, Deployment

ROWS = (10_000, 100_000, 1_000_000)
COLUMNS = (10, 10)  # active, passive
PARTIES = len(COLUMNS)
MAX_BIN, DEPTH, N_TREES = 32, 3, 3
TEST_ROWS = 0.1  # of all
METHODS = ("secureboost", "goss", "federated-forest", "psi", "pax")
GROWN = METHODS[:4]  # by default
ALLOWED = "pax,secureboost,federated-forest"
PAX_BINS, PAX_DEPTH = 255, 6
ENGINES = ("local", "simulation", "deployment")
SITES = ("bank", "insurer")
LOOK_SECONDS = 0.2

Line = dict[str, Any]


def made_table(n_rows: int, n_columns: int = sum(COLUMNS)) -> pa.Table:
    """Draw a random table; labels depend on columns of both parties."""
    rng = np.random.default_rng(SEED)
    values = rng.standard_normal((n_columns, n_rows), dtype=np.float32)
    margins = values[0] - values[10] + values[1] * values[11] + 0.5 * values[12]
    labels = rng.random(n_rows) < 1 / (1 + np.exp(-margins))
    names = [f"x{column}" for column in range(len(values))]
    table = pa.table([*values, labels.astype(np.float64)], names=[*names, "label"])
    return table.append_column("id", pa.array(range(n_rows)).cast(pa.string()))


def config_of(method: str, n_trees: int, key_bits: int, parties: int = PARTIES) -> Line:
    shared = {**BINARY, "parties": parties, "test-fraction": TEST_ROWS}
    if method == "pax":
        method_settings = {"strategy": "pax", "max-bin": PAX_BINS, "max-depth": PAX_DEPTH}
        return {**shared, **method_settings, "num-boost-round": n_trees}
    if method in ("federated-forest", "psi"):
        n_grown = 1 if method == "psi" else n_trees
        forest = {"trees": n_grown, "max-depth": DEPTH, "master-keeps-model": True}
        method_settings = {
            "strategy": "federated-forest",
            "align": "psi" if method == "psi" else "ordered",
        }
        return {**shared, **method_settings, "federated-forest": forest}
    boosted = {"strategy": "secureboost", "align": "ordered", "max-bin": MAX_BIN}
    boosted |= {"max-depth": DEPTH}
    method_settings = {"key-bits": key_bits, "insecure-small-key": True, "goss": method == "goss"}
    return {**shared, **boosted, "num-boost-round": n_trees, "secureboost": method_settings}


def sites_tables(folder: Path, method: str, n_rows: int) -> dict[str, dict[str, Any]]:
    """Write each site's columns or rows of the table; return the node configs."""
    table, nodes = made_table(n_rows), {}
    by_columns = method != "pax"
    for index, name in enumerate(SITES):
        first = sum(COLUMNS[:index])
        names = [f"x{number}" for number in range(first, first + COLUMNS[index])]
        site_table = table.select(["id", *names, *(["label"] if not index else [])])
        if not by_columns:
            site_table = table.slice(index * (n_rows // 2), n_rows // 2)
        pa.parquet.write_table(site_table, folder / f"{name}.parquet")
        nodes[name] = {"data": str(folder / f"{name}.parquet"), "id": "id", "allow-export": "true"}
        nodes[name] |= {"label": "label"} if not (index and by_columns) else {}
        nodes[name] |= {"allow-insecure": "true", "allow": ALLOWED, **DRAWS}
    return nodes


def train(options: argparse.Namespace, method: str, n_rows: int) -> Line:
    """Run by the local engine in this process, then by another one, to the same model."""
    from fedapp.runs.engines import run_local

    engine, n_trees, key_bits = options.engine, options.trees, options.key_bits
    settings = config_of(method, n_trees, key_bits, options.parties)
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
            pa.parquet.write_table(made_table(n_rows, options.columns), path)
            settings |= {"data": str(path), "label": "label", "id": "id"}
            if method != "pax":
                columns = "sizes:" + ",".join(map(str, COLUMNS))
                settings |= {"columns": columns, "allow-export": True}
            ready, cpu_start = peak_bytes(), time.process_time()
            run = run_local(load_settings({**settings, "run-dir": str(folder / "run")}))
        measured = figures(run)
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
            measured = {**figures(run), "local_seconds": measured["seconds"], "peak_bytes": peaks}
    return {
        "engine": engine,
        "method": method,
        "rows": n_rows,
        "columns": options.columns,
        "parties": options.parties,
        "trees": n_trees,
        "key_bits": key_bits,
        "cores": n_cores(),
        **measured,
        "ready_bytes": ready,
        "seed": SEED,
    }


def figures(run: RunFolder) -> Line:
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


def simulated(settings: Line, run_dir: Path) -> tuple[RunFolder, Line]:
    """Run Flower's simulation; also the peak memory of its largest process."""
    from fedapp.runs.engines import run_simulation  # not before the local run's memory is read

    process = psutil.Process()
    with peaks_of(lambda: {"largest process": process.children(recursive=True)}) as peaks:
        run = run_simulation(load_settings({**settings, "run-dir": str(run_dir)}))
    return run, peaks


def deployed(deployment: Deployment, settings: Line, run_dir: Path) -> tuple[RunFolder, Line]:
    """Run across sites; also the peak memory of the largest process of each and the coordinator."""
    words = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in flatten(settings).items()
    }

    def families() -> dict[str, list[psutil.Process]]:
        return {name: deployment.family(name) for name in ("coordinator", *SITES)}

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


def exponents(lines: Sequence[Line]) -> list[Line]:
    """Add to each line of a method how it grew from the previous one."""
    extended = [lines[0]]
    for before, line in pairwise(lines):
        sizes = before["rows"], line["rows"]
        growth = {
            f"exponent_of_{what}": exponent((before[what], line[what]), sizes)
            for what in ("seconds", "cpu_seconds", "peak_bytes", "bytes")
            if isinstance(line.get(what), int | float)
        }
        extended.append({**line, **growth})
    return extended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=GROWN)
    parser.add_argument("--engine", choices=ENGINES, default="local")
    parser.add_argument("--trees", type=int, default=N_TREES)
    parser.add_argument("--key-bits", type=int, default=2048)
    note = "of PAX on one machine; others have 2 parties and 20 columns"
    parser.add_argument("--parties", type=int, default=PARTIES, help=note)
    parser.add_argument("--columns", type=int, default=sum(COLUMNS), help=f"{note}; 13 or more")
    options = parser.parse_args()
    sizes = options.parties, options.columns
    is_pax_here = options.methods == ["pax"] and options.engine != "deployment"
    if sizes != (PARTIES, sum(COLUMNS)) and not is_pax_here:
        parser.error(f"--parties and --columns are {note}")
    # What ends the command ends what it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for method in options.methods:
        lines: list[Line] = []
        for n_rows in sorted(options.rows):
            lines.append(apart(train, options, method, n_rows))
            tell("rows", ("fedapp", "flwr", "gmpy2", "numba"), **exponents(lines)[-1])


if __name__ == "__main__":
    main()
