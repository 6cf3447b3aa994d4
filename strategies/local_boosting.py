"""What bagging and cyclic training share: the model as it grows, and how a run of them ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.config import Settings
from fedapp.conversation import Check, Checkpoint, Conversation, Parties
from fedapp.data.partition import WATCHED
from fedapp.errors import ProtocolError, blaming
from fedapp.messages.fields import Reply
from fedapp.messages.hello import HelloReply
from fedapp.messages.parameters import parameters_of
from fedapp.messages.trees import BoostReport, arrays_of
from fedapp.trees.model import (
    NO_TREES,
    Ensemble,
    Grown,
    in_order,
    split_trees,
    stack_trees,
    to_json,
    together,
)
from fedapp.trees.objective import LossParameters
from fedapp.trees.packed import pack_trees, unpack_trees
from fedapp.trees.sets import CategorySets, Ints, category_counts
from strategies.base import Summary
from strategies.horizontal import CommonTable, HorizontalStrategy, mean_label
from strategies.scoring import ROUND_BINS, History, check_scores, evaluate
from strategies.warm_start import Begun


@dataclass(slots=True, eq=False)
class Boosted:
    """A model to which a round adds whole trees.

    Parameters
    ----------
    settings : of the run.
    table : what the parties' tables have in common.
    model : without trees.
    weights : sum of the sample weights of each party's training rows.
    history : scores of the rounds.
    grown : trees of all finished rounds, with their sets.
    ends : number of trees after each round.
    n_told : trees that the parties know.
    begun : what of the model was there before the run.
    """

    settings: Settings
    table: CommonTable
    model: Ensemble
    weights: Mapping[str, float]
    history: History
    grown: Grown = NO_TREES
    ends: list[int] = field(default_factory=list)
    n_told: int = 0
    begun: Begun = field(default_factory=Begun)

    @property
    def n_rounds(self) -> int:
        """Finished rounds, those of the model that the run goes on from among them."""
        return len(self.ends)

    @property
    def n_added(self) -> int:
        """Finished rounds of the run itself."""
        return self.n_rounds - self.begun.n_rounds

    @property
    def goes_on(self) -> bool:
        """Whether there is another round to train."""
        return self.n_added < self.settings.num_boost_round and not self.history.stops

    def after(self, n_rounds: int) -> Ensemble:
        """The model as it was after some rounds."""
        n_trees = self.ends[n_rounds - 1] if n_rounds else 0
        return self.model.with_trees(in_order(self.grown.trees[:n_trees], self.grown.sets))

    def order(self, n_rounds: int) -> dict[str, Any]:
        """The fields of a ``BoostOrder`` for so many rounds."""
        return {
            **pack_trees(self.grown.trees[self.n_told :], sets=self.grown.sets),
            **parameters_of(self.settings),
            "round_id": self.n_rounds,
            "n_rounds": n_rounds,
            "n_classes": len(self.model.classes),
            "base_margin": self.model.base_margin,
            "score_bins": ROUND_BINS,
        }

    def check(self, n_rounds: Mapping[str, int]) -> Check:
        """Holds a report against the rounds its party was asked for."""

        def hold(party: str, reply: BoostReport) -> None:
            model = self.model
            n_trees = n_rounds[party] * model.n_outputs
            check_report(party, reply, n_trees, self.widths, self.settings.max_depth)
            form = model.objective, model.n_outputs, self.settings.eval_metrics
            check_scores(party, reply, *form, WATCHED)

        return hold

    def note_scores(self, replies: Mapping[str, Reply]) -> Conversation[None]:
        """Scores of the trees so far, which come with the first reply after a round."""
        trees = self.grown.trees
        self.n_told = len(trees)
        last_trees = trees[self.ends[-2] if self.n_rounds > 1 else 0 :]
        yield from self.history.note_late(replies, self.n_added, trees, last_trees)

    @property
    def widths(self) -> Ints:
        """Categories of each column, 0 for one of numbers."""
        return category_counts(self.model.categories, len(self.model.columns))

    def add(self, grown: Grown) -> None:
        """Finish a round."""
        self.grown = together([self.grown, grown])
        self.ends.append(len(self.grown.trees))

    def checkpoint(self, **more: Any) -> Checkpoint:
        """All that is needed to go on; ``more`` are facts of the method."""
        nodes, offsets = stack_trees(self.grown.trees)
        arrays = {
            "nodes": nodes,
            "offsets": offsets,
            "sets": self.grown.sets.bits,
            "set_widths": self.grown.sets.widths,
            "ends": np.array(self.ends, dtype=np.int64),
        }
        facts = {
            "base_score": self.model.base_score.tolist(),
            "weights": dict(self.weights),
            "history": self.history.scores,
            "told": self.n_told,
            "rounds": self.n_added,
            "begun": astuple(self.begun),
            **self.table.facts(),
        }
        facts |= more
        return Checkpoint(arrays, facts, lambda: to_json(self.after(self.n_rounds)))


def begin(
    strategy: HorizontalStrategy,
    parties: Parties[HelloReply],
    saved: Checkpoint | None,
    trees_a_round: int = 1,
) -> Conversation[Boosted]:
    """Check the tables, agree on classes and base score; or go on from a checkpoint.

    Parameters
    ----------
    trees_a_round : that a round adds to each output.
    """
    table = strategy.agree(parties, saved)
    settings = strategy.settings
    if saved is not None:
        strategy.begun = Begun(*saved.facts["begun"])
        return _restore(settings, saved, table)
    init_model = strategy.begin_with(trees_a_round)
    replies = yield from strategy.ask_for_labels(parties)
    table = strategy.table
    mean = mean_label(replies, len(table.classes), settings)
    weights = {party: reply.weight_sum for party, reply in replies.items()}
    boosted = Boosted(settings, table, _bare(settings, table, mean), weights, History.of(settings))
    if init_model is not None:
        _go_on(boosted, init_model, strategy.begun)
    return boosted


def _go_on(boosted: Boosted, model: Ensemble, begun: Begun) -> None:
    """Put the rounds of a model before the first one; the parties hear of them with that."""
    boosted.model = replace(boosted.model, base_score=model.base_score)
    boosted.grown, boosted.begun = model.grown, begun
    n_trees = begun.n_trees // begun.n_rounds
    boosted.ends = [n_trees * n_rounds for n_rounds in range(1, begun.n_rounds + 1)]


def _bare(settings: Settings, table: CommonTable, mean: npt.NDArray[np.float32]) -> Ensemble:
    """A model without trees."""
    bare = Ensemble(settings.objective, mean, table.columns, table.classes, ())
    bare = replace(bare, categories=table.categories, margin_column=table.base_margin)
    return replace(bare, parameters=LossParameters.of(settings))


def _restore(settings: Settings, saved: Checkpoint, table: CommonTable) -> Boosted:
    """Undo ``Boosted.checkpoint``."""
    arrays, facts = saved.arrays, saved.facts
    history = History.of(settings, facts["history"])
    mean = np.array(facts["base_score"], dtype=np.float32)
    model = _bare(settings, table, mean)
    trees = split_trees(arrays["nodes"], arrays["offsets"])
    grown = Grown(trees, CategorySets(arrays["sets"], arrays["set_widths"]))
    kept = grown, arrays["ends"].tolist(), facts["told"], Begun(*facts["begun"])
    return Boosted(settings, table, model, facts["weights"], history, *kept)


def trees_of(reply: BoostReport, widths: Ints) -> Grown:
    """The trees a party has grown."""
    return unpack_trees(arrays_of(reply), widths)


def best_round(
    boosted: Boosted, last_scores: Conversation[Mapping[str, Reply]]
) -> Conversation[int | None]:
    """The round of the run that early stopping chooses; None without early stopping.

    Parameters
    ----------
    last_scores : asks for the scores of the last round, where no request has carried its trees.
    """

    def note() -> Conversation[None]:
        replies = yield from last_scores
        yield from boosted.note_scores(replies)

    if not boosted.history.patience:
        return None
    return (yield from boosted.history.catch_up(boosted.n_added, note()))


def finish(
    parties: Parties[HelloReply], boosted: Boosted, best: int | None, last: Checkpoint
) -> Conversation[Summary]:
    """Write and score the finished model, cut back to its best round under early stopping."""
    yield last
    model = boosted.after(boosted.begun.n_rounds + (best or boosted.n_added))
    scored, summary = yield from evaluate(parties, model, best, boosted.settings.eval_metrics)
    yield from boosted.note_scores(scored)
    return summary


def check_report(
    party: str, reply: BoostReport, n_trees: int, widths: Ints, max_depth: int
) -> None:
    """Hold a party's new trees against what it was asked for.

    Parameters
    ----------
    widths : categories of each column, 0 for one of numbers.

    Raises
    ------
    ProtocolError : another number of trees, trees too large, or no trees at all.
    """
    name = type(reply).__name__
    with blaming(party, name, "trees"):
        trees = trees_of(reply, widths).trees
    if len(trees) != n_trees:
        raise ProtocolError(party, name, "trees", f"must be {n_trees}, got {len(trees)}")
    most = 2 ** (max_depth + 1) - 1
    if (reply.sizes > most).any():
        raise ProtocolError(party, name, "sizes", f"must be at most {most} nodes a tree")
