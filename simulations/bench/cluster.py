"""A site larger than one machine: what its Ray cluster costs, and its memory as rows grow."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet
from flwr.app import Context, Message

from clients import shards
from clients.cuts import Binned
from fedapp.client_app import SiteApp
from fedapp.cluster import RayWorkers
from fedapp.crypto.workers import Workers
from fedapp.data import scratch
from fedapp.errors import ConfigError
from fedapp.histograms import bins
from fedapp.kernels import n_cores
from fedapp.runs.local import run_local, site_contexts
from fedapp.runs.predict import predict_table
from fedapp.settings import load_settings
from fedapp.site.store import LiveStores
from simulations.ray_nodes import started
from simulations.reference import digests_of
from simulations.study import (
    BINARY,
    SEED,
    Bench,
    Row,
    check_names,
    looking,
    show,
    temporary_run,
    timed,
    write_numbers,
)

TRAINING: Row = {**BINARY, "label": "label", "test-fraction": 0.0}


@contextmanager
def process(**environment: str) -> Iterator[tuple[Callable[..., Any], psutil.Process]]:
    """A new process with these variables, and what calls a function there."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with patch.dict(os.environ, environment):
            process_id = pool.submit(os.getpid).result()
        yield lambda *call: pool.submit(*call).result(), psutil.Process(process_id)


# site_cluster

VERTICAL: Row = {"parties": 2, "columns": "even", "align": "ordered", "max-bin": 32}
VERTICAL |= {"max-depth": 3, "num-boost-round": 2}
FOREST: Row = {"labels": "paillier", "trees": 2, "max-depth": 3}
SHARED: dict[str, Row] = {
    "secureboost": VERTICAL,
    "federated-forest": {**VERTICAL, "federated-forest": FOREST},
    "pax": {"parties": 1, "max-depth": 6, "num-boost-round": 3},
}
MACHINE, ONE_NODE, TWO_NODES = "this machine", "a Ray node", "two Ray nodes"
SHARED_COLUMNS, ESTIMATED_NODES = 20, (4, 16, 64)
# Calls whose work the nodes of a cluster share.
SPREAD: list[tuple[Any, str]]
SPREAD = [(kind, name) for kind in (Workers, RayWorkers) for name in ("run", "run_here")]
SPREAD += [(Binned, "sums"), (Binned, "routed")]
FEWEST_CODES = 1 << 20  # of a table at a cluster's nodes; a site keeps smaller ones than 2^26


def covered(calls: Sequence[tuple[str, float, float]]) -> float:
    """Seconds in which there was a call; they are made in threads, and within others."""
    total = last = 0.0
    for _, start, end in sorted(calls, key=lambda call: call[1:]):
        total, last = total + max(0.0, end - max(start, last)), max(end, last)
    return total


def train_shared(config: Row) -> Row:
    """Seconds of a run in this process, the part that a cluster would share, and digests."""
    with (
        patch.object(shards, "FEWEST_CODES", FEWEST_CODES),
        timed(*SPREAD) as calls,
        temporary_run(load_settings(config)) as run,
    ):
        seconds = run.summary["seconds"]["train"]
        digests = digests_of(run.path)
        return {"seconds": seconds, "spread": covered(calls) / seconds, "digests": digests}


def cpu_of(roots: list[psutil.Process], seconds: dict[psutil.Process, float]) -> float:
    """CPU seconds of processes and of all that they have started; Ray's do not wait for theirs."""
    for each in roots + [child for root in roots for child in root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            seconds[each] = sum(each.cpu_times()[:2])
    return sum(seconds.values())


def site_cluster(
    methods: tuple[str, ...] = tuple(SHARED),
    vertical_rows: int = 20_000,
    pax_rows: int = 1_000_000,
    key_bits: int = 2048,
    repeats: int = 3,
) -> Iterator[Row]:
    """What a site's Ray cluster costs on this machine, and what one of more nodes might save.

    SecureBoost and Federated Forest under Paillier, with both parties here, and PAX at one site.
    Each runs in the processes and threads of this machine, on a Ray node with all its cores, and on
    two Ray nodes with half of them each. All take turns, after a warm-up, and must give the same
    model. Seconds are of training.

    ``spread`` is the part of the seconds in which there is work that nodes share. From it comes an
    estimate for clusters of 4, 16 and 64 such machines, as in Amdahl's law: the rest takes as long
    as here, and so does what Ray added here. It knows no network, and divides work at will.
    """
    check_names("methods", methods, SHARED)
    first: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        places: dict[str, tuple[Any, ...]] = {}
        clusters = {ONE_NODE: (1, n_cores()), TWO_NODES: (2, n_cores() // 2 or 1)}
        for place in (MACHINE, *clusters):
            address, nodes = "", list[Any]()
            if place in clusters:
                address, nodes = stack.enter_context(started(*clusters[place]))
            variables = {"RAY_ADDRESS": address, "FEDAPP_HOME": f"{folder}/home"}
            call, root = stack.enter_context(process(**variables))
            places[place] = call, [root, *(psutil.Process(node.pid) for node in nodes)], {}

        def measure(method: str, place: str) -> Row:
            config = {**TRAINING, **SHARED[method], "strategy": method}
            config["data"] = f"{folder}/{method}.parquet"
            if method != "pax":
                key = {"key-bits": key_bits, "insecure-small-key": True}
                config[method] = {**config.get(method, {}), **key}
            call, *processes = places[place]
            before = cpu_of(*processes)
            figures: Row = call(train_shared, config)
            figures["cpu_seconds"] = cpu_of(*processes) - before
            digests = first.setdefault(method, figures["digests"])
            assert digests == figures["digests"], f"{method}: {place} must give the same model"
            return figures

        for method in methods:
            rows = pax_rows if method == "pax" else vertical_rows
            write_numbers(Path(folder) / f"{method}.parquet", rows, SHARED_COLUMNS)
        bench = Bench(
            cases=[{"method": each, "place": place} for each in methods for place in places],
            measure=measure,
            repeats=repeats,
            base={"place": MACHINE},
            sizes={"vertical_rows": vertical_rows, "pax_rows": pax_rows, "key_bits": key_bits},
        )
        lines = list(bench.lines())
    heres = {line["method"]: line for line in lines if line["place"] == MACHINE}
    for line in lines:
        here = heres[line["method"]]
        added = max(0.0, line["seconds"] - here["seconds"])
        for n_nodes in () if line is here else ESTIMATED_NODES:
            part = 1 - here["spread"] + here["spread"] / n_nodes
            line[f"estimate_{n_nodes}"] = here["seconds"] / (here["seconds"] * part + added)
        yield line
    estimates = (f"{n_nodes}=estimate_{n_nodes}:.1f" for n_nodes in ESTIMATED_NODES)
    columns = "method; place; s=seconds:.2f; CPU s=cpu_seconds:.2f; x s=ratio of seconds:.2f; "
    columns += "x CPU s=ratio of cpu_seconds:.2f; spread:.0%; "
    title = (
        f"seconds here; last, estimates: how many times as fast {ESTIMATED_NODES} nodes would be"
    )
    show(title, lines, columns + "; ".join(estimates), n_texts=2)


# site_rows

GROUP_ROWS, SMALL_ROWS = 500_000, 1000
VALUE_BYTES = 16  # in the table, and while a site reads and trains
STAGES = {"query.hello": "read", "train.pax_sketch": "sketch", "train.pax_grow": "rounds"}
LOOK_SECONDS = 0.02
SIZES: list[tuple[Any, str]]
SIZES = [(scratch, name) for name in ("LARGEST", "LARGEST_ARRAY", "BATCH_BYTES")]
SIZES += [(bins, "GROUP_CELLS")]
# So that memory is what is used, and not what malloc keeps for later.
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
RETURNED["ARROW_DEFAULT_MEMORY_POOL"] = "system"


def write_groups(path: Path, n_rows: int, n_columns: int) -> None:
    """Write a table of numbers, one group of rows at a time."""
    rng = np.random.default_rng(SEED)
    names = [*(f"x{column}" for column in range(n_columns)), "label"]
    schema = pa.schema([(name, pa.float32()) for name in names])
    with pa.parquet.ParquetWriter(path, schema, compression="none") as writer:
        for start in range(0, n_rows, GROUP_ROWS):
            shape = n_columns + 1, min(GROUP_ROWS, n_rows - start)
            *values, noise = rng.standard_normal(shape, np.float32)
            labels = values[0] - values[1] * values[2] + noise > 0
            writer.write_table(pa.table([*values, labels.astype(np.float32)], names))


class StagedApp(SiteApp):
    """Sites that note when each stage of a run began."""

    def __init__(self) -> None:
        super().__init__(stores=LiveStores())
        self.stages = dict[str, float]()

    def _answer(self, message: Message, context: Context) -> Message:
        if stage := STAGES.get(message.metadata.message_type):
            self.stages.setdefault(stage, time.time())
        return super()._answer(message, context)


def in_stages(folder: Path, is_training: bool, scale: float, trees: int) -> Row:
    """Train at a large and a small site, or predict; when each stage began, and the last ended.

    What is large, or done together, is so from ``scale`` times its size on.
    """
    for room, name in SIZES:
        setattr(room, name, int(scale * getattr(room, name)))
    large = f"{folder}/large.parquet"
    if not is_training:
        start = time.time()
        predict_table(folder / "run", large, "", folder / "predictions.parquet")
        return {"predict": start, "": time.time()}
    app, nodes = StagedApp(), list[Row]()
    for data in (large, f"{folder}/small.parquet"):
        node = {"name": Path(data).stem, "data": data, "label": "label"}
        nodes.append({**node, "allow": "pax", "allow-insecure": True})
    config = {**TRAINING, "strategy": "pax", "parties": 2, "num-boost-round": trees}
    settings = load_settings({**config, "max-depth": 6, "run-dir": f"{folder}/run"})
    run_local(settings, site_contexts(nodes), client_app=app)
    return {**app.stages, "": time.time()}


def sample(process: psutil.Process, samples: list[tuple[float, ...]]) -> None:
    """Add the time, and a process's bytes of anonymous memory and of files."""
    memory = process.memory_info()
    samples.append((time.time(), memory.rss - memory.shared, memory.shared))


def memory_of(n_rows: int, columns: int, trees: int, scale: float) -> Iterator[Row]:
    """A line for each stage of training and predicting at a site, in processes of their own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_groups(folder / "large.parquet", n_rows, columns)
        write_groups(folder / "small.parquet", SMALL_ROWS, columns)
        for is_training in (True, False):
            samples = list[tuple[float, ...]]()
            with ExitStack() as stack:
                call, child = stack.enter_context(process(FEDAPP_HOME=f"{name}/home", **RETURNED))
                stack.enter_context(looking(partial(sample, child, samples), LOOK_SECONDS))
                stages = call(in_stages, folder, is_training, scale, trees)
            for (stage, start), (_, end) in pairwise(stages.items()):
                near = [each for each in samples if start - 0.1 < each[0] < end + 0.1]
                _, anonymous, files = map(max, zip(*near, strict=True))
                line = {"rows": n_rows, "stage": stage, "seconds": end - start}
                yield {**line, "anonymous_bytes": anonymous, "file_bytes": files}


def site_rows(
    rows: tuple[int, ...] = (100_000, 1_000_000, 10_000_000),
    columns: int = 28,
    trees: int = 3,
    like: int = 0,
) -> Iterator[Row]:
    """Memory and seconds of PAX at a site as its rows grow, and of predicting its table.

    Two sites in one process: one has the rows, in a Parquet file that is written here, the other
    1,000. A line for each stage: its seconds, and the largest memory of the process. It needs what
    is anonymous; pages of files leave memory when something else needs it.

    With ``--like 100000000`` files have the arrays that they have at 100,000,000 rows, where they
    are larger, and as few columns are sketched together. The last lines are then an estimate for
    100,000,000 rows: the straight line through the two largest numbers of rows.
    """
    place, n_values = Path(tempfile.gettempdir()), max(rows) * (columns + 1)
    needed, free = VALUE_BYTES * n_values, shutil.disk_usage(place).free
    print(f"{needed:,} bytes of {free:,} in {place}, {4 * n_values:,} a table", file=sys.stderr)
    if needed > free:
        rule = f"rows must be few enough for the disk of TMPDIR ({place})"
        raise ConfigError(f"{rule}, got {max(rows)} of {needed:,} bytes, and {free:,} free")
    lines, sizes = list[Row](), {"columns": columns, "trees": trees, "like": like}
    for n_rows in sorted(rows):
        scale = n_rows / like if like else 1.0
        for line in memory_of(n_rows, columns, trees, scale):
            lines.append(line)
            yield {**sizes, **line}
    ends = (lines[-8:-4], lines[-4:]) if like and len(rows) > 1 else ((), ())
    for before, line in zip(*ends, strict=True):
        rise = (like - line["rows"]) / (line["rows"] - before["rows"])
        names = "seconds", "anonymous_bytes"
        guess = {name: line[name] + rise * (line[name] - before[name]) for name in names}
        lines.append({"rows": like, "stage": f"{line['stage']}, an estimate", **guess})
        yield {**sizes, **lines[-1]}
    for line in lines:
        line |= {name: line[name] / 1e6 for name in line if name.endswith("_bytes")}
    shown = "stage; rows:,; s=seconds:.1f; anonymous MB=anonymous_bytes:,.0f; "
    show(
        f"memory of PAX; 8 GiB are {2**33 / 1e6:,.0f} MB", lines, shown + "files MB=file_bytes:,.0f"
    )
