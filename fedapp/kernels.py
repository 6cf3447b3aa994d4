"""numba kernels: how they are compiled, cached on disk and loaded."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar, cast

import numba
import numpy.typing as npt
from numba.core.caching import FunctionCache
from numba.core.runtime.nrt import rtsys

config: Any = numba.config  # numba has no types for it

Function = TypeVar("Function", bound=Callable[..., Any])

HERE = Path(__file__).parent
ROOMS = ("crypto", "histograms", "trees")  # folders with kernels
STAMP = "fedapp-kernels.sha256"

_unloaded: list[Any] = []  # kernels of the modules that are imported


def kernel(function: Function) -> Function:
    """Compile a function with numba, cached on disk; it runs without the GIL.

    numba recompiles only when the function's own file changes, although the machine code includes
    functions and constants of other files. :func:`_drop_outdated` covers those.
    """
    return cast(Function, _cached(numba.njit(cache=True, nogil=True)(function)))


def inlined(function: Function) -> Function:
    """A :func:`kernel` whose code is inlined at every call."""
    return cast(Function, _cached(numba.njit(cache=True, nogil=True, inline="always")(function)))


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


def complete_stamp(compiled: Any) -> tuple[Path, str]:
    """Path and content of the file that marks all kernels as compiled for this processor.

    `compiled` is any kernel: all share a folder.
    """
    machine = [numba.__version__, *compiled.targetctx.codegen().magic_tuple()]
    text = "\n".join([_sources(), *map(str, machine)])
    return Path(compiled.stats.cache_path) / "fedapp-kernels.complete", text


def frozen(*arrays: npt.NDArray[Any]) -> Any:
    """Read-only views. numba compiles a kernel once more for writable arrays."""
    views = [array.view() for array in arrays]
    for view in views:
        view.flags.writeable = False
    return views


def _cached(compiled: Any) -> Any:
    """Cache a compiled function on disk; a change of any source invalidates it."""
    if not config.DISABLE_JIT:
        compiled._cache = cast(Any, _Disk)(compiled.py_func)
        _drop_outdated(Path(compiled.stats.cache_path))
        _unloaded.append(compiled)
    return compiled


class _Disk(FunctionCache):
    """Compiled kernels on disk, loaded without importing numba's compiler."""

    def load_overload(self: Any, sig: Any, target_context: Any) -> Any:
        # numba's own method imports all of the compiler first, in 0.5 s. To run a kernel only the
        # memory management is needed; numba imports the rest if it has to compile.
        rtsys.initialize(target_context)
        return self._load_overload(sig, target_context)

    def load_all(self: Any, compiled: Any) -> None:
        """Load every version of a kernel that was compiled for this processor."""
        _, *processor = self._index_key((), compiled.targetctx.codegen())
        for types, *machine in self._cache_file._load_index():
            if machine == processor:
                compiled.compile(types)


@functools.cache
def _drop_outdated(folder: Path) -> None:
    """Remove a folder's cache if it was compiled from other sources."""
    stamp = folder / STAMP
    if not stamp.exists() or stamp.read_text(encoding="ascii") != _sources():
        for index in folder.glob("*.nbi"):
            index.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        stamp.write_text(_sources(), encoding="ascii")


@functools.cache
def _sources() -> str:
    """SHA-256, in hex, of all sources that may be part of a kernel."""
    digest = hashlib.sha256()
    for path in sorted(path for room in ROOMS for path in (HERE / room).rglob("*.py")):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def n_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
