"""Arrays that are mapped from a file without a name."""

import os
import shutil
import stat
from collections import namedtuple

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


def n_mapped(home):
    """Mapped files of a home; of those without a name the system still knows the folder."""
    with open("/proc/self/maps") as maps:
        return sum(f"{home}/{scratch.FOLDER}/" in line for line in maps)


def test_the_space_of_an_array_is_free_when_it_is_gone(home):
    values = scratch.empty((100,), np.float64)
    assert n_mapped(home) == 1
    del values
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


@pytest.mark.parametrize(("n_rows", "row_bytes"), [(0, 4), (10, 2**25), (3, 2**30), (5, 0)])
def test_batches_are_all_rows_in_order(n_rows, row_bytes):
    rows = scratch.batches(n_rows, row_bytes)
    assert [row for some in rows for row in range(n_rows)[some]] == list(range(n_rows))
