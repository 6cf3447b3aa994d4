"""FedAvg of linear models at a party: train on from the average."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np

from clients.handshake import CLASSES, keep_coding, stored_categories
from clients.scoring import score_fields, score_model, score_model_sums
from clients.secagg import join, label_sums
from fedapp.data.partition import WATCHED
from fedapp.errors import DataError, ProtocolError
from fedapp.messages.fedavg_linear import (
    AverageReply,
    AverageRequest,
    AverageSumsRequest,
    MeansRequest,
    MomentsReply,
    MomentsRequest,
    OpenRequest,
    ScoreRequest,
    ScoreSumsRequest,
    SpreadsRequest,
)
from fedapp.messages.fields import Array, Request
from fedapp.messages.scoring import EvaluateReply
from fedapp.metrics.sums import DOUBLES, Adder, WholeNumbers
from fedapp.site.answer import Handler, Site
from fedapp.site.store import Store
from fedapp.site.sums import Sums, bounds_of
from fedapp.trees.linear import (
    Descent,
    LinearModel,
    count_powers,
    descend,
    largest_powers,
    linear_from_json,
    moments,
    per_input,
    predict_linear,
    sum_squares,
    sum_values,
    whole_model,
    whole_weight,
)
from fedapp.trees.objective import Objective
from fedapp.trees.sets import category_counts

POWERS = "powers"  # in a store: powers of two that bound the inputs
MEANS_RECEIVED = "means_told"  # a fact: the means have been received


def sum_up(site: Site, request: MomentsRequest) -> MomentsReply:
    """Sums of the labels, moments of the columns."""
    coded = keep_coding(site, request)
    rows = site.store["train.values"], site.store["train.weights"]
    column_moments = moments(*rows, stored_categories(site.store))
    return MomentsReply(
        **coded,
        counts=column_moments.counts,
        means=column_moments.means,
        squares=column_moments.squares,
    )


def train(site: Site, request: AverageRequest) -> AverageReply:
    """Algorithm 1, lines 5 to 10: local epochs in mini-batches."""
    trained, scores = _trained(site, request, DOUBLES)
    return AverageReply(weights=trained.weights, bias=trained.bias, **scores)


def train_sums(site: Site, request: AverageSumsRequest) -> Sums:
    """As ``train``, in whole numbers for secure aggregation."""
    bounds = bounds_of(site.store)
    trained, scores = _trained(site, request, WholeNumbers(bounds))
    weight = whole_weight(site.store["train.weights"], bounds)
    max_power = request.weight_power + bounds.exponent(0)
    if max_power < 0 or weight > 2**max_power:
        rule = f"must be no less than that of {site.name}"
        raise ProtocolError(site.name, "AverageSumsRequest", "weight_power", rule)
    # Weighted by the party's share of all parties' weight.
    theta = np.vstack((trained.weights, trained.bias))
    try:
        whole = whole_model(theta, weight, request.weight_power, trained.objective, bounds)
    except ValueError as error:
        way = (
            "a smaller fedavg-linear.learning-rate, a larger fedavg-linear.l2 or "
            "fedavg-linear.aggregation=plain may help"
        )
        raise DataError(f"{error}; {way}", site.name) from None
    return Sums([np.array([weight]), whole, *scores.values()])


def _trained(
    site: Site, request: AverageRequest, adder: Adder
) -> tuple[LinearModel, dict[str, Array]]:
    objective = cast(Objective, site.store.facts["objective"])
    columns = tuple(site.store.facts["hello"]["columns"])
    if list(request.classes) != site.store.facts[CLASSES]:
        raise ProtocolError(site.name, "AverageRequest", CLASSES, "must be those of the run")
    arrays = (request.means, request.scales, request.weights, request.bias)
    model = LinearModel(objective, columns, request.classes, *arrays, stored_categories(site.store))
    shape = len(model.inputs), model.n_outputs
    if request.weights.shape != shape:
        rule = f"must be of shape {shape}, got {request.weights.shape}"
        raise ProtocolError(site.name, "AverageRequest", "weights", rule)
    if not (request.scales > 0).all():
        raise ProtocolError(site.name, "AverageRequest", "scales", "must be > 0")
    descent = Descent(
        request.epochs, request.batch_size, request.learning_rate, request.decay, request.l2
    )
    rng = site.random(request.seed, request.round_id)
    values, labels, weights = (
        site.store[f"train.{name}"] for name in ("values", "labels", "weights")
    )
    trained = descend(model, (values, labels, weights), descent, rng)
    scores, center = dict[str, Array](), float(model.base_margin[0])
    for subset in WATCHED:
        margins = predict_linear(model, site.store[f"{subset}.values"])
        settings = margins, request.score_bins, center
        scores |= score_fields(site, subset, model.objective, *settings, adder=adder)
    return trained, scores


def score(site: Site, request: ScoreRequest) -> EvaluateReply:
    """Scores of the finished model on all rows."""
    return score_model(site, request, linear_from_json, predict_linear)


def score_sums(site: Site, request: ScoreSumsRequest) -> Sums:
    """As ``score``, in whole numbers for secure aggregation."""
    return score_model_sums(site, request, linear_from_json, predict_linear)


def open_sums(site: Site, request: OpenRequest) -> Sums:
    """Join the run, code labels and categories; sums of labels, sizes of values."""
    coded, store = keep_coding(site, request), site.store
    bounds = join(site, request, request)
    counts = count_powers(store["train.values"], store["train.weights"], _is_number(store))
    return Sums([label_sums(store, bounds), coded["unseen"], counts])


def means(site: Site, request: MeansRequest) -> Sums:
    """Sums of the inputs."""
    store, is_number = site.store, _is_number(site.store)
    rows = store["train.values"], store["train.weights"]
    if POWERS in store:
        raise ProtocolError(site.name, "MeansRequest", POWERS, "must be sent once")
    if len(request.powers) != len(is_number):
        rule = f"must be {len(is_number)}, got {len(request.powers)}"
        raise ProtocolError(site.name, "MeansRequest", POWERS, rule)
    if (request.powers < largest_powers(count_powers(*rows, is_number), is_number)).any():
        rule = f"must be no less than those of {site.name}"
        raise ProtocolError(site.name, "MeansRequest", POWERS, rule)
    categories = stored_categories(store)
    store[POWERS] = powers = per_input(request.powers, categories)
    return Sums([sum_values(*rows, categories, powers, bounds_of(store))], follows=True)


def spreads(site: Site, request: SpreadsRequest) -> Sums:
    """Sums of squared deviations of the inputs from the joint means."""
    store = site.store
    powers = np.asarray(store[POWERS])
    if MEANS_RECEIVED in store.facts:
        raise ProtocolError(site.name, "SpreadsRequest", "means", "must be sent once")
    if request.means.shape != powers.shape:
        rule = f"must be {len(powers)}, got {len(request.means)}"
        raise ProtocolError(site.name, "SpreadsRequest", "means", rule)
    if (np.abs(request.means) > np.ldexp(1.0, powers)).any():
        rule = "must be within the largest values"
        raise ProtocolError(site.name, "SpreadsRequest", "means", rule)
    store.facts[MEANS_RECEIVED] = True
    rows = store["train.values"], store["train.weights"], stored_categories(store)
    return Sums([sum_squares(*rows, request.means, powers, bounds_of(store))], follows=True)


def _is_number(store: Store) -> Array:
    """Which columns are numeric; bool, shape (n_columns,)."""
    counts = category_counts(stored_categories(store), store["train.values"].shape[1])
    is_number: Array = counts == 0
    return is_number


HANDLERS: Mapping[type[Request], Handler] = {
    MomentsRequest: sum_up,
    AverageRequest: train,
    ScoreRequest: score,
    OpenRequest: open_sums,
    MeansRequest: means,
    SpreadsRequest: spreads,
    AverageSumsRequest: train_sums,
    ScoreSumsRequest: score_sums,
}
