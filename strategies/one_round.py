"""One-round prediction: leaf sets of all parties, intersected at the active one.

Source: Liu et al. 2019, "Federated Forest" (arXiv:1905.10053v1), Algorithms 3 and 4. After the
alignment the passive parties are asked once, whatever the number and the depth of the trees.
"""

from __future__ import annotations

from fedapp.config import Settings
from fedapp.conversation import Checkpoint, Conversation, Model, Parties, ask
from fedapp.errors import ConfigError
from fedapp.messages.one_round import IntersectReply, IntersectRequest, WalkReply, WalkRequest
from fedapp.messages.vertical import VerticalHelloReply
from strategies.alignment import align
from strategies.base import Summary
from strategies.vertical import Mailbox, VerticalStrategy, active_party


class OneRound(VerticalStrategy):
    """The server's side: it passes leaf sets on."""

    @classmethod
    def own_settings(cls, settings: Settings) -> None:
        """None; but there must be a model."""
        if not settings.model:
            raise ConfigError("model must be the id of a trained model, got ''")

    def conversation(
        self, parties: Parties[VerticalHelloReply], saved: Checkpoint | None
    ) -> Conversation[Summary]:
        """Algorithm 4."""
        active, mailbox = active_party(parties), Mailbox(parties)
        passive = [party for party in parties if party != active]
        whole = self.settings.model_copy(update={"test_fraction": 0.0, "valid_fraction": 0.0})
        rows = yield from align(parties, active, mailbox, whole)
        walks = {party: WalkRequest(**mailbox.fields_for(party)) for party in passive}
        mailbox.collect((yield from ask(walks, WalkReply)))
        request = IntersectRequest(**mailbox.fields_for(active), suffix=self.settings.output)
        reply = (yield from ask({active: request}, IntersectReply))[active]
        yield Model({"model.json": f'{{"format":1,"kind":"model","id":"{self.settings.model}"}}\n'})
        return {
            "metrics": {},
            "active": active,
            "matched_rows": {"predicted": rows.n_train},
            "trees": reply.n_trees,
            "best_round": None,
            "importance": {},
        }


STRATEGY = OneRound
