"""FedXGBllr: XGBoost trees of all parties, their learning rates learned by federated averaging.

Source: Ma et al. 2023, "Gradient-less Federated Gradient Boosting Trees with Learnable Learning
Rates", Algorithm 1; line numbers are of that algorithm. Departures:

- The base score is no input of the head and in no tree's output: the head's margins are added to
  the margin of the mean label. The paper does not say where it goes; a head that must first learn
  an offset by steps of 0.001 spends its rounds on that.
- For regression the head works in units of the labels' standard deviation, so that the labels' unit
  has no effect.
- A party with validation rows ends its local epochs when their loss gets no lower, and sends its
  best epoch (``patience``); the server keeps the round with the lowest validation loss. The paper
  trains all epochs and keeps the last round. But 100 epochs on rows that the party's trees were
  fitted to make a head that trusts these trees too much: on a9a accuracy drops from 0.846 after one
  epoch to 0.835. The test rows choose nothing.
- A party with validation rows may stop its XGBoost early (``early-stopping-rounds``). The outputs
  of the trees it lacks are zeros.
- With k classes XGBoost builds k trees a round, and a party's patch of the convolution is all of
  them; the paper has two classes at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedapp.arrays import Floats, Ints
from fedapp.conversation import Checkpoint, Conversation, Saved, ask
from fedapp.data.partition import WATCHED
from fedapp.data.schema import first
from fedapp.errors import as_protocol_error
from fedapp.messages import fedxgbllr as messages
from fedapp.messages.fields import MOST_DEPTH, Reply, check_fields, check_sizes, parameters_of
from fedapp.messages.scoring import arrays_of
from fedapp.metrics import loss_metric, scored_names
from fedapp.records.document import to_text
from fedapp.settings import Section, Settings
from fedapp.trees import stacked
from fedapp.trees.categories import category_counts
from fedapp.trees.losses import LOSSES, LossParameters
from fedapp.trees.model import concatenated, pack_trees, unpack_trees
from fedapp.trees.objective import hide_class_shares, n_outputs
from strategies import scoring
from strategies.common_table import parties_without_class
from strategies.handshake import Hellos
from strategies.horizontal import HorizontalState, HorizontalStrategy, mean_label
from strategies.method import OF_ROWS, TREE_SETTINGS, Outcome

TREES_OF_ALL = 500  # section 4.1: divided among the parties
WIDEST_RESIDUAL = 3.0  # of the report's histogram, in standard deviations of the labels
LARGEST_RATE = 1e100  # learned rates are products of a few float32 numbers

Count = Annotated[int, Field(ge=1, le=10**5)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class FedXGBllrSettings(Section):
    """``[fedxgbllr]`` of the run config; see ``FedXGBllr``."""

    table = "fedxgbllr"

    trees: Annotated[int, Field(ge=0, le=10**5)]
    """Trees of each party; 0: its share of 500."""
    max_depth: Annotated[int, Field(ge=1, le=MOST_DEPTH)]
    """Largest depth of a tree."""
    eta: Annotated[float, Field(gt=0, le=1)]
    """Learning rate: factor of each tree's leaves."""
    rounds: Count
    """Rounds of averaging."""
    epochs: Count
    """Passes over its rows that a party makes in a round."""
    batch_size: Count
    """Rows of a step."""
    learning_rate: Annotated[float, Field(gt=0, le=1e6)]
    """Step size of Adam."""
    beta1: Beta
    """Of Adam."""
    beta2: Beta
    """Of Adam."""
    patience: Annotated[int, Field(ge=0)]
    """Epochs without a lower validation loss before a party stops; 0: all epochs."""
    head: stacked.Kind
    """Network that weighs the trees: the paper's CNN, or one of its ablations."""
    channels: Count
    """Of the CNN."""
    device: Literal["cpu", "cuda"]
    """Where networks are trained; `cuda` is used where a party has it."""


@dataclass(slots=True, eq=False)
class HeadState(HorizontalState):
    """What a run has at a checkpoint."""

    names: tuple[str, ...]  # of the parties, in the order of the ensembles
    model: stacked.StackedModel
    best: Floats  # weights of the round with the best score
    n_averaged: int = 0


class FedXGBllr(HorizontalStrategy):
    """FedXGBllr: every party's XGBoost trees, weighted by a federated 1D CNN."""

    method = "fedxgbllr"
    # Those whose loss the head has.
    objectives = tuple(name for name in OF_ROWS if not LOSSES[name].newton)
    # Depth, eta and number of its trees are settings of its section.
    reads = TREE_SETTINGS - {"max-depth", "eta"} | {"early-stopping-rounds", "eval-metric"}
    round_name = "round of averaging"
    section_class = FedXGBllrSettings
    section: FedXGBllrSettings

    @classmethod
    def most_rounds(cls, settings: Settings) -> int:
        return FedXGBllrSettings.of(settings).rounds

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        section = cls.section_settings(settings)
        trees = section.trees or max(1, TREES_OF_ALL // settings.parties)
        fit = {"trees": trees, "max_depth": section.max_depth, "epochs": section.epochs}
        return {**super().planned(settings), **fit}

    def conversation(self, parties: Hellos, saved: Saved | None) -> Conversation[Outcome]:
        """Algorithm 1."""
        run = saved.read(HeadState) if saved else None
        self.agree(parties, run)
        if run is None:
            run = yield from self._begin(parties)
            yield _checkpoint(run)
        while run.n_averaged < self.section.rounds:
            yield from self._average(parties, run)
            yield _checkpoint(run)
        return (yield from self._evaluate(parties, run))

    def _begin(self, parties: Hellos) -> Conversation[HeadState]:
        """Lines 1 to 7: all parties get all trees, and the head is drawn."""
        labels = yield from self.ask_for_labels(parties)
        columns, classes = self.table.columns, self.table.classes
        if lacking := parties_without_class(parties, classes):
            by_class = [f"{name!r} at {first(names)}" for name, names in lacking.items()]
            self.warn_once(
                f"no training row of class {first(by_class)}: trees and heads of such a party "
                "never answer with that class, and fedxgbllr can score below a single party; pax "
                "under masks (pax.aggregation=secure) is the same model whoever has which rows"
            )
        weight_sum = sum(reply.weight_sum for reply in labels.values())
        # With several classes the base score is the same for all: the head learns their shares.
        mean = hide_class_shares(mean_label(labels, 0, self.settings))
        section = self.section
        tree_parameters = {"max_depth": section.max_depth, "eta": section.eta}
        request = messages.FitRequest(
            n_outputs=n_outputs(self.settings.objective, len(classes)),
            base_score=mean,
            n_rounds=self.planned(self.settings)["trees"],
            early_stopping_rounds=self.settings.early_stopping_rounds,
            **(parameters_of(self.settings) | tree_parameters),
        )
        widths = category_counts(self.table.categories, len(columns))
        fits = yield from ask(
            parties.all(request),
            messages.FitReply,
            lambda party, reply: _check_fit(party, reply, widths, request),
        )
        by_party = [unpack_trees(arrays_of(fit), widths) for fit in fits.values()]
        grown = concatenated(by_party)
        counts = [len(part.trees) for part in by_party]
        shape = stacked.HeadShape.over(section.head, counts, request.n_outputs, section.channels)
        # 0 for classification, and where all training labels are the same.
        deviation = np.sqrt(sum(fit.square_sum for fit in fits.values()) / weight_sum)
        unit = np.float32(deviation or 1)
        weights = stacked.initial_weights(shape, self.settings.seed)
        ensembles = stacked.split_ensembles(grown.trees, np.array(counts, dtype=np.int32))
        model = stacked.StackedModel(
            self.settings.objective,
            mean,
            columns,
            classes,
            unit,
            ensembles,
            shape,
            weights,
            grown.sets,
            self.table.categories,
            self.table.kinds,
        )
        share = messages.ShareRequest(  # line 4: all ensembles, in the order of the parties' names
            **pack_trees(model.trees, sets=model.sets),
            counts=model.counts,
            n_outputs=model.n_outputs,
            head=shape.kind,
            channels=shape.channels,
            classes=classes,
            base_score=mean,
            unit=float(unit),
        )
        yield from ask(parties.all(share), messages.ShareReply)
        # Stopped by the loss that the head is trained for: an AUC does not depend on its offset.
        objective, asked = self.settings.objective, self.settings.eval_metrics
        loss = loss_metric(objective, LossParameters.of(self.settings))
        scored = scored_names(objective, asked)
        history = scoring.History(objective, 0, (), asked, loss if loss in scored else "")
        return HeadState(self.table, self.initial, history, tuple(fits), model, weights)

    def _average(self, parties: Hellos, run: HeadState) -> Conversation[None]:
        """Lines 9 to 13: one round. A failed party is not in the mean; its trees stay."""
        replies = yield from self._ask_to_train(parties, run, self.section.epochs)
        yield from _record_scores(run, replies)
        run.n_averaged += 1
        n_rows = [reply.n_rows for reply in replies.values()]
        mean = np.average([reply.weights for reply in replies.values()], axis=0, weights=n_rows)
        run.model = replace(run.model, weights=np.asarray(mean, dtype=np.float32))

    def _ask_to_train(
        self, parties: Hellos, run: HeadState, epochs: int
    ) -> Conversation[dict[str, messages.AverageReply]]:
        model = run.model
        names = ("batch_size", "learning_rate", "beta1", "beta2", "patience", "device")
        request = messages.AverageRequest(
            round_id=run.n_averaged,
            weights=model.weights,
            epochs=epochs,
            seed=self.settings.seed,
            score_bins=scoring.ROUND_BINS,
            **{name: getattr(self.section, name) for name in names},
        )

        def check_reply(party: str, reply: messages.AverageReply) -> None:
            check_sizes(party, reply, n_weights=len(model.weights))
            self.check_scores(party, reply, WATCHED)

        return (yield from ask(parties.all(request), messages.AverageReply, check_reply))

    def _evaluate(self, parties: Hellos, run: HeadState) -> Conversation[Outcome]:
        """Score the finished model, with the head of its best round where that is known."""
        model, best_round = run.model, None
        if any(hello.n_valid for hello in parties.values()):
            if len(run.history) < run.n_averaged:
                replies = yield from self._ask_to_train(parties, run, epochs=0)
                yield from _record_scores(run, replies)
                yield _checkpoint(run)
            if not np.isnan(run.history.scores).all():
                best_round = run.history.best_round
        finished = replace(model, weights=run.best) if best_round else model
        yield scoring.model_files(finished)
        widest = WIDEST_RESIDUAL * float(model.unit)
        request = messages.FinalRequest(finished.weights, scoring.FINAL_BINS, widest)
        shape = model.shape

        def check_reply(party: str, reply: messages.FinalReply) -> None:
            check_sizes(party, reply, n_parties=shape.n_parties, n_trees=shape.n_trees)
            fits = (np.abs(reply.rates) <= LARGEST_RATE).all()
            check_fields(party, reply, ("rates", fits, f"must be within {LARGEST_RATE:g}"))
            self.check_scores(party, reply)

        scored = yield from ask(parties.all(request), messages.FinalReply, check_reply)
        yield from _record_scores(run, scored)
        n_rows = [parties[party].n_train for party in scored]
        rates = np.average([reply.rates for reply in scored.values()], axis=0, weights=n_rows)
        return {
            **scoring.score_summary(model.bare, scored, widest, self.settings.scored_metrics),
            **scoring.boosted_facts(model.bare, best_round),
            "head": {"kind": shape.kind, "parameters": shape.n_weights},
            "learning_rates": stacked.rates_by_party(model, run.names, rates),
        }


def _record_scores(run: HeadState, replies: Mapping[str, Reply]) -> Conversation[None]:
    """Add the scores of the last round's head, which come with the next replies."""
    trees = run.model.trees
    is_new = yield from run.history.record_scores(replies, run.n_averaged, trees, trees)
    if is_new and run.history.best_round == run.n_averaged:
        run.best = run.model.weights


def _checkpoint(run: HeadState) -> Checkpoint:
    model = run.model
    return Checkpoint(run, model=lambda: to_text(model))


STRATEGIES = {FedXGBllr.method: FedXGBllr}


def _check_fit(
    party: str, reply: messages.FitReply, widths: Ints, request: messages.FitRequest
) -> None:
    """Check a party's trees against the table and the number asked for."""
    with as_protocol_error(party, "FitReply", "trees"):
        n_trees = len(unpack_trees(arrays_of(reply), widths).trees)
    most, width = request.n_rounds * request.n_outputs, request.n_outputs
    rule = f"must be {width} a round and {most} at most, got {n_trees}"
    check_fields(party, reply, ("trees", 0 < n_trees <= most and not n_trees % width, rule))
