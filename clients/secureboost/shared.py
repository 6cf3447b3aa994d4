"""SecureBoost at any party: bins of its columns, its splits, and how it describes both to others.

After the last level, only the active party receives which rows go left.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from clients.secureboost.joint import BOTH, ConfiguredConstraints
from clients.vertical.growing import Growing, SplitList
from clients.vertical.party import Bytes, Ints
from fedapp.errors import DataError, ProtocolError, as_protocol_error
from fedapp.histograms.bins import Codes, Cuts, with_categories, without_categories
from fedapp.histograms.sketch import quantile_cuts
from fedapp.messages.secureboost import ColumnBins, Records, SetupRequest
from fedapp.messages.vertical import Partition
from fedapp.site.answer import MODEL_ID
from fedapp.site.roles import role
from fedapp.trees.categories import recoded, trained_first
from fedapp.trees.constraints import constraints_of
from fedapp.trees.divided import NO_NESTING, Lookup, Nesting
from fedapp.trees.sets import CategorySets, category_counts
from fedapp.trees.size import ONE_TREE

NO_CUTS = Cuts(np.empty(0, np.float32), np.zeros(1, np.int64), np.empty(0, np.float32))


@role
class Party(Growing):
    """State of any party while trees grow."""

    settings: SetupRequest
    cuts: Cuts  # of the training rows, with their categories
    n_categories: Ints  # (n_columns,): all categories, also those of held-back rows
    codes: Codes  # (n_train, n_columns)
    nesting: Nesting  # where the local splits are in the trees, at a passive party

    @property
    def has_one_tree(self) -> bool:
        """Whether a round has one tree for all classes."""
        return self.settings.multi_strategy == ONE_TREE

    @property
    def n_parallel(self) -> int:
        """Trees a round of each output."""
        return self.settings.num_parallel_tree

    def accept(self, settings: SetupRequest) -> None:
        """Check and store the settings."""
        self.settings = settings
        if self.has_one_tree and settings.objective != "multi:softprob":
            rule = f"must be one_output_per_tree with {settings.objective}, which has one output"
            raise ProtocolError(self.name, "SetupRequest", "multi_strategy", rule)
        if self.has_one_tree and self.n_parallel > 1:
            rule = f"must be 1 with multi_strategy={ONE_TREE}"
            raise ProtocolError(self.name, "SetupRequest", "num_parallel_tree", rule)
        if settings.calibration != "none" and settings.objective != "binary:logistic":
            rule = f"must be none with {settings.objective}"
            raise ProtocolError(self.name, "SetupRequest", "calibration", rule)
        if settings.init_model and not MODEL_ID.fullmatch(settings.init_model):
            raise ProtocolError(self.name, "SetupRequest", "init_model", "must be 16 hex digits")

    # The order of a table's codes is independent of the names, so bins reveal nothing of these. A
    # category in no training row has a code above all others and no bin; splits send it left, as
    # XGBoost's do. A category that first occurs in a table to predict is missing.
    def cut_columns(self) -> npt.NDArray[np.float32]:
        """Give training categories the lowest codes, cut all columns; returns the training rows."""
        joint, counts = trained_first(self.categories, self.values[: self.n_train])
        if joint != self.categories:
            self.values = recoded(self.values, self.categories, joint)[0]
            self.categories = joint
        train = np.asarray(self.values[: self.n_train])
        self.n_categories = category_counts(joint, train.shape[1])
        # Unweighted: only the active party knows the weights.
        values, max_bin = without_categories(train, counts), self.settings.max_bin
        cuts = quantile_cuts(values, None, max_bin) if train.shape[1] else NO_CUTS
        self.cuts = replace(with_categories(cuts, counts, counts), categories=counts)
        return train

    # With an initial model each party starts with its splits of it, the active one with its trees
    # too. Rows traverse it as in interactive inference, and their leaf values are the initial
    # margins. Record and round numbers continue.
    def begin_lookup(self) -> Bytes:
        """Start with the party's splits of the initial model, if any; returns their digest."""
        self.lookup, self.nesting = Lookup.empty(), NO_NESTING
        model = self.settings.init_model
        if not model:
            return np.empty(0, dtype=np.uint8)
        part = self.party_part(model)
        with as_protocol_error(self.name, "OpenRequest", "active"):
            part.check_active(self.active)
        if part.columns != self.columns:
            n_columns, n_expected = len(self.columns), len(part.columns)
            rule = f"columns of init-model must be the table's {n_columns}, in their order"
            raise DataError(f"{rule}, got {n_expected}, or others", self.name)
        if part.categories != self.categories:
            rule = "categories of init-model must be those of the training rows, in the order that "
            raise DataError(f"{rule}the run draws: it takes the same table and seed", self.name)
        self.lookup, self.nesting = part.lookup, part.nesting
        return self.part_digest(model)

    def make_splits(
        self,
        level: SplitList,
        columns: Ints,
        first_rights: Ints,  # lowest bin that goes right; 0 sends only missing values left
        defaults: Bytes,  # 1 where missing values go left
        sets: CategorySets,  # one per split by categories, in order
    ) -> Partition:
        """Make a level's splits of local columns; which rows they send left, for the others."""
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
        return self.make(level, Lookup(columns, thresholds, defaults, widths, sets.bits))

    def column_bins(self, part: Bytes) -> ColumnBins:
        """What the active party needs of the columns; ``part`` is what ``begin_lookup`` returns.

        Raises a DataError if the node config constrains a column that the table does not have.
        """
        config, columns = self.config, self.columns
        # In a simulation, whoever writes the run config has all tables.
        is_shared = config.shares_names or config.simulated
        column_ids = {name: column for column, name in enumerate(columns)} if is_shared else {}
        named = [column_ids.get(name, -1) for name in self.wanted_constraints().names]
        try:
            directions, groups = constraints_of(
                config.monotone_constraints, config.interaction_constraints, columns
            )
        except ValueError as error:
            rule = f"{BOTH} in the node config must name columns of the site's table"
            raise DataError(rule, here=f"{error} in the node config") from None
        members = [column for group in groups for column in sorted(group)]
        return ColumnBins(
            widths=self.cuts.widths,
            categorical=self.cuts.by_category.astype(np.uint8),
            names=columns if config.shares_names else (),
            allows_export=config.allows_export,
            part=part,
            n_records=self.lookup.n_records,
            named=np.array(named, dtype=np.int64),
            directions=directions,
            group_columns=np.array(members, dtype=np.int64),
            group_sizes=np.array([len(group) for group in groups], dtype=np.int64),
        )

    def table_records(self) -> Records:
        """The local splits and columns, for the export of the model."""
        return Records(**self.split_table())

    def wanted_constraints(self) -> ConfiguredConstraints:
        """Constraints of the run config; raises a ProtocolError."""
        monotone = self.settings.monotone_constraints
        interactions = self.settings.interaction_constraints
        with as_protocol_error(
            self.name, "SetupRequest", "monotone_constraints, interaction_constraints"
        ):
            return ConfiguredConstraints.of(monotone, interactions)
