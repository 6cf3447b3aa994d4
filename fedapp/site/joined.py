"""Tables of several parties in one place, joined by id."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedapp.data.datasets import dataset_names, read_source
from fedapp.data.predictions import read_columns_of
from fedapp.data.read import column_names
from fedapp.data.schema import PLAIN, Reader, Roles
from fedapp.data.table import Table
from fedapp.errors import ConfigError, DataError
from fedapp.messages.vertical import INNER
from fedapp.site.settings import SiteConfig
from fedapp.site.table import row_ids
from fedapp.trees.categories import Categories, chosen


def read_joined(
    sources: Mapping[str, str],
    columns: Sequence[str],
    roles: Roles,
    first: str,
    categories: Categories = (),
    readers: Mapping[str, Reader] | None = None,
    kinds: Sequence[str] = (),
    join: str = INNER,
) -> tuple[Table, list[str], dict[str, Table]]:
    """Read the rows that all tables have, with a model's columns in the model's order.

    Also returns the ids of the first party's rows that others do not have, and the tables.

    Parameters
    ----------
    sources : of each party.
    columns : of the model; ``bank.balance`` is ``balance`` of the party ``bank``.
    roles : the ids that match rows; labels and weights, from any table that has them; base
        margins, from the first party's.
    first : the party whose rows are wanted, and whose order they keep.
    readers : from the schemas of the parties; declared columns may be absent.
    kinds : of the model's columns.
    join : ``left`` for all rows of the first party, which then has the labels and weights too;
        values of columns whose party lacks a row are missing.
    """
    if not roles.id_column:
        raise ConfigError('--id must name the column to match rows by, as in --id customer; got ""')
    readers = readers or dict.fromkeys(sources, PLAIN)
    names = {party: _column_names(source, readers[party]) for party, source in sources.items()}
    owners = [_owner(column, names, set(columns)) for column in columns]
    features = {party: [name for at, name in owners if at == party] for party in sources}
    with_roles = (first, *sources) if join == INNER else (first,)
    others = {party: names[party].difference(features[party]) for party in with_roles}
    labels_at = next((party for party, extra in others.items() if roles.label in extra), first)
    at_hand = [party for party in (labels_at, *others) if roles.weight in others[party]]
    weights_at = next(iter(at_hand), labels_at)
    column_ids = {
        party: [index for index, (owner, _) in enumerate(owners) if owner == party]
        for party in sources
    }
    tables = {
        party: read_columns_of(
            source,
            features[party],
            Roles(
                roles.label if party == labels_at else "",
                roles.id_column,
                roles.weight if party == weights_at else "",
                base_margin=roles.base_margin if party == first else "",
                event=roles.event if party == labels_at else "",
                qid=roles.qid if party == labels_at else "",
            ),
            reader=readers[party],
            categories=chosen(categories, column_ids[party]),
            kinds=[kinds[index] for index in column_ids[party]] if kinds else (),
        )
        for party, source in sources.items()
    }
    ids = {
        party: row_ids(table, SiteConfig(party, sources[party], id_column=roles.id_column), True)
        for party, table in tables.items()
    }
    is_wanted = np.ones(len(ids[first]), dtype=bool)
    if join == INNER:
        is_wanted = np.isin(ids[first], reduce(np.intersect1d, ids.values()))
    wanted = ids[first][is_wanted]
    taken = {
        party: taken_by_id(tables[party], party_ids, wanted) for party, party_ids in ids.items()
    }
    # Columns of a party come in the order of the model, so each is taken when its turn comes.
    at = {party: iter(table.values.T) for party, table in taken.items()}
    values = np.column_stack([next(at[party]) for party, _ in owners])
    joined = replace(
        taken[labels_at],
        columns=tuple(columns),
        values=np.ascontiguousarray(values),
        weights=taken[weights_at].weights,
        base_margins=taken[first].base_margins,
        categories=categories,
    )
    return joined, ids[first][~is_wanted].tolist(), tables


def taken_by_id(table: Table, ids: npt.NDArray[np.str_], wanted: npt.NDArray[np.str_]) -> Table:
    """Rows of a table that has `ids`, in an order of ids; of an id it lacks, missing values."""
    order = np.argsort(ids, kind="stable")
    positions = np.searchsorted(ids[order], wanted) % len(ids)
    taken = table.take(order[positions])
    is_absent = ids[order[positions]] != wanted
    return replace(taken, values=np.where(is_absent[:, None], np.float32(np.nan), taken.values))


def _column_names(source: str, reader: Reader) -> set[str]:
    if source in dataset_names():
        return set(read_source(source).columns)
    return set(column_names(Path(source), replace(reader, tolerant=True)))


def _owner(column: str, names: Mapping[str, set[str]], columns: Collection[str]) -> tuple[str, str]:
    owners = [
        (party, column.removeprefix(f"{party}."))
        for party, present in names.items()
        if column.startswith(f"{party}.") and column.removeprefix(f"{party}.") in present
    ]
    owners += [
        (party, column)
        for party, present in names.items()
        if column in present and f"{party}.{column}" not in columns
    ]
    if len(owners) != 1:
        got = " and ".join(f"'{name}' of {party}" for party, name in owners) or "none"
        way = ": leave out of the tables what the model was not trained on" if owners else ""
        rule = f"column '{column}' of the model must be in one of the tables"
        raise DataError(f"{rule}, got {got}{way}")
    return owners[0]
