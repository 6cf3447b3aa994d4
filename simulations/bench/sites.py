"""Sites of a divided model on this machine, trained in this process, which score by themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow as pa
from pyarrow import csv, parquet

from fedapp.home import home
from fedapp.run_folder import RunFolder
from fedapp.runs.flower import free_ports
from fedapp.runs.local import run_local, site_contexts
from fedapp.settings import load_settings
from fedapp.site.settings import read_node_config

SERVICE = "credit"
ALLOW = "secureboost,federated-forest,interactive,one-round,standing"
SMALL_KEY = {"key-bits": 512, "insecure-small-key": True}  # bits of predictions do not depend on it
START_SECONDS = 60


class Sites:
    """Sites whose tables have columns of their own of the same rows; the first has the labels.

    ``folder`` is new; the sites' state is in ``$FEDAPP_HOME``, which they share. ``node`` has
    further settings of all node configs.
    """

    def __init__(self, folder: Path, tables: Mapping[str, Any], label: str, **node: Any) -> None:
        self.folder, self.names = folder, tuple(tables)
        self.suffix = str(node.pop("suffix", ".csv"))
        self.active = self.names[0]
        ports = free_ports(2 * len(tables))
        self.peer_ports = dict(zip(tables, ports, strict=False))
        self.ports = dict(zip(tables, ports[len(tables) :], strict=True))
        for name, table in tables.items():
            (folder / name).mkdir(parents=True)
            self.write_table(name, table)
            address = f"127.0.0.1:{self.peer_ports[name]}"
            config = {"data": str(self.table(name)), "id": "id", "allow": ALLOW}
            config |= {"label": label} if name == self.active else {}
            self.configure(name, {**config, "standing-address": address, **node})

    def table(self, name: str) -> Path:
        """A site's table."""
        return self.folder / name / f"rows{self.suffix}"

    def write_table(self, name: str, table: pa.Table) -> None:
        """Replace a site's table as a whole."""
        written = self.table(name).with_suffix(".new")
        write = csv.write_csv if self.suffix == ".csv" else parquet.write_table
        write(table, written)
        written.rename(self.table(name))

    def config(self, name: str) -> Path:
        """A site's node config."""
        return self.folder / name / "site.toml"

    def configure(self, name: str, settings: Mapping[str, Any]) -> None:
        """Write a site's node config; what it had and ``settings`` do not name stays."""
        before = read_node_config(self.config(name)) if self.config(name).exists() else {}
        merged = {
            "name": name,
            "allow-insecure": True,
            "runs-per-day": 1000,
            "standing-rows-per-second": 0,
            **before,
            **settings,
        }
        lines = [f"{key} = {json.dumps(value)}" for key, value in merged.items()]
        written = self.config(name).with_suffix(".new")
        written.write_text("\n".join(lines) + "\n")
        written.rename(self.config(name))

    def run(self, strategy: str, **settings: Any) -> RunFolder:
        """Carry out a run between the sites, in this process."""
        contexts = site_contexts(read_node_config(self.config(name)) for name in self.names)
        path = self.folder / f"{strategy}-{time.monotonic_ns()}"
        fixed = {"strategy": strategy, "parties": len(self.names), "run-dir": str(path)}
        return run_local(load_settings({**fixed, **settings}), contexts)

    def train(self, strategy: str = "secureboost", **settings: Any) -> str:
        """Train; returns the model's id."""
        small = SMALL_KEY if strategy == "secureboost" else {}
        keys = {f"{strategy}.{key}": value for key, value in small.items()}
        return str(self.run(strategy, **keys, **settings).summary["model_id"])

    def predicted(self, model: str, way: str = "interactive", **settings: Any) -> Any:
        """What ``fedapp predict`` writes: a pyarrow.Table with the ids."""
        run = self.run(way, model=model, output=".parquet", **settings)
        folder = home() / "sites" / self.active / run.summary["model_id"]
        return parquet.read_table(folder / "predictions.parquet")

    def activate(self, model: str, **settings: Any) -> RunFolder:
        """Let the sites score by a model."""
        named = {f"standing.{key}": value for key, value in settings.items()}
        return self.run("standing", model=model, **{"standing.service": SERVICE, **named})

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a site's standing process, and wait until it answers."""
        command = ["-m", "fedapp", "serve", "--site", str(self.config(name))]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *command, "--port", str(self.ports[name]), *words],
                stdout=log,
                stderr=log,
                env={**os.environ, "FEDAPP_HOME": str(home()), "FEDAPP_NAME": name},
            )
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                httpx.get(f"{self.url(name)}/health", timeout=2)
                return process
            time.sleep(0.05)
        process.kill()
        raise AssertionError((self.folder / f"{name}.log").read_text()[-2000:])

    def url(self, name: str = "") -> str:
        """Where callers ask a site."""
        return f"http://127.0.0.1:{self.ports[name or self.active]}"

    @contextmanager
    def standing(self) -> Iterator[dict[str, psutil.Process]]:
        """All sites' standing processes; whatever runs at the end of the block is ended."""
        started = {name: psutil.Process(self.start(name).pid) for name in self.names}
        try:
            yield started
        finally:
            for process in started.values():
                with suppress(psutil.NoSuchProcess):
                    process.resume()
                    process.kill()
                    process.wait(10)
