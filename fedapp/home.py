"""Files on this machine: private, atomic, locked, named as outputs; safe TOML."""

from __future__ import annotations

import fcntl
import os
import secrets
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, NamedTuple

from fedapp.errors import ConfigError

RUNS = Path("runs")  # where a command writes runs, below the working folder
PRIVATE, PRIVATE_FOLDER = 0o600, 0o700
LOCK = ".lock"
DEEPEST = 32  # nesting of TOML tables and lists; fedapp's files have 4 levels at most


def home() -> Path:
    """``$FEDAPP_HOME``, by default ``~/.fedapp``: sites' state, Flower's files, data."""
    return Path(os.path.expanduser(os.environ.get("FEDAPP_HOME") or "~/.fedapp"))


def display_path(path: Path) -> str:
    """A path to print: relative if it is below the working folder, else absolute."""
    whole, here = path.absolute(), Path.cwd()
    return str(whole.relative_to(here) if whole.is_relative_to(here) else whole)


class Measured(NamedTuple):
    """What a folder's files show of it."""

    n_bytes: int  # of all files
    began: float  # Unix time of the oldest file, and of the newest; of an empty folder its own
    changed: float


def measured(folder: Path) -> Measured:
    """Size of a folder, and times of its oldest and newest file."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
    stats = [path.lstat() for path in files]
    times = [stat.st_mtime for stat in stats] or [folder.stat().st_mtime]
    return Measured(sum(stat.st_size for stat in stats), min(times), max(times))


def private_folder(path: Path) -> None:
    """Make a folder and its missing parents, readable by their owner only."""
    if path.is_dir():
        return
    missing = list(takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    for folder in reversed(missing):
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors of writing name the path, which those of a full disk do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def open_private(path: Path, mode: str) -> Iterator[Any]:
    """Open a file; a new one is readable by its owner only. Text is UTF-8.

    Where writing fails, as on a full disk, no half of a file is left.
    """
    encoding = None if "b" in mode else "utf-8"
    with naming(path):
        file = open(path, mode, encoding=encoding, opener=_private)  # noqa: SIM115
        try:
            with file:
                yield file
        except OSError:
            if "w" in mode and path.is_file():
                path.unlink()
            raise


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, PRIVATE)


def write_new(
    path: Path, content: bytes | memoryview, mode: int = PRIVATE, lasting: bool = False
) -> None:
    """Write a new file that nobody can read before it has its mode; ``lasting`` calls fsync."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(content)
        if lasting:
            file.flush()
            os.fsync(descriptor)


def write_atomically(
    path: Path, content: bytes | memoryview, mode: int = PRIVATE, lasting: bool = False
) -> None:
    """Write a file atomically, with its mode from the start.

    With ``lasting`` the content survives a loss of power, and its name after ``sync_folder``.
    """
    with _beside(path) as temporary:
        write_new(temporary, content, mode, lasting)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A private file that takes the place of another when the block ends without an error."""
    with _beside(path.resolve()) as temporary, open(temporary, "wb", opener=_private) as file:
        yield file


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A path that takes the place of another when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        with naming(path):
            yield temporary
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def secret_at(path: Path, draw: Callable[[], bytes]) -> bytes:
    """Read a secret from a private file; draw and write it if there is none."""
    if not path.exists():
        private_folder(path.parent)
        drawn = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            write_new(drawn, draw())
            # Atomic; if two processes draw at the same time, the first one's secret stays.
            with suppress(FileExistsError):
                os.link(drawn, path)
        finally:
            drawn.unlink(missing_ok=True)
    return path.read_bytes()


# Locks on a run's folder: many processes share it, one writes it, or one deletes it.


# Holders and writers share the lock of the folder; whoever deletes it has that lock exclusively.
# Writers exclude each other by a lock file in the folder, so that a command can hold the folder
# while its ServerApp, another process, writes it. Locks end with their process.
@contextmanager
def shared_lock(folder: Path) -> Iterator[None]:
    """Make a folder and share its lock during the block."""
    while True:
        private_folder(folder)
        descriptor = os.open(folder, os.O_RDONLY)
        with suppress(OSError):  # of a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        # The previous owner of the lock may have deleted the folder.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                break
        os.close(descriptor)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Be the only writer of a folder during the block; raise ConfigError if there is another."""
    with shared_lock(folder):
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, PRIVATE)
        try:
            _lock_alone(descriptor, folder, may_lack_locks=True)
            yield
        finally:
            os.close(descriptor)


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Lock a folder exclusively, to delete it; raise ConfigError if anybody holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock_alone(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def is_held(folder: Path) -> bool:
    """Whether a process on this machine holds a folder; True if the file system has no locks."""
    try:
        with exclusive_lock(folder):
            return False
    except ConfigError:
        return True


def is_written(folder: Path) -> bool:
    """Whether a process on this machine writes a folder; True if the file system has no locks."""
    try:
        check_free(folder, may_lack_locks=False)
    except ConfigError:
        return True
    return False


def check_free(folder: Path, may_lack_locks: bool = True) -> None:
    """Raise ConfigError if another process writes a folder."""
    with suppress(FileNotFoundError):
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
        try:
            _lock_alone(descriptor, folder, may_lack_locks)
        finally:
            os.close(descriptor)


def _lock_alone(descriptor: int, folder: Path, may_lack_locks: bool = False) -> None:
    """Lock an open file or folder exclusively, without waiting."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        rule = "must be free, got one that another process writes"
        raise ConfigError(f"run folder {rule}: {folder}") from None
    except OSError:
        if not may_lack_locks:
            rule = "must be on a file system with locks to be deleted"
            raise ConfigError(f"run folder {rule}, got {folder}") from None


# Outputs that people name: of an ending of their kind, in a folder that exists, none of the files
# that are read, in the place of a file of their kind only. Checked before any work; ``replacing``
# writes such a file whole or not at all.


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of files that fedapp writes where people say."""

    what: str  # as in "a new file or ..."
    suffixes: tuple[str, ...]
    # Whether fedapp wrote a file, which may be replaced; by default they look like anybody's.
    is_ours: Callable[[Path], bool] = lambda _: False


def check_output(
    path: Path, kind: Kind, inputs: Iterable[str | Path] = (), name: str = "output"
) -> None:
    """Check a file that is to be written; ConfigError. ``inputs`` need not exist."""
    path, shown = path.resolve(), path
    if shown.suffix not in kind.suffixes:
        raise ConfigError(f"{name} must end in {' or '.join(kind.suffixes)}, got {shown}")
    if not path.parent.is_dir():
        way = f"mkdir -p '{path.parent}' makes it"
        raise ConfigError(f"{name} must be in a folder that exists, got {shown}: {way}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{name} must be in a folder that can be written, got {shown}")
    if not path.exists():
        return
    if not path.is_file():
        raise ConfigError(f"{name} must be a file, got {shown}, which is none")
    for source in inputs:
        if os.path.exists(source) and path.samefile(source):
            rule = f"{name} must be another file than {source}, which is read"
            raise ConfigError(f"{rule}, got {shown}")
    if path.stat().st_size and not kind.is_ours(path):
        rule = f"{name} must be a new file, or {kind.what} that fedapp wrote"
        raise ConfigError(f"{rule}, got {shown}, which is another: name a new one")


def check_output_folder(path: Path, own: Callable[[str], bool], what: str) -> None:
    """Check that a folder is new or empty, but for files whose names are its ``own``."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ConfigError(f"{what} must be a folder, got the file {path}")
    others = sorted(e.name for e in path.iterdir() if not (e.name.startswith(".") or own(e.name)))
    if others:
        rule = f"{what} must be a new or an empty folder"
        raise ConfigError(f"{rule}, got {path}, which has {others[0]}")


def begins_with(*marks: bytes, within: int = 4096) -> Callable[[Path], bool]:
    """Whether the beginning of a file has all these marks."""

    def is_ours(path: Path) -> bool:
        with path.open("rb") as file:
            head = file.read(within)
        return all(mark in head for mark in marks)

    return is_ours


def read_toml(text: str | bytes, rule: str) -> dict[str, Any]:
    """Parse TOML; a ConfigError that begins with the rule if it is invalid or nested too deeply."""
    try:
        content = tomllib.loads(text.decode() if isinstance(text, bytes) else text)
        _check_depth(content, DEEPEST)
    except (ValueError, RecursionError) as error:  # ValueError: also of bytes that are no UTF-8
        why = error if isinstance(error, ValueError) else f"nested at most {DEEPEST} deep"
        raise ConfigError(f"{rule}: {why}") from None
    return content


def _check_depth(value: Any, deepest: int) -> None:
    """Refuse deep nesting by dotted keys; the parser itself only refuses deep lists."""
    if deepest < 0:
        raise RecursionError
    if isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            _check_depth(entry, deepest - 1)


@cache
def app_folder() -> Path:
    """The folder of pyproject.toml; raise ConfigError if there is none."""
    # A wheel has it in ``fedapp/_app``; a checkout, and the app as Flower unpacks it, above fedapp.
    package = Path(__file__).resolve().parent
    for folder in (package / "_app", package.parent):
        if (folder / "pyproject.toml").is_file():
            return folder
    raise ConfigError(
        f"fedapp must be installed from its wheel or its checkout, got {package} without "
        "pyproject.toml: pip install PATH"
    )


def app_files(pattern: str) -> dict[str, Path]:
    """The installed files of the app that match a pattern, by their paths in the checkout."""
    folder = app_folder()
    package = Path(__file__).resolve().parent
    # A wheel has the package ``fedapp`` outside the app's folder.
    root = package.parent if pattern.startswith("fedapp/") else folder
    files = {path.relative_to(root).as_posix(): path for path in root.glob(pattern)}
    return {name: path for name, path in files.items() if not name.startswith("fedapp/_app/")}
