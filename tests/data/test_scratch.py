"""Arrays that are mapped from a file without a name."""

import os
import resource
import shutil
import stat
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fedapp.data import scratch
from fedapp.errors import ConfigError

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDAPP_HOME", str(tmp_path))
    for name in ("LARGEST", "LARGEST_ARRAY"):
        monkeypatch.setattr(scratch, name, 64)
    monkeypatch.setattr(scratch, "_has_mapped", False)
    return tmp_path


def n_mapped(home):
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"{home}/{scratch.FOLDER}/" in line for line in lines)


def test_a_small_array_is_in_memory_and_a_large_one_leaves_no_file(home):
    scratch.empty((16,), np.float32)
    assert not (home / scratch.FOLDER).exists()
    values = scratch.empty_table(100, 3)
    values[:] = np.arange(300).reshape(100, 3)
    assert np.array_equal(values, np.arange(300).reshape(100, 3))
    assert values.flags.f_contiguous
    assert type(values) is np.ndarray
    assert list((home / scratch.FOLDER).iterdir()) == []
    assert stat.S_IMODE((home / scratch.FOLDER).stat().st_mode) == 0o700


def test_the_space_of_an_array_is_free_when_it_is_gone(home):
    values = scratch.empty_table(100, 3)
    values[:] = np.arange(300).reshape(100, 3)
    few, none = (scratch.taken(values, np.array(rows, np.int64)) for rows in ([7, 0], []))
    assert few.tolist() == [[21, 22, 23], [0, 1, 2]]
    assert none.shape == (0, 3)
    assert n_mapped(home) == 3  # parts are on disk too
    del values, few, none
    assert n_mapped(home) == 0


def test_a_disk_without_room_is_refused_before_anything_is_written(home, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(500, 100, 399))
    rule = f"a disk with 400 bytes .*, got room for 399 at most in '{home}/scratch'"
    with pytest.raises(ConfigError, match=rule):
        scratch.empty((100,), np.float32)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(500, 100, 400))
    scratch.empty((100,), np.float32)

    def without_room(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", without_room)
    with pytest.raises(ConfigError, match="a disk with 400 bytes"):
        scratch.empty((100,), np.float32)


def test_once_an_array_is_mapped_all_large_ones_of_the_thread_are(home):
    @scratch.mapping()
    def arrays():
        earlier, first = np.zeros(9), scratch.on_disk((1,), np.int8)
        assert n_mapped(home) == 1
        made = [np.zeros(8), np.arange(9.0), np.ones(9) + 1]
        assert n_mapped(home) == 3
        with ThreadPoolExecutor(1) as threads:
            made.append(threads.submit(np.zeros, 9).result())
        assert n_mapped(home) == 3
        return [earlier, first, *made]

    every = arrays()
    every.append(np.zeros(9))
    assert n_mapped(home) == 3
    assert not every[2].any()
    assert every[3].tolist() == [*range(9)]
    assert set(every[4].tolist()) == {2}
    assert list((home / scratch.FOLDER).iterdir()) == []
    del every
    assert n_mapped(home) == 0


def test_an_array_that_is_resized_keeps_its_numbers(home):
    with scratch.mapping():
        scratch.on_disk((1,), np.int8)
        for before, after in ((5, 7), (5, 500), (500, 700), (500, 5), (0, 500)):
            numbers = np.arange(before)
            numbers.resize(after, refcheck=False)
            kept = min(before, after)
            assert numbers[:kept].tolist() == [*range(kept)]
            assert not numbers[kept:].any()
        assert np.fromiter(range(500), np.int64).tolist() == [*range(500)]


def test_a_disk_that_is_full_is_refused_wherever_an_array_is_made(home):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    @scratch.mapping()
    def zeros(n_bytes):
        scratch.on_disk((1,), np.int8)
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes - 1, hard))
        try:
            np.zeros(n_bytes, np.int8)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with pytest.raises(ConfigError, match="a disk with room for arrays of a table"):
        zeros(2**20)
    assert n_mapped(home) == 0
