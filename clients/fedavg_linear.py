"""FedAvg of linear models at a party: train on from the average."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from clients.handshake import CLASSES, keep_coding, stored_categories
from clients.scoring import score_fields, score_model
from fedapp.data.partition import WATCHED
from fedapp.errors import ProtocolError
from fedapp.messages.fedavg_linear import (
    AverageReply,
    AverageRequest,
    MomentsReply,
    MomentsRequest,
    ScoreRequest,
)
from fedapp.messages.fields import Array, Request
from fedapp.messages.scoring import EvaluateReply
from fedapp.site.answer import Handler, Site
from fedapp.trees.linear import (
    Descent,
    LinearModel,
    descend,
    linear_from_json,
    moments,
    predict_linear,
)
from fedapp.trees.objective import Objective


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
    trained, scores = _trained(site, request)
    return AverageReply(weights=trained.weights, bias=trained.bias, **scores)


def _trained(site: Site, request: AverageRequest) -> tuple[LinearModel, dict[str, Array]]:
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
        scores |= score_fields(site, subset, model.objective, *settings)
    return trained, scores


def score(site: Site, request: ScoreRequest) -> EvaluateReply:
    """Scores of the finished model on all rows."""
    return score_model(site, request, linear_from_json, predict_linear)


HANDLERS: Mapping[type[Request], Handler] = {
    MomentsRequest: sum_up,
    AverageRequest: train,
    ScoreRequest: score,
}
