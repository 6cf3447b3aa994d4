"""Faults of a deployment as a table: what names each, after how long, and how the run ends.

``FAULTS`` is the table. A fault strikes by a function of the `Scene`, or of the `Scores`, which
also registers how it is undone; ``faults`` is the bench.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from queue import Queue
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import TypeVar
from unittest.mock import patch

import httpx
import psutil

from fedapp.deploy.folders import renew_certificates, renew_key
from fedapp.deploy.members import add_sites, remove_site
from fedapp.home import is_written, write_atomically
from fedapp.run_folder import RunFolder, Stage
from fedapp.runs.flower import free_ports
from fedapp.site import certificates
from fedapp.site.certificates import new_authority
from fedapp.site.log import LOG
from simulations.bench.fault import (
    AT_SITE,
    COORDINATOR,
    LIMIT,
    LOOK_SECONDS,
    SITE,
    SITES,
    SMALL,
    Fault,
    NotTriedError,
    hook,
    nothing,
    scripted,
    table_with_ids,
    wrong_clock,
)
from simulations.bench.faults_of_scores import LIVE, OF_SCORES, SCORES, STANDING, Scores
from simulations.deployment import (
    RUN_SECONDS,
    SUPEREXEC,
    SUPERLINK,
    SUPERNODE,
    WORKER,
    Deployment,
    Proxy,
    flower_with,
    run_words,
    site_tables,
)
from simulations.study import Row, check_names, looking, show

T = TypeVar("T")
SMALL_KEY: Row = {"secureboost.key-bits": 512, "secureboost.insecure-small-key": "true"}
METHODS: Mapping[str, Row] = {"pax": SMALL, "secureboost": SMALL | SMALL_KEY}
# Deployments that share a method's faults, and how many are disturbed at the same time.
LANES, AT_ONCE = {"pax": 2, "secureboost": 1, STANDING: 1}, 3
LATE, CORES = 70.0, 0.1  # seconds that a start takes longer, and cores of a slow site
# When a fault strikes, as the run's folder shows.
START, FIRST, ROUND, LAST = "start", "first exchange", "round 2", "last round"
PHASES: Mapping[str, Callable[[Stage | None], bool]] = {
    START: lambda stage: True,  # of the command
    FIRST: lambda stage: stage is not None and not stage.doing.startswith("waiting for"),
    ROUND: lambda stage: stage is not None and stage.round >= 2,
    LAST: lambda stage: stage is not None and stage.round == stage.rounds > 0,
}
SAME, NAMED, NOT_TRIED = "same model", "named error", "not tried"
GOOD = {SAME, SCORES, *(f"{NAMED}; {how}: {SAME}" for how in ("gone on", "resumed", "restarted"))}
COMPLAINT = re.compile(r"^\S+Z (?:WARNING|ERROR) (.*)", re.MULTILINE)  # in a log
CLOCK = re.compile(r"(?<!whose )clock is")
# The network of a site: a namespace, and the addresses of its link.
NETWORK, GATEWAY, ADDRESS = "fedapp-faults", "10.123.98.1", "10.123.98.2"


class Scene(Deployment):
    """Three sites, the first of them behind a proxy, and the run that a fault disturbs."""

    run: subprocess.Popen[str]
    run_dir: Path
    output: Path  # what the command has printed

    def __init__(self, folder: Path, method: str) -> None:
        self.hooks = folder / "hooks"  # on the path of all processes
        self.hooks.mkdir(parents=True)
        self.method, self.settings = method, Row()
        table, label = table_with_ids()
        nodes = site_tables(folder, table, SITES, label, method == "secureboost")
        super().__init__(folder / "sites", nodes, host=GATEWAY)
        self.port = int(self.superlink.rpartition(":")[2])
        self.proxy = Proxy(self.port)
        self.script = self.folder / SITE / "start-supernode.sh"
        self.script.write_text(self.script.read_text().replace(self.superlink, self.proxy.address))
        self.seconds = self.limit = float(RUN_SECONDS)  # of an undisturbed run, and of each

    def open(self) -> None:
        """Start everything. A site that is not registered yet would end."""
        self.start(COORDINATOR)
        self.register()
        self.start(*SITES)

    def end(self) -> None:
        """End everything."""
        self.close()
        self.proxy.shutdown()
        self.proxy.server_close()

    def restart(self, name: str) -> None:
        """Stop a site and start it."""
        self.stop(name)
        self.start(name)

    def command(self, settings: Mapping[str, object]) -> None:
        """Start the run's command."""
        with self.output.open("a") as output:
            self.run = self.begin(*run_words({"strategy": self.method, **settings}), output=output)

    def wait(self, seconds: float) -> None:
        """Wait, but not beyond the run's end."""
        with suppress(subprocess.TimeoutExpired):
            self.run.wait(seconds)

    def found(self, look: Callable[[], T], what: str) -> T:
        """The first true result of ``look``; NotTriedError if the run ends before."""
        deadline = time.monotonic() + self.limit
        while not (result := look()):
            assert time.monotonic() < deadline, f"no {what} within {self.limit:.0f} s"
            if self.run.poll() is not None:
                raise NotTriedError(f"the run ended before its {what}")
            time.sleep(0.02)
        return result

    def enter(self, fault: Fault, run_dir: Path) -> None:
        """Start the run and wait until the fault is to strike."""
        settings = {"strategy": self.method, **METHODS[self.method], **fault.settings}
        if settings != self.settings:
            self.settings = settings
            local = self.locally(run_dir.with_suffix(".local"), settings)
            self.model = (local.path / "model.json").read_bytes()
        self.run_dir = run_dir
        self.command({**settings, "run-dir": run_dir})
        if isinstance(fault.phase, float):
            self.wait(fault.phase * self.seconds)
        else:
            is_there = PHASES[fault.phase]
            self.found(lambda: is_there(RunFolder(run_dir).stage), fault.phase)

    def outlast(self, fault: Fault, undo: ExitStack, is_named: Callable[[], bool]) -> Row:
        """Undo the fault in time, wait for the run, and resume it if it ends in an error."""
        began = time.monotonic()
        self.wait(fault.seconds)
        while fault.must and not is_named() and time.monotonic() - began < LIMIT:
            if self.run.poll() is not None:
                break
            time.sleep(LOOK_SECONDS)
        undo.close()
        outcome = self.outcome(fault.named)
        run = RunFolder(self.run_dir)
        if self.run.returncode:
            is_begun = run.has_begun
            self.wait_until_listening()
            # A ServerApp whose run the SuperLink has forgotten ends at its next request, or
            # the run goes on once it remembers.
            while is_written(self.run_dir) and time.monotonic() - began < self.limit:
                time.sleep(LOOK_SECONDS)
            has_gone_on = run.has_finished  # without the command
            if not has_gone_on:
                again = {"resume": self.run_dir}
                self.command(again if is_begun else {**self.settings, "run-dir": self.run_dir})
            how = "gone on" if has_gone_on else "resumed" if is_begun else "restarted"
            end = self.same_model() if has_gone_on else self.outcome(fault.named)
            outcome += f"; {how}: {end}"
        if fault.noted and not (run.has_finished and re.search(fault.noted, str(run.summary))):
            outcome += f", but no {fault.noted!r} in its summary"
        return {"outcome": outcome}

    def outcome(self, named: str) -> str:
        """How the command ends; an error is named if its last line matches, or names the SuperLink.

        The command's own connection may end at once, before it could have another cause.
        """
        self.wait(self.limit)
        if self.run.poll() is None:
            return f"not done in {self.limit:.0f} s"
        if self.run.returncode == 0:
            return self.same_model()
        last = self.output.read_text().rstrip().rpartition("\n")[2]
        return NAMED if re.search(f"{named}|the SuperLink '", last) else f"unclear error {last!r}"

    def same_model(self) -> str:
        """Whether the run's model is that of an undisturbed run, byte for byte."""
        model = (self.run_dir / "model.json").read_bytes()
        return SAME if model == self.model else "another model"

    def leave(self) -> None:
        """End the run."""
        self.run.kill()


class Witness:
    """Finds the first line that names a fault, in what the command prints or in a log."""

    def __init__(self, scene: Scene | Scores, named: str) -> None:
        self._named, self._start = named, time.monotonic()
        paths = [scene.output, *map(scene.log, (COORDINATOR, *SITES))]
        self._read = {path: path.stat().st_size for path in paths}
        self.line = self.wrong = ""
        self.seconds: float | None = None

    def has_seen(self) -> bool:
        """Whether a line has named the fault."""
        return self.seconds is not None

    def look(self) -> None:
        """Read the lines that are new."""
        for path, start in self._read.items():
            lines, newline, _ = path.read_bytes()[start:].rpartition(b"\n")
            self._read[path] = start + len(lines + newline)
            text = lines.decode(errors="replace")
            said = COMPLAINT.findall(text) if path.suffix == ".log" else text.splitlines()
            for line in said:
                if self.seconds is None and re.search(self._named, line):
                    self.line, self.seconds = line, round(time.monotonic() - self._start, 1)
                if CLOCK.search(line) and "clock" not in self._named:
                    self.wrong = self.wrong or line


# What strikes


def signalled(scene: Scene, undo: ExitStack, host: str, program: str, number: int) -> None:
    """Send a signal, and SIGCONT later."""
    process = scene.found(lambda: scene.process(host, program), program)
    assert process
    process.send_signal(number)
    undo.enter_context(suppress(psutil.NoSuchProcess))
    undo.callback(process.send_signal, SIGCONT)


def restart_superlink(scene: Scene) -> None:
    """The SuperLink dies; wait until the next one answers, with the files that it has then."""
    scene.kill(COORDINATOR, SUPERLINK)
    scene.wait_until_listening()


def without_database(scene: Scene, undo: ExitStack) -> None:
    """The SuperLink dies and comes back without its database, which then is put back."""
    path = f"{scene.coordinator}/superlink.db"
    away = f"mkdir {path}-away; mv {path} {path}-shm {path}-wal {path}-away || true"
    back = f"rm -f {path} {path}-shm {path}-wal; mv {path}-away/* {scene.coordinator}"
    scripted(scene, undo, away, f"{back}; rmdir {path}-away")
    undo.callback(scene.kill, COORDINATOR, SUPERLINK)
    restart_superlink(scene)


LATE_START = """
import os, sys, time
words = map(os.path.basename, sys.orig_argv[:5])
if os.environ.get("FEDAPP_NAME") in {hosts} and "{program}" in words:
    time.sleep({seconds})
"""


def late(scene: Scene, undo: ExitStack, hosts: tuple[str, ...], program: str) -> None:
    """A program takes `LATE` seconds longer to start."""
    hook(scene, undo, LATE_START.format(hosts=hosts, program=program, seconds=LATE))


def slow(scene: Scene, undo: ExitStack) -> None:
    """A site's processes run for a share of each second."""

    def pause() -> None:
        for number, seconds in ((SIGSTOP, 1 - CORES), (SIGCONT, 0)):
            for process in scene.family(SITE):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            time.sleep(seconds)

    undo.enter_context(looking(pause, CORES))


def restarted(scene: Scene, undo: ExitStack, path: Path, text: str) -> None:
    """A site runs with another text of a file of its folder."""

    def restart(content: str) -> None:
        write_atomically(path, content.encode(), 0o700)  # a shell may still read the other
        scene.restart(SITE)

    undo.callback(restart, path.read_text())
    restart(text)


# libfaketime 0.9.10 breaks Python's sleep, a clock_nanosleep until a time of the monotonic clock.
SLEEP = (
    "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds) and None"
)


def clock_ahead(scene: Scene, undo: ExitStack) -> None:
    """A site's clock is an hour ahead."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if library is None:
        raise NotTriedError("needs libfaketime")
    hook(scene, undo, SLEEP)
    path = scene.folder / SITE / "env.sh"
    fake = f"export LD_PRELOAD={library} FAKETIME=+1h FAKETIME_DONT_FAKE_MONOTONIC=1\n"
    restarted(scene, undo, path, path.read_text() + fake)


def keeping_log(scene: Scene, undo: ExitStack) -> None:
    """A site keeps its log for 30 days, and must have all of today's lines in the end."""
    path, log = scene.folder / SITE / "site.toml", scene.home(SITE) / "sites" / SITE / LOG
    restarted(scene, undo, path, f"{path.read_text()}log-days = 30\n")
    before = log.read_bytes()
    assert before

    def check() -> None:
        stays = log.read_bytes().startswith(before)
        assert stays, "a log's lines of today must stay, got others in their place"

    undo.callback(check)


def another_flower(scene: Scene, undo: ExitStack) -> None:
    """A site has a Flower of which one patched function has another body."""
    path = scene.folder / SITE / "env.sh"
    overlay = flower_with(scene.hooks / "overlay", *LAUNCH)
    restarted(scene, undo, path, f"{path.read_text()}export PYTHONPATH={overlay}\n")


def another_ca(scene: Scene, undo: ExitStack) -> None:
    """A site has the certificate authority of another federation."""
    other = new_authority("other").files().public.decode()
    restarted(scene, undo, scene.folder / SITE / "ca.crt", other)


def removed(scene: Scene, undo: ExitStack) -> None:
    """A site is removed, and comes back with a new key."""

    def join() -> None:
        renew_key(scene.folder / SITE)
        public = f"{SITE}.pub"
        shutil.copy(scene.folder / SITE / public, scene.coordinator / "sites" / public)
        for _ in add_sites(scene.coordinator, [SITE]):
            scene.restart(SITE)

    undo.callback(join)
    remove_site(scene.coordinator, SITE)


def expired(scene: Scene, undo: ExitStack) -> None:
    """The coordinator's certificates have expired, and then are renewed."""
    undo.callback(scene.kill, COORDINATOR, SUPERLINK)
    undo.callback(renew_certificates, scene.coordinator)
    with patch.object(certificates, "YEARS", 0):
        renew_certificates(scene.coordinator)
    restart_superlink(scene)


def proxied(scene: Scene, undo: ExitStack, mode: str) -> None:
    """A site's proxy does this with its bytes."""
    undo.callback(setattr, scene.proxy, "mode", "pass")
    scene.proxy.mode = mode


NGINX = """
load_module modules/ngx_stream_module.so;
pid {hooks}/nginx.pid; error_log {hooks}/nginx.log; events {{ }}
stream {{ server {{ listen 127.0.0.1:{port}; proxy_pass 127.0.0.1:{server}; }} }}
"""


def behind_nginx(scene: Scene, undo: ExitStack) -> None:
    """nginx, which forwards TCP, is between a site's proxy and the SuperLink."""
    (port,) = free_ports(1)
    text = NGINX.format(hooks=scene.hooks, port=port, server=scene.port)
    (scene.hooks / "nginx.conf").write_text(text)
    nginx = "PATH=$PATH:/usr/sbin nginx -c {hooks}/nginx.conf"
    scripted(scene, undo, nginx, f"{nginx} -s stop")
    undo.callback(setattr, scene.proxy, "server", scene.port)
    scene.proxy.server = port


OWN_NETWORK = f"""
ip netns delete {NETWORK} 2> /dev/null || true
ip netns add {NETWORK}
ip link add {NETWORK} type veth peer name eth0 netns {NETWORK}
ip address add {GATEWAY}/24 dev {NETWORK}
ip link set {NETWORK} up
ip -n {NETWORK} address add {ADDRESS}/24 dev eth0
ip -n {NETWORK} link set eth0 up
ip -n {NETWORK} link set lo up
"""


def own_network(scene: Scene, undo: ExitStack) -> None:
    """A site's processes are in a network namespace, whose link leads to a proxy."""
    scripted(scene, undo, OWN_NETWORK, f"ip netns delete {NETWORK}")
    proxy = Proxy(scene.port, host=GATEWAY)
    undo.callback(proxy.server_close)
    undo.callback(proxy.shutdown)
    first, rest = scene.script.read_text().split("\n", 1)
    enter = f'[ "$(ip netns identify)" ] || exec ip netns exec {NETWORK} "$0"'
    rest = rest.replace(scene.proxy.address, proxy.address)
    restarted(scene, undo, scene.script, f"{first}\n{enter}\n{rest}")


# The table

REMOVED = rf"\b{SITE}\b.*(removed|not registered|fedapp federation add).*resume"
# A patched function of Flower's, and the same in other words.
LAUNCH = (
    "supercore/superexec/plugin/base_exec_plugin.py",
    "if task_type is None:",
    "if not task_type:",
)
MOUNT = "mount -t tmpfs -o size=2m,mode=700 tmpfs {home}"
EXPIRED = "certificate.*expired|expired.*certificate"
LINK = f"ip link set {NETWORK} "
LINK_DOWN = partial(scripted, do=f"{LINK} down", then=f"{LINK} up")


PROCESSES: Mapping[str, tuple[str, str, str]] = {
    "superlink": (COORDINATOR, SUPERLINK, r"SuperLink|superlink: ended"),
    "supernode": (SITE, SUPERNODE, AT_SITE),
    "serverapp": (COORDINATOR, "flwr-serverapp", "ServerApp|flwr-serverapp"),
    "superexec": (SITE, SUPEREXEC, AT_SITE),
    "worker": (SITE, WORKER, AT_SITE),
    "coordinator": (COORDINATOR, "fedapp.deploy.coordinator", "ServerApp|coordinator: ended"),
}


def of_processes(name: str, number: int, seconds: float) -> Iterator[Fault]:
    """A signal to each process in round 2, and SIGKILL in one other phase."""
    in_secureboost = ("supernode", "worker", "serverapp") if number == SIGKILL else ("supernode",)
    for n, (process, (host, program, named)) in enumerate(PROCESSES.items()):
        phases = {ROUND, [START, FIRST, LAST][n % 3]} if number == SIGKILL else {ROUND}
        for phase in sorted(phases, key=[*PHASES].index):
            strike = partial(signalled, host=host, program=program, number=number)
            row = Fault(f"{name}-{process}", phase, strike, named, seconds)
            yield row
            if phase == ROUND and process in in_secureboost:
                yield replace(row, method="secureboost")


SERVERAPP = PROCESSES["serverapp"]
FAULTS = (
    *of_processes("kill", SIGKILL, 0),
    *of_processes("stop", SIGSTOP, 30),
    Fault("no-database", ROUND, without_database, "database", 10),
    Fault("late-worker", START, partial(late, hosts=(SITE,), program=WORKER), seconds=LIMIT),
    Fault("late-workers", START, partial(late, hosts=SITES, program=WORKER), seconds=LIMIT),
    Fault(
        "late-serverapp",
        START,
        partial(late, hosts=SERVERAPP[:1], program=SERVERAPP[1]),
        SERVERAPP[2],
        LIMIT,
    ),
    Fault("slow-site", START, slow, seconds=LIMIT),
    Fault(
        "full-disk",
        ROUND,
        # The file takes what is left of the disk.
        partial(scripted, do="cat /dev/zero > {home}/filler || true", then="rm {home}/filler"),
        "No space left",
        LIMIT,
        partial(scripted, do=MOUNT, then="umount --lazy {home}"),
    ),
    # The coordinator does not hear of it: it names the site, whose log names the clock.
    Fault("clock", START, clock_ahead, rf"{SITE}.*(clock|, not connected)", LIMIT),
    *(Fault("certificate", phase, expired, EXPIRED, 20) for phase in (START, ROUND)),
    *(
        Fault(f"proxy-{mode}", ROUND, partial(proxied, mode=mode), seconds=40)
        for mode in ("stall", "drop", "delay", "fail")
    ),
    replace(next(of_processes("kill", SIGKILL, 0)), name="nginx", phase=ROUND, given=behind_nginx),
    Fault("link-down", ROUND, LINK_DOWN, seconds=40, given=own_network),
    Fault("removed-site", ROUND, removed, REMOVED, 60),
    Fault("wrong-ca", START, another_ca, r"\bca\.crt", 20, must=True),
    Fault(
        "log-clock",
        START,
        partial(wrong_clock, host=SITE, days=365),
        rf"{SITE}.*clock",
        LIMIT,
        keeping_log,
        must=True,
    ),
    Fault(
        "flower-patch",
        START,
        nothing,
        rf"\b{SITE}: flwr",
        given=another_flower,
        settings={"num-boost-round": 1},
        noted=rf"\b{SITE}: flwr",
        must=True,
    ),
    *OF_SCORES,
)
RANDOM = "kill-random"
NAMES = tuple(dict.fromkeys([*(fault.name for fault in FAULTS), RANDOM]))


def random_kill(rng: random.Random) -> Fault:
    """SIGKILL of one of a run's processes, of any site, at any moment."""
    host, program, named = rng.choice([*PROCESSES.values()])
    host = host if host == COORDINATOR else rng.choice(SITES)
    strike = partial(signalled, host=host, program=program, number=SIGKILL)
    return Fault(RANDOM, round(rng.random(), 2), strike, named.replace(SITE, host))


# The bench


def faults(
    only: tuple[str, ...] = NAMES, load: int = 0, n: int = 3, seed: int = 1
) -> Iterator[Row]:
    """Disturb runs across three sites, one fault a run; see what names it and how the run ends.

    ``python -m simulations bench faults`` disturbs processes, disk, clock, certificates, network,
    Flower and members of deployments on this machine, each in one or two phases of a PAX run, a
    few in SecureBoost or while rows are scored between runs; ``--only NAME ...`` chooses faults.
    ``--n`` runs lose a random process at a random moment, of ``--seed``. ``--load`` processes keep
    the machine busy meanwhile.

    A run ends well with the model of an undisturbed one, byte for byte, or with an error whose last
    line names the place or the cause, if it ends with that model once it is resumed. Scores are
    well if they are those of an undisturbed request, to the bit, or refused where ``/health`` has
    said so. Seconds count from the fault: until the command, an answer or a log's warning names it,
    and until the run, resumed or not, has ended, or there are scores again. Prints a JSON line a
    run, with what ``/health`` said, then the table; the exit status is 1 if a run ended in another
    way, if a fault that must be named was not, or if a clock was blamed wrongly. The table says
    which faults were not tried here.
    """
    check_names("only", only, NAMES)
    rng, lines = random.Random(seed), list[Row]()
    chosen = [fault for fault in FAULTS if fault.name in only]
    chosen += [random_kill(rng) for _ in range(n if RANDOM in only else 0)]
    parts = list[tuple[str, list[Fault]]]()
    for method, n_lanes in LANES.items():
        of_method = [fault for fault in chosen if fault.method == method]
        parts += [(method, of_method[first::n_lanes]) for first in range(n_lanes)]
    spawned = get_context("spawn")
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        for _ in range(load):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            ends.callback(busy.wait)
            ends.callback(busy.kill)
        queue = ends.enter_context(spawned.Manager()).Queue()
        pool = ends.enter_context(ProcessPoolExecutor(AT_ONCE, spawned))
        done = [
            pool.submit(lane, queue, folder / f"{number}", *part)
            for number, part in enumerate(parts)
            if part[1]
        ]
        for _ in done:
            for line in iter(queue.get, None):
                said = "; ".join(line.get("health", [line["line"]]))
                lines.append(line | {"says": said[:60]})
                yield line
        for part in done:
            part.result()
    columns = "fault; phase; method; outcome; named by=says; named after=named:.0f; "
    show("seconds since the fault", lines, columns + "ended after=ended:.0f", n_texts=5)
    if not all_good(lines):
        raise SystemExit(1)


def lane(queue: Queue[Row | None], folder: Path, method: str, faults: Iterable[Fault]) -> None:
    """Disturb a deployment of this process; the lines of its runs go into a queue, then None."""
    os.environ["FEDAPP_HOME"] = str(folder / "home")
    try:
        for line in disturbed(folder / method, method, faults):
            queue.put(line)
    finally:
        queue.put(None)


def all_good(lines: Iterable[Row]) -> bool:
    """Whether every run ended well, or its fault could not be tried."""
    return all(line["outcome"] in GOOD or line["outcome"].startswith(NOT_TRIED) for line in lines)


def disturbed(folder: Path, method: str, faults: Iterable[Fault]) -> Iterator[Row]:
    """An undisturbed run, and one with each fault; a line each."""
    scene = Scores(folder) if method == STANDING else Scene(folder, method)
    undisturbed = Fault("none", LIVE if method == STANDING else START, nothing, method=method)
    path = os.environ.get("PYTHONPATH", "")
    with patch.dict(os.environ, {"PYTHONPATH": f"{scene.hooks}{os.pathsep}{path}"}):
        try:
            scene.open()
            for number, fault in enumerate([undisturbed, *faults]):
                line = tried(scene, fault, folder / f"run-{number}")
                yield line
                if not number:
                    scene.seconds, scene.limit = line["ended"], LIMIT + 2 * line["ended"]
                if not all_good([line]):  # the next run shall not suffer from it
                    scene.close()
                    scene.open()
        finally:
            scene.end()


def tried(scene: Scene | Scores, fault: Fault, run_dir: Path) -> Row:
    """Disturb one run, or scores, and return what was seen."""
    scene.output = run_dir.with_suffix(".txt")
    scene.output.touch()
    start, witness = time.monotonic(), None
    seen: Row = {}
    try:
        with ExitStack() as after, ExitStack() as undo:
            fault.given(scene, after)
            scene.enter(fault, run_dir)
            witness, start = Witness(scene, fault.named), time.monotonic()
            with looking(witness.look, LOOK_SECONDS):
                fault.strike(scene, undo)
                seen = scene.outlast(fault, undo, witness.has_seen)
    except (NotTriedError, psutil.NoSuchProcess) as error:
        seen["outcome"] = f"{NOT_TRIED}: {error}"
        scene.wait(scene.limit)
    except (AssertionError, subprocess.TimeoutExpired, httpx.TransportError) as error:
        seen["outcome"] = f"failed: {error}"
    finally:
        scene.leave()
    if witness and fault.must and not witness.has_seen():
        seen["outcome"] += ", but not named"
    if witness and witness.wrong:
        seen["outcome"] += f", but blamed on {witness.wrong!r}"
    line: Row = {"fault": fault.name, "phase": fault.phase, "method": fault.method}
    line |= {**seen, "ended": round(time.monotonic() - start, 1)}
    line |= {"named": witness and witness.seconds, "line": witness.line if witness else ""}
    return line if all_good([line]) else line | {"shown": scene.output.read_text()[-1000:]}
