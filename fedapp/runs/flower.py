"""Runs by ``flwr run``: in Flower's simulation, or at a SuperLink; its errors in one sentence."""

from __future__ import annotations

import json
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from fedapp import errors
from fedapp.data.datasets import absolute_paths
from fedapp.errors import RunFailedError, without_passwords
from fedapp.home import home, open_private, private_folder
from fedapp.kernels import n_cores
from fedapp.run_folder import Report, RunFolder, State
from fedapp.runs.cluster import check_nodes, connected, job_variables, ray_address
from fedapp.runs.superlinks import fault_of
from fedapp.runs.tables import table_files
from fedapp.settings import Settings, flatten
from fedapp.site.bundle import app_sources
from strategies.delivery import RULE
from strategies.handshake import registered_sites
from strategies.run import load_strategy

SUPERLINK_START_SECONDS, STOP_SECONDS = 60, 10
# A SuperLink that is killed and restarted answers after about 20 s, on a busy machine later.
LONGEST_SILENCE = 120.0
# Flower's commands wait for ever where a SuperLink accepts connections but does not answer.
LONGEST_ANSWER = 60.0
LONGEST_START = 600.0  # a coordinator's ServerApp may start on a busy machine
# Asking for a run's status takes a process and a second of CPU, so it is done rarely.
STATUS_POLL_SECONDS, ENDING_POLL_SECONDS, LOCAL_POLL_SECONDS = 6.0, 1.0, 60.0
LOCAL_START_SECONDS = 15.0  # in which a simulation starts, and asking would delay it
COMPLETED = "finished:completed"
STARTING = ("pending", "starting")
NO_DETAILS = "N/A"  # of a run's status
LOCAL = "local"  # Flower's name for a simulation on this machine
UNKNOWN = "unknown"  # status of a run if the SuperLink does not answer
STOPPED = {"SystemExit", "KeyboardInterrupt"}  # errors of a ServerApp stopped from outside
LOG_LINES = 20  # shown of a failed run's log
# Patterns of Flower 1.41's output, and our texts; {name} is the SuperLink, {0} the first group.
LOST_RUN = "Run ID not found"
_USING = r"Using SuperLink: \S+ \((\S+)\)(?s:.*)"  # and the address
UNREACHED = "the SuperLink '{name}' must answer at {0}, got "
SENTENCES: Mapping[str, str] = {
    r"SuperLink connection '\S+' not found in the\s+Flower configuration file \((\S+)\)": (
        "engine must be a SuperLink in {0}, got '{name}'; a coordinator first sources its own: . "
        "FOLDER/env.sh"
    ),
    f"{_USING}Connection to the SuperLink is unavailable": UNREACHED,  # why: fault_of
    f"{_USING}Authentication failed": (
        "the SuperLink '{name}' at {0} must know the user, got a name or a password that it does "
        "not; at the coordinator: fedapp federation add FOLDER --user NAME"
    ),
    f"{_USING}502 Bad Gateway": (
        "the SuperLink '{name}' must answer behind {0}, got its nginx alone (502): it is "
        "starting, or is gone; at the coordinator: FOLDER/start-superlink.sh"
    ),
    _USING + LOST_RUN: (
        "the SuperLink '{name}' at {0} must have the database that the run began with, got "
        "another or an empty one; at the coordinator: put FOLDER/flower/superlink.db back, or run "
        "again"
    ),
    f"{_USING}Internal server error": (
        "the SuperLink '{name}' at {0} must be able to use its database, got an internal error, "
        "which its own log names; at the coordinator: put FOLDER/flower/superlink.db back, and "
        "FOLDER/start-superlink.sh"
    ),
    r"Failed to read certificate file `([^`]+)`": (
        "the certificate of the SuperLink '{name}' must be readable, got {0}"
    ),
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
    "s; started again, by FOLDER/start-superlink.sh at the coordinator, it resumes the run"
)
SILENT = "the SuperLink '{name}' gives no status of the run; it is asked again for {seconds:.0f} s"
DIED = "the ServerApp has ended without a word, as one does that is killed or finds no memory"
RESUME = "-c resume={} resumes the run"
NEVER_STARTED = (
    "the ServerApp must start within {seconds:.0f} s, the run is {status}; the log of the "
    "coordinator's SuperExec says why; to stop it: flwr stop {run} {name}"
)


def _silent(doing: str, ends: bool = False) -> None:
    """Show nothing."""


def run_simulation(settings: Settings, report: Report = _silent) -> RunFolder:
    """Train in Flower's simulation, on a SuperLink that is started for this run."""
    if ray_address():
        report("checking the nodes of the Ray cluster")
        files = ("data", "schema_file", "without")
        absolute = {name: absolute_paths(getattr(settings, name)) for name in files}
        settings = settings.model_copy(update=absolute)
        with connected() as ray:
            check_nodes(ray, [home(), Path(settings.run_dir)], table_files(settings))
    with superlink(report) as environment:
        return run_simulated(settings, environment, report)


def run_simulated(
    settings: Settings, environment: dict[str, str], report: Report = _silent
) -> RunFolder:
    """Train in Flower's simulation, on a running SuperLink; `superlink` yields ``environment``."""
    federation = {"num-supernodes": settings.parties, "client-resources-num-cpus": 1}
    gpus = {"client-resources-num-gpus": _gpus_of_actor(settings)}
    _flwr_run(settings, LOCAL, environment, federation | gpus, report)
    return RunFolder(Path(settings.run_dir))


def _gpus_of_actor(settings: Settings) -> float:
    """Share of a GPU for each Ray actor; 0 if no section of the settings asks for one."""
    if all(section.get("device") != "cuda" for section in settings.sections.values()):
        return 0.0
    import torch

    return min(1.0, math.floor(1e4 * torch.cuda.device_count() / n_cores()) / 1e4)


def run_superlink(settings: Settings, name: str, report: Report = _silent) -> RunFolder | None:
    """Train across sites, through a SuperLink in Flower's configuration.

    Without ``run-dir`` the ServerApp, wherever it runs, chooses the folder, and None is returned.
    The RunFailedError of a failed run names the sites that are not connected.
    """
    environment = _environment()
    check_programs(environment, "flwr")
    try:
        _flwr_run(settings, name, environment, {}, report)
    except RunFailedError as error:
        sites = ", ".join(_not_connected(name, environment))
        why = f"not connected: {sites}, whose own log says why; {RULE}"
        cause = f"{error}; {why}" if sites else str(error)
        raise RunFailedError(cause, error.log_lines) from None
    return RunFolder(Path(settings.run_dir)) if settings.run_dir else None


def _not_connected(name: str, environment: dict[str, str]) -> list[str]:
    """Registered sites whose SuperNode is not connected; empty if this is no coordinator."""
    sites = registered_sites(Path(environment.get("FLWR_HOME", "")))
    if not sites:
        return []
    listed = _flwr(environment, "supernode", "list", name, "--format", "json")
    nodes = _json_of(listed.stdout).get("nodes") or []
    return sorted(
        sites[node["node-id"]]
        for node in nodes
        if node["node-id"] in sites and node["status"] != "online"
    )


def _flwr(
    environment: Mapping[str, str], *words: str, longest: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command; it is ended, and has printed nothing, after ``longest`` seconds."""
    command = ["flwr", *words]
    try:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=longest
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", "")


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
def superlink(report: Report = _silent) -> Iterator[dict[str, str]]:
    """A SuperLink for simulations, on free ports; yields the environment for ``flwr``.

    Flower's managed SuperLink would outlive its runs and keep its first environment.
    """
    check_programs(_environment(), "flwr", "flower-superlink")
    report("starting Flower")
    flower_home = home() / "flower"
    private_folder(flower_home)
    http_port, control_port = free_ports(2)
    environment = {
        **_environment(),
        **(job_variables() if ray_address() else {}),
        "FLWR_HOME": str(flower_home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http_port),
        "FLWR_LOCAL_CONTROL_API_PORT": str(control_port),
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
        process, starter = (
            subprocess.Popen(
                words, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            for words in (command, superexec)
        )
    try:
        if not is_healthy(process, http_port, SUPERLINK_START_SECONDS):
            printed = log.read_text(errors="replace")
            raise failed(printed, LOCAL, "Flower's SuperLink did not start")
        yield environment
    finally:
        report("ending Flower", ends=True)
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


def _flwr_run(
    settings: Settings,
    name: str,
    environment: dict[str, str],
    federation: Mapping[str, float],
    report: Report,
) -> None:
    """Start a run by ``flwr run`` and wait for its end; ``federation`` is of a simulation."""
    report("handing the app to Flower")
    read = load_strategy(settings.strategy).settings_read(settings)
    config = {name: value for name, value in flatten(settings.as_config()).items() if name in read}
    options = ["--format", "json", "--run-config", _toml_pairs(config)]
    if federation:
        options += ["--federation-config", _toml_pairs(federation)]
    with app_sources() as app:
        started = _flwr(environment, "run", str(app), name, *options)
    answer = _json_of(started.stdout)
    run_id = str(answer.get("run-id") or "")
    if not run_id:
        printed = started.stdout + started.stderr
        raise failed(printed, name, "flwr run could not start the run")
    folder = RunFolder(Path(settings.run_dir)) if settings.run_dir else None
    if folder:
        folder.forget_stage()
    report("waiting for Flower to start the run")
    try:
        status, details = _wait_for(run_id, name, environment, folder, report)
    except KeyboardInterrupt:
        if federation:
            raise
        stop = shlex.join(["flwr", "stop", run_id, name])
        raise KeyboardInterrupt(f"the run continues; to stop it:\n  {stop}") from None
    if status != COMPLETED and folder and folder.state_of_files is State.FINISHED:
        # A SuperLink killed at the very end reports the run as failed after its restart.
        report(f"Flower says {status}, but the run has written its results")
    elif status != COMPLETED:
        if cause := _cause(folder):
            raise RunFailedError(cause, [])
        log = without_passwords(_flwr(environment, "log", run_id, name, "--show").stdout)
        if sentence := sentence_for(log, name):
            raise RunFailedError(sentence, [])
        lines = log.splitlines()[-LOG_LINES:]
        # The folder may be on another machine: look for a line that names an error of fedapp.
        for line in lines:
            match = re.fullmatch(r".*?\b(\w+Error): (.+)", line)
            if match and hasattr(errors, match[1]):
                raise RunFailedError(match[2], [])
        text = f"Flower says {status}" + (f": {details}" if details else "")
        if folder and folder.has_died:
            text = f"{DIED} ({text}); {RESUME.format(folder.path)}"
        if status == UNKNOWN:
            text = GONE.format(name=name, seconds=LONGEST_SILENCE)
        raise RunFailedError(text, lines)


def _toml_pairs(config: Mapping[str, Any]) -> str:
    """Settings for ``flwr run``: TOML values, separated by blanks."""
    return " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())


def _json_of(text: str) -> dict[str, Any]:
    """The JSON object in a command's output; empty if there is none."""
    match = re.search(r"\{.*\}", text, re.DOTALL)
    try:
        answer = json.loads(match.group()) if match else {}
    except json.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _wait_for(
    run_id: str, name: str, environment: dict[str, str], folder: RunFolder | None, report: Report
) -> tuple[str, str]:
    """Poll a run's status until it has ended; show it while the run's folder shows nothing.

    Returns the status, `UNKNOWN` if the SuperLink has been silent for too long, and its details.
    """
    shown, start = "", time.monotonic()
    answered, is_silent = start, False
    if name == LOCAL:
        _pause(LOCAL_START_SECONDS, folder)
    while time.monotonic() - answered < LONGEST_SILENCE:
        question = ("list", name, "--run-id", run_id, "--format", "json")
        listed = _flwr(environment, *question, longest=LONGEST_ANSWER)
        run = (_json_of(listed.stdout).get("runs") or [{}])[0]
        status = str(run.get("status", UNKNOWN))
        if status.startswith("finished"):
            details = str(run.get("status-details", NO_DETAILS))
            return status, "" if details == NO_DETAILS else details
        if status in STARTING and time.monotonic() - start > LONGEST_START:
            values = {"seconds": LONGEST_START, "status": status, "run": run_id, "name": name}
            raise RunFailedError(NEVER_STARTED.format(**values), [])
        was_silent = is_silent
        is_silent = status == UNKNOWN
        printed = without_passwords(listed.stdout + listed.stderr)
        if is_silent and LOST_RUN in printed:  # final: its database was replaced
            raise RunFailedError(sentence_for(printed, name), [])
        answered = answered if is_silent else time.monotonic()
        says_more = folder is not None and (folder.stage is not None or folder.has_ended())
        if status != shown and (is_silent or was_silent or not says_more):
            fault = sentence_for(printed, name)
            silent = SILENT.format(name=name, seconds=LONGEST_SILENCE)
            silent = f"{fault}; {silent}" if fault else silent
            report(silent if is_silent else f"the run is {status}, says Flower")
            shown = status
        seldom = LOCAL_POLL_SECONDS if name == LOCAL and says_more else STATUS_POLL_SECONDS
        _pause(ENDING_POLL_SECONDS if is_silent else seldom, folder)
        if folder and _is_over(folder) and shown != "ended":
            died = f"{DIED}; " if folder.has_died else ""
            report(f"{died}waiting for Flower to end the run", ends=bool(died))
            shown = "ended"
    return UNKNOWN, ""


def _is_over(folder: RunFolder | None) -> bool:
    """Whether a run on this machine has ended, with a word or without."""
    return folder is not None and (folder.has_ended() or folder.has_died)


def _pause(longest: float, folder: RunFolder | None) -> None:
    """Wait ``longest`` seconds, or one if the run's folder shows that it has ended."""
    began = time.monotonic()
    time.sleep(ENDING_POLL_SECONDS)
    while time.monotonic() - began < longest and not _is_over(folder):
        time.sleep(0.1)


def _cause(folder: RunFolder | None) -> str:
    """Why a run failed, from its folder; empty if that is on another machine, or does not say."""
    if folder is None:
        return ""
    path = folder.path / "failure.json"
    failure = json.loads(path.read_text()) if path.exists() else {"error": "", "message": ""}
    if failure["error"] in STOPPED:
        return f"the ServerApp was stopped; {RESUME.format(folder.path)}"
    return str(failure["message"])


def sentence_for(printed: str, name: str) -> str:
    """The meaning of a failed Flower command's output (JSON or a log); empty if unknown."""
    text = printed.replace("\\n", "\n")
    for pattern, sentence in SENTENCES.items():
        if match := re.search(pattern, text):
            fault = fault_of(match[1], name) if sentence == UNREACHED else ""
            return sentence.format(*match.groups(), name=name) + fault
    return ""


def failed(printed: str, name: str, otherwise: str) -> RunFailedError:
    """The error for a failed command: its meaning, or ``otherwise`` and the last lines."""
    printed = without_passwords(printed)
    if sentence := sentence_for(printed, name):
        return RunFailedError(sentence, [])
    return RunFailedError(otherwise, printed.splitlines()[-LOG_LINES:])


def check_programs(environment: Mapping[str, str], *programs: str) -> None:
    """Raise RunFailedError if one of Flower's programs is not installed."""
    for program in programs:
        if shutil.which(program, path=environment["PATH"]) is None:
            rule = "must be installed beside Python (pip install 'flwr[simulation]')"
            raise RunFailedError(f"{program} {rule}, got none on the PATH", [])
