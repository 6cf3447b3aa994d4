"""Ray's nodes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from fedapp.runs.flower import free_ports

ATTEMPTS, START_SECONDS = 4, 90


@contextmanager
def started(
    n_nodes: int = 2, n_cpus: int = 1
) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """The address of a cluster of nodes, and their processes, the head first."""
    # Outside the ports of Ray's workers.
    (port,) = [one for one in free_ports(9) if not 10_000 <= one < 20_000][:1]
    address = f"127.0.0.1:{port}"
    # A folder of its own, else other programs' ray.init would find this cluster and join it; with a
    # short path, for Ray's sockets.
    with (
        TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        ExitStack() as ends,
    ):
        nodes = list[subprocess.Popen[bytes]]()
        for number in range(n_nodes):
            # Beside the head's, an address as that of another machine.
            words = ["--num-cpus", str(n_cpus), "--node-ip-address", f"127.0.0.{number + 1}"]
            if number:
                words += ["--address", address]
            else:
                words += ["--head", "--port", str(port), "--temp-dir", folder]
                words += ["--include-dashboard", "false"]
            node = _started(words, Path(folder) / f"{number}.log")
            ends.callback(node.wait)
            ends.callback(node.terminate)
            nodes.append(node)
        yield address, nodes


def _started(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    ray = [str(Path(sys.executable).parent / "ray"), "start", "--block"]
    command = [*ray, "--disable-usage-stats", *words]
    # Ports of workers as the system gives them, beside other clusters; no processes for nothing.
    command += ["--object-store-memory", str(200 << 20), "--min-worker-port=0"]
    command += ["--max-worker-port=0", "--no-monitor", "--include-log-monitor=false"]
    idle = dict.fromkeys(["RAY_prestart_worker_first_driver", "RAY_enable_worker_prestart"], "0")
    for _ in range(ATTEMPTS):  # on a busy machine Ray's own deadlines of 15 s pass
        with log.open("wb") as output:
            node = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | idle)
        end = time.monotonic() + START_SECONDS
        while node.poll() is None and time.monotonic() < end:
            if b"Ray runtime started" in log.read_bytes():
                return node
            time.sleep(0.1)
        node.terminate()
        node.wait()
    raise AssertionError(log.read_text())
