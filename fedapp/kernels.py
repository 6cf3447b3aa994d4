"""Kernels that numba compiles, and what they are given."""

from __future__ import annotations

import functools
import hashlib
import importlib
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
ROOMS = ("crypto", "histograms", "trees")  # where kernels are, and what they take from elsewhere
STAMP = "fedapp-kernels.sha256"

_unloaded: list[Any] = []  # kernels of the modules that are imported


def kernel(function: Function) -> Function:
    """Compile a function once an installation, to run without the GIL.

    numba compiles again when the function's own file changes. It looks at no other, though the code
    has functions and constants of others in it: :func:`_drop_outdated` does.
    """
    return cast(Function, _kept(numba.njit(cache=True, nogil=True)(function)))


def inlined(function: Function) -> Function:
    """A :func:`kernel` whose code stands wherever it is called."""
    return cast(Function, _kept(numba.njit(cache=True, nogil=True, inline="always")(function)))


def load_ahead(modules: Iterable[str], unused: tuple[str, ...] = ()) -> None:
    """Import modules, and load from the disk what is compiled of their kernels.

    A thread loads the kernels, so that the first round of a run does not wait for them; those of
    ``unused`` modules, by how their names begin, are loaded when they are called.
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
    """All of them, which import nothing that is not installed."""
    return [
        ".".join(path.relative_to(HERE.parent).with_suffix("").parts)
        for room in ROOMS
        for path in sorted((HERE / room).rglob("*.py"))
        if "from fedapp.kernels import" in path.read_text(encoding="utf-8")
    ]


def complete_stamp() -> tuple[Path, str]:
    """A file beside the kernels, and its content once they are all compiled for this processor."""
    from fedapp.trees import predict

    compiled: Any = predict._add_outputs
    machine = [numba.__version__, *compiled.targetctx.codegen().magic_tuple()]
    text = "\n".join([_sources(), *map(str, machine)])
    return Path(compiled.stats.cache_path) / "fedapp-kernels.complete", text


def frozen(*arrays: npt.NDArray[Any]) -> Any:
    """The arrays, read-only: numba compiles once for those, and once more for others."""
    views = [array.view() for array in arrays]
    for view in views:
        view.flags.writeable = False
    return views


def _kept(compiled: Any) -> Any:
    """A function of numba's, for whose code on disk the sources stand."""
    if not config.DISABLE_JIT:
        compiled._cache = cast(Any, _Disk)(compiled.py_func)
        _drop_outdated(Path(compiled.stats.cache_path))
        _unloaded.append(compiled)
    return compiled


class _Disk(FunctionCache):
    """Compiled kernels on disk.

    Before it loads one, numba imports all that it may need to compile another, in 0.5 s. To run one
    takes the memory management only, and numba imports the rest itself where it compiles.
    """

    def load_overload(self: Any, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)
        return self._load_overload(sig, target_context)

    def load_all(self: Any, compiled: Any) -> None:
        """Load a kernel for all types of arguments that it is compiled for, on this processor."""
        _, *here = self._index_key((), compiled.targetctx.codegen())
        for types, *machine in self._cache_file._load_index():
            if machine == here:
                compiled.compile(types)


@functools.cache
def _drop_outdated(folder: Path) -> None:
    """Remove what was compiled into a folder from other sources than today's."""
    stamp = folder / STAMP
    if not stamp.exists() or stamp.read_text(encoding="ascii") != _sources():
        for index in folder.glob("*.nbi"):
            index.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        stamp.write_text(_sources(), encoding="ascii")


@functools.cache
def _sources() -> str:
    """The SHA-256 of the sources that may be part of a kernel, as digits."""
    digest = hashlib.sha256()
    for path in sorted(path for room in ROOMS for path in (HERE / room).rglob("*.py")):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
