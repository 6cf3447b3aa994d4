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
from fedapp.messages.secagg import MaskedReply
from fedapp.messages.wire import Content, from_bytes, from_records, to_records
from fedapp.runs.engines import LocalGrid, site_contexts
from fedapp.runs.predict import model_of_text
from fedapp.site.answer import answer
from fedapp.site.settings import site_config
from fedapp.site.store import PART_FILE
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
from strategies.run import train

SECONDS, CPU_SECONDS = 120, 2.0  # of a case: until it is killed; of work
MEMORY = 512 * 2**20
BATCH = 50  # cases of a process
KEPT = 3  # recorded messages of a class

# Cases, run in forked processes

Case = Callable[[int], None]  # a function of the number of the case


def request_case(seeds: list[Seed], seed: str, work: Path, letter: str = "") -> Case:
    """Change a request to a site, or a letter that came with one."""
    unpacked: list[Path | None] = [None]

    def run(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        recorded = seeds[number % len(seeds)]
        if unpacked[0] != recorded.home:
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(recorded.home, work)
            unpacked[0] = recorded.home
        os.environ["FEDAPP_HOME"] = str(work)
        envelope, content = recorded.envelope, from_bytes(recorded.data, "fuzz")

        def change(sender: str, content: Content) -> Content:
            if content.name != letter:
                return content
            return change_message(content, rng)

        config = site_config(recorded.node, {})
        try:
            if not letter:
                envelope, content = change_envelope(envelope, rng), change_message(content, rng)
            with watching_letters(change if letter else None):
                answer(config, recorded.kind, envelope, content)
        except FedappError:
            return
        unpacked[0] = None  # the site's state has changed

    return run


def part_case(seeds: list[Seed], seed: str, work: Path) -> Case:
    """Change a site's part of a model, then request predictions."""

    def run(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        recorded = seeds[number % len(seeds)]
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(recorded.home, work)
        os.environ["FEDAPP_HOME"] = str(work)
        parts = work.glob(f"sites/{recorded.node['name']}/*/{PART_FILE}")
        path = max(parts, key=lambda path: path.stat().st_mtime_ns)  # the last one written
        path.write_text(change_document(path.read_text(), rng))
        config, content = site_config(recorded.node, {}), from_bytes(recorded.data, "fuzz")
        with suppress(FedappError):
            answer(config, recorded.kind, recorded.envelope, content)

    return run


def records_case(seeds: list[Seed], seed: str) -> Case:
    """Change Flower's records before they are decoded."""

    def run(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        recorded = seeds[number % len(seeds)]
        content = from_bytes(recorded.data, "fuzz")
        with suppress(FedappError):
            from_records(change_records(to_records(content, recorded.envelope), rng), "fuzz")

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
    """Change a reply to a strategy that has received all replies before it."""

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
    """Change the text of a model, read it, and predict."""

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
    """Failures of a class of cases."""

    name: str
    cases: int
    failures: list[str] = field(default_factory=list)


def run_cases(name: str, case: Case, numbers: range) -> Outcome:
    outcome, next_one = Outcome(name, len(numbers)), numbers.start
    while next_one < numbers.stop:
        stop = min(next_one + BATCH, numbers.stop)
        done, problems = _batch(case, range(next_one, stop))
        outcome.failures += [f"case {number}: {text}" for number, text in problems]
        next_one = done
    return outcome


def _batch(case: Case, numbers: range) -> tuple[int, list[tuple[int, str]]]:
    """Run cases in one process; return the next number and the problems."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        os.close(reading)
        _child(case, numbers, writing)
    os.close(writing)
    problems, at, buffer = list[tuple[int, str]](), numbers.start, b""
    deadline = time.monotonic() + SECONDS
    while True:
        if not select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]:
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


def _child(case: Case, numbers: range, writing: int) -> None:
    """Run cases, report each, and exit."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The first number is the size of the process in pages.
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = mapped + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number in numbers:
        text, start = "", time.process_time()
        try:
            case(number)
        except BaseException as error:
            lines = traceback.format_exception(error)
            text = f"{type(error).__name__}: {error}\n{''.join(lines[-6:])}"
        seconds = time.process_time() - start
        if seconds > CPU_SECONDS:
            text = text or f"took {seconds:.1f} s of work"
        os.write(writing, (json.dumps([number, text[:4000]]) + "\n").encode())
    os._exit(0)


# All of it


def classes(folder: Path, seed: str, methods: str) -> dict[str, Case]:
    """Cases of every class of message and model."""
    seeds, runs, models = record(folder, methods)
    requests, letters = defaultdict(list), defaultdict(list)
    for message in seeds:
        requests[f"{message.kind} at {message.node['name']}"].append(message)
        for letter in set(message.letters):
            letters[f"{letter} in {message.kind} at {message.node['name']}"].append(
                (letter, message)
            )
    work, cases = folder / "work", dict[str, Case]()
    for name, recorded_messages in requests.items():
        cases[name] = request_case(_some(recorded_messages), f"{seed} {name}", work)
    for name, pairs in letters.items():
        recorded_messages = _some([message for _, message in pairs])
        cases[name] = request_case(recorded_messages, f"{seed} {name}", work, pairs[0][0])
    replies: dict[str, list[tuple[Recorded, tuple[int, int]]]] = defaultdict(list)
    for run, recorded in runs.items():
        for at, data in recorded.replies.items():
            name = from_bytes(data, "fuzz").name
            asked = f" for {recorded.kinds[at[0]]}" if name == MaskedReply.__name__ else ""
            replies[f"{name}{asked} to {run}"].append((recorded, at))
    nodes = site_contexts([{"name": name} for name in NODES])
    for name, places in replies.items():
        cases[name] = reply_case(_some(places), f"{seed} {name}", work, nodes)
    for name, recorded_messages in requests.items():
        if predicting := [
            message for message in recorded_messages if message.envelope.method in PREDICTIONS
        ]:
            cases[f"part.json in {name}"] = part_case(_some(predicting), f"{seed} {name}", work)
    cases["Flower's records"] = records_case(_some(seeds), f"{seed} records")
    for name, text in models.items():
        cases[f"model.json of {name}"] = reader_case(text, f"{seed} {name}")
    return cases


def _some(items: list[Any]) -> list[Any]:
    """At most ``KEPT`` items, including the first and the last."""
    n_chosen = min(KEPT, len(items))
    return [items[(len(items) - 1) * index // max(1, n_chosen - 1)] for index in range(n_chosen)]


def fuzz(
    n_cases: int, seed: str = "0", only: str = "", first: int = 0, methods: str = ""
) -> list[Outcome]:
    """Run ``n_cases`` cases of every class; return the outcomes."""
    with suppress(AttributeError):  # one core: no worker processes that a fork would share
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
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    outcomes = fuzz(options.cases, options.seed, options.only, options.first, options.methods)
    n_failures = sum(len(one.failures) for one in outcomes)
    n_cases = sum(one.cases for one in outcomes)
    print(f"{len(outcomes)} classes, {n_cases} cases, {n_failures} failures")
    sys.exit(bool(n_failures))


if __name__ == "__main__":
    main()
