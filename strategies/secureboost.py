"""SecureBoost: boosted trees over the columns of several parties, exactly XGBoost's.

Source: Cheng et al. 2019, "SecureBoost: A Lossless Federated Learning Framework"
(arXiv:1901.08755), Algorithms 1 and 2; "Completely SecureBoost" is ``first-trees``. The server
passes on what it cannot read; what the active and the passive parties do stands in
``clients.secureboost.active``, ``clients.secureboost.round`` and ``clients.secureboost.passive``.

With one passive party a level takes two exchanges, because which rows a split sends left travels
with the next level's sums; with several a third tells all of them. One more begins the round, and
with one passive party one more ends it where that party has splits in the last level: a round takes
``2 + 2 max_depth`` exchanges at most with one passive party, ``1 + 3 max_depth`` with several.
Encrypted gradients that are more than one message carries take one more for each further block:
while the passive parties check and keep one, the active party makes the next.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Annotated, Any

from pydantic import Field

from fedapp.config import Section, Settings, check
from fedapp.conversation import Checkpoint, Conversation, ModelFiles, Parties, Progress
from fedapp.crypto.speed import seconds_to_encrypt
from fedapp.errors import ConfigError, blaming
from fedapp.messages.fields import Request
from fedapp.messages.parameters import loss_fields, parameters_of
from fedapp.messages.parcels import SentReply
from fedapp.messages.secureboost import (
    AnswerRequest,
    BeginReply,
    BeginRequest,
    EncryptRequest,
    FinishReply,
    FinishRequest,
    HandOverRequest,
    PartitionRequest,
    SetupRequest,
    SplitReply,
    SplitRequest,
    SumRequest,
    TakeRequest,
    WalkReply,
    WalkRequest,
    block_rows,
)
from fedapp.messages.vertical import VerticalHelloReply
from fedapp.trees.model import from_json
from fedapp.trees.objective import is_regression
from strategies.alignment import align
from strategies.base import Summary
from strategies.scoring import History, model_files
from strategies.settings import BASE_MARGIN, BOOSTING_SETTINGS, CONSTRAINTS, HELD_BACK, INIT_MODEL
from strategies.vertical import (
    MANY_PARTIES,
    Mailbox,
    VerticalStrategy,
    check_key_bits,
    final_summary,
    named_scores,
    parts_file,
)
from strategies.warm_start import Begun, init_model_id

Rate = Annotated[float, Field(gt=0, lt=1)]
# Of the training rows: with so many sums of each bin, the bins of nearly all rows can be solved for
# (``simulations.attacks.solved_bins``).
ENOUGH_SUMS = 0.5


class SecureBoostSettings(Section):
    """``[secureboost]`` of the run config.

    ``key_bits`` of Paillier's modulus; fewer than 2048 only with ``insecure_small_key``.
    ``first_trees``: rounds that the active party grows alone. ``goss``: each round draws the rows
    with the largest gradients, a share ``top_rate``, and ``other_rate`` of all rows from the rest.
    """

    key_bits: Annotated[int, Field(ge=256, le=8192)]
    insecure_small_key: bool
    first_trees: Annotated[int, Field(ge=0, le=10**6)]
    goss: bool
    top_rate: Rate
    other_rate: Rate


class SecureBoost(VerticalStrategy):
    """SecureBoost: XGBoost's trees over the columns of several parties, gradients under Paillier.

    The server relays letters that it cannot read; the model's parts stay at the parties, so
    ``Result.arrays`` names it, and holds it only where all parties allow its export.

    Parameters
    ----------
    num_boost_round, eta, max_depth, max_bin, reg_lambda, ...
        As in XGBoost, see the signature.
    key_bits : int
        Of Paillier's modulus; fewer than 2048 only with ``insecure_small_key``.
    first_trees : int
        Rounds of the active party's columns alone; 1 is Completely SecureBoost.
    goss : bool
        Whether each round draws ``top_rate`` of the rows by gradient and ``other_rate`` of all
        from the rest.
    align : {"psi", "ordered"}
        How rows are matched; ``align_most_rows`` bounds ``num_rounds``.
    **settings
        Others of the signature, as in the run config.

    Raises
    ------
    ConfigError : a setting breaks its rule, or SecureBoost does not read it.
    """

    method = "secureboost"
    reads = (
        BOOSTING_SETTINGS
        | CONSTRAINTS
        | BASE_MARGIN
        | INIT_MODEL
        | HELD_BACK
        | {"objective", "allow-export", "least-bin-rows"}
    )
    history: History

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.own = self.own_settings(self.settings)
        self.purities: list[list[float]] = []
        self.rows: dict[str, int] = {}
        self.trained = False  # all rounds are finished
        self.n_grown = 0  # rounds, the last of which may have no scores yet
        self.begun = Begun()

    @classmethod
    def own_settings(cls, settings: Settings) -> SecureBoostSettings:
        """``[secureboost]``, checked."""
        own = check(SecureBoostSettings, settings.sections["secureboost"], "secureboost.")
        check_key_bits(own.key_bits, own.insecure_small_key, "secureboost")
        patience = settings.early_stopping_rounds
        if patience and own.first_trees > patience:
            # The rounds the active party grows alone are one exchange, in which nobody can stop it.
            raise ConfigError(
                "secureboost.first-trees must be at most early-stopping-rounds where that is set, "
                f"got {own.first_trees} and {patience}"
            )
        if own.goss and own.top_rate + own.other_rate > 1:
            total = own.top_rate + own.other_rate
            raise ConfigError(f"secureboost.top-rate + other-rate must be <= 1, got {total:g}")
        if own.goss and settings.subsample < 1:
            raise ConfigError(
                f"subsample must be 1 with secureboost.goss, got {settings.subsample}"
            )
        return own

    @classmethod
    def exchanges_a_round(cls, settings: Settings) -> int:
        """As this module says, with as many blocks of gradients as there may be rows."""
        n_receivers = (settings.asked_parties or MANY_PARTIES) - 1
        most = block_rows(cls.own_settings(settings).key_bits // 4, n_receivers)
        return 1 + 3 * settings.max_depth + settings.align_most_rows // most

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        """With how rows are drawn."""
        return {**super().planned(settings), "goss": cls.own_settings(settings).goss}

    def conversation(
        self, parties: Parties[VerticalHelloReply], saved: Checkpoint | None
    ) -> Conversation[Summary]:
        """Round by round, level by level."""
        mailbox = Mailbox(parties)
        active = mailbox.active
        if saved is None:
            yield from self._begin(parties, mailbox)
        else:
            self._restore(saved, mailbox)
        n_rounds = self.begun.n_rounds + self.settings.num_boost_round
        # Of a block of gradients, if the active party's machine is like this one; a guess.
        n_receivers = len(mailbox.passive)
        own, share = self.own, self.settings.subsample
        share = own.top_rate + own.other_rate if own.goss else share
        most = block_rows(own.key_bits // 4, n_receivers)
        seconds = seconds_to_encrypt(min(round(share * self.rows["train"]), most), own.key_bits)
        while not self.trained:
            yield self._checkpoint(mailbox)
            wanted = 0 if self.history.stops else n_rounds
            replies = yield from mailbox.relay(
                BeginRequest, [active], BeginReply, seconds=seconds, n_rounds=wanted
            )
            yield from self._note_scores(replies[active])
            self.trained = not replies[active].begun or self.history.stops
            if self.trained:
                # What may have begun is grown no further.
                mailbox.clear()
            else:
                # The gradients that the first message had no room for, a block at a time.
                sends_on: dict[str, Request] = dict.fromkeys(mailbox.passive, TakeRequest())
                sends_on[active] = EncryptRequest()
                for _ in range(replies[active].n_blocks):
                    yield from mailbox.relay_each(sends_on, SentReply, seconds=seconds)
                yield from self._grow(mailbox)
                self.n_grown = len(self.history) + 1
        return (yield from self._finish(mailbox))

    def _begin(self, parties: Parties[VerticalHelloReply], mailbox: Mailbox) -> Conversation[None]:
        """Rows in one order, columns in bins, a key."""
        self.rows = yield from align(parties, mailbox, self.settings)
        self.warn_of_few_matched(sum(self.rows.values()))
        self.settings = self.settings.watching(self.rows["valid"])
        self.history, init_model = History.of(self.settings), init_model_id(self.settings)
        self._warn_of_sums()
        if self.settings.early_stopping_rounds and not self.rows["valid"]:
            raise ConfigError(
                "valid-fraction must leave validation rows for early-stopping-rounds, "
                f"got {self.settings.valid_fraction}"
            )
        given = {
            "objective": self.settings.objective,
            **parameters_of(self.settings),
            **loss_fields(self.settings),
            "monotone_constraints": self.settings.monotone_constraints,
            "interaction_constraints": self.settings.interaction_constraints,
            **self.own.model_dump(),
            "init_model": init_model,
        }
        yield from mailbox.relay(SetupRequest, parties, SentReply, **given)
        if init_model:
            yield from self._walk(mailbox)

    def _warn_of_sums(self) -> None:
        """Say so where the active party may be told enough to solve for the others' bins."""
        settings, n_rows = self.settings, self.rows["train"]
        n_rounds = max(0, settings.num_boost_round - self.own.first_trees)
        # Gradients and hessians, of each root and of one of each two children above the leaves.
        n_sums = n_rounds * 2**settings.max_depth
        is_multi = settings.objective == "multi:softprob"  # with two classes or more
        if n_sums * (1 + is_multi) < ENOUGH_SUMS * n_rows:
            return
        told = f"up to {n_sums:,} sums{' a class' if is_multi else ''}"
        has = "" if self.simulated else " (which may have it)"
        what = "bin of nearly every training row"
        if settings.least_bin_rows:
            what = "merged bins of most training rows"
        self.warn_once(
            f"the active party may find the {what} in the others' columns: it is told {told} of "
            f"each bin, and half as many as the {n_rows:,} rows are enough; fewer rounds "
            "(num-boost-round) and a smaller max-depth tell less; least-bin-rows at the passive "
            f"parties{has} merges bins, and the more rounds, the less that hides; a smaller "
            "max-bin tells less of a value"
        )

    def _walk(self, mailbox: Mailbox) -> Conversation[None]:
        """The rows down the model that the run goes on from; two exchanges a level at most."""
        active, passive = mailbox.active, mailbox.passive
        reply = (yield from mailbox.relay(WalkRequest, [active], WalkReply))[active]
        while not reply.finished:
            yield from mailbox.relay(AnswerRequest, passive, SentReply)
            reply = (yield from mailbox.relay(WalkRequest, [active], WalkReply))[active]
        self.begun = Begun(reply.n_rounds, reply.n_trees)

    def _grow(self, mailbox: Mailbox) -> Conversation[None]:
        """The trees of a round, level by level."""
        active, passive, growing = mailbox.active, mailbox.passive, True
        while growing:
            yield from mailbox.relay(SumRequest, passive, SentReply)
            reply = (yield from mailbox.relay(SplitRequest, [active], SplitReply))[active]
            growing = reply.growing
            if reply.passive_splits and (len(passive) > 1 or not growing):
                yield from mailbox.relay(PartitionRequest, passive, SentReply)

    def _note_scores(self, reply: BeginReply) -> Conversation[None]:
        """Scores of the rounds that are finished now."""
        for train, valid, views in zip(
            reply.train_scores, reply.valid_scores, reply.purities, strict=True
        ):
            scores = named_scores(reply.score_names, train), named_scores(reply.score_names, valid)
            self.history.add(scores[1])
            self.purities.append(views.tolist())
            yield Progress(len(self.history), reply.n_trees, reply.n_leaves, *scores)

    def _finish(self, mailbox: Mailbox) -> Conversation[Summary]:
        """Every party keeps its part; the active one scores the model."""
        active, passive = mailbox.active, mailbox.passive
        best = self.history.best_round if self.history.patience else None
        yield self._checkpoint(mailbox)
        yield from mailbox.relay(HandOverRequest, passive, SentReply)
        n_rounds = self.begun.n_rounds + (best or len(self.history))
        replies = yield from mailbox.relay(
            FinishRequest, [active], FinishReply, best_round=n_rounds
        )
        reply = replies[active]
        yield self._written(active, passive, reply)
        return {
            **final_summary(reply, active, self.rows),
            "leaf_purity": self._purity_by_view(passive),
            "trees": reply.n_trees,
            "best_round": best,
            **self.begun.facts(self.settings),
        }

    def _purity_by_view(self, passive: tuple[str, ...]) -> dict[str, list[float]]:
        """Purity of the leaves of each round, and of what each passive party can tell apart."""
        if is_regression(self.settings.objective):
            return {}
        views = ("leaves", *passive)
        return {view: [each[place] for each in self.purities] for place, view in enumerate(views)}

    def _written(self, active: str, passive: tuple[str, ...], reply: FinishReply) -> ModelFiles:
        """The whole model where all parties allow it, else where its parts lie."""
        if len(reply.model):
            model = from_json(reply.model.tobytes().decode())
            with blaming(active, "FinishReply", "kinds"):
                return model_files(model, reply.kinds)
        return parts_file(self.state.model_id, self.settings, active, passive)

    def _checkpoint(self, mailbox: Mailbox) -> Checkpoint:
        """Scores so far, and the letters on their way."""
        facts = {"history": self.history.scores, "purities": self.purities, "rows": self.rows}
        facts["rounds"] = self.n_grown
        facts["trained"], facts["begun"] = self.trained, astuple(self.begun)
        return Checkpoint(mailbox.arrays(), facts)

    def _restore(self, saved: Checkpoint, mailbox: Mailbox) -> None:
        """Go on from a checkpoint."""
        facts = saved.facts
        self.purities, self.rows = facts["purities"], facts["rows"]
        self.n_grown = facts["rounds"]
        self.settings = self.settings.watching(self.rows["valid"])
        self.history = History.of(self.settings, facts["history"])
        self.trained, self.begun = facts["trained"], Begun(*facts["begun"])
        mailbox.restore(saved.arrays)


STRATEGIES = {SecureBoost.method: SecureBoost}
