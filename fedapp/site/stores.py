"""Where the states of a site's models are stored between two messages, and how long.

They are on disk. If all messages of a run come to one process, they are also in its memory, and
written before the server saves a checkpoint.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedapp.home import open_private, private_folder
from fedapp.site.part_file import PART_FILE
from fedapp.site.store import STATE, Store

SECONDS_A_DAY = 24 * 60 * 60
KEEP_DAYS = 7  # after which an interrupted run cannot be resumed: copies of its rows are deleted


class Stores:
    """States of sites, on disk between two messages."""

    def open(self, folder: Path, lasting: bool) -> Store:
        """State after the last step."""
        return Store.open(folder, lasting)

    def committed(self, store: Store) -> None:
        """Called with a state after each step."""

    def write(self) -> None:
        """Write all states, before the server saves a checkpoint."""


class LiveStores(Stores):
    """States of sites in memory, in the one process that receives all messages of a run."""

    def __init__(self) -> None:
        self._states: dict[Path, Store] = {}

    def open(self, folder: Path, lasting: bool) -> Store:
        """A copy of the state, so that a failed step changes nothing."""
        state = self._states.get(folder)
        return state.copy() if state else Store.open(folder, lasting, live=True)

    def committed(self, store: Store) -> None:
        """Keep the state in memory, unless its run has ended."""
        self._states[store.folder] = store
        if store.finished:
            del self._states[store.folder]

    def write(self) -> None:
        """Write the states that have changed, also of sites not asked for some time."""
        for folder, store in list(self._states.items()):
            if store.is_written:
                continue
            written = store.copy()
            written.write()
            if self._states.get(folder) is store:
                self._states[folder] = written


def drop_abandoned(site: Path, days: float) -> None:
    """Delete the states of models whose last step is older than `days`, finished or not.

    A part of a model stays: without it the other parties' parts are worthless. `site` is the folder
    of a site, with a folder per model.
    """
    for path in site.glob("*/" + STATE):
        with suppress(FileNotFoundError):  # another process has deleted it
            is_old = path.stat().st_mtime < time.time() - days * SECONDS_A_DAY
            if is_old and not (path.parent / PART_FILE).exists():
                shutil.rmtree(path.parent)


def has_begun(folder: Path) -> bool:
    """Whether a model has a state here."""
    return (folder / STATE).exists()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a site's state, so that a repeated message waits for the first one."""
    private_folder(folder)
    with open_private(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
