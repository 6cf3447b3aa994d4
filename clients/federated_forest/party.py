"""Federated Forest at any party: a level's splits, where they send the rows; at passive ones, sums.

Source: Liu et al. 2019, Algorithms 1 and 5. The owner of a winning column makes the split and sends
the others the rows that go left; then every party knows where each row is. With encoded labels a
party finds its best splits. With encrypted ones, "encrypted label y" is taken literally: a passive
party sums ciphertexts that it cannot read for every bin of its columns, and the active party, who
can decrypt, chooses. A level, message by message::

    encoded   LevelRequest      all parties       -> the best split of each open node
              PartitionRequest  owners of the best -> the rows that they send left
    paillier  SumRequest        passive parties   -> encrypted sums of the open nodes
              SplitRequest      the active party  -> the splits of all
              PartitionRequest  owners of splits  -> the rows that they send left
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt

from clients.vertical.growing import SplitList, Trees, split_table, store_part
from clients.vertical.party import Aligned, Floats
from fedapp.errors import ConfigError, ProtocolError
from fedapp.messages.federated_forest import (
    ENCODED,
    PAILLIER,
    Labels,
    LevelReply,
    LevelRequest,
    OpenNodes,
    PartitionReply,
    PartitionRequest,
    PartKept,
    SetupRequest,
)
from fedapp.messages.fields import Request
from fedapp.messages.vertical import OrderRequest, SentReply
from fedapp.site.mail import Letters, Mail
from fedapp.site.roles import Order, role
from fedapp.trees.categories import category_counts, sets_of_rows
from fedapp.trees.divided import ForestPart, Lookup, PartTree
from fedapp.trees.forest.bagged import Rows, row_counts, search_rows
from fedapp.trees.forest.cart import (
    Bins,
    Candidates,
    Codes,
    Criterion,
    Ints,
    RowFields,
    Rules,
    bin_columns,
    code_columns,
)
from fedapp.trees.predict import Places

Doubles = npt.NDArray[np.float64]
NO_DOUBLES: Doubles = np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """Labels of the training rows as codes; none at a passive party if they are encrypted."""

    n_classes: int  # 0 for numbers
    targets: Doubles  # (n_train,)
    weights: Doubles  # (n_train,)
    tree_weights: Doubles  # (n_trees,): of the rows that each draws
    least_decrease: float  # of impurity, in the unit of the codes

    @property
    def fields(self) -> RowFields:
        """What each row adds to sums."""
        return RowFields.of(self.targets, self.weights, self.n_classes)


UNCODED = Coded(0, NO_DOUBLES, NO_DOUBLES, NO_DOUBLES, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """A forest while it grows, as any party knows it."""

    settings: SetupRequest
    bins: Bins  # of the training rows
    codes: Codes  # (n_train, n_columns)
    counts: npt.NDArray[np.uint8]  # (n_trees, n_train): how often each tree draws each row
    trees: Trees
    gains: Doubles  # (n_columns,): of the local splits
    labels: Coded = UNCODED
    # The best local split of each open node, until the winners are known
    candidates: Candidates | None = None

    @classmethod
    def of(cls, party: Aligned, settings: SetupRequest) -> Forest:
        """Bin the columns of the training rows, draw each tree's rows, put all at the roots."""
        if settings.master_keeps_model and not party.config.allows_export:
            rule = "must be true with federated-forest.master-keeps-model"
            raise ConfigError(f"allow-export {rule}, got false")
        values = np.asarray(party.values[: party.n_train])
        n_rows, n_columns = values.shape
        if len(settings.column_seeds) != n_columns:
            rule = f"must be one a column of {n_columns}, got {len(settings.column_seeds)}"
            raise ProtocolError(party.name, "SetupRequest", "column_seeds", rule)
        bins = bin_columns(values, settings.max_bin, category_counts(party.categories, n_columns))
        counts = row_counts(settings.bootstrap, settings.rows_seed, settings.trees, n_rows)
        # All parties draw the same rows. A tree must neither draw nor leave out too few.
        drawn, min_rows = np.count_nonzero(counts, axis=1), party.config.min_rows
        fewest = min(drawn.min(), n_rows - drawn.max())
        if settings.bootstrap and fewest < min_rows:
            rule = f"must be false where a tree draws or leaves out fewer than {min_rows} training "
            rule += f"rows (min-rows of {party.name}), got true and {fewest}"
            raise ConfigError(f"federated-forest.bootstrap {rule}")
        trees, codes = Trees.of(party, settings.trees), code_columns(values, bins)
        return cls(settings, bins, codes, counts, trees, np.zeros(n_columns))

    def labelled(self, labels: Labels) -> Forest:
        """With label codes, weights, and the weight of each tree."""
        weights = np.ones(self.counts.shape[1])
        if len(labels.weights):
            weights = labels.weights.astype(np.float64)
        tree_weights = np.array([of_tree @ weights for of_tree in self.counts])
        codes = labels.n_classes, labels.codes, weights, tree_weights, labels.least_decrease
        return replace(self, labels=Coded(*codes))

    @property
    def nodes(self) -> Places:
        """Where the training rows are; (n_trees, n_train)."""
        return self.trees.nodes[:, : self.counts.shape[1]]

    @property
    def rules(self) -> Rules:
        """When nodes are split."""
        return Rules(
            cast(Criterion, self.settings.criterion),
            self.labels.n_classes,
            self.settings.min_samples_split,
            self.settings.min_samples_leaf,
            self.labels.least_decrease,
        )

    def open_to(self, nodes: OpenNodes) -> tuple[Places, Places]:
        """Trees and nodes that may be split next; checks ``n_drawn`` of the request."""
        trees, open_nodes = self.trees.structure.open_nodes
        n_columns = len(self.settings.column_seeds)
        if len(nodes.n_drawn) != len(trees) or (nodes.n_drawn > n_columns).any():
            rule = f"must be of {len(trees)} open nodes, at most {n_columns} each"
            raise ProtocolError(self.trees.party, type(nodes).__name__, "n_drawn", rule)
        return trees, open_nodes

    def searched(self, nodes: OpenNodes) -> tuple[Forest, Candidates]:
        """Algorithm 1: the best local split of every open node."""
        open_nodes, labels, asked = self.open_to(nodes), self.labels, self.settings
        candidates = search_rows(
            Rows(self.codes, self.bins, labels.targets, labels.weights, self.counts),
            self.nodes,
            open_nodes,
            asked.column_seeds,
            nodes.n_drawn,
            self.rules,
            asked.max_features_per,
        )
        return replace(self, candidates=candidates), candidates

    def made(self, level: SplitList, values: Floats) -> Forest:
        """With the best local splits of the nodes that this party has won."""
        offered, local = self.candidates, self.trees.local(level)
        assert offered is not None
        positions = self.trees.check(level)[local]
        best = Candidates(*(getattr(offered, name)[positions] for name in offered.__slots__))
        if (best.columns < 0).any():
            rule = "must be splits that this party has offered"
            raise ProtocolError(self.trees.party, type(level).__name__, "owners", rule)
        gains = np.array(self.gains)
        np.add.at(gains, best.columns, self.worth_of(level.trees[local], best.improvements))
        _, sets = sets_of_rows(best.widths, best.rights)
        lookup = Lookup(best.columns, best.thresholds, best.defaults, best.widths, sets.bits)
        return replace(self, gains=gains, trees=self.trees.made(level, lookup, values))

    def worth_of(self, trees: Places, improvements: Doubles) -> Doubles:
        """What splits add to the importance of their columns, given the rows' weights."""
        worth: Doubles = improvements / self.labels.tree_weights[trees] / len(self.counts)
        return worth

    def importance(self, party: Aligned) -> tuple[Doubles, Ints, tuple[str, ...]]:
        """Gain and number of splits of each local column, and their names if shared."""
        counts = np.bincount(self.trees.lookup.columns, minlength=len(self.gains)).astype(np.int64)
        names = party.columns if party.config.shares_names else ()
        return np.maximum(self.gains, 0.0), counts, names


@role
class Party(Aligned):
    """State of any party while a forest grows."""

    form: ClassVar[str] = ENCODED  # in which labels are sent
    forest: Forest

    @classmethod
    def fits(cls, request: Request) -> bool:
        """Whether labels are sent in the form of this role."""
        assert isinstance(request, SetupRequest)
        return cls.form == (PAILLIER if request.labels == PAILLIER else ENCODED)

    def receive(self, mail: Mail) -> None:
        """Store which rows others' splits of the level send left."""
        self.forest = replace(self.forest, trees=self.forest.trees.received(mail))

    def move(self, level: SplitList) -> None:
        """Move all rows to the children of a level's splits."""
        self.forest = replace(self.forest, trees=self.forest.trees.split(level))


@role
class Passive(Party):
    """State of a passive party."""

    def setup(self, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Check the other passive parties' digests of the rows' order, and set up training."""
        self.check_order(mail)
        self.forest = Forest.of(self, request)
        return SentReply(), []

    def _won(self, level: SplitList, mail: Mail) -> Letters:
        """Make the local splits that won; the sides for all others."""
        self.forest = self.forest.made(level, self.values)
        return self.to_others(self.forest.trees.partition)

    # A party keeps the structure of the trees and the lookup table of its splits: record id ->
    # column, threshold, default side. Record ids count a party's splits in the order in which they
    # were made, so every party knows them.
    def partition(self, request: PartitionRequest, mail: Mail) -> tuple[PartitionReply, Letters]:
        """Make the local splits of a level, send their sides; after the last store the part."""
        self.receive(mail)
        letters, trees = self._won(request, mail), self.forest.trees
        if not request.last:
            return PartitionReply(**split_table(self, trees.lookup, shared=False)), letters
        of_nodes = tuple(PartTree(*tree) for tree in trees.records(last=request))
        digest = store_part(self, ForestPart, trees.lookup, trees=of_nodes)
        notice = PartKept(digest, *self.forest.importance(self))
        reply = split_table(self, trees.lookup, self.forest.settings.master_keeps_model)
        self.end()
        return PartitionReply(**reply), [(self.active, trees.partition), (self.active, notice)]


@role
class EncodedPassive(Passive):
    """State of a passive party that knows codes of the labels."""

    title = "a passive party with encoded labels"
    order = Order(
        {
            OrderRequest: {SetupRequest},
            SetupRequest: {LevelRequest},
            LevelRequest: {LevelRequest, PartitionRequest},
            PartitionRequest: {LevelRequest},
        }
    )

    def search_level(self, request: LevelRequest, mail: Mail) -> LevelReply:
        """Apply the last level's splits, and report the best split of each open node."""
        if self.follows(SetupRequest):
            letter, n_train = mail.one(Labels, self.active), self.n_train
            fits = len(letter.codes) == n_train and len(letter.weights) in (0, n_train)
            if letter.n_classes:
                fits = fits and bool(np.isin(letter.codes, np.arange(letter.n_classes)).all())
            if not fits:
                rule = f"must be of {n_train} rows, class ids below {letter.n_classes} where there "
                raise ProtocolError(self.active, "Labels", "codes", f"{rule}are classes")
            self.forest = self.forest.labelled(letter)
        if len(request.trees):
            self.receive(mail)
            self.move(request)
        self.forest, best = self.forest.searched(request)
        return LevelReply(
            improvements=best.improvements,
            ranks=best.ranks,
            score_names=(),
            train_scores=NO_DOUBLES,
            valid_scores=NO_DOUBLES,
        )
