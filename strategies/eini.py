"""Fed-EINI: encrypted inference in one round through the parties.

Source: Chen et al. 2021, "Fed-EINI: An Efficient and Interpretable Inference Framework for Decision
Tree Ensembles in Federated Learning" (arXiv:2105.09540), Algorithm 1 and Figure 5. Rows go in
batches as through a pipeline: while the last party handles the first batch, the active one encrypts
the next. This takes n_batches + n_parties exchanges, whatever the depth and number of the trees.
Only the active party writes predictions.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedapp.conversation import Conversation, Saved
from fedapp.messages.eini import StepReply, StepRequest
from fedapp.settings import Section, Settings
from strategies.inference import InferenceStrategy
from strategies.method import Outcome
from strategies.vertical import Hellos, KeySettings


class EiniSettings(KeySettings, Section):
    """``[eini]`` of the run config.

    ``least_possibilities`` is also of the values of each passive party's columns; it keeps off only
    trivial cases (see ``fedapp.messages.eini``).
    """

    table = "eini"

    batch_rows: Annotated[int, Field(ge=0, lt=2**31)]
    """Rows at once; 0: all that fit into 64 MiB."""
    least_possibilities: Annotated[float, Field(ge=1, le=1e300)]
    """Paths that must remain open for a row after the active party's splits."""
    unguarded: bool
    """Whether rows with fewer possibilities are predicted too."""


class Eini(InferenceStrategy):
    """Fed-EINI: relays parcels until all sums are back."""

    method = "eini"
    section: EiniSettings

    @classmethod
    def section_settings(cls, settings: Settings) -> EiniSettings:
        """``[eini]``, checked; and there must be a model."""
        eini = EiniSettings.of(settings)
        super().section_settings(settings)
        return eini

    def conversation(self, parties: Hellos, saved: Saved | None) -> Conversation[Outcome]:
        """Algorithm 1, for all trees at once."""
        mailbox, rows = yield from self.align_all(parties)
        fields = {**self.section.model_dump(), "suffix": self.settings.output}
        finished = False
        while not finished:
            replies = yield from mailbox.relay(StepRequest, parties, StepReply, **fields)
            finished = replies[mailbox.active].finished
        reply = replies[mailbox.active]
        sizes = {"entries": reply.n_entries, "batches": reply.n_batches}
        return (yield from self.predicted(mailbox, rows, reply.n_trees, **sizes))


STRATEGIES = {Eini.method: Eini}
