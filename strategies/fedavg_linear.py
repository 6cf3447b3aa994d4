"""Federated averaging of a logistic, softmax or linear regression.

Source: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized
Data" (arXiv:1602.05629v4), Algorithm 1 with C = 1. Departures:

- Columns are standardised over all parties first, from merged means and spreads; missing values
  become the mean.
- The step size falls linearly to 0 over the rounds: with a constant one the average keeps moving
  with the noise of the batches. It is also bounded by the batch's curvature, so that no learning
  rate diverges.
- Parties weigh by their rows' sample weights, n_k / n where there are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedapp.conversation import Checkpoint, Conversation, Saved, ask
from fedapp.data.partition import WATCHED
from fedapp.messages import fedavg_linear as messages
from fedapp.messages.fields import check_sizes
from fedapp.messages.scoring import EvaluateReply
from fedapp.records.document import to_text
from fedapp.settings import Section, Settings
from fedapp.trees.linear import ARRAYS, STEEPEST, LinearModel, Moments, input_names, merge_moments
from fedapp.trees.objective import base_margin
from strategies.common_table import CommonTable
from strategies.handshake import Hellos
from strategies.horizontal import HorizontalState, HorizontalStrategy, mean_label
from strategies.method import Outcome
from strategies.scoring import ROUND_BINS, History, shares, weight_sums


class FedAvgLinearSettings(Section):
    """``[fedavg-linear]`` of the run config; see ``FedAvgLinear``."""

    table = "fedavg-linear"

    rounds: Annotated[int, Field(ge=1, le=10**6)]
    """Rounds of averaging."""
    local_epochs: Annotated[int, Field(ge=1, le=10**6)]
    """Passes over its rows that a party makes in a round."""
    learning_rate: Annotated[float, Field(gt=0, le=10**6)]
    """Longest step of the first round; it decreases to 0 over the rounds."""
    batch_size: Annotated[int, Field(ge=1, lt=2**31)]
    """Rows of a step."""
    l2: Annotated[float, Field(ge=0)]
    """Penalty on the weights of the standardised columns."""


@dataclass(slots=True, eq=False)
class LinearState(HorizontalState):
    """What a run has at a checkpoint."""

    weights: Mapping[str, float]  # sum of the sample weights of each party's training rows
    model: LinearModel
    best: LinearModel
    n_averaged: int = 0


class FedAvgLinear(HorizontalStrategy):
    """Federated averaging of linear models, to compare trees with."""

    method = "fedavg-linear"
    reads = frozenset(("early-stopping-rounds", "eval-metric"))
    objectives = tuple(STEEPEST)  # a step is safe only where the curvature of the loss is bounded
    round_name = "round of averaging"
    section_class = FedAvgLinearSettings
    section: FedAvgLinearSettings

    @classmethod
    def most_rounds(cls, settings: Settings) -> int:
        return FedAvgLinearSettings.of(settings).rounds

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        epochs = cls.section_settings(settings).local_epochs
        return {**super().planned(settings), "epochs": epochs}

    def conversation(self, parties: Hellos, saved: Saved | None) -> Conversation[Outcome]:
        """Algorithm 1."""
        run = saved.read(LinearState) if saved else None
        table = self.agree(parties, run)
        if run is None:
            run = yield from self._begin(parties, table)
        while run.n_averaged < self.section.rounds and not run.history.stops:
            replies = yield from self._ask(parties, run, self.section.local_epochs)
            yield from _record_scores(run, replies)
            if not run.history.stops:
                run.model = _average(run, replies)
                run.n_averaged += 1
                yield _checkpoint(run)
        return (yield from self._finish(parties, run))

    def _begin(self, parties: Hellos, table: CommonTable) -> Conversation[LinearState]:
        """The model that predicts the mean label, with the columns' standardisation."""
        n_inputs = len(input_names(table.columns, table.categories))
        n_classes = len(table.classes)
        replies = yield from ask(
            parties.all(messages.MomentsRequest(**self.terms())),
            messages.MomentsReply,
            lambda party, reply: messages.check_moments(
                party, reply, n_inputs, n_classes, self.n_outputs, table.n_coded_columns
            ),
        )
        self.store_unseen(replies)
        whole = merge_moments(
            Moments(reply.counts, reply.means, reply.squares) for reply in replies.values()
        )
        mean = mean_label(replies, n_classes, self.settings)
        bias = base_margin(self.settings.objective, mean).astype(np.float64)
        model = LinearModel(
            self.settings.objective,
            table.columns,
            table.classes,
            whole.means,
            whole.scales,
            np.zeros((n_inputs, len(bias))),
            bias,
            table.categories,
            table.kinds,
        )
        history = History.of(self.settings)
        return LinearState(self.table, self.initial, history, weight_sums(replies), model, model)

    def _ask(
        self, parties: Hellos, run: LinearState, n_epochs: int
    ) -> Conversation[dict[str, messages.AverageReply]]:
        model = run.model
        section = self.section
        request = messages.AverageRequest(
            round_id=run.n_averaged,
            classes=model.classes,
            **{name: getattr(model, name) for name in ARRAYS},
            epochs=n_epochs,
            **section.model_dump(include={"batch_size", "learning_rate", "l2"}),
            decay=1 - run.n_averaged / section.rounds,
            seed=self.settings.seed,
            score_bins=ROUND_BINS,
        )

        def check_reply(party: str, reply: messages.AverageReply) -> None:
            n_inputs, n_outputs = model.weights.shape
            check_sizes(party, reply, n_inputs=n_inputs, n_outputs=n_outputs)
            self.check_scores(party, reply, WATCHED)

        return (yield from ask(parties.all(request), messages.AverageReply, check_reply))

    def _finish(self, parties: Hellos, run: LinearState) -> Conversation[Outcome]:
        """Write and score the finished model, under early stopping that of the best round."""
        best_round = None
        if run.history.patience:
            if len(run.history) < run.n_averaged:
                yield from _record_scores(run, (yield from self._ask(parties, run, n_epochs=0)))
            best_round = run.history.best_round
        yield _checkpoint(run)
        model = run.best if best_round else run.model
        scored, summary = yield from self.evaluate(parties, model, kind=messages.ScoreRequest)
        yield from _record_scores(run, scored)
        return {**summary, "importance": {}, "trees": 0, "best_round": best_round}


def _average(run: LinearState, replies: Mapping[str, messages.AverageReply]) -> LinearModel:
    share = shares(run.weights, replies)
    weights = sum(share[party] * reply.weights for party, reply in replies.items())
    bias = sum(share[party] * reply.bias for party, reply in replies.items())
    return replace(run.model, weights=np.asarray(weights), bias=np.asarray(bias))


def _record_scores(
    run: LinearState, replies: Mapping[str, messages.AverageReply | EvaluateReply]
) -> Conversation[None]:
    """Add the scores of the last round's model, which come with the next replies."""
    is_new = yield from run.history.record_scores(replies, run.n_averaged)
    if is_new and run.history.best_round == run.n_averaged:
        run.best = run.model


def _checkpoint(run: LinearState) -> Checkpoint:
    model = run.model
    return Checkpoint(run, model=lambda: to_text(model))


STRATEGIES = {FedAvgLinear.method: FedAvgLinear}
