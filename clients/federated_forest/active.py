"""Federated Forest at the active party: coded or encrypted labels, choices, leaf values, scores.

Source: Liu et al. 2019, Algorithms 2 and 6; leaf labels stay here. With encrypted labels this party
decrypts the others' sums, and chooses the splits of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from clients.federated_forest.party import Doubles, Forest
from clients.scoring import compare_with_local, interval_fields, score_arrays
from fedapp import metrics
from fedapp.data.partition import SUBSETS, WATCHED
from fedapp.errors import ConfigError, DataError, ProtocolError, as_protocol_error
from fedapp.messages.federated_forest import (
    PAILLIER,
    FinishReply,
    FinishRequest,
    Labels,
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
from fedapp.trees.forest.label_codes import class_codes, number_codes
from fedapp.trees.losses import REGRESSION, Objective
from fedapp.trees.objective import check_objective, margins_of, n_outputs

SCORE_BINS = 2**12
Scored = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]  # margins, labels, weights


@role
class Active(Forest):
    """State of the active party."""

    objective: Objective
    numbers: npt.NDArray[np.float32]  # (n_rows,): label of each row, a class id or number
    classes: tuple[str, ...]
    unit: float  # of the codes: the numbers' distance for 1

    def setup(self, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Check the rows' order, bin the columns, send the others coded or encrypted labels."""
        self.check_order(mail)
        self.begin(request)
        if self.config.encrypts_labels and self.form != PAILLIER:
            rule = "must be paillier where a node config has encrypted-labels"
            raise ConfigError(f"federated-forest.labels {rule}, got {request.labels}")
        letter = self._code_labels(request)
        self.take_labels(letter)
        return SentReply(), self._send(letter)

    def _send(self, letter: Labels) -> Letters:
        return self.to_others(letter)

    def _code_labels(self, request: SetupRequest) -> Labels:
        with as_protocol_error(self.name, "SetupRequest", "objective"):
            check_objective(request.objective)
        self.objective = cast(Objective, request.objective)
        self.classes, self.numbers = self.number_labels(request.objective)
        weights, self.labels = self.weights[: self.n_train], None
        if not ((self.counts > 0) @ weights.astype(np.float64) > 0).all():
            raise DataError("weight must be > 0 in some training row of every tree")
        numbers, self.unit = self.numbers[: self.n_train], 1.0
        if self.classes:
            codes = class_codes(numbers)
        else:
            codes, self.unit = number_codes(numbers)
        return Labels(
            int(codes.max()) + 1 if self.classes else 0,
            codes,
            weights if (weights != 1).any() else weights[:0],
            request.min_impurity_decrease / self.unit**2,
        )

    def forest(self) -> BaggedForest:
        """The forest so far, without thresholds; a split's column is its owner's number."""
        n_classes = 0 if self.objective == REGRESSION else len(self.classes)
        values = leaf_values(
            self.nodes[:, : self.n_train],
            self.counts,
            self.row_weights,
            self.numbers[: self.n_train],
            self.structure.n_nodes,
            n_classes,
            n_outputs(self.objective, n_classes),
        )
        trees, _ = branches(self.structure)
        return BaggedForest(self.objective, tuple(self.peers), self.classes, trees, values)

    def level_scores(self, request: LevelSplits) -> dict[str, Any]:
        scores: dict[str, dict[str, float]] = {subset: {} for subset in WATCHED}
        if not len(request.trees):
            return score_arrays(scores)
        model = self.forest()
        for subset in WATCHED:
            rows = self._rows(model, subset)
            if len(rows[1]):
                statistics = metrics.statistics(model.objective, *rows, SCORE_BINS)
                scores[subset] = metrics.scores(model.objective, statistics)
        return score_arrays(scores)

    def _rows(self, model: BaggedForest, subset: str) -> Scored:
        rows = self.rows_of(subset)
        margins = margins_of(model.objective, model.predictions(self.nodes[:, rows]))
        return margins, self.numbers[rows], self.weights[rows]

    def finish(self, request: FinishRequest, mail: Mail) -> tuple[FinishReply, Letters]:
        """Apply the last splits, score the forest, store the party's part of the model."""
        if len(request.trees):
            self.keep_partitions(mail)
            self._make_last(request)
            self.take_splits(request)
        model = self.forest()
        letters = {name: mail.one(PartKept, name) for name in self.others}
        scored = self._scored(model)
        scores = metrics.pooled_subsets(model.objective, scored)
        splits = self.structure.splits
        ids = splits.spread(splits.records, self.structure.n_nodes, -1)
        # Only the owner of a split is known, so each party counts as one column.
        n_columns = dict.fromkeys(self.peers, 1)
        digests = {name: letter.digest for name, letter in letters.items()}
        self.store_active_part(model, ids, n_columns, digests, scores["train"].get("threshold"))
        names, gains, counts = self._importance(letters)
        keeps_model = self.settings.master_keeps_model
        values = np.concatenate(model.values) if keeps_model else np.zeros((0, model.n_outputs))
        self.end()
        reply = FinishReply(
            **score_arrays(scores),
            **interval_fields(model.objective, scored["test"]),
            column_names=names,
            column_gains=gains,
            column_counts=counts,
            **self.split_table(keeps_model),
            classes=model.classes if keeps_model else (),
            leaf_values=values,
        )
        return reply, []

    def _make_last(self, request: FinishRequest) -> None:
        self.make_local_splits(request)

    def _scored(self, model: BaggedForest) -> dict[str, Scored]:
        """Rows to score by subset; out-of-bag rows by the trees that have not drawn them."""
        rows = {subset: self._rows(model, subset) for subset in SUBSETS}
        compare_with_local(self, self.numbers, model.objective, rows["test"][0])
        unseen = self.counts == 0
        oob = np.flatnonzero(unseen.any(axis=0))
        predictions = model.predictions(self.nodes[:, oob], counted=unseen[:, oob])
        margins = margins_of(model.objective, predictions)
        return {**rows, "oob": (margins, self.numbers[oob], self.weights[oob])}

    def _gains(self, party: str, letter: PartKept) -> Doubles:
        return letter.gains

    def _importance(
        self, letters: Mapping[str, PartKept]
    ) -> tuple[tuple[str, ...], Doubles, npt.NDArray[np.int64]]:
        """Total gain and splits of all columns, numbered unless all parties share names."""
        worth = {self.name: self.local_importance()}
        for name, letter in letters.items():
            worth[name] = self._gains(name, letter), letter.counts, letter.names
        columns = {party: len(worth[party][0]) for party in self.peers}
        shared = all(len(worth[party][2]) == n_columns for party, n_columns in columns.items())
        names = joint_names(
            {
                party: worth[party][2]
                if shared
                else [f"{party} column {column + 1}" for column in range(n_columns)]
                for party, n_columns in columns.items()
            }
        )
        gains = np.concatenate([worth[party][0] for party in columns]) * self.unit**2
        return names, gains, np.concatenate([worth[party][1] for party in columns])


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
        self.keep_partitions(mail)
        letters = self.make_local_splits(request)
        if request.last:
            rule = "must be false at the active party"
            raise ProtocolError(self.name, "PartitionRequest", "last", rule)
        return PartitionReply(**self.split_table(shared=False)), letters
