"""Columns in SecureBoost: a party's own, as bins, and those of all parties at the active one.

The run config names columns; a party that shares its column names sends which of them are its. A
party that does not share them sets constraints among its columns in its node config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from clients.vertical.party import Aligned, Bytes, numbered
from fedapp.arrays import Ints
from fedapp.data.scratch import copied
from fedapp.errors import ConfigError, DataError, as_protocol_error
from fedapp.histograms.bins import Codes, Cuts, digitise, ragged, with_categories
from fedapp.histograms.sketch import quantile_cuts
from fedapp.messages.fields import check_fields
from fedapp.messages.secureboost import ColumnBins, SetupRequest
from fedapp.site.answer import MODEL_ID
from fedapp.site.settings import BINS_A_COLUMN
from fedapp.trees.categories import CategorySets, category_counts, recoded, trained_first
from fedapp.trees.divided import Lookup, Part, joint_names
from fedapp.trees.limits import (
    ONE_TREE,
    check_without_categories,
    constraints_of,
    parse_interactions,
    parse_monotone,
)
from fedapp.trees.objective import has_quantile_leaves

NO_CUTS = Cuts(np.empty(0, np.float32), np.zeros(1, np.int64), np.empty(0, np.float32))
BOTH = "monotone-constraints and interaction-constraints"


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A party's training rows as bins."""

    cuts: Cuts  # of the training rows, with their categories
    n_categories: Ints  # (n_columns,): all categories, also those of held-back rows
    codes: Codes  # (n_train, n_columns)
    missing_code: int  # at a passive party, a missing value's bin is the column's last instead

    # The order of a table's codes is independent of the names, so bins reveal nothing of these. A
    # category in no training row has a code above all others and no bin; splits send it left, as
    # XGBoost's do. A category that first occurs in a table to predict is missing.
    @classmethod
    def of(cls, party: Aligned, max_bin: int) -> Table:
        """Give a party's training categories the lowest codes, and cut all columns."""
        joint, counts = trained_first(party.categories, party.values[: party.n_train])
        if joint != party.categories:
            party.values = recoded(party.values, party.categories, joint, copied=copied)[0]
            party.categories = joint
        train = np.asarray(party.values[: party.n_train])
        # Unweighted: only the active party knows the weights.
        cuts = quantile_cuts(train, None, max_bin, counts) if train.shape[1] else NO_CUTS
        cuts = replace(with_categories(cuts, counts, counts), categories=counts)
        return cls(cuts, category_counts(joint, train.shape[1]), *digitise(train, cuts))

    def splits(
        self,
        columns: Ints,
        first_rights: Ints,  # lowest bin that goes right; 0 sends only missing values left
        defaults: Bytes,  # 1 where missing values go left
        sets: CategorySets,  # one per split by categories, in order
    ) -> Lookup:
        """Splits between bins as splits of values."""
        cuts = self.cuts
        # The active party knows the categories of training rows only; all others go left.
        is_categorical = cuts.by_category[columns]
        widths = np.where(is_categorical, self.n_categories[columns], 0)
        sets = sets.widened(widths[is_categorical])
        thresholds = np.array(
            [
                cuts.edges[cuts.offsets[column] + n_left - 1] if n_left else cuts.minima[column]
                for column, n_left in zip(columns, np.where(widths, 0, first_rights), strict=True)
            ],
            dtype=np.float32,
        )
        return Lookup(columns, thresholds, defaults, widths, sets.bits)


def check_setup(party: str, asked: SetupRequest) -> None:
    """Check settings that do not go together; raises a ProtocolError."""
    objective, has_one_tree = asked.objective, asked.multi_strategy == ONE_TREE
    is_vector, is_binary = objective == "multi:softprob", objective == "binary:logistic"
    is_id = not asked.init_model or MODEL_ID.fullmatch(asked.init_model) is not None
    per_output = f"must be one_output_per_tree with {objective}, which has one output"
    single = f"must be 1 with multi_strategy={ONE_TREE}"
    check_fields(
        *(party, SetupRequest),
        ("multi_strategy", not has_one_tree or is_vector, per_output),
        ("num_parallel_tree", not has_one_tree or asked.num_parallel_tree == 1, single),
        ("calibration", asked.calibration == "none" or is_binary, f"must be none with {objective}"),
        ("init_model", is_id, "must be 16 hex digits"),
    )


# With an initial model each party starts with its splits of it, the active one with its trees too.
# Rows traverse it as in interactive inference, and their leaf values are the initial margins.
# Record and round numbers continue.
def initial_part(party: Aligned, model: str) -> Part | None:
    """A party's part of the initial model, if there is one, checked to fit the run's table."""
    if not model:
        return None
    part = party.party_part(model)
    with as_protocol_error(party.name, "OpenRequest", "active"):
        part.check_active(party.active)
    if part.columns != party.columns:
        n_columns, n_expected = len(party.columns), len(part.columns)
        rule = f"columns of init-model must be the table's {n_columns}, in their order"
        raise DataError(f"{rule}, got {n_expected}, or others", party.name)
    if part.categories != party.categories:
        rule = "categories of init-model must be those of the training rows, in the order that "
        raise DataError(f"{rule}the run draws: it takes the same table and seed", party.name)
    return part


def column_bins(
    party: Aligned, table: Table, asked: SetupRequest, n_records: int, part: Bytes
) -> ColumnBins:
    """What the active party needs of a party's columns; ``part`` is the initial part's digest.

    Raises a DataError if the node config constrains a column that the table does not have.
    """
    config, columns = party.config, party.columns
    # In a simulation, whoever writes the run config has all tables.
    is_shared = config.shares_names or config.simulated
    column_ids = {name: column for column, name in enumerate(columns)} if is_shared else {}
    wanted = ConfiguredConstraints.of(party.name, asked)
    try:
        directions, groups = constraints_of(
            config.monotone_constraints, config.interaction_constraints, columns
        )
    except ValueError as error:
        rule = f"{BOTH} in the node config must name columns of the site's table"
        raise DataError(rule, here=f"{error} in the node config") from None
    return ColumnBins(
        widths=table.cuts.widths,
        categorical=table.cuts.by_category.astype(np.uint8),
        names=columns if config.shares_names else (),
        allows_export=config.allows_export,
        part=part,
        n_records=n_records,
        named=np.array([column_ids.get(name, -1) for name in wanted.names], dtype=np.int64),
        directions=directions,
        group_columns=np.array([c for group in groups for c in sorted(group)], dtype=np.int64),
        group_sizes=np.array([len(group) for group in groups], dtype=np.int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class ConfiguredConstraints:
    """Constraints of the run config, by column name."""

    directions: Mapping[str, int]  # as in ``parse_monotone``
    groups: tuple[tuple[str, ...], ...]  # as in ``parse_interactions``

    @classmethod
    def of(cls, party: str, asked: SetupRequest) -> ConfiguredConstraints:
        """Parse the settings that a party has got; raises a ProtocolError."""
        monotone, interactions = asked.monotone_constraints, asked.interaction_constraints
        fields = "monotone_constraints, interaction_constraints"
        with as_protocol_error(party, "SetupRequest", fields):
            return cls(parse_monotone(monotone), parse_interactions(interactions))

    @property
    def names(self) -> tuple[str, ...]:
        """All names, each once."""
        in_groups = (name for group in self.groups for name in group)
        return tuple(dict.fromkeys((*self.directions, *in_groups)))


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """Columns of all parties side by side, by what each has sent of its own.

    ::

        party    ------a------ ---b---        parties in the order of their names
        column   --0-- ---1--- ---2---
        edges    1 2 3 1 2 3 4 1 2 3          in place of a threshold: number of bins that go left
    """

    widths: Mapping[str, Ints]  # by party: number of bins of each column
    categorical: Mapping[str, npt.NDArray[np.bool_]]  # by party; a bin is a category
    names: Mapping[str, tuple[str, ...]]  # by party; empty where it does not share them
    n_records: Mapping[str, int]  # by party; its splits before the first round
    exports: bool  # whether all parties allow the export of the model
    monotone: npt.NDArray[np.int8]  # (n_columns,), or empty
    interactions: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, letters: Mapping[str, ColumnBins], wanted: ConfiguredConstraints) -> Joint:
        """From checked letters of all parties, in the run's order; raises a ConfigError."""
        return cls(
            {party: letter.widths for party, letter in letters.items()},
            {party: _by_category(letter) for party, letter in letters.items()},
            {party: letter.names for party, letter in letters.items()},
            {party: letter.n_records for party, letter in letters.items()},
            all(letter.allows_export for letter in letters.values()),
            *joint_constraints(wanted, letters),
        )

    def check(self, objective: str, has_one_tree: bool) -> None:
        """Check that trees of a run can have these columns; raises a ConfigError."""
        if has_quantile_leaves(objective) and self.monotone.any():
            rule = f"must be empty in all node configs for {objective}"
            raise ConfigError(f"monotone-constraints {rule}: quantiles have no bounds")
        if has_one_tree and (self.monotone.any() or self.interactions):
            rule = f"must be empty in all node configs with multi-strategy={ONE_TREE}"
            raise ConfigError(f"{BOTH} {rule}, as in XGBoost")
        if has_one_tree and self.cuts.by_category.any():
            owners = [name for name, flags in self.categorical.items() if flags.any()]
            way = "drop-columns excludes them; one_output_per_tree splits them"
            rule = f"columns must be numbers with multi-strategy={ONE_TREE}, as in XGBoost, got "
            raise ConfigError(f"{rule}categories at {', '.join(owners)}: {way}")

    @property
    def cuts(self) -> Cuts:
        """Layout of the joint histogram; a threshold is the number of bins that go left."""
        flat = np.concatenate(list(self.widths.values()))
        edges, offsets = ragged([np.arange(1, width + 1, dtype=np.float32) for width in flat])
        is_category = np.concatenate([self.categorical[party] for party in self.widths])
        categories = np.where(is_category, flat, 0) if is_category.any() else flat[:0]
        return Cuts(edges, offsets, np.zeros(len(flat), dtype=np.float32), categories)

    @property
    def firsts(self) -> dict[str, int]:
        """Number of each party's first column."""
        counts = [len(widths) for widths in self.widths.values()]
        starts = np.cumsum([0, *counts[:-1]]).tolist()
        return dict(zip(self.widths, starts, strict=True))

    def owners(self, columns: npt.NDArray[Any]) -> tuple[Ints, Ints]:
        """Number of the party of each of some columns, and the column's number at that party."""
        firsts = np.array(list(self.firsts.values()))
        parties = np.searchsorted(firsts, columns, side="right") - 1
        return parties, columns - firsts[parties]

    def columns_of(self, party: str, columns: Ints) -> Ints:
        """Those of the columns that are the party's, as numbers at the party."""
        local = columns - self.firsts[party]
        return local[(local >= 0) & (local < len(self.widths[party]))]

    def bins(self, party: str, columns: Sequence[int] | Ints) -> Ints:
        """Places in the joint histogram of the bins of some of a party's columns."""
        offsets, first = self.cuts.offsets, self.firsts[party]
        bins = [np.arange(offsets[first + c], offsets[first + c + 1]) for c in columns]
        return np.concatenate([*bins, np.empty(0, dtype=np.int64)]).astype(np.int64)

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of all columns, with numbers where a party does not share its names."""
        widths = self.widths.items()
        return joint_names(
            {party: self.names[party] or numbered(party, len(each)) for party, each in widths}
        )


def check_bins(
    party: str,
    letter: ColumnBins,
    wanted: ConfiguredConstraints,
    max_bin: int,
    most_columns: int,
    receiver: str,
) -> None:
    """Check what another party has sent of its columns; raises a ProtocolError."""
    widths, members, flags = letter.widths, letter.group_columns, letter.categorical
    n_columns, n_bins, most_bins = len(widths), int(widths.sum()), BINS_A_COLUMN * most_columns
    n_names, named = len(wanted.names), letter.named[letter.named >= 0]
    fits = n_columns <= most_columns and bool((widths[~_by_category(letter)] <= max_bin).all())
    limit = f"must be <= {max_bin} (max-bin), of {most_columns} columns at most (most-columns)"
    total = f"must add up to <= {most_bins} ({BINS_A_COLUMN} x most-columns of {receiver}), "
    total += f"got {n_bins}; lower max-bin"
    is_named = len(letter.named) == n_names and bool((named < n_columns).all())
    is_named = is_named and len(np.unique(named)) == len(named)
    names, n_directions, in_groups = letter.names, len(letter.directions), letter.group_sizes.sum()
    one_each = f"must be one a column of {n_columns}, or none"
    divides = f"must divide {len(members)} columns among the groups"
    check_fields(
        *(party, letter),
        ("names", len(names) in (0, n_columns), f"must be {n_columns} or none, got {len(names)}"),
        ("widths", fits, limit),
        ("widths", n_bins <= most_bins, total),
        ("categorical", len(flags) == n_columns, f"must be {n_columns}, got {len(flags)}"),
        ("named", is_named, f"must be {n_names} columns below {n_columns}, each once"),
        ("directions", n_directions in (0, n_columns), one_each),
        ("group_columns", (members < n_columns).all(), f"must be < {n_columns}"),
        ("group_sizes", int(in_groups) == len(members), divides),
    )


def joint_constraints(
    wanted: ConfiguredConstraints, letters: Mapping[str, ColumnBins]
) -> tuple[npt.NDArray[np.int8], tuple[tuple[int, ...], ...]]:
    """Constraints of the joint columns, in the parties' order: directions, or none; groups."""
    counts = [len(letter.widths) for letter in letters.values()]
    firsts = dict(zip(letters, np.cumsum([0, *counts[:-1]]).tolist(), strict=True))
    joint_ids = dict[str, int]()  # by the names in the run config
    for number, name in enumerate(wanted.names):
        columns = {party: int(letter.named[number]) for party, letter in letters.items()}
        owners = [party for party, column in columns.items() if column >= 0]
        if len(owners) != 1:
            got = ", ".join(owners) if owners else "no party that shares its names"
            rule = f"{BOTH} must name columns of one party that shares its names "
            rule += f"(share-column-names), got {name} of {got}; an owner that does not can "
            raise ConfigError(f"{rule}constrain its columns in its node config")
        joint_ids[name] = firsts[owners[0]] + columns[owners[0]]
    directions, groups = np.zeros(sum(counts), dtype=np.int8), list[tuple[int, ...]]()
    for party, letter in letters.items():
        first = firsts[party]
        directions[first : first + len(letter.directions)] = letter.directions
        members = np.split(first + letter.group_columns, np.cumsum(letter.group_sizes)[:-1])
        groups += [tuple(sorted({*group.tolist()})) for group in members if len(group)]
    for name, direction in wanted.directions.items():
        if directions[joint_ids[name]] not in (0, direction):
            rule = "must match the node config of its owner"
            raise ConfigError(f"monotone-constraints of {name} {rule}, got {direction}")
        directions[joint_ids[name]] = direction
    groups += [tuple(sorted({joint_ids[name] for name in group})) for group in wanted.groups]
    set_directions = directions if directions.any() else directions[:0]
    has_categories = any(_by_category(letter).any() for letter in letters.values())
    try:
        check_without_categories(set_directions, has_categories)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return set_directions, tuple(groups)


def _by_category(letter: ColumnBins) -> npt.NDArray[np.bool_]:
    """Which columns are categorical, whatever the number of flags."""
    return np.resize(letter.categorical.astype(bool), len(letter.widths))
