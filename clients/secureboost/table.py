"""A party's columns in SecureBoost: their bins, its splits of them, how it describes both.

After the last level, only the active party receives which rows go left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from clients.secureboost.joint import BOTH, ConfiguredConstraints
from clients.vertical.party import Aligned, Bytes, Ints
from fedapp.errors import DataError, as_protocol_error
from fedapp.histograms.bins import Codes, Cuts, digitise, with_categories, without_categories
from fedapp.histograms.sketch import quantile_cuts
from fedapp.messages.fields import check_fields
from fedapp.messages.secureboost import ColumnBins, SetupRequest
from fedapp.site.answer import MODEL_ID
from fedapp.trees.categories import CategorySets, category_counts, recoded, trained_first
from fedapp.trees.divided import Lookup, Part
from fedapp.trees.limits import ONE_TREE, constraints_of

NO_CUTS = Cuts(np.empty(0, np.float32), np.zeros(1, np.int64), np.empty(0, np.float32))


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
            party.values = recoded(party.values, party.categories, joint)[0]
            party.categories = joint
        train = np.asarray(party.values[: party.n_train])
        # Unweighted: only the active party knows the weights.
        numbers = without_categories(train, counts)
        cuts = quantile_cuts(numbers, None, max_bin) if train.shape[1] else NO_CUTS
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
