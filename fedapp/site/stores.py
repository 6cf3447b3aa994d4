"""Where the states of a site's models are between two messages, and how long.

On the disk; or, where all messages of a run come to one process, in its memory, and on the disk as
well before the server saves what the run is to go on from.
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
KEEP_DAYS = 7  # so long an interrupted run can be resumed; then the copies of its rows go


class Stores:
    """Where the states of sites are between two messages: on the disk."""

    def open(self, folder: Path, lasting: bool) -> Store:
        """The state as the last step left it."""
        return Store.open(folder, lasting)

    def committed(self, store: Store) -> None:
        """Take note of a state after a step."""

    def write(self) -> None:
        """Write all states as they are, before the server saves what it goes on from."""


class LiveStores(Stores):
    """The same in the memory of the one process to which all messages of a run come."""

    def __init__(self) -> None:
        self._states: dict[Path, Store] = {}

    def open(self, folder: Path, lasting: bool) -> Store:
        """A copy, so that a step that fails leaves nothing behind."""
        found = self._states.get(folder)
        return found.copy() if found else Store.open(folder, lasting, live=True)

    def committed(self, store: Store) -> None:
        """Keep it, unless its run has ended."""
        self._states[store.folder] = store
        if store.finished:
            del self._states[store.folder]

    def write(self) -> None:
        """Those that have changed, also of sites that are not asked for some time."""
        for folder, store in list(self._states.items()):
            if store.is_written:
                continue
            written = store.copy()
            written.write()
            if self._states.get(folder) is store:
                self._states[folder] = written


def drop_abandoned(site: Path, days: float) -> None:
    """Delete the states of models that nobody has asked for since, finished or not.

    A part of a model stays: without it the other parties' parts are worth nothing.

    Parameters
    ----------
    site : the folder of a site, with a folder a model.
    days : age of the last step.
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
    """Hold a site's state alone, so that a resent message waits for the first one."""
    private_folder(folder)
    with open_private(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
