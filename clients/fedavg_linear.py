"""Train a linear model on from the average of all parties'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from clients.dictionary import kept_categories
from clients.fedavg_linear_sums import means, model_sums, open_sums, spreads
from clients.labels import CLASSES, keep_coding
from clients.scoring import score_fields, score_model, score_model_sums
from fedapp.data.partition import WATCHED
from fedapp.errors import ProtocolError
from fedapp.linear import (
    Descent,
    LinearModel,
    descend,
    linear_from_json,
    moments,
    predict_linear,
)
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
from fedapp.metrics.adders import DOUBLES, Adder, WholeNumbers
from fedapp.site.answer import Handler, Site
from fedapp.site.masks import Sums, bounds_of
from fedapp.trees.objective import Objective


def sum_up(site: Site, request: MomentsRequest) -> MomentsReply:
    """Sums of the labels, moments of the columns."""
    coded = keep_coding(site, request)
    rows = site.store["train.values"], site.store["train.weights"]
    found = moments(*rows, kept_categories(site.store))
    return MomentsReply(
        **coded,
        counts=found.counts,
        means=found.means,
        squares=found.squares,
    )


def train(site: Site, request: AverageRequest) -> AverageReply:
    """Lines 5 to 10 of Algorithm 1: local epochs in mini-batches."""
    trained, scores = _trained(site, request, DOUBLES)
    return AverageReply(weights=trained.weights, bias=trained.bias, **scores)


def train_sums(site: Site, request: AverageSumsRequest) -> Sums:
    """The same as whole numbers, to be added to those of all others."""
    trained, scores = _trained(site, request, WholeNumbers(bounds_of(site.store)))
    return Sums([*model_sums(site, request, trained), *scores.values()])


def _trained(
    site: Site, request: AverageRequest, adder: Adder
) -> tuple[LinearModel, dict[str, Array]]:
    """The model trained on, and scores of the one that was sent, added up by ``adder``."""
    model = _model(site, request)
    descent = Descent(
        request.epochs, request.batch_size, request.learning_rate, request.decay, request.l2
    )
    rng = site.random(request.seed, request.round_id)
    arrays = (site.store[f"train.{name}"] for name in ("values", "labels", "weights"))
    values, labels, weights = arrays
    trained = descend(model, (values, labels, weights), descent, rng)
    return trained, _scores(site, model, request, adder)


def _model(site: Site, request: AverageRequest) -> LinearModel:
    """The model of a request, held against the party's table."""
    objective = cast(Objective, site.store.facts["objective"])
    columns = tuple(site.store.facts["hello"]["columns"])
    arrays = (request.means, request.scales, request.weights, request.bias)
    if list(request.classes) != site.store.facts[CLASSES]:
        raise ProtocolError(site.name, "AverageRequest", CLASSES, "must be those of the run")
    model = LinearModel(objective, columns, request.classes, *arrays, kept_categories(site.store))
    due = len(model.inputs), model.n_outputs
    if request.weights.shape != due:
        rule = f"must be of shape {due}, got {request.weights.shape}"
        raise ProtocolError(site.name, "AverageRequest", "weights", rule)
    if not (request.scales > 0).all():
        raise ProtocolError(site.name, "AverageRequest", "scales", "must be > 0")
    return model


def _scores(
    site: Site, model: LinearModel, request: AverageRequest, adder: Adder
) -> dict[str, Array]:
    """Scores of the model that was sent."""
    scores, center = dict[str, Array](), float(model.base_margin[0])
    for subset in WATCHED:
        margins = predict_linear(model, site.store[f"{subset}.values"])
        how = margins, request.score_bins, center
        scores |= score_fields(site, subset, model.objective, *how, adder=adder)
    return scores


def score(site: Site, request: ScoreRequest) -> EvaluateReply:
    """Scores of the finished model on all rows."""
    return score_model(site, request, linear_from_json, predict_linear)


def score_sums(site: Site, request: ScoreSumsRequest) -> Sums:
    """The same as whole numbers, to be added to those of all others."""
    return score_model_sums(site, request, linear_from_json, predict_linear)


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
