"""A party's table in a run: its rows by use, and its columns.

Horizontal parties have different rows of the same columns (``read_subsets``), vertical ones
different columns of the same rows (``read_columns``). A simulated party may have a share of one
table.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fedapp.cluster import workers_at
from fedapp.data.columns import RULE_WAY
from fedapp.data.datasets import read_source
from fedapp.data.labels import Labels, is_few, numbers_of
from fedapp.data.notes import Note, n_sharing
from fedapp.data.partition import (
    HELD_OUT,
    LEFT_OUT,
    SUBSETS,
    Holdout,
    Split,
    keyed_digests,
    partition_columns,
    partition_rows,
    split_queries,
    value_names,
)
from fedapp.data.read import column_names, file_version, has_table, table_of_frame
from fedapp.data.schema import listed
from fedapp.data.scratch import batches, copied
from fedapp.data.table import Table, notes_on_leaks
from fedapp.errors import ConfigError, DataError
from fedapp.messages.methods import Method
from fedapp.site.settings import SiteConfig
from fedapp.trees.categories import Categories, in_secret_order, recoded, without_rare
from fedapp.trees.ranking import queries_of

Rows = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]


def read_columns(config: SiteConfig, seed: int) -> Table:
    """Read the table of one site; of a simulated one, its share of the columns or its file.

    The order of category codes reveals nothing about their names. The first share has the labels,
    weights and base margins. If simulated parties have files, the one with the label column has
    all three.
    """
    if not config.is_share:
        table = read_table(_with_present_roles(config) if config.simulated else config)
        return _shuffled(_exportable(_without_lone_columns(table, config), config), seed)
    table = read_table(config)
    rng = np.random.default_rng(seed)
    shares = partition_columns(config.columns, len(table.columns), config.n_shares, rng)
    taken = table.in_order([table.columns[column] for column in shares[config.share]])
    taken = replace(taken, given=frozenset(), partitions=None, n_read=0)
    if config.share:
        taken = replace(taken, labels=None, weights=None, base_margins=None)
        taken = replace(taken, is_ranked=False, groups=None, times=None)
    return _shuffled(_exportable(taken, config), seed)


def _exportable(table: Table, config: SiteConfig) -> Table:
    """Withhold names of categories where the site's part of a model may leave with its names."""
    if config.shares_categories is True or not config.allows_export or not table.categories:
        return table
    check_given(config, table, table.categories)
    agreed = {column_id for column_id, name in enumerate(table.columns) if name in table.given}
    try:
        shared = without_rare(table.categories, [table.values], config.fewest_named, agreed)
    except ValueError as error:
        raise DataError(str(error)) from error
    values = recoded(table.values, table.categories, shared, copied=copied)[0]
    return replace(table, values=values, categories=shared)


def check_given(config: SiteConfig, table: Table, categories: Categories) -> None:
    """Check that a site that shares no names of categories has all from its schema."""
    coded = (name for name, names in zip(table.columns, categories, strict=False) if names)
    unshared = [name for name in coded if name not in table.given]
    if unshared and config.shares_categories is False:
        rule = "categories of feature columns must be given by the schema where share-categories "
        rule += "is false in the node config, got none for {}"
        raise DataError.naming(rule, listed(unshared))


def notes_on_classes(config: SiteConfig, labels: Labels | None) -> list[Note]:
    """Note classes of few rows, since names of classes leave whatever the site shares."""
    values, counts = np.unique([] if labels is None else labels, return_counts=True)
    n_few = int((counts < config.fewest_named).sum())
    numbers = numbers_of(values)
    if not n_few or not (numbers is None or is_few(np.unique(numbers))):
        return []
    rule = f"{n_few} of {len(counts)} classes have fewer than {config.fewest_named} rows"
    return [Note(f"{rule} (share-categories), and names of classes leave the site all the same")]


def notes_on_workers(config: SiteConfig) -> list[Note]:
    """Note what the site's own cluster would show to its network."""
    if config.simulated or not config.workers or workers_at(config.workers).is_private:
        return []
    rule = "keys and gradients go to the site's Ray cluster in clear (workers)"
    return [Note(f"{rule}: RAY_USE_TLS=1 and certificates at all of its nodes encrypt them")]


def texts_for_others(
    config: SiteConfig, notes: Iterable[Note], shares_names: bool = True
) -> dict[str, Any]:
    """Texts of warnings (``notes``) and ``facts``, without what the site withholds."""
    texts: dict[str, list[str]] = {"notes": [], "facts": []}
    for note in (*notes, *notes_on_workers(config)):
        shares = config.shares_categories is True or not note.quotes_values
        texts["facts" if note.is_fact else "notes"].append(note.text(shares_names and shares))
    return {field: tuple(lines) for field, lines in texts.items()}


def _shuffled(table: Table, seed: int) -> Table:
    """Put category codes into an order that other parties cannot compute."""
    values, categories = in_secret_order(table.values, table.categories, seed, copied)
    return replace(table, values=values, categories=categories)


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
    if n_repeated := n_sharing(table.ids):
        rule = f"id column {{}} must be unique for every row, got {n_repeated} rows of "
        rule += f"{table.n_rows} that share one: rules of a schema aggregate them, {RULE_WAY}"
        raise DataError.naming(rule, f"'{config.id_column}'")
    return table.ids


def common_order(ids: Sequence[str], seed: int) -> Rows:
    """Order of the ids by a seed (>= 0), which reveals nothing about them; int64 indices."""
    return keyed_order(ids, seed.to_bytes(8, "little"))


def keyed_order(ids: Sequence[str], key: bytes) -> Rows:
    """Order of the ids by their digests under a key of any length; int64 indices."""
    # lexsort takes its last key as the first.
    first, second = keyed_digests(ids, key).T
    return np.lexsort((second, first))


def split_common(rows: Rows, ids: Sequence[str], holdout: Holdout, is_share: bool) -> Split:
    """Split the rows that all parties have, each subset in the common order.

    Rows of a shared table are drawn by their row numbers, as between horizontal parties: however
    the table is split, the same rows are held back. Rows of separate tables are drawn by their
    positions in the common order. `rows` are row numbers in the party's table, with these `ids`.
    """
    if not len(rows):
        return Split(rows, rows, rows)
    ordered = rows[common_order(ids, holdout.seed)]
    if not is_share:
        return split_ordered(ordered, holdout)
    split = holdout.split(len(rows))
    return Split(*(ordered[np.isin(ordered, getattr(split, subset))] for subset in SUBSETS))


def split_ordered(rows: Rows, holdout: Holdout) -> Split:
    """Split rows by their positions in the common order."""
    split = holdout.split(len(rows))
    return Split(*(rows[getattr(split, subset)] for subset in SUBSETS))


def secret_order(ids: npt.NDArray[np.str_], values: Values, labels: Labels, seed: int) -> Rows:
    """Order of all rows for ``join=left``, by the digests of their ids under a secret key.

    The key is a digest of all ids, values and labels, so only a party that has them can compute the
    order. In an order by ids alone, others could compute where a guessed id would be among their
    rows, and see whether a row without partner is there. The same rows and seed give the same
    order.
    """
    ordered = common_order(ids.tolist(), seed)
    key = order_digest(ids[ordered].tolist(), seed.to_bytes(8, "little"))
    rows = Table((), values[ordered], labels=labels[ordered])
    return keyed_order(ids.tolist(), fingerprint({"all": rows}, key).encode())


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


def _with_present_roles(config: SiteConfig) -> SiteConfig:
    """Remove roles and dropped columns that the file does not have."""
    path = Path(config.data)
    names = set(column_names(path, config.reader)) if has_table(path) else set()
    if config.frame is not None:
        names = set(config.frame().column_names)
    roles = ("label", "weight", "base_margin", "event", "qid")
    absent: dict[str, Any] = {role: "" for role in roles if getattr(config, role) not in names}
    return replace(
        config,
        **absent,
        # The party with the labels must have these.
        group=config.group if names & {config.group, config.label} else "",
        time=config.time if names & {config.time, config.label} else "",
        dropped=tuple(name for name in config.dropped if name in names),
    )


def with_present_times(config: SiteConfig, holdout: Holdout) -> SiteConfig:
    """The config of a vertical party with the columns by which a run splits rows.

    The party with the labels must have them; where others do, they are no features either.
    """
    wanted = config.splitting(holdout)
    if config.label or config.simulated or not (wanted.group or wanted.time):
        return wanted
    names = column_names(Path(config.data), config.reader)
    group, time = (name if name in names else "" for name in (wanted.group, wanted.time))
    return replace(wanted, group=group, time=time)


def read_subsets(config: SiteConfig, holdout: Holdout) -> dict[str, Table]:
    """Read the train, valid and test rows of one site.

    A simulated table is first split into subsets and then among the parties, so that a pooled model
    sees the same rows.
    """
    table = read_table(config.splitting(holdout))
    if config.is_share:
        shares = share_rows(table, holdout, config.partition, config.n_shares)
        rows = {subset: shares[subset][config.share] for subset in SUBSETS}
        train, test = (np.concatenate(shares[subset]) for subset in ("train", "test"))
    else:
        split = split_table(table, holdout)
        rows = {subset: getattr(split, subset) for subset in SUBSETS}
        train, test = split.train, split.test
    notes = *table.notes, *notes_on_known(config, table, train, test)
    table = replace(table, notes=notes, together=together(config.splitting(holdout), table))
    return {subset: table.take(rows[subset]) for subset in SUBSETS}


def split_table(table: Table, holdout: Holdout, is_whole: bool = False) -> Split:
    """Split a table's rows: by time, or those of a query, a group or a repeated id together.

    ``is_whole``: the table has the rows of all parties.
    """
    if table.is_ranked and table.labels is not None:
        if table.groups is not None or table.times is not None:
            name = "group" if table.times is None else "test-from"
            rule = "must be omitted with qid, as the rows of a query are in one subset"
            raise ConfigError(f"{name} {rule}")
        return split_queries(np.arange(table.n_rows), queries_of(table.labels), holdout)
    groups = table.ids if table.groups is None and has_repeated_ids(table) else table.groups
    if table.times is not None:
        keeps_groups = table.groups is not None
        return holdout.split_times(table.times, groups, keeps_groups, is_whole)
    if groups is not None:
        return holdout.split_groups(groups, is_whole)
    return holdout.split(table.n_rows)


def drawn_subsets(table: Table, holdout: Holdout, is_whole: bool) -> npt.NDArray[np.uint8] | None:
    """Of vertical parties' rows, the number of each one's subset, if its group or time decides.

    None if they are drawn in the common order, or without labels.
    """
    if table.labels is None or (table.groups is None and table.times is None):
        return None
    split = split_table(table, holdout, is_whole)
    numbers = np.full(table.n_rows, LEFT_OUT, dtype=np.uint8)
    for number, subset in enumerate(SUBSETS):
        numbers[getattr(split, subset)] = number
    return numbers


def has_repeated_ids(table: Table) -> bool:
    """Whether some rows share their id."""
    return table.ids is not None and n_sharing(table.ids) > 0


def together(config: SiteConfig, table: Table) -> str:
    """The column whose rows are in one subset; empty: each row is drawn for itself."""
    if table.groups is not None:
        return config.group
    by_id = not table.is_ranked and table.times is None and has_repeated_ids(table)
    return config.id_column if by_id else ""


def notes_on_known(config: SiteConfig, table: Table, train: Rows, test: Rows) -> list[Note]:
    """Note test rows that share their id with a training row."""
    if table.ids is None or not has_repeated_ids(table):
        return []
    n_known = int(np.isin(table.ids[test], table.ids[train]).sum())
    if not n_known:
        return []
    rule = f"{n_known:,} of {len(test):,} test rows share their id {{}} with a training row: "
    rule += "scores are of what was trained on"
    way = "; as group the column leaves these test rows out" * (table.times is not None)
    return [Note(rule + way, f"'{config.id_column}'")]


@lru_cache(8)  # else n parties of a process would deal out all rows n times
def share_rows(
    table: Table, holdout: Holdout, partition: str, n_parties: int
) -> Mapping[str, tuple[Rows, ...]]:
    """Row numbers of every party, for each subset; cached, not to be changed.

    The rule deals only training rows. Validation and test rows are dealt evenly, as scores are
    pooled; only a natural partition keeps the rows of a group together in all subsets. Of ranked
    rows, queries are dealt, the largest first.
    """
    split = split_table(table, holdout, is_whole=True)
    rng = np.random.default_rng([holdout.seed, n_parties])
    groups = table.partitions
    if table.is_ranked:
        partition, groups = _dealt_whole(table, partition)
    if partition.startswith("column"):
        everyone = np.arange(table.n_rows, dtype=np.int64)
        shares = partition_rows(partition, everyone, n_parties, rng, table.labels, groups)
        return {
            subset: tuple(np.intersect1d(rows, getattr(split, subset)) for rows in shares)
            for subset in SUBSETS
        }
    dealt = {"train": partition_rows(partition, split.train, n_parties, rng, table.labels)}
    for subset in HELD_OUT:
        rows = rng.permutation(getattr(split, subset))
        dealt[subset] = tuple(np.sort(share) for share in np.array_split(rows, n_parties))
    return dealt


def _dealt_whole(table: Table, partition: str) -> tuple[str, npt.NDArray[np.str_] | None]:
    """The rule that deals whole queries of ranked rows, and the groups that it deals."""
    queries = queries_of(cast(Labels, table.labels))
    if table.partitions is None:
        if partition == "iid":
            return "column:qid", queries.astype(np.str_)
        rule = "must be iid or column:NAME where rows are of queries (qid), which are dealt whole"
        raise ConfigError(f"partition {rule}, got {partition}")
    pairs = np.unique(
        np.stack([queries, np.unique(table.partitions, return_inverse=True)[1]]), axis=1
    )
    if n_divided := pairs.shape[1] - len(np.unique(queries)):
        rule = f"qid must name queries whose rows are all of one group with {partition}"
        raise DataError(f"{rule}, got {n_divided:,} in several")
    return partition, table.partitions


def fingerprint(subsets: dict[str, Table], key: bytes) -> str:
    """Keyed digest of all rows, 128 bits in hex."""
    digest = hashlib.blake2b(key=key, digest_size=16)
    for table in subsets.values():
        arrays = (table.values, table.labels, table.weights, table.base_margins)
        for array in (array for array in arrays if array is not None):
            for rows in batches(len(array), array[:1].nbytes):
                digest.update(np.ascontiguousarray(array[rows]).view(np.uint8).data)
        if table.categories:
            digest.update(json.dumps(table.categories).encode())
    return digest.hexdigest()


def read_table(config: SiteConfig) -> Table:
    """Read the table of a site, with its roles; raises DataError or ConfigError."""
    if config.frame is not None:
        return _read_to_train(config.frame(), config.roles, config.reader)
    data, roles, reader = config.data, config.roles, config.reader
    if config.simulated:
        return read_once(_read_to_train, data, roles, reader, n_parties=config.n_shares)
    return read_held(read_source, data, roles, reader)


def named_by_value(config: SiteConfig, method: Method | None) -> SiteConfig:
    """A simulated party with the name of its value of ``partition=column:NAME``, if it has one."""
    is_one = config.frame is None and config.is_share and config.partition_column
    if not (is_one and method and method.needs_label):
        return config
    values = partition_values(read_table(config))
    if len(values) != config.n_shares:
        return config
    names = value_names(values, config.partition_column)
    return replace(config, name=list(names)[config.share])


@lru_cache(8)  # each of n parties asks for it
def partition_values(table: Table) -> npt.NDArray[Any]:
    """The values of ``partition=column:NAME``, ascending; cached, not to be changed."""
    return np.unique(cast(Any, table.partitions))


def _read_to_train(source: Any, *how: Any) -> Table:
    """Read a simulated table; checks for leaks need all rows and columns, not a share."""
    read = read_source if isinstance(source, str) else table_of_frame
    table = read(source, *how)
    return replace(table, notes=(*table.notes, *notes_on_leaks(table)))


_READING = threading.Lock()
_TABLES: dict[Any, Table] = {}  # of simulated parties, the last used at the end
MOST_TABLES = 64


def read_once(read: Callable[..., Table], data: str, *how: Any, n_parties: int) -> Table:
    """Read a simulated table once per process, unless its file changes."""
    key = file_version(Path(data)), read, data, how
    with _READING:  # else threads of several sites would read the same table
        _TABLES[key] = table = _TABLES.pop(key, None) or read(data, *how)
        # Every party's table, to train and to predict: with fewer, each round would read all.
        for oldest in list(_TABLES)[: -max(MOST_TABLES, 2 * n_parties)]:
            del _TABLES[oldest]
    return table


# Tables that were read once within ``held_tables``.
_HELD: ContextVar[dict[Any, Table] | None] = ContextVar("held", default=None)


@contextmanager
def held_tables() -> Iterator[None]:
    """Let two readers within the block share a table; the second one takes it out of memory."""
    token = _HELD.set({})
    try:
        yield
    finally:
        _HELD.reset(token)


def read_held(read: Callable[..., Table], data: str, *how: Any) -> Table:
    """Read a table; one that was read before within ``held_tables`` is not read again."""
    held = _HELD.get()
    if held is None:
        return read(data, *how)
    key = read, data, how
    if key not in held:
        held[key] = read(data, *how)
        return held[key]
    return held.pop(key)
