"""Interactive inference: the active party walks the trees and asks the others level by level.

Source: Cheng et al. 2019, "SecureBoost" (arXiv:1901.08755), Figure 3. All trees and rows walk at
once, so the passive parties are asked at most ``max_depth`` times, and with the active party's own
steps between them it takes ``1 + 2 max_depth`` exchanges after the alignment. Predictions are
written at the active party alone.
"""

from __future__ import annotations

from fedapp.config import Settings
from fedapp.conversation import Checkpoint, Conversation, Parties, ask
from fedapp.messages.interactive import AnswerReply, AnswerRequest, WalkReply, WalkRequest
from fedapp.messages.vertical import VerticalHelloReply
from strategies.base import Summary
from strategies.inference import align_all, check_model, predicted
from strategies.vertical import Mailbox, VerticalStrategy, active_party


class Interactive(VerticalStrategy):
    """The server's side: it passes questions and answers on."""

    @classmethod
    def own_settings(cls, settings: Settings) -> None:
        """None; but there must be a model."""
        check_model(settings)

    def conversation(
        self, parties: Parties[VerticalHelloReply], saved: Checkpoint | None
    ) -> Conversation[Summary]:
        """Ask until every row is at a leaf."""
        active, mailbox = active_party(parties), Mailbox(parties)
        passive = tuple(party for party in parties if party != active)
        rows = yield from align_all(parties, active, mailbox, self.settings)
        while True:
            request = WalkRequest(**mailbox.fields_for(active), suffix=self.settings.output)
            replies = yield from ask({active: request}, WalkReply)
            mailbox.collect(replies)
            if replies[active].finished:
                break
            questions = {party: AnswerRequest(**mailbox.fields_for(party)) for party in passive}
            mailbox.collect((yield from ask(questions, AnswerReply)))
        n_trees = replies[active].n_trees
        return (yield from predicted(self.settings, active, rows, n_trees, {}))


STRATEGY = Interactive
