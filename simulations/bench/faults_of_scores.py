"""Standing scores that faults disturb, and the rows of the table of faults that do so."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import psutil
import pyarrow as pa
import pyarrow.parquet

from fedapp.home import home
from simulations.bench.faults_of_runs import (
    LIMIT,
    LOOK_SECONDS,
    PEER,
    SITE,
    SITES,
    SMALL,
    Fault,
    Strike,
    scripted,
    table_with_ids,
    wrong_clock,
)
from simulations.bench.sites import ALLOW, Sites
from simulations.deployment import START_SECONDS, STOP_SECONDS, site_tables
from simulations.study import Row

STANDING = "standing"  # scores of rows, instead of runs
N_ASKED, DEADLINE = 8, 2.0  # requests during a fault, and seconds that their client waits
PAGE_LINES = 16  # of a log, that fit into a page
LIVE, AHEAD = "live", "sent ahead"  # cells of standing scores
SCORES = "same scores"
FULL_LOG = (
    "cp -a {home} {hooks}/log; mount -t tmpfs -o size=8m,mode=700 tmpfs {home}; "
    "cp -a {hooks}/log/. {home}; rm -r {hooks}/log; cat /dev/zero > {home}/filler || true"
)


class Scores(Sites):
    """Three sites whose processes score rows between runs, as a caller sees them."""

    output: Path  # what ``/health`` and the scores' requests were answered
    running: dict[str, psutil.Process]

    def __init__(self, folder: Path) -> None:
        self.hooks = folder / "hooks"  # on the path of all processes
        self.hooks.mkdir(parents=True)
        table, label = table_with_ids()
        nodes = site_tables(folder, table, SITES, label, by_columns=True)
        tables = {name: pa.parquet.read_table(node["data"]) for name, node in nodes.items()}
        super().__init__(folder / "sites", tables, label, **{"standing-nightly": "all"})
        self.activate(self.train(**{name: SMALL[name] for name in SMALL if name != "parties"}))
        self.ids = table["id"].to_pylist()[::40]
        self.seconds = self.limit = LIMIT
        self._started = ExitStack()

    def open(self) -> None:
        """Start everything."""
        self.running = self._started.enter_context(self.standing())
        deadline, status = time.monotonic() + START_SECONDS, 0
        while status != 200:
            status, self.rows = self.score()
            assert time.monotonic() < deadline, self.rows

    def close(self) -> None:
        """End everything."""
        self._started.close()

    end = close

    def restart(self, name: str) -> None:
        """Stop a site's process and start it."""
        self.running[name].terminate()
        self.running[name].wait(STOP_SECONDS)
        self.running[name] = psutil.Process(self.start(name).pid)

    def home(self, name: str) -> Path:
        """Folder with a site's log."""
        return home() / "sites" / name

    def log(self, name: str) -> Path:
        """What a site's process prints; of the coordinator, which scores nothing, an empty one."""
        path = self.folder / f"{name}.log"
        path.touch()
        return path

    def enter(self, fault: Fault, run_dir: Path) -> None:
        """Let cells be sent ahead, if the fault is to meet them."""
        if str(fault.phase).startswith(AHEAD):
            sent = httpx.post(f"{self.url()}/nightly", json={"all": True}, timeout=LIMIT)
            assert sent.status_code == 200, sent.text

    def outlast(self, fault: Fault, undo: ExitStack, is_named: Callable[[], bool]) -> Row:
        """Ask during the fault; undo it, and ask until there are scores again."""
        said = [self.ask() for _ in range(N_ASKED)]
        wrong = [text for _, text in said if text]
        undo.close()
        deadline = time.monotonic() + self.limit
        while (end := self.ask()) != ("ok", ""):
            assert time.monotonic() < deadline, f"no scores within {self.limit:.0f} s: {end}"
            time.sleep(LOOK_SECONDS)
        outcome = f"wrong {len(wrong)} times of {N_ASKED}: {wrong[0]}" if wrong else SCORES
        return {"outcome": outcome, "health": [*dict.fromkeys(health for health, _ in said)]}

    def ask(self) -> tuple[str, str]:
        """What ``/health`` says, and what is wrong with that or with the scores that follow."""
        health = httpx.get(f"{self.url()}/health", timeout=LIMIT)
        (status, rows), ahead = self.score(), self.score(way="nightly")
        with self.output.open("a") as output:
            print(health.text, status, rows, *ahead, sep="\n", file=output)
        said = health.json()["status"]
        if (status == 200) != (health.status_code == 200):
            return said, f"/health said {said!r}, the next request got {status} {rows}"
        others = [other for code, other in ((status, rows), ahead) if code == 200]
        return said, "" if {*others} <= {self.rows} else f"other scores: {others}"

    def score(self, **way: str) -> tuple[int, str]:
        """Status of a request for scores, 0 after its deadline; and the scores, or why not."""
        asked = {"ids": self.ids, **way}
        try:
            reply = httpx.post(f"{self.url()}/score", json=asked, timeout=DEADLINE)
        except httpx.TimeoutException:
            return 0, f"no answer within {DEADLINE:g} s"
        document = reply.json()
        return reply.status_code, str(document.get("rows") or document)

    def wait(self, seconds: float) -> None:
        """There is no run to wait for, or to end."""

    def leave(self) -> None:
        """See ``wait``."""


def full_log(scene: Scores, undo: ExitStack, host: str) -> None:
    """The disk of a site's log is full, beyond the page that its last line is in."""
    scripted(scene, undo, FULL_LOG, "umount --lazy {home}", host)
    for _ in range(PAGE_LINES):
        scene.score()


def silent(scene: Scores, undo: ExitStack) -> None:
    """A peer accepts connections and says nothing."""
    scene.running[PEER].suspend()
    undo.callback(scene.running[PEER].resume)


def withdrawn(scene: Scores, undo: ExitStack) -> None:
    """A peer does not permit standing scores any more, and then does again."""
    undo.callback(scene.configure, PEER, {"allow": ALLOW})
    scene.configure(PEER, {"allow": ALLOW.replace(f",{STANDING}", "")})


ROWS: tuple[tuple[str, str, Strike, str], ...] = (
    *(("silent-peer", phase, silent, f"{PEER}.*must answer") for phase in (LIVE, AHEAD)),
    *(("withdrawn", phase, withdrawn, "withdrawn") for phase in (LIVE, AHEAD)),
    *(
        ("full-log", f"{LIVE}, {at}", partial(full_log, host=at), f"log of {at} must take a line")
        for at in (SITE, PEER)
    ),
    *(
        (
            "peer-clock",
            f"{AHEAD}, {host} {days:+} days",
            partial(wrong_clock, host=host, days=days),
            "clock|stale|future" if host == SITE else "",
        )
        for host, days in ((SITE, 365), (SITE, -1), (PEER, 365))
    ),
)
OF_SCORES = tuple(
    Fault(name, phase, strike, named, method=STANDING, must=bool(named))
    for name, phase, strike, named in ROWS
)
