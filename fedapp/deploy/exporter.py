"""Prometheus metrics of a coordinator, a site and a standing process.

They show names, counts, sizes and times; no row, label, id, key or score. `FolderCollector` takes
no part in a run: on every scrape it reads run folders, and what is new in the logs of sites. A
standing process counts by itself, in prometheus_client's registry of the process.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client import Counter as Counts
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fedapp.deploy.health import ALIVE, REACHED
from fedapp.home import home
from fedapp.run_files import CONFIG
from fedapp.run_folder import RunFolder, State, utc_now
from fedapp.site.certificates import days_left
from fedapp.site.log import CLOSED, LOG, parts

MOST_RUNS = 20  # only the newest, since each run is a label value
# Help and labels of each metric; the name of a counter ends in _total.
METRICS: Mapping[str, tuple[str, Sequence[str]]] = {
    "certificate_days": ("Days until a certificate ends", ["file"]),
    "run_state": ("1 for the state that a run is in", ["run", "state"]),
    "run_seconds": ("Since a run began, until it ended; none if either is unknown", ["run"]),
    "run_exchanges_total": ("Exchanges that are finished", ["run"]),
    "run_bytes_total": ("Of requests and of replies", ["run", "party", "direction"]),
    "run_waiting": ("1 for a party whose reply has been missing for 5 s", ["run", "party"]),
    "run_failed": ("1 for the error that has ended a run", ["run", "error"]),
    "superexec_idle_seconds": ("Since a site's SuperExec last asked for a task", []),
    "superlink_reached_seconds": ("Since a site's SuperNode last reached its SuperLink", []),
    "site_answers_total": ("Messages, by what came of them", ["site", "outcome"]),
    "site_seconds_total": ("Spent on messages", ["site"]),
    "site_bytes_total": ("Received and sent", ["site", "direction"]),
}
SECONDS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1, 2, 4)
# Of a standing process.
SCORED_ROWS = Counts("fedapp_scored_rows", "Rows that callers got scores of", ["way"])
SCORE_SECONDS = Histogram("fedapp_score_seconds", "Until a call's answer", buckets=SECONDS)
PEER_ROWS = Counts("fedapp_peer_rows", "Rows whose cells went to a peer", ["peer"])
PEER_SECONDS = Histogram("fedapp_peer_seconds", "Until a peer's answer", buckets=SECONDS)
PEER_UP = Gauge("fedapp_peer_up", "1 for a peer that answers", ["peer"])
Value = tuple[str, Sequence[str], float]  # name, values of its labels, value
# Events of a site's log, as they are counted.
OUTCOMES = {"answered": "answered", "repeated": "answered", "waits": "waiting"}
OUTCOMES |= {"refused": "refused", "failed": "failed"}


@dataclass(slots=True)
class SiteLog:
    """Totals over a site's log, as far as it was read."""

    path: Path
    sums: Counter[tuple[str, ...]] = field(default_factory=Counter)
    _inode: int = 0
    _place: int = 0
    _number: int = 0  # of the last line

    def read(self) -> Counter[tuple[str, ...]]:
        """The totals now; a line counts once, also if old ones before it have gone."""
        for path in parts(self.path)[:-1]:
            if path.name > CLOSED.format(f"{self._number:012}"):
                self._add(path.read_bytes())
        with self.path.open("rb") as file:
            if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                self._inode, self._place = inode, 0
            file.seek(self._place)
            # Up to the last newline: the line after it may be half written.
            lines = file.read().rpartition(b"\n")
        self._place += len(lines[0] + lines[1])
        self._add(lines[0])
        return self.sums

    def _add(self, lines: bytes) -> None:
        for line in map(json.loads, lines.splitlines()):
            if line["number"] > self._number and (outcome := OUTCOMES.get(line["event"])):
                self.sums["answers", outcome] += 1
                self.sums["seconds",] += line.get("seconds", 0.0)
                self.sums["bytes", "received"] += line.get("received", 0)
                self.sums["bytes", "sent"] += line.get("sent", 0)
            self._number = max(self._number, line["number"])


class FolderCollector:
    """Reads the files of ``$FEDAPP_HOME``, and runs in further folders."""

    def __init__(self, runs: Sequence[Path] = ()) -> None:
        self._runs = (home() / "runs", *runs)
        self._logs = dict[Path, SiteLog]()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics that have samples."""
        families: dict[str, Any] = {}
        for name, (text, labels) in METRICS.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            families[name] = kind(f"fedapp_{name}", text, labels=labels)
        for name, label_values, value in self._values():
            families[name].add_metric(label_values, value)
        yield from (family for family in families.values() if family.samples)

    def _values(self) -> Iterator[Value]:
        for path in sorted(home().parent.glob("*.crt")):
            yield "certificate_days", [path.name], days_left(path)
        reached = Path(os.environ.get("FLWR_HOME", "")) / REACHED
        for name, path in (("superexec_idle", home() / ALIVE), ("superlink_reached", reached)):
            if path.exists():
                yield f"{name}_seconds", [], time.time() - path.stat().st_mtime
        configs = [path for folder in self._runs for path in folder.glob(f"*/{CONFIG}")]
        runs = [RunFolder(path.parent) for path in configs]
        for run in sorted(runs, key=lambda run: (run.started, run.path.name))[-MOST_RUNS:]:
            for name, label_values, value in _of_run(run):
                yield f"run_{name}", [run.path.name, *label_values], value
        for path in home().glob(f"sites/*/{LOG}"):
            sums = self._logs.setdefault(path, SiteLog(path)).read()
            for (name, *label_values), value in sums.items():
                yield f"site_{name}_total", [path.parent.name, *label_values], value


def registry_of_folders(runs: Sequence[Path] = ()) -> CollectorRegistry:
    """What a process shows that counts a coordinator's or a site's files, and nothing else."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(FolderCollector(runs))
    return registry


def _of_run(run: RunFolder) -> Iterator[Value]:
    state = run.state
    yield "state", [state], 1
    ended = utc_now() if state == State.RUNNING else run.ended
    if run.started and ended:
        first, last = map(datetime.fromisoformat, (run.started, ended))
        yield "seconds", [], (last - first).total_seconds()
    if run.ledger_file.exists():
        sums = run.sums
        for way, sizes in (("to_party", sums.received), ("to_server", sums.sent)):
            for party, n_bytes in sizes.items():
                yield "bytes_total", [party, way], n_bytes
        yield "exchanges_total", [], len(sums.answered)
    if state == State.RUNNING and (stage := run.stage):
        for party in stage.waiting:
            yield "waiting", [party], 1
    elif run.error:
        yield "failed", [run.error], 1
