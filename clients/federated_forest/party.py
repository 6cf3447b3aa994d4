"""Federated Forest at any party: a level's splits, where they send the rows, and what they predict.

Source: Liu et al. 2019, Algorithms 1, 2, 5 and 6; leaf labels stay at the active party. The owner
of a winning column makes the split and sends the others the rows that go left; then every party
knows where each row is. With encoded labels a party finds its best splits. With encrypted ones,
"encrypted label y" is taken literally: a passive party sums ciphertexts that it cannot read for
every bin of its columns, and the active party, who can decrypt, chooses. A level, by message::

    encoded   LevelRequest      all parties       -> the best split of each open node
              PartitionRequest  owners of the best -> the rows that they send left
    paillier  SumRequest        passive parties   -> encrypted sums of the open nodes
              SplitRequest      the active party  -> the splits of all
              PartitionRequest  owners of splits  -> the rows that they send left
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from clients.scoring import compare_with_local, interval_fields, score_arrays
from clients.vertical.growing import SplitList, Trees, split_table, store_active_part, store_part
from clients.vertical.party import Aligned, Subsets, numbered
from fedapp import metrics
from fedapp.arrays import Doubles, Floats, Ints
from fedapp.data.partition import SUBSETS, WATCHED
from fedapp.errors import ConfigError, DataError, as_protocol_error
from fedapp.messages.federated_forest import (
    ENCODED,
    PAILLIER,
    FinishReply,
    FinishRequest,
    Labels,
    LevelReply,
    LevelRequest,
    OpenNodes,
    PartitionReply,
    PartitionRequest,
    PartKept,
    SetupRequest,
)
from fedapp.messages.fields import Request, check_fields, check_sizes
from fedapp.messages.vertical import LevelSplits, MatchRequest, OrderRequest, SentReply
from fedapp.site.mail import Letters, Mail
from fedapp.site.policy import check_draws
from fedapp.site.roles import Order, role
from fedapp.trees.categories import category_counts, sets_of_rows
from fedapp.trees.divided import ForestPart, Lookup, PartTree, joint_names
from fedapp.trees.forest.bagged import (
    BaggedForest,
    Rows,
    branches,
    leaf_values,
    row_counts,
    search_rows,
)
from fedapp.trees.forest.cart import (
    Bins,
    Candidates,
    Codes,
    Criterion,
    RowFields,
    Rules,
    bin_columns,
    class_codes,
    code_columns,
    number_codes,
)
from fedapp.trees.losses import REGRESSION, Objective
from fedapp.trees.objective import check_objective, margins_of, n_outputs
from fedapp.trees.predict import Places

NO_DOUBLES: Doubles = np.zeros(0)
SCORE_BINS = 2**12
Scored = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]  # margins, labels, weights
Worth = tuple[Doubles, npt.NDArray[np.int64], tuple[str, ...]]  # gains, splits, names of columns


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
        check_sizes(party.name, settings, n_columns=n_columns)
        bins = bin_columns(values, settings.max_bin, category_counts(party.categories, n_columns))
        counts = row_counts(settings.bootstrap, settings.rows_seed, settings.trees, n_rows)
        if settings.bootstrap:  # all parties draw the same rows
            check_draws(party.config, "federated-forest", counts)
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
        fits = len(nodes.n_drawn) == len(trees) and (nodes.n_drawn <= n_columns).all()
        rule = f"must be of {len(trees)} open nodes, at most {n_columns} each"
        check_fields(self.trees.party, nodes, ("n_drawn", fits, rule))
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
        rule = "must be splits that this party has offered"
        check_fields(self.trees.party, level, ("owners", (best.columns >= 0).all(), rule))
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


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Labels of all rows, and what a forest predicts of them."""

    objective: Objective
    classes: tuple[str, ...]
    numbers: Floats  # (n_rows,): label of each row, a class id or number
    weights: Floats
    n_rows: Subsets
    unit: float  # of the codes: the numbers' distance for 1

    @classmethod
    def of(cls, party: Aligned, asked: SetupRequest, forest: Forest) -> tuple[Target, Labels]:
        """Code the labels; returns them as others may get them, too."""
        with as_protocol_error(party.name, "SetupRequest", "objective"):
            check_objective(asked.objective)
        classes, all_numbers = party.number_labels(asked.objective)
        numbers, weights = all_numbers[: party.n_train], party.weights[: party.n_train]
        if not ((forest.counts > 0) @ weights.astype(np.float64) > 0).all():
            raise DataError("weight must be > 0 in some training row of every tree")
        codes, unit = (class_codes(numbers), 1.0) if classes else number_codes(numbers)
        objective = cast(Objective, asked.objective)
        target = cls(objective, classes, all_numbers, party.weights, party.n_rows, unit)
        return target, Labels(
            int(codes.max()) + 1 if classes else 0,
            codes,
            weights if (weights != 1).any() else weights[:0],
            asked.min_impurity_decrease / unit**2,
        )

    def model(self, forest: Forest) -> BaggedForest:
        """The forest so far, without thresholds; a split's column is its owner's number."""
        n_classes = 0 if self.objective == REGRESSION else len(self.classes)
        structure = forest.trees.structure
        values = leaf_values(
            forest.nodes,
            forest.counts,
            forest.labels.weights,
            self.numbers[: self.n_rows.train],
            structure.n_nodes,
            n_classes,
            n_outputs(self.objective, n_classes),
        )
        trees, _ = branches(structure)
        return BaggedForest(self.objective, forest.trees.parties, self.classes, trees, values)

    def scored(
        self, model: BaggedForest, forest: Forest, subsets: Iterable[str]
    ) -> dict[str, Scored]:
        """Margins, labels and weights by subset."""
        scored = {}
        for subset in subsets:
            rows = self.n_rows.of(subset)
            margins = margins_of(model.objective, model.predictions(forest.trees.nodes[:, rows]))
            scored[subset] = margins, self.numbers[rows], self.weights[rows]
        return scored

    def scored_out_of_bag(self, model: BaggedForest, forest: Forest) -> Scored:
        """The same of the training rows, by the trees that have not drawn them."""
        unseen = forest.counts == 0
        oob = np.flatnonzero(unseen.any(axis=0))
        predictions = model.predictions(forest.nodes[:, oob], counted=unseen[:, oob])
        return margins_of(model.objective, predictions), self.numbers[oob], self.weights[oob]


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

    def _won(self, level: SplitList, mail: Mail) -> Letters:
        """Make the local splits that won; the sides for all others."""
        self.forest = self.forest.made(level, self.values)
        return self.to_others(self.forest.trees.partition)

    def level_scores(self, request: LevelSplits) -> dict[str, Any]:
        """Scores of the forest so far, as fields of a reply; none at a passive party."""
        return score_arrays({subset: {} for subset in WATCHED})

    def search_level(self, request: LevelRequest, mail: Mail) -> LevelReply:
        """Apply the last level's splits, and report the best split of each open node."""
        if len(request.trees):
            self.receive(mail)
            self.move(request)
        self.forest, best = self.forest.searched(request)
        scores = self.level_scores(request)
        return LevelReply(improvements=best.improvements, ranks=best.ranks, **scores)


@role
class Passive(Party):
    """State of a passive party."""

    def setup(self, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Check the other passive parties' digests of the rows' order, and set up training."""
        self.check_order(mail)
        self.forest = Forest.of(self, request)
        return SentReply(), []

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
            if n_classes := letter.n_classes:
                fits = fits and bool(np.isin(letter.codes, np.arange(n_classes)).all())
            rule = f"must be of {n_train} rows, class ids below {n_classes} where there are classes"
            check_fields(self.active, letter, ("codes", fits, rule))
            self.forest = self.forest.labelled(letter)
        return super().search_level(request, mail)


@role
class Active(Party):
    """State of the active party."""

    target: Target

    def setup(self, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Check the rows' order, bin the columns, send the others coded or encrypted labels."""
        self.check_order(mail)
        forest = Forest.of(self, request)
        if self.config.encrypts_labels and self.form != PAILLIER:
            rule = "must be paillier where a node config has encrypted-labels"
            raise ConfigError(f"federated-forest.labels {rule}, got {request.labels}")
        self.target, letter = Target.of(self, request, forest)
        self.labels, self.forest = None, forest.labelled(letter)
        return SentReply(), self._send(letter)

    def _send(self, letter: Labels) -> Letters:
        return self.to_others(letter)

    def level_scores(self, request: LevelSplits) -> dict[str, Any]:
        """Scores of the forest so far, as fields of a reply; none before its first level."""
        scores: dict[str, dict[str, float]] = {subset: {} for subset in WATCHED}
        if len(request.trees):
            model = self.target.model(self.forest)
            for subset, rows in self.target.scored(model, self.forest, WATCHED).items():
                if len(rows[1]):
                    statistics = metrics.statistics(model.objective, *rows, SCORE_BINS)
                    scores[subset] = metrics.scores(model.objective, statistics)
        return score_arrays(scores)

    def finish(self, request: FinishRequest, mail: Mail) -> tuple[FinishReply, Letters]:
        """Apply the last splits, score the forest, store the party's part of the model."""
        if len(request.trees):
            self.receive(mail)
            self._won(request, mail)
            self.move(request)
        target, forest, structure = self.target, self.forest, self.forest.trees.structure
        model = target.model(forest)
        letters = {name: mail.one(PartKept, name) for name in self.others}
        scored = target.scored(model, forest, SUBSETS)
        compare_with_local(self, target.numbers, model.objective, scored["test"][0])
        scored["oob"] = target.scored_out_of_bag(model, forest)
        scores = metrics.pooled_subsets(model.objective, scored)
        splits, lookup = structure.splits, forest.trees.lookup
        records = splits.spread(splits.records, structure.n_nodes, -1)
        n_columns = dict.fromkeys(self.peers, 1)  # only the owner of a split is known
        digests = {name: letter.digest for name, letter in letters.items()}
        store_active_part(self, lookup, model, records, n_columns, digests, scores)
        worth = {name: self._worth(name, letter) for name, letter in letters.items()}
        gains, counts, names = importance({**worth, self.name: forest.importance(self)}, self.peers)
        keeps_model = forest.settings.master_keeps_model
        values = np.concatenate(model.values) if keeps_model else np.zeros((0, model.n_outputs))
        self.end()
        reply = FinishReply(
            **score_arrays(scores),
            **interval_fields(model.objective, scored["test"]),
            column_names=names,
            column_gains=gains * target.unit**2,
            column_counts=counts,
            **split_table(self, lookup, keeps_model),
            classes=model.classes if keeps_model else (),
            leaf_values=values,
        )
        return reply, []

    def _worth(self, party: str, letter: PartKept) -> Worth:
        return letter.gains, letter.counts, letter.names


def importance(worth: Mapping[str, Worth], parties: Iterable[str]) -> Worth:
    """Total gain and splits of all columns, numbered unless all parties share names."""
    by_party = {party: worth[party] for party in parties}
    shared = all(len(names) == len(gains) for gains, _, names in by_party.values())
    names = joint_names(
        {
            party: names if shared else numbered(party, len(gains))
            for party, (gains, _, names) in by_party.items()
        }
    )
    all_gains, all_counts, _ = zip(*by_party.values(), strict=True)
    return np.concatenate(all_gains), np.concatenate(all_counts), names


@role
class EncodedActive(Active):
    """State of the active party where the others know codes of the labels."""

    title = "the active party with encoded labels"
    order = Order(
        {
            MatchRequest: {SetupRequest},
            SetupRequest: {LevelRequest},
            LevelRequest: {LevelRequest, PartitionRequest, FinishRequest},
            PartitionRequest: {LevelRequest},
        }
    )

    def partition(self, request: PartitionRequest, mail: Mail) -> tuple[PartitionReply, Letters]:
        """Make the local splits of a level, send their sides."""
        self.receive(mail)
        rule = "must be false at the active party"
        check_fields(self.name, request, ("last", not request.last, rule))
        letters = self._won(request, mail)
        return PartitionReply(**split_table(self, self.forest.trees.lookup, shared=False)), letters
