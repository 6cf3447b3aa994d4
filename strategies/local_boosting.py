"""Bagging and cyclic training: parties grow whole trees with XGBoost, the server joins them.

In bagging every party boosts from the margins of the same model, which moves by the mean of their
steps, weighted by their rows. In cyclic training they take turns, in the order of their names. A
round's trees travel with the next request, whose replies bring that round's scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from fedapp.arrays import Ints
from fedapp.conversation import Check, Checkpoint, Conversation, Saved, ask
from fedapp.data.partition import WATCHED
from fedapp.errors import as_protocol_error
from fedapp.messages.fields import Reply, check_fields, check_sizes, parameters_of
from fedapp.messages.local_boosting import BagReply, BagRequest, TurnReply, TurnRequest
from fedapp.messages.scoring import BoostReport, arrays_of
from fedapp.records.document import to_text
from fedapp.settings import Section, Settings
from fedapp.trees.categories import category_counts
from fedapp.trees.custom import CUSTOM
from fedapp.trees.model import (
    NO_TREES,
    Ensemble,
    Grown,
    concatenated,
    ordered_sets,
    pack_trees,
    scaled,
    unpack_trees,
)
from strategies.handshake import Hellos
from strategies.horizontal import HorizontalState, HorizontalStrategy, mean_label
from strategies.method import BOOSTING_SETTINGS, OF_ROWS, Outcome
from strategies.scoring import ROUND_BINS, History, boosted_facts, shares, weight_sums


# With one party this is XGBoost, tree by tree. With K parties each step is a mean of K, weighted by
# rows: a leaf value is a full Newton step, and K of them added up would be a K times larger
# ``eta``, which no longer converges where ``K * eta`` exceeds 2.
#
# Departures from Flower's ``FedXgbBagging`` (1.41), which joins the parties' trees unscaled:
#
# - It steps K times too far, see above; here a tree's values are scaled by the party's share.
# - In the first round each party boosts from the base score that XGBoost estimates from its rows,
#   and the joint model keeps that of the first answer; here the base score is explicit, from the
#   mean label of all parties.
# - It takes ``num_parallel_tree`` trees of a reply, which is one, and marks it as class 0: of
#   several classes or local rounds only the first tree is kept. Here all are.
# - Trees come in the order of the answers; here in the order of the parties' names, so that the
#   same run gives the same model.
class BaggingSettings(Section):
    """``[bagging]`` of the run config."""

    table = "bagging"

    local_rounds: Annotated[int, Field(ge=1, le=10**6)]
    """Rounds that a party boosts before the mean is taken."""


class Bagging(HorizontalStrategy):
    """Bagging: every party boosts the same model, which moves by the mean of their steps."""

    method = "bagging"
    section_class = BaggingSettings
    section: BaggingSettings
    reads = BOOSTING_SETTINGS | {"init-model", "base-margin"}
    objectives = (*OF_ROWS, CUSTOM)

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        return {**super().planned(settings), "trees": cls.section_settings(settings).local_rounds}

    def conversation(self, parties: Hellos, saved: Saved | None) -> Conversation[Outcome]:
        """One exchange a round; a round's trees travel with the next request."""
        n_rounds = self.section.local_rounds
        boosted = yield from begin(self, parties, saved, n_rounds * len(parties))
        while boosted.has_more_rounds:
            replies = yield from _bag(parties, boosted, n_rounds)
            yield from boosted.record_scores(replies)
            if not boosted.history.stops:
                boosted.add(mean_step(boosted, replies))
                yield boosted.checkpoint()
        return (yield from finish(parties, boosted, _bag(parties, boosted, n_rounds=0)))


# A round is one party's boosting round with the full ``eta``. All parties receive its trees with
# the next request, because early stopping needs the scores of all, and each must know the model
# when its turn comes.
#
# Departures from Flower's ``FedXgbCyclic`` (1.41):
#
# - Its turns go by node ids, which are random, so that two runs differ; here by the parties' names.
# - The whole model travels to and fro; here a party keeps its margins and gets the new trees.
# - Base score and classes are those of the first party; here they are of all parties.
# - It scores the model on one party's rows in turn; here on all.
class Cyclic(HorizontalStrategy):
    """Cyclic training: parties take turns to boost the one model."""

    method = "cyclic"
    reads = BOOSTING_SETTINGS | {"init-model", "base-margin"}
    objectives = (*OF_ROWS, CUSTOM)

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        """A turn is one round of XGBoost."""
        return {**super().planned(settings), "trees": 1}

    def conversation(self, parties: Hellos, saved: Saved | None) -> Conversation[Outcome]:
        """One turn an exchange. If the party whose turn it is fails, the next one takes it."""
        boosted = yield from begin(self, parties, saved)
        if saved is None:
            boosted.turn = last_turn(parties, boosted.n_rounds)
        while boosted.has_more_rounds:
            boosted.turn = turn = next_turn(parties, boosted.turn)
            replies = yield from _take_turn(parties, boosted, turn)
            yield from boosted.record_scores(replies)
            if turn in replies and not boosted.history.stops:
                boosted.add(unpack_trees(arrays_of(replies[turn]), boosted.widths))
                yield boosted.checkpoint()
        return (yield from finish(parties, boosted, _take_turn(parties, boosted, turn="")))


@dataclass(slots=True, eq=False)
class BoostedModel(HorizontalState):
    """A model to which a round adds whole trees; all that a run has at a checkpoint."""

    model: Ensemble  # without trees
    weights: Mapping[str, float]  # sum of the sample weights of each party's training rows
    grown: Grown = NO_TREES  # trees of all finished rounds
    ends: tuple[int, ...] = ()  # number of trees after each round
    n_sent: int = 0  # trees that the parties have received
    turn: str = ""  # whose turn the last round was, where parties take turns
    strategy: HorizontalStrategy = field(init=False)  # not in a checkpoint

    @property
    def n_rounds(self) -> int:
        """Finished rounds, with those of the initial model."""
        return len(self.ends)

    @property
    def n_added(self) -> int:
        """Finished rounds of this run."""
        return self.n_rounds - self.initial.n_rounds

    @property
    def has_more_rounds(self) -> bool:
        """Whether there is another round to train."""
        n_rounds = self.history.most_rounds(self.strategy.settings)
        return self.n_added < n_rounds and not self.history.stops

    @property
    def widths(self) -> Ints:
        """Categories of each column, 0 for one of numbers."""
        return category_counts(self.model.categories, len(self.model.columns))

    def after(self, n_rounds: int) -> Ensemble:
        """The model after ``n_rounds`` rounds."""
        n_trees = self.ends[n_rounds - 1] if n_rounds else 0
        return self.model.with_trees(ordered_sets(self.grown.trees[:n_trees], self.grown.sets))

    def order(self, n_rounds: int) -> dict[str, Any]:
        """The fields of a ``BoostOrder`` for ``n_rounds`` rounds."""
        return {
            **pack_trees(self.grown.trees[self.n_sent :], sets=self.grown.sets),
            **parameters_of(self.strategy.settings),
            "round_id": self.n_rounds,
            "n_rounds": n_rounds,
            "n_classes": len(self.model.classes),
            "base_margin": self.model.base_margin,
            "score_bins": ROUND_BINS,
        }

    def check(self, n_rounds: Mapping[str, int]) -> Check:
        """Checks a report against the rounds that its party was asked for."""

        def check_reply(party: str, reply: BoostReport) -> None:
            n_trees = n_rounds[party] * self.model.n_outputs
            check_report(party, reply, n_trees, self.widths, self.strategy.settings.max_depth)
            self.strategy.check_scores(party, reply, WATCHED)

        return check_reply

    def record_scores(self, replies: Mapping[str, Reply]) -> Conversation[None]:
        """Add the scores of the trees so far, which come with the first reply after a round."""
        trees = self.grown.trees
        self.n_sent = len(trees)
        last_trees = trees[self.ends[-2] if self.n_rounds > 1 else 0 :]
        yield from self.history.record_scores(replies, self.n_added, trees, last_trees)

    def add(self, grown: Grown) -> None:
        """Finish a round."""
        self.grown = concatenated([self.grown, grown])
        self.ends = (*self.ends, len(self.grown.trees))

    def checkpoint(self) -> Checkpoint:
        """The state of the training."""
        return Checkpoint(self, self.n_added, lambda: to_text(self.after(self.n_rounds)))


def begin(
    strategy: HorizontalStrategy, parties: Hellos, saved: Saved | None, trees_a_round: int = 1
) -> Conversation[BoostedModel]:
    """Agree on tables, classes and base score, or restore them from a checkpoint.

    ``trees_a_round`` is the number of trees that a round adds to each output.
    """
    boosted = saved.read(BoostedModel) if saved else None
    strategy.agree(parties, boosted)
    if boosted is None:
        init_model = strategy.load_initial_model(trees_a_round)
        replies = yield from strategy.ask_for_labels(parties)
        table, initial, settings = strategy.table, strategy.initial, strategy.settings
        mean = mean_label(replies, len(table.classes), settings)
        model = strategy.bare_model(init_model.base_score if init_model else mean)
        history = History.of(settings)
        boosted = BoostedModel(table, initial, history, model, weight_sums(replies))
        if init_model is not None:
            # The first request carries the trees of the initial model.
            boosted.grown = init_model.grown
            n_trees = initial.n_trees // initial.n_rounds
            boosted.ends = tuple(n_trees * n_rounds for n_rounds in range(1, initial.n_rounds + 1))
    boosted.strategy = strategy
    return boosted


def finish(
    parties: Hellos, boosted: BoostedModel, last_scores: Conversation[Mapping[str, Reply]]
) -> Conversation[Outcome]:
    """Write and score the finished model, cut back to its best round under early stopping.

    ``last_scores`` asks for the scores of the last round, where no request has carried its trees.
    """
    best_round = None
    if boosted.history.patience:
        if len(boosted.history) < boosted.n_added:
            yield from boosted.record_scores((yield from last_scores))
        best_round = boosted.history.best_round
    yield boosted.checkpoint()
    model = boosted.after(boosted.initial.n_rounds + (best_round or boosted.n_added))
    scored, summary = yield from boosted.strategy.evaluate(parties, model)
    yield from boosted.record_scores(scored)
    return {**summary, **boosted_facts(model, best_round)}


def check_report(
    party: str, reply: BoostReport, n_trees: int, widths: Ints, max_depth: int
) -> None:
    """Check number and size of a party's new trees; ``widths`` are categories by column."""
    check_sizes(party, reply, n_trees=n_trees)
    with as_protocol_error(party, type(reply).__name__, "trees"):
        unpack_trees(arrays_of(reply), widths)
    most = 2 ** (max_depth + 1) - 1
    fits = (reply.sizes <= most).all()
    check_fields(party, reply, ("sizes", fits, f"must be at most {most} nodes a tree"))


def mean_step(boosted: BoostedModel, replies: Mapping[str, BoostReport]) -> Grown:
    """Trees whose sum is the weighted mean of the parties' steps.

    The parties come in the order of their names, each with whole rounds of one tree an output, so
    tree i still adds to output ``i % n_outputs``.
    """
    weights = shares(boosted.weights, replies)
    steps = {
        party: unpack_trees(arrays_of(reply), boosted.widths) for party, reply in replies.items()
    }
    return concatenated(
        Grown(tuple(scaled(tree, weights[party]) for tree in step.trees), step.sets)
        for party, step in steps.items()
    )


def _bag(
    parties: Hellos, boosted: BoostedModel, n_rounds: int
) -> Conversation[dict[str, BagReply]]:
    request = BagRequest(**boosted.order(n_rounds))
    check_reply = boosted.check(dict.fromkeys(parties, n_rounds))
    return (yield from ask(parties.all(request), BagReply, check_reply))


def next_turn(parties: Iterable[str], last: str) -> str:
    """The next name after the last one's, and after the highest the lowest."""
    names = sorted(parties)
    return next((name for name in names if name > last), names[0])


def last_turn(parties: Iterable[str], n_rounds: int) -> str:
    """Whose turn the last of ``n_rounds`` rounds was; nobody's before the first."""
    names = sorted(parties)
    return names[(n_rounds - 1) % len(names)] if n_rounds else ""


def _take_turn(
    parties: Hellos, boosted: BoostedModel, turn: str
) -> Conversation[dict[str, TurnReply]]:
    n_rounds = {party: int(party == turn) for party in parties}
    requests = {party: TurnRequest(**boosted.order(n)) for party, n in n_rounds.items()}
    return (yield from ask(requests, TurnReply, boosted.check(n_rounds)))


STRATEGIES = {Bagging.method: Bagging, Cyclic.method: Cyclic}
