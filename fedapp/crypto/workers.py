"""Worker processes for work on big integers that holds Python's lock, and threads for the rest.

A worker is a new process of this interpreter, on a pipe. It imports numpy, numba and gmpy2, not the
main program as ``multiprocessing`` would, so it starts in a fifth of a second, also from a daemonic
process or one with threads. The caller works too and takes calls from the same queue. A worker ends
when its pipe closes.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.kernels import n_cores

Call = tuple[Any, ...]
Run = Callable[[Callable[..., Any], Call], Any]

SERVE = "from fedapp.crypto.workers import serve; serve({})"


_in_use: ContextVar[Workers | None] = ContextVar("workers", default=None)


@contextmanager
def sharing(workers: Workers | None) -> Iterator[None]:
    """Let others be the ``shared_workers`` of a block, in this thread; None: of this process."""
    token = _in_use.set(workers)
    try:
        yield
    finally:
        _in_use.reset(token)


def shared_workers() -> Workers:
    """The workers that the caller has: those of its site's cluster, or of this process."""
    return _in_use.get() or _of_process()


@functools.cache
def _of_process() -> Workers:
    """The workers of this process, one a core, started once and closed at its end."""
    workers = Workers(n_cores())
    atexit.register(workers.close)
    return workers


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """An argument of a call: some rows of arrays that many calls share, and that never change.

    ``rows`` are in ascending order, of all ``arrays`` one after the other. A cluster gets an array
    once for all calls.
    """

    arrays: Sequence[npt.NDArray[Any]]
    rows: npt.NDArray[np.int64 | np.int32]

    def split(self) -> list[npt.NDArray[Any]]:
        """The rows of each array, from its first."""
        starts = np.cumsum([0, *map(len, self.arrays)])
        parts = np.split(self.rows, np.searchsorted(self.rows, starts[1:-1]))
        return [part - start for part, start in zip(parts, starts, strict=False)]

    def taken(self) -> npt.NDArray[Any]:
        """The rows."""
        parts = [array[rows] for array, rows in zip(self.arrays, self.split(), strict=True)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def with_rows(call: Call, of: Callable[[Rows], Any]) -> Call:
    """A call with something else for each of its `Rows`."""
    return tuple(of(one) if isinstance(one, Rows) else one for one in call)


def arguments(call: Call) -> Call:
    """What a function gets for a call."""
    return with_rows(call, Rows.taken)


class Workers:
    """``n_workers`` processes, including this one; the others start when first needed.

    Secrets in a call go to the workers through anonymous pipes and stay in memory.
    """

    def __init__(self, n_workers: int) -> None:
        self._n_workers = n_workers
        self._others: list[_Worker] = []
        self._lock = threading.Lock()

    @property
    def n_workers(self) -> int:
        """Number of processes."""
        return self._n_workers

    def run(self, function: Callable[..., Any], calls: Sequence[Call]) -> list[Any]:
        """Call ``function`` with each tuple of arguments, in any order and any process.

        Arguments and results must be picklable, and ``function`` a function of a module; results
        are in the order of ``calls``. Raises what the function raised, or a RuntimeError if a
        worker died.
        """
        with self._lock:
            n_others = min(self.n_workers, len(calls)) - 1
            self._others = [other for other in self._others if other.alive]
            while len(self._others) < n_others:
                self._others.append(_Worker())
            others = self._others[: max(n_others, 0)]
            queue = deque(enumerate(calls))
            results = dict[int, Any]()
            if not others:
                _drain(queue, results, function, _here)
            else:
                with ThreadPoolExecutor(len(others)) as threads:
                    waiting = [
                        threads.submit(_drain, queue, results, function, other.run)
                        for other in others
                    ]
                    _drain(queue, results, function, _here)
                for thread in waiting:
                    thread.result()
        return [results[index] for index in range(len(calls))]

    def run_here(self, function: Callable[..., Any], calls: Sequence[Call]) -> list[Any]:
        """As ``run``, in threads of this process, for functions that release Python's lock."""
        n_threads = min(self.n_workers, len(calls))
        if n_threads <= 1:
            return [_here(function, call) for call in calls]
        with ThreadPoolExecutor(n_threads) as threads:
            return list(threads.map(lambda call: _here(function, call), calls))

    def close(self) -> None:
        """End the other processes."""
        while self._others:
            self._others.pop().close()


def _drain(queue: deque[Any], results: dict[int, Any], function: Any, run: Run) -> None:
    """Do calls until none is left; an error empties the queue."""
    while True:
        try:
            index, call = queue.popleft()
        except IndexError:
            return
        try:
            results[index] = run(function, call)
        except BaseException:
            queue.clear()
            raise


def _here(function: Callable[..., Any], call: Call) -> Any:
    return function(*arguments(call))


class _Worker:
    """One other process."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        command = [sys.executable, "-c", SERVE.format(theirs.fileno())]
        # Flower puts an app's folder on sys.path and not in the environment.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with theirs:
            # In a new process group: the caller decides what a terminal's Ctrl-C ends.
            self._process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, function: Callable[..., Any], call: Call) -> Any:
        try:
            self._pipe.send((function, arguments(call)))
            result, error = self._pipe.recv()
        except (EOFError, OSError) as error:
            status = self._process.poll()
            raise RuntimeError(f"worker must stay alive, got exit status {status}") from error
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Close the pipe, which ends the process, and wait for it."""
        self._pipe.close()
        self._process.wait()


def serve(descriptor: int) -> None:
    """Main loop of a worker process: answer calls on a pipe until it closes."""
    with Connection(descriptor) as pipe, suppress(EOFError, OSError):
        while True:
            function, call = pipe.recv()
            try:
                answer: tuple[Any, Exception | None] = function(*call), None
            except Exception as error:
                answer = None, error
            pipe.send(answer)
