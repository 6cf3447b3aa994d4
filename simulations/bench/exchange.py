"""What messages cost: exchanges between real processes, serving, and more parties.

Each bench is the function of its name (``python -m simulations bench NAME``), whose docstring says
what it measures.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from itertools import chain, pairwise
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

import psutil

import fedapp
from fedapp.data.datasets import read_source
from fedapp.runs.flower import free_ports, is_healthy
from fedapp.settings import Settings, load_settings
from simulations.bench.trees import run_once, write_numbers
from simulations.deployment import Deployment, example_nodes
from simulations.study import (
    BINARY,
    Row,
    apart,
    check_names,
    children_seconds,
    growth,
    looking,
    peak_bytes,
    repeated,
    show,
)
from strategies.handshake import registered_sites

SITES, WATCHED = ("bank", "insurer", "shop"), "bank"
ROWS, ROUNDS, REPEATS = 200, 30, 5
LOOK_SECONDS = 0.02
PROGRAM = re.compile(r"fedapp\.deploy\.|flower-|flwr-")
# In time order; each part lasts until the next one starts.
PARTS = {
    "sent": "until the SuperNode has it",
    "picked": "until a process of the site handles it",
    "began": "handler, state written to the disk",
    "ended": "reply through the SuperNode and the SuperLink to the ServerApp",
    "received": "until the slowest site has answered, and the next request is sent",
}
# At most, of a run with settings ``s`` and ``n`` parties. In SecureBoost with one passive party,
# two exchanges of a level travel as one.
EXCHANGES: Mapping[str, Callable[[Settings, int], int]] = {
    "pax": lambda s, n: 4 + s.num_boost_round * s.max_depth,
    "fedxgbllr": lambda s, n: 7 + s.sections["fedxgbllr"]["rounds"],
    "bagging": lambda s, n: 4 + s.num_boost_round,
    "cyclic": lambda s, n: 4 + s.num_boost_round,
    "fedavg-linear": lambda s, n: 4 + s.sections["fedavg-linear"]["rounds"],
    "secureboost": lambda s, n: (
        8 + n + s.num_boost_round * (2 + 2 * s.max_depth if n == 2 else 1 + 3 * s.max_depth)
    ),
    "federated-forest": lambda s, n: 6 + n + 2 * s.sections["federated-forest"]["max-depth"],
    "interactive": lambda s, n: 6 + n + 2 * s.max_depth,
    "one-round": lambda s, n: 6 + n,
    "eini": lambda s, n: 5 + 2 * n,
}


def exchange(rounds: int = ROUNDS, stock: bool = False) -> Row:
    """What one exchange of a deployment consists of, and how long a training takes by it.

    ``python -m simulations bench exchange`` trains PAX through a SuperLink and three SuperNodes on
    this machine, an exchange a tree, compares the model with that of one process, and follows the
    messages to one site:

    - when a message was sent, picked up and answered: the SuperLink's database and the run's
      ledger;
    - when its handler started and ended: the site's files (``lock`` is opened first, ``state``
      written last).

    Prints a table of the parts, one of the trainings, and a JSON line with both. With ``--stock``
    SuperLink, SuperNodes and SuperExecs are Flower's own commands.
    """
    # What ends the command ends what it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as name:
        os.environ["FEDAPP_HOME"] = f"{name}/home"
        watch, lines = measure_exchange(Path(name), rounds, stock)
    if not lines:
        raise SystemExit("no exchange was seen from its beginning to its end")
    parts = {part: median(line[part] for line in lines) for part in PARTS}
    exchanges = [
        watch.messages[step + 1][0] - watch.messages[step][0]
        for step in sorted(watch.messages)[2:]  # the first two are greeting and hello
        if step + 1 in watch.messages
    ]
    seconds = median(exchanges)
    # CPU seconds of a step by program, without the first, before which sites import the app
    first, *_, last = sorted(step for step in watch.cpu if step > 1)
    cpu = watch.cpu[last].copy()
    cpu.subtract(watch.cpu[first])
    cpu = Counter({program: used / (last - first) for program, used in cpu.items()})
    app, flower = import_seconds("import fedapp.client_app, clients.pax"), import_seconds("")
    shown = [{"part": words, "seconds": parts[part]} for part, words in PARTS.items()]
    shown.append({"part": "an exchange", "seconds": seconds})
    show("parts of an exchange", shown, "part; seconds:.2f")
    shown = [{"program": name, "used": used} for name, used in cpu.most_common()]
    shown.append({"program": "all", "used": cpu.total()})
    show("programs, all their processes", shown, "program; CPU seconds an exchange=used:.3f")
    print(f"A process imports Flower in {flower:.2f} s of CPU, the app in {app - flower:.2f} s")
    print("beyond that\n")
    settings = load_settings({"num-boost-round": 50})
    counts = {method: count(settings, 2) for method, count in EXCHANGES.items()}
    shown = [
        {"run": method, "exchanges": count, "minutes": count * seconds / 60}
        for method, count in counts.items()
    ]
    show("default settings, 2 parties", shown, "run; exchanges; minutes:.0f")
    return {
        "exchange": "stock" if stock else "deployment",
        "exchanges measured": {"whole": len(exchanges), "parts": len(lines)},
        "seconds": round(seconds, 2),
        "parts": {part: round(value, 3) for part, value in parts.items()},
        "cpu": {
            "exchange": {program: round(seconds_used, 3) for program, seconds_used in cpu.items()},
            "flower": flower,
            "app": round(app - flower, 3),
        },
        "exchanges": counts,
    }


def import_seconds(code: str, repeats: int = REPEATS) -> float:
    """Median CPU seconds of a new interpreter with Flower's imports that runs ``code``."""
    flower = "import flwr.supernode.cli.flwr_clientapp, flwr.clientapp, flwr.app"
    command = [sys.executable, "-c", f"{flower}\n{code}"]

    def used() -> float:
        before = children_seconds()
        subprocess.run(command, check=True)
        return children_seconds() - before

    return round(median(repeated([used], repeats)[0]), 3)


# One run, watched


def measure_exchange(
    folder: Path, rounds: int, stock: bool
) -> tuple[Watch, list[dict[str, float]]]:
    """Watch one run; also the seconds of each part of the exchanges that were seen completely."""
    deployment = Deployment(folder, example_nodes(folder, SITES, ROWS))
    if stock:  # the scripts start Flower's commands, and a SuperExec polls as often as the site's
        for script in folder.glob("*/start-*.sh"):
            text = re.sub(r"python -P -m fedapp\.deploy\.", "flower-", script.read_text())
            script.write_text(text)
            with (script.parent / "env.sh").open("a") as file:
                file.write("export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.05\n")
    settings = {"strategy": "pax", "parties": len(SITES), "num-boost-round": rounds}
    settings |= {"max-depth": 1, "max-bin": 32}
    local = deployment.locally(folder / "local", settings)
    with deployment.running(), watched(deployment) as watch:
        run = deployment.train(folder / "across", settings)
    models = [(run_folder.path / "model.json").read_bytes() for run_folder in (run, local)]
    assert models[0] == models[1], "the model must be that of the local engine"
    waits: dict[int, float] = {}  # seconds from a request to the receipt of its reply, by step
    for line in run.files.ledger:
        if line["to"] == WATCHED:
            waits[line["step"]] = -line["seconds"]
        elif line["from"] == WATCHED:
            waits[line["step"]] += line["seconds"]
    return watch, timelines(watch, waits)


@dataclass(slots=True)
class Watch:
    """What was seen of one site; times in seconds since the epoch."""

    # When a message was sent and picked up, by step
    messages: dict[int, tuple[float, float]] = field(default_factory=dict)
    locks: set[float] = field(default_factory=set)  # when the site's files were written
    states: set[float] = field(default_factory=set)
    # CPU seconds that each program had used when a step was first seen, by step
    cpu: dict[int, Counter[str]] = field(default_factory=dict)


@contextmanager
def watched(deployment: Deployment) -> Iterator[Watch]:
    """Poll one site while the block runs."""
    watch = Watch()
    nodes = registered_sites(deployment.coordinator / "flower")
    node = next(int(number) for number, name in nodes.items() if name == WATCHED)
    site = deployment.folder / WATCHED / "home" / "sites" / WATCHED
    database = f"file:{deployment.coordinator / 'superlink.db'}?mode=ro"
    # The database numbers nodes by signed integers.
    signed = node - 2**64 if node >= 2**63 else node
    query = "SELECT group_id, created_at, delivered_at FROM message_ins WHERE dst_node_id = ?"
    # Only the polling thread uses the connection.
    connection = sqlite3.connect(database, uri=True, check_same_thread=False)

    def look() -> None:
        # Messages are deleted soon after they were delivered.
        with suppress(sqlite3.OperationalError):  # locked for a moment
            for step, sent, picked in superlink.execute(query, (signed,)):
                if picked:
                    delivered = datetime.fromisoformat(picked).timestamp()
                    watch.messages[int(step)] = (sent, delivered)
        if (last := max(watch.messages, default=0)) not in watch.cpu:
            watch.cpu[last] = cpu_used(deployment)
        watch.locks |= {path.stat().st_mtime for path in site.glob("*/lock")}
        watch.states |= {path.stat().st_mtime for path in site.glob("*/state")}

    with closing(connection) as superlink, looking(look, LOOK_SECONDS):
        yield watch


def cpu_used(deployment: Deployment) -> Counter[str]:
    """CPU seconds by program, of all sites' processes and of their children that have ended."""
    seconds = Counter[str]()
    for process in chain.from_iterable(map(deployment.family, ("coordinator", *SITES))):
        with suppress(psutil.NoSuchProcess):
            words = (Path(word).name for word in process.cmdline()[:4])
            program = next((word for word in words if PROGRAM.match(word)), "other")
            seconds[program] += sum(process.cpu_times()[:4])
    return seconds


def timelines(watch: Watch, waits: Mapping[int, float]) -> list[dict[str, float]]:
    """Seconds of each part, a line for each exchange that was seen completely.

    Excludes the first exchange, in which the app is unpacked, and the last, whose end is not seen.
    """
    lines = []
    for step in sorted(watch.messages)[1:-1]:
        moments = [*watch.messages[step]]
        for seen in (watch.locks, watch.states):
            moments += sorted(moment for moment in seen if moment > moments[-1])[:1]
        if step not in waits or step + 1 not in watch.messages:
            continue
        moments += [moments[0] + waits[step], watch.messages[step + 1][0]]
        if moments == sorted(moments) and len(moments) == len(PARTS) + 1:
            spans = (later - earlier for earlier, later in pairwise(moments))
            lines.append(dict(zip(PARTS, spans, strict=True)))
    return lines


# serve

DATA, N_ROUNDS, PARTIES = "breast-cancer", 50, 3
RATE, SECONDS = 100.0, 10.0  # requests a second, and for how long
BATCH_ROWS, BATCHES = 1000, 20
CONNECTIONS = 8
WARM_UP = 50  # requests
START_SECONDS = 60.0


def serve(rate: float = RATE, seconds: float = SECONDS, rounds: int = N_ROUNDS) -> Row:
    """How fast ``fedapp serve`` answers: one row at a time at a steady rate, and batches.

    A PAX model of default settings on breast-cancer (30 columns) is served by ``fedapp serve`` in a
    process of its own. Every answer of the first batch is compared with what ``fedapp predict``
    writes. Then requests of one row are sent at fixed times, whether earlier ones have been
    answered or not, so that a slow answer delays those after it; latency counts from when a request
    was due.
    """
    with tempfile.TemporaryDirectory() as folder:
        more: Row = {"num_boost_round": rounds, "run_dir": Path(folder) / "run"}
        run = fedapp.run("pax", data=DATA, parties=PARTIES, **more)
        with served(run.path) as port:
            return measure_serving(run, port, rate, seconds)


def measure_serving(run: fedapp.Run, port: int, rate: float, seconds: float) -> dict[str, Any]:
    """Latencies in milliseconds."""
    table = read_source(DATA)
    rows = [
        dict(zip(table.columns, row, strict=True)) for row in table.values.astype(float).tolist()
    ]
    batch = [rows[number % len(rows)] for number in range(BATCH_ROWS)]
    connection = http.client.HTTPConnection("127.0.0.1", port)
    bodies = [json.dumps({"row": row}).encode() for row in rows]
    body = json.dumps({"rows": batch}).encode()
    expected = run.predict_proba(DATA)[:, 1].astype(float).tolist()
    scores = [row["scores"]["probability_1"] for row in _asked(connection, body)["rows"]]
    if scores[: len(expected)] != expected:  # to the last bit
        raise SystemExit("scores must be those of fedapp predict, got others")
    for request in bodies[:WARM_UP]:
        _asked(connection, request)
    batches = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        _asked(connection, body)
        batches.append(time.perf_counter() - start)
    single = steady(port, bodies, rate, int(rate * seconds))
    record: dict[str, Any] = {"rows": "one a request", "rate": rate, "seconds": seconds}
    record |= {"p50_ms": _ms(statistics.median(single))}
    record |= {"p99_ms": _ms(statistics.quantiles(single, n=100)[98]), "max_ms": _ms(max(single))}
    record |= {"batch_rows": BATCH_ROWS, "batch_p50_ms": _ms(statistics.median(batches))}
    record |= {"batch_max_ms": _ms(max(batches))}
    return record


def steady(port: int, bodies: Sequence[bytes], rate: float, n_requests: int) -> list[float]:
    """Seconds from when each request was due until it was answered."""
    due: SimpleQueue[float | None] = SimpleQueue()
    latencies: list[float] = []

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        while (at := due.get()) is not None:
            _asked(connection, bodies[len(latencies) % len(bodies)])
            latencies.append(time.perf_counter() - at)

    threads = [threading.Thread(target=ask) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    start = time.perf_counter()
    for number in range(n_requests):
        at = start + number / rate
        time.sleep(max(0.0, at - time.perf_counter()))
        due.put(at)
    for _ in threads:
        due.put(None)
    for thread in threads:
        thread.join()
    return latencies


@contextmanager
def served(run: Path) -> Iterator[int]:
    """Serve a run in another process; yield the port."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "fedapp", "serve", str(run), "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        if not is_healthy(process, port, START_SECONDS):
            raise SystemExit("the server must answer, got none")
        yield port
    finally:
        process.terminate()
        process.wait()


def _asked(connection: http.client.HTTPConnection, body: bytes) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/score", body, headers)
    response = connection.getresponse()
    content: dict[str, Any] = json.loads(response.read())
    if response.status != 200:
        raise SystemExit(f"the server must answer with scores, got {response.status}: {content}")
    return content


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)


# parties

MAX_BIN = 255
TEST_FRACTION = 0.1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a table and of the models trained on it."""

    rows: int
    columns: int
    trees: int
    depth: int
    parties: tuple[int, ...]
    max_bin: int
    own: Mapping[str, Any]  # further settings


FULL = {
    "pax, share": Sizes(20_000, 23, 10, 6, (3, 10, 100, 300, 1000), MAX_BIN, {"pax.bins": "share"}),
    "pax, equal": Sizes(20_000, 23, 10, 6, (3, 10, 50, 100), MAX_BIN, {"pax.bins": "equal"}),
    "secureboost": Sizes(5_000, 24, 3, 3, (2, 4, 8), 32, {"secureboost.key-bits": 2048}),
}
SMALL_KEY = {"secureboost.key-bits": 512, "secureboost.insecure-small-key": True}
QUICK = {
    "pax, share": Sizes(4_000, 10, 3, 4, (3, 10, 100, 300, 1000), 64, {"pax.bins": "share"}),
    "pax, equal": Sizes(4_000, 10, 3, 4, (3, 10, 50, 100), 64, {"pax.bins": "equal"}),
    "secureboost": Sizes(1_000, 16, 2, 3, (2, 4, 8), 16, SMALL_KEY),
}


def parties_settings(data: str, method: str, sizes: Sizes, parties: int) -> Settings:
    strategy = method.partition(",")[0]
    by_columns = {"columns": "even", "align": "ordered"} if strategy == "secureboost" else {}
    config: dict[str, Any] = {"strategy": strategy, "data": data, "label": "label", **BINARY}
    config |= {"parties": parties, "num-boost-round": sizes.trees, "max-depth": sizes.depth}
    config |= {"max-bin": sizes.max_bin, "test-fraction": TEST_FRACTION, **by_columns, **sizes.own}
    return load_settings(config)


def measure_parties(method: str, sizes: Sizes) -> Iterator[Row]:
    """A row for each number of parties, after a warm-up, with its growth since the one before."""
    before: Row = {}
    with tempfile.TemporaryDirectory() as folder:
        data = write_numbers(Path(folder) / "rows.parquet", sizes.rows, sizes.columns)
        for parties in sizes.parties:
            warm_up, measured = (
                parties_settings(data, method, sizes, n) for n in (sizes.parties[0], parties)
            )
            row = {"method": method, "parties": parties, **apart(measure_run, warm_up, measured)}
            yield {**row, **growth(before, row, "parties", ("seconds", "cpu_seconds", "bytes"))}
            before = row


def measure_run(warm_up: Settings, settings: Settings) -> Row:
    """Costs of a run, its score, and the peak memory of this process in MB."""
    run_once(warm_up)
    run = run_once(settings)
    return {**run.costs, "auc": run.summary["metrics"]["test"]["auc"], "peak": peak_bytes() / 1e6}


def parties(quick: bool = False, only: tuple[str, ...] = tuple(FULL)) -> Row:
    """How seconds, bytes and exchanges grow with the number of parties.

    A table of one size is split among more and more parties: its rows for PAX, its columns for
    SecureBoost. Seconds are of training; CPU is of the whole run, including processes that it
    starts. Each run is in a process of its own, after a warm-up, for its peak memory. ``growth`` is
    the exponent of the number of parties from one line of a method to the next: 1 if costs double
    with the parties, 0 if they stay the same.

    ``python -m simulations bench parties`` prints a table and a JSON line; ``--quick`` takes fewer
    rows, trees and key bits.
    """
    check_names("only", only, FULL)
    sizes = {method: (QUICK if quick else FULL)[method] for method in only}
    lines = [line for method in only for line in measure_parties(method, sizes[method])]
    columns = "method; parties; seconds:.2f; CPU=cpu_seconds:.2f; peak MB=peak:.0f; exchanges; "
    columns += "messages; MB=mb:.1f; "
    columns += "AUC=auc:.4f; growth of seconds:.2f; of CPU=growth of cpu_seconds:.2f; "
    columns += "of bytes=growth of bytes:.2f"
    show("a table of one size, split among more and more parties", lines, columns)
    return {"lines": lines, "sizes": {method: asdict(sizes[method]) for method in only}}
