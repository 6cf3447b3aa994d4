"""HybridTree: trees over parties with other columns and other rows; a host's splits come first.

Source: Li et al. 2024, "Effective and Efficient Federated Tree Learning on Hybrid Data" (ICLR,
arXiv:2310.11865). One host has labels and few columns; each guest has more columns for some of its
rows. In each round the host grows the upper layers of the trees on all of its rows and its
columns. Below each leaf every guest grows layers on its columns, by gradients that the host has
encrypted, from the rows that both have; guests do not meet. A row's prediction is the mean over the
guests that have it ("bagging" below each of the host's leaves).

Of the paper only the abstract and the public reviews could be read, so these could not be compared
with it, or are known to differ:

- Guests' splits are XGBoost's, by gains that the host computes from encrypted sums, level by level,
  as in SecureBoost. The paper says that two messages a tree are enough: encrypted gradients one
  way, encrypted predictions back. Under Paillier alone a guest cannot compare gains.
- A leaf that a guest does not split, and a row that no guest has, have the host's leaf value. Only
  leaf values below splits of a guest are of the pair's rows only.
- One host; the paper also has several.

Read ``fedapp.messages.hybrid_tree``, this file, then ``clients.hybrid_tree``. A round takes
``2 + 2 * guest-depth`` exchanges at most, and one more for each further block of
gradients: one to begin, two a level, one for the guests' last splits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from fedapp.conversation import Checkpoint, Conversation, Progress, Saved
from fedapp.crypto.sums import seconds_to_encrypt
from fedapp.errors import ConfigError
from fedapp.messages.encrypted_sums import block_rows
from fedapp.messages.fields import MOST_DEPTH, Request, loss_fields, parameters_of
from fedapp.messages.hybrid_tree import (
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
)
from fedapp.messages.vertical import SentReply
from fedapp.settings import Section, Settings
from fedapp.trees.shown import not_counted
from strategies.method import (
    BASE_MARGIN,
    BOOSTING_SETTINGS,
    CONSTRAINTS,
    LABEL_PRIVACY,
    OF_ROWS,
    SPLIT_SETTINGS,
    Summary,
)
from strategies.scoring import History
from strategies.vertical import (
    Hellos,
    Mailbox,
    VerticalStrategy,
    check_key_bits,
    final_summary,
    named_scores,
    parts_file,
)


class HybridTreeSettings(Section):
    """``[hybrid-tree]`` of the run config; see ``HybridTree``."""

    table = "hybrid-tree"

    guest_depth: Annotated[int, Field(ge=1, lt=MOST_DEPTH)]
    """Lowest layers of a tree, on the guests' columns; the host grows the rest of `max-depth`."""
    key_bits: Annotated[int, Field(ge=256, le=8192)]
    """Bits of Paillier's modulus."""
    insecure_small_key: bool
    """Whether fewer than 2048 bits are allowed, for trials."""


@dataclass(slots=True, eq=False)
class HybridTreeState:
    """What a run has at a checkpoint."""

    mailbox: Mailbox
    rows: Mapping[str, int]  # of the host, by subset
    history: History
    n_grown: int = 0  # rounds, the last of which may have no scores yet
    is_trained: bool = False  # whether all rounds are finished


class HybridTree(VerticalStrategy):
    """HybridTree: a host's trees, continued by guests with more columns for some of its rows.

    The server relays letters that it cannot read. The model is divided among the parties."""

    method = "hybrid-tree"
    reads = (
        BOOSTING_SETTINGS
        | CONSTRAINTS
        | BASE_MARGIN
        | SPLIT_SETTINGS
        | {"objective"}
        | LABEL_PRIVACY
    )
    join_rule = "whose host keeps the rows that guests lack anyway"
    objectives = OF_ROWS
    section: HybridTreeSettings

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        return {**super().planned(settings), "levels": settings.n_levels}

    @classmethod
    def section_settings(cls, settings: Settings) -> HybridTreeSettings:
        section = HybridTreeSettings.of(settings)
        check_key_bits(section.key_bits, section.insecure_small_key, "hybrid-tree")
        if section.guest_depth >= settings.max_depth:
            raise ConfigError(
                f"hybrid-tree.guest-depth must be below max-depth ({settings.max_depth}), which "
                f"leaves layers to the host, got {section.guest_depth}"
            )
        return section

    @classmethod
    def exchanges_a_round(cls, settings: Settings) -> int:
        """See the module; gradients of ``align-most-rows`` rows are sent in blocks."""
        section = cls.section_settings(settings)
        most = block_rows(section.key_bits // 4, max(1, settings.asked_parties - 1))
        return 2 + 2 * section.guest_depth + settings.align_most_rows // most

    def conversation(self, parties: Hellos, saved: Saved | None) -> Conversation[Summary]:
        """Round by round: the host's layers, then those of all guests, level by level."""
        if saved is None:
            run = yield from self._begin(parties)
        else:
            run = saved.read(HybridTreeState)
            self.settings = self.settings.watching(run.rows["valid"])
        mailbox, host = run.mailbox, run.mailbox.active
        seconds = seconds_to_encrypt(run.rows["train"], self.section.key_bits)
        while not run.is_trained:
            yield Checkpoint(run, run.n_grown)
            n_wanted = 0 if run.history.stops else self.settings.num_boost_round
            beginning = mailbox.relay(
                BeginRequest, [host], BeginReply, seconds=seconds, n_rounds=n_wanted
            )
            reply = (yield from beginning)[host]
            yield from _record_scores(run, reply)
            run.is_trained = not reply.begun or run.history.stops
            if run.is_trained:
                mailbox.clear()  # gradients of a round that is not grown
            else:
                yield from _grow(run, reply, seconds)
                run.n_grown = len(run.history) + 1
        return (yield from self._finish(run))

    def _begin(self, parties: Hellos) -> Conversation[HybridTreeState]:
        """Match the rows of each pair, bin the columns, exchange keys."""
        mailbox, rows = yield from self.match_rows(parties)
        self.settings = self.settings.watching(rows["valid"])
        settings = self.settings
        if settings.early_stopping_rounds and not rows["valid"]:
            raise ConfigError(
                "valid-fraction must leave validation rows for early-stopping-rounds, "
                f"got {settings.valid_fraction}"
            )
        # A level's open nodes are all summed at first, later one child of each pair.
        fewest = min(parties[name].n_table for name in mailbox.passive)
        self.warn_of_sums(settings.num_boost_round, min(rows["train"], fewest))
        fields = {
            "objective": settings.objective,
            **parameters_of(settings),
            **loss_fields(settings),
            "monotone_constraints": settings.monotone_constraints,
            "interaction_constraints": settings.interaction_constraints,
            **self.section.model_dump(),
        }
        yield from mailbox.relay(SetupRequest, parties, SentReply, **fields)
        return HybridTreeState(mailbox, rows, History.of(settings))

    def _finish(self, run: HybridTreeState) -> Conversation[Summary]:
        """Every party keeps its part; the host scores the model."""
        mailbox, host, guests = run.mailbox, run.mailbox.active, run.mailbox.passive
        best = run.history.best_round if run.history.patience else None
        yield Checkpoint(run, run.n_grown)
        yield from mailbox.relay(HandOverRequest, guests, SentReply)
        n_rounds = best or len(run.history)
        finishing = mailbox.relay(FinishRequest, [host], FinishReply, best_round=n_rounds)
        reply = (yield from finishing)[host]
        if not self.settings.scale_pos_weight:
            resolved = {"asked_scale_pos_weight": reply.scale_pos_weight}
            self.settings = self.settings.model_copy(update=resolved)
        yield parts_file(self.model_id, self.settings, host, guests)
        return {
            **final_summary(reply, mailbox, run.rows, [not_counted()]),
            "trees": reply.n_trees,
            "best_round": best,
        }


def _grow(run: HybridTreeState, reply: BeginReply, seconds: float) -> Conversation[None]:
    """Grow the guests' layers of a round."""
    mailbox, host = run.mailbox, run.mailbox.active
    requests: dict[str, Request] = dict.fromkeys(reply.guests, TakeRequest())
    for _ in range(reply.n_blocks):
        # One block of gradients is encrypted while the last is taken.
        requests[host] = EncryptRequest()
        yield from mailbox.relay_each(requests, SentReply, seconds=seconds)
    growing = reply.guests
    splitting = list[str]()  # their last level
    while growing:
        yield from mailbox.relay(SumRequest, growing, SentReply)
        split = (yield from mailbox.relay(SplitRequest, [host], SplitReply))[host]
        growing, splitting = split.growing, [*splitting, *split.splitting]
    if splitting:
        yield from mailbox.relay(PartitionRequest, splitting, SentReply)


def _record_scores(run: HybridTreeState, reply: BeginReply) -> Conversation[None]:
    """Add the scores of the round that is finished now, if any."""
    if reply.score_names:
        train = named_scores(reply.score_names, reply.train_scores)
        valid = named_scores(reply.score_names, reply.valid_scores)
        run.history.add(valid)
        yield Progress(len(run.history), reply.n_trees, reply.n_leaves, train, valid)


STRATEGIES = {HybridTree.method: HybridTree}
