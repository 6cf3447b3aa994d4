"""One-round prediction: leaf sets of all parties, intersected at the active one.

Source: Liu et al. 2019, "Federated Forest" (arXiv:1905.10053v1), Algorithms 3 and 4. After the
alignment the passive parties are asked once, whatever the number and the depth of the trees.
"""

from __future__ import annotations

from fedapp.conversation import Checkpoint, Conversation, Parties
from fedapp.messages.inference import (
    IntersectReply,
    IntersectRequest,
    LeafSetsReply,
    LeafSetsRequest,
)
from fedapp.messages.vertical import VerticalHelloReply
from strategies.base import Summary
from strategies.inference import InferenceStrategy
from strategies.vertical import Mailbox


class OneRound(InferenceStrategy):
    """The server's side: relays leaf sets."""

    method = "one-round"

    def conversation(
        self, parties: Parties[VerticalHelloReply], saved: Checkpoint | None
    ) -> Conversation[Summary]:
        """Algorithm 4."""
        mailbox = Mailbox(parties)
        rows = yield from self.align_all(parties, mailbox)
        yield from mailbox.relay(LeafSetsRequest, mailbox.passive, LeafSetsReply)
        active, suffix = mailbox.active, self.settings.output
        replies = yield from mailbox.relay(
            IntersectRequest, [active], IntersectReply, suffix=suffix
        )
        return (yield from self.predicted(active, rows, replies[active].n_trees))


STRATEGIES = {OneRound.method: OneRound}
