"""A disk that is full."""

import errno
import os
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def full_disk(name="", after=0, share=0.0):
    """The disk is full once a file was written `after` times.

    Parameters
    ----------
    name : of the file; empty: of any.
    share : of the write that fails, which reaches the disk.

    Yields
    ------
    What a process that dies, instead of removing it, leaves of this write.
    """
    honest, n_writes, torn = os.pwrite, 0, list[bytes]()

    def pwrite(descriptor, data, place):
        nonlocal n_writes
        if name in ("", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name):
            n_writes += 1
            if n_writes > after:
                torn.append(bytes(data[: int(share * len(data))]))
                honest(descriptor, torn[-1], place)
                raise OSError(errno.ENOSPC, "No space left on device")
        return honest(descriptor, data, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        yield torn
