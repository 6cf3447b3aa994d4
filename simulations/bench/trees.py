"""What training trees costs as tables grow, and beside scikit-learn's forest.

Each bench is the function of its name (``python -m simulations bench NAME``), whose docstring says
what it measures, and has its sizes above it. Heavy libraries are imported in functions: a bench
that reports memory must not load those of another.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import pyarrow.parquet

from clients.vertical import ciphertexts
from fedapp.crypto.lanes import has_lanes
from fedapp.data.datasets import read_source
from fedapp.errors import ConfigError
from fedapp.kernels import n_cores
from fedapp.records.document import load
from fedapp.run_folder import RunFolder
from fedapp.runs.baselines import join_tables
from fedapp.runs.local import run_local
from fedapp.settings import Settings, load_settings
from fedapp.trees.forest.bagged import BaggedForest
from simulations.deployment import Deployment, site_tables
from simulations.study import (
    BINARY,
    SEED,
    Bench,
    Row,
    check_names,
    compare_with_xgboost,
    figures_of,
    looking,
    measured,
    medians,
    peak_bytes,
    pooled_forest,
    random_table,
    run_once,
    timed,
    write_numbers,
    write_rows,
)

# rows

ROW_COUNTS = (10_000, 100_000, 1_000_000)
ROWS_COLUMNS = (10, 10)  # active, passive
ROWS_PARTIES = len(ROWS_COLUMNS)
ROWS_TREES = 3
TEST_ROWS = 0.1  # of all
BOOSTED = {"strategy": "secureboost", "align": "ordered", "max-bin": 32, "max-depth": 3}
FOREST: Row = {"strategy": "federated-forest", "align": "ordered"}
FOREST |= {"federated-forest.max-depth": 3, "federated-forest.master-keeps-model": True}
ROWS_METHODS: dict[str, Row] = {
    "secureboost": BOOSTED,
    "goss": {**BOOSTED, "secureboost.goss": True},
    "federated-forest": FOREST,
    "psi": {**FOREST, "align": "psi", "federated-forest.trees": 1},
    "pax": {"strategy": "pax", "max-bin": 255, "max-depth": 6},
}
GROWN = tuple(ROWS_METHODS)[:4]  # by default
ENGINES = ("local", "simulation", "deployment")
ROWS_SITES = ("bank", "insurer")
LOOK_SECONDS = 0.2


def config_of(method: str, n_trees: int, key_bits: int, parties: int) -> Row:
    config: Row = {**BINARY, "parties": parties, "test-fraction": TEST_ROWS}
    strategy = ROWS_METHODS[method]["strategy"]
    is_forest = strategy == "federated-forest"
    config["federated-forest.trees" if is_forest else "num-boost-round"] = n_trees
    if strategy == "secureboost":
        config |= {"secureboost.key-bits": key_bits, "secureboost.insecure-small-key": True}
    return {**config, **ROWS_METHODS[method]}


def train_rows(
    rows: int, method: str, engine: str, columns: int, parties: int, trees: int, key_bits: int
) -> Row:
    """Run by the local engine in this process, then by another one, to the same model."""
    settings = config_of(method, trees, key_bits, parties)
    deployment = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["FEDAPP_HOME"] = str(folder / "home")
        if engine == "deployment":
            if settings["strategy"] == "federated-forest":
                # Across sites, the server draws the columns of a node by a secret seed.
                settings["federated-forest.max-features"] = "all"
            table = random_table(rows, columns)
            nodes = site_tables(folder, table, ROWS_SITES, "label", method != "pax")
            deployment = Deployment(folder / "sites", nodes)
        else:
            # One table, of which the parties have rows or columns
            path = folder / "rows.parquet"
            pa.parquet.write_table(random_table(rows, columns), path)
            settings |= {"data": str(path), "label": "label", "id": "id"}
            if method != "pax":
                sizes = "sizes:" + ",".join(map(str, ROWS_COLUMNS))
                settings |= {"columns": sizes, "allow-export": True}
        ready, cpu_start = peak_bytes(), time.process_time()
        if deployment:
            run = deployment.locally(folder / "run", settings)
        else:
            run = run_local(load_settings({**settings, "run-dir": str(folder / "run")}))
        record = {**run_figures(run.path), "cpu_seconds": time.process_time() - cpu_start}
        record |= {"peak_bytes": peak_bytes(), "ready_bytes": ready}
        if engine != ENGINES[0]:
            shutil.rmtree(folder / "home")
            local = (run.path / "model.json").read_bytes()
            if deployment:
                run, peaks = deployed(deployment, settings, folder / "across")
            else:
                run, peaks = simulated(settings, folder / "simulated")
            same = local == (run.path / "model.json").read_bytes()
            assert same, "the model must be that of the local engine"
            record = {"local_seconds": record["seconds"], "ready_bytes": ready}
            record |= {**run_figures(run.path), "peak_bytes": peaks}
    return record


def run_figures(run_dir: Path) -> Row:
    """Costs and score of a run; seconds in all."""
    run = RunFolder(run_dir)
    seconds = {"seconds": run.summary["seconds"]["total"]}
    return {**figures_of(run_dir), **seconds, "largest_message": run.sums.largest}


def simulated(settings: Row, run_dir: Path) -> tuple[RunFolder, Row]:
    """Run Flower's simulation; also the peak memory of its largest process."""
    from fedapp.runs.flower import run_simulation

    process = psutil.Process()
    with peaks_of(lambda: {"largest process": process.children(recursive=True)}) as peaks:
        run = run_simulation(load_settings({**settings, "run-dir": str(run_dir)}))
    return run, peaks


def deployed(deployment: Deployment, settings: Row, run_dir: Path) -> tuple[RunFolder, Row]:
    """Run across sites; also the peak memory of the largest process of each and the coordinator."""

    def families() -> dict[str, list[psutil.Process]]:
        return {name: deployment.family(name) for name in ("coordinator", *ROWS_SITES)}

    with deployment.running(), peaks_of(families) as peaks:
        return deployment.train(run_dir, settings), peaks


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
) -> Bench:
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
    sizes: Row = {"engine": engine, "columns": columns, "parties": parties, "trees": trees}
    sizes |= {"key_bits": key_bits}
    return Bench(
        cases=[{"method": method, "rows": n_rows} for method in methods for n_rows in sorted(rows)],
        measure=partial(train_rows, **sizes),
        size="rows",
        figures=("seconds", "cpu_seconds", "peak_bytes", "bytes"),
        sizes={**sizes, "seed": SEED},
    )


# parties


PAX: Row = {"strategy": "pax", "num-boost-round": 10, "max-depth": 6, "max-bin": 255}
BY_COLUMNS: Row = {**BOOSTED, "columns": "even", "num-boost-round": 3}
# A table that is split among parties: its rows and columns, numbers of parties, and settings.
Divided = tuple[int, int, tuple[int, ...], Row]
SPLIT: dict[str, Divided] = {
    "pax, share": (20_000, 23, (3, 10, 100, 300, 1000), PAX | {"pax.bins": "share"}),
    "pax, equal": (20_000, 23, (3, 10, 50, 100), PAX | {"pax.bins": "equal"}),
    "secureboost": (5_000, 24, (2, 4, 8), BY_COLUMNS | {"secureboost.key-bits": 2048}),
}


def train_parties(method: str, parties: int, tables: Mapping[str, Divided]) -> Row:
    """Costs of a run, after a warm-up."""
    n_rows, n_columns, (fewest, *_), settings = tables[method]
    config = {**BINARY, "label": "label", "test-fraction": TEST_ROWS, **settings}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        config |= {"data": write_numbers(path, n_rows, n_columns)}
        run_once(load_settings({**config, "parties": fewest}))
        figures = run_once(load_settings({**config, "parties": parties}))
    return {"rows": n_rows, "columns": n_columns, **settings, **figures}


def parties(only: tuple[str, ...] = tuple(SPLIT)) -> Bench:
    """How seconds, bytes and exchanges grow with the number of parties.

    A table of one size is split among more and more parties: its rows for PAX, its columns for
    SecureBoost. Seconds are of training; CPU is of the whole run, including processes that it
    starts. Each run is in a process of its own, after a warm-up, for its peak memory. ``growth`` is
    the exponent of the number of parties from one line of a method to the next: 1 if costs double
    with the parties, 0 if they stay the same.
    """
    check_names("only", only, SPLIT)
    return Bench(
        cases=[{"method": each, "parties": n} for each in only for n in SPLIT[each][2]],
        measure=partial(train_parties, tables=SPLIT),
        size="parties",
        figures=("seconds", "cpu_seconds", "bytes"),
        title="a table of one size, split among more and more parties",
        columns="method; parties; seconds:.2f; CPU=cpu_seconds:.2f; peak MB=peak_mb:.0f; "
        "exchanges; messages; MB=mb:.1f; AUC=auc:.4f; growth of seconds:.2f; "
        "of CPU=growth of cpu_seconds:.2f; of bytes=growth of bytes:.2f",
    )


# federated_forest

FOREST_DATA, FOREST_COPIES, FOREST_PARTIES = "spambase", 10, 2
FOREST_TREES, FOREST_DEPTH, FOREST_FEATURES, FOREST_REPEATS, FOREST_THREADS = 32, 8, "sqrt", 5, 2
SKLEARN, JOINT = "scikit-learn", "Federated Forest"
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
        if not (np.array_equal(ours, theirs) and np.array_equal(mine, yours)):
            raise ValueError(f"trees must be those of the joined table, got another tree {tree}")
        n_nodes += len(ours)
    return n_nodes


def train_forest(
    method: str,
    settings: Settings,
    values: npt.NDArray[np.float32],
    labels: npt.NDArray[np.float32],
    seeds: Iterator[int],
) -> Row:
    """Seconds and accuracy on training rows of a run, or of scikit-learn's forest."""
    if method == JOINT:
        with measured(settings) as (run, figures):
            accuracy = run.summary["metrics"]["train"]["accuracy"]
        seconds = {"seconds_train": figures["seconds"], "seconds": figures["seconds_in_all"]}
        return {**figures, **seconds, "accuracy": accuracy}
    from sklearn.ensemble import RandomForestClassifier

    forest = RandomForestClassifier(
        FOREST_TREES,
        max_depth=FOREST_DEPTH,
        max_features=FOREST_FEATURES,
        n_jobs=FOREST_THREADS,
        random_state=next(seeds),
    )
    start = time.perf_counter()
    forest.fit(values, labels)
    seconds = dict.fromkeys(("seconds", "seconds_train"), time.perf_counter() - start)
    return {**seconds, "accuracy": float(forest.score(values, labels))}


def federated_forest(max_bin: int = EXACT, align: str = ALIGNMENTS[0]) -> Iterator[Row]:
    """How long a Federated Forest takes, beside scikit-learn's random forest on the joined table.

    Two parties, ten times the rows of spambase, encoded labels, a run in this process: messages are
    encoded, sealed, checked and kept on the disk by both. Before anything is timed, the joined
    forest is compared with the one that ``fedapp.trees.forest.bagged`` grows in one place, node for
    node. Its accuracy on the training rows must be near that of scikit-learn, whose draws are
    others.

    ``ratio of seconds`` counts the whole run, from reading the table to the written report:
    alignment, training, scores. ``ratio of seconds_train`` counts the messages of the training
    alone. Both are against ``RandomForestClassifier.fit``, which reads, aligns and scores nothing.
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

        def compare() -> Row:
            with measured(exported) as (run, _):
                model = load(run.path / "model.json", BaggedForest)
            weights = table.weights[train]
            pooled, _, _ = pooled_forest(exported, model.columns, values, labels, weights)
            return {"nodes_as_pooled": check_same(model, pooled)}

        lines = Bench(
            reference=compare,
            cases=[{"method": SKLEARN}, {"method": JOINT}],
            measure=partial(
                train_forest,
                settings=forest_settings(path, max_bin, align),
                values=values,
                labels=labels,
                seeds=itertools.count(SEED),
            ),
            repeats=FOREST_REPEATS,
            base={"method": SKLEARN},
            figures=("seconds", "seconds_train"),
            sizes={
                "data": f"{FOREST_DATA} x {FOREST_COPIES}",
                "parties": FOREST_PARTIES,
                "rows": len(train),
                "columns": values.shape[1],
                "trees": FOREST_TREES,
                "depth": FOREST_DEPTH,
                "max_bin": max_bin,
                "max_features": FOREST_FEATURES,
                "align": align,
                "seed": SEED,
            },
            title="a forest's seconds, of all and of training",
            columns="method; seconds:.2f; seconds_train:.2f; CPU=cpu_seconds:.2f; accuracy:.4f; "
            "ratio of seconds:.2f; ratio of seconds_train:.2f; MB=mb:.1f",
        ).lines()
        theirs, ours = lines
        yield from (theirs, ours)
    difference = ours["accuracy"] - theirs["accuracy"]
    if abs(difference) > (limit := WORST_ACCURACY_DIFFERENCE):
        raise ValueError(f"accuracy must be within {limit} of theirs, got {difference:+.4f}")


# secureboost

BOOSTED_DATA, BOOSTED_COLUMNS = "default-credit", (12, 11)  # active, passive
BOOSTED_TEST, BOOSTED_BINS = 1 / 3, 32
CHECK_TREES, CHECK_DEPTH = 10, 4
# Excluded: the first tree, in which tables of masks are computed, and the last one, which no
# encryption follows.
BOOSTED_TREES, BOOSTED_DEPTH = 7, 3
# Functions of ``fedapp.crypto`` that ``ciphertexts`` calls
PARTS = "encrypt", "check_ciphertexts", "sum_rows", "pack_sums", "read_jobs"


def tree_seconds(calls: Sequence[tuple[str, float, float]]) -> list[dict[str, float]]:
    """Seconds of all trees by part, but of the last tree, which no encryption follows."""
    starts = [index for index, (part, _, _) in enumerate(calls) if part == "encrypt"]
    trees = []
    for first, last in pairwise(starts):
        spent = dict.fromkeys(PARTS, 0.0)
        for part, start, end in calls[first:last]:
            spent[part] += end - start
        tree = calls[last][1] - calls[first][1]
        trees.append({"tree": tree, **spent, "rest": tree - sum(spent.values())})
    return trees


def boosted_settings(key_bits: int, n_trees: int, depth: int) -> Settings:
    config: Row = {"strategy": "secureboost", **BINARY, "data": BOOSTED_DATA, "parties": 2}
    config |= {"columns": "sizes:" + ",".join(map(str, BOOSTED_COLUMNS)), "align": "ordered"}
    config |= {"allow-export": True, "test-fraction": BOOSTED_TEST, "num-boost-round": n_trees}
    config |= {"max-depth": depth, "max-bin": BOOSTED_BINS, "secureboost.key-bits": key_bits}
    return load_settings({**config, "secureboost.insecure-small-key": True})


def train_boosted(settings: Settings) -> Row:
    """Train, and compare with XGBoost on the joined table."""
    with measured(settings) as (run, figures):
        figures |= {"rows": run.summary["matched_rows"]["train"]}
        return figures | {"same_nodes": compare_with_xgboost(settings, run.path)}


def secureboost(key_bits: int = 2048, checked_trees: int = CHECK_TREES) -> Row:
    """How long a tree of SecureBoost takes, and where the time goes.

    A run in this process of two parties with columns of default-credit: messages are encoded,
    sealed, checked and kept on the disk by both. First a run of deeper trees, and then the timed
    one itself, are compared with XGBoost on the joined table, node for node. A tree is timed from
    the encryption of its gradients to that of the next; its parts are the calls of
    ``fedapp.crypto`` that both parties make, never at the same time.

    ``side_by_side``: the processor multiplies eight numbers at a time, which ``NUMBA_ENABLE_AVX=0``
    in the environment disables.
    """
    checked = train_boosted(boosted_settings(key_bits, checked_trees, CHECK_DEPTH))
    with timed(*((ciphertexts, part) for part in PARTS)) as calls:
        start = time.perf_counter()
        figures = train_boosted(boosted_settings(key_bits, BOOSTED_TREES, BOOSTED_DEPTH))
    same = {
        f"{checked_trees} trees of depth {CHECK_DEPTH}": checked["same_nodes"],
        f"{BOOSTED_TREES} trees of depth {BOOSTED_DEPTH}": figures.pop("same_nodes"),
    }
    first, *trees = tree_seconds(calls)
    seconds = medians(trees)
    return {
        "data": BOOSTED_DATA,
        "key_bits": key_bits,
        "side_by_side": has_lanes(),
        "cores": n_cores(),
        "columns": BOOSTED_COLUMNS,
        "max_bin": BOOSTED_BINS,
        "depth": BOOSTED_DEPTH,
        "seed": SEED,
        "nodes_as_xgboost": same,
        "repeats": len(trees),
        **figures,
        "seconds_a_tree": seconds.pop("tree"),
        "parts": seconds,
        "seconds_of_first_tree": first["tree"],
        "seconds_before": calls[0][1] - start,
        # Of this process; each other worker holds tables of the same size.
        "peak_bytes": peak_bytes(),
    }
