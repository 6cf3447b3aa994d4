"""Kernels on disk are those of today's sources."""

import importlib.util
import os
import subprocess
import sys

import pytest

from fedapp import kernels
from fedapp.report.progress import Silent
from fedapp.runs import session
from fedapp.runs.kernels import main
from fedapp.settings import load_settings

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


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Where a new cache's folders are made."""
    monkeypatch.setattr(kernels.config, "CACHE_DIR", str(tmp_path))
    kernels.cache_folder.cache_clear()
    kernels._warn.cache_clear()
    yield tmp_path / "fedapp" / "kernels"
    kernels.cache_folder.cache_clear()
    kernels._sources.cache_clear()


def test_a_kernel_is_compiled_again_when_a_function_of_another_file_changes(
    tmp_path, monkeypatch, cache
):
    monkeypatch.setattr(kernels, "HERE", tmp_path)
    room = tmp_path / "trees"
    room.mkdir()
    (room / "caller.py").write_text(CALLER)

    def call():
        """In a fresh process, as it were: the answer, and how many kernels came from the disk."""
        kernels._sources.cache_clear()
        kernels.cache_folder.cache_clear()
        monkeypatch.setitem(sys.modules, "callee", loaded(room / "callee.py"))
        caller = loaded(room / "caller.py").caller
        return caller(), sum(caller.stats.cache_hits.values())

    (room / "callee.py").write_text(CALLEE.format(answer=1))
    assert [call(), call()] == [(1, 0), (1, 1)]
    (room / "callee.py").write_text(CALLEE.format(answer=23))
    assert [call(), call()] == [(23, 0), (23, 1)]
    (room / "callee.py").write_text(CALLEE.format(answer=1))
    assert call() == (1, 1)  # both versions are there
    assert len(list(cache.iterdir())) == 2


def test_only_folders_of_kernels_used_last_are_kept(cache):
    for age in range(20):
        (folder := cache / f"{age}").mkdir(parents=True)
        os.utime(folder, (1e9 - age, 1e9 - age))
    latest = kernels.cache_folder()
    assert latest
    assert latest.stat().st_mode & 0o777 == 0o700
    kept = {str(age) for age in range(kernels.VERSIONS_KEPT - 1)}
    assert {path.name for path in cache.iterdir()} == {latest.name, *kept}


def test_kernels_that_others_could_have_written_are_not_loaded(cache, caplog, monkeypatch):
    folder = kernels.cache_folder()
    assert folder
    mode = folder.stat().st_mode
    for shared in (folder, cache):
        shared.chmod(0o777)
        kernels.cache_folder.cache_clear()
        assert kernels.cache_folder() is None
        main()  # compiles nothing
        shared.chmod(mode)
        assert f"{shared} must be a folder that only you can write" in caplog.text
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    kernels.cache_folder.cache_clear()
    assert (kernels.cache_folder() is None) == bool(folder.stat().st_uid)  # root may write anyway


def test_kernels_that_only_boosting_calls_are_named_by_their_modules():
    assert {*session.OF_BOOSTING} <= {*kernels.modules_with_kernels()}


def test_a_run_tells_once_before_it_compiles_kernels(cache, monkeypatch):
    monkeypatch.setattr(session, "_told", [])
    lines = list[str]()

    class Listener(Silent):
        begin = tell = lambda _, text, ends=False: lines.append(text)

    for _ in range(2):
        session.check_tables(load_settings({"parties": 2}), "local", Listener())
    assert lines[0] == session.COMPILING  # before it waits
    assert lines.count(session.COMPILING) == 1
    session._told.clear()
    folder = kernels.cache_folder()
    assert folder
    (folder / "a.nbi").touch()
    session.tell_of_compiling(Listener())
    assert lines.count(session.COMPILING) == 1


def run_code(code, tmp_path, **environment):
    """Run code in a process of its own, which imports this checkout and what is in the folder, and
    caches its kernels there."""
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    given = {**os.environ, "PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    command, given = [sys.executable, "-c", code], {**given, **environment}
    return subprocess.run(command, env=given, check=True, cwd=tmp_path, stderr=-1, text=True)


DOUBLED = """
from fedapp.kernels import kernel

@kernel
def doubled(number):
    return 2 * number
"""
JOIN = """
import sys, threading
from fedapp.kernels import load_ahead
load_ahead(["doubled"])
[one.join() for one in threading.enumerate() if one is not threading.main_thread()]
from doubled import doubled
"""
ON_DISK = """
assert len(doubled.signatures) == 2
assert not sum(doubled.stats.cache_misses.values())
assert "numba.np.linalg" not in sys.modules
assert (doubled(4), doubled(0.25)) == (8, 0.5)
assert doubled(2j) == 4j  # compiled now
"""


@pytest.mark.slow
def test_kernels_on_disk_are_loaded_ahead_and_without_the_compiler_and_run_without_a_disk(tmp_path):
    (tmp_path / "doubled.py").write_text(DOUBLED)
    run_code("from doubled import doubled; doubled(1), doubled(1.5)", tmp_path)
    run_code(JOIN + ON_DISK, tmp_path)
    (tmp_path / "file").touch()
    ran = run_code(
        JOIN + "assert doubled(2) == 4", tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "file")
    )
    warned = "each process compiles its kernels: [Errno 17] File exists"
    assert ran.stderr.count(warned) == 1
