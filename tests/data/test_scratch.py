"""Arrays that are mapped from a file without a name."""

import os
import shutil
import stat
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from fedapp.data import scratch
from fedapp.errors import ConfigError

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDAPP_HOME", str(tmp_path))
    monkeypatch.setattr(scratch, "LARGEST", 64)
    return tmp_path


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
    def n_mapped():
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum(f"{home}/{scratch.FOLDER}/" in line for line in lines)

    values = scratch.empty_table(100, 3)
    values[:] = np.arange(300).reshape(100, 3)
    few, none = (scratch.taken(values, np.array(rows, np.int64)) for rows in ([7, 0], []))
    assert few.tolist() == [[21, 22, 23], [0, 1, 2]]
    assert none.shape == (0, 3)
    assert n_mapped() == 3  # parts are on disk too
    del values, few, none
    assert n_mapped() == 0


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
