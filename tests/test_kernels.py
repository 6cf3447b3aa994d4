"""Kernels on disk are those of today's sources."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedapp import kernels

CALLEE = """
import numba

@numba.njit
def callee():
    return {answer}
"""
CALLER = """
from callee import callee
from fedapp.kernels import kernel

@kernel
def caller():
    return callee()
"""


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_kernel_is_compiled_again_when_a_function_of_another_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "HERE", tmp_path)
    room = tmp_path / "trees"
    room.mkdir()
    (room / "caller.py").write_text(CALLER)

    def call() -> tuple[int, int]:
        """In a fresh process, as it were: the answer, and how many kernels came from the disk."""
        kernels._sources.cache_clear()
        kernels._drop_outdated.cache_clear()
        monkeypatch.setitem(sys.modules, "callee", loaded(room / "callee.py"))
        caller = loaded(room / "caller.py").caller
        return caller(), sum(caller.stats.cache_hits.values())

    (room / "callee.py").write_text(CALLEE.format(answer=1))
    assert [call(), call()] == [(1, 0), (1, 1)]
    (room / "callee.py").write_text(CALLEE.format(answer=23))
    assert [call(), call()] == [(23, 0), (23, 1)]
