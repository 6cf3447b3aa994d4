"""XGBoost's own federated plugin on this machine: a server and one worker process a party.

Source: ``xgboost.federated`` of the wheel (FederatedTracker, gRPC without TLS). Its server listens
on every interface, whatever it is told; it lives as long as the benchmark's trainings.
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

from simulations.bench import peak_bytes
from simulations.engines import free_ports

Rows = npt.NDArray[np.float32]
Parameters = Mapping[int, Mapping[str, Any]]

LOCALHOST = "127.0.0.1"
WITH_PLUGIN = "xgboost==3.2.0"  # later wheels lack the plugin too
SERVER_SECONDS = 30
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What a worker trains, and how often.

    Parameters
    ----------
    values, labels : the party's rows.
    test_values : the same at every worker.
    parameters : XGBoost's, by name of the configuration.
    n_rounds, max_bin : of every training.
    repeats : timed trainings of each configuration, after a warm-up.
    """

    values: Rows
    labels: Rows
    test_values: Rows
    parameters: Parameters
    n_rounds: int
    max_bin: int
    repeats: int


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """Result of one configuration.

    Parameters
    ----------
    seconds : median over the repeats, from the barrier to the end of the last worker.
    margins : of the test rows.
    """

    seconds: float
    margins: Rows


def has_plugin() -> bool:
    """Whether the installed XGBoost was built with the plugin."""
    return bool(xgboost.build_info().get("USE_FEDERATED"))


def check_plugin() -> None:
    """Hold, before anything is timed, that the installed XGBoost was built with the plugin.

    Raises
    ------
    SystemExit : it was not; says how to get one that was.
    """
    if not has_plugin():
        raise SystemExit(
            "xgboost must be built with the federated plugin, which the wheel of xgboost-cpu "
            "lacks. In an environment of its own, which has fedapp: pip uninstall xgboost-cpu, "
            f"then pip install {WITH_PLUGIN}. --without-plugin measures the rest"
        )


def train_federated(works: Sequence[Work]) -> tuple[dict[int, Trained], int]:
    """Train at all workers together; see ``check_plugin``.

    Returns
    -------
    The result by name of the configuration, and the largest peak memory of a worker in bytes.
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
        found = [replies.get() for _ in works]
        for worker in workers:
            worker.join()
    spans = {name: [spans[name] for spans, _, _ in found] for name in works[0].parameters}
    margins = found[0][1]
    return {
        name: Trained(_median_span(spans[name]), margins[name]) for name in works[0].parameters
    }, max(peak for _, _, peak in found)


def _median_span(spans: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Seconds from the first start to the last end, of the middle repeat."""
    lengths = [
        max(end for _, end in repeat) - min(start for start, _ in repeat)
        for repeat in zip(*spans, strict=True)
    ]
    return float(statistics.median(lengths))


@contextmanager
def _server(n_workers: int) -> Iterator[int]:
    """A process that connects the workers; yields its port."""
    (port,) = free_ports(1)
    spawn = multiprocessing.get_context("spawn")
    server = spawn.Process(target=_serve, args=(n_workers, port), daemon=True)
    server.start()
    deadline = time.monotonic() + SERVER_SECONDS
    try:
        while not _listens(port):
            if time.monotonic() > deadline or not server.is_alive():
                raise RuntimeError(f"the federated server must listen within {SERVER_SECONDS} s")
            time.sleep(POLL_SECONDS)
        yield port
    finally:
        server.terminate()
        server.join()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOCALHOST, port)) == 0


def _serve(n_workers: int, port: int) -> None:
    from xgboost.federated import run_federated_server

    # The server greets on standard output, which is for the benchmark's own lines.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    run_federated_server(n_workers=n_workers, port=port)


def _work(work: Work, rank: int, n_workers: int, port: int, barrier: Any, replies: Any) -> None:
    """One worker: its spans of time and margins by configuration, and its peak memory."""
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
    """When one training began and ended, and its booster."""
    barrier.wait()
    # perf_counter is the system's clock, so the times of processes can be compared.
    start = time.perf_counter()
    threads = parameters["nthread"]
    matrix = xgboost.QuantileDMatrix(
        work.values, work.labels, max_bin=work.max_bin, nthread=threads
    )
    booster = xgboost.train(dict(parameters), matrix, work.n_rounds)
    return (start, time.perf_counter()), booster
