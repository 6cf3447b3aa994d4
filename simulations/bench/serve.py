"""How fast ``fedapp serve`` answers: one row at a time at a steady rate, and batches.

A PAX model of default settings on breast-cancer (30 columns) is served by ``fedapp serve`` in a
process of its own. Every answer of the first batch is compared with what ``fedapp predict`` writes.
Then requests of one row are sent at fixed times, whether earlier ones have been answered or not, so
that a slow answer delays those after it; latency counts from when a request was due.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import fedapp
from fedapp.data.datasets import load_dataset
from fedapp.runs.engines import free_ports, is_healthy
from simulations.bench import tell

DATA, N_ROUNDS, PARTIES = "breast-cancer", 50, 3
RATE, SECONDS = 100.0, 10.0  # requests a second, and for how long
BATCH_ROWS, BATCHES = 1000, 20
CONNECTIONS = 8
WARM_UP = 50  # requests
START_SECONDS = 60.0


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--rounds", type=int, default=N_ROUNDS)
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        run = fedapp.run(
            "pax",
            data=DATA,
            parties=PARTIES,
            num_boost_round=options.rounds,
            run_dir=Path(folder) / "run",
        )
        with served(run.path) as port:
            figures = measured(run, port, options.rate, options.seconds)
    tell("serve", ("fedapp", "fastapi", "uvicorn", "xgboost"), **figures)


def measured(run: fedapp.Run, port: int, rate: float, seconds: float) -> dict[str, Any]:
    """Latencies in milliseconds."""
    table = load_dataset(DATA)
    rows = [
        dict(zip(table.columns, row, strict=True)) for row in table.values.astype(float).tolist()
    ]
    batch = [rows[number % len(rows)] for number in range(BATCH_ROWS)]
    connection = http.client.HTTPConnection("127.0.0.1", port)
    bodies, body = [json.dumps(row).encode() for row in rows], json.dumps({"rows": batch}).encode()
    expected = run.predict_proba(DATA)[:, 1].astype(float).tolist()
    scores = [row["scores"]["probability_1"] for row in _asked(connection, body)["rows"]]
    if scores[: len(expected)] != expected:  # to the last bit
        raise SystemExit("scores must be those of fedapp predict, got others")
    for each in bodies[:WARM_UP]:
        _asked(connection, each)
    batches = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        _asked(connection, body)
        batches.append(time.perf_counter() - start)
    single = steady(port, bodies, rate, int(rate * seconds))
    return {
        "rows": "one a request",
        "rate": rate,
        "seconds": seconds,
        "p50_ms": _ms(statistics.median(single)),
        "p99_ms": _ms(statistics.quantiles(single, n=100)[98]),
        "max_ms": _ms(max(single)),
        "batch_rows": BATCH_ROWS,
        "batch_p50_ms": _ms(statistics.median(batches)),
        "batch_max_ms": _ms(max(batches)),
    }


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
    connection.request("POST", "/predict", body, headers)
    response = connection.getresponse()
    content: dict[str, Any] = json.loads(response.read())
    if response.status != 200:
        raise SystemExit(f"the server must answer with scores, got {response.status}: {content}")
    return content


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)


if __name__ == "__main__":
    main()
