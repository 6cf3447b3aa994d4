"""What parties say of a linear model each for itself, in the clear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from fedapp.conversation import Check, Conversation, Parties, ask
from fedapp.messages.fedavg_linear import (
    AverageReply,
    AverageRequest,
    MomentsReply,
    MomentsRequest,
    ScoreRequest,
)
from fedapp.messages.hello import HelloReply
from fedapp.messages.scoring import EvaluateReply
from strategies.horizontal import CommonTable
from strategies.scoring import ask_to_score


class Averages(Protocol):
    """How what is averaged comes about: replies by whose they are."""

    def begin(
        self,
        parties: Parties[HelloReply],
        table: CommonTable,
        request: MomentsRequest,
        check: Check,
    ) -> Conversation[dict[str, MomentsReply]]:
        """Sums of the labels, moments of the inputs."""

    def train(
        self, parties: Parties[HelloReply], request: AverageRequest, check: Check
    ) -> Conversation[dict[str, AverageReply]]:
        """Have all parties score the model, and train on from it."""

    def score(
        self, parties: Parties[HelloReply], request: ScoreRequest, check: Check
    ) -> Conversation[dict[str, EvaluateReply]]:
        """Have all parties score the finished model."""

    def resume(self, parties: Parties[HelloReply]) -> Conversation[None]:
        """Meet again after ``restore``."""

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps."""

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Undo ``facts``."""


class PlainAverages:
    """Each party's own come to the server."""

    def begin(
        self,
        parties: Parties[HelloReply],
        table: CommonTable,
        request: MomentsRequest,
        check: Check,
    ) -> Conversation[dict[str, MomentsReply]]:
        """In one exchange."""
        return (yield from ask(parties.all(request), MomentsReply, check))

    def train(
        self, parties: Parties[HelloReply], request: AverageRequest, check: Check
    ) -> Conversation[dict[str, AverageReply]]:
        """Each from the same model."""
        return (yield from ask(parties.all(request), AverageReply, check))

    def score(
        self, parties: Parties[HelloReply], request: ScoreRequest, check: Check
    ) -> Conversation[dict[str, EvaluateReply]]:
        """Each for itself."""
        return (yield from ask_to_score(parties, request, check))

    def resume(self, parties: Parties[HelloReply]) -> Conversation[None]:
        """Nothing to be said."""
        yield from ()

    def facts(self) -> dict[str, Any]:
        """None."""
        return {}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Nothing to be undone."""
