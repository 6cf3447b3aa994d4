"""A Ray cluster: its nodes are checked, and calls are shared among its processes.

Ray runs tasks, repeats those whose process or node has died, and moves arrays; nothing here
schedules. ``RayWorkers`` decides only which calls are worth sending.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from warnings import catch_warnings
from weakref import finalize

import numpy as np

from fedapp.crypto.lanes import has_lanes
from fedapp.crypto.workers import Call, Rows, Workers, arguments
from fedapp.errors import ConfigError
from fedapp.home import home, private_folder
from fedapp.process import versions

ANSWER_SECONDS = 120  # of a node; its first process imports fedapp
CONNECT_SECONDS = 10
RETRIES = 3  # of work whose process or node has died
# Calls that end sooner than the first do not leave this process; a task has calls of the second;
# Ray is asked this often for results; the head may be silent for the last.
PROBE_SECONDS, TASK_SECONDS, WAIT_SECONDS, SILENT_SECONDS = 0.02, 0.2, 0.02, 10.0
PIECE_BYTES = 4 << 20
# Variables of a process that uses a cluster: Ray does not end it if the cluster is away for a
# minute, and does not take another one then.
DRIVER = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(10**6),
    "RAY_ENABLE_AUTO_CONNECT": "0",
}
TASKS_PER_WORKER = 2  # one waits at its node while the other runs
PACKAGES = ("fedapp", "flwr", "gmpy2", "numba", "numpy", "ray", "xgboost")


def ray_address() -> str:
    """The cluster of runs on this machine; empty without one."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def variables() -> dict[str, str]:
    """Environment of processes at other nodes, which inherit that of ``ray start`` there."""
    data = {"FEDAPP_DATA": os.environ["FEDAPP_DATA"]} if os.environ.get("FEDAPP_DATA") else {}
    return {"FEDAPP_HOME": str(home().resolve()), **data}


def connect(address: str, name: str) -> Any:
    """``ray``, connected to the cluster that a setting names; "local": to a new one, here."""
    os.environ.update({} if address == "local" else DRIVER)
    import ray

    paths = os.pathsep.join(str(Path(path or ".").resolve()) for path in sys.path)
    setting, was_connected, handler = (
        address,
        ray.is_initialized(),
        signal.getsignal(signal.SIGTERM),
    )
    try:
        if address != "local":
            address = _speaking(address)
        # About GPUs in later versions.
        with catch_warnings(action="ignore", category=FutureWarning):
            ray.init(
                address,
                runtime_env={"env_vars": {**variables(), "PYTHONPATH": paths}},
                include_dashboard=False if address == "local" else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        with suppress(ValueError):  # in another thread Ray installs no handler of its own
            signal.signal(signal.SIGTERM, handler)
    except (OSError, RuntimeError, ValueError) as error:
        if not was_connected:
            ray.shutdown()
        rule = f"{name} must be a Ray cluster of which this machine is a node"
        rule += ", or ray://HOST:10001" if name == "workers" else ""
        way = "ray start --head, and at other machines ray start --address=HEAD:6379"
        raise ConfigError(f"{rule}, got {setting}: {_first_line(error)}; {way}") from None
    return ray


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _speaking(address: str) -> str:
    """The address of a cluster, also of "auto"; an OSError if nothing there speaks as Ray here,
    for which ``ray.init`` would wait for minutes."""
    grpc: Any = importlib.import_module("grpc")
    utils: Any = importlib.import_module("ray._private.grpc_utils")
    services: Any = importlib.import_module("ray._private.services")
    if address == "auto":
        address = services.canonicalize_bootstrap_address("auto")
    check_answers(address)
    with utils.init_grpc_channel(address.removeprefix("ray://")) as channel:
        try:
            grpc.channel_ready_future(channel).result(CONNECT_SECONDS)
        except grpc.FutureTimeoutError:
            rule = "RAY_USE_TLS must be the same here and there"
            raise ConnectionError(f"no Ray answers within {CONNECT_SECONDS} s; {rule}") from None
    return address


def check_answers(address: str) -> None:
    """Raise an OSError if nothing listens at HOST:PORT."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and "/" not in host:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()


@contextmanager
def connected() -> Iterator[Any]:
    """Yield ``ray``, connected to ``RAY_ADDRESS``; without it, Ray starts on this machine."""
    ray = connect(ray_address() or "local", "RAY_ADDRESS")
    try:
        yield ray
    finally:
        ray.shutdown()


def check_nodes(ray: Any, folders: Sequence[Path] = (), files: Sequence[Path] = ()) -> None:
    """Check that every node has this fedapp and sees the files, and what was just written into the
    folders; ConfigError names one that does not."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    sought = {str(file.resolve()): file for file in files}
    with ExitStack() as stack:
        for folder in folders:
            private_folder(folder)
            mark = NamedTemporaryFile(prefix=".cluster-", dir=folder.resolve())  # noqa: SIM115
            sought[stack.enter_context(mark).name] = folder.resolve()
        paths = list(sought)

        def look() -> tuple[list[str], Mapping[str, str]]:  # sent by value: fedapp may be absent
            from fedapp.cluster import installed

            return [path for path in paths if not os.path.exists(path)], installed()

        task = ray.remote(num_cpus=0)(look)
        nodes = {node["NodeID"]: node["NodeName"] for node in ray.nodes() if node["Alive"]}
        there = {node: NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes}
        asked = {node: task.options(scheduling_strategy=at).remote() for node, at in there.items()}
        here = installed()
        for node, answer in asked.items():
            name = f"Ray's node {nodes[node]} ({node[:8]})"
            try:
                absent, theirs = ray.get(answer, timeout=ANSWER_SECONDS)
            except ImportError as error:
                got = str(error).splitlines()[-1]
                raise ConfigError(f"{name} must have fedapp and its packages, got {got}") from None
            except ray.exceptions.GetTimeoutError:
                rule = f"must answer within {ANSWER_SECONDS} s, got nothing"
                raise ConfigError(f"{name} {rule}") from None
            for path in absent:
                way = "put FEDAPP_HOME, FEDAPP_DATA, tables and run folders where all nodes see"
                raise ConfigError(f"{name} must see {sought[path]} of this machine; {way} them")
            for package, version in here.items():
                if (got := theirs[package]) != version:
                    raise ConfigError(f"{name} must have {package} {version}, got {got}")


def installed() -> dict[str, str]:
    """What all nodes must have alike: versions, and instructions, as they lay out residues."""
    lanes = "with" if has_lanes() else "without"
    return {
        "Python": ".".join(map(str, sys.version_info[:3])),
        **versions(PACKAGES),
        "a processor": f"{lanes} AVX-512 IFMA",
    }


@functools.cache
def workers_at(address: str) -> RayWorkers:
    """The workers of a cluster, to which this process connects once."""
    return RayWorkers(address)


class RayWorkers(Workers):
    """The processes of a site's Ray cluster, and this one, which takes calls from the same queue.

    As all calls can end here, none waits for a cluster whose CPUs are busy, or held by actors.

    ``run_here`` goes to the cluster too. On one machine of two cores, sums and decryptions of 2048
    bits took 0.9 of the time of two threads (with the caller, three processes share the cores), and
    encryptions 1.6, whose results are large: what a second machine gains is more.
    """

    def __init__(self, address: str) -> None:
        super().__init__(1)
        self.address = address
        self.is_private = True  # whether all nodes are on this machine, or use TLS
        self._connecting = threading.Lock()
        self._ray: Any = None
        self._head, self._n_running = "", 0
        self._unwanted = list[Any]()  # tasks that have not ended
        self._sent: dict[int, dict[Any, Any]] = {}  # by array that owns memory: references by part

    def connected(self) -> Any:
        """``ray``, connected; ConfigError if the cluster or a node is not as it must be."""
        with self._connecting:
            if self._ray is not None:
                try:
                    check_answers(self._head)
                    return self._ray
                except OSError:
                    if self._n_running:  # which notices it too
                        return self._ray
                    self.close()
            ray: Any = importlib.import_module("ray")
            # Else this is an actor of a simulation on the cluster.
            is_ours = not (
                ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE
            )
            if is_ours:
                connect(self.address, "workers")
            try:
                check_nodes(ray)
                is_client = self.address.startswith("ray://") and is_ours
                self._head = self.address if is_client else ray.get_runtime_context().gcs_address
                self._n_workers = max(1, int(ray.cluster_resources().get("CPU", 1)))
                hosts = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
                has_tls = os.environ.get("RAY_USE_TLS", "").lower() in ("1", "true")
                self.is_private = has_tls or hosts <= {ray.util.get_node_ip_address(), "127.0.0.1"}
            except BaseException:
                if is_ours:
                    ray.shutdown()
                raise
            if is_ours:
                atexit.register(self.close)
            self._ray = ray
            return ray

    @property
    def n_workers(self) -> int:
        """CPUs of the cluster."""
        self.connected()
        return self._n_workers

    def close(self) -> None:
        """Leave the cluster."""
        if self._ray is not None:
            self._unwanted.clear()
            self._sent.clear()
            self._ray.shutdown()
            self._ray = None

    def run(self, function: Callable[..., Any], calls: Sequence[Call]) -> list[Any]:
        """As ``Workers.run``: calls that take longer than ``PROBE_SECONDS`` are Ray tasks too."""
        shared = _Queue(function, calls)
        threading.Thread(target=shared.work, daemon=True).start()
        try:
            if not shared.is_over.wait(PROBE_SECONDS):
                self._lend(shared)
        finally:
            shared.is_over.set()
        if shared.error is not None:
            raise shared.error
        return [shared.results[index] for index in range(len(calls))]

    run_here = run

    def _lend(self, shared: _Queue) -> None:
        """Have tasks do what this process has not done yet; return when all is done."""
        ray = self.connected()
        self._n_running += 1
        try:
            self._have_done(ray, shared)
        except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
            rule = "workers must be a Ray cluster whose nodes and processes stay alive"
            raise ConfigError(f"{rule}, got {_first_line(error)}") from None
        finally:
            # Ray ends this process if a task is cancelled while it ends. A call that has not ended
            # here must not drop them after Ray's end.
            self._unwanted += shared.lent
            shared.lent.clear()
            self._n_running -= 1

    def _have_done(self, ray: Any, shared: _Queue) -> None:
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_called)
        answered = time.monotonic()
        while not shared.is_over.is_set():
            if before := self._unwanted:
                self._unwanted = ray.wait(before, num_returns=len(before), timeout=0)[1]
            most = TASKS_PER_WORKER * self._n_workers - len(self._unwanted)
            while len(shared.lent) < most and (indices := shared.take(most)):
                shared.lent[task.remote(*self._packed(shared, indices))] = indices
            if not shared.lent:
                shared.is_over.wait(WAIT_SECONDS)
                continue
            done, _ = ray.wait([*shared.lent], timeout=WAIT_SECONDS)
            for one in done:
                try:
                    shared.add(shared.lent.pop(one), ray.get(one))
                except ray.exceptions.RayTaskError as error:
                    shared.fail(error.cause)
            if done:
                answered = time.monotonic()
            elif time.monotonic() > answered + 1:
                answered = self.last_answer(answered)

    def last_answer(self, answered: float) -> float:
        """When the head answered last; a ConfigError if it is silent too long."""
        try:
            check_answers(self._head)
            return time.monotonic()
        except OSError as error:
            if time.monotonic() < answered + SILENT_SECONDS:
                return answered
            rule = "workers must be a Ray cluster whose head answers until the run has ended"
            raise ConfigError(f"{rule}, got {self._head}: {error}; start it, then resume") from None

    def _packed(self, shared: _Queue, indices: Sequence[int]) -> tuple[Any, ...]:
        """Arguments of a task; arrays of `Rows` are references, which Ray resolves."""
        references = list[Any]()

        def of(argument: Any) -> Any:
            if not isinstance(argument, Rows):
                return argument
            pieces = [piece for array in argument.arrays for piece in _pieces(array)]
            places, rows, n_rows = list[Any](), list[Any](), 0
            for piece, chosen in zip(pieces, Rows(pieces, argument.rows).split(), strict=True):
                if len(chosen) or (piece is pieces[-1] and not places):
                    places.append(len(references))
                    references.append(self.reference(piece))
                    rows.append(chosen + n_rows)
                    n_rows += len(piece)
            return Rows(places, np.concatenate(rows))

        calls = [tuple(map(of, shared.calls[index])) for index in indices]
        return shared.function, calls, *references

    def reference(self, array: Any) -> Any:
        """Where the cluster has an array, as long as the memory that it is part of is used."""
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if id(owner) not in self._sent:
            self._sent[id(owner)] = {}
            finalize(owner, self._sent.pop, id(owner), None)
        part = array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str
        references = self._sent[id(owner)]
        if part not in references:
            references[part] = self._ray.put(array)
        return references[part]


class _Queue:
    """Calls that this process takes from the left, and tasks from the right."""

    def __init__(self, function: Callable[..., Any], calls: Sequence[Call]) -> None:
        self.function, self.calls = function, calls
        self.left = deque(range(len(calls)))
        self.lent: dict[Any, list[int]] = {}  # by task
        self.results: dict[int, Any] = {}
        self.error: BaseException | None = None
        self.is_over = threading.Event()  # all is done, or nothing more is wanted
        self._began, self._n_here = time.monotonic(), 0
        self.add([], [])

    def take(self, n_tasks: int) -> list[int]:
        """Calls for one of several tasks, by the time that they take here; none if none is left."""
        seconds = (time.monotonic() - self._began) / max(1, self._n_here)
        n_calls = max(1, min(-(-len(self.left) // n_tasks), int(TASK_SECONDS / seconds)))
        indices = list[int]()
        with suppress(IndexError):
            while len(indices) < n_calls:
                indices.append(self.left.pop())
        return indices

    def add(self, indices: Sequence[int], results: Sequence[Any]) -> None:
        """Add results; the first of a call counts."""
        for index, result in zip(indices, results, strict=True):
            self.results.setdefault(index, result)
        if len(self.results) == len(self.calls):
            self.is_over.set()

    def fail(self, error: BaseException) -> None:
        """Want nothing more, because of an error of a call."""
        self.error = error
        self.is_over.set()

    def work(self) -> None:
        """Do calls here: those that are left, then those of tasks that have not ended, the last
        ones first, so that none waits for a task that does not start."""
        try:
            for index in iter(self._next, None):
                self.add([index], [self.function(*arguments(self.calls[index]))])
                self._n_here += 1
        except BaseException as error:
            self.fail(error)

    def _next(self) -> int | None:
        if self.is_over.is_set():
            return None
        with suppress(IndexError):
            return self.left.popleft()
        return next((one for one in range(len(self.calls)) if one not in self.results), None)


def _pieces(array: Any) -> list[Any]:
    """An array in parts of about ``PIECE_BYTES``; a task gets those in which it has rows."""
    n_rows = max(1, PIECE_BYTES * len(array) // max(1, array.nbytes))
    return [array[first : first + n_rows] for first in range(0, max(1, len(array)), n_rows)]


def _called(function: Callable[..., Any], calls: Sequence[Call], *arrays: Any) -> list[Any]:
    """A task: some calls, whose `Rows` name arrays by their places."""

    def of(argument: Any) -> Any:
        if not isinstance(argument, Rows):
            return argument
        return Rows([arrays[place] for place in argument.arrays], argument.rows)

    return [function(*arguments(tuple(map(of, call)))) for call in calls]
