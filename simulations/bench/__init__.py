"""Speed and memory: compare a result with a reference, then measure.

A bench is a module with sizes and seed at the top and a ``main(words)`` that prints a table and
JSON lines, written by ``tell``. ``simulations.bench.all`` runs them all.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid

from fedapp.packages import versions

STATUS = "/proc/{process}/status"
WIDTH = 160  # characters of a line in a file
SEED = 42
# Settings that all measured runs share.
BINARY = {"objective": "binary:logistic", "valid-fraction": 0.0, "seed": SEED}
T = TypeVar("T")


def peak_bytes(process: int | str = "self") -> int:
    """Peak memory of this process, in bytes, including shared libraries; on Linux also of another.

    On Linux, ``getrusage`` would report the peak inherited from the parent process.
    """
    status = Path(STATUS.format(process=process))
    if status.exists() or process != "self":
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def cpu_seconds() -> float:
    """CPU seconds of all threads and of the child processes that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a new process, so that its peak memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


@contextmanager
def looking(look: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call ``look`` every ``seconds`` while the block runs, and once at its end."""
    ended = threading.Event()

    def run() -> None:
        has_ended = False
        while not has_ended:
            has_ended = ended.wait(seconds)
            look()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def exponent(figures: tuple[float, float], sizes: tuple[float, float]) -> float:
    """Exponent with which a figure grows with a size: 1 if both double together."""
    return math.log(figures[1] / figures[0]) / math.log(sizes[1] / sizes[0])


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; the first column is text, the others are numbers."""
    grid = Grid(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column, name in enumerate(header):
        grid.add_column(name, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(grid)


def tell(bench: str, packages: Iterable[str], **figures: Any) -> None:
    """Print a bench's JSON line, with the versions of ``packages``.

    A line with several results has a dictionary for each in ``lines``; ``by`` names the entries
    that identify a result.
    """
    # A load above the number of cores: other programs used them as well.
    line = {"bench": bench, **figures, "load": os.getloadavg()[0], "versions": versions(packages)}
    print(json.dumps(line), flush=True)
