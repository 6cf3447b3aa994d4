"""Bagging and cyclic training at a party: boost from the margins of the common model."""

from __future__ import annotations

from clients.scoring import Scored
from fedapp.errors import as_protocol_error
from fedapp.messages.fields import Array, check_fields, parameters_of
from fedapp.messages.handshake import LabelsRequest
from fedapp.messages.local_boosting import BagReply, BagRequest, TurnReply, TurnRequest
from fedapp.messages.scoring import BoostOrder
from fedapp.site.policy import check_share
from fedapp.site.roles import Order, handlers, role
from fedapp.trees.model import EXPLAINED, check_range, pack_trees
from fedapp.trees.predict import add_trees
from fedapp.trees.xgboost import grow_trees


@role
class Booster(Scored):
    """A party that boosts; the margins stay here, so each tree is sent and evaluated once."""

    order = Order(
        {
            LabelsRequest: {BagRequest, TurnRequest},
            BagRequest: {BagRequest},
            TurnRequest: {TurnRequest},
        }
    )

    def bag(self, request: BagRequest) -> BagReply:
        """Bagging: boost beside the others."""
        return BagReply(**self._boost(request))

    def take_turn(self, request: TurnRequest) -> TurnReply:
        """Cyclic training: boost in turn; without a turn, only add the others' trees and score."""
        return TurnReply(**self._boost(request))

    def _boost(self, request: BoostOrder) -> dict[str, Array]:
        """Add the new trees, score, and grow ``n_rounds``; the fields of a ``BoostReport``."""
        fits = request.n_classes == len(self.classes)
        check_fields(self.name, request, ("n_classes", fits, "must be the run's"))
        new = self.read_trees(request)
        self.begin_margins(request)
        if new.trees:
            self.margins = {
                subset: add_trees(margins, new.trees, self.values[subset], new.sets)
                for subset, margins in self.margins.items()
            }
        center = float(request.base_margin[0])
        scores = self.score_fields(self.margins, request.score_bins, center)
        rows = self.values["train"], self.labels["train"], self.weights["train"]
        # Each party draws its rows and columns afresh in every round.
        seeds = self.site.seeds(request.seed, request.round_id, request.subsample)
        parameters = {
            **parameters_of(request),
            "subsample": check_share(self.config, rows[2], request.subsample),
            "seed": int(seeds.generate_state(1)[0] >> 1),  # XGBoost wants 31 bits
        }
        with as_protocol_error(self.name, type(request).__name__, "parameters"):
            grown = grow_trees(
                self.objective,
                request.n_classes,
                parameters,
                rows,
                self.margins["train"],
                request.n_rounds,
                self.category_counts,
                self.loss,
            )
        check_range(grown.trees)
        return {**pack_trees(grown.trees, EXPLAINED, grown.sets), **scores}


HANDLERS = handlers(Booster)
