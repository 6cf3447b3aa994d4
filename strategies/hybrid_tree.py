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

from typing import Annotated, Any, ClassVar

from pydantic import Field

from fedapp.conversation import Conversation, Progress
from fedapp.errors import ConfigError
from fedapp.messages import hybrid_tree
from fedapp.messages.encrypted_sums import block_rows
from fedapp.messages.fields import MOST_DEPTH
from fedapp.messages.hybrid_tree import (
    BeginReply,
    PartitionRequest,
    SplitReply,
    SplitRequest,
    SumRequest,
)
from fedapp.messages.vertical import SentReply
from fedapp.settings import Section, Settings
from fedapp.trees.shown import not_counted
from strategies.encrypted_rounds import EncryptedRounds, RoundsState
from strategies.method import OF_ROWS, Summary, check_watched
from strategies.scoring import History
from strategies.vertical import Hellos, KeySettings, final_summary, named_scores, parts_file


class HybridTreeSettings(KeySettings, Section):
    """``[hybrid-tree]`` of the run config; see ``HybridTree``."""

    table = "hybrid-tree"

    guest_depth: Annotated[int, Field(ge=1, lt=MOST_DEPTH)]
    """Lowest layers of a tree, on the guests' columns; the host grows the rest of `max-depth`."""


class HybridTree(EncryptedRounds[RoundsState]):
    """HybridTree: a host's trees, continued by guests with more columns for some of its rows.

    The server relays letters that it cannot read. The model is divided among the parties."""

    method = "hybrid-tree"
    join_rule = "whose host keeps the rows that guests lack anyway"
    objectives = OF_ROWS
    messages: ClassVar[Any] = hybrid_tree
    state = RoundsState
    section: HybridTreeSettings

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        return {**super().planned(settings), "levels": settings.n_levels}

    @classmethod
    def section_settings(cls, settings: Settings) -> HybridTreeSettings:
        section = HybridTreeSettings.of(settings)
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

    def begin(self, parties: Hellos) -> Conversation[RoundsState]:
        """Match the rows of each pair, bin the columns, exchange keys."""
        mailbox, rows = yield from self.match_rows(parties)
        self.settings = self.settings.watching(rows["valid"])
        check_watched(self.settings, rows["valid"])
        # A level's open nodes are all summed at first, later one child of each pair.
        fewest = min(parties[name].n_table for name in mailbox.passive)
        self.warn_of_sums(self.settings.num_boost_round, min(rows["train"], fewest))
        yield from self.set_up(parties, mailbox)
        return RoundsState(mailbox, rows, History.of(self.settings))

    def grow(self, run: RoundsState, reply: BeginReply) -> Conversation[None]:
        """Grow the guests' layers of a round."""
        mailbox, host = run.mailbox, run.mailbox.active
        yield from self.send_blocks(mailbox, reply.guests, reply.n_blocks)
        growing = reply.guests
        splitting = list[str]()  # their last level
        while growing:
            yield from mailbox.relay(SumRequest, growing, SentReply)
            split = (yield from mailbox.relay(SplitRequest, [host], SplitReply))[host]
            growing, splitting = split.growing, [*splitting, *split.splitting]
        if splitting:
            yield from mailbox.relay(PartitionRequest, splitting, SentReply)

    def record_scores(self, run: RoundsState, reply: BeginReply) -> Conversation[None]:
        if reply.score_names:
            train = named_scores(reply.score_names, reply.train_scores)
            valid = named_scores(reply.score_names, reply.valid_scores)
            run.history.add(valid)
            yield Progress(len(run.history), reply.n_trees, reply.n_leaves, train, valid)

    def finish(self, run: RoundsState) -> Conversation[Summary]:
        """Every party keeps its part; the host scores the model."""
        mailbox = run.mailbox
        reply, best = yield from self.store(run)
        yield parts_file(self.model_id, self.settings, mailbox.active, mailbox.passive)
        summary = final_summary(reply, mailbox, run.rows, [not_counted()])
        return {**summary, "trees": reply.n_trees, "best_round": best}


STRATEGIES = {HybridTree.method: HybridTree}
