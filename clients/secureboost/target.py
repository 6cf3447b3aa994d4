"""What SecureBoost trains for, at the active party: labels, the loss, and the first margins.

With an initial model the rows walk down its trees first, as in interactive inference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from clients.secureboost.model import Boosted
from clients.vertical.party import Aligned, Floats, Ints, Subsets
from fedapp import metrics
from fedapp.data.labels import check_events, check_mean, check_weights
from fedapp.data.partition import SUBSETS
from fedapp.errors import ConfigError, DataError, as_protocol_error
from fedapp.messages.secureboost import SetupRequest
from fedapp.trees.calibration import Calibration, check_both_classes
from fedapp.trees.limits import ONE_TREE
from fedapp.trees.losses import Doubles, LossParameters, Objective
from fedapp.trees.model import LEAF, NODE, Ensemble, Tree, check_range, node_of, stack_trees
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
