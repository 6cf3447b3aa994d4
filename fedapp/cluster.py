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
import subprocess
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
from fedapp.crypto.workers import Call, Rows, Workers, arguments, with_rows
from fedapp.errors import ClusterError
from fedapp.home import home, private_folder
from fedapp.process import ray_address, versions

ANSWER_SECONDS = 120  # of a node; its first process imports fedapp
CONNECT_SECONDS = 10
RETRIES = 3  # of work whose process or node has died
# Calls that end sooner than the first do not leave this process; a task has calls of the second;
# Ray is asked this often for results, and its head whether it is there.
PROBE_SECONDS, TASK_SECONDS, WAIT_SECONDS, ASK_SECONDS = 0.02, 0.2, 0.02, 1.0
PIECE_BYTES = 4 << 20
# Variables of a process that uses a cluster: Ray does not look for one that is lost, or another.
DRIVER = {"RAY_CLIENT_RECONNECT_GRACE_PERIOD": "0", "RAY_ENABLE_AUTO_CONNECT": "0"}
TASKS_PER_WORKER = 2  # one waits at its node while the other runs
PACKAGES = ("fedapp", "flwr", "gmpy2", "numba", "numpy", "ray", "xgboost")


def variables() -> dict[str, str]:
    """Environment of processes at other nodes, which inherit that of ``ray start`` there."""
    data = {"FEDAPP_DATA": os.environ["FEDAPP_DATA"]} if os.environ.get("FEDAPP_DATA") else {}
    return {"FEDAPP_HOME": str(home().resolve()), **data}


def connect(address: str) -> Any:
    """``ray``, connected to a cluster; "local": to a new one, here."""
    import ray

    for log in ("dataclient", "logsclient"):  # each loss has its error
        logging.getLogger(f"ray.util.client.{log}").disabled = True
    handler = signal.getsignal(signal.SIGTERM)
    # About GPUs in later versions.
    with catch_warnings(action="ignore", category=FutureWarning):
        ray.init(
            address,
            runtime_env={"env_vars": {**variables(), "PYTHONPATH": _modules()}},
            include_dashboard=False if address == "local" else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    with suppress(ValueError):  # in another thread Ray installs no handler of its own
        signal.signal(signal.SIGTERM, handler)
    return ray


def _modules() -> str:
    return os.pathsep.join(str(Path(path or ".").resolve()) for path in sys.path)


@contextmanager
def _reached(address: str, name: str) -> Iterator[str]:
    """Yield the cluster of a setting; a ClusterError if there is none, or for an error of Ray."""
    os.environ.update({} if address == "local" else DRIVER)
    try:
        yield "local" if address == "local" else _speaking(address)
    except (OSError, RuntimeError, ValueError) as error:
        rule = f"{name} must be a Ray cluster of which this machine is a node"
        rule += ", or ray://HOST:10001" if name == "workers" else ""
        way = "ray start --head, and at other machines ray start --address=HEAD:6379"
        got = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ClusterError(f"{rule}, got {address}: {got}; {way}") from None


def _served(address: str) -> tuple[subprocess.Popen[bytes], str]:
    """Ray's own server of clients at this machine, and its address.

    A process that is part of a cluster is ended by Ray when its node or the head dies.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["-m", "ray.util.client.server", "--mode=specific-server", f"--address={address}"]
    server = subprocess.Popen(
        [sys.executable, *words, "--host=127.0.0.1", f"--port={port}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": _modules()},
        process_group=0,
    )
    end = time.monotonic() + ANSWER_SECONDS
    while server.poll() is None and time.monotonic() < end:
        with suppress(OSError):
            check_answers(f"127.0.0.1:{port}")
            return server, f"ray://127.0.0.1:{port}"
        time.sleep(WAIT_SECONDS)
    server.kill()
    raise ConnectionError("Ray's server of clients does not start")


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
    with _reached(ray_address() or "local", "RAY_ADDRESS") as address:
        ray = connect(address)
    try:
        yield ray
    finally:
        ray.shutdown()


def check_nodes(ray: Any, folders: Sequence[Path] = (), files: Sequence[Path] = ()) -> None:
    """Check that every node has this fedapp and sees the files, and what was just written into the
    folders; ClusterError names one that does not."""
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
                raise ClusterError(f"{name} must have fedapp and its packages, got {got}") from None
            except ray.exceptions.GetTimeoutError:
                rule = f"must answer within {ANSWER_SECONDS} s, got nothing"
                raise ClusterError(f"{name} {rule}") from None
            for path in absent:
                way = "put FEDAPP_HOME, FEDAPP_DATA, tables and run folders where all nodes see"
                raise ClusterError(f"{name} must see {sought[path]} of this machine; {way} them")
            for package, version in here.items():
                if (got := theirs[package]) != version:
                    raise ClusterError(f"{name} must have {package} {version}, got {got}")


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

    ``run_here`` goes to the cluster too. On one machine of two busy cores, work of 2048 bits took
    1.2 to 1.4 of the time of two threads.
    """

    def __init__(self, address: str) -> None:
        super().__init__(1)
        self.address = address
        self.is_private = True  # whether all nodes are on this machine, or use TLS
        self._ray: Any = None
        self._server: subprocess.Popen[bytes] | None = None
        self._is_left = threading.Event()
        self._unwanted = list[Any]()  # tasks that have not ended
        self._sent: dict[int, dict[Any, Any]] = {}  # by array that owns memory: references by part

    def connected(self) -> Any:
        """``ray``, connected; ClusterError if the cluster or a node is not as it must be."""
        with self._lock:
            if self._ray is not None:
                return self._ray
            ray: Any = importlib.import_module("ray")
            # Else this is an actor of a simulation on the cluster, with which it ends.
            is_ours = not (
                ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE
            )
            try:
                if is_ours:
                    ray.util.debug.disable_log_once_globally()  # warnings of what a server costs
                    with _reached(self.address, "workers") as head:
                        is_client = head.startswith("ray://")
                        self._server, address = (None, head) if is_client else _served(head)
                        connect(address)
                check_nodes(ray)
                self._n_workers = max(1, int(ray.cluster_resources().get("CPU", 1)))
                hosts = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
                has_tls = os.environ.get("RAY_USE_TLS", "").lower() in ("1", "true")
                self.is_private = has_tls or hosts <= {ray.util.get_node_ip_address(), "127.0.0.1"}
                self._task = ray.remote(num_cpus=1, max_retries=RETRIES)(_called)
            except BaseException:
                if is_ours:
                    self._leave(ray)
                raise
            self._ray, self._is_left = ray, threading.Event()
            if is_ours:
                atexit.register(self.close)
                watched = head, self._is_left
                threading.Thread(target=self._watch, args=watched, daemon=True).start()
            return ray

    def _watch(self, head: str, is_left: threading.Event) -> None:
        """Leave a cluster that has lost its head, for which Ray would wait."""
        while not is_left.wait(ASK_SECONDS):
            try:
                check_answers(head)
            except OSError:
                self.close()

    def _leave(self, ray: Any) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        ray.shutdown()

    @property
    def n_workers(self) -> int:
        """CPUs of the cluster."""
        self.connected()
        return self._n_workers

    def close(self) -> None:
        """Leave the cluster."""
        self._is_left.set()
        with self._lock:
            self._sent.clear()
            self._unwanted = []
            if self._ray is not None:
                self._leave(self._ray)
                self._ray = None

    @contextmanager
    def using(self) -> Iterator[Any]:
        """Yield ``ray``, connected; a ClusterError for an error of Ray."""
        ray = self.connected()
        try:
            yield ray
        except Exception as error:
            grpc: Any = importlib.import_module("grpc")
            of_ray = ray.exceptions.RayError, grpc.RpcError, ConnectionError, RuntimeError
            if not (self._is_left.is_set() or isinstance(error, of_ray)):
                raise
            rule = "workers must be a Ray cluster whose head, nodes and processes stay alive"
            got = type(error).__name__
            raise ClusterError(f"{rule}, got {got}; start it again, then resume") from None

    def run(self, function: Callable[..., Any], calls: Sequence[Call]) -> list[Any]:
        """As ``Workers.run``: calls that take longer than ``PROBE_SECONDS`` are Ray tasks too."""
        shared = _Queue(function, calls)
        threading.Thread(target=shared.work, daemon=True).start()
        try:
            if not shared.is_over.wait(PROBE_SECONDS):
                with self.using() as ray:
                    self._lend(ray, shared)
        finally:
            shared.is_over.set()
        if shared.error is not None:
            raise shared.error
        return [shared.results[index] for index in range(len(calls))]

    run_here = run

    def _lend(self, ray: Any, shared: _Queue) -> None:
        """Have tasks do what this process has not done yet; return when all is done."""
        lent: dict[Any, list[int]] = {}  # by task
        try:
            while not shared.is_over.is_set():
                if before := self._unwanted:
                    self._unwanted = ray.wait(before, num_returns=len(before), timeout=0)[1]
                most = TASKS_PER_WORKER * self._n_workers - len(self._unwanted)
                while len(lent) < most and (indices := shared.take(most)):
                    lent[self._task.remote(*self._packed(shared, indices))] = indices
                if not lent:
                    shared.is_over.wait(WAIT_SECONDS)
                    continue
                for task in ray.wait([*lent], timeout=WAIT_SECONDS)[0]:
                    try:
                        shared.add(lent.pop(task), ray.get(task))
                    except ray.exceptions.RayTaskError as error:
                        shared.fail(error.cause)
        finally:
            # Ray ends its driver if a task is cancelled while it ends.
            if not self._is_left.is_set():
                self._unwanted += lent
            # A call that has not ended here must not drop them after Ray's end.
            lent.clear()

    def _packed(self, shared: _Queue, indices: Sequence[int]) -> tuple[Any, ...]:
        """Arguments of a task; arrays of `Rows` are references, which Ray resolves."""
        references = list[Any]()

        def of(asked: Rows) -> Rows:
            pieces = [piece for array in asked.arrays for piece in _pieces(array)]
            places, rows, n_rows = list[Any](), list[Any](), 0
            for piece, chosen in zip(pieces, Rows(pieces, asked.rows).split(), strict=True):
                if len(chosen) or (piece is pieces[-1] and not places):
                    places.append(len(references))
                    references.append(self.reference(piece))
                    rows.append(chosen + n_rows)
                    n_rows += len(piece)
            return Rows(places, np.concatenate(rows))

        calls = [with_rows(shared.calls[index], of) for index in indices]
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

    def of(asked: Rows) -> Any:
        return Rows([arrays[place] for place in asked.arrays], asked.rows).taken()

    return [function(*with_rows(call, of)) for call in calls]
