"""Kernels that numba compiles, and what they are given."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy.typing as npt

config: Any = numba.config  # numba has no types for it

Function = TypeVar("Function", bound=Callable[..., Any])

HERE = Path(__file__).parent
ROOMS = ("crypto", "histograms", "trees")  # where kernels are, and what they take from elsewhere
STAMP = "fedapp-kernels.sha256"


def kernel(function: Function) -> Function:
    """Compile a function once an installation, to run without the GIL.

    numba compiles again when the function's own file changes. It looks at no other, though the code
    has functions and constants of others in it: :func:`_drop_outdated` does.
    """
    return cast(Function, _kept(numba.njit(cache=True, nogil=True)(function)))


def inlined(function: Function) -> Function:
    """A :func:`kernel` whose code stands wherever it is called."""
    return cast(Function, _kept(numba.njit(cache=True, nogil=True, inline="always")(function)))


def frozen(*arrays: npt.NDArray[Any]) -> Any:
    """The arrays, read-only: numba compiles once for those, and once more for others."""
    views = [array.view() for array in arrays]
    for view in views:
        view.flags.writeable = False
    return views


def _kept(compiled: Any) -> Any:
    """A function of numba's, for whose code on disk the sources stand."""
    if not config.DISABLE_JIT:
        _drop_outdated(Path(compiled.stats.cache_path))
    return compiled


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
