"""Bagging and cyclic training at a party: boost from the margins of the common model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from clients.handshake import CLASSES, loss_parameters, stored_categories
from clients.scoring import begin_margins, check_outputs, read_trees, score_fields
from fedapp.data.partition import WATCHED
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.messages.fields import Array, Request, parameters_of
from fedapp.messages.local_boosting import BagReply, BagRequest, TurnReply, TurnRequest
from fedapp.messages.scoring import BoostOrder
from fedapp.site.answer import Handler, Site
from fedapp.site.settings import check_share
from fedapp.trees.model import EXPLAINED, check_range, pack_trees
from fedapp.trees.objective import Objective
from fedapp.trees.predict import add_trees
from fedapp.trees.sets import category_counts
from fedapp.trees.xgboost import grow_trees


def boost(site: Site, request: BoostOrder) -> dict[str, Array]:
    """Add the new trees, score, and grow ``n_rounds``; returns the fields of a ``BoostReport``."""
    store = site.store
    objective = cast(Objective, store.facts["objective"])
    if request.n_classes != len(store.facts[CLASSES]):
        raise ProtocolError(site.name, type(request).__name__, "n_classes", "must be the run's")
    widths = category_counts(stored_categories(store), store["train.values"].shape[1])
    new = read_trees(site, request, widths)
    check_outputs(site, request, "base_margin")
    if "train.margins" not in store:
        begin_margins(store, request.base_margin)
    scores: dict[str, Array] = {}
    # The margins stay at the site, so each tree is sent and evaluated once.
    for subset in WATCHED:
        margins = store[f"{subset}.margins"]
        if new.trees:
            margins = add_trees(margins, new.trees, store[f"{subset}.values"], new.sets)
            store[f"{subset}.margins"] = margins
        settings = margins, request.score_bins, float(request.base_margin[0])
        scores |= score_fields(site, subset, objective, *settings)
    rows = store["train.values"], store["train.labels"], store["train.weights"]
    # Each party draws its rows and columns afresh in every round.
    seeds = site.seeds(request.seed, request.round_id, request.subsample)
    parameters = {
        **parameters_of(request),
        "subsample": check_share(site.config, rows[2], request.subsample),
        "seed": int(seeds.generate_state(1)[0] >> 1),  # XGBoost wants 31 bits
    }
    with as_protocol_error(site.name, type(request).__name__, "parameters"):
        margins, loss = store["train.margins"], loss_parameters(store)
        grown = grow_trees(
            objective, request.n_classes, parameters, rows, margins, request.n_rounds, widths, loss
        )
    check_range(grown.trees)
    return {**pack_trees(grown.trees, EXPLAINED, grown.sets), **scores}


def bag(site: Site, request: BagRequest) -> BagReply:
    """Bagging: boost beside the others."""
    return BagReply(**boost(site, request))


def take_turn(site: Site, request: TurnRequest) -> TurnReply:
    """Cyclic training: boost in turn; without a turn, only add the others' trees and score."""
    return TurnReply(**boost(site, request))


HANDLERS: Mapping[type[Request], Handler] = {BagRequest: bag, TurnRequest: take_turn}
