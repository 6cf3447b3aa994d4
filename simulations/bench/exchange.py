"""What one exchange of a deployment consists of, and how long a training takes by it.

``python -m simulations.bench.exchange`` trains PAX through a SuperLink and three SuperNodes on this
machine, compares the model with that of one process, and follows the messages to one site:

- when a message was sent, picked up and answered: the SuperLink's database and the run's ledger;
- when its handler started and ended: the site's files (``lock`` is opened first, ``state.json``
  written last).

Prints a table of the parts, one of the trainings, and a JSON line with both. With ``--stock``
SuperLink, SuperNodes and SuperExecs are Flower's own commands.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, pairwise
from pathlib import Path
from statistics import median

import psutil

from fedapp.settings import Settings, load_settings
from simulations.bench import looking, tell
from simulations.deployment import Deployment, example_nodes
from strategies.handshake import registered_sites

SITES, WATCHED = ("bank", "insurer", "shop"), "bank"
ROWS, ROUNDS, REPEATS = 200, 30, 5
LOOK_SECONDS = 0.02
PROGRAM = re.compile(r"fedapp\.deploy\.|flower-|flwr-")
# In time order; each part lasts until the next one starts.
PARTS = {
    "sent": "until the SuperNode has it",
    "picked": "until a process of the site handles it",
    "began": "handler, state written to the disk",
    "ended": "reply through the SuperNode and the SuperLink to the ServerApp",
    "received": "until the slowest site has answered, and the next request is sent",
}
# At most, of a run with settings ``s`` and ``n`` parties. In SecureBoost with one passive party,
# two exchanges of a level travel as one.
EXCHANGES: Mapping[str, Callable[[Settings, int], int]] = {
    "pax": lambda s, n: 4 + s.num_boost_round * s.max_depth,
    "fedxgbllr": lambda s, n: 7 + s.sections["fedxgbllr"]["rounds"],
    "bagging": lambda s, n: 4 + s.num_boost_round,
    "cyclic": lambda s, n: 4 + s.num_boost_round,
    "fedavg-linear": lambda s, n: 4 + s.sections["fedavg-linear"]["rounds"],
    "secureboost": lambda s, n: (
        8 + n + s.num_boost_round * (2 + 2 * s.max_depth if n == 2 else 1 + 3 * s.max_depth)
    ),
    "federated-forest": lambda s, n: 6 + n + 2 * s.sections["federated-forest"]["max-depth"],
    "interactive": lambda s, n: 6 + n + 2 * s.max_depth,
    "one-round": lambda s, n: 6 + n,
    "eini": lambda s, n: 5 + 2 * n,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="trees, an exchange each")
    parser.add_argument("--stock", action="store_true", help="with Flower's own commands")
    options = parser.parse_args()
    # What ends the command ends what it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as name:
        os.environ["FEDAPP_HOME"] = f"{name}/home"
        watch, lines = measured(Path(name), options.rounds, options.stock)
    if not lines:
        raise SystemExit("no exchange was seen from its beginning to its end")
    parts = {part: median(line[part] for line in lines) for part in PARTS}
    exchanges = [
        watch.messages[step + 1][0] - watch.messages[step][0]
        for step in sorted(watch.messages)[2:]  # the first two are greeting and hello
        if step + 1 in watch.messages
    ]
    seconds = median(exchanges)
    # CPU seconds of a step by program, without the first, before which sites import the app
    first, *_, last = sorted(step for step in watch.cpu if step > 1)
    cpu = watch.cpu[last].copy()
    cpu.subtract(watch.cpu[first])
    cpu = Counter({program: used / (last - first) for program, used in cpu.items()})
    app, flower = cpu_seconds("import fedapp.client_app, clients.pax"), cpu_seconds("")
    print("| part of an exchange | seconds |\n|---|---|")
    for part, words in PARTS.items():
        print(f"| {words} | {parts[part]:.2f} |")
    print(f"| an exchange | {seconds:.2f} |\n")
    print("| program, all its processes | CPU seconds an exchange |\n|---|---|")
    for program, seconds_used in cpu.most_common():
        print(f"| {program} | {seconds_used:.3f} |")
    print(f"| all | {cpu.total():.3f} |\n")
    print(f"A process imports Flower in {flower:.2f} s of CPU, the app in {app - flower:.2f} s")
    print("beyond that\n")
    settings = load_settings({"num-boost-round": 50})
    counts = {method: count(settings, 2) for method, count in EXCHANGES.items()}
    print("| run with the default settings, 2 parties | exchanges | minutes |\n|---|---|---|")
    for method, count in counts.items():
        print(f"| {method} | {count} | {count * seconds / 60:.0f} |")
    record = {
        "exchange": "stock" if options.stock else "deployment",
        "exchanges measured": {"whole": len(exchanges), "parts": len(lines)},
        "seconds": round(seconds, 2),
        "parts": {part: round(value, 3) for part, value in parts.items()},
        "cpu": {
            "exchange": {program: round(seconds_used, 3) for program, seconds_used in cpu.items()},
            "flower": flower,
            "app": round(app - flower, 3),
        },
        "exchanges": counts,
    }
    tell("exchange", ("fedapp", "flwr"), **record)


def cpu_seconds(code: str, repeats: int = REPEATS) -> float:
    """Median CPU seconds of a new interpreter with Flower's imports that runs ``code``."""
    flower = "import flwr.supernode.cli.flwr_clientapp, flwr.clientapp, flwr.app"
    command = [sys.executable, "-c", f"{flower}\n{code}"]
    seconds = []
    for _ in range(repeats + 1):
        before = _children_seconds()
        subprocess.run(command, check=True)
        seconds.append(_children_seconds() - before)
    return round(median(seconds[1:]), 3)


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# One run, watched


def measured(folder: Path, rounds: int, stock: bool) -> tuple[Watch, list[dict[str, float]]]:
    """Watch one run; also the seconds of each part of the exchanges that were seen completely."""
    deployment = Deployment(folder, example_nodes(folder, SITES, ROWS))
    if stock:  # the scripts start Flower's commands, and a SuperExec polls as often as the site's
        for script in folder.glob("*/start-*.sh"):
            text = re.sub(r"python -P -m fedapp\.deploy\.", "flower-", script.read_text())
            script.write_text(text)
            with (script.parent / "env.sh").open("a") as file:
                file.write("export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.05\n")
    settings = {"strategy": "pax", "parties": len(SITES), "num-boost-round": rounds}
    settings |= {"max-depth": 1, "max-bin": 32}
    local = deployment.locally(folder / "local", settings)
    with deployment.running(), watched(deployment) as watch:
        run = deployment.train(folder / "across", settings)
    models = [(each.path / "model.json").read_bytes() for each in (run, local)]
    assert models[0] == models[1], "the model must be that of the local engine"
    waits: dict[int, float] = {}  # seconds from a request to the receipt of its reply, by step
    for line in map(json.loads, run.ledger.read_text().splitlines()):
        if line["to"] == WATCHED:
            waits[line["step"]] = -line["seconds"]
        elif line["from"] == WATCHED:
            waits[line["step"]] += line["seconds"]
    return watch, timelines(watch, waits)


@dataclass(slots=True)
class Watch:
    """What was seen of one site; times in seconds since the epoch."""

    # When a message was sent and picked up, by step
    messages: dict[int, tuple[float, float]] = field(default_factory=dict)
    locks: set[float] = field(default_factory=set)  # when the site's files were written
    states: set[float] = field(default_factory=set)
    # CPU seconds that each program had used when a step was first seen, by step
    cpu: dict[int, Counter[str]] = field(default_factory=dict)


@contextmanager
def watched(deployment: Deployment) -> Iterator[Watch]:
    """Poll one site while the block runs."""
    watch = Watch()
    nodes = registered_sites(deployment.coordinator / "flower")
    node = next(int(number) for number, name in nodes.items() if name == WATCHED)
    site = deployment.folder / WATCHED / "home" / "sites" / WATCHED
    database = f"file:{deployment.coordinator / 'superlink.db'}?mode=ro"
    # The database numbers nodes by signed integers.
    signed = node - 2**64 if node >= 2**63 else node
    query = "SELECT group_id, created_at, delivered_at FROM message_ins WHERE dst_node_id = ?"
    # Only the polling thread uses the connection.
    connection = sqlite3.connect(database, uri=True, check_same_thread=False)

    def look() -> None:
        # Messages are deleted soon after they were delivered.
        with suppress(sqlite3.OperationalError):  # locked for a moment
            for step, sent, picked in superlink.execute(query, (signed,)):
                if picked:
                    delivered = datetime.fromisoformat(picked).timestamp()
                    watch.messages[int(step)] = (sent, delivered)
        if (last := max(watch.messages, default=0)) not in watch.cpu:
            watch.cpu[last] = cpu_used(deployment)
        watch.locks |= {path.stat().st_mtime for path in site.glob("*/lock")}
        watch.states |= {path.stat().st_mtime for path in site.glob("*/state.json")}

    with closing(connection) as superlink, looking(look, LOOK_SECONDS):
        yield watch


def cpu_used(deployment: Deployment) -> Counter[str]:
    """CPU seconds by program, of all sites' processes and of their children that have ended."""
    seconds = Counter[str]()
    for process in chain.from_iterable(map(deployment.family, ("coordinator", *SITES))):
        with suppress(psutil.NoSuchProcess):
            words = (Path(word).name for word in process.cmdline()[:4])
            program = next((word for word in words if PROGRAM.match(word)), "other")
            seconds[program] += sum(process.cpu_times()[:4])
    return seconds


def timelines(watch: Watch, waits: Mapping[int, float]) -> list[dict[str, float]]:
    """Seconds of each part, a line for each exchange that was seen completely.

    Excludes the first exchange, in which the app is unpacked, and the last, whose end is not seen.
    """
    lines = []
    for step in sorted(watch.messages)[1:-1]:
        moments = [*watch.messages[step]]
        for seen in (watch.locks, watch.states):
            moments += sorted(moment for moment in seen if moment > moments[-1])[:1]
        if step not in waits or step + 1 not in watch.messages:
            continue
        moments += [moments[0] + waits[step], watch.messages[step + 1][0]]
        if moments == sorted(moments) and len(moments) == len(PARTS) + 1:
            spans = (later - earlier for earlier, later in pairwise(moments))
            lines.append(dict(zip(PARTS, spans, strict=True)))
    return lines


if __name__ == "__main__":
    main()
