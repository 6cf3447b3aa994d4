"""Messages and model files that nobody honest sends, and what sites, strategies and readers do.

``python -m simulations bench fuzz`` changes recorded runs of every method; see ``fuzz_main``.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from fedapp.client_app import SiteApp
from fedapp.errors import FedappError, StoppedError
from fedapp.home import home
from fedapp.messages.fields import Array, all_methods
from fedapp.messages.secagg import LeftRequest, MaskedReply
from fedapp.messages.wire import Content, Envelope, from_bytes, from_records, to_bytes, to_records
from fedapp.runs.local import LocalGrid, site_contexts
from fedapp.runs.predict import model_of_text
from fedapp.settings import Settings, load_settings
from fedapp.site import answer as answer_module
from fedapp.site.answer import answer
from fedapp.site.mail import Mail
from fedapp.site.settings import site_config
from fedapp.site.store import PART_FILE
from fedapp.site.trust import IDENTITY
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
                _print_outcome(outcomes[-1])
    return outcomes


def _print_outcome(outcome: Outcome) -> None:
    print(f"{outcome.name}: {outcome.cases} cases, {len(outcome.failures)} failures")
    kinds = Counter((text.partition(": ")[2]).split("\n")[0] for text in outcome.failures)
    for kind, count in kinds.most_common(8):
        shown = next(text for text in outcome.failures if kind in text)
        print(f"  {count} x {kind}\n    {shown}")
    sys.stdout.flush()


def fuzz_main() -> None:
    """Messages and model files that nobody honest sends, and what sites, strategies and readers do.

    ::

        python -m simulations bench fuzz --cases 10000
        NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(mktemp -d) \
            python -X dev -m simulations bench fuzz --cases 500

    Small runs of every method are recorded, with each site's folder before each message. A case
    takes one recorded message of a class, changes fields of it (or bytes), and hands it to the site
    as it was then; a letter is changed after it was opened, a reply before the strategy reads it, a
    model's text before its reader, a party's part of one before it predicts, Flower's records
    before they are a message. Each must end in an answer or in an error of ``fedapp.errors``:
    without a crash of its process, 2 seconds of work, or 512 MiB beyond those it began with; no
    message has more than some MiB. How much work a run asks for (``WORK``) is its own affair and
    stays as it is.

    Cases are drawn by ``--seed``, class and number: ``--only CLASS --first N --cases 1`` repeats
    one.
    """
    parser = argparse.ArgumentParser(description="Changed messages and models.")
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


# Small runs of every method, recorded

N_ROWS = 60
NODES = ("bank", "shop", "mill", "port")  # the first of them, as many as a run has
PARTIES = 2  # by default
VERTICAL = {"secureboost.key-bits": 512, "secureboost.insecure-small-key": True}
FOREST = {
    "federated-forest.trees": 3,
    "federated-forest.max-depth": 3,
    "federated-forest.key-bits": 256,
    "federated-forest.insecure-small-key": True,
}
SECURE = {"strategy": "pax", "pax.aggregation": "secure", "parties": 3}
PRIVATE = {"privacy.epsilon": 1000.0}
LINEAR = {"fedavg-linear.rounds": 2, "fedavg-linear.local-epochs": 1}
SHARES = {"parties": 4, "min-parties": 3}
EINI = {"eini.key-bits": 512, "eini.insecure-small-key": True, "eini.unguarded": True}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "pax": {},
    "pax classes": {"strategy": "pax", "objective": "multi:softprob"},
    "bagging": {},
    "cyclic": {},
    "pax secure": SECURE,
    "pax shares": {**SECURE, **SHARES},
    "pax private": {**SECURE, **PRIVATE},
    "fedavg-linear": LINEAR,
    "fedxgbllr": {"fedxgbllr.trees": 6, "fedxgbllr.rounds": 1, "fedxgbllr.epochs": 1},
    "secureboost": VERTICAL,
    "federated-forest": FOREST,
    "federated-forest paillier": {**FOREST, "federated-forest.labels": "paillier"},
}
# Step from which the last party of a run no longer answers: the first sum of the second round.
LOST_AT = {"pax shares": 17}
PREDICTIONS = {"interactive": {}, "one-round": {}, "eini": EINI}


@dataclass(frozen=True, slots=True)
class Seed:
    """A recorded message."""

    kind: str
    node: Mapping[str, Any]  # the site's node config
    envelope: Envelope
    data: bytes
    home: Path  # copy of the site's folder before the message
    letters: tuple[str, ...]  # classes of the letters that came with it


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run: its settings, the request at each step, and the replies by step and node."""

    settings: Settings
    kinds: Mapping[int, str]
    replies: Mapping[tuple[int, int], bytes]


class Recorder(SiteApp):
    """Sites that record every message, with the site's folder before it.

    The site ``lost`` stops answering at step ``lost_at``; 0: never.
    """

    def __init__(self, folder: Path, lost: str = "", lost_at: int = 0) -> None:
        super().__init__()
        self.folder, self.seeds, self.replies = folder, list[Seed](), dict[tuple[int, int], bytes]()
        self.kinds = dict[int, str]()
        self._lost, self._lost_at = lost, lost_at
        self._lock = threading.Lock()

    def __call__(self, message: Message, context: Context) -> Message:
        name = str(context.node_config["name"])
        envelope, content = from_records(message.content, name)
        if name == self._lost and 0 < self._lost_at <= envelope.step:
            return no_answer(message)
        with self._lock:  # one site at a time, so that other sites' folders do not change
            here = self.folder / f"{len(self.seeds)}"
            _copy_home(name, here)
            with watching_letters() as seen:
                reply = super().__call__(message, context)
            kind, data = message.metadata.message_type, to_bytes(content)
            node = dict(context.node_config)
            self.seeds.append(Seed(kind, node, envelope, data, here, tuple(seen)))
            self.kinds[envelope.step] = kind
        if not reply.has_error():
            reply_bytes = to_bytes(from_records(reply.content, name)[1])
            self.replies[envelope.step, context.node_id] = reply_bytes
        return reply


def no_answer(message: Message) -> Message:
    """The reply of a lost party."""
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "lost"), reply_to=message)


def _copy_home(name: str, to: Path) -> None:
    """Copy a site's folder, and of the other sites on this machine only the keys."""
    (to / "sites").mkdir(parents=True)
    for folder in home().glob("sites/*"):
        if folder.name == name:
            shutil.copytree(folder, to / "sites" / name)
        elif (folder / IDENTITY).exists():
            (to / "sites" / folder.name).mkdir()
            shutil.copy(folder / IDENTITY, to / "sites" / folder.name / IDENTITY)


@contextmanager
def watching_letters(
    change: Callable[[str, Content], Content] | None = None,
) -> Iterator[list[str]]:
    """Change letters after they were opened; yield the classes of the letters."""
    honest, seen = vars(answer_module)["open_mail"], list[str]()

    def opened(*arguments: Any) -> Mail:
        mail = honest(*arguments)
        letters = mail._letters
        seen.extend(letter.name for _, letter in letters)
        changed = [(sender, change(sender, one) if change else one) for sender, one in letters]
        return Mail(mail._name, changed)

    with patch.object(answer_module, "open_mail", opened):
        yield seen


def record(
    folder: Path, methods: str = ""
) -> tuple[list[Seed], dict[str, Recorded], dict[str, str]]:
    """Run all methods on small tables; messages, replies by run, and texts of models by method."""
    seeds, runs, models = list[Seed](), dict[str, Recorded](), dict[str, str]()
    for name, overrides in METHODS.items():
        method = str(overrides.get("strategy", name.split()[0]))
        if methods and name not in methods.split(","):
            continue
        settings = {"strategy": method, "parties": PARTIES, "num-boost-round": 2, "max-depth": 3}
        config = {**settings, "max-bin": 16, "explain": "", **overrides}
        names = NODES[: config["parties"]]
        nodes = _write_tables(folder / name, method, names, "classes" in name)
        if "min-parties" in config:
            nodes = [{**node, "least-parties": 2} for node in nodes]
        contexts = site_contexts(nodes)
        predictions = PREDICTIONS if method in ("secureboost", "federated-forest") else {}
        if "paillier" in name or (method == "secureboost"):
            predictions = {
                key: settings_of_way
                for key, settings_of_way in predictions.items()
                if key != "one-round"
            }
        for run, more in {name: config, **predictions}.items():
            if run != name:
                model = json.loads((folder / name / "run" / "summary.json").read_text())["model_id"]
                base = {"strategy": run, "parties": PARTIES, "model": model, "explain": "r3,r9"}
                more, run = {**base, **more}, f"{run} after {name}"
            app = Recorder(folder / name / f"homes {run}", names[-1], LOST_AT.get(run, 0))
            loaded = load_settings(
                {**more, "run-dir": str(folder / name / run.replace(name, "run"))}
            )
            with closing(LocalGrid(contexts, app)) as grid:
                trained = train(grid, loaded)
            if run in LOST_AT:
                seeds += _record_resumed(folder / name, contexts, loaded)
            seeds += app.seeds
            runs[run] = Recorded(loaded, app.kinds, app.replies)
            if run == name:
                models[name] = (trained.path / "model.json").read_text()
    return seeds, runs, models


def _record_resumed(folder: Path, contexts: list[Context], settings: Settings) -> list[Seed]:
    """Requests to single parties when a masked run that tolerates lost parties is resumed."""
    app = Recorder(folder / "homes resumed")
    with closing(LocalGrid(contexts, app)) as grid:
        stopped = settings.model_copy(update={"run_dir": str(folder / "resumed")})
        with suppress(StoppedError):
            train(grid, stopped, on_round=lambda _: False)
        train(grid, load_settings({"resume": stopped.run_dir}))
    return [seed for seed in app.seeds if seed.kind == LeftRequest.kind]


def _write_tables(
    folder: Path, method: str, names: Sequence[str], has_classes: bool
) -> list[dict[str, Any]]:
    (folder / "tables").mkdir(parents=True)
    is_vertical, nodes = method in ("secureboost", "federated-forest"), []
    for index, name in enumerate(names):
        rng = np.random.default_rng(index)
        rows = rng.normal(size=(N_ROWS, 3)).round(2)
        labels = rng.integers(0, 3 if has_classes else 2, N_ROWS)
        has_label = not (is_vertical and index)
        header = ["id", *(f"{name if is_vertical else 'c'}{c}" for c in range(3))]
        lines = [",".join([*header, "y"] if has_label else header)]
        for number, row in enumerate(rows):
            values = [f"r{number}", *map(str, row), *([str(labels[number])] if has_label else [])]
            lines.append(",".join(values))
        path = folder / "tables" / f"{name}.csv"
        path.write_text("\n".join(lines) + "\n")
        node = {"name": name, "data": str(path), "id": "id", "allow-insecure": "true"}
        policy = {"allow": ",".join(all_methods()), "runs-per-day": 10**9}
        nodes.append({**node, **policy, **({"label": "y"} if has_label else {})})
    return nodes


# Changes that nobody honest makes

# Fields that set how much work a run is: any value is honest.
WORK = frozenset({"epochs", "n_rounds", "trees", "key_bits", "channels", "round_id", "max_depth"})
MOST_ROWS, MOST_CELLS = 50_000, 2**21  # of a changed array
NESTED = "nested"  # stands for lists in lists


def change_content(content: Content, rng: random.Random) -> Content:
    """Change one to three fields, or remove or add one."""
    scalars, arrays = dict(content.scalars), dict(content.arrays)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        names = sorted((scalars.keys() | arrays.keys()) - WORK)
        if not names:
            break
        name = rng.choice(names)
        if rng.random() < 0.02:
            scalars.pop(name, arrays.pop(name, None))
        elif name in arrays:
            arrays[name] = change_array(arrays[name], rng)
        elif name in scalars:
            scalars[name] = change_scalar(scalars[name], rng)
    if rng.random() < 0.02:
        scalars["more"] = 1
    return Content(content.name, scalars, arrays)


def change_scalar(value: Any, rng: random.Random) -> Any:
    if rng.random() < 0.05:
        return rng.choice([True, 0, 1.5, "", ["a"], "x" * 2000])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        edges = [0, 1, -1, 2, value + 1, value - 1, 2**31, 2**63 - 1, -(2**63), 64, 1000, 65535]
        return max(-(2**63), min(2**63 - 1, rng.choice(edges)))
    if isinstance(value, float):
        return rng.choice([0.0, -1.0, 1.0, 0.5, 1e-300, 1e300, -1e300, value * 2, 1e38])
    if isinstance(value, str):
        return rng.choice(["", value + "x", value[:-1], "\x1b[2J", "a" * 64, "\ud800", "../x", "é"])
    texts = list(value)
    return rng.choice([[], texts[:-1], texts + texts, texts[::-1], ["x"] * 1001, [*texts, "new"]])


def change_array(array: Array, rng: random.Random) -> Array:
    """Change values, length, shape or type."""
    draw, copy = rng.random(), np.array(array)
    max_rows = min(MOST_ROWS, MOST_CELLS // max(1, math.prod(copy.shape[1:])))
    if draw < 0.55 and copy.size:
        n_changed = rng.choice((1, 1, 2, copy.size))
        indices = [rng.randrange(copy.size) for _ in range(min(n_changed, 1000))]
        for index in indices:
            copy.flat[index] = _edge(copy.dtype, rng)
        return copy
    if draw < 0.85 and copy.ndim:
        rows = list(range(len(copy)))
        lengths = [rows[:-1], rows[:1], [], rows + rows[-1:], rows[::-1], rows * 3]
        lengths.append((rows * (1 + max_rows // max(len(rows), 1)))[:max_rows])
        changed = copy[np.array(rng.choice(lengths), dtype=np.int64)]
        return np.ascontiguousarray(changed)
    if draw < 0.93:
        size = min(max_rows, rng.choice((0, 1, 7, 5000)))
        shape = (size, *copy.shape[1:]) if copy.ndim else ()
        return np.full(shape, _edge(copy.dtype, rng), dtype=copy.dtype)
    if draw < 0.97:
        return copy.reshape(-1, 1)
    return copy.astype(rng.choice(["uint8", "int32", "int64", "float32", "float64"]))


def _edge(dtype: np.dtype[Any], rng: random.Random) -> Any:
    if dtype.kind == "f":
        largest = np.finfo(dtype).max
        return rng.choice([0, -1, 1, np.nan, np.inf, -np.inf, largest, -largest, 1e-30, 0.5])
    info = np.iinfo(dtype)
    edges = [0, 1, 2, 3, 7, 31, 64, 255, 1000, 65535, 65536, 2**31 - 1, info.max, info.min, -1]
    return max(info.min, min(info.max, rng.choice(edges)))


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Change, cut out or duplicate some bytes, or cut off the end."""
    copy = bytearray(data)
    for _ in range(rng.choice((1, 2, 8))):
        position = rng.randrange(len(copy)) if copy else 0
        draw = rng.random()
        if draw < 0.6 and copy:
            copy[position] = rng.choice(
                [0, 255, 48, 57, 34, copy[position] ^ (1 << rng.randrange(8))]
            )
        elif draw < 0.75:
            del copy[position : position + rng.choice((1, 8, 100))]
        elif draw < 0.9:
            copy[position:position] = copy[position : position + rng.choice((1, 8, 100))]
        else:
            del copy[position:]
    return bytes(copy)


def change_message(content: Content, rng: random.Random) -> Content:
    """A changed message as it arrives; raises the errors of its parser."""
    if rng.random() < 0.2:
        return from_bytes(change_bytes(to_bytes(content), rng), "fuzz")
    changed = change_content(content, rng)
    with suppress(FedappError):  # an invalid message that cannot be written stays as it is
        return from_bytes(to_bytes(changed), "fuzz")
    return changed


def change_records(records: RecordDict, rng: random.Random) -> RecordDict:
    """Change the envelope or an array, or remove or add a record."""
    for _ in range(rng.choice((1, 1, 2))):
        configs, arrays = list(records.config_records), list(records.array_records)
        draw = rng.random()
        if draw < 0.6 and configs:
            head = records.config_records[rng.choice(configs)]
            name = rng.choice(list(head)) if head else "new"
            values: list[Any] = [0, -1, 2**63 - 1, 1.5, True, "", "x" * 2000]
            values += [b"", b"\xff" * 9, [1, 2], ["a"]]
            value = head.get(name)
            if isinstance(value, bytes) and rng.random() < 0.8:
                head[name] = change_bytes(value, rng)
            else:
                head[name] = rng.choice(values)
        elif draw < 0.8:
            shape = rng.choice([(), (0,), (3,), (-1,), (2**40,), (1, 3)])
            dtype = rng.choice(["|u1", "<f8", "object", ""])
            stype = rng.choice(["fedapp.raw", "numpy"])
            array = FlowerArray(dtype=dtype, shape=shape, stype=stype, data=b"abc")
            name = rng.choice(["content", "envelope", "more"])
            records[name] = ArrayRecord({rng.choice(["content", "more"]): array})
        elif configs + arrays:
            del records[rng.choice(configs + arrays)]
    return records


def change_envelope(envelope: Envelope, rng: random.Random) -> Envelope:
    """Change one field, in 5 % of the calls."""
    if rng.random() > 0.05:
        return envelope
    name = rng.choice(["step", "checkpoint", "attempt", "gap", "method", "model_id"])
    value = rng.choice([0, 1, 2, envelope.step + 1, 2**62])
    other: dict[str, Any] = {name: {"method": "pax", "model_id": "0" * 16}.get(name, value)}
    return replace(envelope, **other)


def change_document(text: str, rng: random.Random) -> str:
    """Change some values of a JSON document."""
    if rng.random() < 0.3:
        return change_bytes(text.encode(), rng).decode(errors="replace")
    document = json.loads(text)
    for _ in range(rng.choice((1, 1, 2, 3))):
        node: Any = document
        while isinstance(node, dict | list) and node:
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            if not isinstance(node[key], dict | list) or rng.random() < 0.15:
                node[key] = _other(node[key], rng)
                break
            node = node[key]
    return json.dumps(document).replace(f'"{NESTED}"', "[" * 5000 + "]" * 5000)


def _other(value: Any, rng: random.Random) -> Any:
    edges: list[Any] = [None, True, "", "x", -1, 0, 1, 2, 10**6, 2**31, 2**63, 10**30, 1e300]
    edges += [NESTED, {}, []]
    edges += [float("nan"), float("inf"), -0.5, [""] * 10_000, value]
    if isinstance(value, list):
        edges += [value[:-1], value + value, value[::-1]]
    return rng.choice(edges)
