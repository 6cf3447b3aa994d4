"""Send messages through a Flower Grid; each is answered once or reported as lost.

Flower delivers at most once. An unanswered message is sent again; a site answers a step that it has
done with the stored reply, so a second copy is harmless.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from fedapp.clock import seconds_ahead
from fedapp.messages.wire import n_bytes
from fedapp.wire.ledger import Ledger

log = logging.getLogger("fedapp")

# Flower's codes for a lost message or reply: unavailable message, reply or node, crashed app.
LOST = frozenset({3, 4, 5, 8})
SHORTEST_POLL, LONGEST_POLL = 0.001, 0.5  # seconds
NAMED_AFTER = 5.0  # seconds without a reply, then name the parties that have not answered


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a reply before sending again, and for all replies; in seconds."""

    resend_after: float
    deadline: float


@dataclass(slots=True)
class Outgoing:
    """A request on its way to one party."""

    party: str
    node_id: int
    kind: str
    content: RecordDict
    sent_at: float | None = None
    asked: float = 0.0  # Unix time of the first copy
    message_ids: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Courier:
    """Carries the messages of one exchange at a time.

    ``name_waiting`` is called with the parties whose replies are missing, as they become fewer.
    ``clocks`` has the seconds by which each party's clock is ahead, as replies show.
    """

    grid: Grid
    ledger: Ledger
    patience: Patience
    name_waiting: Callable[[Sequence[str]], None]
    clocks: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    def deliver(self, messages: Mapping[str, Message], step: int) -> dict[str, Message]:
        """Send messages, one a party, and wait for their replies.

        Returns replies by party, including errors; parties that did not answer in time are missing.
        """
        start = self.clock()
        waiting = {
            party: Outgoing(
                party, message.metadata.dst_node_id, message.metadata.message_type, message.content
            )
            for party, message in messages.items()
        }
        replies: dict[str, Message] = {}
        reported: list[str] = []
        while waiting and self.clock() - start < self.patience.deadline:
            self._send(waiting, step)
            new_replies = self._collect(waiting, step)
            replies.update(new_replies)
            if not new_replies:
                waited = self.clock() - start
                if waited >= NAMED_AFTER and reported != list(waiting):
                    reported = list(waiting)
                    self.name_waiting(reported)
                time.sleep(min(LONGEST_POLL, max(SHORTEST_POLL, waited / 10)))
        return replies

    def _send(self, waiting: Mapping[str, Outgoing], step: int) -> None:
        """Send messages that were not sent yet, or have been unanswered for too long."""
        now = self.clock()
        due = [
            outgoing
            for outgoing in waiting.values()
            if outgoing.sent_at is None or now - outgoing.sent_at >= self.patience.resend_after
        ]
        if not due:
            return
        copies = [Message(one.content, one.node_id, one.kind, group_id=str(step)) for one in due]
        try:
            ids = list(self.grid.push_messages(copies))
        except ObjectPushError:
            log.warning("the SuperLink was restarted while messages were sent; sending again")
            return
        for outgoing, copy, message_id in zip(due, copies, ids, strict=False):
            outgoing.sent_at = now
            outgoing.asked = outgoing.asked or copy.metadata.created_at
            if message_id:
                outgoing.message_ids.add(message_id)
                self.ledger.sent(
                    step, copy.metadata.message_type, outgoing.party, n_bytes(copy.content)
                )

    def _collect(self, waiting: dict[str, Outgoing], step: int) -> dict[str, Message]:
        """Replies received since the last call; a message reported as lost becomes due again."""
        owners = {
            message_id: outgoing
            for outgoing in waiting.values()
            for message_id in outgoing.message_ids
        }
        replies = {}
        for reply in self.grid.pull_messages(list(owners)):
            outgoing = owners[reply.metadata.reply_to_message_id]
            if reply.has_error() and reply.error.code in LOST:
                outgoing.message_ids.discard(reply.metadata.reply_to_message_id)
                # Due again after a moment, as a node that is gone stays gone for a while.
                soon = self.clock() - self.patience.resend_after + LONGEST_POLL
                outgoing.sent_at = min(outgoing.sent_at or soon, soon)
                continue
            if waiting.pop(outgoing.party, None) is None:
                continue
            replied = reply.metadata.created_at
            ahead = seconds_ahead(outgoing.asked, time.time(), replied, replied)
            self.clocks[outgoing.party] = max(ahead, self.clocks.get(outgoing.party, 0.0), key=abs)
            size = 0 if reply.has_error() else n_bytes(reply.content)
            self.ledger.received(step, outgoing.kind, outgoing.party, size)
            replies[outgoing.party] = reply
        return replies
