"""A process of fedapp: its signals, limits, ports, packages, and the format of its log lines.

Few imports, as ``fedapp.__main__`` imports this file first, so that a command can be interrupted
early. A log line of any process of a coordinator or a site::

    2026-11-23T19:05:28.499Z INFO bank worker run=7270070455849061505: kernels are compiled

``FEDAPP_LOG=json`` writes a JSON object per line; ``FLWR_LOG_LEVEL=DEBUG`` adds lines on single
messages. ``FEDAPP_NAME``, which scripts and units set, is the name of the site.
"""

from __future__ import annotations

import functools
import gc
import json
import logging
import os
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from ctypes import c_ulong, py_object, pythonapi
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

STOPPING = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 128 + 2  # exit status that shells give for SIGINT
# Modules whose functions compiled code calls, or that initialise it: it must return before an
# exception may be raised, or it uses memory that it has freed. And ours, at which a search ends.
_NATIVE = re.compile(r"(xgboost|llvmlite|importlib|_frozen_importlib)\b")
_OURS = re.compile(r"(fedapp|strategies|clients)\b")
_RETRY_SECONDS = 0.01
FORMS = ("text", "json")
# Flower's lines on single messages and other noise, shown as DEBUG.
_CHATTER = re.compile(
    r"$|\[RUN |(Receiving|Sending): |(Received|Sent) successfully|ControlServicer\.\w+$"
    r"|\[Fleet\.(PushMessages|GetRun|GetFab)|(FastAPI l|SuperLinkL)ifespan|Start `flwr-"
)
_RUN = re.compile(r"\brun(?:_id=| ID | )`?(\d{6,})")
UNKNOWN = "unknown"  # version of a package that is not installed
SHOWN = ("fedapp", "flwr", "xgboost", "numpy")
# XGBoost's CPU build has the same modules under another name.
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {"xgboost": ("xgboost-cpu", "xgboost")}
# Variable of a site's processes: a line for each patch of Flower that is off at this site.
FALL_BACKS = "FEDAPP_FALL_BACKS"
_about = {"process": "", "run": ""}


def handle_stopping(handler: signal.Handlers | object) -> None:
    """Install a handler for the signals that stop a command, unless they are ignored."""
    for number in STOPPING:
        # Shell scripts ignore SIGINT for background commands.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)  # type: ignore[arg-type]


Handling = Callable[[int, FrameType | None], None]
_interrupted = threading.Event()


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt as soon as no compiled code waits for what is running; once.

    A handler of signals. Later signals must not disturb the end of what the command began.
    """
    for stopping in STOPPING:
        if signal.getsignal(stopping) is interrupt:
            signal.signal(stopping, signal.SIG_IGN)
    if not _interrupted.is_set():
        _interrupted.set()
        sys.unraisablehook = _interrupt_again
    if _is_called_by_native(frame):
        _retry()
    else:
        raise_interrupt()


def raise_interrupt() -> None:
    """Raise KeyboardInterrupt if a signal waits for compiled code; long work asks now and then."""
    if _interrupted.is_set():
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt


def is_interrupted() -> bool:
    """Whether a signal has asked this command to stop."""
    return _interrupted.is_set()


def _retry() -> None:
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS)


def _is_called_by_native(frame: FrameType | None) -> bool:
    """Whether an exception in this frame would pass through compiled code, or a finalizer."""
    while frame and not _OURS.match(module := frame.f_globals.get("__name__") or ""):
        if _NATIVE.match(module) or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _interrupt_again(unraisable: Any) -> None:
    """Raise what a callback of the interpreter could only print; a hook of ``sys``."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _retry()
    else:
        sys.__unraisablehook__(unraisable)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C wait for compiled code during a call in Python, where it is Python's own."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    before, alarm = sys.unraisablehook, signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
        raise_interrupt()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm or signal.SIG_DFL)
        sys.unraisablehook = before
        _interrupted.clear()
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leaving(what_now: str) -> Handling:
    """A handler of signals that ends the process at once, where nothing is begun that must end."""

    def leave(number: int, frame: FrameType | None) -> None:
        handle_stopping(signal.SIG_IGN)
        os.write(2, f"\ninterrupted: {what_now}\n".encode())
        leave_now()

    return leave


def leave_now() -> NoReturn:
    """End this process as an interrupted one: its threads may compute for minutes."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the stream is closed, or was written when the signal came
            stream.flush()
    os._exit(INTERRUPTED)


def leave_no_core() -> None:
    """Disable core dumps of this process and its children: they would have rows and keys."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def raise_file_limit(n_files: int) -> None:
    """Let this process open ``n_files``, or as many as it may at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = n_files if hard == resource.RLIM_INFINITY else min(n_files, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def ray_address() -> str:
    """The Ray cluster of runs on this machine; empty without one."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def free_memory(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still use: of the machine, and of its control groups."""
    import psutil

    free, of_process = [int(psutil.virtual_memory().available)], Path("/proc/self/cgroup")
    for line in of_process.read_text("utf-8").splitlines() if of_process.is_file() else ():
        _, version_1, path = line.split(":", 2)  # its controllers; none in version 2
        names = ("limit_in_bytes", "usage_in_bytes") if version_1 else ("max", "current")
        # Pages that can be read again, of all groups below.
        cached = rf"^{'total_' if version_1 else ''}(?:in)?active_file (\d+)"
        folder = groups / version_1 / path.lstrip("/")
        for group in (folder, *folder.parents):
            with suppress(OSError, ValueError):  # absent; or "max", which is no limit
                limit, used = (int((group / f"memory.{name}").read_text()) for name in names)
                pages = re.findall(cached, (group / "memory.stat").read_text(), re.MULTILINE)
                free.append(limit - used + sum(map(int, pages)))
    return max(0, min(free))


def listening_socket(host: str, port: int, way: str) -> socket.socket:
    """Listen at a port, 0 for a free one; ConfigError, with the way out, if that cannot be."""
    from fedapp.errors import ConfigError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=256)
    except OSError as error:
        # Python adds the address to the system's words; a name that is not found has others.
        errno = error.errno or 0
        cause = os.strerror(errno) if errno > 0 else error.strerror
        raise ConfigError(f"port {port} must be free at {host}, got: {cause}; {way}") from None


def keep_imported() -> None:
    """Leave what has been imported out of garbage collection: it stays as long as the process."""
    gc.collect()
    gc.freeze()


class OutOfTime(BaseException):
    """A block has taken longer than it may; no ``except Exception`` catches it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in a block that takes longer than this; 0: it may take for ever.

    In whatever thread it runs, which a signal would not do. Compiled code is not interrupted: the
    error comes when it returns to Python, as all long work does now and then.
    """
    if not seconds:
        yield
        return
    thread = threading.get_ident()
    lock = threading.Lock()
    is_over = False

    def interrupt() -> None:
        with lock:
            if not is_over:
                pythonapi.PyThreadState_SetAsyncExc(c_ulong(thread), py_object(OutOfTime))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            is_over = True
        timer.cancel()


class Lines(logging.Formatter):
    """Adds the site or coordinator, the process and the run to a record."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record; further lines of a text message are indented."""
        message = super().format(record).strip()
        run_id = _RUN.search(message)
        fields = {
            "time": f"{datetime.fromtimestamp(record.created, UTC):%FT%T}.{int(record.msecs):03}Z",
            "level": record.levelname,
            "site": os.environ.get("FEDAPP_NAME", "-"),
            **_about,
            **({"run": run_id[1]} if run_id else {}),
            "message": message,
        }
        if os.environ.get("FEDAPP_LOG") == "json":
            return json.dumps(fields)
        time, level, site, process, run, _ = fields.values()
        plain = "".join(char if char.isprintable() or char == "\n" else "?" for char in message)
        indented = plain.replace("\n", "\n    ")
        return f"{time} {level} {site} {process}{run and f' run={run}'}: {indented}"


class Handler(logging.StreamHandler[Any]):
    """Writes to stderr; lines on single messages count as DEBUG."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Lower chatter to DEBUG, then compare the level."""
        args: Any = record.args
        is_chatter = not record.name.startswith("fedapp")
        if record.name.startswith("flwr"):
            is_chatter = bool(_CHATTER.match(str(record.msg)))
        elif record.name == "uvicorn.access":
            is_chatter = int(args[-1]) < 400
        if is_chatter and record.levelno == logging.INFO:
            record.levelno = logging.DEBUG
            record.levelname = "DEBUG"
        return record.levelno >= self.level


def start_log(process: str, run: int | str = "") -> None:
    """Use this format for all log lines of this process from now on."""
    from fedapp.errors import ConfigError

    if (form := os.environ.get("FEDAPP_LOG", "text")) not in FORMS:
        raise ConfigError(f"FEDAPP_LOG must be {' or '.join(FORMS)}, got {form!r}")
    _about.update(process=process, run=str(run))
    handler = Handler()
    handler.setLevel("DEBUG" if os.environ.get("FLWR_LOG_LEVEL", "").upper() == "DEBUG" else "INFO")
    handler.setFormatter(Lines())
    # The root level is not DEBUG: other libraries would log headers, and so tokens.
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.getLogger("fedapp").setLevel(handler.level)
    logging.getLogger("flwr").handlers.clear()
    if uvicorn := sys.modules.get("uvicorn"):  # it would install handlers of its loggers
        setattr(uvicorn.Config, "configure_logging", lambda _: None)  # noqa: B010


def log_run(run: int | str) -> None:
    """Set the run of this process's log lines."""
    _about["run"] = str(run)


def versions(packages: Iterable[str] = SHOWN) -> dict[str, str]:
    """The installed version of each package, or ``UNKNOWN``."""
    return {package: _version(package) for package in packages}


@functools.cache
def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    for name in DISTRIBUTIONS.get(package, (package,)):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return UNKNOWN
