"""What an exchange costs: messages between real processes."""

from __future__ import annotations

import os
import re
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, pairwise
from pathlib import Path
from statistics import median

import psutil

from fedapp.run_folder import RunFolder
from simulations.deployment import Deployment, site_tables
from simulations.study import Row, looking, random_table, show
from strategies.handshake import registered_sites

SITES, WATCHED = ("bank", "insurer", "shop"), "bank"
ROWS, ROUNDS = 200, 30
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


def exchange(rounds: int = ROUNDS, stock: bool = False) -> Row:
    """What one exchange of a deployment consists of.

    ``python -m simulations bench exchange`` trains PAX through a SuperLink and three SuperNodes on
    this machine, an exchange a tree, compares the model with that of one process, and follows the
    messages to one site:

    - when a message was sent, picked up and answered: the SuperLink's database and the run's
      ledger;
    - when its handler started and ended: the site's files (``lock`` is opened first, ``state``
      written last).

    With ``--stock`` SuperLink, SuperNodes and SuperExecs are Flower's own commands.
    """
    with tempfile.TemporaryDirectory() as name:
        os.environ["FEDAPP_HOME"] = f"{name}/home"
        watch, lines = measure_exchange(Path(name), rounds, stock)
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
    shown = [{"part": words, "seconds": parts[part]} for part, words in PARTS.items()]
    shown.append({"part": "an exchange", "seconds": seconds})
    show("parts of an exchange", shown, "part; seconds:.2f")
    shown = [{"program": name, "used": used} for name, used in cpu.most_common()]
    shown.append({"program": "all", "used": cpu.total()})
    show("programs, all their processes", shown, "program; CPU seconds an exchange=used:.3f")
    return {
        "exchange": "stock" if stock else "deployment",
        "exchanges measured": {"whole": len(exchanges), "parts": len(lines)},
        "seconds": round(seconds, 2),
        "parts": {part: round(value, 3) for part, value in parts.items()},
        "cpu": {program: round(used, 3) for program, used in cpu.items()},
    }


# One run, watched


def measure_exchange(
    folder: Path, rounds: int, stock: bool
) -> tuple[Watch, list[dict[str, float]]]:
    """Watch one run; also the seconds of each part of the exchanges that were seen completely."""
    table = random_table(len(SITES) * ROWS, 13)
    deployment = Deployment(folder, site_tables(folder, table, SITES, "label", by_columns=False))
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
    models = [(run_folder.path / "model.json").read_bytes() for run_folder in (run, local)]
    assert models[0] == models[1], "the model must be that of the local engine"
    waits: dict[int, float] = {}  # seconds from a request to the receipt of its reply, by step
    for line in RunFolder(run.path).ledger:
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
        watch.states |= {path.stat().st_mtime for path in site.glob("*/state")}

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
