"""Cells that a party has sent ahead, such as every night, at the active party."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Self
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from fedapp.home import PRIVATE, write_atomically
from fedapp.site.store import SECONDS_A_DAY
from fedapp.trees.cells import Cells, cells_of_rows

log = logging.getLogger("fedapp.site")
AHEAD = "cells."  # beginning of a file's name, before the party's
NONE = -1
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """Cells of some rows of a version, by one party."""

    cells: Cells  # of these rows, in their order
    places: npt.NDArray[np.int32]  # (n_rows,): of the version's rows in that order, or NONE
    since: float  # Unix time
    until: float  # when they are stale, as the party has said

    @classmethod
    def of(cls, blocks: list[Cells], rows: Ints, n_rows: int, days: float) -> Self:
        """From blocks of rows, all but the last of a multiple of 8."""
        places = np.full(n_rows, NONE, np.int32)
        places[rows] = np.arange(len(rows))
        now = time.time()
        return cls(np.concatenate(blocks, axis=1), places, now, now + days * SECONDS_A_DAY)

    def of_rows(self, rows: Ints) -> Cells | None:
        """Cells of some rows; None if one is missing, or if they are stale."""
        places = self.places[rows].astype(np.int64)
        if time.time() > self.until or (places == NONE).any():
            return None
        return cells_of_rows(self.cells, places)

    def write(self, path: Path) -> None:
        """Store them."""
        buffer = BytesIO()
        times = np.array([self.since, self.until])
        np.savez(buffer, cells=self.cells, places=self.places, times=times)
        write_atomically(path, buffer.getbuffer(), PRIVATE, lasting=True)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Stored ones; None if there are none, or if they cannot be read."""
        if not path.is_file():
            return None
        try:
            with np.load(BytesIO(path.read_bytes()), allow_pickle=False) as file:
                return cls(file["cells"], file["places"], *file["times"].tolist())
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            log.error("%s must be whole, got: %s; POST /nightly asks again", path.name, error)
            return None
