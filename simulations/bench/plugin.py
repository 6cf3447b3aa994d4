"""XGBoost's federated plugin, a server and one worker process a party, and its plain training."""

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

from fedapp.runs.flower import free_ports
from simulations.study import peak_bytes

Rows = npt.NDArray[np.float32]
Parameters = Mapping[int, Mapping[str, Any]]

LOCALHOST = "127.0.0.1"
WITH_PLUGIN = "xgboost==3.2.0"  # later wheels lack the plugin too
SERVER_SECONDS, POLL_SECONDS = 30, 0.05
SPEED_TREES = 20


def train_booster(
    parameters: Mapping[str, Any], values: Rows, labels: Rows
) -> tuple[tuple[float, float], float, Any]:
    """Start and end, CPU seconds, and XGBoost's model."""
    import xgboost

    # perf_counter is a clock of the system, so times of different processes are comparable.
    start, cpu_start = time.perf_counter(), time.process_time()
    bins, threads = parameters["max_bin"], parameters["nthread"]
    matrix = xgboost.QuantileDMatrix(values, labels, max_bin=bins, nthread=threads)
    booster = xgboost.train(dict(parameters), matrix, SPEED_TREES)
    return (start, time.perf_counter()), time.process_time() - cpu_start, booster


@dataclass(frozen=True, slots=True, eq=False)
class PluginWork:
    """What a worker trains; the test rows are the same at every worker."""

    values: Rows
    labels: Rows
    test_values: Rows
    parameters: Parameters  # by name of the configuration
    repeats: int  # timed trainings of each configuration, after a warm-up


def has_plugin() -> bool:
    """Whether the installed XGBoost was built with the plugin."""
    import xgboost

    return bool(xgboost.build_info().get("USE_FEDERATED"))


def check_plugin() -> None:
    """Check that the installed XGBoost was built with the plugin."""
    if not has_plugin():
        raise SystemExit(
            "xgboost must be built with the federated plugin, which the wheel of xgboost-cpu "
            "lacks. In an environment of its own, which has fedapp: pip uninstall xgboost-cpu, "
            f"then pip install {WITH_PLUGIN}. --without-plugin measures the rest"
        )


def train_federated(works: Sequence[PluginWork]) -> tuple[dict[int, tuple[float, Rows]], int]:
    """Train at all workers together by XGBoost's federated plugin; call ``check_plugin`` first.

    Source: ``xgboost.federated`` of the wheel (FederatedTracker, gRPC without TLS). Its server
    listens on every interface, whatever its settings, for as long as the benchmark trains. Returns,
    by name of the configuration, median seconds from the barrier to the end of the last worker, and
    the margins of the test rows; and the largest peak memory of a worker in bytes.
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
        trained[name] = statistics.median(seconds), results[0][1][name]
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


def _work(
    work: PluginWork, rank: int, n_workers: int, port: int, barrier: Any, replies: Any
) -> None:
    """Send a worker's time spans and margins by configuration, and its peak memory."""
    import xgboost

    spans: dict[int, list[tuple[float, float]]] = {}
    margins = {}
    with xgboost.collective.CommunicatorContext(
        dmlc_communicator="federated",
        federated_server_address=f"{LOCALHOST}:{port}",
        federated_world_size=n_workers,
        federated_rank=rank,
    ):
        for name, parameters in work.parameters.items():
            spans[name] = []
            for _ in range(work.repeats + 1):
                barrier.wait()
                span, _, booster = train_booster(parameters, work.values, work.labels)
                spans[name].append(span)
            del spans[name][0]  # the warm-up
            margins[name] = booster.predict(xgboost.DMatrix(work.test_values), output_margin=True)
    replies.put((spans, margins, peak_bytes()))
