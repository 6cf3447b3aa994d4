"""Send messages through a Flower Grid; each is answered once or reported as lost.

Flower delivers at most once. An unanswered message is sent again; a site answers a step that it has
done with the stored reply, so a second copy is harmless.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

from fedapp.errors import DivergedError, FedappError, PartyError, as_plain
from fedapp.home import open_private
from fedapp.messages import wire
from fedapp.messages.fields import Reply
from fedapp.messages.vertical import Parcel
from fedapp.run_files import SERVER

log = logging.getLogger("fedapp")
R = TypeVar("R", bound=Reply)

# Flower's codes for a lost message or reply: unavailable message, reply or node, crashed app.
LOST = frozenset({3, 4, 5, 8})
SHORTEST_POLL, LONGEST_POLL = 0.001, 0.5  # seconds
FLUSH_SECONDS = 0.5
BETWEEN_REPLIES = 5e-5  # seconds for each party that has not answered
# Seconds without a reply, then name the parties that have not answered, and look at their nodes.
NAMED_AFTER = 5.0
LONGEST_REASON = 2000  # characters
# A reply is missed after this multiple of the longest exchange of its kind, at the earliest after:
MISSED_TIMES, MISSED_AFTER = 10.0, 20.0  # seconds
# Seconds after which a SuperLink that does not answer is taken to hang, and until its sites, which
# it then takes for disconnected, have sent heartbeats.
SILENT_AFTER, CONNECTED_AGAIN = 15.0, 30.0
# Ray's exceptions where a node or a process of it is gone.
RAY = re.compile(
    r"ray\.exceptions\.((ActorUnavailable|ActorDied|NodeDied|WorkerCrashed|OutOfMemory)Error)"
)
NO_HANDLER = "function registered with name"  # in Flower's error for a message without a handler
NOTICED = 2.0  # seconds; a smaller difference of clocks does no harm
RULE = (
    f"Flower refuses a site whose clock is {SYSTEM_TIME_TOLERANCE} s ahead of its SuperLink's, or "
    f"{TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE} s behind it"
)


@dataclass(slots=True)
class Ledger:
    """Record of traffic: a line a message in ``ledger.jsonl`` (not if None), and total bytes.

    ``to_parties`` and ``to_server`` are bytes so far. Lines are written now and then
    (``FLUSH_SECONDS``), before a checkpoint, and at the end of a ``with`` block.
    """

    path: Path | None = None
    to_parties: int = 0
    to_server: int = 0
    _lines: list[dict[str, Any]] = field(default_factory=list)
    _start: float = field(default_factory=time.perf_counter)
    _flushed: float = 0.0

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, kind: object, *error: object) -> None:
        with suppress(OSError) if kind else nullcontext():  # the first error is the one to see
            self.flush()

    def note(self, step: int, kind: str, source: str, target: str, n_bytes: int) -> None:
        """Note a message, for a line of its own."""
        seconds = round(time.perf_counter() - self._start, 4)
        line = {"step": step, "type": kind, "from": source, "to": target}
        self._lines.append({**line, "bytes": n_bytes, "seconds": seconds})

    def flush(self, quiet_seconds: float = 0.0) -> None:
        """Write the lines noted since the last time, unless that is more recent than this."""
        if time.perf_counter() - self._flushed < quiet_seconds:
            return
        if self.path is not None and self._lines:
            with open_private(self.path, "a") as file:
                file.writelines(json.dumps(line) + "\n" for line in self._lines)
        self._lines.clear()
        self._flushed = time.perf_counter()

    def rename(self, names: Mapping[str, str]) -> None:
        """Replace names in the lines that are not written yet."""
        for line in self._lines:
            line |= {end: names.get(line[end], line[end]) for end in ("from", "to")}


@dataclass(slots=True)
class Outgoing:
    """A request on its way to one party."""

    party: str
    node_id: int
    kind: str
    content: RecordDict
    sent_at: float | None = None
    asked: float = 0.0  # Unix time of the first copy
    copied: float = 0.0  # and of the last
    message_ids: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Courier:
    """Carries the messages of one exchange at a time.

    ``name_waiting`` is called with the parties whose replies are missing and those of them whose
    nodes are not connected, whenever either changes. ``clocks`` has the seconds by which each
    party's clock is ahead, as replies show; ``took`` those of the longest exchange of each kind.
    """

    grid: Grid
    ledger: Ledger
    resend_after: float  # seconds without a reply after which a message is sent again, at most
    deadline: float  # seconds for all replies of an exchange
    name_waiting: Callable[[Sequence[str], Sequence[str]], None]
    clocks: dict[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    took: dict[str, float] = field(default_factory=dict)
    removed: Callable[[], Collection[int]] = frozenset  # nodes that cannot come back

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
        replies = dict[str, Message]()
        sent = list(waiting.values())
        reported = list[str](), list[str]()
        next_look, silent_until = NAMED_AFTER, 0.0
        while waiting and self.clock() - start < self.deadline:
            self._send(waiting, step)
            before_pull = self.clock()
            new_replies = self._collect(waiting, step)
            replies.update(new_replies)
            if new_replies and waiting:  # asking costs for each that is missing
                time.sleep(BETWEEN_REPLIES * len(waiting))
            if new_replies:
                next_look = 0.0 if reported[0] else next_look  # who has answered is not waited for
                continue
            if (silent := self.clock() - before_pull) > SILENT_AFTER:
                log.warning("the SuperLink did not answer for %.0f s; sites connect again", silent)
                start, before_pull = start + silent, before_pull + silent
                silent_until = self.clock() + CONNECTED_AGAIN
            waited = self.clock() - start
            if waited >= next_look:
                next_look = waited + NAMED_AFTER
                names, away = list(waiting), self._away(waiting)
                away = [] if self.clock() < silent_until else away
                gone = self.removed()
                for party in [name for name in names if waiting[name].node_id in gone]:
                    del waiting[party]
                if (names, away) != reported:
                    self.name_waiting(names, away)
                reported = names, away
            # A pull that has itself waited for a reply, as those of most grids do, needs no pause.
            pulling = start + waited - before_pull
            time.sleep(max(SHORTEST_POLL, min(LONGEST_POLL, waited / 10) - pulling))
        if reported[0] and not waiting:
            self.name_waiting([], [])
        if not waiting and all(outgoing.asked == outgoing.copied for outgoing in sent):
            for kind in {outgoing.kind for outgoing in sent}:
                self.took[kind] = max(self.took.get(kind, 0.0), self.clock() - start)
        return replies

    def _missed_after(self, outgoing: Outgoing) -> float:
        """Seconds after which a message is sent again."""
        if (took := self.took.get(outgoing.kind)) is None:
            return self.resend_after
        return min(self.resend_after, max(MISSED_AFTER, MISSED_TIMES * took))

    def _send(self, waiting: Mapping[str, Outgoing], step: int) -> None:
        """Send messages that were not sent yet, or have been unanswered for too long."""
        now = self.clock()
        due = [
            outgoing
            for outgoing in waiting.values()
            if outgoing.sent_at is None or now - outgoing.sent_at >= self._missed_after(outgoing)
        ]
        if any(outgoing.asked for outgoing in due):  # a copy for a node that is gone would be lost
            nodes = self._connected()
            due = [outgoing for outgoing in due if not outgoing.asked or outgoing.node_id in nodes]
        if not due:
            return
        copies = [
            Message(outgoing.content, outgoing.node_id, outgoing.kind, group_id=str(step))
            for outgoing in due
        ]
        try:
            ids = list(self.grid.push_messages(copies))
        except ObjectPushError:
            log.warning("the SuperLink was restarted while messages were sent; sending again")
            return
        for outgoing, copy, message_id in zip(due, copies, ids, strict=False):
            outgoing.sent_at = now
            outgoing.asked = outgoing.asked or copy.metadata.created_at
            outgoing.copied = max(outgoing.copied, copy.metadata.created_at)
            if message_id:
                outgoing.message_ids.add(message_id)
                size = wire.n_bytes(copy.content)
                self.ledger.to_parties += size
                self.ledger.note(step, outgoing.kind, SERVER, outgoing.party, size)

    def _collect(self, waiting: dict[str, Outgoing], step: int) -> dict[str, Message]:
        """Replies received since the last call; a message reported as lost becomes due again."""
        owners = {
            message_id: outgoing
            for outgoing in waiting.values()
            for message_id in outgoing.message_ids
        }
        replies = {}
        for reply in self.grid.pull_messages(list(owners)) if owners else ():
            outgoing = owners[reply.metadata.reply_to_message_id]
            if reply.has_error() and reply.error.code in LOST:
                outgoing.message_ids.discard(reply.metadata.reply_to_message_id)
                # Due again after a moment, as a node that is gone stays gone for a while.
                soon = self.clock() - self._missed_after(outgoing) + LONGEST_POLL
                outgoing.sent_at = min(outgoing.sent_at or soon, soon)
                continue
            if waiting.pop(outgoing.party, None) is None:
                continue
            replied = reply.metadata.created_at
            ahead = seconds_ahead(outgoing.asked, time.time(), replied, replied)
            self.clocks[outgoing.party] = max(ahead, self.clocks.get(outgoing.party, 0.0), key=abs)
            size = 0 if reply.has_error() else wire.n_bytes(reply.content)
            self.ledger.to_server += size
            self.ledger.note(step, outgoing.kind, outgoing.party, SERVER, size)
            replies[outgoing.party] = reply
        return replies

    def _connected(self) -> dict[int, float]:
        """Since when (Unix time) each connected node is connected; 0 in a simulation."""
        since = {node.node_id: node.last_activated_at for node in self.grid.get_nodes()}
        return {
            node: datetime.fromisoformat(text).timestamp() if text else 0.0
            for node, text in since.items()
        }

    def _away(self, waiting: Mapping[str, Outgoing]) -> list[str]:
        """Parties that are not connected; those that came back after they were asked become due."""
        # A SuperNode that was killed has lost the message, and nothing reports that if it is back
        # before the SuperLink has noticed. One that has it answers twice, which is harmless.
        nodes = self._connected()
        for outgoing in waiting.values():
            if nodes.get(outgoing.node_id, 0.0) > outgoing.copied > 0.0:
                outgoing.sent_at = None
                outgoing.copied = nodes[outgoing.node_id]
        return [party for party, outgoing in waiting.items() if outgoing.node_id not in nodes]


def read_reply(
    message: Message, party: str, reply: type[R], model_id: str, step: int
) -> tuple[R, list[Parcel]]:
    """A party's reply, decoded and checked, and the parcels that came with it.

    Raises a PartyError if the party refused, failed or answered another exchange, a DivergedError
    if its gradients or trees have left float32.
    """
    if message.has_error():
        raise _failure(message.error, party, step)
    envelope, content = wire.from_records(message.content, party)
    if (envelope.model_id, envelope.step) != (model_id, step):
        raise PartyError(party, step, f"answered step {envelope.step} of another exchange")
    return wire.from_content(reply, content, party), wire.parcels_of(content)


def _failure(error: Error, party: str, step: int) -> FedappError:
    reason = as_plain(error.reason or "", LONGEST_REASON)
    if error.code == wire.DIVERGED:
        return DivergedError(reason)
    if error.code in (wire.REFUSED, wire.FAILED, wire.WAITING):
        name, _, reason = reason.partition(": ")
        return PartyError(name, step, reason, refused=error.code == wire.REFUSED)
    if died := RAY.search(error.reason or ""):
        return PartyError(party, step, f"{_ray_nodes()}, got {died[1]}")
    # Flower's reason is a traceback; its last line is the error.
    last_line = (error.reason or "").strip().rpartition("\n")[2]
    if NO_HANDLER in last_line:
        last_line = "runs another ClientApp, must run fedapp's (fedapp.client_app:app)"
    text = as_plain(last_line, LONGEST_REASON) or f"error code {error.code}"
    return PartyError(party, step, text)


def _ray_nodes() -> str:
    """What a simulation needs of Ray's nodes, with the names of those that are gone."""
    ray = sys.modules.get("ray")  # a simulation has imported it
    nodes = ray.nodes() if ray and ray.is_initialized() else []
    named = [f"{node['NodeName']} ({node['NodeID'][:8]})" for node in nodes if not node["Alive"]]
    if named:
        way = "ray start --address=HEAD:6379 there"
        return f"Ray's node {', '.join(named)} must stay in the cluster until the run ends ({way})"
    return "Ray's processes must stay until the run ends, with memory for them"


# Flower signs each request of a site with the time; its SuperLink refuses one that is too early or
# too late.
def seconds_ahead(asked: float, answered: float, earliest: float, latest: float) -> float:
    """Lower bound of how far another clock is ahead of this one; negative if it is behind.

    The other clock was read between ``asked`` and ``answered`` (Unix time by this clock) and showed
    a time between ``earliest`` and ``latest``.
    """
    return max(0.0, earliest - answered) + min(0.0, latest - asked)


def clock_text(whose: str, ahead: float, than: str) -> str:
    """Whose clock is off, by how much, and what Flower tolerates; empty below ``NOTICED``."""
    if abs(ahead) < NOTICED:
        return ""
    side = "ahead of" if ahead > 0 else "behind"
    return f"{whose} clock is {abs(ahead):.0f} s {side} {than}; {RULE}"
