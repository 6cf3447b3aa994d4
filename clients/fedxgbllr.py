"""FedXGBllr at a party: fit XGBoost once, store all trees' outputs for its rows, train the head.

Source: Ma et al. 2023, Algorithm 1, lines 2, 3, 7 and 14 to 19.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from clients.scoring import Scored
from fedapp import metrics
from fedapp.arrays import Floats
from fedapp.data.partition import SUBSETS, WATCHED
from fedapp.errors import DataError, as_protocol_error
from fedapp.home import write_atomically
from fedapp.messages.fedxgbllr import (
    AverageReply,
    AverageRequest,
    FinalReply,
    FinalRequest,
    FitReply,
    FitRequest,
    ShareReply,
    ShareRequest,
)
from fedapp.messages.fields import Array, check_sizes, fields_of, parameters_of
from fedapp.messages.handshake import LabelsRequest
from fedapp.messages.scoring import arrays_of
from fedapp.records.document import to_text
from fedapp.site.policy import check_share
from fedapp.site.roles import Order, handlers, role
from fedapp.trees.categories import CategorySets
from fedapp.trees.losses import IDENTITY, LOSSES
from fedapp.trees.model import Grown, Tree, pack_trees, unpack_trees
from fedapp.trees.objective import base_margin, check_base_score
from fedapp.trees.stacked import (
    HeadShape,
    Kind,
    StackedModel,
    head_margins,
    learned_rates,
    split_ensembles,
    tree_outputs,
    weights_in_unit,
)
from fedapp.trees.xgboost import for_xgboost, trees_from_xgboost, typed_columns

THREADS = 1  # the same trees whatever the machine


@role
class Stacker(Scored):
    """A party of FedXGBllr."""

    order = Order(
        {
            LabelsRequest: {FitRequest},
            FitRequest: {ShareRequest},
            ShareRequest: {AverageRequest, FinalRequest},
            AverageRequest: {AverageRequest, FinalRequest},
        }
    )
    shared: ShareRequest  # trees of all parties, and the head over them
    outputs: Mapping[str, Floats]  # of all trees for all rows, by subset
    few: npt.NDArray[np.int64]  # see ``few_rows``

    def fit(self, request: FitRequest) -> FitReply:
        """Line 2: fit this party's ensemble."""
        weights = self.weights["train"]
        if not weights.any():
            raise DataError("weight must be > 0 in some training row")
        self._check_base_score(request)
        with as_protocol_error(self.name, "FitRequest", "parameters"):
            grown = self._fit_trees(request)
        square_sum = 0.0
        if LOSSES[self.objective].link is IDENTITY:
            distances = self.labels["train"].astype(np.float64) - request.base_score
            square_sum = float(distances**2 @ weights)
        return FitReply(**pack_trees(grown.trees, ["gains"], grown.sets), square_sum=square_sum)

    def _fit_trees(self, request: FitRequest) -> Grown:
        import xgboost

        values, labels, weights = self.values, self.labels, self.weights
        typed = {"nthread": THREADS, **typed_columns(self.category_counts)}
        rows = xgboost.QuantileDMatrix(
            values["train"],
            labels["train"],
            weight=weights["train"],
            max_bin=request.max_bin,
            **typed,
        )
        watched, patience = [], None  # early stopping is by the loss: AUC may be undefined
        if request.early_stopping_rounds and weights["valid"].any():
            held_back = xgboost.DMatrix(
                values["valid"], labels["valid"], weight=weights["valid"], **typed
            )
            watched = [(held_back, "valid")]
            patience = request.early_stopping_rounds
        (entropy,) = self.site.entropy(request.seed, share=request.subsample)
        share = check_share(self.config, weights["train"], request.subsample)
        asked = {**parameters_of(request), "subsample": share, "seed": entropy % 2**31}
        parameters = {
            **for_xgboost(self.objective, request.n_outputs, asked, self.loss),
            "base_score": request.base_score.tolist(),
            "eval_metric": metrics.loss_metric(self.objective, self.loss),
            "nthread": THREADS,
        }
        booster = xgboost.train(
            parameters,
            rows,
            request.n_rounds,
            evals=watched,
            early_stopping_rounds=patience,
            verbose_eval=False,
        )
        best = booster[: booster.best_iteration + 1] if patience else booster
        return trees_from_xgboost(best, self.category_counts)

    def share(self, request: ShareRequest) -> ShareReply:
        """Line 7: outputs of all trees for all rows, computed once; drops the values."""
        self._check_base_score(request)
        self.shared = request
        with as_protocol_error(self.name, "ShareRequest", "trees"):
            ensembles, sets = self._ensembles()
            shape = self.shape
        self.outputs = {
            subset: tree_outputs(ensembles, shape.n_trees, values, sets)
            for subset, values in self.values.items()
        }
        self.few = self.few_rows(tree for trees in ensembles for tree in trees)
        self.values = {}
        return ShareReply(n_rows=len(self.labels["train"]))

    def _ensembles(self) -> tuple[tuple[tuple[Tree, ...], ...], CategorySets]:
        grown = unpack_trees(arrays_of(self.shared), self.category_counts)
        return split_ensembles(grown.trees, self.shared.counts), grown.sets

    @property
    def shape(self) -> HeadShape:
        """Sizes of the head."""
        shared, kind = self.shared, cast(Kind, self.shared.head)
        return HeadShape.over(kind, shared.counts.tolist(), shared.n_outputs, shared.channels)

    def average(self, request: AverageRequest) -> AverageReply:
        """Lines 14 to 19: score the received head, then train it on the party's rows."""
        check_sizes(self.name, request, n_weights=self.shape.n_weights)
        scores = self._scores(WATCHED, request.weights, request.score_bins, 1.0)
        weights, loss = request.weights, 0.0
        if request.epochs:
            weights, loss = self._train(request)
        n_rows = len(self.labels["train"])
        return AverageReply(weights=weights, n_rows=n_rows, loss=loss, **scores)

    def _train(self, request: AverageRequest) -> tuple[Array, float]:
        from fedapp.trees.head import HeadRows, Training, fit_head

        base, unit = self._scale()
        rows = {
            subset: HeadRows(
                outputs=self.outputs[subset],
                labels=self.labels[subset],
                weights=self.weights[subset],
                base_margin=base,
                unit=unit,
            )
            for subset in WATCHED
        }
        training = Training(**fields_of(request, Training))
        rng = self.site.random(request.seed, request.round_id)
        held_back = rows["valid"] if self.weights["valid"].any() else None
        with as_protocol_error(self.name, "AverageRequest", "parameters"):
            return fit_head(
                self.objective,
                self.shape,
                request.weights,
                rows["train"],
                training,
                rng,
                held_back,
                self.loss,
            )

    def _scale(self) -> tuple[Array, np.float32]:
        """Base margin, and unit of the head."""
        return base_margin(self.objective, self.shared.base_score), np.float32(self.shared.unit)

    def _scores(
        self, subsets: Sequence[str], weights: Array, n_bins: int, residual_range: float
    ) -> dict[str, Array]:
        base, unit = self._scale()
        scaled = weights_in_unit(self.shape, weights, unit)
        margins = {
            subset: base + head_margins(self.shape, scaled, self.outputs[subset])
            for subset in subsets
        }
        return self.score_fields(margins, n_bins, float(base[0]), residual_range)

    def final(self, request: FinalRequest) -> FinalReply:
        """Score the finished model, and store it."""
        check_sizes(self.name, request, n_weights=self.shape.n_weights)
        widest = request.residual_range
        scores = self._scores(SUBSETS, request.weights, request.score_bins, widest)
        shared, shape, (_, unit) = self.shared, self.shape, self._scale()
        ensembles, sets = self._ensembles()
        scaled = weights_in_unit(shape, request.weights, unit)
        scores["few"] = self.few
        scores["rates"] = learned_rates(shape, scaled, self.outputs["train"])
        model = StackedModel(
            self.objective,
            np.array(shared.base_score),
            self.columns,
            shared.classes,
            unit,
            ensembles,
            shape,
            request.weights,
            sets,
            self.categories,
        )
        write_atomically(self.folder / "model.json", to_text(model).encode())
        self.end()
        return FinalReply(**scores)

    def _check_base_score(self, request: FitRequest | ShareRequest) -> None:
        check_sizes(self.name, request, n_outputs=self.n_outputs)
        with as_protocol_error(self.name, type(request).__name__, "base_score"):
            check_base_score(self.objective, request.base_score)


HANDLERS = handlers(Stacker)
