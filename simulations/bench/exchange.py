"""What one exchange of a deployment consists of, and how long a training takes by it.

``python -m simulations.bench.exchange`` trains PAX through a SuperLink and three SuperNodes on this
machine, holds the model against that of one process, and follows the messages to one site:

- when a message was sent, picked up and answered: the SuperLink's database and the run's ledger;
- when its handler began and ended: the site's files (``lock`` is opened first, ``state.json``
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
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, pairwise
from pathlib import Path
from statistics import median

import psutil

from fedapp.config import Settings, load_settings
from fedapp.deploy.folders import registered_sites
from fedapp.packages import versions
from simulations.deployment import Deployment, example_nodes, settings_of

SITES, WATCHED = ("bank", "insurer", "shop"), "bank"
ROWS, ROUNDS, REPEATS = 200, 15, 5
LOOK_SECONDS = 0.03
# In the order in which they pass; each lasts until the next one begins.
PARTS = {
    "sent": "until the SuperNode has it",
    "picked": "until a process of the site handles it",
    "began": "handler, state written to the disk",
    "ended": "reply through the SuperNode to the SuperLink",
    "replied": "until the ServerApp has it",
    "received": "until the slowest site has answered, and the next request is sent",
}
# Exchanges of a run of so many parties, at most.
EXCHANGES: Mapping[str, Callable[[Settings, int], int]] = {
    "pax": lambda s, n: 3 + s.num_boost_round * s.max_depth,
    "fedxgbllr": lambda s, n: 6 + s.sections["fedxgbllr"]["rounds"],
    "bagging": lambda s, n: 3 + s.num_boost_round,
    "cyclic": lambda s, n: 3 + s.num_boost_round,
    "fedavg-linear": lambda s, n: 3 + s.sections["fedavg-linear"]["rounds"],
    "secureboost": lambda s, n: 7 + n + s.num_boost_round * _secureboost_round(s.max_depth, n),
    "federated-forest": lambda s, n: 5 + n + 2 * s.sections["federated-forest"]["max-depth"],
    "interactive": lambda s, n: 5 + n + 2 * s.max_depth,
    "one-round": lambda s, n: 5 + n,
    "eini": lambda s, n: 4 + 2 * n,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="trees, an exchange each")
    parser.add_argument("--stock", action="store_true", help="with Flower's own commands")
    given = parser.parse_args()
    # What ends the command ends what it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as name:
        os.environ["FEDAPP_HOME"] = f"{name}/home"
        lines, cpu = measured(Path(name), given.rounds, given.stock)
    if not lines:
        raise SystemExit("no exchange was seen from its beginning to its end")
    parts = {part: median(line[part] for line in lines) for part in PARTS}
    seconds = median(sum(line.values()) for line in lines)
    own, flower = cpu_seconds("import fedapp.client_app, clients.pax"), cpu_seconds("")
    print("| part of an exchange | seconds |\n|---|---|")
    for part, words in PARTS.items():
        print(f"| {words} | {parts[part]:.2f} |")
    print(f"| an exchange | {seconds:.2f} |\n")
    print(f"CPU of all processes in an exchange: {cpu:.2f} s; a process imports Flower in")
    print(f"{flower:.2f} s of CPU, the app in {own - flower:.2f} s beyond that\n")
    counts = exchanges_by_default(2)
    print("| run with the default settings, 2 parties | exchanges | minutes |\n|---|---|---|")
    for method, count in counts.items():
        print(f"| {method} | {count} | {count * seconds / 60:.0f} |")
    found = {
        "exchange": "stock" if given.stock else "deployment",
        "exchanges measured": len(lines),
        "seconds": round(seconds, 2),
        "parts": {part: round(value, 3) for part, value in parts.items()},
        "cpu": {"exchange": cpu, "flower": flower, "app": round(own - flower, 3)},
        "exchanges": counts,
        "versions": versions(("fedapp", "flwr")),
    }
    print(json.dumps(found))


def exchanges_by_default(n_parties: int) -> dict[str, int]:
    """How many exchanges a run of each method takes with the default settings, at most."""
    settings = load_settings({})
    return {method: count(settings, n_parties) for method, count in EXCHANGES.items()}


def _secureboost_round(depth: int, n_parties: int) -> int:
    """Exchanges of a round: with one passive party two of them travel as one."""
    return 2 + 2 * depth if n_parties == 2 else 1 + 3 * depth


def cpu_seconds(code: str, repeats: int = REPEATS) -> float:
    """CPU of a fresh interpreter that imports what Flower's process does, and more; the median."""
    flower = "import flwr.supernode.cli.flwr_clientapp, flwr.clientapp, flwr.app"
    command = [sys.executable, "-c", f"{flower}\n{code}"]
    found = []
    for _ in range(repeats + 1):
        before = _children_seconds()
        subprocess.run(command, check=True)
        found.append(_children_seconds() - before)
    return round(median(found[1:]), 3)


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# One run, watched


def measured(folder: Path, rounds: int, stock: bool) -> tuple[list[dict[str, float]], float]:
    """Seconds of each part of each exchange, and of CPU of all processes in one."""
    deployment = Deployment(folder, example_nodes(folder, SITES, ROWS))
    if stock:
        _use_flowers_commands(folder)
    settings = {"parties": len(SITES), "num-boost-round": rounds, "max-depth": 1, "max-bin": 32}
    local = deployment.locally(folder / "local", settings)
    try:
        deployment.start("coordinator", *SITES)
        deployment.register()
        run = ("run", "pax", "--engine", "federation")
        with watched(deployment) as watch:
            deployment.fedapp(*run, *settings_of({**settings, "run-dir": folder / "across"}))
    finally:
        deployment.close()
    same = (folder / "across" / "model.json").read_bytes()
    assert same == (local.path / "model.json").read_bytes()
    exchanges = json.loads((folder / "across" / "summary.json").read_text())["exchanges"]
    lines = timelines(watch, _waits(folder / "across" / "ledger.jsonl"))
    return lines, round(watch.cpu / exchanges, 2)


def _use_flowers_commands(folder: Path) -> None:
    """Have the scripts start them, and a SuperExec ask as often as the site's own."""
    for script in folder.glob("*/start-*.sh"):
        own = re.sub(r"python -P -m fedapp\.deploy\.", "flower-", script.read_text())
        script.write_text(own)
        with (script.parent / "env.sh").open("a") as file:
            file.write("export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.05\n")


@dataclass(slots=True)
class Watch:
    """What was seen of one site; moments in seconds since the epoch.

    Parameters
    ----------
    messages : when a message was sent and picked up, by its step.
    replies : when the reply was first seen at the SuperLink, by its step.
    locks, states : when the site's files were written.
    cpu : seconds of CPU of all processes.
    """

    messages: dict[int, tuple[float, float]] = field(default_factory=dict)
    replies: dict[int, float] = field(default_factory=dict)
    locks: set[float] = field(default_factory=set)
    states: set[float] = field(default_factory=set)
    cpu: float = 0.0


@contextmanager
def watched(deployment: Deployment) -> Iterator[Watch]:
    """Look at one site again and again while the block runs."""
    watch, ended = Watch(), threading.Event()
    before = _cpu(deployment)
    thread = threading.Thread(target=_look, args=(watch, deployment, ended))
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join()
    watch.cpu = _cpu(deployment) - before


def _cpu(deployment: Deployment) -> float:
    """Seconds of CPU that the scripts' processes have used, those that have ended among them."""
    found = 0.0
    for process in chain.from_iterable(map(deployment.family, ("coordinator", *SITES))):
        with suppress(psutil.NoSuchProcess):
            found += sum(process.cpu_times()[:4])
    return found


def _look(watch: Watch, deployment: Deployment, ended: threading.Event) -> None:
    """Note what there is to be seen."""
    nodes = registered_sites(deployment.coordinator / "flower")
    node = next(int(number) for number, name in nodes.items() if name == WATCHED)
    site = deployment.folder / WATCHED / "home" / "sites" / WATCHED
    database = f"file:{deployment.coordinator / 'superlink.db'}?mode=ro"
    with closing(sqlite3.connect(database, uri=True)) as superlink:
        while not ended.wait(LOOK_SECONDS):
            with suppress(sqlite3.OperationalError):  # locked for a moment
                _look_at_messages(watch, superlink, node)
            watch.locks |= {path.stat().st_mtime for path in site.glob("*/lock")}
            watch.states |= {path.stat().st_mtime for path in site.glob("*/state.json")}


def _look_at_messages(watch: Watch, superlink: sqlite3.Connection, node: int) -> None:
    """Note the messages to the site and its replies; they are deleted soon."""
    now = time.time()
    # The database holds unsigned numbers of nodes as signed ones.
    signed = node - 2**64 if node >= 2**63 else node
    asked = "SELECT group_id, created_at, delivered_at FROM message_ins WHERE dst_node_id = ?"
    for step, sent, picked in superlink.execute(asked, (signed,)):
        if picked:
            watch.messages[int(step)] = (sent, datetime.fromisoformat(picked).timestamp())
    answered = "SELECT group_id FROM message_res WHERE src_node_id = ?"
    for (step,) in superlink.execute(answered, (signed,)):
        watch.replies.setdefault(int(step), now)


def _waits(ledger: Path) -> dict[int, float]:
    """Seconds from the site's request to the server's receipt of the reply, by step."""
    found: dict[int, float] = {}
    for line in map(json.loads, ledger.read_text().splitlines()):
        if line["to"] == WATCHED:
            found[line["step"]] = -line["seconds"]
        elif line["from"] == WATCHED:
            found[line["step"]] += line["seconds"]
    return found


def timelines(watch: Watch, waits: Mapping[int, float]) -> list[dict[str, float]]:
    """Seconds of each part, a line an exchange of which all was seen.

    The first one, in which the app is unpacked, is excluded, and so is the last, which none follows
    that would show its end.
    """
    lines = []
    for step in sorted(watch.messages)[1:-1]:
        moments = [*watch.messages[step]]
        for seen in (watch.locks, watch.states):
            moments += sorted(moment for moment in seen if moment > moments[-1])[:1]
        if step not in watch.replies or step + 1 not in watch.messages:
            continue
        moments += [watch.replies[step], moments[0] + waits[step], watch.messages[step + 1][0]]
        if moments == sorted(moments) and len(moments) == len(PARTS) + 1:
            spans = (later - earlier for earlier, later in pairwise(moments))
            lines.append(dict(zip(PARTS, spans, strict=True)))
    return lines


if __name__ == "__main__":
    main()
