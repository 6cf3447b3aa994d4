"""numba kernels: how they are compiled, cached on disk and loaded.

numba caches beside a source file, and notices only a change of that file. Here all kernels of a
user are in one folder, named by a digest of every source that may be part of a kernel, of the
processor and of numba, so every environment with the same sources loads the same machine code.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar, cast

import llvmlite
import numba
import numpy.typing as npt
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

config: Any = numba.config  # numba has no types for it

Function = TypeVar("Function", bound=Callable[..., Any])

HERE = Path(__file__).parent
ROOMS = ("crypto", "histograms", "trees")  # folders with kernels
VERSIONS_KEPT = 8  # folders of kernels, of 7 MB each
log = logging.getLogger("fedapp")

_unloaded: list[Any] = []  # kernels of the modules that are imported


def kernel(function: Function) -> Function:
    """Compile a function with numba, cached on disk; it runs without the GIL."""
    return cast(Function, _cached(numba.njit(nogil=True)(function)))


def inlined(function: Function) -> Function:
    """A :func:`kernel` whose code is inlined at every call."""
    return cast(Function, _cached(numba.njit(nogil=True, inline="always")(function)))


def load_ahead(modules: Iterable[str], unused: tuple[str, ...] = ()) -> None:
    """Import modules, and load their cached kernels in a thread.

    The first round of a run then does not wait for them. Kernels of modules whose names begin with
    one of ``unused`` are loaded at their first call.
    """
    for module in modules:
        importlib.import_module(module)

    def load() -> None:
        while _unloaded:
            compiled = _unloaded.pop()
            if not compiled.__module__.startswith(unused):
                compiled._cache.load_all(compiled)

    Thread(target=load).start()


def modules_with_kernels() -> list[str]:
    """Names of all modules with kernels; they import only required dependencies."""
    return [
        ".".join(path.relative_to(HERE.parent).with_suffix("").parts)
        for room in ROOMS
        for path in sorted((HERE / room).rglob("*.py"))
        if "from fedapp.kernels import" in path.read_text(encoding="utf-8")
    ]


@functools.cache
def cache_folder() -> Path | None:
    """Folder of the compiled kernels of these sources, for this processor; made if it is missing.

    Below ``NUMBA_CACHE_DIR``, else ``XDG_CACHE_HOME``, else ``~/.cache``. numba unpickles what is
    there, so whoever can write it runs code in this process. With a warning, None if it cannot be
    used, or is not private: each process then compiles its kernels.
    """
    versions = sys.implementation.cache_tag, numba.__version__, llvmlite.__version__
    made_of = versions, cpu_target.target_context.codegen().magic_tuple(), _sources()
    name = hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]
    try:
        named = config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME")
        base = Path(named).absolute() if named else Path.home() / ".cache"
        base.mkdir(parents=True, exist_ok=True)
        folder = base / "fedapp" / "kernels" / name
        for path in (*reversed(folder.parents[:2]), folder):
            path.mkdir(0o700, exist_ok=True)
            status = path.stat()
            # Volumes of Kubernetes are writable by a group, which is that of their processes only.
            others = 0o002 if status.st_gid == os.getegid() else 0o022
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & others:
                raise PermissionError(f"{path} must be a folder that only you can write")
        list(folder.iterdir())
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        _warn(f"each process compiles its kernels: {error}; NUMBA_CACHE_DIR may name a folder")
        return None
    with suppress(OSError):  # of an image, which may be read-only, or of a process that removes too
        os.utime(folder)
        folders = sorted(folder.parent.iterdir(), key=lambda folder: folder.stat().st_mtime)
        for unused in folders[:-VERSIONS_KEPT]:
            shutil.rmtree(unused, ignore_errors=True)
    return folder


@functools.cache  # once a process
def _warn(text: str) -> None:
    log.warning("%s", text)


def frozen(*arrays: npt.NDArray[Any]) -> Any:
    """Read-only views. numba compiles a kernel once more for writable arrays."""
    views = tuple(array.view() for array in arrays)
    for view in views:
        view.flags.writeable = False
    return views


def _cached(compiled: Any) -> Any:
    """Cache a compiled function on disk."""
    if not config.DISABLE_JIT and cache_folder():
        compiled._cache = cast(Any, _Disk)(compiled.py_func)
        _unloaded.append(compiled)
    return compiled


class _Locator(_CacheLocator):
    """A kernel's files in ``cache_folder``, by its module and line."""

    def __init__(self, function: Any) -> None:
        self.place = f"{function.__module__}-{function.__code__.co_firstlineno}"

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator:
        return cls(py_func)

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def ensure_cache_path(self) -> None:
        pass  # done by ``cache_folder``

    def get_source_stamp(self) -> str:
        return _sources()

    def get_disambiguator(self) -> str:
        return self.place


class _Located(CompileResultCacheImpl):
    _locator_classes: Any = (_Locator,)


class _Disk(FunctionCache):
    """Compiled kernels on disk, loaded without importing numba's compiler."""

    _impl_class = _Located

    def load_overload(self: Any, sig: Any, target_context: Any) -> Any:
        # numba's own method imports all of the compiler first, in 0.5 s. To run a kernel only the
        # memory management is needed; numba imports the rest if it has to compile.
        rtsys.initialize(target_context)
        return self._load_overload(sig, target_context)

    def save_overload(self: Any, sig: Any, data: Any) -> None:
        # Two processes that save versions of a kernel would give both files one name.
        try:
            with (Path(self.cache_path) / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._save_overload(sig, data)
        except OSError as error:  # a read-only image, a full disk, or no locks
            _warn(f"kernels are not cached in {self.cache_path}: {error.strerror}")

    def load_all(self: Any, compiled: Any) -> None:
        """Load every version of a kernel that was compiled for this processor."""
        _, *processor = self._index_key((), compiled.targetctx.codegen())
        for types, *machine in self._cache_file._load_index():
            if machine == processor:
                compiled.compile(types)


@functools.cache
def _sources() -> str:
    """SHA-256, in hex, of all sources that may be part of a kernel."""
    digest = hashlib.sha256()
    paths = sorted(path for room in ROOMS for path in (HERE / room).rglob("*.py"))
    for path in (Path(__file__), *paths):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def n_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
