"""Rounds of boosting in which passive parties sum gradients that the active one has encrypted.

What SecureBoost and HybridTree have in common: all but how the trees of a round grow (``grow``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from fedapp.conversation import Checkpoint, Conversation, Saved
from fedapp.messages.fields import Request, loss_fields, parameters_of
from fedapp.messages.vertical import SentReply
from strategies.method import (
    BASE_MARGIN,
    BOOSTING_SETTINGS,
    CONSTRAINTS,
    LABEL_PRIVACY,
    SPLIT_SETTINGS,
    Summary,
)
from strategies.scoring import History
from strategies.vertical import Hellos, Mailbox, VerticalStrategy


@dataclass(slots=True, eq=False)
class RoundsState:
    """What a run has at a checkpoint."""

    mailbox: Mailbox
    rows: Mapping[str, int]  # matched, by subset
    history: History
    n_grown: int = 0  # rounds, the last of which may have no scores yet
    is_trained: bool = False  # whether all rounds are finished


S = TypeVar("S", bound=RoundsState)


class EncryptedRounds(VerticalStrategy, Generic[S]):
    """A strategy of such rounds.

    ``messages`` is the module of its messages, ``state`` the class of what a run has.
    """

    reads = BOOSTING_SETTINGS | CONSTRAINTS | BASE_MARGIN | SPLIT_SETTINGS | LABEL_PRIVACY
    reads |= {"objective"}
    messages: ClassVar[Any]
    state: ClassVar[type[Any]]

    def conversation(self, parties: Hellos, saved: Saved | None) -> Conversation[Summary]:
        """Round by round, level by level."""
        if saved is None:
            run = yield from self.begin(parties)
        else:
            run = saved.read(self.state)
            self.settings = self.settings.watching(run.rows["valid"])
        mailbox, active = run.mailbox, run.mailbox.active
        while not run.is_trained:
            yield Checkpoint(run, run.n_grown)
            n_wanted = 0 if run.history.stops else self.n_rounds(run)
            begin = self.messages.BeginRequest, [active], self.messages.BeginReply
            replies = yield from mailbox.relay(*begin, n_rounds=n_wanted)
            yield from self.record_scores(run, replies[active])
            run.is_trained = not replies[active].begun or run.history.stops
            if run.is_trained:
                mailbox.clear()  # gradients of a round that is not grown
            else:
                yield from self.grow(run, replies[active])
                run.n_grown = len(run.history) + 1
        return (yield from self.finish(run))

    @abstractmethod
    def begin(self, parties: Hellos) -> Conversation[S]:
        """Match the rows, bin the columns, exchange keys."""

    def set_up(self, parties: Hellos, mailbox: Mailbox, **more: Any) -> Conversation[None]:
        """Send the settings; the parties bin their columns, the active one draws a key."""
        settings = self.settings
        assert self.section is not None
        fields = {
            "objective": settings.objective,
            **parameters_of(settings),
            **loss_fields(settings),
            "monotone_constraints": settings.monotone_constraints,
            "interaction_constraints": settings.interaction_constraints,
            **self.section.model_dump(),
            **more,
        }
        yield from mailbox.relay(self.messages.SetupRequest, parties, SentReply, **fields)

    def n_rounds(self, run: S) -> int:
        """Rounds that the model shall have."""
        return self.settings.num_boost_round

    def send_blocks(
        self, mailbox: Mailbox, passive: Iterable[str], n_blocks: int
    ) -> Conversation[None]:
        """The other blocks of a round's gradients: one is encrypted while the last is taken."""
        requests: dict[str, Request] = dict.fromkeys(passive, self.messages.TakeRequest())
        for _ in range(n_blocks):
            requests[mailbox.active] = self.messages.EncryptRequest()
            yield from mailbox.relay_each(requests, SentReply)

    @abstractmethod
    def grow(self, run: S, reply: Any) -> Conversation[None]:
        """Grow the trees of a round that has begun with this reply."""

    @abstractmethod
    def record_scores(self, run: S, reply: Any) -> Conversation[None]:
        """Add the scores of the rounds that are finished now."""

    @abstractmethod
    def finish(self, run: S) -> Conversation[Summary]:
        """Store and score the model."""

    def store(self, run: S, n_before: int = 0) -> Conversation[tuple[Any, int | None]]:
        """Every party keeps its part, and the active one scores the model of its best rounds.

        Returns the reply, and the best round if one was looked for; ``n_before`` are rounds of an
        initial model.
        """
        mailbox, active, history = run.mailbox, run.mailbox.active, run.history
        best = history.best_round if history.patience else None
        yield Checkpoint(run, run.n_grown)
        yield from mailbox.relay(self.messages.HandOverRequest, mailbox.passive, SentReply)
        finish = self.messages.FinishRequest, [active], self.messages.FinishReply
        n_rounds = n_before + (best or len(history))
        reply = (yield from mailbox.relay(*finish, best_round=n_rounds))[active]
        if not self.settings.scale_pos_weight:
            resolved = {"asked_scale_pos_weight": reply.scale_pos_weight}
            self.settings = self.settings.model_copy(update=resolved)
        return reply, best
