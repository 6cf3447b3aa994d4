"""Score a finished boosted model on a party's rows, store it, and drop the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np

from clients.dictionary import kept_categories
from clients.labels import CLASSES, METRICS, loss_parameters
from clients.local_model import warn_if_worse
from clients.margins import base_margins
from fedapp import metrics
from fedapp.data.partition import SUBSETS
from fedapp.errors import DataError, ProtocolError, as_protocol_error
from fedapp.histograms.sketch import surrogates
from fedapp.home import write_atomically
from fedapp.messages.fields import Array
from fedapp.messages.scoring import EvaluateReply, EvaluateRequest, SumScoresRequest
from fedapp.metrics.sums import DOUBLES, Adder, WholeNumbers
from fedapp.site.answer import Handler, Site
from fedapp.site.store import Store
from fedapp.site.sums import Sums, bounds_of
from fedapp.trees.model import Described, from_json
from fedapp.trees.objective import Objective
from fedapp.trees.predict import predict_margins
from fedapp.trees.sets import Categories

BATCH_ROWS = 2**16


class Scored(Described, Protocol):
    """The parts of a model that scoring uses."""

    @property
    def categories(self) -> Categories: ...
    @property
    def n_outputs(self) -> int: ...
    @property
    def base_margin(self) -> Array: ...


M = TypeVar("M", bound=Scored)


def evaluate_sums(site: Site, request: SumScoresRequest) -> Sums:
    """As ``evaluate``, in whole numbers for secure aggregation."""
    return score_model_sums(site, request, from_json, predict_margins)


def evaluate(site: Site, request: EvaluateRequest) -> EvaluateReply:
    """Sums and score histograms of the train, validation and test rows."""
    return score_model(site, request, from_json, predict_margins)


def score_model(
    site: Site, request: EvaluateRequest, read: Callable[[str], M], predict: Callable[..., Array]
) -> EvaluateReply:
    """Score with a model of any kind, then drop the rows; ``read`` may raise a DataError."""
    reply = EvaluateReply(**score_subsets(site, request, read, predict, DOUBLES))
    site.store.forget()
    return reply


def score_model_sums(
    site: Site, request: EvaluateRequest, read: Callable[[str], M], predict: Callable[..., Array]
) -> Sums:
    """As ``score_model``, in whole numbers for secure aggregation."""
    adder = WholeNumbers(bounds_of(site.store))
    sums = Sums(list(score_subsets(site, request, read, predict, adder).values()))
    site.store.forget()
    return sums


def score_subsets(
    site: Site,
    request: EvaluateRequest,
    read: Callable[[str], M],
    predict: Callable[..., Array],
    adder: Adder,
    subsets: Sequence[str] = SUBSETS,
) -> dict[str, Array]:
    """Fields of an ``EvaluateReply`` for some subsets; stores the model, keeps the rows."""
    store, message = site.store, type(request).__name__
    try:
        model = read(request.model.tobytes().decode())
    except (DataError, UnicodeDecodeError) as error:
        rule = str(error).removeprefix("model ")
        raise ProtocolError(site.name, message, "model", rule) from error
    facts = store.facts
    expected = facts["objective"], facts["hello"]["columns"], facts[CLASSES], kept_categories(store)
    if (model.objective, list(model.columns), list(model.classes), model.categories) != expected:
        rule = "must have the objective, columns, categories and classes of the run"
        raise ProtocolError(site.name, message, "model", rule)
    scores: dict[str, Array] = {}
    for subset in subsets:
        # Rows are values, with base margins if there are any.
        batches = [predict(model, *rows) for rows in _batches(site.store, subset)]
        margins = np.concatenate([*batches, np.empty((0, model.n_outputs), dtype=np.float32)])
        center, widest = float(model.base_margin[0]), request.residual_range
        scores |= score_fields(
            site, subset, model.objective, margins, request.score_bins, center, widest, adder
        )
    write_atomically(site.store.folder / "model.json", request.model.tobytes())
    return scores


def score_fields(
    site: Site,
    subset: str,
    objective: Objective,
    margins: Array,
    n_bins: int,
    center: float,
    residual_range: float = 1.0,
    adder: Adder = DOUBLES,
) -> dict[str, Array]:
    """Scores of one subset, as fields of a reply.

    ``margins`` is float32, shape (n_rows, n_outputs). Margins of test rows come from the finished
    model only, so the site compares these with a local model's.
    """
    labels, weights = site.store[f"{subset}.labels"], site.store[f"{subset}.weights"]
    settings = n_bins, residual_range, center, site.config.min_bin_rows, site.store.facts[METRICS]
    with as_protocol_error(site.name, "message", "model"):  # its margins may be NaN
        statistics = metrics.statistics(objective, margins, labels, weights, *settings, adder)
    if subset == "test" and "test.values" in site.store and not site.config.simulated:
        values = np.concatenate([batch[0] for batch in _batches(site.store, "train")])
        train = values, site.store["train.labels"], site.store["train.weights"]
        test = site.store["test.values"], labels, weights
        warn_if_worse(site, objective, margins, train, test, loss_parameters(site.store))
    return {f"{subset}_sums": statistics.sums, f"{subset}_scores": statistics.histogram}


def _batches(store: Store, subset: str) -> Iterator[tuple[Array, ...]]:
    """Batches of values, with base margins if the rows have any."""
    margins = base_margins(store, subset)
    replaced = f"{subset}.values" not in store  # by bins, whose surrogates are scored
    rows = store["codes" if replaced else f"{subset}.values"]
    for start in range(0, len(rows), BATCH_ROWS):
        batch = rows[start : start + BATCH_ROWS]
        if replaced:
            missing_code = store.facts["missing_code"]
            batch = surrogates(batch, missing_code, store["representatives"], store["offsets"])
        batch_margins = () if margins is None else (margins[start : start + BATCH_ROWS],)
        yield np.ascontiguousarray(batch), *batch_margins


HANDLERS: Mapping[type[EvaluateRequest], Handler] = {
    EvaluateRequest: evaluate,
    SumScoresRequest: evaluate_sums,
}
