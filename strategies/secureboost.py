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
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field

from fedapp.conversation import Conversation, Progress
from fedapp.crypto.sums import seconds_to_encrypt
from fedapp.errors import ConfigError, as_protocol_error
from fedapp.messages import secureboost
from fedapp.messages.secureboost import (
    AnswerRequest,
    BeginReply,
    PartitionRequest,
    SplitReply,
    SplitRequest,
    SumRequest,
    WalkReply,
    WalkRequest,
    block_rows,
)
from fedapp.messages.vertical import SentReply
from fedapp.metrics.names import UNCALIBRATED
from fedapp.records.document import from_text
from fedapp.settings import Section, Settings
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import has_quantile_leaves
from fedapp.trees.size import ONE_TREE
from strategies.encrypted_rounds import EncryptedRounds, RoundsState
from strategies.handshake import InitialModel, init_model_id
from strategies.method import CALIBRATION, GROWTH, INIT_MODEL, Summary, check_watched
from strategies.scoring import History, calibration_summary, model_files
from strategies.vertical import (
    MANY_PARTIES,
    Hellos,
    KeySettings,
    final_summary,
    named_scores,
    parts_file,
)

log = logging.getLogger("fedapp")
Rate = Annotated[float, Field(gt=0, lt=1)]


class SecureBoostSettings(KeySettings, Section):
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
class SecureBoostState(RoundsState):
    """What a run has at a checkpoint."""

    initial: InitialModel = field(default_factory=InitialModel)


class SecureBoost(EncryptedRounds[SecureBoostState]):
    """SecureBoost: XGBoost's trees over the columns of several parties, gradients under Paillier.

    The server relays letters that it cannot read. The model is divided among the parties, so
    ``Result.arrays`` names it, and contains it only where all parties allow its export."""

    method = "secureboost"
    reads = GROWTH - {"feature-weights"} | CALIBRATION | INIT_MODEL | {"allow-export"}
    messages: ClassVar[Any] = secureboost
    state = SecureBoostState
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
        n_receivers = (settings.asked_parties or MANY_PARTIES) - 1
        most = block_rows(cls.section_settings(settings).key_bits // 4, n_receivers)
        return 1 + 3 * settings.n_levels + settings.align_most_rows // most

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        return {**super().planned(settings), "goss": cls.section_settings(settings).goss}

    def begin(self, parties: Hellos) -> Conversation[SecureBoostState]:
        """Match the rows, bin the columns, exchange a key; walk the initial model."""
        mailbox, rows = yield from self.match_rows(parties)
        self.settings = settings = self.settings.watching(rows["valid"])
        init_model = init_model_id(settings)
        n_rounds = settings.num_boost_round - self.section.first_trees
        self.warn_of_sums(max(0, n_rounds), rows["train"])
        check_watched(settings, rows["valid"])
        names = "multi_strategy", "num_parallel_tree", "calibration"
        more = {name: getattr(settings, name) for name in names}
        yield from self.set_up(parties, mailbox, init_model=init_model, **more)
        initial = InitialModel()
        if init_model:
            # The rows walk down its trees; two exchanges a level at most.
            active, passive = mailbox.active, mailbox.passive
            reply = (yield from mailbox.relay(WalkRequest, [active], WalkReply))[active]
            while not reply.finished:
                yield from mailbox.relay(AnswerRequest, passive, SentReply)
                reply = (yield from mailbox.relay(WalkRequest, [active], WalkReply))[active]
            initial = InitialModel(reply.n_rounds, reply.n_trees)
        return SecureBoostState(mailbox, rows, History.of(settings), initial=initial)

    def n_rounds(self, run: SecureBoostState) -> int:
        """With those of the initial model."""
        return run.initial.n_rounds + self.settings.num_boost_round

    def seconds(self, run: SecureBoostState) -> float:
        section, share = self.section, self.settings.subsample
        share = section.top_rate + section.other_rate if section.goss else share
        most = block_rows(section.key_bits // 4, len(run.mailbox.passive))
        return seconds_to_encrypt(min(round(share * run.rows["train"]), most), section.key_bits)

    def grow(self, run: SecureBoostState, reply: BeginReply, seconds: float) -> Conversation[None]:
        """Algorithm 2, level by level."""
        mailbox, active, passive = run.mailbox, run.mailbox.active, run.mailbox.passive
        yield from self.send_blocks(mailbox, passive, reply.n_blocks, seconds)
        growing = True
        while growing:
            yield from mailbox.relay(SumRequest, passive, SentReply)
            split = (yield from mailbox.relay(SplitRequest, [active], SplitReply))[active]
            growing = split.growing
            if split.passive_splits and (len(passive) > 1 or not growing):
                yield from mailbox.relay(PartitionRequest, passive, SentReply)

    def record_scores(self, run: SecureBoostState, reply: BeginReply) -> Conversation[None]:
        for train, valid in zip(reply.train_scores, reply.valid_scores, strict=True):
            scores = named_scores(reply.score_names, train), named_scores(reply.score_names, valid)
            run.history.add(scores[1])
            yield Progress(len(run.history), reply.n_trees, reply.n_leaves, *scores)

    def finish(self, run: SecureBoostState) -> Conversation[Summary]:
        """Every party keeps its part; the active one scores the model, and may hand it over."""
        mailbox, passive = run.mailbox, run.mailbox.passive
        is_given = self.settings.scale_pos_weight
        reply, best = yield from self.store(run, run.initial.n_rounds)
        if not is_given:
            log.info("scale-pos-weight balanced: %r", reply.scale_pos_weight)
        if len(reply.model):  # all parties allow the export of the whole model
            model = from_text(reply.model.tobytes().decode(), Ensemble)
            with as_protocol_error(mailbox.active, "FinishReply", "model"):
                files = model_files(model)
            yield files
        else:
            yield parts_file(self.model_id, self.settings, mailbox.active, passive)
        has_curve = UNCALIBRATED in reply.score_names
        return {
            **final_summary(reply, mailbox, run.rows, [reply.few]),
            **calibration_summary(self, has_curve, run.rows["valid"]),
            "trees": reply.n_trees,
            "best_round": best,
            **run.initial.facts(self.settings),
        }


STRATEGIES = {SecureBoost.method: SecureBoost}
