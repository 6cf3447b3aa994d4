"""One-round prediction: leaf sets of all parties, intersected at the active one.

Source: Liu et al. 2019, "Federated Forest" (arXiv:1905.10053v1), Algorithms 3 and 4. After the
alignment the passive parties are asked once, whatever the number and the depth of the trees.
"""

from __future__ import annotations

from fedapp.conversation import Checkpoint, Conversation, Parties, ask
from fedapp.messages.one_round import IntersectReply, IntersectRequest, WalkReply, WalkRequest
from fedapp.messages.vertical import VerticalHelloReply
from strategies.base import Summary
from strategies.inference import InferenceStrategy
from strategies.vertical import Mailbox, active_party


class OneRound(InferenceStrategy):
    """The server's side: it passes leaf sets on."""

    def conversation(
        self, parties: Parties[VerticalHelloReply], saved: Checkpoint | None
    ) -> Conversation[Summary]:
        """Algorithm 4."""
        active, mailbox = active_party(parties), Mailbox(parties)
        passive = [party for party in parties if party != active]
        rows = yield from self.align_all(parties, active, mailbox)
        walks = {party: WalkRequest(**mailbox.fields_for(party)) for party in passive}
        mailbox.collect((yield from ask(walks, WalkReply)))
        request = IntersectRequest(**mailbox.fields_for(active), suffix=self.settings.output)
        reply = (yield from ask({active: request}, IntersectReply))[active]
        return (yield from self.predicted(active, rows, reply.n_trees))


STRATEGY = OneRound
