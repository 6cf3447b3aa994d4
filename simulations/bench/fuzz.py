"""Messages and model files that nobody honest sends, and what sites, strategies and readers do.

::

    python -m simulations.bench.fuzz --cases 10000
    NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(mktemp -d) \\
        python -X dev -m simulations.bench.fuzz --cases 500

Small runs of every method are recorded, with each site's folder before each message. A case takes
one recorded message of a class, changes fields of it (or bytes), and hands it to the site as it was
then; a letter is changed after it was opened, a reply before the strategy reads it, a model's text
before its reader, a party's part of one before it predicts, Flower's records before they are a
message. Each must end in an answer or in an error of ``fedapp.errors``: without a crash
of its process, 2 seconds of work, or 512 MiB beyond those it began with; no message has more than
some MiB. How much work a run asks for (``WORK``) is its own affair and stays as it is.

Cases are drawn by ``--seed``, class and number: ``--only CLASS --first N --cases 1`` repeats one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message

from fedapp.errors import FedappError
from fedapp.messages.secure import MaskedReply
from fedapp.predict import model_of_text
from fedapp.server_app import train
from fedapp.site.answer import answer
from fedapp.site.config import site_config
from fedapp.site.part_file import PART_FILE
from fedapp.wire.codec import from_records, to_records
from fedapp.wire.content import Content
from fedapp.wire.layout import from_bytes
from simulations.bench.changes import (
    change_document,
    change_envelope,
    change_message,
    change_records,
)
from simulations.bench.recorded import (
    NODES,
    PREDICTIONS,
    Recorded,
    Seed,
    no_answer,
    record,
    watching_letters,
)
from simulations.local import LocalGrid, site_contexts

SECONDS, CPU_SECONDS = 120, 2.0  # of a case: until it is ended; of work
MEMORY = 512 * 2**20
BATCH = 50  # cases of a process
KEPT = 3  # recorded messages of a class

# Cases: each a function of its number, run in a process of its own

Case = Callable[[int], None]  # of the number of the case


def request_case(seeds: list[Seed], seed: str, work: Path, letter: str = "") -> Case:
    """A request to a site, or a letter that came with one."""
    unpacked: list[Path | None] = [None]

    def run(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        chosen = seeds[number % len(seeds)]
        if unpacked[0] != chosen.home:
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(chosen.home, work)
            unpacked[0] = chosen.home
        os.environ["FEDAPP_HOME"] = str(work)
        envelope, content = chosen.envelope, from_bytes(chosen.data, "fuzz")

        def change(sender: str, found: Content) -> Content:
            if found.name != letter:
                return found
            return change_message(found, rng)

        config = site_config(chosen.node, {})
        try:
            if not letter:
                envelope, content = change_envelope(envelope, rng), change_message(content, rng)
            with watching_letters(change if letter else None):
                answer(config, chosen.kind, envelope, content)
        except FedappError:
            return
        unpacked[0] = None  # it has gone on

    return run


def part_case(seeds: list[Seed], seed: str, work: Path) -> Case:
    """A site's own part of a model, read where a request asks for predictions."""

    def run(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        chosen = seeds[number % len(seeds)]
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(chosen.home, work)
        os.environ["FEDAPP_HOME"] = str(work)
        path = last_part(work, str(chosen.node["name"]))
        path.write_text(change_document(path.read_text(), rng))
        config, content = site_config(chosen.node, {}), from_bytes(chosen.data, "fuzz")
        with suppress(FedappError):
            answer(config, chosen.kind, chosen.envelope, content)

    return run


def last_part(folder: Path, name: str) -> Path:
    """The part of a model that a site has written last."""
    parts = folder.glob(f"sites/{name}/*/{PART_FILE}")
    return max(parts, key=lambda path: path.stat().st_mtime_ns)


def records_case(seeds: list[Seed], seed: str) -> Case:
    """Flower's records, which are no message yet."""

    def run(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        chosen = seeds[number % len(seeds)]
        content = from_bytes(chosen.data, "fuzz")
        with suppress(FedappError):
            from_records(change_records(to_records(content, chosen.envelope), rng), "fuzz")

    return run


class Finished(Exception):
    """A strategy has taken the changed reply."""


class Replay(LocalGrid):
    """A grid of the recorded replies, one of them changed."""

    def __init__(self, contexts: list[Context], run: Recorded, at: tuple[int, int], rng: Any):
        super().__init__(contexts)
        self._run, self._at, self._rng = run, at, rng
        self._replies: dict[str, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            envelope, _ = from_records(message.content, "fuzz")
            if envelope.step > self._at[0]:
                raise Finished
            at = envelope.step, message.metadata.dst_node_id
            message_id = f"{len(self._replies)}-{at}"
            message.metadata.__dict__["_message_id"] = message_id
            ids.append(message_id)
            if at not in self._run.replies:
                self._replies[message_id] = no_answer(message)
                continue
            content = from_bytes(self._run.replies[at], "fuzz")
            if at == self._at:
                content = change_message(content, self._rng)
            self._replies[message_id] = Message(to_records(content, envelope), reply_to=message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(one) for one in list(message_ids) if one in self._replies]


def reply_case(
    places: list[tuple[Recorded, tuple[int, int]]], seed: str, work: Path, nodes: list[Context]
) -> Case:
    """A reply to a strategy, which has taken all those before it."""

    def run(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        recorded, at = places[number % len(places)]
        shutil.rmtree(work, ignore_errors=True)
        grid = Replay(nodes, recorded, at, rng)
        settings = recorded.settings.model_copy(update={"run_dir": str(work)})
        with suppress(FedappError, Finished):
            train(grid, settings)

    return run


def reader_case(text: str, seed: str) -> Case:
    """The text of a model to its reader, and rows to what it gives."""

    def run(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        changed = change_document(text, rng)
        with suppress(FedappError):
            model, predict = model_of_text(changed)
            predict(model, np.zeros((5, len(model.columns)), dtype=np.float32), None)

    return run


# Processes


@dataclass(slots=True)
class Outcome:
    """What a class of cases came to."""

    name: str
    cases: int
    failures: list[str] = field(default_factory=list)


def run_cases(name: str, case: Case, numbers: range) -> Outcome:
    """Run cases in processes that may die."""
    found, next_one = Outcome(name, len(numbers)), numbers.start
    while next_one < numbers.stop:
        stop = min(next_one + BATCH, numbers.stop)
        done, problem = _batch(case, range(next_one, stop))
        found.failures += [f"case {number}: {text}" for number, text in problem]
        next_one = done
    return found


def _batch(case: Case, numbers: range) -> tuple[int, list[tuple[int, str]]]:
    """Run cases in one process; the number to go on with, and what went wrong."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        os.close(reading)
        _child(case, numbers, writing)
    os.close(writing)
    problems, at, buffer = list[tuple[int, str]](), numbers.start, b""
    deadline = time.monotonic() + SECONDS
    while True:
        ready = _readable(reading, deadline - time.monotonic())
        if not ready:
            os.kill(process, signal.SIGKILL)
            problems.append((at, f"no end within {SECONDS} s"))
            break
        if not (more := os.read(reading, 2**16)):
            break
        buffer += more
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            number, text = json.loads(line)
            at, deadline = number + 1, time.monotonic() + SECONDS
            if text:
                problems.append((number, text))
    os.close(reading)
    _, status = os.waitpid(process, 0)
    if at < numbers.stop and not any(number == at for number, _ in problems):
        problems.append((at, f"its process ended with status {os.waitstatus_to_exitcode(status)}"))
    return max(at, numbers.start) + (at < numbers.stop), problems


def _readable(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], max(0.0, seconds))[0])


def _child(case: Case, numbers: range, writing: int) -> None:
    """Run cases, tell of each, and end."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = _memory() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for number in numbers:
        text, began = "", time.process_time()
        try:
            case(number)
        except BaseException as error:
            lines = traceback.format_exception(error)
            text = f"{type(error).__name__}: {error}\n{''.join(lines[-6:])}"
        took = time.process_time() - began
        if took > CPU_SECONDS:
            text = text or f"took {took:.1f} s of work"
        os.write(writing, (json.dumps([number, text[:4000]]) + "\n").encode())
    os._exit(0)


def _memory() -> int:
    """What this process has mapped, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


# All of it


def classes(folder: Path, seed: str, methods: str) -> dict[str, Case]:
    """Cases of every class of message and model."""
    seeds, runs, models = record(folder, methods)
    requests, letters = defaultdict(list), defaultdict(list)
    for one in seeds:
        requests[f"{one.kind} at {one.node['name']}"].append(one)
        for letter in set(one.letters):
            letters[f"{letter} in {one.kind} at {one.node['name']}"].append((letter, one))
    work, found = folder / "work", dict[str, Case]()
    for name, given in requests.items():
        found[name] = request_case(_some(given), f"{seed} {name}", work)
    for name, pairs in letters.items():
        given = _some([one for _, one in pairs])
        found[name] = request_case(given, f"{seed} {name}", work, pairs[0][0])
    replies: dict[str, list[tuple[Recorded, tuple[int, int]]]] = defaultdict(list)
    for run, recorded in runs.items():
        for at, data in recorded.replies.items():
            name = from_bytes(data, "fuzz").name
            asked = f" for {recorded.kinds[at[0]]}" if name == MaskedReply.__name__ else ""
            replies[f"{name}{asked} to {run}"].append((recorded, at))
    nodes = site_contexts([{"name": name} for name in NODES])
    for name, places in replies.items():
        found[name] = reply_case(_some(places), f"{seed} {name}", work, nodes)
    for name, given in requests.items():
        if predicting := [one for one in given if one.envelope.method in PREDICTIONS]:
            found[f"part.json in {name}"] = part_case(_some(predicting), f"{seed} {name}", work)
    found["Flower's records"] = records_case(_some(seeds), f"{seed} records")
    for name, text in models.items():
        found[f"model.json of {name}"] = reader_case(text, f"{seed} {name}")
    return found


def _some(given: list[Any]) -> list[Any]:
    """A few of many, the first and the last among them."""
    n_kept = min(KEPT, len(given))
    return [given[(len(given) - 1) * place // max(1, n_kept - 1)] for place in range(n_kept)]


def fuzz(
    n_cases: int, seed: str = "0", only: str = "", first: int = 0, methods: str = ""
) -> list[Outcome]:
    """Run so many cases of every class; their failures."""
    with suppress(AttributeError):  # one core: no helpers that a fork would share
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    outcomes = []
    with tempfile.TemporaryDirectory() as place:
        os.environ["FEDAPP_HOME"] = f"{place}/home"
        for name, case in classes(Path(place), seed, methods).items():
            if only in name:
                outcomes.append(run_cases(name, case, range(first, first + n_cases)))
                _tell(outcomes[-1])
    return outcomes


def _tell(outcome: Outcome) -> None:
    print(f"{outcome.name}: {outcome.cases} cases, {len(outcome.failures)} failures")
    kinds = Counter((text.partition(": ")[2]).split("\n")[0] for text in outcome.failures)
    for kind, count in kinds.most_common(8):
        shown = next(text for text in outcome.failures if kind in text)
        print(f"  {count} x {kind}\n    {shown}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="of each class")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--only", default="", help="classes whose name has this text")
    parser.add_argument("--methods", default="", help="separated by commas; by default all")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    outcomes = fuzz(given.cases, given.seed, given.only, given.first, given.methods)
    n_failures = sum(len(one.failures) for one in outcomes)
    n_cases = sum(one.cases for one in outcomes)
    print(f"{len(outcomes)} classes, {n_cases} cases, {n_failures} failures")
    sys.exit(bool(n_failures))


if __name__ == "__main__":
    main()
