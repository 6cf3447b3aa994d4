"""A party's rows for training, validation and test."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.datasets import read_source
from fedapp.data.partition import SUBSETS, Holdout, partition_rows
from fedapp.data.read import table_of_frame
from fedapp.data.table import Table, notes_on_leaks
from fedapp.site.config import SiteConfig

Rows = npt.NDArray[np.int64]


def read_subsets(config: SiteConfig, holdout: Holdout) -> dict[str, Table]:
    """Read the train, valid and test rows of one site.

    A simulated table is first split into subsets and then among the parties, so that a pooled model
    sees the same rows.
    """
    if not config.is_share:
        table = read_table(config)
        split = holdout.split(table.n_rows)
        return {subset: table.take(getattr(split, subset)) for subset in SUBSETS}
    table = read_table(config)
    shares = share_rows(table, holdout, config.partition, config.n_shares)
    return {subset: table.take(shares[subset][config.share]) for subset in SUBSETS}


def share_rows(
    table: Table, holdout: Holdout, partition: str, n_parties: int
) -> dict[str, tuple[Rows, ...]]:
    """Row numbers of every party, for each subset.

    The rule deals only training rows. Validation and test rows are dealt evenly, as scores are
    pooled; only a natural partition keeps the rows of a group together in all subsets.
    """
    split = holdout.split(table.n_rows)
    rng = np.random.default_rng([holdout.seed, n_parties])
    if partition.startswith("column"):
        everyone = np.arange(table.n_rows, dtype=np.int64)
        groups = partition_rows(partition, everyone, n_parties, rng, table.labels, table.groups)
        return {
            subset: tuple(np.intersect1d(rows, getattr(split, subset)) for rows in groups)
            for subset in SUBSETS
        }
    dealt = {"train": partition_rows(partition, split.train, n_parties, rng, table.labels)}
    for subset in ("valid", "test"):
        rows = rng.permutation(getattr(split, subset))
        dealt[subset] = tuple(np.sort(share) for share in np.array_split(rows, n_parties))
    return dealt


def fingerprint(subsets: dict[str, Table], key: bytes) -> str:
    """Keyed digest of all rows, 128 bits in hex."""
    digest = hashlib.blake2b(key=key, digest_size=16)
    for table in subsets.values():
        for array in (table.values, table.labels, table.weights, table.base_margins):
            if array is not None:
                digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        if table.categories:
            digest.update(json.dumps(table.categories).encode())
    return digest.hexdigest()


def read_table(config: SiteConfig) -> Table:
    """Read the table of a site, with its roles; raises DataError or ConfigError."""
    if config.frame is not None:
        return _read_to_train(config.frame(), config.roles, config.reader)
    how = config.data, config.roles, config.reader
    return read_once(_read_to_train, *how) if config.simulated else read_source(*how)


def _read_to_train(source: Any, *how: Any) -> Table:
    """Read a simulated table; checks for leaks need all rows and columns, not a share."""
    read = read_source if isinstance(source, str) else table_of_frame
    table = read(source, *how)
    return replace(table, notes=(*table.notes, *notes_on_leaks(table)))


_READING = threading.Lock()


def read_once(read: Callable[..., Table], data: str, *how: Any) -> Table:
    """Read a simulated table once per process, unless its file changes."""
    path = Path(data)
    with _READING:  # else threads of several sites would read the same table
        version = (path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else ()
        return _read_once(version, read, data, *how)


@lru_cache(64)  # tables of the parties of a simulation, to train and to predict
def _read_once(version: tuple[int, ...], read: Callable[..., Table], *how: Any) -> Table:
    return read(*how)
