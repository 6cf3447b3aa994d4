"""Processes that share out work on big integers, where it holds Python's lock, and threads else.

A worker is this interpreter started anew, on a pipe: it imports numpy and gmpy2 alone, not the
main program as ``multiprocessing`` would, so it is up in a fifth of a second and may be started
from a daemonic process or one with threads. The caller works along with its workers and takes
calls from the same queue. A worker ends when its pipe closes.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, Self

Call = tuple[Any, ...]
Run = Callable[[Callable[..., Any], Call], Any]

SERVE = "from fedapp.crypto.workers import serve; serve({})"


def n_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def shared_workers() -> Workers:
    """The workers of this process, one a core, started once and closed at its end."""
    workers = Workers(n_cores())
    atexit.register(workers.close)
    return workers


class Workers:
    """``n_workers`` processes, this one among them; the others start when first needed.

    Secrets that a call holds go to the workers through anonymous pipes and stay in memory. Where
    the system cannot hand a pipe to a process (Windows) all work is done here.

    Raises
    ------
    ValueError : n_workers is below 1.
    """

    def __init__(self, n_workers: int) -> None:
        if n_workers < 1:
            raise ValueError(f"n_workers must be >= 1, got {n_workers}")
        self.n_workers = n_workers if os.name == "posix" else 1
        self._others: list[_Worker] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], calls: Sequence[Call]) -> list[Any]:
        """Call ``function`` with each tuple of arguments, in any order and any process.

        Parameters
        ----------
        function : a function of a module.
        calls : arguments of each call; they and the results must be picklable.

        Returns
        -------
        The results, in the order of ``calls``.

        Raises
        ------
        RuntimeError : a worker died.
        Exception : whatever the function raised.
        """
        with self._lock:
            n_others = min(self.n_workers, len(calls)) - 1
            self._others = [other for other in self._others if other.alive]
            while len(self._others) < n_others:
                self._others.append(_Worker())
            others = self._others[: max(n_others, 0)]
            queue, results = deque(enumerate(calls)), dict[int, Any]()
            if not others:
                _drain(queue, results, function, _here)
            else:
                _drain_with(others, queue, results, function)
        return [results[place] for place in range(len(calls))]

    def run_here(self, function: Callable[..., Any], calls: Sequence[Call]) -> list[Any]:
        """Call ``function`` with each tuple of arguments, in threads of this process.

        For functions that work without Python's lock; otherwise as ``run``.
        """
        n_threads = min(self.n_workers, len(calls))
        if n_threads <= 1:
            return [function(*call) for call in calls]
        with ThreadPoolExecutor(n_threads) as threads:
            return list(threads.map(lambda call: function(*call), calls))

    def close(self) -> None:
        """End the other processes."""
        while self._others:
            self._others.pop().close()


def _drain_with(others: Sequence[_Worker], queue: deque[Any], results: Any, function: Any) -> None:
    """Do calls here and in other processes until none is left."""
    with ThreadPoolExecutor(len(others)) as threads:
        waiting = [threads.submit(_drain, queue, results, function, other.run) for other in others]
        _drain(queue, results, function, _here)
    for thread in waiting:
        thread.result()


def _drain(queue: deque[Any], results: dict[int, Any], function: Any, run: Run) -> None:
    """Do calls until none is left; an error empties the queue."""
    while True:
        try:
            place, call = queue.popleft()
        except IndexError:
            return
        try:
            results[place] = run(function, call)
        except BaseException:
            queue.clear()
            raise


def _here(function: Callable[..., Any], call: Call) -> Any:
    """A call in this process."""
    return function(*call)


class _Worker:
    """One other process."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-c", SERVE.format(theirs.fileno())]
        # Flower puts an app's folder on sys.path and not in the environment.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with theirs:
            # In a group of its own: the caller decides what a terminal's Ctrl-C ends.
            self._process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def run(self, function: Callable[..., Any], call: Call) -> Any:
        """A call in that process."""
        try:
            self._pipe.send((function, call))
            result, error = self._pipe.recv()
        except (EOFError, OSError) as gone:
            status = self._process.poll()
            raise RuntimeError(f"worker must stay alive, got exit status {status}") from gone
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Close the pipe, on which the process ends, and wait for it."""
        self._pipe.close()
        self._process.wait()


def serve(descriptor: int) -> None:
    """Answer calls on a pipe until it closes; what a worker's process does."""
    with Connection(descriptor) as pipe, suppress(EOFError, OSError):
        while True:
            function, call = pipe.recv()
            pipe.send(_answer(function, call))


def _answer(function: Callable[..., Any], call: Call) -> tuple[Any, Exception | None]:
    """A call's result, or its error."""
    try:
        return function(*call), None
    except Exception as error:
        return None, error
