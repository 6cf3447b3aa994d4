"""A deployment on this machine: real processes, started by the scripts that fedapp writes."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import IO, Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet

from fedapp.crypto.sealed import fingerprint_of, public_key
from fedapp.deploy.folders import write_federation, write_site
from fedapp.deploy.targets import Federation
from fedapp.messages.methods import all_methods
from fedapp.run_folder import RunFolder
from fedapp.runs.flower import free_ports
from fedapp.runs.local import run_local, site_contexts
from fedapp.settings import load_settings
from fedapp.site.settings import read_node_config, site_config
from fedapp.site.trust import identity, pin

# Timeouts, long enough for a busy machine.
START_SECONDS, RUN_SECONDS, STOP_SECONDS = 300, 900, 60
# Shared by the sites and the local engine, which else would draw other rows.
DRAWS = {"draws-secret": secrets.token_hex(16)}
# Processes of a coordinator and of a site, by the module that Python runs.
SUPERLINK = "fedapp.deploy.superlink"
SUPERNODE, SUPEREXEC = "fedapp.deploy.supernode", "fedapp.deploy.superexec"
WORKER = "fedapp.deploy.warm.executor"


class Deployment:
    """A coordinator and sites that trust each other's keys, in subfolders of a new folder.

    ``nodes`` are the node configs of the sites, by name; ``host`` is a name of the SuperLink.
    """

    def __init__(
        self, folder: Path, nodes: Mapping[str, Mapping[str, Any]], host: str = "localhost"
    ) -> None:
        self.folder, self.coordinator = folder, folder / "coordinator"
        port, *ports = free_ports(1 + len(nodes))
        self.superlink = f"localhost:{port}"
        write_federation(
            self.coordinator, Federation("federation", host, 9092, 9093, port, list(nodes))
        )
        self.ports = dict(zip(nodes, ports, strict=True))
        self._scripts: dict[str, subprocess.Popen[bytes]] = {}
        for name, node in nodes.items():
            self.add_site(name, node)
            public = (folder / name / f"{name}.pub").read_bytes()
            (self.coordinator / "sites" / f"{name}.pub").write_bytes(public)
        for name, other in itertools.permutations(nodes, 2):
            key = public_key(identity(other, self.home(other)))
            pin(self.home(name), other, fingerprint_of(key))

    def add_site(self, name: str, node: Mapping[str, Any]) -> None:
        """Write the folder of a site."""
        site, ca = site_config({"name": name, **node}, {}), str(self.coordinator / "ca.crt")
        write_site(self.folder / name, site, self.superlink, ca, self.ports[name])
        self.change_site(name, node)

    def change_site(self, name: str, node: Mapping[str, Any]) -> None:
        """Replace the node config of a site that is not running."""
        lines = [f"{key} = {json.dumps(value)}" for key, value in {"name": name, **node}.items()]
        (self.folder / name / "site.toml").write_text("\n".join(lines) + "\n")

    def home(self, name: str) -> Path:
        """Folder of a site's keys and states."""
        return self.folder / name / "home"

    def node_config(self, name: str) -> Mapping[str, Any]:
        return read_node_config(self.folder / name / "site.toml")

    def locally(self, run_dir: Path, settings: Mapping[str, Any]) -> RunFolder:
        """Run by the local engine, with the sites' node configs."""
        contexts = site_contexts(self.node_config(name) for name in self.ports)
        return run_local(load_settings({**settings, "run-dir": str(run_dir)}), contexts)

    def train(self, run_dir: Path, settings: Mapping[str, Any]) -> RunFolder:
        """Run across the sites."""
        self.fedapp(*run_words({**settings, "run-dir": run_dir}))
        return RunFolder(run_dir)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start everything and register the sites; all processes end with the block."""
        try:
            self.start("coordinator", *self.ports)
            self.register()
            yield
        finally:
            self.close()

    def start(self, *names: str) -> None:
        """Start the script of the coordinator, or of sites."""
        for name in names:
            script = "start-superlink.sh" if name == "coordinator" else "start-supernode.sh"
            with self.log(name).open("ab") as log:
                command = [str(self.folder / name / script)]
                self._scripts[name] = subprocess.Popen(
                    command, stdout=log, stderr=log, start_new_session=True
                )

    def register(self) -> None:
        """Register the sites as soon as the SuperLink answers."""
        deadline = time.monotonic() + START_SECONDS
        self.wait_until_listening()
        command = [str(self.coordinator / "register-sites.sh")]
        while (done := subprocess.run(command, capture_output=True, check=False)).returncode:
            if time.monotonic() > deadline:
                raise AssertionError(done.stdout.decode() + done.stderr.decode())

    def wait_until_listening(self) -> None:
        """Wait until the SuperLink accepts connections; asking Flower would cost a process."""
        deadline = time.monotonic() + START_SECONDS
        host, _, port = self.superlink.rpartition(":")
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                return
            time.sleep(0.1)

    def stop(self, *names: str) -> None:
        """Stop scripts; raise if they fail or leave processes behind."""
        families = {name: self.family(name) for name in names}
        for name in names:
            self._scripts[name].send_signal(signal.SIGTERM)
        for name in names:
            status = self._scripts.pop(name).wait(STOP_SECONDS)
            _, alive = psutil.wait_procs(families[name], timeout=STOP_SECONDS)
            # A script that has just begun has no trap yet, and no processes.
            if status not in (0, -signal.SIGTERM) or alive:
                got = f"status {status}, {len(alive)} processes left"
                raise AssertionError(f"{name} must stop on SIGTERM, got {got}")

    def close(self) -> None:
        """End all processes, in whatever state they are."""
        family = [process for name in self._scripts for process in self.family(name)]
        for script in self._scripts.values():
            script.terminate()
        _, alive = psutil.wait_procs(family, timeout=STOP_SECONDS)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for script in self._scripts.values():
            script.wait()

    def family(self, name: str) -> list[psutil.Process]:
        """A script's process and its descendants."""
        with suppress(psutil.NoSuchProcess):
            script = psutil.Process(self._scripts[name].pid)
            return [script, *script.children(recursive=True)]
        return []

    def process(self, name: str, program: str) -> psutil.Process | None:
        """The process of a command or Python module that a script has started, or None."""
        for process in self.family(name):
            with suppress(psutil.NoSuchProcess):
                if any(Path(word).name == program for word in process.cmdline()[:4]):
                    return process
        return None

    def kill(self, name: str, program: str) -> bool:
        """Wait for a process of a script and SIGKILL it; returns whether it was found in time."""
        deadline = time.monotonic() + START_SECONDS
        while (process := self.process(name, program)) is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        process.kill()
        process.wait(STOP_SECONDS)  # until its ports are free
        return True

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def begin(
        self, *words: str, app: Path | None = None, output: int | IO[str] = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        """Start a ``fedapp`` command at the coordinator; ``app`` is another fedapp's folder."""
        command = shlex.join([f"{Path(sys.executable).parent}/fedapp", *words])
        return subprocess.Popen(
            ["bash", "-c", f". {self.coordinator}/env.sh; exec {command}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "COLUMNS": "200", **({"PYTHONPATH": str(app)} if app else {})},
        )

    def fedapp(self, *words: str) -> str:
        """Run a ``fedapp`` command at the coordinator to its end."""
        return wait_for_output(self.begin(*words))


class Proxy(ThreadingTCPServer):
    """A TCP proxy; ``mode`` is what happens to bytes from now on.

    "pass"; "stall": they wait until the mode changes; "drop": they are lost, and their connection
    stays open; "delay": each piece takes ``delay`` seconds; "fail": they end their connection.
    """

    allow_reuse_address = daemon_threads = True

    def __init__(self, server: int, port: int = 0, host: str = "127.0.0.1") -> None:
        self.mode, self.delay, self.server = "pass", 1.0, server
        super().__init__((host, port), BaseRequestHandler)
        self.address = f"{host}:{self.server_address[1]}"
        Thread(target=self.serve_forever, daemon=True).start()

    def finish_request(self, request: object, client_address: object) -> None:
        """Forward a connection; where the server is gone, it is accepted and then ended."""
        assert isinstance(request, socket.socket)
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.server)) as server:
            Thread(target=self._forward, args=(server, request), daemon=True).start()
            self._forward(request, server)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        is_lost = False
        with suppress(OSError):
            while (data := source.recv(2**16)) and self.mode != "fail":
                while self.mode == "stall":
                    time.sleep(0.1)
                time.sleep(self.delay if self.mode == "delay" else 0)
                is_lost = is_lost or self.mode == "drop"
                sink.sendall(b"" if is_lost else data)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(2)


def flower_with(folder: Path, file: str, old: str, new: str) -> str:
    """Copy the installed Flower with a change; returns what PYTHONPATH must be to import it."""
    shutil.copytree(
        str(files("flwr")), folder / "flwr", ignore=shutil.ignore_patterns("__pycache__")
    )
    text = (path := folder / "flwr" / file).read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def site_tables(
    folder: Path, table: pa.Table, names: Sequence[str], label: str, by_columns: bool
) -> dict[str, dict[str, str]]:
    """Write a part of the rows or columns of a table for each site; return their node configs.

    All parts have the ids of the rows, in the column ``id``. Where columns are divided, the first
    site has the labels.
    """
    columns = [name for name in table.column_names if name not in ("id", label)]
    nodes = {}
    for index, name in enumerate(names):
        has_label = not (by_columns and index)
        if by_columns:
            chosen = np.array_split(columns, len(names))[index].tolist()
            part = table.select(["id", *chosen, *([label] if has_label else [])])
        else:
            part = table.take(np.array_split(np.arange(table.num_rows), len(names))[index])
        path = folder / f"{name}.parquet"
        pa.parquet.write_table(part, path)
        nodes[name] = {"data": str(path), "id": "id", "label": label if has_label else "", **DRAWS}
        nodes[name] |= {"allow": ",".join(all_methods()), "runs-per-day": "1000"}
        nodes[name] |= {"allow-export": "true", "allow-insecure": "true"}
    return nodes


def wait_for_output(command: subprocess.Popen[str]) -> str:
    """Wait for a command to succeed and return its output."""
    try:
        printed, _ = command.communicate(timeout=RUN_SECONDS)
    finally:
        command.kill()
    assert command.returncode == 0, printed
    return printed


def run_words(settings: Mapping[str, object]) -> list[str]:
    """Words of ``fedapp`` that run across the sites."""
    others = {name: value for name, value in settings.items() if name != "strategy"}
    return ["run", str(settings["strategy"]), "--engine", "federation", *settings_of(others)]


def settings_of(values: Mapping[str, object]) -> list[str]:
    """``-c key=value`` for each setting."""
    texts = (json.dumps(each) if isinstance(each, bool) else each for each in values.values())
    pairs = zip(values, texts, strict=True)
    return [word for key, text in pairs for word in ("-c", f"{key}={text}")]
