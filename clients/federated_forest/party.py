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

from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from clients.vertical.growing import SplitList, Trees, split_table, store_part
from clients.vertical.party import Aligned
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
from fedapp.messages.vertical import LevelSplits, OrderRequest, SentReply
from fedapp.site.mail import Letters, Mail
from fedapp.site.roles import Order, role
from fedapp.trees.divided import ForestPart, Lookup, PartTree
from fedapp.trees.forest.cart import (
    Bins,
    Candidates,
    Codes,
    Criterion,
    Ints,
    Rules,
    bin_columns,
    code_columns,
)
from fedapp.trees.forest.levels import Rows, row_counts, search_rows
from fedapp.trees.predict import Places
from fedapp.trees.sets import category_counts, sets_of_rows

Doubles = npt.NDArray[np.float64]


@role
class Forest(Aligned):
    """State of any party while a forest grows."""

    form: ClassVar[str] = ENCODED  # in which labels are sent
    settings: SetupRequest
    bins: Bins  # of the training rows
    codes: Codes  # (n_train, n_columns)
    counts: npt.NDArray[np.uint8]  # (n_trees, n_train): how often each tree draws each row
    # Labels of the training rows as codes; not at a passive party if they are encrypted
    n_classes: int  # 0 for numbers
    targets: Doubles  # (n_train,)
    row_weights: Doubles  # (n_train,)
    tree_weights: Doubles  # (n_trees,): of the rows that each draws
    least_decrease: float  # of impurity, in the unit of the codes
    trees: Trees
    gains: Doubles  # (n_columns,): of the local splits
    candidates: Candidates  # the best local split of each open node, until the winners are known

    @classmethod
    def fits(cls, request: Request) -> bool:
        """Whether labels are sent in the form of this role."""
        assert isinstance(request, SetupRequest)
        return cls.form == (PAILLIER if request.labels == PAILLIER else ENCODED)

    def begin(self, settings: SetupRequest) -> None:
        """Bin the columns of the training rows, draw each tree's rows, put all at the roots."""
        if settings.master_keeps_model and not self.config.allows_export:
            rule = "must be true with federated-forest.master-keeps-model"
            raise ConfigError(f"allow-export {rule}, got false")
        values = np.asarray(self.values[: self.n_train])
        if len(settings.column_seeds) != values.shape[1]:
            rule = f"must be one a column of {values.shape[1]}, got {len(settings.column_seeds)}"
            raise ProtocolError(self.name, "SetupRequest", "column_seeds", rule)
        self.settings = settings
        widths = category_counts(self.categories, values.shape[1])
        self.bins = bin_columns(values, settings.max_bin, widths)
        self.codes = code_columns(values, self.bins)
        self.counts = row_counts(
            settings.bootstrap, settings.rows_seed, settings.trees, self.n_train
        )
        # All parties draw the same rows. A tree must neither draw nor leave out too few.
        drawn, min_rows = np.count_nonzero(self.counts, axis=1), self.config.min_rows
        fewest = min(drawn.min(), self.n_train - drawn.max())
        if settings.bootstrap and fewest < min_rows:
            rule = f"must be false where a tree draws or leaves out fewer than {min_rows} training "
            rule += f"rows (min-rows of {self.name}), got true and {fewest}"
            raise ConfigError(f"federated-forest.bootstrap {rule}")
        self.trees = Trees.of(self, settings.trees)
        self.gains = np.zeros(values.shape[1])

    def take_labels(self, labels: Labels) -> None:
        """Store label codes, weights, and the weight of each tree."""
        ones = np.ones(self.n_train, dtype=np.float32)
        self.n_classes, self.targets = labels.n_classes, labels.codes
        self.row_weights = (labels.weights if len(labels.weights) else ones).astype(np.float64)
        self.tree_weights = np.array([of_tree @ self.row_weights for of_tree in self.counts])
        self.least_decrease = labels.least_decrease

    def level_scores(self, request: LevelSplits) -> dict[str, Any]:
        """Scores of the forest so far, as fields of a reply; none at a passive party."""
        return {"score_names": (), "train_scores": np.zeros(0), "valid_scores": np.zeros(0)}

    def _take_letters(self, mail: Mail) -> None:
        """Take what came with the first request after the setup."""

    def search_level(self, request: LevelRequest, mail: Mail) -> LevelReply:
        """Apply the last level's splits, and report the best split of each open node."""
        if self.follows(SetupRequest):
            self._take_letters(mail)
        if len(request.trees):
            self.trees = self.trees.received(mail)
            self.take_splits(request)
        candidates = self.search(request)
        return LevelReply(
            improvements=candidates.improvements,
            ranks=candidates.ranks,
            **self.level_scores(request),
        )

    def take_splits(self, level: SplitList) -> None:
        """Move all rows to the children of a level's splits."""
        self.trees = self.trees.split(level)

    def search(self, nodes: OpenNodes) -> Candidates:
        """Algorithm 1: the best local split of every open node."""
        trees_and_nodes = self.open_to(nodes)
        rows = Rows(self.codes, self.bins, self.targets, self.row_weights, self.counts)
        self.candidates = search_rows(
            rows,
            self.trees.nodes[:, : self.n_train],
            trees_and_nodes,
            self.settings.column_seeds,
            nodes.n_drawn,
            self.rules,
            self.settings.max_features_per,
        )
        return self.candidates

    @property
    def rules(self) -> Rules:
        """When nodes are split."""
        return Rules(
            cast(Criterion, self.settings.criterion),
            self.n_classes,
            self.settings.min_samples_split,
            self.settings.min_samples_leaf,
            self.least_decrease,
        )

    def open_to(self, nodes: OpenNodes) -> tuple[Places, Places]:
        """Trees and nodes that may be split next; checks ``n_drawn`` of the request."""
        trees, open_nodes = self.trees.structure.open_nodes
        n_columns = len(self.settings.column_seeds)
        if len(nodes.n_drawn) != len(trees) or (nodes.n_drawn > n_columns).any():
            rule = f"must be of {len(trees)} open nodes, at most {n_columns} each"
            raise ProtocolError(self.name, type(nodes).__name__, "n_drawn", rule)
        return trees, open_nodes

    def make_local_splits(self, level: SplitList) -> Letters:
        """Make the best local splits of the nodes that this party has won."""
        offered, local = self.candidates, self.trees.local(level)
        positions = self.trees.check(level)[local]
        best = Candidates(*(getattr(offered, name)[positions] for name in offered.__slots__))
        if (best.columns < 0).any():
            rule = "must be splits that this party has offered"
            raise ProtocolError(self.name, type(level).__name__, "owners", rule)
        gains = np.array(self.gains)
        np.add.at(gains, best.columns, self.worth_of(level.trees[local], best.improvements))
        self.gains = gains
        _, sets = sets_of_rows(best.widths, best.rights)
        lookup = Lookup(best.columns, best.thresholds, best.defaults, best.widths, sets.bits)
        self.trees = self.trees.made(level, lookup, self.values)
        return self.to_others(self.trees.partition)

    def worth_of(self, trees: Places, improvements: Doubles) -> Doubles:
        """What splits add to the importance of their columns, given the rows' weights."""
        worth: Doubles = improvements / self.tree_weights[trees] / len(self.counts)
        return worth

    def local_importance(self) -> tuple[Doubles, Ints, tuple[str, ...]]:
        """Gain and number of splits of each local column, and their names if shared."""
        counts = np.bincount(self.trees.lookup.columns, minlength=len(self.gains)).astype(np.int64)
        names = self.columns if self.config.shares_names else ()
        return np.maximum(self.gains, 0.0), counts, names


@role
class Passive(Forest):
    """State of a passive party."""

    def setup(self, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Check the other passive parties' digests of the rows' order, and set up training."""
        self.check_order(mail)
        self.begin(request)
        return SentReply(), []

    def _won(self, level: SplitList, mail: Mail) -> Letters:
        """Make the local splits that won; the sides for all others."""
        return self.make_local_splits(level)

    def partition(self, request: PartitionRequest, mail: Mail) -> tuple[PartitionReply, Letters]:
        """Make the local splits of a level, send their sides; after the last store the part."""
        self.trees = self.trees.received(mail)
        letters = self._won(request, mail)
        if request.last:
            return self._hand_over(request)
        return PartitionReply(**split_table(self, self.trees.lookup, shared=False)), letters

    # A party keeps the structure of the trees and the lookup table of its splits: record id ->
    # column, threshold, default side. Record ids count a party's splits in the order in which they
    # were made, so every party knows them.
    def _hand_over(self, request: PartitionRequest) -> tuple[PartitionReply, Letters]:
        """Store the party's part of the model, and drop the rows."""
        letter, lookup = self.trees.partition, self.trees.lookup
        trees = tuple(PartTree(*tree) for tree in self.trees.records(last=request))
        digest = store_part(self, ForestPart, lookup, trees=trees)
        notice = PartKept(digest, *self.local_importance())
        self.end()
        reply = PartitionReply(**split_table(self, lookup, self.settings.master_keeps_model))
        return reply, [(self.active, letter), (self.active, notice)]


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

    def _take_letters(self, mail: Mail) -> None:
        letter, n_train = mail.one(Labels, self.active), self.n_train
        fits = len(letter.codes) == n_train and len(letter.weights) in (0, n_train)
        if letter.n_classes:
            fits = fits and bool(np.isin(letter.codes, np.arange(letter.n_classes)).all())
        if not fits:
            rule = f"must be of {n_train} rows, class ids below {letter.n_classes} where there are "
            raise ProtocolError(self.active, "Labels", "codes", f"{rule}classes")
        self.take_labels(letter)
