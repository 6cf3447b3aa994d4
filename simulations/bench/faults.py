"""Faults of a deployment as a table: what names them, after how long, and how the run ends.

``FAULTS`` is the table, a row a fault and the phase of a run in which it strikes; ``faults`` is the
bench. A fault is a context: it strikes when the block begins, and is undone when the block ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import psutil

from fedapp.deploy import certificates
from fedapp.run_folder import RunFolder, Stage
from fedapp.runs.flower import free_ports
from simulations.bench.exchange import SITES, write_tables
from simulations.study import (
    SUPEREXEC,
    SUPERLINK,
    SUPERNODE,
    WORKER,
    Deployment,
    Row,
    check_names,
    looking,
    settings_of,
    show,
)

SITE, COORDINATOR = SITES[0], "coordinator"
SMALL: Row = {"parties": len(SITES), "num-boost-round": 3, "max-depth": 2}
SMALL_KEY: Row = {"secureboost.key-bits": 512, "secureboost.insecure-small-key": "true"}
METHODS: Mapping[str, Row] = {
    "pax": SMALL | {"max-bin": 64},
    "secureboost": SMALL | SMALL_KEY | {"max-bin": 16},
}
FAULTS_SEED = 1
LIMIT = 300.0  # seconds that a run may take, and a resumed one again
LOOK_SECONDS = 0.1
STOPPED, AWAY, LATE = 30.0, 40.0, 70.0  # seconds
CORES = 0.1  # of a slow site
# When a fault strikes, as the run's folder shows.
BEFORE, START, FIRST, ROUND, LAST = "before", "start", "first exchange", "round 2", "last round"
PHASES: Mapping[str, Callable[[Stage | None], bool]] = {
    START: lambda stage: True,  # of the command
    FIRST: lambda stage: stage is not None and not stage.doing.startswith("waiting for"),
    ROUND: lambda stage: stage is not None and stage.round >= 2,
    LAST: lambda stage: stage is not None and stage.round == stage.rounds > 0,
}
SAME, NAMED, NOT_TRIED = "same model", "named error", "not tried"
GOOD = {SAME, f"{NAMED}; resumed: {SAME}", f"{NAMED}; restarted: {SAME}"}
COMPLAINT = re.compile(r"\S+Z (?:WARNING|ERROR) (.*)")  # in a log
CLOCK = re.compile(r"(?<!whose )clock is")


class NotTriedError(Exception):
    """This machine does not allow the fault, or the run had ended before it."""


# Three sites, and the run that a fault disturbs


class Scene(Deployment):
    """Three sites, the first of them behind a TCP proxy."""

    run: subprocess.Popen[str]
    run_dir: Path

    def __init__(self, folder: Path, method: str) -> None:
        self.hooks = folder / "hooks"  # on the path of all processes
        self.hooks.mkdir(parents=True)
        self.settings = {"strategy": method, **METHODS[method]}
        more = {"runs-per-day": "1000", "allow-insecure": "true"}
        nodes = write_tables(folder, by_columns=method == "secureboost")
        super().__init__(folder / "sites", {name: node | more for name, node in nodes.items()})
        self.sign()
        self.proxy = Proxy(self.superlink)
        self.script = self.folder / SITE / "start-supernode.sh"
        text = self.script.read_text().replace(self.superlink, f"localhost:{self.proxy.port}")
        self.script.write_text(text)
        run = self.locally(folder / "local", self.settings)
        self.model = (run.path / "model.json").read_bytes()
        self.seconds = LIMIT  # of an undisturbed run

    def start(self, *names: str) -> None:
        """Start scripts whose processes import the folder's hooks."""
        path = os.pathsep.join([str(self.hooks), os.environ.get("PYTHONPATH", "")])
        with patch.dict(os.environ, {"PYTHONPATH": path}):
            super().start(*names)

    def sign(self) -> None:
        """Sign a new certificate of the SuperLink, valid for `certificates.YEARS`."""
        key, crt, *server = (
            self.coordinator / name for name in ("ca.key", "ca.crt", "server.key", "server.crt")
        )
        ca = certificates.KeyPair(key.read_bytes(), crt.read_bytes())
        authority = certificates.renewed_authority(ca)
        pair = certificates.server_certificate(authority, ["localhost", "127.0.0.1", GATEWAY])
        for path, content in zip(server, (pair.secret, pair.public), strict=True):
            path.write_bytes(content)

    @property
    def output(self) -> Path:
        """What the command has printed."""
        return self.run_dir.with_suffix(".txt")

    def command(self, settings: Mapping[str, object]) -> None:
        """Start the run's command."""
        words = ("run", self.settings["strategy"], "--engine", "federation")
        with self.output.open("a") as output:
            self.run = self.begin(*words, *settings_of(settings), output=output)

    def wait(self, seconds: float) -> None:
        """Wait, but not beyond the run's end."""
        with suppress(subprocess.TimeoutExpired):
            self.run.wait(seconds)

    def wait_for_phase(self, phase: str | float) -> None:
        """Wait until a run is in a phase, or has lasted a share of an undisturbed one's time."""
        if isinstance(phase, float):
            return self.wait(phase * self.seconds)
        deadline = time.monotonic() + LIMIT
        while not PHASES[phase](RunFolder(self.run_dir).stage):
            assert time.monotonic() < deadline, f"no {phase} within {LIMIT:.0f} s"
            if self.run.poll() is not None:
                raise NotTriedError(f"the run ended before its {phase}")
            time.sleep(0.02)
        return None

    def running_process(self, place: str, program: str) -> psutil.Process:
        """A process of a script, as soon as there is one."""
        while (process := self.process(place, program)) is None:
            if self.run.poll() is not None:
                raise NotTriedError(f"the run ended without {program}")
            time.sleep(0.02)
        return process

    def outcome(self, named: str) -> str:
        """How the command ends; an error is named if its last line matches."""
        self.wait(LIMIT)
        if self.run.poll() is None:
            return f"not done in {LIMIT:.0f} s"
        if self.run.returncode == 0:
            model = (self.run_dir / "model.json").read_bytes()
            return SAME if model == self.model else "another model"
        last = self.output.read_text().rstrip().rpartition("\n")[2]
        return NAMED if re.search(named, last) else "unclear error"


class Witness:
    """Finds the first line that names a fault, in what the command prints or in a log."""

    def __init__(self, scene: Scene, named: str) -> None:
        self._named, self._start = named, time.monotonic()
        paths = [scene.output, *map(scene.log, (COORDINATOR, *SITES))]
        self._read = {path: path.stat().st_size for path in paths}
        self.line = self.wrong = ""
        self.seconds: float | None = None

    def look(self) -> None:
        """Read the lines that are new."""
        for path, start in self._read.items():
            with path.open("rb") as file:
                file.seek(start)
                lines, newline, _ = file.read().rpartition(b"\n")
            self._read[path] = start + len(lines + newline)
            for line in lines.decode(errors="replace").splitlines():
                complaint = COMPLAINT.match(line)
                if path.suffix != ".log" or complaint:
                    self._hear(complaint[1] if complaint else f"fedapp run: {line}")

    def _hear(self, line: str) -> None:
        if self.seconds is None and re.search(self._named, line):
            self.line, self.seconds = line, round(time.monotonic() - self._start, 1)
        if CLOCK.search(line) and "clock" not in self._named:
            self.wrong = self.wrong or line


# What strikes: each is a context, given the scene


def nothing(_: Scene) -> AbstractContextManager[None]:
    """No fault."""
    return nullcontext()


@contextmanager
def killed(scene: Scene, place: str, program: str) -> Iterator[None]:
    """SIGKILL."""
    scene.running_process(place, program).kill()
    yield


@contextmanager
def stopped(scene: Scene, place: str, program: str) -> Iterator[None]:
    """SIGSTOP, then SIGCONT."""
    process = scene.running_process(place, program)
    process.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


@contextmanager
def without_database(scene: Scene) -> Iterator[None]:
    """The SuperLink dies and comes back without its database, which then is put back."""
    superlink = partial(scene.running_process, COORDINATOR, SUPERLINK)
    files = [path.rename(path.with_name(f"away-{path.name}")) for path in _database(scene)]
    superlink().kill()
    try:
        yield
    finally:
        with suppress(NotTriedError):
            superlink().kill()
        for path in _database(scene):
            path.unlink()
        for path in files:
            path.rename(path.with_name(path.name.removeprefix("away-")))


def _database(scene: Scene) -> list[Path]:
    return [*scene.coordinator.glob("superlink.db*")]


# Python imports a module of this name when it starts.
HOOK = """
import os, sys, time
words = map(os.path.basename, sys.orig_argv[:5])
if os.environ.get("FEDAPP_NAME") in {places} and "{program}" in words:
    time.sleep({seconds})
"""


@contextmanager
def late(scene: Scene, places: tuple[str, ...], program: str) -> Iterator[None]:
    """A program takes `LATE` seconds longer to start."""
    hook = scene.hooks / "sitecustomize.py"
    hook.write_text(HOOK.format(places=places, program=program, seconds=LATE))
    try:
        yield
    finally:
        hook.unlink()


@contextmanager
def slow(scene: Scene) -> Iterator[None]:
    """A site's processes run for a share of each second."""

    def send(number: signal.Signals) -> None:
        for process in scene.family(SITE):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def pause() -> None:
        send(signal.SIGSTOP)
        time.sleep(1 - CORES)
        send(signal.SIGCONT)

    with looking(pause, CORES):
        yield


@contextmanager
def small_disk(scene: Scene) -> Iterator[None]:
    """A site's home is on a disk of its own, of 2 MiB."""
    home = scene.folder / SITE / "home"
    command = ("mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", str(home))
    _as_root(command)
    try:
        yield
    finally:
        _as_root(("umount", "--lazy", str(home)))


@contextmanager
def full_disk(scene: Scene) -> Iterator[None]:
    """A file takes what is left of a site's disk."""
    filler = scene.folder / SITE / "home" / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        filler.unlink()


def _as_root(*commands: Iterable[str]) -> None:
    for command in commands:
        try:
            done = subprocess.run([*command], capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise NotTriedError(f"needs {error.filename}") from None
        if done.returncode:
            raise NotTriedError(f"needs the right to {shlex.join(command)}: {done.stderr.strip()}")


@contextmanager
def restarted(scene: Scene, path: Path, text: str) -> Iterator[None]:
    """A site runs with another text of a file of its folder, and later with the first again."""
    before = path.read_text()

    def restart(content: str) -> None:
        scene.stop(SITE)
        path.write_text(content)
        scene.start(SITE)

    restart(text)
    try:
        yield
    finally:
        restart(before)


@contextmanager
def clock_ahead(scene: Scene) -> Iterator[None]:
    """A site's clock is an hour ahead."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if library is None:
        raise NotTriedError("needs libfaketime")
    fake = f"export LD_PRELOAD={library} FAKETIME=+1h FAKETIME_DONT_FAKE_MONOTONIC=1\n"
    path = scene.folder / SITE / "env.sh"
    with restarted(scene, path, path.read_text() + fake):
        yield


@contextmanager
def expired(scene: Scene) -> Iterator[None]:
    """The SuperLink's certificate has expired, and then is renewed."""
    try:
        with patch.object(certificates, "YEARS", 0):
            scene.sign()
        scene.running_process(COORDINATOR, SUPERLINK).kill()
        yield
    finally:
        scene.sign()
        scene.running_process(COORDINATOR, SUPERLINK).kill()


# The network


class Proxy:
    """A TCP proxy; ``mode`` is what happens to bytes from now on.

    "pass"; "stall": they wait until the mode changes; "drop": they are lost, and the connection
    stays open; "delay": each piece takes a second; "fail": they end their connection.
    """

    def __init__(self, server: str, host: str = "127.0.0.1") -> None:
        self.mode, self.host, (self.port,) = "pass", host, free_ports(1)
        self._server = server.rpartition(":")[2]
        self.open()

    def open(self) -> None:
        """Listen."""
        is_open = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._listen(is_open),))
        self._thread.start()
        is_open.wait()

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _listen(self, is_open: threading.Event) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, self.host, self.port)
        is_open.set()
        await self._end.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        # As a proxy before a server that is gone: it accepts the connection, and ends it.
        with suppress(OSError, asyncio.CancelledError):
            answers, requests = await asyncio.open_connection("127.0.0.1", self._server)
            writers.append(requests)
            pipes = (self._pipe(reader, requests), self._pipe(answers, writer))
            await asyncio.wait(map(asyncio.ensure_future, pipes), return_when="FIRST_COMPLETED")
        for each in writers:
            each.close()

    async def _pipe(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        is_lost = False
        with suppress(OSError):
            while data := await source.read(2**16):
                while self.mode == "stall":
                    await asyncio.sleep(0.1)
                await asyncio.sleep(self.mode == "delay")
                if self.mode == "fail":
                    return
                is_lost = is_lost or self.mode == "drop"
                if not is_lost:
                    sink.write(data)
                    await sink.drain()


@contextmanager
def proxied(scene: Scene, mode: str) -> Iterator[None]:
    """A site's proxy does this with its bytes."""
    scene.proxy.mode = mode
    try:
        yield
    finally:
        scene.proxy.mode = "pass"


NGINX = """
load_module modules/ngx_stream_module.so;
daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log; events {{ }}
stream {{ server {{ listen 127.0.0.1:{port}; proxy_pass 127.0.0.1:{server}; }} }}
"""


@contextmanager
def behind_nginx(scene: Scene) -> Iterator[None]:
    """nginx, which forwards TCP, in place of a site's proxy."""
    config, server = scene.hooks / "nginx.conf", scene.superlink.rpartition(":")[2]
    config.write_text(NGINX.format(folder=scene.hooks, port=scene.proxy.port, server=server))
    command = ("/usr/sbin/nginx", "-c", str(config))
    _as_root((*command, "-t"))
    scene.proxy.close()
    nginx = subprocess.Popen(command)
    try:
        yield
    finally:
        nginx.terminate()
        nginx.wait()
        scene.proxy.open()


NETWORK, GATEWAY, ADDRESS = "fedapp-faults", "10.123.98.1", "10.123.98.2"


@contextmanager
def own_network(scene: Scene) -> Iterator[None]:
    """A site's processes are in a network namespace, whose link leads to a proxy."""
    link = f"ip link add {NETWORK} type veth peer name eth0 netns {NETWORK}"
    inside = f"ip -n {NETWORK}"
    try:
        _as_root(
            f"ip netns add {NETWORK}".split(),
            link.split(),
            f"ip address add {GATEWAY}/24 dev {NETWORK}".split(),
            f"ip link set {NETWORK} up".split(),
            f"{inside} address add {ADDRESS}/24 dev eth0".split(),
            f"{inside} link set eth0 up".split(),
            f"{inside} link set lo up".split(),
        )
        proxy = Proxy(scene.superlink, GATEWAY)
        enter = f'[ "$(ip netns identify)" ] || exec ip netns exec {NETWORK} "$0"'
        first, rest = scene.script.read_text().split("\n", 1)
        rest = rest.replace(f"localhost:{scene.proxy.port}", f"{GATEWAY}:{proxy.port}")
        try:
            with restarted(scene, scene.script, f"{first}\n{enter}\n{rest}"):
                yield
        finally:
            proxy.close()
    finally:
        subprocess.run(["ip", "netns", "delete", NETWORK], check=False)


@contextmanager
def link_down(_: Scene) -> Iterator[None]:
    """The link of `own_network` is down."""
    _as_root(f"ip link set {NETWORK} down".split())
    try:
        yield
    finally:
        _as_root(f"ip link set {NETWORK} up".split())


# The table


Strike = Callable[[Scene], AbstractContextManager[None]]
AT_SITE = rf"waiting for.*\b{SITE}\b|\b{SITE}\b.*(ended|SuperLink|not connected)"


@dataclass(frozen=True, slots=True)
class Fault:
    """A row of the table; ``named`` is the pattern of a line that names the site and the cause."""

    name: str
    phase: str | float  # of `PHASES`, `BEFORE` the command, or a share of an undisturbed run's time
    strike: Strike
    named: str = AT_SITE
    seconds: float = 0.0  # that it lasts, at most until the run's end
    given: Strike = nothing  # around the run
    method: str = "pax"
    is_thin: bool = True  # whether it is tried without --all


PROCESSES: Mapping[str, tuple[str, str, str]] = {
    "superlink": (COORDINATOR, SUPERLINK, r"SuperLink|superlink: ended"),
    "supernode": (SITE, SUPERNODE, AT_SITE),
    "serverapp": (COORDINATOR, "flwr-serverapp", "ServerApp|flwr-serverapp"),
    "superexec": (SITE, SUPEREXEC, AT_SITE),
    "worker": (SITE, WORKER, AT_SITE),
    "coordinator": (COORDINATOR, "fedapp.deploy.coordinator", "ServerApp|coordinator: ended"),
}


def of_processes(name: str, strike: Callable[..., AbstractContextManager[None]]) -> Iterator[Fault]:
    """SIGKILL or SIGSTOP of every process in every phase; thinned, in round 2 and one other."""
    seconds = STOPPED if strike is stopped else 0.0
    for number, (process, (place, program, named)) in enumerate(PROCESSES.items()):
        for phase in PHASES:
            is_thin = phase == ROUND or (phase == [START, FIRST, LAST][number % 3] and not seconds)
            disturb = partial(strike, place=place, program=program)
            fault = Fault(f"{name}-{process}", phase, disturb, named, seconds, is_thin=is_thin)
            yield fault
            if phase == ROUND and process in ("supernode", "worker", "serverapp"):
                yield replace(fault, method="secureboost")


UNDISTURBED = Fault("none", START, nothing)
FAULTS = (
    *of_processes("kill", killed),
    *of_processes("stop", stopped),
    Fault("no-database", ROUND, without_database, "database", 10.0),
    Fault("late-worker", START, partial(late, places=(SITE,), program=WORKER), seconds=LIMIT),
    Fault("late-workers", START, partial(late, places=SITES, program=WORKER), seconds=LIMIT),
    Fault(
        "late-serverapp",
        START,
        partial(late, places=(COORDINATOR,), program="flwr-serverapp"),
        "ServerApp",
        LIMIT,
    ),
    Fault("slow-site", START, slow, seconds=LIMIT),
    Fault("full-disk", ROUND, full_disk, "No space left", LIMIT, small_disk),
    Fault("clock", BEFORE, clock_ahead, rf"{SITE}.*clock", LIMIT),
    Fault("certificate", ROUND, expired, "certificate.*expired|expired.*certificate", 20.0),
    Fault("certificate", START, expired, "certificate.*expired|expired.*certificate", 20.0),
    *(
        Fault(f"proxy-{mode}", ROUND, partial(proxied, mode=mode), seconds=AWAY)
        for mode in ("stall", "drop", "delay", "fail")
    ),
    Fault(
        "nginx",
        ROUND,
        partial(killed, place=COORDINATOR, program=SUPERLINK),
        PROCESSES["superlink"][2],
        given=behind_nginx,
    ),
    Fault("link-down", ROUND, link_down, seconds=AWAY, given=own_network),
)
RANDOM = "kill-random"
NAMES = tuple(dict.fromkeys([*(fault.name for fault in FAULTS), RANDOM]))


def random_kill(rng: random.Random) -> Fault:
    """SIGKILL of one of a run's processes, of any site, at any moment."""
    place, program, named = rng.choice([*PROCESSES.values()])
    place = place if place == COORDINATOR else rng.choice(SITES)
    named = named.replace(SITE, place)
    return Fault(RANDOM, rng.random(), partial(killed, place=place, program=program), named)


# The bench


def faults(
    only: tuple[str, ...] = NAMES,
    all: bool = False,
    load: int = 0,
    n: int = 3,
    seed: int = FAULTS_SEED,
) -> Iterator[Row]:
    """Disturb runs across three sites, one fault a run, and see what names it and how they end.

    ``python -m simulations bench faults`` kills, stops, delays and starves processes of a
    deployment on this machine, fills a site's disk, sets its clock wrong, lets certificates expire
    and disturbs the network, each in one or two phases of a PAX run, and a few in SecureBoost;
    ``--all`` strikes in every phase, ``--only NAME ...`` chooses faults. ``--n`` runs lose a random
    process at a random moment, of ``--seed``. ``--load`` processes keep the machine busy meanwhile.

    A run ends well with the model of an undisturbed one, byte for byte, or with an error whose last
    line names the place or cause, after which it ends with that model as it is resumed. Times count
    from the fault: until a line of the command or a warning in a log names it, and until the run
    has ended, resumed or not. Prints a JSON line a run, then the table; the exit status is 1 if a
    run ended in another way, or if a clock was blamed wrongly. Faults that this machine does not
    allow are said not to have been tried.
    """
    check_names("only", only, NAMES)
    # What ends the command ends what it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rng = random.Random(seed)
    chosen = [fault for fault in FAULTS if fault.name in only and (all or fault.is_thin)]
    chosen += [random_kill(rng) for _ in range(n if RANDOM in only else 0)]
    lines: list[Row] = []
    with busy(load), tempfile.TemporaryDirectory() as name:
        os.environ["FEDAPP_HOME"] = f"{name}/home"
        for method in METHODS:
            mine = [fault for fault in chosen if fault.method == method]
            for line in disturbed(Path(name) / method, method, mine) if mine else ():
                lines.append(line)
                yield line
    columns = "fault; phase; method; outcome; named by=shown; named after=named:.0f; "
    columns += "ended after=ended:.0f"
    shown = [line | {"shown": line["line"][:60]} for line in lines]
    show("one fault a run; seconds since the fault", shown, columns, n_texts=5)
    tally = Counter(line["outcome"].partition(":")[0] for line in lines)
    yield {"runs": len(lines), "load": load, **tally}
    if not all_good(lines):
        raise SystemExit(1)


def all_good(lines: Iterable[Row]) -> bool:
    """Whether every run ended well, or its fault could not be tried."""
    return all(line["outcome"] in GOOD or line["outcome"].startswith(NOT_TRIED) for line in lines)


@contextmanager
def busy(n: int) -> Iterator[None]:
    """Keep a machine busy with ``n`` processes."""
    code = "while True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(n)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def disturbed(folder: Path, method: str, faults: Iterable[Fault]) -> Iterator[Row]:
    """An undisturbed run, and one with each fault, a line each."""
    scene = Scene(folder, method)
    try:
        scene.start(COORDINATOR)
        scene.register()
        scene.start(*SITES)  # a site that was not registered yet would end
        for number, fault in enumerate([replace(UNDISTURBED, method=method), *faults]):
            line = tried(scene, fault, folder / f"run-{number}")
            yield line
            if fault.strike is nothing:
                scene.seconds = line["ended"]
            if not all_good([line]):  # the next run shall not suffer from it
                scene.close()
                scene.start(COORDINATOR, *SITES)
    finally:
        scene.close()
        scene.proxy.close()


def tried(scene: Scene, fault: Fault, run_dir: Path) -> Row:
    """Disturb one run, resume it if it has ended in an error, and return what was seen."""
    scene.run_dir, start = run_dir, time.monotonic()
    begin = partial(scene.command, {**scene.settings, "run-dir": run_dir})
    witness: Witness | None = None
    try:
        with fault.given(scene), ExitStack() as strike:
            if fault.phase == BEFORE:
                strike.enter_context(fault.strike(scene))
            begin()
            if fault.phase != BEFORE:
                scene.wait_for_phase(fault.phase)
            witness, start = Witness(scene, fault.named), time.monotonic()
            with looking(witness.look, LOOK_SECONDS):
                if fault.phase != BEFORE:
                    strike.enter_context(fault.strike(scene))
                scene.wait(fault.seconds)
                strike.close()
                outcome = scene.outcome(fault.named)
                if scene.run.returncode:
                    is_begun = (run_dir / "config.toml").exists()
                    again = partial(scene.command, {"resume": run_dir}) if is_begun else begin
                    scene.wait_until_listening()
                    again()
                    outcome += f"; {'resumed' if is_begun else 'restarted'}: "
                    outcome += scene.outcome(fault.named)
    except NotTriedError as error:
        outcome = f"{NOT_TRIED}: {error}"
        scene.wait(LIMIT)
    except AssertionError as error:  # as of a script that does not end
        outcome = f"failed: {error}"
    finally:
        scene.run.kill()
    line: Row = {"fault": fault.name, "phase": fault.phase, "method": fault.method}
    line |= {"outcome": outcome, "ended": round(time.monotonic() - start, 1)}
    line |= {"named": None, "line": ""}
    if witness:
        line |= {"named": witness.seconds, "line": witness.line}
        if witness.wrong:
            line |= {"outcome": f"{outcome}, a clock is blamed", "wrong": witness.wrong}
    if not all_good([line]):
        line["shown"] = scene.output.read_text()[-1000:]
    return line
