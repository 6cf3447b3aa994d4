"""XGBoost's own federated plugin on this machine: a server and one worker process a party.

Source: ``xgboost.federated`` of the wheel (FederatedTracker, gRPC without TLS). Its server listens
on every interface, whatever its settings, for as long as the benchmark trains.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xgboost

from fedapp.runs.engines import free_ports
from simulations.bench import peak_bytes

Rows = npt.NDArray[np.float32]
Parameters = Mapping[int, Mapping[str, Any]]

LOCALHOST = "127.0.0.1"
WITH_PLUGIN = "xgboost==3.2.0"  # later wheels lack the plugin too
SERVER_SECONDS = 30
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What a worker trains; the test rows are the same at every worker."""

    values: Rows
    labels: Rows
    test_values: Rows
    parameters: Parameters  # by name of the configuration
    n_rounds: int
    max_bin: int
    repeats: int  # timed trainings of each configuration, after a warm-up


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """Result of one configuration."""

    seconds: float  # median over the repeats, from the barrier to the end of the last worker
    margins: Rows  # of the test rows


def has_plugin() -> bool:
    """Whether the installed XGBoost was built with the plugin."""
    return bool(xgboost.build_info().get("USE_FEDERATED"))


def check_plugin() -> None:
    """Check that the installed XGBoost was built with the plugin.

    Raises
    ------
    SystemExit : it was not; the message explains how to install one that was.
    """
    if not has_plugin():
        raise SystemExit(
            "xgboost must be built with the federated plugin, which the wheel of xgboost-cpu "
            "lacks. In an environment of its own, which has fedapp: pip uninstall xgboost-cpu, "
            f"then pip install {WITH_PLUGIN}. --without-plugin measures the rest"
        )


def train_federated(works: Sequence[Work]) -> tuple[dict[int, Trained], int]:
    """Train at all workers together; call ``check_plugin`` first.

    Returns results by name of the configuration, and the largest peak memory of a worker in bytes.
    """
    spawn = multiprocessing.get_context("spawn")
    barrier, replies = spawn.Barrier(len(works)), spawn.Queue()
    with _server(len(works)) as port:
        workers = [
            spawn.Process(target=_work, args=(work, rank, len(works), port, barrier, replies))
            for rank, work in enumerate(works)
        ]
        for worker in workers:
            worker.start()
        results = [replies.get() for _ in works]
        for worker in workers:
            worker.join()
    trained = {}
    for name in works[0].parameters:
        # A repeat takes from the first start to the last end of a worker.
        seconds = [
            max(end for _, end in repeat) - min(start for start, _ in repeat)
            for repeat in zip(*(spans[name] for spans, _, _ in results), strict=True)
        ]
        trained[name] = Trained(float(statistics.median(seconds)), results[0][1][name])
    return trained, max(peak for _, _, peak in results)


@contextmanager
def _server(n_workers: int) -> Iterator[int]:
    """Run the process that connects the workers; yield its port."""
    (port,) = free_ports(1)
    spawn = multiprocessing.get_context("spawn")
    server = spawn.Process(target=_serve, args=(n_workers, port), daemon=True)
    server.start()
    deadline = time.monotonic() + SERVER_SECONDS

    def is_listening() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((LOCALHOST, port)) == 0

    try:
        while not is_listening():
            if time.monotonic() > deadline or not server.is_alive():
                raise RuntimeError(f"the federated server must listen within {SERVER_SECONDS} s")
            time.sleep(POLL_SECONDS)
        yield port
    finally:
        server.terminate()
        server.join()


def _serve(n_workers: int, port: int) -> None:
    from xgboost.federated import run_federated_server

    # The server prints to standard output, which is for the benchmark's lines.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    run_federated_server(n_workers=n_workers, port=port)


def _work(work: Work, rank: int, n_workers: int, port: int, barrier: Any, replies: Any) -> None:
    """Send a worker's time spans and margins by configuration, and its peak memory."""
    spans: dict[int, list[tuple[float, float]]] = {}
    margins = {}
    with xgboost.collective.CommunicatorContext(
        dmlc_communicator="federated",
        federated_server_address=f"{LOCALHOST}:{port}",
        federated_world_size=n_workers,
        federated_rank=rank,
    ):
        for name, parameters in work.parameters.items():
            runs = [_train(work, parameters, barrier) for _ in range(work.repeats + 1)][1:]
            spans[name] = [span for span, _ in runs]
            booster = runs[-1][1]
            margins[name] = booster.predict(xgboost.DMatrix(work.test_values), output_margin=True)
    replies.put((spans, margins, peak_bytes()))


def _train(
    work: Work, parameters: Mapping[str, Any], barrier: Any
) -> tuple[tuple[float, float], Any]:
    barrier.wait()
    # perf_counter is a clock of the system, so times of different processes are comparable.
    start = time.perf_counter()
    threads = parameters["nthread"]
    matrix = xgboost.QuantileDMatrix(
        work.values, work.labels, max_bin=work.max_bin, nthread=threads
    )
    booster = xgboost.train(dict(parameters), matrix, work.n_rounds)
    return (start, time.perf_counter()), booster
