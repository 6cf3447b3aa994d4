"""All rows of a simulated run in one place, and the party of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from fedapp.data.labels import Labels, auto_objective, class_names, label_texts
from fedapp.data.partition import SUBSETS
from fedapp.data.table import Table
from fedapp.errors import DataError
from fedapp.settings import Settings, flatten
from fedapp.site.settings import SiteConfig, site_config
from fedapp.site.table import Rows, read_columns, read_table, share_rows
from fedapp.trees.objective import AUTO
from fedapp.trees.sets import joint_categories, recoded
from strategies.horizontal import check_same_columns

PartRows = Mapping[str, Rows]  # row numbers by subset: train, valid, test


def party_configs(settings: Settings) -> list[SiteConfig]:
    """Configurations of the simulated parties, in the order of their names."""
    run = flatten(settings.as_config())
    return [
        site_config({"partition-id": share, "num-partitions": settings.parties}, run)
        for share in range(settings.parties)
    ]


def settled(settings: Settings) -> Settings:
    """Resolve ``objective=auto`` by the labels of the parties."""
    if settings.objective != AUTO:
        return settings
    configs = party_configs(settings)
    # If one table is split, its labels are those of all parties.
    shared = [read_table(configs[0])] if configs[0].is_share else []
    tables = shared or [read_columns(config, settings.seed) for config in configs]
    classes = [class_names(each.labels, AUTO) for each in tables if each.labels is not None]
    if not classes:
        raise DataError('label must name the label column, as in label="y"; got none')
    return settings.settled(auto_objective(classes)[0])


def stacked_tables(settings: Settings) -> tuple[Table, dict[str, PartRows]]:
    """The rows of all horizontal parties as one table, and the row numbers of each party by subset.

    The table is the one that is split, or those of the parties, one below the other.
    """
    configs = party_configs(settings)
    holdout = settings.holdout
    if configs[0].is_share:
        table = read_table(configs[0])
        shares = share_rows(table, holdout, settings.partition, settings.parties)
        return table, {
            config.name: {subset: shares[subset][config.share] for subset in SUBSETS}
            for config in configs
        }
    tables = {config.name: read_table(config) for config in configs}
    columns = tables[configs[0].name].columns
    for name, table in tables.items():
        if sorted(table.columns) == sorted(columns):
            tables[name] = table.in_order(columns)
    check_same_columns({name: table.columns for name, table in tables.items()})
    rows: dict[str, PartRows] = {}
    start = 0
    for name, table in tables.items():
        split = holdout.split(table.n_rows)
        rows[name] = {subset: start + getattr(split, subset) for subset in SUBSETS}
        start += table.n_rows
    return _stack(list(tables.values())), rows


def _stack(tables: Sequence[Table]) -> Table:
    """Stack tables with the same columns; categories are recoded to a common dictionary."""
    joint = joint_categories(table.categories for table in tables)
    labels = [table.labels for table in tables if table.labels is not None]
    weights = [table.weights for table in tables if table.weights is not None]
    margins = [table.base_margins for table in tables if table.base_margins is not None]
    if len({each.dtype.kind for each in labels}) > 1:  # texts in one table, numbers in another
        labels = [label_texts(each) for each in labels]
    return Table(
        tables[0].columns,
        np.concatenate(
            [recoded(table.values, table.categories, joint, table.columns)[0] for table in tables]
        ),
        labels=cast(Labels, np.concatenate(labels)) if labels else None,
        weights=np.concatenate(weights) if weights else None,
        categories=joint,
        base_margins=np.concatenate(margins) if margins else None,
    )
