"""SecureBoost: boosted trees over the columns of several parties, exactly XGBoost's.

Source: Cheng et al. 2019, "SecureBoost: A Lossless Federated Learning Framework"
(arXiv:1901.08755), Algorithms 1 and 2; "Completely SecureBoost" is ``first-trees``. The server
relays letters that it cannot read.

Read ``fedapp.messages.secureboost``, this file, then ``shared``, ``active`` and ``passive`` in
``clients.secureboost``.

A round of D levels takes at most ``2 + 2 D`` exchanges with one passive party, ``1 + 3 D`` with
several: one to begin the round; two a level with one passive party, as its partition travels with
the next level's sums (one more ends the round if it has splits in the last level), and three with
several, as the partitions go to all of them. Gradients that fill several messages take an exchange
more for each further block: while the passive parties check one, the active party makes the next.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from fedapp.conversation import Checkpoint, Conversation, Progress, Saved
from fedapp.errors import ConfigError, as_protocol_error
from fedapp.messages import secureboost as messages
from fedapp.messages.fields import loss_fields, parameters_of
from fedapp.messages.vertical import SentReply
from fedapp.metrics.names import UNCALIBRATED
from fedapp.records.document import from_text
from fedapp.settings import Section, Settings
from fedapp.trees.limits import ONE_TREE
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import AUTO, has_quantile_leaves
from strategies import method as methods
from strategies import vertical
from strategies.handshake import InitialModel, init_model_id
from strategies.scoring import History, calibration_summary, model_files

log = logging.getLogger("fedapp")
Rate = Annotated[float, Field(gt=0, lt=1)]

# With more sums of each bin than this share of the training rows, the bins of nearly all rows can
# be solved for (``simulations attacks solved_bins``).
ENOUGH_SUMS = 0.5


class SecureBoostSettings(vertical.KeySettings, Section):
    """``[secureboost]`` of the run config; see ``SecureBoost``."""

    table = "secureboost"

    first_trees: Annotated[int, Field(ge=0, le=10**6)]
    """Rounds with only the active party's columns; 1 is Completely SecureBoost."""
    goss: bool
    """Whether a round draws rows by the size of their gradients."""
    top_rate: Rate
    """Share of the rows with the largest gradients that are drawn."""
    other_rate: Rate
    """Share of all rows that is drawn from the others."""


@dataclass(slots=True, eq=False)
class SecureBoostState:
    """What a run has at a checkpoint."""

    mailbox: vertical.Mailbox
    rows: Mapping[str, int]  # matched, by subset
    history: History
    initial: InitialModel
    n_grown: int = 0  # rounds, the last of which may have no scores yet
    is_trained: bool = False  # whether all rounds are finished


class SecureBoost(vertical.VerticalStrategy):
    """SecureBoost: XGBoost's trees over the columns of several parties, gradients under Paillier.

    The server relays letters that it cannot read. The model is divided among the parties, so
    ``Result.arrays`` names it, and contains it only where all parties allow its export."""

    method = "secureboost"
    reads = methods.BOOSTING_SETTINGS | methods.GROWTH - {"feature-weights"} | methods.CONSTRAINTS
    reads |= methods.SPLIT_SETTINGS | methods.LABEL_PRIVACY
    reads |= {"init-model", "base-margin", "calibration", "objective", "allow-export"}
    section: SecureBoostSettings

    @classmethod
    def section_settings(cls, settings: Settings) -> SecureBoostSettings:
        section = SecureBoostSettings.of(settings)
        patience = settings.early_stopping_rounds
        if patience and section.first_trees > patience:
            # The active party grows these rounds in one exchange, in which nobody can stop it.
            raise ConfigError(
                "secureboost.first-trees must be at most early-stopping-rounds where that is set, "
                f"got {section.first_trees} and {patience}"
            )
        if section.goss and section.top_rate + section.other_rate > 1:
            total = section.top_rate + section.other_rate
            raise ConfigError(f"secureboost.top-rate + other-rate must be <= 1, got {total:g}")
        if section.goss and settings.subsample < 1:
            raise ConfigError(
                f"subsample must be 1 with secureboost.goss, got {settings.subsample}"
            )
        if section.goss and has_quantile_leaves(settings.objective):
            rule = f"must be false for {settings.objective}, whose gradients are all alike in size"
            raise ConfigError(f"secureboost.goss {rule}, got true")
        if settings.num_parallel_tree > 1 and (section.goss or settings.multi_strategy == ONE_TREE):
            other = "secureboost.goss" if section.goss else f"multi-strategy={ONE_TREE}"
            got = settings.num_parallel_tree
            raise ConfigError(f"num-parallel-tree must be 1 with {other}, got {got}")
        if settings.multi_strategy == ONE_TREE:
            for name in ("monotone_constraints", "interaction_constraints"):
                if text := getattr(settings, name):
                    rule = f"must be empty with multi-strategy={ONE_TREE}, as in XGBoost"
                    raise ConfigError(f"{name.replace('_', '-')} {rule}, got {text}")
        return section

    @classmethod
    def exchanges_a_round(cls, settings: Settings) -> int:
        """See the module; gradients of ``align-most-rows`` rows are sent in blocks.

        Flower's loop runs this many exchanges a round: set it near the number of rows.
        """
        n_receivers = (settings.asked_parties or vertical.MANY_PARTIES) - 1
        most = cls.section_settings(settings).block_rows(n_receivers)
        return 1 + 3 * settings.n_levels + settings.align_most_rows // most

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        return {**super().planned(settings), "goss": cls.section_settings(settings).goss}

    def conversation(
        self, parties: vertical.Hellos, saved: Saved | None
    ) -> Conversation[methods.Outcome]:
        """Round by round, level by level."""
        if saved is None:
            run = yield from self._begin(parties)
        else:
            run = saved.read(SecureBoostState)
            self.settings = self.settings.watching(run.rows["valid"])
        mailbox = run.mailbox
        n_rounds = run.initial.n_rounds + self.settings.num_boost_round
        while not run.is_trained:
            yield Checkpoint(run, run.n_grown)
            n_wanted = 0 if run.history.stops else n_rounds
            begun = yield from mailbox.ask_active(
                messages.BeginRequest, messages.BeginReply, n_rounds=n_wanted
            )
            yield from _record_scores(run, begun)
            run.is_trained = not begun.begun or run.history.stops
            if run.is_trained:
                mailbox.clear()  # gradients of a round that is not grown
            else:
                yield from _grow(mailbox, begun.n_blocks)
                run.n_grown = len(run.history) + 1
        return (yield from self._finish(run))

    def _begin(self, parties: vertical.Hellos) -> Conversation[SecureBoostState]:
        """Match the rows, bin the columns, exchange a key; walk the initial model."""
        mailbox, rows = yield from self.match_rows(parties)
        self.settings = settings = self.settings.watching(rows["valid"])
        init_model = init_model_id(settings)
        self._warn_of_sums(rows["train"])
        methods.check_watched(settings, rows["valid"])
        fields = {
            "objective": settings.objective,
            **parameters_of(settings),
            **loss_fields(settings),
            "monotone_constraints": settings.monotone_constraints,
            "interaction_constraints": settings.interaction_constraints,
            "multi_strategy": settings.multi_strategy,
            "num_parallel_tree": settings.num_parallel_tree,
            "calibration": settings.calibration,
            "auto_child_weight": settings.asked_child_weight == AUTO,
            "init_model": init_model,
            **self.section.model_dump(),
        }
        yield from mailbox.relay(messages.SetupRequest, parties, SentReply, **fields)
        initial = InitialModel()
        if init_model:
            # The rows walk down its trees; two exchanges a level at most.
            reply = yield from mailbox.ask_active(messages.WalkRequest, messages.WalkReply)
            while not reply.finished:
                yield from mailbox.relay(messages.AnswerRequest, mailbox.passive, SentReply)
                reply = yield from mailbox.ask_active(messages.WalkRequest, messages.WalkReply)
            initial = InitialModel(reply.n_rounds, reply.n_trees)
        return SecureBoostState(mailbox, rows, History.of(settings), initial)

    def _warn_of_sums(self, n_rows: int) -> None:
        """Warn if sums of gradients by bin let the active party solve for the others' bins."""
        settings = self.settings
        n_rounds = max(0, settings.num_boost_round - self.section.first_trees)
        # Of gradients and of hessians, at each root and one child of each pair above the leaves.
        n_sums = n_rounds * settings.n_sums
        is_multi = settings.objective == "multi:softprob"  # with two classes or more
        if n_sums * (1 + is_multi) < ENOUGH_SUMS * n_rows:
            return
        sums = f"up to {n_sums:,} sums{' a class' if is_multi else ''}"
        self.warn_once(
            "the active party may find the bin of nearly every training row in the others' "
            f"columns: it gets {sums} of each bin, and half as many as the {n_rows:,} rows are "
            "enough; fewer rounds (num-boost-round) and a smaller max-depth disclose less; a "
            "smaller max-bin discloses less of a value"
        )

    def _finish(self, run: SecureBoostState) -> Conversation[methods.Outcome]:
        """Every party keeps its part; the active one scores the model, and may hand it over."""
        mailbox, active, passive = run.mailbox, run.mailbox.active, run.mailbox.passive
        best = run.history.best_round if run.history.patience else None
        yield Checkpoint(run, run.n_grown)
        yield from mailbox.relay(messages.HandOverRequest, passive, SentReply)
        n_rounds = run.initial.n_rounds + (best or len(run.history))
        reply = yield from mailbox.ask_active(
            messages.FinishRequest, messages.FinishReply, best_round=n_rounds
        )
        if not self.settings.scale_pos_weight:
            log.info("scale-pos-weight balanced: %r", reply.scale_pos_weight)
            resolved = {"asked_scale_pos_weight": reply.scale_pos_weight}
            self.settings = self.settings.model_copy(update=resolved)
        if self.settings.asked_child_weight == AUTO:
            resolved = {"asked_child_weight": reply.min_child_weight}
            self.settings = self.settings.model_copy(update=resolved)
        if len(reply.model):  # all parties allow the export of the whole model
            with as_protocol_error(active, "FinishReply", "model"):
                files = model_files(from_text(reply.model.tobytes().decode(), Ensemble))
            yield files
        else:
            yield vertical.parts_file(self.model_id, self.settings, active, passive)
        has_curve = UNCALIBRATED in reply.score_names
        return {
            **vertical.final_summary(reply, mailbox, run.rows, [reply.few]),
            **calibration_summary(self, has_curve, run.rows["valid"]),
            "trees": reply.n_trees,
            "best_round": best,
            **run.initial.facts(self.settings),
        }


def _grow(mailbox: vertical.Mailbox, n_blocks: int) -> Conversation[None]:
    """Algorithm 2: the other blocks of a round's gradients, then level by level."""
    passive = mailbox.passive
    yield from mailbox.relay_blocks(messages.EncryptRequest, messages.TakeRequest, n_blocks)
    growing = True
    while growing:
        yield from mailbox.relay(messages.SumRequest, passive, SentReply)
        split = yield from mailbox.ask_active(messages.SplitRequest, messages.SplitReply)
        growing = split.growing
        if split.passive_splits and (len(passive) > 1 or not growing):
            yield from mailbox.relay(messages.PartitionRequest, passive, SentReply)


def _record_scores(run: SecureBoostState, reply: messages.BeginReply) -> Conversation[None]:
    """Add the scores of the rounds that are finished now."""
    for train, valid in zip(reply.train_scores, reply.valid_scores, strict=True):
        train_scores = vertical.named_scores(reply.score_names, train)
        valid_scores = vertical.named_scores(reply.score_names, valid)
        run.history.add(valid_scores)
        n_rounds = len(run.history)
        yield Progress(n_rounds, reply.n_trees, reply.n_leaves, train_scores, valid_scores)


STRATEGIES = {SecureBoost.method: SecureBoost}
