"""Scores at a party: of a finished model or a round, and of a local model to compare them with.

Horizontal parties send sums, from which the server computes the scores of all rows. In a vertical
run only the active party has labels, and sends scores.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar, cast

import numpy as np

from clients.handshake import Coded
from clients.vertical.party import Aligned
from fedapp import metrics
from fedapp.arrays import Floats
from fedapp.data.labels import class_ids, label_texts, numbers_of
from fedapp.data.partition import SUBSETS, WATCHED
from fedapp.data.scratch import joined
from fedapp.errors import DataError, ProtocolError, as_protocol_error
from fedapp.home import write_atomically
from fedapp.messages.fields import LONGEST, Array, check_fields, check_sizes
from fedapp.messages.scoring import (
    BalanceReply,
    BalanceRequest,
    EvaluateReply,
    EvaluateRequest,
    ScoreOrder,
    Trees,
    arrays_of,
)
from fedapp.metrics.adders import DOUBLES, Adder
from fedapp.metrics.survival import Cells
from fedapp.records.document import from_text, kind_of
from fedapp.site.account import planned
from fedapp.site.roles import Order, handlers, role
from fedapp.site.sums import Sums, adder_of
from fedapp.trees.calibration import calibrated
from fedapp.trees.categories import Categories, category_counts
from fedapp.trees.custom import CUSTOM
from fedapp.trees.forest.bagged import BaggedForest
from fedapp.trees.linear import LinearModel
from fedapp.trees.losses import PLAIN, LossParameters, Objective, one_hot
from fedapp.trees.model import Described, Ensemble, Grown, Tree, unpack_trees
from fedapp.trees.objective import is_of_rows, margins_of, transform
from fedapp.trees.predict import add_trees, predict_margins
from fedapp.trees.shown import cuts_of, few_rows
from fedapp.trees.xgboost import grow_trees

log = logging.getLogger("fedapp.site")
BATCH_ROWS = 2**16
# The local model that warns of a worse federated one; takes about a second.
ROUNDS, MOST_ROWS = 50, 2**14
PARAMETERS = {"max_bin": 256, "max_depth": 6, "eta": 0.3, "nthread": 1}


M = TypeVar("M", bound=Ensemble | BaggedForest | LinearModel)
# Kinds of models that the shared request scores, and their margins of rows.
BOOSTED: tuple[type[Any], Callable[..., Array]] = Ensemble, predict_margins
BAGGED: tuple[type[Any], Callable[..., Array]] = BaggedForest, BaggedForest.margins


@role
class Scored(Coded):
    """State of a horizontal party whose rows are scored; roles of methods extend it."""

    order = Order({}, any_time={BalanceRequest, EvaluateRequest})
    # (n_rows, n_outputs) by subset, without test rows: of the model so far
    margins: Mapping[str, Floats] = {}

    def balance(self, request: BalanceRequest) -> BalanceReply:
        """Set the factor of positive rows, which follows from the labels of all parties."""
        is_due = self.is_coded and not self.loss.scale_pos_weight
        rule = "must be sent once, after the labels were summed without it"
        check_fields(self.name, request, ("scale_pos_weight", is_due, rule))
        self.loss = replace(self.loss, scale_pos_weight=request.scale_pos_weight)
        return BalanceReply()

    def evaluate(self, request: EvaluateRequest) -> Sums:
        """Sums and score histograms of the train, validation and test rows."""
        adder = adder_of(self.site.store)
        beginning = request.model[:LONGEST].tobytes().decode(errors="replace")
        how = BOOSTED if kind_of(beginning) != BaggedForest.KIND else BAGGED
        scores, model = self.score_subsets(request, *how, adder)
        scores["few"] = self.few_rows(model.trees)
        self.end()
        return Sums([*scores.values()], EvaluateReply)

    def score_subsets(
        self,
        asked: ScoreOrder,
        kind: type[M],
        predict: Callable[..., Array],
        adder: Adder = DOUBLES,
        subsets: Sequence[str] = SUBSETS,
        least_bin_rows: int | None = None,
    ) -> tuple[dict[str, Array], M]:
        """Scores of an ``EvaluateReply``, by a model of any kind, which is stored; the model.

        `least_bin_rows` takes the place of the site's min-bin-rows.
        """
        try:
            model = from_text(asked.model.tobytes().decode(), kind)
        except (DataError, UnicodeDecodeError) as error:
            rule = str(error).removeprefix("model ")
            raise ProtocolError(self.name, type(asked).__name__, "model", rule) from error
        run = self.objective, self.columns, self.classes, self.categories
        fits = (model.objective, model.columns, model.classes, model.categories) == run
        rule = "must have the objective, columns, categories and classes of the run"
        check_fields(self.name, asked, ("model", fits, rule))
        before = dict[str, Array]()
        for subset in subsets:
            # Rows are values, with base margins if there are any.
            batches = (predict(model, *rows) for rows in self._batches(subset))
            no_rows = np.empty((0, model.n_outputs), dtype=np.float32)
            before[subset] = joined(batches, len(self.values[subset]), no_rows)
        curve = getattr(model, "curve", None)
        scores = self.score_fields(
            {subset: calibrated(curve, margins) for subset, margins in before.items()},
            asked.score_bins,
            center=float(model.base_margin[0]),
            residual_range=asked.residual_range,
            adder=adder,
            least_bin_rows=least_bin_rows,
            before=before,
            cells=Cells(asked.time_points, asked.score_edges),
        )
        write_atomically(self.folder / "model.json", asked.model.tobytes())
        return scores, model

    def few_rows(self, trees: Iterable[Tree]) -> Array:
        """What a finished model shows of few of the party's rows; see ``fedapp.trees.shown``."""
        batches = (batch[0] for subset in SUBSETS for batch in self._batches(subset))
        least = planned(self.site.store)["least_rows_per_name"]
        return few_rows(batches, cuts_of(trees, len(self.columns)), self.categories, least)

    def score_fields(
        self,
        margins: Mapping[str, Array],
        n_bins: int,
        center: float,
        residual_range: float = 1.0,
        adder: Adder = DOUBLES,
        least_bin_rows: int | None = None,
        before: Mapping[str, Array] = MappingProxyType({}),
        cells: Cells | None = None,
    ) -> dict[str, Array]:
        """Scores of the rows of some subsets, as fields of a reply.

        ``margins`` are float32, shape (n_rows, n_outputs), by subset, ``before`` the same without
        calibration. Margins of test rows come from the finished model only, so the site compares
        these with a local model's.
        """
        scores = dict[str, Array]()
        least = self.config.min_bin_rows if least_bin_rows is None else least_bin_rows
        for subset, of_rows in margins.items():
            labels, weights = self.labels[subset], self.weights[subset]
            with as_protocol_error(self.name, "message", "model"):  # its margins may be NaN
                statistics = metrics.statistics(
                    self.objective,
                    of_rows,
                    labels,
                    weights,
                    n_bins,
                    residual_range,
                    center,
                    least,
                    self.eval_metrics,
                    adder,
                    before.get(subset),
                    cells,
                )
            scores |= {f"{subset}_sums": statistics.sums, f"{subset}_scores": statistics.histogram}
            if subset == "test" and "test" in self.values and not self.config.simulated:
                values = self.values["train"][:, : len(self.columns)]
                train = values, self.labels["train"], self.weights["train"]
                test = self.values["test"], labels, weights
                warn_if_worse(self.objective, of_rows, train, test, self.categories, self.loss)
        return scores

    def _batches(self, subset: str) -> Iterator[tuple[Array, ...]]:
        """Batches of values, with base margins if the rows have any."""
        rows = self.values[subset]
        for start in range(0, len(rows), BATCH_ROWS):
            some = slice(start, start + BATCH_ROWS)
            margins = (self.base_margins[subset][some],) if self.base_margins else ()
            # Without a last column of times, which is no feature (``clients.cuts``).
            yield np.ascontiguousarray(rows[some, : len(self.columns)]), *margins

    def read_trees(self, request: Trees) -> Grown:
        """Trees of a request, checked."""
        with as_protocol_error(self.name, type(request).__name__, "trees"):
            grown = unpack_trees(arrays_of(request), self.category_counts)
        n_trees = len(grown.trees)
        rule = f"must be a multiple of {self.n_outputs}, got {n_trees}"
        check_fields(self.name, request, ("trees", n_trees % self.n_outputs == 0, rule))
        return grown

    def begin_margins(self, request: Any) -> None:
        """Start from the margins of the table, else the run's ``base_margin``, which is checked."""
        check_sizes(self.name, request, n_outputs=self.n_outputs)
        if not self.margins:
            self.margins = {
                subset: self.base_margins[subset][:, None]
                if self.base_margins
                else np.tile(request.base_margin, (len(self.labels[subset]), 1))
                for subset in WATCHED
            }


def interval_fields(
    objective: str,
    rows: tuple[Floats, Floats, Floats],
    eval_metrics: Sequence[str] = (),
) -> dict[str, Any]:
    """Intervals of the scores of test rows, as fields of a reply; none of weighted rows.

    ``rows`` are margins, labels and weights.
    """
    spans = metrics.row_intervals(objective, *rows, eval_metrics)
    ends = np.array([*spans.values()], dtype=np.float64).reshape(-1, 2)
    return {"interval_names": tuple(spans), "intervals": ends}


def score_arrays(scores: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Scores by subset, as fields of a reply."""
    values = {subset: list(by_name.values()) for subset, by_name in scores.items()}
    arrays = {
        f"{subset}_scores": np.array(of_subset, dtype=np.float64)
        for subset, of_subset in values.items()
    }
    return {"score_names": tuple(scores["train"]), **arrays}


def compare_with_local(
    rows: Aligned, labels: Array, objective: str, margins: Array, loss: LossParameters = PLAIN
) -> None:
    """Warn in the site's log of few validation rows of a class, and if its columns only predict
    better; margins are of test rows."""
    valid = labels[rows.n_rows.of("valid")]
    share = float(valid.mean()) if len(valid) else 0.0
    few = metrics.few_of_class(min(share, 1 - share), len(valid))
    if few and objective == "binary:logistic":
        log.warning("%s: %s", rows.name, few)
    if not rows.config.simulated and rows.values.shape[1]:
        train, test = (
            [array[rows.n_rows.of(subset)] for array in (rows.values, labels, rows.weights)]
            for subset in ("train", "test")
        )
        warn_if_worse(objective, margins, train, test, rows.categories, loss)


def warn_if_worse(
    objective: str,
    margins: Array,
    train: Sequence[Array],
    test: Sequence[Array],
    categories: Categories,
    loss: LossParameters = PLAIN,
) -> None:
    """Warn in the site's log if the federated model is worse on its test rows.

    Worse: the mean squared error is larger by more than two standard errors of the difference.
    ``margins`` is float32, shape (n_rows, n_outputs); ``train`` and ``test`` are values, labels and
    weights, and a large training set is thinned to every k-th row.
    """
    values, labels, weights = (rows[:: 1 + len(rows) // MOST_ROWS] for rows in train)
    rows, width = (len(labels), len(margins)), margins.shape[1]
    if objective == CUSTOM or not (is_of_rows(objective) and weights.any() and test[2].any()):
        return
    name = cast(Objective, objective)
    widths = category_counts(categories, values.shape[1])

    def truth(of: Array) -> Array:
        return of[:, None] if width == 1 else one_hot(of, np.empty((0, width), np.float32))

    mean = margins_of(
        name, np.average(truth(labels).astype(np.float64), axis=0, weights=weights)[None]
    )
    starts = [np.tile(mean, (n_rows, 1)) for n_rows in rows]
    train_rows = values, labels, weights
    grown = grow_trees(name, width, PARAMETERS, train_rows, starts[0], ROUNDS, widths, loss)
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


def prediction_scores(
    model: Described,
    predictions: Array,
    labels: Array,
    weights: Array | None,
    threshold: float | None,
) -> tuple[dict[str, float], str]:
    """Score predictions, (n_rows, n_outputs), by their labels, or say why there are no scores.

    `labels` are names or numbers, as in a ``Table``; `threshold` is a probability for two classes,
    or None if none was chosen.
    """
    objective, classes = model.objective, model.classes
    if classes and (others := set(label_texts(np.unique(labels)).tolist()) - set(classes)):
        return {}, f"no scores: the label has {len(others)} values that are no class of the model"
    if not classes and numbers_of(labels) is None:
        return {}, "no scores: the label must be numbers for a regression"
    margins = margins_of(objective, predictions.astype(np.float64))
    labels = class_ids(labels, classes)
    weights = np.ones(len(labels), np.float32) if weights is None else weights
    scores = metrics.pooled(objective, margins, labels, weights)
    if threshold is not None:
        least = float(np.log(threshold) - np.log1p(-threshold)) if threshold else -np.inf
        scores |= metrics.scores_from_margin(margins, labels, weights, least)
        scores["threshold"] = threshold
    return scores, ""


HANDLERS = handlers(Scored)
