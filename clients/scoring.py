"""Scores at a party: of a finished model or a round, and of a local model to compare them with.

Horizontal parties send sums, from which the server computes the scores of all rows. In a vertical
run only the active party has labels, and sends scores.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from clients.handshake import CLASSES, METRICS, loss_parameters, run_outputs, stored_categories
from clients.vertical import Aligned
from fedapp import metrics
from fedapp.data.labels import class_ids, label_texts
from fedapp.data.partition import SUBSETS, WATCHED
from fedapp.errors import DataError, ProtocolError, as_protocol_error
from fedapp.histograms.sketch import surrogates
from fedapp.home import write_atomically
from fedapp.messages.fields import Array, Reply
from fedapp.messages.scoring import (
    EvaluateReply,
    EvaluateRequest,
    SumScoresRequest,
    Trees,
    arrays_of,
)
from fedapp.metrics.sums import DOUBLES, Adder
from fedapp.site.answer import Handler, Site
from fedapp.site.store import Store
from fedapp.site.sums import Sums, adder_of, leaving
from fedapp.trees.categories import Categories
from fedapp.trees.model import Described, Grown, from_json, unpack_trees
from fedapp.trees.objective import (
    CUSTOM,
    PLAIN,
    LossParameters,
    Objective,
    margins_of,
    one_hot,
    transform,
)
from fedapp.trees.predict import add_trees, predict_margins
from fedapp.trees.sets import Ints, category_counts
from fedapp.trees.xgboost import grow_trees

log = logging.getLogger("fedapp.site")
BATCH_ROWS = 2**16
# The local model that warns of a worse federated one; takes about a second.
ROUNDS, MOST_ROWS = 50, 2**14
PARAMETERS = {"max_bin": 256, "max_depth": 6, "eta": 0.3, "nthread": 1}


class Scored(Described, Protocol):
    """The parts of a model that scoring uses."""

    @property
    def categories(self) -> Categories: ...
    @property
    def n_outputs(self) -> int: ...
    @property
    def base_margin(self) -> Array: ...


M = TypeVar("M", bound=Scored)


def evaluate(site: Site, request: EvaluateRequest) -> Reply | Sums:
    """Sums and score histograms of the train, validation and test rows."""
    adder = adder_of(site.store, request)
    scores = score_subsets(site, request, from_json, predict_margins, adder)
    site.store.forget()
    return leaving(request, EvaluateReply, scores)


def score_model(
    site: Site, request: EvaluateRequest, read: Callable[[str], M], predict: Callable[..., Array]
) -> EvaluateReply:
    """Score with a model of any kind, then drop the rows; ``read`` may raise a DataError."""
    reply = EvaluateReply(**score_subsets(site, request, read, predict, DOUBLES))
    site.store.forget()
    return reply


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
    expected = (
        facts["objective"],
        facts["hello"]["columns"],
        facts[CLASSES],
        stored_categories(store),
    )
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
    margins = store.find(f"{subset}.base_margins")
    replaced = f"{subset}.values" not in store  # by bins, whose surrogates are scored
    rows = store["codes" if replaced else f"{subset}.values"]
    for start in range(0, len(rows), BATCH_ROWS):
        batch = rows[start : start + BATCH_ROWS]
        if replaced:
            missing_code = store.facts["missing_code"]
            batch = surrogates(batch, missing_code, store["representatives"], store["offsets"])
        batch_margins = () if margins is None else (margins[start : start + BATCH_ROWS],)
        yield np.ascontiguousarray(batch), *batch_margins


def score_arrays(scores: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Scores by subset, as fields of a reply."""
    values = {subset: list(by_name.values()) for subset, by_name in scores.items()}
    arrays = {
        f"{subset}_scores": np.array(each, dtype=np.float64) for subset, each in values.items()
    }
    return {"score_names": tuple(scores["train"]), **arrays}


def compare_with_local(
    rows: Aligned, labels: Array, objective: str, margins: Array, loss: LossParameters = PLAIN
) -> None:
    """Warn in the site's log if its columns only predict better; margins are of test rows."""
    if not rows.config.simulated and rows.values.shape[1]:
        train, test = (
            [each[rows.rows_of(subset)] for each in (rows.values, labels, rows.weights)]
            for subset in ("train", "test")
        )
        warn_if_worse(rows.site, objective, margins, train, test, loss)


def warn_if_worse(
    site: Site,
    objective: str,
    margins: Array,
    train: Sequence[Array],
    test: Sequence[Array],
    loss: LossParameters = PLAIN,
) -> None:
    """Warn in the site's log if the federated model is worse on its test rows.

    Worse: the mean squared error is larger by more than two standard errors of the difference.
    ``margins`` is float32, shape (n_rows, n_outputs); ``train`` and ``test`` are values, labels and
    weights, and a large training set is thinned to every k-th row.
    """
    values, labels, weights = (rows[:: 1 + len(rows) // MOST_ROWS] for rows in train)
    rows, width = (len(labels), len(margins)), margins.shape[1]
    if objective == CUSTOM or not (weights.any() and test[2].any()):
        return
    name = cast(Objective, objective)
    widths = category_counts(stored_categories(site.store), values.shape[1])

    def truth(of: Array) -> Array:
        return of[:, None] if width == 1 else one_hot(of, np.empty((0, width), np.float32))

    mean = margins_of(
        name, np.average(truth(labels).astype(np.float64), axis=0, weights=weights)[None]
    )
    starts = [np.tile(mean, (n_rows, 1)) for n_rows in rows]
    settings = PARAMETERS, (values, labels, weights), starts[0], ROUNDS, widths, loss
    grown = grow_trees(name, width, *settings)
    local = add_trees(starts[1], grown.trees, test[0], grown.sets)
    federated, local_only = (
        ((transform(name, of_model).astype(np.float64) - truth(test[1])) ** 2).sum(axis=1) * test[2]
        for of_model in (margins, local)
    )
    if (federated - local_only).sum() > 2 * np.linalg.norm(federated - local_only):
        log.warning(
            "the federated model's mean squared error on %d test rows of this site is %.4g, that "
            "of XGBoost trained on this site's rows only %.4g: other parties' rows may be of "
            "another kind, or a party may have sent sums that are not of its rows",
            *(len(margins), federated.sum() / test[2].sum(), local_only.sum() / test[2].sum()),
        )


def read_trees(site: Site, request: Trees, widths: Ints) -> Grown:
    """Trees of a request, checked; ``widths``: categories of each column, 0 if numeric."""
    message, width = type(request).__name__, run_outputs(site.store)
    with as_protocol_error(site.name, message, "trees"):
        grown = unpack_trees(arrays_of(request), widths)
    if len(grown.trees) % width:
        rule = f"must be a multiple of {width}, got {len(grown.trees)}"
        raise ProtocolError(site.name, message, "trees", rule)
    return grown


def check_outputs(site: Site, request: object, field: str) -> None:
    """Check that a field of a request has one value per output."""
    width, n_values = run_outputs(site.store), len(getattr(request, field))
    if n_values != width:
        rule = f"must be {width}, one an output, got {n_values}"
        raise ProtocolError(site.name, type(request).__name__, field, rule)


def begin_margins(store: Store, base_margin: Array) -> None:
    """Margins before the first tree: the table's base margins, else the run's ``base_margin``."""
    for subset in WATCHED:
        margins, n_rows = store.find(f"{subset}.base_margins"), len(store[f"{subset}.labels"])
        store[f"{subset}.margins"] = (
            np.tile(base_margin, (n_rows, 1)) if margins is None else margins[:, None]
        )


def prediction_scores(
    objective: Objective,
    classes: Sequence[str],
    predictions: Array,
    labels: Array,
    weights: Array | None,
    threshold: float | None,
) -> tuple[dict[str, float], str]:
    """Score predictions, (n_rows, n_outputs), by their labels, or say why there are no scores.

    `labels` are names or numbers, as in a ``Table``; `threshold` is a probability for two classes,
    or None if none was chosen.
    """
    if classes and (others := set(np.unique(label_texts(labels)).tolist()) - set(classes)):
        return {}, f"no scores: the label has {len(others)} values that are no class of the model"
    if not classes and labels.dtype.kind == "U":
        return {}, "no scores: the label must be numbers for a regression"
    scored = (
        margins_of(objective, predictions.astype(np.float64)),
        class_ids(labels, classes),
        np.ones(len(labels), np.float32) if weights is None else weights,
    )
    scores = metrics.pooled(objective, *scored)
    if threshold is not None:
        margin = float(np.log(threshold) - np.log1p(-threshold)) if threshold else -np.inf
        scores |= metrics.scores_from_margin(*scored, margin) | {"threshold": threshold}
    return scores, ""


HANDLERS: Mapping[type[EvaluateRequest], Handler] = {
    EvaluateRequest: evaluate,
    SumScoresRequest: evaluate,
}
