"""Boost at a party with XGBoost, from the margins of a model that others have a hand in."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from fedapp import metrics
from fedapp.errors import ProtocolError
from fedapp.messages.fields import Array, Request
from fedapp.messages.trees import BoostOrder, check_forest, forest_of
from fedapp.site.answer import Handler, Site
from fedapp.site.store import Store
from fedapp.trees.forest import add_trees, forest_arrays, forest_trees
from fedapp.trees.from_xgboost import grow_trees
from fedapp.trees.model import Tree
from fedapp.trees.objective import Objective, n_outputs

PARTS = ("train", "valid")


def boost(site: Site, request: BoostOrder) -> dict[str, Array]:
    """Add the trees that are new here, score, and grow as many rounds as asked.

    The margins stay at the site, so a tree travels once and is walked once.

    Returns
    -------
    The fields of a ``BoostReport``.
    """
    store = site.store
    objective = cast(Objective, store.facts["objective"])
    width = n_outputs(objective, request.n_classes)
    check_forest(site.name, request, store["train.values"].shape[1])
    if (len(request.offsets) - 1) % width:
        rule = f"must be a multiple of {width} trees, got {len(request.offsets) - 1}"
        raise ProtocolError(site.name, type(request).__name__, "offsets", rule)
    if "train.margins" not in store:
        for part in PARTS:
            shape = (len(store[f"{part}.labels"]), width)
            store[f"{part}.margins"] = np.full(shape, request.base_margin, dtype=np.float32)
    scores = _learn(store, objective, forest_trees(forest_of(request)), request)
    trees = grow_trees(
        objective,
        request.n_classes,
        _parameters(site.name, request),
        (store["train.values"], store["train.labels"], store["train.weights"]),
        store["train.margins"],
        request.n_rounds,
    )
    return {**forest_arrays(trees, explained=True), **scores}


def _learn(
    store: Store, objective: Objective, trees: tuple[Tree, ...], request: BoostOrder
) -> dict[str, Array]:
    """Add trees to the margins; returns the scores after them."""
    scores = {}
    for part in PARTS:
        margins = store[f"{part}.margins"]
        if trees:
            margins = add_trees(margins, trees, store[f"{part}.values"])
            store[f"{part}.margins"] = margins
        found = metrics.statistics(
            objective,
            margins,
            store[f"{part}.labels"],
            store[f"{part}.weights"],
            request.score_bins,
            center=request.base_margin,
        )
        scores[f"{part}_sums"], scores[f"{part}_scores"] = found.sums, found.histogram
    return scores


def _parameters(name: str, request: BoostOrder) -> dict[str, Any]:
    """XGBoost's parameters; rows and columns are drawn anew by every party in every round."""
    sequence = np.random.SeedSequence([request.seed, request.round_id, zlib.crc32(name.encode())])
    return {
        "seed": int(sequence.generate_state(1)[0] >> 1),  # XGBoost wants 31 bits
        "max_depth": request.max_depth,
        "eta": request.eta,
        "lambda": request.reg_lambda,
        "alpha": request.reg_alpha,
        "gamma": request.gamma,
        "min_child_weight": request.min_child_weight,
        "subsample": request.subsample,
        "colsample_bytree": request.colsample_bytree,
        "max_bin": request.max_bin,
    }


HANDLERS: Mapping[type[Request], Handler] = {}  # bagging and cyclic have the messages
