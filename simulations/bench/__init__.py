"""How fast and how large: the result is held against a reference first, then measured.

A bench is a module with sizes and seed at the top and a ``main(words)``, which prints a table and
JSON lines: ``tell`` writes one. ``simulations.bench.all`` runs them all.
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
WIDTH = 160  # letters of a line that no terminal shows
SEED = 42
# What runs that are measured have in common.
BINARY = {"objective": "binary:logistic", "valid-fraction": 0.0, "seed": SEED}
T = TypeVar("T")


def peak_bytes(process: int | str = "self") -> int:
    """Peak memory of this process, in bytes, shared libraries included; on Linux also of another.

    On Linux ``getrusage`` will not do: a process inherits the peak of the one that started it.
    """
    status = Path(STATUS.format(process=process))
    if status.exists() or process != "self":
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def cpu_seconds() -> float:
    """CPU seconds of this process, all its threads and the processes that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def apart(function: Callable[..., T], *given: Any) -> T:
    """A call in a process of its own, whose peak memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, given)


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
    """By which a figure grows with a size, from before to after: 1 where it doubles with it."""
    return math.log(figures[1] / figures[0]) / math.log(sizes[1] / sizes[0])


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, whose first column is of words and the others of numbers."""
    grid = Grid(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for place, name in enumerate(header):
        grid.add_column(name, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    console = Console()
    # A file is as wide as the table.
    console = console if console.is_terminal else Console(width=WIDTH)
    console.print(grid)


def tell(bench: str, packages: Iterable[str], **found: Any) -> None:
    """Print a bench's JSON line.

    Parameters
    ----------
    packages : whose versions matter.
    found : sizes and figures. Of several lines each is a dict in ``lines``, and ``by`` names the
        entries that tell one from another.
    """
    # Above the number of cores, somebody else had them as well.
    line = {"bench": bench, **found, "load": os.getloadavg()[0], "versions": versions(packages)}
    print(json.dumps(line), flush=True)
