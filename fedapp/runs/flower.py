"""Runs at a SuperLink: one that is started for a simulation, or one of Flower's configuration."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import psutil
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    StartRunRequest,
    StreamLogsRequest,
    StreamLogsResponse,
)
from flwr.proto.federation_config_pb2 import SimulationConfig
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.constant import NodeStatus
from flwr.supercore.fab import Fab

from fedapp import errors
from fedapp.cluster import check_nodes, connected
from fedapp.data.datasets import absolute_paths
from fedapp.errors import RunFailedError, without_passwords
from fedapp.home import home, open_private, private_folder
from fedapp.kernels import n_cores
from fedapp.process import ray_address
from fedapp.report.progress import QUIET, Watcher
from fedapp.run_files import SUMMARY
from fedapp.run_folder import RunFolder, State
from fedapp.runs.cluster import data_folder, job_variables
from fedapp.runs.tables import table_files
from fedapp.sections import flatten
from fedapp.settings import Settings
from fedapp.site.bundle import build_bundle, installed_bundle
from fedapp.superlinks import SuperLink, SuperLinkError, find_superlink, flower_config
from strategies.handshake import registered_sites
from strategies.run import load_strategy

SUPERLINK_START_SECONDS, STOP_SECONDS = 60, 10
# A SuperLink that is killed and restarted answers after about 20 s, on a busy machine later.
LONGEST_SILENCE = 120.0
LONGEST_START = 600.0  # a coordinator's ServerApp may start on a busy machine
STATUS_POLL_SECONDS, ENDING_POLL_SECONDS = 1.0, 0.2
COMPLETED = "finished:completed"
STARTING = ("pending", "starting")
UNKNOWN = "unknown"  # status of a run if the SuperLink does not answer
STOPPED = {"SystemExit", "KeyboardInterrupt"}  # errors of a ServerApp stopped from outside
LOG_LINES = 20  # shown of a failed run's log
# What the logs of processes have, and our texts; {0} is the first group.
SENTENCES: Mapping[str, str] = {
    r"attempting to bind on address \('([^']+)', (\d+)\): address already in use": (
        "port {1} of {0} must be free for Flower, got one in use; the same command takes another"
    ),
    # Ray's raylet aborts if its agents need longer (ray-project/ray, issue 65983).
    "The current node timed out during startup": (
        "Ray must start within 15 s, got a machine too busy for that; repeat the run when it is "
        "less so, or with --engine local, which needs no Ray and trains the same model"
    ),
}
GONE = (
    "the SuperLink '{name}' must answer until the run has ended, got no status for {seconds:.0f} "
    "s; started again, by FOLDER/start-superlink.sh at the coordinator, it goes on with the run"
)
SILENT = "the SuperLink '{name}' gives no status of the run; it is asked again for {seconds:.0f} s"
DIED = "the ServerApp has ended without a word, as one does that is killed or finds no memory"
# A line of the ServerApp itself, by `fedapp.process.Lines`: what parties say is in others.
IS_IN = r"(?m)^\S+ INFO \S+ serverapp(?: run=\d+)?: the run is in (/.+)$"
OWN_PORT = "each federation of a machine needs a port of its own: fedapp federation init --port"
NEVER_STARTED = (
    "the ServerApp must start within {seconds:.0f} s, the run is {status}; the log of the "
    "coordinator's SuperExec says why; to stop it: flwr stop {run} {name}"
)


def run_simulation(settings: Settings, watcher: Watcher = QUIET) -> RunFolder:
    """Train in Flower's simulation, on a SuperLink that is started for this run."""
    if ray_address():
        watcher.begin("checking the nodes of the Ray cluster")
        names = ("data", "schema_file", "without")
        absolute = {name: absolute_paths(getattr(settings, name)) for name in names}
        settings = settings.model_copy(update=absolute)
        with connected() as ray:
            files = [*table_files(settings), *data_folder()]
            check_nodes(ray, [home(), Path(settings.run_dir)], files)
    with superlink(watcher) as link:
        return run_simulated(settings, link, watcher)


def run_simulated(settings: Settings, link: SuperLink, watcher: Watcher = QUIET) -> RunFolder:
    """Train in Flower's simulation, on a running SuperLink, which `superlink` yields."""
    simulation = SimulationConfig(
        num_supernodes=settings.parties,
        client_resources_num_cpus=1,
        client_resources_num_gpus=_gpus_of_actor(settings),
    )
    _train_at(link, settings, simulation, watcher)
    return RunFolder(Path(settings.run_dir))


def _gpus_of_actor(settings: Settings) -> float:
    """Share of a GPU for each Ray actor; 0 if no section of the settings asks for one."""
    if all(section.get("device") != "cuda" for section in settings.sections.values()):
        return 0.0
    import torch

    return min(1.0, math.floor(1e4 * torch.cuda.device_count() / n_cores()) / 1e4)


def run_superlink(settings: Settings, name: str, watcher: Watcher = QUIET) -> RunFolder | None:
    """Train across sites, through a SuperLink in Flower's configuration.

    Without ``run-dir`` the ServerApp, wherever it runs, chooses the folder; None is returned if
    that is on another machine.
    """
    run_dir = _train_at(find_superlink(name), settings, None, watcher)
    is_here = settings.run_dir or (run_dir and os.access(Path(run_dir, SUMMARY), os.W_OK))
    return RunFolder(Path(run_dir)) if is_here else None


def _environment() -> dict[str, str]:
    """Flower without telemetry, update checks or a new environment for each run."""
    # Else each of a simulation's dozen processes would compile all of Flower and Ray, for seconds.
    folder = str(home() / "flower" / "bytecode")
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
    return {
        **os.environ,
        **(bytecode if sys.dont_write_bytecode else {}),
        # Else Ray would join any cluster that was started on this machine, unchecked.
        "RAY_ADDRESS": ray_address() or "local",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",  # Ray's reports to its makers
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


@contextmanager
def superlink(watcher: Watcher = QUIET) -> Iterator[SuperLink]:
    """A SuperLink for simulations, on free ports.

    Flower's managed SuperLink would outlive its runs and keep its first environment.
    """
    check_program(_environment(), "flower-superlink")
    watcher.begin("starting Flower")
    flower_home = home() / "flower"
    private_folder(flower_home)
    http_port, control_port = free_ports(2)
    environment = {
        **_environment(),
        **(job_variables() if ray_address() else {}),
        "FLWR_HOME": str(flower_home),
        # Else Ray would start a process for every unused CPU, and lower its actors' priority.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_worker_niceness": "0",
        # Else each process would report every call, for a dashboard that is not there.
        "RAY_task_events_report_interval_ms": "0",
    }
    log = flower_home / f"superlink-{http_port}.log"
    command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "process"]
    command += ["--host", "127.0.0.1", "--port", str(http_port)]
    command += ["--control-api-address", f"127.0.0.1:{control_port}"]
    # Flower's own lets a simulation expire whose process takes 30 s to start.
    superexec = [sys.executable, "-P", "-m", "fedapp.deploy.coordinator", "--insecure"]
    superexec += ["--runtime-api-address", f"127.0.0.1:{http_port}"]
    with open_private(log, "wb") as output:
        how = {"env": environment, "stdout": output, "stderr": output, "start_new_session": True}
        process, starter = (subprocess.Popen(words, **how) for words in (command, superexec))
    try:
        if not is_healthy(process, http_port, SUPERLINK_START_SECONDS):
            printed = log.read_text(errors="replace")
            if sentence := sentence_for(printed):
                raise RunFailedError(sentence, [])
            lines = without_passwords(printed).splitlines()[-LOG_LINES:]
            raise RunFailedError("Flower's SuperLink did not start", lines)
        yield SuperLink("local", {"address": f"127.0.0.1:{http_port}", "insecure": True})
    finally:
        watcher.begin("ending Flower", ends=True)
        _stop(starter)
        _stop(process)
        log.unlink(missing_ok=True)


def free_ports(n: int) -> list[int]:
    """Unused ports."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def is_healthy(process: subprocess.Popen[bytes], port: int, seconds: float) -> bool:
    """Wait until a server answers, ends or the time is over; returns whether it answered."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants, also those that have left its session."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.terminate()
    _, alive = psutil.wait_procs(family, timeout=STOP_SECONDS)
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    try:
        process.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _whose(link: SuperLink, nodes: Iterable[NodeInfo]) -> str:
    """Whose SuperLink it is: its authority and its sites; a coordinator's own must have its own."""
    registered = [node for node in nodes if node.status != NodeStatus.UNREGISTERED]
    names = [
        node.name if node.status == NodeStatus.ONLINE else f"{node.name} ({node.status})"
        for node in registered
    ]
    sites = f"the sites {', '.join(sorted(names))}" if names else "no sites"
    is_own = link.values.get("root-certificates") == str(flower_config().parents[1] / "ca.crt")
    ours = registered_sites(flower_config().parent) if is_own else {}
    if ours and registered and ours.keys().isdisjoint(str(node.node_id) for node in registered):
        rule = f"must be that of the sites {', '.join(sorted(ours.values()))}, got one with {sites}"
        raise SuperLinkError(f"the SuperLink '{link.name}' at {link.host} {rule}; {OWN_PORT}")
    authority = f"that '{link.authority}' certifies, " if link.authority else ""
    return f"the SuperLink '{link.name}' at {link.host}, {authority}with {sites}"


def _train_at(
    link: SuperLink, settings: Settings, simulation: SimulationConfig | None, watcher: Watcher
) -> str:
    """Start a run and wait for its end; without ``simulation`` its parties are sites.

    Returns its folder where the ServerApp runs; empty if its log does not name it.
    """
    watcher.begin(f"handing the app to the SuperLink '{link.name}' at {link.host}")
    read = load_strategy(settings.strategy).settings_read(settings)
    config = {name: value for name, value in flatten(settings.as_config()).items() if name in read}
    request = StartRunRequest(
        fab=fab_to_proto(Fab(installed_bundle(), build_bundle(), {})),
        override_config=user_config_to_proto(config),
        federation=link.values.get("federation", ""),
        override_federation_config=simulation,
    )
    with link.client() as client:
        if simulation is None:
            watcher.tell(_whose(link, client.ListNodes(ListNodesRequest()).nodes_info))
        run_id = client.StartRun(request).run_id
    folder = RunFolder(Path(settings.run_dir)) if settings.run_dir else None
    if folder:
        folder.forget_stage()
    watcher.begin(f"waiting for Flower to start run {run_id}")
    with folder.resumable() if folder else nullcontext():
        try:
            _follow(run_id, link, folder, watcher)
        except KeyboardInterrupt:
            if simulation:
                raise
            stop = shlex.join(["flwr", "stop", str(run_id), link.name])
            raise KeyboardInterrupt(f"the run continues; to stop it:\n  {stop}") from None
    if folder:
        return settings.run_dir
    places: list[str] = re.findall(IS_IN, log_of(run_id, link))
    for place in places[-1:]:
        watcher.tell(f"run {run_id} of the SuperLink '{link.name}' is in {place}")
    return places[-1] if places else ""


def _follow(run_id: int, link: SuperLink, folder: RunFolder | None, watcher: Watcher) -> None:
    """Wait for a run's end; RunFailedError with the cause if it has failed."""
    status, details = _wait_for(run_id, link, folder, watcher)
    if status != COMPLETED and folder and folder.state_of_files is State.FINISHED:
        # A SuperLink killed at the very end reports the run as failed after its restart.
        watcher.begin(f"Flower says {status}, but the run has written its results")
    elif status != COMPLETED:
        if cause := _cause(folder):
            raise RunFailedError(cause, [])
        log = log_of(run_id, link)
        if sentence := sentence_for(log):
            raise RunFailedError(sentence, [])
        lines = log.splitlines()[-LOG_LINES:]
        # The folder may be on another machine: look for a line that names an error of fedapp.
        for line in lines:
            match = re.fullmatch(r".*?\b(\w+Error): (.+)", line)
            if match and hasattr(errors, match[1]):
                raise RunFailedError(match[2], [])
        text = f"Flower says {status}" + (f": {details}" if details else "")
        if folder and folder.has_died:
            text = f"{DIED} ({text})"
        if status == UNKNOWN:
            text = GONE.format(name=link.name, seconds=LONGEST_SILENCE)
        raise RunFailedError(text, lines)


def log_of(run_id: int, link: SuperLink) -> str:
    """A run's log; empty if the SuperLink does not answer."""
    with suppress(SuperLinkError), link.client() as client:
        logs = client.StreamLogs(StreamLogsRequest(run_id=run_id, after_timestamp=0.0))
        return without_passwords(next(logs, StreamLogsResponse()).log_output)
    return ""


def _status_of(run_id: int, link: SuperLink) -> tuple[str, str]:
    """A run's status and its details."""
    with link.client() as client:
        status = client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id].status
    return ":".join(filter(None, (status.status, status.sub_status))), status.details


def _wait_for(
    run_id: int, link: SuperLink, folder: RunFolder | None, watcher: Watcher
) -> tuple[str, str]:
    """Poll a run's status until it has ended; show it while the run's folder shows nothing.

    Returns the status, `UNKNOWN` if the SuperLink has been silent for too long, and its details.
    """
    shown, start = "", time.monotonic()
    answered, is_silent = start, False
    while time.monotonic() - answered < LONGEST_SILENCE:
        was_silent, fault = is_silent, ""
        try:
            status, details = _status_of(run_id, link)
        except SuperLinkError as error:
            if error.has_lost_run:
                raise
            status, details, fault = UNKNOWN, "", f"{error}; "
        if status.startswith("finished"):
            return status, details
        if status in STARTING and time.monotonic() - start > LONGEST_START:
            values = {"seconds": LONGEST_START, "status": status, "run": run_id, "name": link.name}
            raise RunFailedError(NEVER_STARTED.format(**values), [])
        is_silent = status == UNKNOWN
        answered = answered if is_silent else time.monotonic()
        says_more = folder is not None and (folder.stage is not None or folder.has_ended())
        if status != shown and (is_silent or was_silent or not says_more):
            silent = SILENT.format(name=link.name, seconds=LONGEST_SILENCE)
            watcher.begin(f"{fault}{silent}" if is_silent else f"the run is {status}, says Flower")
            shown = status
        # A run on this machine may have ended, with a word or without, before Flower says so.
        is_over = folder is not None and (folder.has_ended() or folder.has_died)
        time.sleep(ENDING_POLL_SECONDS if is_over else STATUS_POLL_SECONDS)
        if folder and is_over and shown != "ended":
            died = f"{DIED}; " if folder.has_died else ""
            watcher.begin(f"{died}waiting for Flower to end the run", ends=bool(died))
            shown = "ended"
    return UNKNOWN, ""


def _cause(folder: RunFolder | None) -> str:
    """Why a run failed, from its folder; empty if that is on another machine, or does not say."""
    if folder is None:
        return ""
    if folder.error in STOPPED:
        return "the ServerApp was stopped"
    return str(folder.failure.get("message", ""))


def sentence_for(log: str) -> str:
    """The meaning of a process's log; empty if unknown."""
    for pattern, sentence in SENTENCES.items():
        if match := re.search(pattern, log):
            return sentence.format(*match.groups())
    return ""


def check_program(environment: Mapping[str, str], program: str) -> None:
    """Raise RunFailedError if one of Flower's programs is not installed."""
    if shutil.which(program, path=environment["PATH"]) is None:
        rule = "must be installed beside Python (pip install 'flwr[simulation]')"
        raise RunFailedError(f"{program} {rule}, got none on the PATH", [])
