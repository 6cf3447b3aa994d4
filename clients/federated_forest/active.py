"""Federated Forest at the active party: coded or encrypted labels, choices, leaf values, scores.

Source: Liu et al. 2019, Algorithms 2 and 6; leaf labels stay here. With encrypted labels this party
decrypts the others' sums, and chooses the splits of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from clients.federated_forest.party import Doubles, Forest, Party
from clients.scoring import compare_with_local, interval_fields, score_arrays
from clients.vertical.growing import split_table, store_active_part
from clients.vertical.party import Aligned, Floats, Subsets
from fedapp import metrics
from fedapp.data.partition import SUBSETS, WATCHED
from fedapp.errors import ConfigError, DataError, ProtocolError, as_protocol_error
from fedapp.messages.federated_forest import (
    PAILLIER,
    FinishReply,
    FinishRequest,
    Labels,
    LevelReply,
    LevelRequest,
    PartitionReply,
    PartitionRequest,
    PartKept,
    SetupRequest,
)
from fedapp.messages.vertical import LevelSplits, MatchRequest, SentReply
from fedapp.site.mail import Letters, Mail
from fedapp.site.roles import Order, role
from fedapp.trees.divided import joint_names
from fedapp.trees.forest.bagged import BaggedForest, branches, leaf_values
from fedapp.trees.forest.cart import class_codes, number_codes
from fedapp.trees.losses import REGRESSION, Objective
from fedapp.trees.objective import check_objective, margins_of, n_outputs

SCORE_BINS = 2**12
Scored = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]  # margins, labels, weights
Worth = tuple[Doubles, npt.NDArray[np.int64], tuple[str, ...]]  # gains, splits, names of columns


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
            self._make_last(request)
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

    def _make_last(self, request: FinishRequest) -> None:
        self.forest = self.forest.made(request, self.values)

    def _worth(self, party: str, letter: PartKept) -> Worth:
        return letter.gains, letter.counts, letter.names


def importance(worth: Mapping[str, Worth], parties: Iterable[str]) -> Worth:
    """Total gain and splits of all columns, numbered unless all parties share names."""
    by_party = {party: worth[party] for party in parties}
    shared = all(len(names) == len(gains) for gains, _, names in by_party.values())
    names = joint_names(
        {
            party: names
            if shared
            else [f"{party} column {column + 1}" for column in range(len(gains))]
            for party, (gains, _, names) in by_party.items()
        }
    )
    gains, counts = (
        np.concatenate([of_party[part] for of_party in by_party.values()]) for part in (0, 1)
    )
    return gains, counts, names


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

    def search_level(self, request: LevelRequest, mail: Mail) -> LevelReply:
        """Apply the last level's splits, and report the best split of each open node."""
        if len(request.trees):
            self.receive(mail)
            self.move(request)
        self.forest, best = self.forest.searched(request)
        scores = self.level_scores(request)
        return LevelReply(improvements=best.improvements, ranks=best.ranks, **scores)

    def partition(self, request: PartitionRequest, mail: Mail) -> tuple[PartitionReply, Letters]:
        """Make the local splits of a level, send their sides."""
        self.receive(mail)
        self.forest = self.forest.made(request, self.values)
        if request.last:
            rule = "must be false at the active party"
            raise ProtocolError(self.name, "PartitionRequest", "last", rule)
        trees = self.forest.trees
        reply = PartitionReply(**split_table(self, trees.lookup, shared=False))
        return reply, self.to_others(trees.partition)
