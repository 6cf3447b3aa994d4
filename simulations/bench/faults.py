"""Faults of a deployment as a table: what names each, after how long, and how the run ends.

``FAULTS`` is the table. A fault strikes by a function of the `Scene` (``faults_of_runs``), or of
the `Scores` (``faults_of_scores``), which also registers how it is undone; ``faults`` is the bench.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from queue import Queue
from unittest.mock import patch

import httpx
import psutil

from simulations.bench.faults_of_runs import (
    COORDINATOR,
    LIMIT,
    LOOK_SECONDS,
    NAMED,
    OF_RUNS,
    RANDOM,
    SAME,
    SITES,
    START,
    Fault,
    NotTriedError,
    Scene,
    nothing,
    random_kill,
)
from simulations.bench.faults_of_scores import LIVE, OF_SCORES, SCORES, STANDING, Scores
from simulations.study import Row, check_names, looking, show

FAULTS = (*OF_RUNS, *OF_SCORES)
NAMES = tuple(dict.fromkeys([*(fault.name for fault in FAULTS), RANDOM]))
# Deployments that share a method's faults, and how many are disturbed at the same time.
LANES, AT_ONCE = {"pax": 2, "secureboost": 1, STANDING: 1}, 3
NOT_TRIED = "not tried"
GOOD = {SAME, SCORES, *(f"{NAMED}; {how}: {SAME}" for how in ("gone on", "resumed", "restarted"))}
COMPLAINT = re.compile(r"^\S+Z (?:WARNING|ERROR) (.*)", re.MULTILINE)  # in a log
CLOCK = re.compile(r"(?<!whose )clock is")


class Witness:
    """Finds the first line that names a fault, in what the command prints or in a log."""

    def __init__(self, scene: Scene | Scores, named: str) -> None:
        self._named, self._start = named, time.monotonic()
        paths = [scene.output, *map(scene.log, (COORDINATOR, *SITES))]
        self._read = {path: path.stat().st_size for path in paths}
        self.line = self.wrong = ""
        self.seconds: float | None = None

    def has_seen(self) -> bool:
        """Whether a line has named the fault."""
        return self.seconds is not None

    def look(self) -> None:
        """Read the lines that are new."""
        for path, start in self._read.items():
            lines, newline, _ = path.read_bytes()[start:].rpartition(b"\n")
            self._read[path] = start + len(lines + newline)
            text = lines.decode(errors="replace")
            said = COMPLAINT.findall(text) if path.suffix == ".log" else text.splitlines()
            for line in said:
                if self.seconds is None and re.search(self._named, line):
                    self.line, self.seconds = line, round(time.monotonic() - self._start, 1)
                if CLOCK.search(line) and "clock" not in self._named:
                    self.wrong = self.wrong or line


def faults(
    only: tuple[str, ...] = NAMES, load: int = 0, n: int = 3, seed: int = 1
) -> Iterator[Row]:
    """Disturb runs across three sites, one fault a run; see what names it and how the run ends.

    ``python -m simulations bench faults`` disturbs processes, disk, clock, certificates, network,
    Flower and members of deployments on this machine, each in one or two phases of a PAX run, a
    few in SecureBoost or while rows are scored between runs; ``--only NAME ...`` chooses faults.
    ``--n`` runs lose a random process at a random moment, of ``--seed``. ``--load`` processes keep
    the machine busy meanwhile.

    A run ends well with the model of an undisturbed one, byte for byte, or with an error whose last
    line names the place or the cause, if it ends with that model once it is resumed. Scores are
    well if they are those of an undisturbed request, to the bit, or refused where ``/health`` has
    said so. Seconds count from the fault: until the command, an answer or a log's warning names it,
    and until the run, resumed or not, has ended, or there are scores again. Prints a JSON line a
    run, with what ``/health`` said, then the table; the exit status is 1 if a run ended in another
    way, if a fault that must be named was not, or if a clock was blamed wrongly. The table says
    which faults were not tried here.
    """
    check_names("only", only, NAMES)
    rng, lines = random.Random(seed), list[Row]()
    chosen = [fault for fault in FAULTS if fault.name in only]
    chosen += [random_kill(rng) for _ in range(n if RANDOM in only else 0)]
    parts = list[tuple[str, list[Fault]]]()
    for method, n_lanes in LANES.items():
        of_method = [fault for fault in chosen if fault.method == method]
        parts += [(method, of_method[first::n_lanes]) for first in range(n_lanes)]
    spawned = get_context("spawn")
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        for _ in range(load):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            ends.callback(busy.wait)
            ends.callback(busy.kill)
        queue = ends.enter_context(spawned.Manager()).Queue()
        pool = ends.enter_context(ProcessPoolExecutor(AT_ONCE, spawned))
        done = [
            pool.submit(lane, queue, folder / f"{number}", *part)
            for number, part in enumerate(parts)
            if part[1]
        ]
        for _ in done:
            for line in iter(queue.get, None):
                said = "; ".join(line.get("health", [line["line"]]))
                lines.append(line | {"says": said[:60]})
                yield line
        for part in done:
            part.result()
    columns = "fault; phase; method; outcome; named by=says; named after=named:.0f; "
    show("seconds since the fault", lines, columns + "ended after=ended:.0f", n_texts=5)
    if not all_good(lines):
        raise SystemExit(1)


def lane(queue: Queue[Row | None], folder: Path, method: str, faults: Iterable[Fault]) -> None:
    """Disturb a deployment of this process; the lines of its runs go into a queue, then None."""
    os.environ["FEDAPP_HOME"] = str(folder / "home")
    try:
        for line in disturbed(folder / method, method, faults):
            queue.put(line)
    finally:
        queue.put(None)


def all_good(lines: Iterable[Row]) -> bool:
    """Whether every run ended well, or its fault could not be tried."""
    return all(line["outcome"] in GOOD or line["outcome"].startswith(NOT_TRIED) for line in lines)


def disturbed(folder: Path, method: str, faults: Iterable[Fault]) -> Iterator[Row]:
    """An undisturbed run, and one with each fault; a line each."""
    scene = Scores(folder) if method == STANDING else Scene(folder, method)
    undisturbed = Fault("none", LIVE if method == STANDING else START, nothing, method=method)
    path = os.environ.get("PYTHONPATH", "")
    with patch.dict(os.environ, {"PYTHONPATH": f"{scene.hooks}{os.pathsep}{path}"}):
        try:
            scene.open()
            for number, fault in enumerate([undisturbed, *faults]):
                line = tried(scene, fault, folder / f"run-{number}")
                yield line
                if not number:
                    scene.seconds, scene.limit = line["ended"], LIMIT + 2 * line["ended"]
                if not all_good([line]):  # the next run shall not suffer from it
                    scene.close()
                    scene.open()
        finally:
            scene.end()


def tried(scene: Scene | Scores, fault: Fault, run_dir: Path) -> Row:
    """Disturb one run, or scores, and return what was seen."""
    scene.output = run_dir.with_suffix(".txt")
    scene.output.touch()
    start, witness = time.monotonic(), None
    seen: Row = {}
    try:
        with ExitStack() as after, ExitStack() as undo:
            fault.given(scene, after)
            scene.enter(fault, run_dir)
            witness, start = Witness(scene, fault.named), time.monotonic()
            with looking(witness.look, LOOK_SECONDS):
                fault.strike(scene, undo)
                seen = scene.outlast(fault, undo, witness.has_seen)
    except (NotTriedError, psutil.NoSuchProcess) as error:
        seen["outcome"] = f"{NOT_TRIED}: {error}"
        scene.wait(scene.limit)
    except (AssertionError, subprocess.TimeoutExpired, httpx.TransportError) as error:
        seen["outcome"] = f"failed: {error}"
    finally:
        scene.leave()
    if witness and fault.must and not witness.has_seen():
        seen["outcome"] += ", but not named"
    if witness and witness.wrong:
        seen["outcome"] += f", but blamed on {witness.wrong!r}"
    line: Row = {"fault": fault.name, "phase": fault.phase, "method": fault.method}
    line |= {**seen, "ended": round(time.monotonic() - start, 1)}
    line |= {"named": witness and witness.seconds, "line": witness.line if witness else ""}
    return line if all_good([line]) else line | {"shown": scene.output.read_text()[-1000:]}
