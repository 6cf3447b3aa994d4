"""Boost at a party with XGBoost, from the margins of a model that others have a hand in."""

from __future__ import annotations

from typing import Any, cast

from clients.dictionary import kept_categories
from clients.labels import CLASSES, loss_parameters
from clients.margins import begin_margins, check_outputs, told_trees
from clients.scoring import score_fields
from fedapp.data.partition import WATCHED
from fedapp.errors import ProtocolError, blaming
from fedapp.messages.fields import Array
from fedapp.messages.parameters import parameters_of
from fedapp.messages.trees import BoostOrder
from fedapp.site.answer import Site
from fedapp.site.policy import check_share
from fedapp.trees.boosted.from_xgboost import grow_trees
from fedapp.trees.model import Grown, check_range
from fedapp.trees.objective import Objective
from fedapp.trees.packed import EXPLAINED, pack_trees
from fedapp.trees.predict import add_trees
from fedapp.trees.sets import category_counts


def boost(site: Site, request: BoostOrder) -> dict[str, Array]:
    """Add the trees that are new here, score, and grow as many rounds as asked.

    The margins stay at the site, so a tree travels once and is walked once.

    Returns
    -------
    The fields of a ``BoostReport``.
    """
    store = site.store
    objective = cast(Objective, store.facts["objective"])
    if request.n_classes != len(store.facts[CLASSES]):
        raise ProtocolError(site.name, type(request).__name__, "n_classes", "must be the run's")
    widths = category_counts(kept_categories(store), store["train.values"].shape[1])
    known = told_trees(site, request, widths)
    check_outputs(site, request, "base_margin")
    if "train.margins" not in store:
        begin_margins(store, request.base_margin)
    scores = _learn(site, objective, known, request)
    rows = store["train.values"], store["train.labels"], store["train.weights"]
    given = objective, request.n_classes, _parameters(site, request), rows
    with blaming(site.name, type(request).__name__, "parameters"):
        margins, loss = store["train.margins"], loss_parameters(store)
        grown = grow_trees(*given, margins, request.n_rounds, widths, loss)
    check_range(grown.trees)
    return {**pack_trees(grown.trees, EXPLAINED, grown.sets), **scores}


def _learn(site: Site, objective: Objective, grown: Grown, request: BoostOrder) -> dict[str, Array]:
    """Add trees to the margins; returns the scores after them."""
    store, scores = site.store, dict[str, Array]()
    for subset in WATCHED:
        margins = store[f"{subset}.margins"]
        if grown.trees:
            values = store[f"{subset}.values"]
            margins = add_trees(margins, grown.trees, values, grown.sets)
            store[f"{subset}.margins"] = margins
        how = margins, request.score_bins, float(request.base_margin[0])
        scores |= score_fields(site, subset, objective, *how)
    return scores


def _parameters(site: Site, request: BoostOrder) -> dict[str, Any]:
    """How the trees are grown; rows and columns are drawn anew by every party in every round."""
    seeds = site.seeds(request.seed, request.round_id, request.subsample)
    seed = int(seeds.generate_state(1)[0] >> 1)  # XGBoost wants 31 bits
    share = check_share(site.config, site.store["train.weights"], request.subsample)
    return {**parameters_of(request), "subsample": share, "seed": seed}
