"""What training trees costs as tables grow, and beside scikit-learn's forest.

Each bench is the function of its name (``python -m simulations bench NAME``), whose docstring says
what it measures, and has its sizes above it. Heavy libraries are imported in functions: a bench
that reports memory must not load those of another.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import pyarrow.parquet

from fedapp.data.datasets import read_source
from fedapp.errors import ConfigError
from fedapp.kernels import n_cores
from fedapp.records.document import from_text
from fedapp.run_files import Summary
from fedapp.run_folder import RunFolder
from fedapp.runs.baselines import join_tables
from fedapp.runs.local import run_local
from fedapp.settings import Settings, flatten, load_settings
from fedapp.trees.forest.bagged import BaggedForest
from simulations.deployment import DRAWS, Deployment
from simulations.passing import temporary_run
from simulations.study import (
    BINARY,
    SEED,
    Row,
    apart,
    check_names,
    cpu_seconds,
    growth,
    looking,
    peak_bytes,
    pooled_forest,
    repeated,
    write_rows,
)


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A finished run whose files are deleted."""

    seconds: float  # by the clock, from the call to its return
    cpu_seconds: float  # from reading the table to the written summary
    summary: Summary
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
        seconds, spent_cpu = time.perf_counter() - start, cpu_seconds() - cpu_start
        n_messages = run.files.sums.n_messages.total()
        model, path = (run.path / "model.json").read_text(), run.path / "model.xgb.json"
        trees = json.loads(path.read_text()) if path.exists() else None
        return MeasuredRun(seconds, spent_cpu, run.summary, n_messages, model, trees)


def write_numbers(path: Path, n_rows: int, n_columns: int) -> str:
    """Write a table of numbers without ties, whose label depends on five of its columns."""
    rng = np.random.default_rng(SEED)
    values = rng.standard_normal((n_rows, n_columns)).astype(np.float32)
    margins = values[:, :4] @ np.array([1.0, -0.5, 0.5, 0.25]) + np.abs(values[:, 4]) - 1
    labels = (rng.random(n_rows) < 1 / (1 + np.exp(-margins))).astype(np.float64)
    columns = {f"x{column}": values[:, column] for column in range(n_columns)}
    pa.parquet.write_table(pa.table({**columns, "label": labels}), path)
    return str(path)


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
    seconds = [line["seconds"] for line in run.files.rounds]
    return {
        "seconds": summary["seconds"]["total"],
        # The first tree also computes tables of masks.
        "seconds_a_tree": min(seconds[1:] or seconds, default=None),
        "exchanges": summary["exchanges"],
        "bytes": sum(summary["bytes"].values()),
        "largest_message": run.files.sums.largest,
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
            line = apart(train_rows, method, n_rows, engine, trees, key_bits, parties, columns)
            yield {**line, **growth(before, line, "rows", figures)}
            before = line


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
    forest is compared with the one that ``fedapp.trees.forest.bagged`` grows in one place, node for
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
    difference = accuracy - statistics.fmean(score for _, score in theirs)
    if abs(difference) > (limit := WORST_ACCURACY_DIFFERENCE):
        raise ValueError(f"accuracy must be within {limit} of theirs, got {difference:+.4f}")
    record: Row = {"data": f"{FOREST_DATA} x {FOREST_COPIES}", "parties": FOREST_PARTIES}
    record |= {"rows": len(train), "columns": values.shape[1], "trees": FOREST_TREES}
    record |= {"depth": FOREST_DEPTH, "max_bin": max_bin, "max_features": FOREST_FEATURES}
    record |= {"align": align, "seed": SEED, "nodes_as_pooled": n_nodes, "accuracy": accuracy}
    record |= {"accuracy_sklearn": [score for _, score in theirs]}
    record |= forest_ratios(runs, [seconds for seconds, _ in theirs])
    # Of this process: the server, both parties, and scikit-learn.
    return {**record, "peak_bytes": peak_bytes()}
