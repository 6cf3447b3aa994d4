"""The tables of a simulated run: checked before it starts, and all rows in one place.

`check_tables` calls the parties' and the server's code of the first exchanges, so that the errors
are the same. `stacked_tables` gives baselines and comparisons the rows of all parties.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from clients import handshake
from clients.handshake import code_labels, weights_of
from clients.vertical.opening import check_common
from clients.vertical.opening import look as look_vertical
from fedapp.data.datasets import by_party, check_source, party_sources
from fedapp.data.labels import (
    Labels,
    auto_objective,
    check_weights,
    class_names,
    label_texts,
    number_labels,
)
from fedapp.data.partition import SUBSETS, Split, split_numbered, split_queries
from fedapp.data.read import column_names, has_table, parquet_files
from fedapp.data.scratch import copied, empty_table
from fedapp.data.table import Table
from fedapp.errors import ConfigError, DataError, did_you_mean, listed
from fedapp.messages.fields import Introduction
from fedapp.messages.handshake import HelloReply, HelloRequest, LabelsReply
from fedapp.messages.methods import all_methods, method_of
from fedapp.messages.vertical import LEFT, VerticalHelloRequest
from fedapp.sections import flatten
from fedapp.settings import Settings, defaults
from fedapp.site.settings import SiteConfig, site_config
from fedapp.site.table import (
    Rows,
    common_order,
    drawn_subsets,
    named_by_value,
    partition_values,
    read_columns,
    read_table,
    secret_order,
    share_rows,
    split_common,
    split_ordered,
    split_table,
)
from fedapp.trees.categories import joint_categories, recoded
from fedapp.trees.limits import check_without_categories, constraints_of
from fedapp.trees.losses import LossParameters
from fedapp.trees.objective import AUTO
from fedapp.trees.ranking import join_queries, queries_of
from strategies.common_table import check_same_columns, common_table
from strategies.handshake import common_notes, parties_by_name, shared_rows
from strategies.horizontal import label_sums
from strategies.method import TreeStrategy
from strategies.run import load_strategy

MOST_NATURAL_PARTIES = 100  # of a partition by column, where ``parties`` is not set
Looked = tuple[Introduction, Any]  # a party's introduction, and its table
PartRows = Mapping[str, Rows]  # row numbers by subset: train, valid, test


def check_tables(settings: Settings) -> list[str]:
    """Read the tables of a simulated run, check them like the run would, and return warnings."""
    configs = party_configs(settings)
    for config in configs:
        check_source(config.data)
    strategy = load_strategy(settings.strategy)
    if not settings.model:
        _check_settings(settings, configs)
    opened: Any = strategy.of_run(settings.with_parties(settings.parties))
    looked = _open(opened, configs)
    settings = settings.model_copy(update={"objective": opened.settings.objective})
    method = all_methods()[settings.strategy]
    if method.family == "horizontal":
        _check_labels(settings, looked)
    else:
        matched = _check_rows(settings, configs, looked)
        if not settings.model:
            _check_constraints(settings, [table for _, (table, _) in looked.values()])
            opened.warn_of_few_matched(matched)
    shared = shared_rows(settings) if method.family == "horizontal" else []
    notes = common_notes({name: hello.notes for name, hello in opened.parties.items()})
    return [*notes, *opened.warnings, *shared]


def natural_parties(settings: Settings) -> int:
    """Number of parties of ``partition=column:NAME``, one a value; 0 if ``parties`` or ``data``
    says how many. ConfigError for more than ``MOST_NATURAL_PARTIES``."""
    config = party_configs(settings)[0]
    if settings.asked_parties or not config.partition_column or not config.is_share:
        return 0
    n_values = len(partition_values(read_table(config)))
    if n_values > MOST_NATURAL_PARTIES:
        rule = f"must be set where {settings.partition} has over {MOST_NATURAL_PARTIES} values"
        raise ConfigError(f"parties {rule}, got {n_values}; parties=10 deals them out to 10")
    return n_values


def _open(strategy: TreeStrategy[Any], configs: Sequence[SiteConfig]) -> dict[str, Looked]:
    """Have each party introduce its table, and let the method compare the introductions."""
    request = strategy.greeting()
    assert isinstance(request, HelloRequest | VerticalHelloRequest)
    if configs[0].is_share and not strategy.settings.model:
        # An error in the labels of one table should not name a party.
        table = read_table(configs[0])
        if table.labels is not None:
            class_names(table.labels, strategy.settings.objective)
    looked: dict[str, Looked] = {}
    for config in configs:
        try:
            looked[config.name] = _look(config, request)
        except DataError as error:
            raise error.at(config.name) from None
    strategy.parties = parties_by_name(reply for reply, _ in looked.values())
    if isinstance(again := strategy.greeting_again(), HelloRequest):
        looked = {config.name: _look(config, again) for config in configs}
        strategy.parties = parties_by_name(reply for reply, _ in looked.values())
    strategy.resolve_objective()
    conversation = strategy.conversation(strategy.parties, None)
    next(conversation)
    conversation.close()
    return looked


def _look(config: SiteConfig, request: HelloRequest | VerticalHelloRequest) -> Looked:
    if isinstance(request, HelloRequest):
        return handshake.look(config, request)
    reply, table, ids = look_vertical(config, request)
    return reply, (table, ids)


def _check_settings(settings: Settings, configs: Sequence[SiteConfig]) -> None:
    """Check that partition and columns come with one table, and that named columns exist."""
    if configs[0].is_share:
        return
    for name, value in (("partition", settings.partition), ("columns", settings.columns)):
        if value != defaults()[name]:
            rule = f"{name} must be omitted where every party has a table of its own"
            raise ConfigError(f"{rule}, got {value!r}")
    files = {Path(config.data): config.reader for config in configs if has_table(Path(config.data))}
    columns = {name for file, reader in files.items() for name in column_names(file, reader)}
    of_one = ("label", "weight", "event", "qid", "group")
    roles = {role: [getattr(settings, role)] for role in of_one}
    roles |= {"test-from": [settings.holdout.time_column], "drop": [*listed(settings.drop_columns)]}
    for role, names in roles.items():
        for name in names:
            if name and files and name not in columns:
                rule = f"{role} column '{name}' must be in the table of a party"
                raise DataError(f"{rule}, got none that has it{did_you_mean(name, columns)}")


def _check_constraints(settings: Settings, tables: Sequence[Table]) -> None:
    """Check that constraints name columns of one party each, which at sites only the parties know;
    a run of parties with the same columns checks that before its first exchange."""
    counts = Counter(column for table in tables for column in table.columns)
    constraints = settings.monotone_constraints, settings.interaction_constraints
    try:
        monotone, _ = constraints_of(*constraints, [name for name, n in counts.items() if n == 1])
        check_without_categories(monotone, any(any(table.categories) for table in tables))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _check_labels(settings: Settings, looked: Mapping[str, Looked]) -> None:
    replies = {name: cast(HelloReply, reply) for name, (reply, _) in looked.items()}
    classes = common_table(replies, settings).classes
    sums = {}
    for name, (_, subsets) in looked.items():
        labels = {subset: cast(Labels, table.labels) for subset, table in subsets.items()}
        weights, parameters = weights_of(subsets["train"]), LossParameters.of(settings)
        _, counted = code_labels(labels, weights, settings.objective, classes, parameters)
        sums[name] = LabelsReply(**counted, unseen=np.empty(0, dtype=np.int64))
    label_sums(sums, len(classes))


def _check_rows(
    settings: Settings, configs: Sequence[SiteConfig], looked: Mapping[str, Looked]
) -> dict[str, int]:
    """Check the common rows of vertical parties and their labels; returns their numbers by party.

    Of the active party or, where it keeps more than the common rows, of the others.
    """
    active = next(name for name, (reply, _) in looked.items() if getattr(reply, "active", False))
    table, ids = cast(tuple[Table, Any], looked[active][1])
    rows = np.arange(len(ids))
    matched = {active: len(rows)}
    if settings.align == "ordered":
        for name, (_, (_, others)) in looked.items():
            if not np.array_equal(others, ids):
                raise DataError(f"ids must be those of {active}, in the same order", name)
    elif not configs[0].is_share:
        every = {name: np.isin(ids, party_ids) for name, (_, (_, party_ids)) in looked.items()}
        if settings.join == LEFT:
            matched = {name: int(has.sum()) for name, has in every.items() if name != active}
        else:
            rows = np.flatnonzero(np.all([*every.values()], axis=0))
            matched = {active: len(rows)}
    check_common(min(matched.values()), predicts=bool(settings.model))
    if settings.model:
        return matched
    split = split_rows_of(settings, configs[0], table, ids, rows)
    order = np.concatenate([getattr(split, subset) for subset in SUBSETS])
    assert table.labels is not None
    positive = configs[0].positive_label
    number_labels(table.labels[order], settings.objective, len(split.train), positive)
    check_weights(weights_of(table)[split.train])
    return matched


def split_rows_of(
    settings: Settings, config: SiteConfig, table: Table, ids: Any, rows: Rows
) -> Split:
    """Split the rows of a vertical run; `rows` of the active party's table, which has `ids`."""
    holdout = settings.holdout
    assert table.labels is not None
    numbers = drawn_subsets(table, holdout, config.is_share)
    draws = table.is_ranked or numbers is not None  # the party with the labels, and sends subsets
    if settings.join == LEFT and not config.is_share:
        rows = secret_order(ids, table.values, table.labels, holdout.seed)
        if not draws:
            return split_ordered(rows, holdout)
    elif draws:
        rows = rows[common_order(ids[rows].tolist(), holdout.seed)]
    if numbers is not None:
        return split_numbered(rows, numbers)
    if table.is_ranked:
        return split_queries(rows, queries_of(table.labels[rows]), holdout)
    return split_common(rows, ids[rows].tolist(), holdout, config.is_share)


def table_files(settings: Settings) -> list[Path]:
    """Files that ``data``, ``schema`` and ``without`` name; none for a data set's name."""
    sources = party_sources(settings.data, settings.parties).values() or [settings.data]
    names = (*sources, *by_party(settings.schema_file).values(), *settings.without.split(","))
    files = (file for name in names for file in parquet_files(Path(name).resolve()))
    return [file for file in files if file.is_file()]


def party_configs(settings: Settings) -> list[SiteConfig]:
    """Configurations of the simulated parties, in the order of their names."""
    run = flatten(settings.as_config())
    configs = (
        site_config({"partition-id": share, "num-partitions": settings.parties}, run)
        for share in range(settings.parties)
    )
    return [named_by_value(config, method_of(settings.strategy)) for config in configs]


def resolve_objective(settings: Settings) -> Settings:
    """Resolve ``objective=auto`` by the labels of the parties."""
    if settings.objective != AUTO:
        return settings
    configs = party_configs(settings)
    # If one table is split, its labels are those of all parties.
    shared = [read_table(configs[0])] if configs[0].is_share else []
    tables = shared or [read_columns(config, settings.seed) for config in configs]
    classes = [class_names(table.labels, AUTO) for table in tables if table.labels is not None]
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
        split = split_table(table, holdout)
        rows[name] = {subset: start + getattr(split, subset) for subset in SUBSETS}
        start += table.n_rows
    return _stack(list(tables.values())), rows


def _stack(tables: Sequence[Table]) -> Table:
    """Stack tables with the same columns; categories are recoded to a common dictionary."""
    joint = joint_categories(table.categories for table in tables)
    labels = [table.labels for table in tables if table.labels is not None]
    is_ranked = all(table.is_ranked for table in tables)
    join = join_queries if is_ranked else np.concatenate
    weights = [table.weights for table in tables if table.weights is not None]
    margins = [table.base_margins for table in tables if table.base_margins is not None]
    if len({values.dtype.kind for values in labels}) > 1:  # texts in one table, numbers in another
        labels = [label_texts(values) for values in labels]
    values = empty_table(sum(table.n_rows for table in tables), len(tables[0].columns))
    end = 0
    for table in tables:
        start, end = end, end + table.n_rows
        coded = recoded(table.values, table.categories, joint, table.columns, copied)[0]
        values[start:end] = coded
    return Table(
        tables[0].columns,
        values,
        labels=cast(Labels, join(labels)) if labels else None,
        is_ranked=is_ranked,
        weights=np.concatenate(weights) if weights else None,
        categories=joint,
        base_margins=np.concatenate(margins) if margins else None,
    )
