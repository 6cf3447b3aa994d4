"""FedXGBllr at a party: fit XGBoost once, store all trees' outputs for its rows, train the head.

Source: Ma et al. 2023, Algorithm 1, lines 2, 3, 7 and 14 to 19.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import cast

import numpy as np

from clients.handshake import loss_parameters, run_outputs, stored_categories
from clients.scoring import check_outputs, score_fields
from fedapp import metrics
from fedapp.data.partition import SUBSETS, WATCHED
from fedapp.errors import DataError, ProtocolError, as_protocol_error
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
from fedapp.messages.fields import Array, Request, parameters_of
from fedapp.messages.scoring import arrays_of
from fedapp.site.answer import Handler, Site
from fedapp.site.settings import check_share
from fedapp.site.store import Store
from fedapp.trees.model import TREES, Grown, Tree, pack_trees, unpack_trees
from fedapp.trees.objective import IDENTITY, LOSSES, Objective, base_margin
from fedapp.trees.sets import CategorySets, category_counts
from fedapp.trees.stacked import (
    HeadShape,
    StackedModel,
    head_margins,
    learned_rates,
    split_ensembles,
    to_json,
    tree_outputs,
    weights_in_unit,
)
from fedapp.trees.xgboost import for_xgboost, trees_from_xgboost, typed_columns

THREADS = 1  # the same trees whatever the machine


def fit(site: Site, request: FitRequest) -> FitReply:
    """Line 2: fit this party's ensemble."""
    store = site.store
    if not store["train.weights"].any():
        raise DataError("weight must be > 0 in some training row")
    if request.n_outputs != run_outputs(store):
        raise ProtocolError(site.name, "FitRequest", "n_outputs", "must be those of the run")
    check_outputs(site, request, "base_score")
    with as_protocol_error(site.name, "FitRequest", "parameters"):
        grown = _fit_trees(site, request)
    square_sum = 0.0
    if LOSSES[store.facts["objective"]].link is IDENTITY:
        distances = store["train.labels"].astype(np.float64) - request.base_score
        square_sum = float(distances**2 @ store["train.weights"])
    return FitReply(**pack_trees(grown.trees, ["gains"], grown.sets), square_sum=square_sum)


def _fit_trees(site: Site, request: FitRequest) -> Grown:
    import xgboost

    store = site.store
    values, labels, weights = (store[f"train.{name}"] for name in ("values", "labels", "weights"))
    widths = _category_counts(store)
    options = {"nthread": THREADS, "max_bin": request.max_bin, **typed_columns(widths)}
    rows = xgboost.QuantileDMatrix(values, labels, weight=weights, **options)
    watched, patience = [], None  # early stopping is by the loss: AUC may be undefined
    if request.early_stopping_rounds and store["valid.weights"].any():
        held_back = (store[f"valid.{name}"] for name in ("values", "labels"))
        typed = {"nthread": THREADS, **typed_columns(widths)}
        matrix = xgboost.DMatrix(*held_back, weight=store["valid.weights"], **typed)
        watched, patience = [(matrix, "valid")], request.early_stopping_rounds
    (entropy,) = site.entropy(request.seed, share=request.subsample)
    share = check_share(site.config, weights, request.subsample)
    sampling = {"subsample": share, "seed": entropy % 2**31}
    objective, loss = store.facts["objective"], loss_parameters(store)
    parameters = {
        **for_xgboost(objective, request.n_outputs, {**parameters_of(request), **sampling}, loss),
        "base_score": request.base_score.tolist(),
        "eval_metric": metrics.loss_metric(objective, loss.tweedie_variance_power),
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
    return trees_from_xgboost(best, widths)


def _category_counts(store: Store) -> Array:
    return category_counts(stored_categories(store), len(store.facts["hello"]["columns"]))


def share(site: Site, request: ShareRequest) -> ShareReply:
    """Line 7: outputs of all trees for all rows, computed once; drops the values."""
    check_outputs(site, request, "base_score")
    store = site.store
    for name, array in arrays_of(request).items():
        store[f"trees.{name}"] = array
    store["trees.counts"] = request.counts
    store["base_score"] = request.base_score
    scalars = ("n_outputs", "head", "channels", "classes", "unit")
    store.facts["model"] = {name: getattr(request, name) for name in scalars}
    with as_protocol_error(site.name, "ShareRequest", "trees"):
        (ensembles, sets), shape = _ensembles(store), _shape(store)
    for subset in SUBSETS:
        values = store[f"{subset}.values"]
        store[f"{subset}.outputs"] = tree_outputs(ensembles, shape.n_trees, values, sets)
        store.drop(f"{subset}.values")
    return ShareReply(n_rows=len(store["train.labels"]))


def _shape(store: Store) -> HeadShape:
    model, counts = store.facts["model"], store["trees.counts"].tolist()
    return HeadShape.over(model["head"], counts, model["n_outputs"], model["channels"])


def _ensembles(store: Store) -> tuple[tuple[tuple[Tree, ...], ...], CategorySets]:
    grown = unpack_trees({name: store[f"trees.{name}"] for name in TREES}, _category_counts(store))
    return split_ensembles(grown.trees, store["trees.counts"]), grown.sets


def average(site: Site, request: AverageRequest) -> AverageReply:
    """Lines 14 to 19: score the received head, then train it on the party's rows."""
    store, shape = site.store, _shape(site.store)
    _check_weights(site, request, shape)
    scores: dict[str, Array] = {}
    for subset in WATCHED:
        scores |= _scores(site, subset, request.weights, request.score_bins, 1.0)
    weights, loss = request.weights, 0.0
    if request.epochs:
        weights, loss = _train(site, request, shape)
    return AverageReply(weights=weights, n_rows=len(store["train.labels"]), loss=loss, **scores)


def _train(site: Site, request: AverageRequest, shape: HeadShape) -> tuple[Array, float]:
    from fedapp.trees.head import HeadRows, Training, fit_head

    store = site.store
    objective, base, unit = _scale(store)
    names = "outputs", "labels", "weights"
    rows = {
        subset: HeadRows(
            **{name: store[f"{subset}.{name}"] for name in names}, base_margin=base, unit=unit
        )
        for subset in WATCHED
    }
    settings = (field.name for field in fields(Training))
    training = Training(**{name: getattr(request, name) for name in settings})
    rng = site.random(request.seed, request.round_id)
    held_back = rows["valid"] if store["valid.weights"].any() else None
    with as_protocol_error(site.name, "AverageRequest", "parameters"):
        fit_inputs = objective, shape, request.weights, rows["train"], training, rng, held_back
        return fit_head(*fit_inputs, loss_parameters(store))


def _scale(store: Store) -> tuple[Objective, Array, np.float32]:
    """Objective, base margin, and unit of the head."""
    objective, model = cast(Objective, store.facts["objective"]), store.facts["model"]
    base = base_margin(objective, store["base_score"])
    return objective, base, np.float32(model["unit"])


def _scores(
    site: Site, subset: str, weights: Array, n_bins: int, residual_range: float
) -> dict[str, Array]:
    store = site.store
    (objective, base, unit), shape = _scale(store), _shape(store)
    scaled = weights_in_unit(shape, weights, unit)
    margins = base + head_margins(shape, scaled, store[f"{subset}.outputs"])
    return score_fields(site, subset, objective, margins, n_bins, float(base[0]), residual_range)


def final(site: Site, request: FinalRequest) -> FinalReply:
    """Score the finished model, and store it."""
    store = site.store
    shape = _shape(store)
    _check_weights(site, request, shape)
    scores: dict[str, Array] = {}
    for subset in SUBSETS:
        scores |= _scores(site, subset, request.weights, request.score_bins, request.residual_range)
    scaled = weights_in_unit(shape, request.weights, _scale(store)[2])
    scores["rates"] = learned_rates(shape, scaled, store["train.outputs"])
    facts, (ensembles, sets) = store.facts["model"], _ensembles(store)
    model = StackedModel(
        cast(Objective, store.facts["objective"]),
        np.array(store["base_score"]),
        tuple(store.facts["hello"]["columns"]),
        tuple(facts["classes"]),
        np.float32(facts["unit"]),
        ensembles,
        shape,
        request.weights,
        sets,
        stored_categories(store),
    )
    write_atomically(store.folder / "model.json", to_json(model).encode())
    store.forget()
    return FinalReply(**scores)


def _check_weights(site: Site, request: AverageRequest | FinalRequest, shape: HeadShape) -> None:
    if len(request.weights) != shape.n_weights:
        rule = f"must be {shape.n_weights}, got {len(request.weights)}"
        raise ProtocolError(site.name, type(request).__name__, "weights", rule)


HANDLERS: Mapping[type[Request], Handler] = {
    FitRequest: fit,
    ShareRequest: share,
    AverageRequest: average,
    FinalRequest: final,
}
