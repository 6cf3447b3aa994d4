"""A party's table in a vertical run, where other parties have other columns of the same rows."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedapp.data.partition import SUBSETS, Holdout, Split, partition_columns
from fedapp.data.predictions import columns_of_frame, in_codes_of, read_columns_of
from fedapp.data.read import column_names
from fedapp.data.schema import Roles
from fedapp.data.table import Table
from fedapp.errors import DataError
from fedapp.site.config import SiteConfig
from fedapp.site.rows import read_once, read_table
from fedapp.trees.sets import Categories, chosen, in_secret_order

Rows = npt.NDArray[np.int64]
ORDER_BYTES = 16


def read_columns(config: SiteConfig, seed: int) -> Table:
    """Read the table of one site; of a simulated one, its share of the columns or its file.

    The order of category codes reveals nothing about their names. The first share has the labels,
    weights and base margins. If simulated parties have files, the one with the label column has
    all three.
    """
    if not config.is_share:
        table = read_table(_with_own_roles(config) if config.simulated else config)
        return _shuffled(_without_lone_columns(table, config), seed)
    table = read_table(config)
    rng = np.random.default_rng(seed)
    shares = partition_columns(config.columns, len(table.columns), config.n_shares, rng)
    share = shares[config.share]
    is_first = config.share == 0
    taken = Table(
        tuple(table.columns[column] for column in share),
        np.ascontiguousarray(table.values[:, share]),
        labels=table.labels if is_first else None,
        weights=table.weights if is_first else None,
        base_margins=table.base_margins if is_first else None,
        ids=table.ids,
        notes=table.notes,
        categories=chosen(table.categories, share),
        kinds=tuple(table.kinds[column] for column in share),
    )
    return _shuffled(taken, seed)


def _shuffled(table: Table, seed: int) -> Table:
    """Put category codes into an order that other parties cannot compute."""
    values, categories = in_secret_order(table.values, table.categories, seed)
    return replace(table, values=values, categories=categories)


def read_rows_to_predict(
    config: SiteConfig,
    columns: Sequence[str],
    categories: Categories,
    with_labels: bool,
    base_margin: str = "",
) -> Table:
    """Read the table to predict, with the columns and categories of the site's part of a model.

    `base_margin` is empty if the model has none. Labels and weights are read only `with_labels`,
    and if the table has them in every row.
    """
    data = config.predict_data or config.data
    roles = Roles(config.label, config.id_column, config.weight, base_margin=base_margin)
    foreign = ""
    if not with_labels:
        roles = Roles(id_column=config.id_column)
        # Among simulated parties with one table each, only the active one has the label.
        foreign = config.label if config.simulated and not config.is_share else ""
    if config.frame is not None:
        table = columns_of_frame(config.frame(), columns, roles, config.reader, categories)
    elif config.simulated:
        how = tuple(columns), roles, foreign, config.reader, categories
        table = read_once(read_columns_of, data, *how)
    else:
        table = read_columns_of(data, columns, roles, foreign, config.reader, categories)
    table = in_codes_of(table, categories)
    return table if with_labels else replace(table, labels=None, weights=None)


def row_ids(table: Table, config: SiteConfig, needs_ids: bool) -> npt.NDArray[np.str_]:
    """Ids of the rows; row numbers if no ids are needed, or if the table is a share.

    Raises DataError if ids are needed and absent, empty or repeated.
    """
    if table.ids is None:
        if needs_ids and not config.is_share:
            raise DataError('id must name the column to match rows by, as in id="customer"')
        return np.arange(table.n_rows).astype(str)
    n_empty = int((table.ids == "").sum())
    if n_empty:
        rule = f"id column {{}} must name every row, got {n_empty} rows without id"
        raise DataError.naming(rule, f"'{config.id_column}'")
    n_repeated = sum(count for count in Counter(table.ids.tolist()).values() if count > 1)
    if n_repeated:
        rule = f"id column {{}} must be unique for every row, got {n_repeated} rows of "
        rule += f"{table.n_rows} that share one"
        raise DataError.naming(rule, f"'{config.id_column}'")
    return table.ids


def common_order(ids: Sequence[str], seed: int) -> Rows:
    """Order of the ids by their keyed digests, which reveals nothing about them.

    The same ids and seed (>= 0) give the same order. Returns int64 indices.
    """
    keyed = hashlib.blake2b(key=seed.to_bytes(8, "little"), digest_size=ORDER_BYTES)
    digests = bytearray()
    for name in ids:
        digest = keyed.copy()  # hashing the key anew would take half of the time
        digest.update(name.encode())
        digests += digest.digest()
    # A digest of 16 bytes is two big-endian words; lexsort takes its last key as the first.
    first, second = np.frombuffer(digests, dtype=">u8").reshape(-1, 2).T
    return np.lexsort((second, first))


def split_common(rows: Rows, ids: Sequence[str], holdout: Holdout, is_share: bool) -> Split:
    """Split the rows that all parties have, each subset in the common order.

    Rows of a shared table are drawn by their row numbers, as between horizontal parties: however
    the table is split, the same rows are held back. Rows of separate tables are drawn by their
    positions in the common order. `rows` are row numbers in the party's table, with these `ids`.
    """
    ordered = rows[common_order(ids, holdout.seed)]
    drawn_by = ordered if is_share else np.arange(len(ordered))
    split = holdout.split(len(rows))
    return Split(*(ordered[np.isin(drawn_by, getattr(split, subset))] for subset in SUBSETS))


def order_digest(ids: Sequence[str], key: bytes) -> bytes:
    """Keyed digest, 32 bytes: equal if ids and order are equal."""
    digest = hashlib.blake2b(key=key, digest_size=32)
    for name in map(str.encode, ids):
        digest.update(len(name).to_bytes(8, "little") + name)
    return digest.digest()


def _without_lone_columns(table: Table, config: SiteConfig) -> Table:
    """Check that weights and base margins come with labels, unless the column is dropped."""
    if table.labels is not None:
        return table
    columns = [
        ("weight", "weights", config.weight, table.weights),
        ("base-margin", "base margins", config.base_margin, table.base_margins),
    ]
    for role, what, name, numbers in columns:
        if numbers is not None and name not in config.dropped:
            rule = f"{role} column {{}} must be in the table with the labels, got it in one "
            rule += f"without: the {what} belong to the party that has the labels; here "
            raise DataError.naming(rule + "drop-columns={} ignores them", f"'{name}'", name)
    return replace(table, weights=None, base_margins=None)


def _with_own_roles(config: SiteConfig) -> SiteConfig:
    """Remove roles and dropped columns that the file does not have."""
    path = Path(config.data)
    names = set(column_names(path, config.reader)) if path.is_file() else set()
    if config.frame is not None:
        names = set(config.frame().column_names)
    return replace(
        config,
        label=config.label if config.label in names else "",
        weight=config.weight if config.weight in names else "",
        base_margin=config.base_margin if config.base_margin in names else "",
        dropped=tuple(name for name in config.dropped if name in names),
    )
