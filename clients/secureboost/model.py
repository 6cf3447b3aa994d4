"""What SecureBoost trains for, and the boosted model so far, at the active party.

With an initial model the rows walk down its trees first, as in interactive inference. A tree is
without thresholds: of another party's split this one knows the column's number and the record id,
by which the owner finds the threshold in its lookup table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from clients.secureboost.columns import Joint
from clients.vertical.party import Aligned, Subsets
from fedapp import metrics
from fedapp.arrays import Doubles, Floats, Ints
from fedapp.data.columns import check_kinds
from fedapp.data.labels import check_events, check_mean, check_weights
from fedapp.data.partition import SUBSETS
from fedapp.errors import ConfigError, DataError, as_protocol_error
from fedapp.messages.fields import check_fields
from fedapp.messages.secureboost import FinishRequest, Records, SetupRequest
from fedapp.messages.vertical import read_splits
from fedapp.trees.calibration import Calibration, check_both_classes
from fedapp.trees.categories import NO_SET, Categories, category_counts
from fedapp.trees.divided import Lookup, joint_names, whole_model
from fedapp.trees.grow import without_padding
from fedapp.trees.limits import ONE_TREE
from fedapp.trees.losses import LossParameters, Objective
from fedapp.trees.model import (
    LEAF,
    NODE,
    Ensemble,
    Tree,
    check_range,
    node_of,
    split_trees,
    stack_trees,
)
from fedapp.trees.objective import (
    balance,
    base_margin,
    base_score,
    check_base_margin,
    check_objective,
    gradients,
    has_quantile_leaves,
    is_of_rows,
    label_sums,
    n_outputs,
)
from fedapp.trees.predict import Nodes
from fedapp.trees.quantiles import leaf_level, leaf_quantiles, quantile_score
from fedapp.trees.structure import Structure

Scores = dict[str, dict[str, float]]  # by subset


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Labels of all rows, and the loss of margins against them."""

    objective: Objective
    loss: LossParameters
    metrics: tuple[str, ...]  # further ones
    classes: tuple[str, ...]
    numbers: Floats  # (n_rows,): label of each row, a class id or number
    weights: Floats
    is_weighted: bool  # whether there is a column of weights: quantiles then differ
    n_rows: Subsets
    n_parallel: int  # trees a round of each output
    has_one_tree: bool  # whether a round has one tree for all classes

    @classmethod
    def of(cls, party: Aligned, asked: SetupRequest) -> tuple[Target, Floats]:
        """Code the labels; returns the prediction before the first tree, too."""
        with as_protocol_error(party.name, "SetupRequest", "objective"):
            check_objective(asked.objective)
        objective, loss = cast(Objective, asked.objective), LossParameters.of(asked)
        with as_protocol_error(party.name, "SetupRequest", "eval_metrics"):
            metrics.check_metrics(objective, asked.eval_metrics, loss)
        classes, numbers = party.number_labels(objective)
        labels, weights = numbers[: party.n_train], party.weights[: party.n_train]
        check_weights(weights)
        sums = label_sums(objective, labels, weights, len(classes), loss)
        check_events(objective, sums)
        weight_sum = float(weights.sum(dtype=np.float64))
        if not loss.scale_pos_weight:
            loss = replace(loss, scale_pos_weight=balance(float(sums[0]), weight_sum))
        target = cls(
            objective,
            loss,
            asked.eval_metrics,
            classes,
            numbers,
            party.weights,
            bool(party.config.weight),
            party.n_rows,
            asked.num_parallel_tree,
            asked.multi_strategy == ONE_TREE,
        )
        score = base_score(objective, sums, weight_sum, loss)
        if has_quantile_leaves(objective):
            score = quantile_score(objective, labels, target.column_weights, loss)
        check_mean(objective, score)
        if (calibration := cast(Calibration, asked.calibration)) != "none":
            check_both_classes(calibration, *target.validation_weights().sum(axis=1))
        return target, score

    @property
    def n_outputs(self) -> int:
        """Margins of a row."""
        return n_outputs(self.objective, len(self.classes))

    @property
    def n_pairs(self) -> int:
        """Gradients and hessians of a row: of each output for each parallel tree."""
        return self.n_parallel * self.n_outputs

    @property
    def width(self) -> int:
        """Trees per round."""
        return 1 if self.has_one_tree else self.n_pairs

    @property
    def column_weights(self) -> Floats | None:
        """Weights of the training rows, None without a column of them."""
        return self.weights[: self.n_rows.train] if self.is_weighted else None

    def validation_weights(self) -> Doubles:
        """Weights of the validation rows by class, 0 in the other one; shape (2, n_valid)."""
        rows = self.n_rows.of("valid")
        is_positive = self.numbers[rows] == 1
        return np.where([~is_positive, is_positive], self.weights[rows].astype(float), 0.0)

    def gradients(self, margins: Floats) -> Floats:
        """Gradients and hessians of the training rows, shape (n_train, n_pairs, 2)."""
        of_train = self.by_subset(margins)["train"]
        pairs = gradients(self.objective, *of_train, self.loss)
        # Else the others would see which rows have no pair, or are censored before all events.
        if not is_of_rows(self.objective):
            pairs[..., 1] = np.maximum(pairs[..., 1], np.finfo(np.float32).tiny)
        return np.tile(pairs, (1, self.n_parallel, 1))

    def fit_leaves(
        self,
        padded: Iterable[tuple[Tree, Ints]],
        places: Iterable[Ints],
        nodes: Nodes,
        pairs: Floats,
        margins: Floats,
        eta: float,
    ) -> None:
        """Set the leaves of padded trees to quantiles of the residuals of their drawn rows.

        ``places`` are each node's node in the grown tree, or the leaf above it; ``nodes`` those of
        the rows, ``pairs`` their gradients and hessians, by tree.
        """
        level, weights = leaf_level(self.objective, self.loss), self.column_weights
        of_trees = zip(padded, places, nodes, pairs[..., 1], strict=True)
        for (tree, numbers), grown, of_rows, hessians in of_trees:
            drawn = np.flatnonzero(hessians != 0)
            residuals = self.numbers[drawn] - margins[drawn, 0]
            drawn_weights = None if weights is None else weights[drawn]
            leaves = grown[of_rows[drawn]]
            quantiles = leaf_quantiles(leaves, residuals, drawn_weights, level, len(tree))
            values = quantiles * np.float32(eta)
            # Nodes below a leaf, whose splits the queue has dropped, have its value.
            tree["value"] = np.where(tree["left"] == LEAF, values[grown[numbers]], np.float32(0))
            check_range([tree])

    def by_subset(self, margins: Floats) -> dict[str, tuple[Floats, Floats, Floats]]:
        """Margins, labels and weights."""
        subsets = {subset: self.n_rows.of(subset) for subset in SUBSETS}
        return {
            subset: (margins[rows], self.numbers[rows], self.weights[rows])
            for subset, rows in subsets.items()
        }

    def scores(self, margins: Floats) -> Scores:
        """Scores by subset; none for a subset without rows."""
        return metrics.pooled_subsets(self.objective, self.by_subset(margins), self.metrics)

    def begun(self, party: Aligned, asked: SetupRequest, score: Floats) -> Boosted:
        """The model before the first round: the initial one, or ``score`` only."""
        trees = stack_trees((), node_of(self.n_outputs) if self.has_one_tree else NODE)
        records, n_made = np.empty(0, dtype=np.int64), np.zeros(len(party.peers), dtype=np.int64)
        if asked.init_model:
            model, ids = self._initial_model(party, asked)
            trees, records, score = stack_trees(model.trees), np.concatenate(ids), model.base_score
        if party.base_margins is not None:
            try:
                check_base_margin(self.objective)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            margins = party.base_margins[:, None]
        else:
            margins = np.tile(base_margin(self.objective, score), (len(self.numbers), 1))
        boosted = Boosted(score, margins, *trees, records, n_made, n_parallel=self.n_parallel)
        return replace(boosted, first_round=boosted.n_rounds)

    def _initial_model(
        self, party: Aligned, asked: SetupRequest
    ) -> tuple[Ensemble, tuple[Ints, ...]]:
        """The initial model, checked to fit the run, and the record ids of its nodes."""
        part = party.active_part(asked.init_model)
        model = part.model
        if not isinstance(model, Ensemble):
            raise ConfigError("init-model must be a boosted model, got a forest")
        parties = sorted(part.n_columns)
        if parties != sorted(party.peers):
            raise DataError(f"parties must be those of init-model ({', '.join(parties)})")
        settings: dict[str, tuple[Any, Any]] = {
            "objective": (self.objective, model.objective),
            "classes": (self.classes, model.classes),
            "parameters": (self.loss, model.parameters),
            "multi-strategy": (asked.multi_strategy, model.multi_strategy),
            "num-parallel-tree": (self.n_parallel, model.num_parallel_tree),
            "base-margin": (margin_column(party), model.margin_column),
        }
        for field, (wanted, of_model) in settings.items():
            if wanted != of_model:
                # Without the values: class and column names stay at the party.
                raise ConfigError(f"{field} of init-model must be the run's at {party.name}")
        return model, part.records


def margin_column(party: Aligned) -> str:
    """The column of base margins, if the table has one."""
    return party.config.base_margin if party.base_margins is not None else ""


@dataclass(frozen=True, slots=True, eq=False)
class Best:
    """The round with the best validation score, the first of equals."""

    score: float  # larger is better
    n_rounds: int
    margins: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Boosted:
    """The model after some rounds, and the margins of all rows."""

    base_score: Floats  # (n_outputs,)
    margins: Floats  # (n_rows, n_outputs)
    nodes: npt.NDArray[np.void]  # of all trees
    offsets: Ints  # the start of each tree, and the end
    records: Ints  # record id of each node's split in its owner's lookup, -1 at leaves
    n_made: Ints  # (n_parties,): splits of each, by which records are numbered
    best: Best | None = None
    n_parallel: int = 1  # trees a round of each output
    first_round: int = 0  # not 0 if the run continues another model

    @property
    def n_rounds(self) -> int:
        """Finished rounds, with those of the initial model."""
        has_one_tree = self.nodes["value"].ndim > 1
        width = 1 if has_one_tree else self.n_parallel * int(self.margins.shape[1])
        return (len(self.offsets) - 1) // width

    @property
    def trees(self) -> tuple[Tree, ...]:
        """Trees of all rounds."""
        return split_trees(self.nodes, self.offsets)

    def first_trees(self, n_trees: int) -> tuple[tuple[Tree, ...], tuple[Ints, ...]]:
        """The first trees, and the record ids of their nodes."""
        pairs = pairwise(self.offsets[: n_trees + 1])
        return self.trees[:n_trees], tuple(self.records[a:b] for a, b in pairs)

    def plus(
        self, padded: Sequence[tuple[Tree, Ints]], structure: Structure, nodes: Nodes
    ) -> Boosted:
        """The model after one more round.

        Parameters
        ----------
        padded : its trees, and of each node its number in ``structure``: where the order of splits
            is not that of levels, the model's nodes have other numbers.
        nodes : shape (n_trees, n_rows): where the rows are in ``structure``.
        """
        splits, trees, records, steps = structure.splits, list[Tree](), list[Ints](), []
        ids = splits.spread(self.n_made[splits.owners] + splits.records, structure.n_nodes, -1)
        for (tree, numbers), of_tree, of_rows in zip(padded, ids, nodes, strict=True):
            trees.append(tree.copy())
            trees[-1]["set"] = NO_SET  # sets are in the lookup tables
            records.append(of_tree[numbers])
            steps.append(tree["value"][np.argsort(numbers)[of_rows]])
        stacked, offsets = stack_trees((*self.trees, *trees))
        margins = self.margins
        n_rows, n_outputs = margins.shape
        of_trees = np.stack(steps, axis=1).reshape(n_rows, self.n_parallel, n_outputs)
        for number in range(self.n_parallel):  # one after the other, as XGBoost's float32 sums
            margins = margins + of_trees[:, number]
        return replace(
            self,
            margins=margins,
            nodes=stacked,
            offsets=offsets,
            records=np.concatenate((self.records, *records)),
            n_made=self.n_made + np.bincount(splits.owners, minlength=len(self.n_made)),
        )

    def scored(self, score: float) -> Boosted:
        """The model with the last round as the best, if none before has this score."""
        if score > (self.best.score if self.best else -np.inf):  # never true for NaN
            return replace(self, best=Best(float(score), self.n_rounds, self.margins))
        return self

    def margins_after(self, n_rounds: int, party: str) -> Floats:
        """Margins after all rounds, or after the best; raises a ProtocolError for others."""
        if n_rounds == self.n_rounds:
            return self.margins
        best = self.best.n_rounds if self.best else None
        rule = f"must be {self.n_rounds} or {best}, got {n_rounds}"
        check_fields(party, FinishRequest, ("best_round", n_rounds == best, rule))
        assert self.best is not None
        return self.best.margins


def trimmed(model: Ensemble, records: Sequence[Ints]) -> tuple[Ensemble, tuple[Ints, ...]]:
    """A model without splits that were dropped, and the record ids of its nodes."""
    trees = tuple(map(without_padding, model.trees))
    ids = (
        np.where(tree["left"] == LEAF, -1, of_tree[: len(tree)])
        for of_tree, tree in zip(records, trees, strict=True)
    )
    return replace(model, trees=trees), tuple(ids)


def joined(
    model: Ensemble, records: Sequence[Ints], joint: Joint, letters: Mapping[str, Records]
) -> Ensemble:
    """The whole model, from all parties' splits; raises a ProtocolError if some do not fit."""
    parts = {party: _read_records(party, letters[party], joint) for party in joint.widths}
    owners = [joint.owners(tree["column"])[0] for tree in model.trees]
    # Each party must have sent every split that it has made.
    for number, (party, (table, _)) in enumerate(parts.items()):
        of_party = [ids[by == number] for ids, by in zip(records, owners, strict=True)]
        n_made = 1 + max((int(ids.max(initial=-1)) for ids in of_party), default=-1)
        n_sent = len(table.thresholds)
        rule = f"must be {n_made} at least, got {n_sent}"
        check_fields(party, Records, ("thresholds", n_sent >= n_made, rule))
    names = joint_names({party: letters[party].names for party in parts})
    n_columns = [len(widths) for widths in joint.widths.values()]
    kinds = tuple(kind for party in parts for kind in letters[party].kinds)
    return whole_model(model, records, owners, list(parts.values()), n_columns, names, kinds)


def _read_records(party: str, letter: Records, joint: Joint) -> tuple[Lookup, Categories]:
    """A party's splits, and the categories of its columns."""
    n_columns, n_names = len(joint.widths[party]), len(letter.names)
    rule = f"must be {n_columns}, got {n_names}"
    check_fields(party, letter, ("names", n_names == n_columns, rule))
    rule = "must be of the party's columns and their categories"
    lookup, categories = read_splits(party, letter, n_columns, rule)
    n_bins = np.where(joint.categorical[party], joint.widths[party], 0)
    # Includes categories in no training row.
    has_all = (category_counts(categories, n_columns) >= n_bins).all()
    check_fields(party, letter, ("widths", has_all, rule))
    with as_protocol_error(party, "Records", "kinds"):
        check_kinds(letter.kinds, n_columns)
    return lookup, categories
