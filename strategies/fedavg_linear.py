"""Federated averaging of a logistic, softmax or linear regression.

Source: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized
Data" (arXiv:1602.05629v4), Algorithm 1 with C = 1. Departures:

- Columns are standardised over all parties first, from merged means and spreads; missing values
  become the mean.
- The step size falls linearly to 0 over the rounds: with a constant one the average keeps moving
  with the noise of the batches. It is also bounded by the batch's curvature, so that no learning
  rate diverges.
- Parties weigh by their rows' sample weights, n_k / n where there are none.
- With ``fedavg-linear.aggregation=secure`` the server sees only means over all parties (see
  ``MaskedAverages``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedapp.conversation import Check, Checkpoint, Conversation, SavedModel, ask
from fedapp.data.partition import WATCHED
from fedapp.errors import DataError
from fedapp.histograms.fixed_point import power_above
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
    check_average,
    check_moments,
)
from fedapp.messages.fields import fields_of
from fedapp.messages.scoring import EvaluateReply
from fedapp.messages.secagg import EVERYONE
from fedapp.settings import Section, Settings, check
from fedapp.trees.linear import (
    ARRAYS,
    N_POWERS,
    STEEPEST,
    Floats,
    LinearModel,
    Moments,
    decode_model,
    input_names,
    largest_powers,
    linear_to_json,
    merge_moments,
    per_input,
    read_squares,
    read_values,
)
from fedapp.trees.objective import base_margin
from fedapp.trees.sets import category_counts
from strategies.base import Summary
from strategies.handshake import Hellos
from strategies.horizontal import CommonTable, HorizontalStrategy, mean_label
from strategies.scoring import (
    FINAL_BINS,
    ROUND_BINS,
    History,
    ask_to_score,
    check_scores,
    label_spread,
    score_summary,
    shares,
)
from strategies.secagg import SecuredRun, check_secure_aggregation, secure_plan_fields

SETTING = "fedavg-linear.aggregation"


class FedAvgLinearSettings(Section):
    """``[fedavg-linear]`` of the run config; see ``FedAvgLinear``."""

    rounds: Annotated[int, Field(ge=1, le=10**6)]
    local_epochs: Annotated[int, Field(ge=1, le=10**6)]
    learning_rate: Annotated[float, Field(gt=0, le=10**6)]
    batch_size: Annotated[int, Field(ge=1, lt=2**31)]
    l2: Annotated[float, Field(ge=0)]
    aggregation: Literal["plain", "secure"]


class PlainAverages:
    """Each party's replies reach the server."""

    def begin(
        self, parties: Hellos, table: CommonTable, request: MomentsRequest, check: Check
    ) -> Conversation[dict[str, MomentsReply]]:
        """Sums of the labels, moments of the inputs."""
        return (yield from ask(parties.all(request), MomentsReply, check))

    def train(
        self, parties: Hellos, request: AverageRequest, check: Check
    ) -> Conversation[dict[str, AverageReply]]:
        """Have all parties score the model and train it further."""
        return (yield from ask(parties.all(request), AverageReply, check))

    score = staticmethod(ask_to_score)

    def resume(self, parties: Hellos) -> Conversation[None]:
        """Nothing to ask for."""
        yield from ()

    def facts(self) -> dict[str, Any]:
        """Fields for a checkpoint."""
        return {}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Undo ``facts``."""


class MaskedAverages:
    """All parties answer as one, named ``EVERYONE``; interface as of ``PlainAverages``.

    Parties send whole numbers under masks: first the magnitudes of each column's values, as powers
    of two; then sums of the inputs, and of squared deviations from the means of all rows; and after
    each round their models, weighted by their share of all rows. So the standardisation does not
    depend on how rows are split, nor a round's mean on the order of the parties.
    """

    def __init__(
        self, settings: Callable[[], Settings], setting: str, warn: Callable[[str], None]
    ) -> None:
        self._settings, self._run = settings, SecuredRun(settings, setting, warn)
        self._weight_power, self.resume = 0, self._run.resume

    def begin(
        self, parties: Hellos, table: CommonTable, request: MomentsRequest, check: Check
    ) -> Conversation[dict[str, MomentsReply]]:
        """Exchange keys; then means, then spreads around them. A lost party ends the run."""
        roster, _ = yield from self._run.meet(parties, len(table.classes))
        sums, bounds = self._run.sums, self._run.bounds
        is_number = category_counts(table.categories, len(table.columns)) == 0
        of_labels, unseen, counts = yield from sums.ask(
            parties,
            OpenRequest(**roster, **fields_of(request)),
            (self._run.n_outputs + 1,),
            (table.n_coded_columns,),
            (int(is_number.sum()), N_POWERS),
            may_fail=0,
        )
        labels, powers = self._run.labels(of_labels, unseen), largest_powers(counts, is_number)
        self._weight_power = power_above(labels.weight_sum)
        of_each = per_input(powers, table.categories)
        shape = 2, len(of_each)
        (values,) = yield from sums.ask(parties, MeansRequest(powers), (2, *shape), may_fail=0)
        weights, means = read_values(values, of_each, bounds)
        (squares,) = yield from sums.ask(parties, SpreadsRequest(means), shape, may_fail=0)
        reply = MomentsReply(
            label_sums=labels.label_sums,
            weight_sum=labels.weight_sum,
            unseen=labels.unseen,
            counts=weights,
            means=means,
            squares=read_squares(squares, of_each, bounds),
        )
        check(EVERYONE, reply)
        return {EVERYONE: reply}

    def train(
        self, parties: Hellos, request: AverageRequest, check: Check
    ) -> Conversation[dict[str, AverageReply]]:
        """The mean of the remaining parties' models."""
        run = self._run
        run.sums.without_lost(parties)
        fields = {**fields_of(request), "among": run.sums.among}
        n_inputs, width = request.weights.shape
        weight, models, *scores = yield from run.sums.ask(
            parties,
            AverageSumsRequest(**fields, weight_power=self._weight_power),
            (1,),
            (n_inputs + 1, width),
            *run.score_shapes(WATCHED, request.score_bins),
        )
        if not weight[0] > 0:
            raise DataError("weight must be > 0 in some row of some party")
        objective = self._settings().objective
        theta = decode_model(models, int(weight[0]), self._weight_power, objective, run.bounds)
        reply = AverageReply(theta[:-1], theta[-1], *run.scores(scores))
        check(EVERYONE, reply)
        return {EVERYONE: reply}

    def score(
        self, parties: Hellos, request: ScoreRequest, check: Check
    ) -> Conversation[dict[str, EvaluateReply]]:
        """Sums of the finished model's scores."""
        return (yield from self._run.score(parties, request, check, ScoreSumsRequest))

    def facts(self) -> dict[str, Any]:
        """Bounds and parties, for a checkpoint."""
        return {**self._run.facts(), "weight_power": self._weight_power}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Undo ``facts``."""
        self._run.restore(facts)
        self._weight_power = facts["weight_power"]


class FedAvgLinear(HorizontalStrategy):
    """Federated averaging of linear models, to compare trees with.

    Parameters
    ----------
    rounds, local_epochs : int
        Rounds of averaging, and epochs of each party in a round.
    learning_rate : float
        Longest step of the first round.
    batch_size : int
        In rows.
    l2 : float
        Penalty on the weights of the standardised columns.
    aggregation : {"plain", "secure"}
        Whether the server sees each party's model, or only their mean.
    """

    method = "fedavg-linear"
    reads = frozenset(("early-stopping-rounds", "eval-metric"))
    objectives = tuple(STEEPEST)  # a step is safe only where the curvature of the loss is bounded
    round_name = "round of averaging"
    history: History

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.section = self.section_settings(self.settings)
        self.sees_only_sums = self.section.aggregation == "secure"
        self.averages: PlainAverages | MaskedAverages = PlainAverages()
        if self.sees_only_sums:
            self.averages = MaskedAverages(lambda: self.settings, SETTING, self.warn_once)
        self.weights: Mapping[str, float] = {}
        self.n_averaged = 0

    @classmethod
    def section_settings(cls, settings: Settings) -> FedAvgLinearSettings:
        """``[fedavg-linear]``, checked, also against what secure aggregation needs."""
        section = check(FedAvgLinearSettings, settings.sections["fedavg-linear"], "fedavg-linear.")
        if section.aggregation == "secure":
            check_secure_aggregation(settings, SETTING)
        return section

    @classmethod
    def most_rounds(cls, settings: Settings) -> int:
        return cls.section_settings(settings).rounds

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        aggregation = cls.section_settings(settings).aggregation
        return {**super().planned(settings), **secure_plan_fields(settings, aggregation)}

    def conversation(self, parties: Hellos, saved: Checkpoint | None) -> Conversation[Summary]:
        """Algorithm 1."""
        self.agree(parties, saved)
        if saved is None:
            self.model = yield from self._begin(parties)
            self.best = self.model
        else:
            self._restore(saved)
            yield from self.averages.resume(parties)
        while self.n_averaged < self.section.rounds and not self.history.stops:
            replies = yield from self._ask(parties, self.section.local_epochs)
            yield from self._record_scores(replies)
            if not self.history.stops:
                self.model = self._average(replies)
                self.n_averaged += 1
                yield self._checkpoint()
        return (yield from self._finish(parties))

    def _begin(self, parties: Hellos) -> Conversation[LinearModel]:
        """The model that predicts the mean label, with the columns' standardisation."""
        self.history = History.of(self.settings)
        table = self.table
        n_inputs, n_classes = len(input_names(table.columns, table.categories)), len(table.classes)
        replies = yield from self.averages.begin(
            parties,
            table,
            MomentsRequest(**self.terms()),
            lambda party, reply: check_moments(
                party, reply, n_inputs, n_classes, self.n_outputs, table.n_coded_columns
            ),
        )
        self.store_unseen(replies)
        self.weights = {party: reply.weight_sum for party, reply in replies.items()}
        whole = merge_moments(
            Moments(reply.counts, reply.means, reply.squares) for reply in replies.values()
        )
        mean = mean_label(replies, n_classes, self.settings)
        bias = base_margin(self.settings.objective, mean).astype(np.float64)
        weights = np.zeros((n_inputs, len(bias)))
        return self._linear(whole.means, whole.scales, weights, bias)

    def _linear(self, means: Floats, scales: Floats, weights: Floats, bias: Floats) -> LinearModel:
        table, objective = self.table, self.settings.objective
        arrays = means, scales, weights, bias
        return LinearModel(objective, table.columns, table.classes, *arrays, table.categories)

    def _ask(self, parties: Hellos, n_epochs: int) -> Conversation[dict[str, AverageReply]]:
        model, section, eval_metrics = self.model, self.section, self.settings.eval_metrics
        request = AverageRequest(
            round_id=self.n_averaged,
            classes=model.classes,
            **{name: getattr(model, name) for name in ARRAYS},
            epochs=n_epochs,
            **section.model_dump(include={"batch_size", "learning_rate", "l2"}),
            decay=1 - self.n_averaged / section.rounds,
            seed=self.settings.seed,
            score_bins=ROUND_BINS,
        )

        def check_reply(party: str, reply: AverageReply) -> None:
            check_average(party, reply, request)
            check_scores(party, reply, model.objective, model.n_outputs, eval_metrics, WATCHED)

        return (yield from self.averages.train(parties, request, check_reply))

    def _average(self, replies: Mapping[str, AverageReply]) -> LinearModel:
        """The weighted mean of the replies' models; under masks there is only one."""
        share = shares(self.weights, replies)
        weights = sum(share[party] * reply.weights for party, reply in replies.items())
        bias = sum(share[party] * reply.bias for party, reply in replies.items())
        return replace(self.model, weights=np.asarray(weights), bias=np.asarray(bias))

    def _record_scores(
        self, replies: Mapping[str, AverageReply | EvaluateReply]
    ) -> Conversation[None]:
        """Add the scores of the last round's model, which come with the next replies."""
        is_new = yield from self.history.record_scores(replies, self.n_averaged)
        if is_new and self.history.best_round == self.n_averaged:
            self.best = self.model

    def _finish(self, parties: Hellos) -> Conversation[Summary]:
        """Write and score the finished model, under early stopping that of the best round."""
        best_round = None
        if self.history.patience:
            if len(self.history) < self.n_averaged:
                yield from self._record_scores((yield from self._ask(parties, n_epochs=0)))
            best_round = self.history.best_round
        yield self._checkpoint()
        model = self.best if best_round else self.model
        text = linear_to_json(model)
        yield SavedModel({"model.json": text})
        spread = label_spread(parties)
        scored = yield from self.averages.score(
            parties,
            ScoreRequest(np.frombuffer(text.encode(), dtype=np.uint8), FINAL_BINS, spread),
            lambda party, reply: check_scores(
                party, reply, model.objective, model.n_outputs, self.settings.eval_metrics
            ),
        )
        yield from self._record_scores(scored)
        summary = score_summary(model, scored, spread, self.settings.eval_metrics)
        return {**summary, "importance": {}, "trees": 0, "best_round": best_round}

    def _checkpoint(self) -> Checkpoint:
        model, best = self.model, self.best
        arrays = {name: getattr(model, name) for name in ARRAYS}
        arrays |= {"best_weights": best.weights, "best_bias": best.bias}
        facts = {
            "history": self.history.scores,
            "averaged": self.n_averaged,
            "rows": dict(self.weights),
            "aggregation": self.averages.facts(),
            **self.table.facts(),
        }
        return Checkpoint(arrays, facts, lambda: linear_to_json(model))

    def _restore(self, saved: Checkpoint) -> None:
        settings, facts = self.settings, saved.facts
        arrays = {name: np.asarray(array) for name, array in saved.arrays.items()}
        weights, bias = arrays.pop("best_weights"), arrays.pop("best_bias")
        self.model = self._linear(*(arrays[name] for name in ARRAYS))
        self.best = replace(self.model, weights=weights, bias=bias)
        self.weights, self.n_averaged = facts["rows"], facts["averaged"]
        self.history = History.of(settings, facts["history"])
        self.averages.restore(facts["aggregation"])


STRATEGIES = {FedAvgLinear.method: FedAvgLinear}
