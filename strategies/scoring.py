"""Scores of models from the parties' sums, and early stopping by them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedapp import metrics
from fedapp.conversation import Check, Conversation, Progress, SavedModel, ask
from fedapp.data.columns import columns_json
from fedapp.data.partition import SUBSETS, WATCHED
from fedapp.errors import ConfigError, DataError, as_protocol_error
from fedapp.messages.fields import Reply, check_sizes
from fedapp.messages.handshake import HelloReply, LabelsReply
from fedapp.messages.scoring import EvaluateReply, EvaluateRequest
from fedapp.messages.secagg import EVERYONE
from fedapp.metrics.adders import DOUBLES, Adder
from fedapp.metrics.survival import Cells
from fedapp.records.document import Kind, to_text
from fedapp.settings import Settings
from fedapp.trees.calibration import FEWEST_ISOTONIC
from fedapp.trees.model import Described, Ensemble, Tree, importance
from fedapp.trees.objective import AUTO
from fedapp.trees.rounds import n_leaves
from fedapp.trees.shown import NOT_COUNTED, WHAT
from fedapp.trees.xgboost import to_xgboost_json
from strategies.handshake import Hellos
from strategies.method import Outcome, TreeStrategy

# Bins of the score histograms while training, and of the finished model.
ROUND_BINS, FINAL_BINS = 512, 2**12
UNDIVIDED = Cells(np.empty(0), np.empty(0))  # where labels are no times
Scores = dict[str, float]
AskToScore = Callable[[Hellos, EvaluateRequest, Check], Conversation[dict[str, EvaluateReply]]]

log = logging.getLogger("fedapp")


class Scored(Described, Kind, Protocol):
    """What the summary needs of a model."""

    @property
    def base_margin(self) -> npt.NDArray[np.float32]: ...


def party_statistics(reply: Reply, subset: str) -> metrics.Statistics:
    """One party's sums of one subset of its rows."""
    return metrics.Statistics(getattr(reply, f"{subset}_sums"), getattr(reply, f"{subset}_scores"))


def pooled_statistics(replies: Iterable[Reply], subset: str) -> metrics.Statistics:
    """Sum of the parties' statistics of one subset, in the order of the parties."""
    first, *others = [party_statistics(reply, subset) for reply in replies]
    return sum(others, start=first)


def scores_of(
    objective: str, totals: metrics.Statistics, eval_metrics: Sequence[str] = ()
) -> Scores:
    """Scores from sums over rows; empty where there are no rows."""
    return metrics.scores(objective, totals, eval_metrics) if totals.sums[0] else {}


def score_form(
    objective: str,
    n_outputs: int,
    n_bins: int = 2,
    eval_metrics: Sequence[str] = (),
    adder: Adder = DOUBLES,
) -> metrics.Statistics:
    """Statistics of no rows, whose shapes are those of any; the adder learns its units."""
    no_margins, no_rows = np.empty((0, n_outputs), np.float32), np.empty(0, np.float32)
    return metrics.statistics(
        objective, no_margins, no_rows, no_rows, n_bins, extra=eval_metrics, adder=adder
    )


def check_scores(
    party: str,
    reply: Reply,
    objective: str,
    n_outputs: int,
    eval_metrics: Sequence[str] = (),
    subsets: Sequence[str] = SUBSETS,
    n_bins: int = 0,
) -> None:
    """Check the form of a party's score sums, and that rows can have such sums.

    ``n_bins`` is by default that of a round, or of the finished model if all subsets are scored.
    """
    n_bins = n_bins or (FINAL_BINS if "test" in subsets else ROUND_BINS)
    form = score_form(objective, n_outputs, n_bins, eval_metrics)
    n_rows, n_bins = form.histogram.shape
    check_sizes(party, reply, n_sums=len(form.sums), n_score_rows=n_rows, n_score_bins=n_bins)
    for subset in subsets:
        with as_protocol_error(party, type(reply).__name__, f"{subset}_scores"):
            metrics.check_statistics(objective, party_statistics(reply, subset))


@dataclass(slots=True)
class History:
    """Validation scores of the rounds, by the metric of early stopping."""

    objective: str
    patience: int  # rounds without a better score before training stops; 0 never stops
    scores: tuple[float, ...] = ()  # of the rounds so far, NaN where there are no validation rows
    eval_metrics: tuple[str, ...] = ()  # beside the objective's default; stops by the first
    metric: str = ""  # to stop by; empty: the first
    must_stop: bool = True  # whether a missing score is an error; else training is not stopped

    def __post_init__(self) -> None:
        self.metric = self.metric or metrics.stopping_metric(self.objective, self.eval_metrics)

    @classmethod
    def of(cls, settings: Settings) -> History:
        return cls(
            settings.objective,
            settings.early_stopping_rounds,
            eval_metrics=settings.eval_metrics,
            must_stop=settings.asked_patience != AUTO,
        )

    def __len__(self) -> int:
        return len(self.scores)

    def add(self, valid: Mapping[str, float]) -> None:
        """Add the scores of a round; a missing score is an error if ``must_stop``."""
        score = valid.get(self.metric, float("nan"))
        if self.patience and np.isnan(score):
            rule = f"must have a validation {self.metric} to look at"
            need = (
                "an event before another row's time" if self.metric == "c-index" else "both classes"
            )
            why = f"got none: the validation rows need weight, and {need}"
            if self.must_stop:
                raise ConfigError(f"early-stopping-rounds {rule}, {why}")
            log.warning("early stopping is off: it %s, %s", rule, why)
            self.patience = 0
        self.scores = (*self.scores, score)

    def record_scores(
        self,
        replies: Mapping[str, Reply],
        n_rounds: int,
        trees: Sequence[Tree] = (),
        last_trees: Sequence[Tree] = (),
    ) -> Conversation[bool]:
        """Add the last round's scores, which arrive with the replies to the next request.

        ``last_trees`` are those whose leaves the report counts. Returns whether a score was due.
        """
        if n_rounds == len(self):
            return False
        pooled = (pooled_statistics(replies.values(), subset) for subset in WATCHED)
        train, valid = (scores_of(self.objective, p, self.eval_metrics) for p in pooled)
        self.add(valid)
        yield Progress(n_rounds, len(trees), n_leaves(last_trees), train, valid)
        return True

    def most_rounds(self, settings: Settings) -> int:
        """Rounds of a run: as many as without early stopping, if there is no score to stop by."""
        if not self.patience:
            settings = settings.model_copy(update={"asked_patience": 0})
        return settings.num_boost_round

    @property
    def best_round(self) -> int:
        """The round of the best score, from 1; the first of equals."""
        signed = np.array(self.scores) * (1 if metrics.larger_is_better(self.metric) else -1)
        return int(np.argmax(np.where(np.isnan(signed), -np.inf, signed))) + 1

    @property
    def stops(self) -> bool:
        """Whether the score has not improved for ``patience`` rounds."""
        return bool(self.patience and self.scores) and len(self) - self.best_round >= self.patience


def label_spread(parties: Mapping[str, HelloReply]) -> float:
    """Half the range of all labels, which residuals rarely leave; 1 for classification."""
    low = min(hello.label_low for hello in parties.values())
    return half_range(low, max(hello.label_high for hello in parties.values()))


def half_range(low: float, high: float) -> float:
    """Half the range of labels, as the next power of two; 1 where all are equal."""
    # The exact range would disclose single rows of other parties.
    return float(2 ** np.ceil(np.log2((high - low) / 2))) if high > low else 1.0


def weight_sums(replies: Mapping[str, LabelsReply]) -> dict[str, float]:
    """Sum of the sample weights of each party's training rows."""
    return {party: reply.weight_sum for party, reply in replies.items()}


def shares(weights: Mapping[str, float], parties: Iterable[str]) -> dict[str, float]:
    """Each party's share of the training rows, by their sample weights."""
    by_party = {party: weights[party] for party in parties}
    total = sum(by_party.values())
    if not total > 0:
        raise DataError("weight must be > 0 in some row of some party")
    return {party: weight / total for party, weight in by_party.items()}


def model_files(model: Kind) -> SavedModel:
    """A model's files; XGBoost's form of a boosted one lacks the kinds of the columns."""
    files = {"model.json": to_text(model)}
    if isinstance(model, Ensemble):
        files["model.xgb.json"] = to_xgboost_json(model)
        files["columns.json"] = columns_json(model.columns, model.kinds, model.categories)
    return SavedModel(files)


def ask_to_score(
    parties: Hellos, request: EvaluateRequest, check: Check
) -> Conversation[dict[str, EvaluateReply]]:
    """Have each party score the finished model."""
    return (yield from ask(parties.all(request), EvaluateReply, check))


def score_order(model: str, residual_range: float, cells: Cells = UNDIVIDED) -> dict[str, Any]:
    """Fields of an ``EvaluateRequest`` about a document."""
    return {
        "model": np.frombuffer(model.encode(), dtype=np.uint8),
        "score_bins": FINAL_BINS,
        "residual_range": residual_range,
        **cell_fields(cells),
    }


def cell_fields(cells: Cells) -> dict[str, Any]:
    """Fields of a ``TimeCells``."""
    return {"time_points": cells.points, "score_edges": cells.edges}


def boosted_facts(model: Ensemble, best_round: int | None) -> dict[str, Any]:
    """The summary's part about trees; ``best_round`` is what they were cut back to, or None."""
    return {
        "importance": importance(model),
        "trees": len(model.trees),
        "best_round": best_round,
    }


def score_summary(
    model: Scored,
    replies: Mapping[str, EvaluateReply],
    residual_range: float,
    eval_metrics: Sequence[str] = (),
) -> Outcome:
    """Scores of a finished model of any kind, by subset and party.

    Scores of single parties come from the sums that each has sent; a sum over all parties has
    none. ``residual_range`` is as in ``EvaluateRequest``. Intervals of scores of test rows are
    those of ``test_weight`` unweighted rows.
    """
    objective = model.objective
    center = float(model.base_margin[0])
    pooled = {subset: pooled_statistics(replies.values(), subset) for subset in SUBSETS}
    # The rows that choose the threshold of two classes, and the first bin at or above it.
    rows = metrics.threshold_rows(pooled["valid"].sums[0] > 0)
    threshold_bin = None
    if objective == "binary:logistic":
        threshold_bin = metrics.best_bin(pooled[rows])
    rarer = dict[str, float]()  # share of the rarer class in the weight of these rows
    if threshold_bin is not None:
        by_class = pooled[rows].histogram.sum(axis=1)
        rarer["rarer_class"] = float(by_class.min() / by_class.sum())

    def scored(statistics: Mapping[str, metrics.Statistics]) -> dict[str, Scores]:
        by_subset = {}
        for subset, totals in statistics.items():
            scores = by_subset[subset] = scores_of(objective, totals, eval_metrics)
            if scores and threshold_bin is not None:
                scores |= metrics.scores_from_bin(totals, threshold_bin, center)
        return by_subset

    by_party = {
        name: scored({subset: party_statistics(reply, subset) for subset in SUBSETS})
        for name, reply in replies.items()
        if name != EVERYONE
    }
    overall, test = scored(pooled), pooled["test"]
    curves: dict[str, Any] = {}
    scale: dict[str, Any] = {"residual_range": residual_range, "center": center}
    if overall["test"]:
        # No threshold is proposed that calls every row positive.
        curves = metrics.curves(objective, test, threshold_bin=threshold_bin or None, **scale)
    return {
        "classes": list(model.classes),
        "metrics": {**overall, "by_party": by_party},
        "test_weight": float(test.sums[0]),
        "intervals": metrics.intervals(objective, test, extra=eval_metrics, **scale),
        "class_weights": {
            name: metrics.class_weights(
                objective,
                sum((party_statistics(reply, s) for s in WATCHED), party_statistics(reply, "test")),
            )
            for name, reply in replies.items()
        },
        "threshold": threshold_note(overall, rows),
        **rarer,
        "curves": curves,
        "binning_errors": largest_errors(objective, pooled.values(), eval_metrics),
        "few": few_summary(reply.few for reply in replies.values()),
    }


def largest_errors(
    objective: str, subsets: Iterable[metrics.Statistics], eval_metrics: Sequence[str]
) -> dict[str, float]:
    """How far scores from bins may be from those of rows, in any subset that has some."""
    errors = [
        metrics.binning_errors(objective, one, eval_metrics) for one in subsets if one.sums[0] > 0
    ]
    every = {name: [one[name] for one in errors] for name in (errors or [{}])[0]}
    return {name: max(values, key=np.nan_to_num) for name, values in every.items()}


def calibration_summary(method: TreeStrategy[Any], has_curve: bool, n_rows: int) -> Outcome:
    """The summary's part about a calibration by ``n_rows`` validation rows; warns of few."""
    name = method.settings.calibration
    if name != "none" and not has_curve:
        method.warn_once(
            f"calibration={name} is left out: probabilities would not rise with margins, so the "
            "model does not order the validation rows"
        )
    if name == "isotonic" and n_rows < FEWEST_ISOTONIC:
        method.warn_once(
            f"calibration=isotonic has only {n_rows:,} validation rows, and follows chance below "
            f"{FEWEST_ISOTONIC:,}: platt needs fewer, and a larger valid-fraction has more"
        )
    return {"calibration": {"method": name, "rows": n_rows}} if has_curve else {}


def few_summary(numbers: Iterable[npt.NDArray[np.int64]]) -> dict[str, int]:
    """What the model shows of few rows of a party, over all parties; empty if not counted."""
    totals = np.stack(list(numbers))
    if (totals == NOT_COUNTED).any():
        return {}
    return dict(zip(WHAT, totals.sum(axis=0).tolist(), strict=True))


def threshold_note(scores: Mapping[str, Scores], rows: str) -> dict[str, Any]:
    """Where the threshold of two classes comes from: ``rows`` is the subset that chose it.

    Empty without one, and for 0: calling every row positive is no proposal.
    """
    value = scores[rows].get("threshold")
    return {"value": value, "rows": rows} if value else {}
