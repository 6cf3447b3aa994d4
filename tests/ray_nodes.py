"""Ray's nodes on this machine."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

ATTEMPTS, START_SECONDS = 4, 90


@contextmanager
def started(n_nodes=2):
    """The address of a cluster of nodes with a CPU each, and their processes, the head first."""
    from fedapp.runs.flower import free_ports  # Ray's processes need nothing of Flower

    # Outside the ports of Ray's workers.
    (port,) = [one for one in free_ports(9) if not 10_000 <= one < 20_000][:1]
    address = f"127.0.0.1:{port}"
    # A folder of its own, else other programs' ray.init would find this cluster and join it; with a
    # short path, for Ray's sockets.
    with (
        TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        ExitStack() as ends,
    ):
        nodes = []
        for number in range(n_nodes):
            # Beside the head's, an address as that of another machine.
            words = ["--address", address, "--node-ip-address", f"127.0.0.{number + 1}"]
            if not number:
                words = ["--head", "--port", str(port), "--temp-dir", folder]
                words += ["--include-dashboard", "false", "--node-ip-address", "127.0.0.1"]
            node = _started(words, Path(folder) / f"{number}.log")
            ends.callback(node.wait)
            ends.callback(node.terminate)
            nodes.append(node)
        yield address, nodes


def _started(words, log):
    ray = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus", "1"]
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


def end(node):
    """Kill a node and its processes, as a machine that is switched off."""
    family = psutil.Process(node.pid).children(recursive=True)
    for process in (*family, node):
        process.kill()
    node.wait()


def number_and_process(number, caller, mark):
    """A call that is slow, so that others have their share; 1 is refused, 2 kills another once."""
    time.sleep(0.05)
    if number == 1:
        raise ValueError("number must not be 1, got 1")
    if number == 2 and os.getpid() != caller and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number, os.getpid()
