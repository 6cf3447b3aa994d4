"""Interactive inference: the active party walks the trees and asks the others level by level.

Source: Cheng et al. 2019, "SecureBoost" (arXiv:1901.08755), Figure 3. All rows walk at once, down
``interactive.trees-at-once`` trees at a time (0: all; 1: tree after tree, as in the papers). Each
lot of trees asks the passive parties until its last row is at a leaf, at most ``max_depth`` times.
With the active party's steps between the questions, and a last one in which the others forget the
rows, the exchanges after the alignment are ::

    2 + 2 * sum over the lots of the questions of the lot  <=  2 + 2 * max_depth * n_lots,

where ``n_lots = ceil(n_trees / trees_at_once)``, and 1 for all at once. The predictions do not
depend on it. Only the active party writes them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedapp.conversation import Checkpoint, Conversation, Parties
from fedapp.messages.inference import AnswerReply, AnswerRequest, WalkReply, WalkRequest
from fedapp.messages.vertical import VerticalHelloReply
from fedapp.settings import Section, Settings, check
from strategies.base import Summary
from strategies.inference import InferenceStrategy
from strategies.vertical import Mailbox


class InteractiveSettings(Section):
    """``[interactive]`` of the run config; ``trees_at_once``: trees in a lot, 0: all."""

    trees_at_once: Annotated[int, Field(ge=0, lt=2**31)]


class Interactive(InferenceStrategy):
    """The server's side: relays questions and answers."""

    method = "interactive"

    @classmethod
    def own_settings(cls, settings: Settings) -> InteractiveSettings:
        """``[interactive]``, checked; and there must be a model."""
        super().own_settings(settings)
        return check(InteractiveSettings, settings.sections["interactive"], "interactive.")

    def conversation(
        self, parties: Parties[VerticalHelloReply], saved: Checkpoint | None
    ) -> Conversation[Summary]:
        """Ask until every row is at a leaf."""
        mailbox = Mailbox(parties)
        active, passive = mailbox.active, mailbox.passive
        rows = yield from self.align_all(parties, mailbox)
        fields = {**self.own_settings(self.settings).model_dump(), "suffix": self.settings.output}
        is_last = False
        while not is_last:
            replies = yield from mailbox.relay(WalkRequest, [active], WalkReply, **fields)
            is_last = replies[active].finished
            yield from mailbox.relay(AnswerRequest, passive, AnswerReply, last=is_last)
        n_trees = replies[active].n_trees
        return (yield from self.predicted(active, rows, n_trees))


STRATEGIES = {Interactive.method: Interactive}
