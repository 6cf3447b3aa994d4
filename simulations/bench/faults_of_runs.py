"""What a fault is; runs across sites, and the rows of the table of faults that disturb them."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any, Protocol, TypeVar
from unittest.mock import patch

import psutil
import pyarrow as pa

from fedapp.data.datasets import source_frame
from fedapp.deploy.folders import renew_certificates, renew_key
from fedapp.deploy.members import add_sites, remove_site
from fedapp.home import is_written, write_atomically
from fedapp.run_folder import RunFolder, Stage
from fedapp.runs.flower import free_ports
from fedapp.site import certificates
from fedapp.site.certificates import new_authority
from fedapp.site.log import LOG
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
from simulations.study import Row, looking

T = TypeVar("T")
SITES, COORDINATOR = ("bank", "insurer", "shop"), "coordinator"
SITE, PEER = SITES[:2]
SMALL: Row = {"parties": len(SITES), "num-boost-round": 3, "max-depth": 2, "max-bin": 32}
LIMIT = 300.0  # seconds by which a fault may delay a run
LOOK_SECONDS = 0.1
# In a line that names the site.
AT_SITE = rf"waiting for.*\b{SITE}\b|\b{SITE}\b.*(ended|SuperLink|not connected)"
Strike = Callable[[Any, ExitStack], None]  # of a Scene or Scores
SMALL_KEY: Row = {"secureboost.key-bits": 512, "secureboost.insecure-small-key": "true"}
METHODS: Mapping[str, Row] = {"pax": SMALL, "secureboost": SMALL | SMALL_KEY}
LATE, CORES = 70.0, 0.1  # seconds that a start takes longer, and cores of a slow site
# When a fault strikes, as the run's folder shows.
START, FIRST, ROUND, LAST = "start", "first exchange", "round 2", "last round"
PHASES: Mapping[str, Callable[[Stage | None], bool]] = {
    START: lambda stage: True,  # of the command
    FIRST: lambda stage: stage is not None and not stage.doing.startswith("waiting for"),
    ROUND: lambda stage: stage is not None and stage.round >= 2,
    LAST: lambda stage: stage is not None and stage.round == stage.rounds > 0,
}
SAME, NAMED = "same model", "named error"
# The network of a site: a namespace, and the addresses of its link.
NETWORK, GATEWAY, ADDRESS = "fedapp-faults", "10.123.98.1", "10.123.98.2"


class NotTriedError(Exception):
    """This machine does not allow the fault, or the run had ended before it."""


class Disturbed(Protocol):
    """What a fault disturbs: a Scene or Scores."""

    hooks: Path

    def home(self, name: str) -> Path: ...
    def restart(self, name: str) -> None: ...


def nothing(scene: Disturbed, undo: ExitStack) -> None:
    """No fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A row; ``phase`` may be a share of an undisturbed run's time."""

    name: str
    phase: str | float
    strike: Strike
    named: str = AT_SITE  # pattern of a line that names place or cause
    seconds: float = 0.0  # that it lasts, or until it is named if it must be, within the run
    given: Strike = nothing  # around the run
    method: str = "pax"
    settings: Row = field(default_factory=dict)  # of its run only
    noted: str = ""  # pattern of what the run's summary must have
    must: bool = False  # be named, also where the run ends as an undisturbed one


def table_with_ids() -> tuple[pa.Table, str]:
    """A small table, and its label."""
    frame, roles, _, _ = source_frame("breast-cancer")
    ids = pa.array([f"p{row}" for row in range(frame.num_rows)])
    return frame.append_column("id", ids), roles.label


def hook(scene: Disturbed, undo: ExitStack, code: str) -> None:
    """Each Python of the deployment runs some code first."""
    path = scene.hooks / "sitecustomize.py"  # which Python imports when it starts
    path.write_text(code)
    undo.callback(path.unlink)


def scripted(scene: Disturbed, undo: ExitStack, do: str, then: str, host: str = SITE) -> None:
    """Run a script, and another one later; NotTriedError if this machine does not allow it."""

    def run(script: str) -> None:
        command = ["bash", "-ec", script.format(home=scene.home(host), hooks=scene.hooks)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotTriedError(done.stderr.strip())

    run(do)
    undo.callback(run, then)


WRONG_CLOCK = """
import os, time
if os.environ.get("FEDAPP_NAME") == "{host}":
    time.time = lambda right=time.time: right() + 86_400 * {days}
"""


def wrong_clock(scene: Disturbed, undo: ExitStack, host: str, days: int) -> None:
    """A site's clock is wrong by some days, for fedapp, not for Flower, since it was started."""
    undo.callback(scene.restart, host)
    hook(scene, undo, WRONG_CLOCK.format(host=host, days=days))
    scene.restart(host)


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
    undo.enter_context(patch.object(scene.proxy, "mode", mode))


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
    undo.enter_context(patch.object(scene.proxy, "server", port))


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


# The rows

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
OF_RUNS = (
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
)
RANDOM = "kill-random"


def random_kill(rng: random.Random) -> Fault:
    """SIGKILL of one of a run's processes, of any site, at any moment."""
    host, program, named = rng.choice([*PROCESSES.values()])
    host = host if host == COORDINATOR else rng.choice(SITES)
    strike = partial(signalled, host=host, program=program, number=SIGKILL)
    return Fault(RANDOM, round(rng.random(), 2), strike, named.replace(SITE, host))
