"""Long polling: a request waits for what it asks for, at a SuperNode and at a SuperLink.

With short polling, Flower's SuperLink spends most of its time on empty replies, each a database
transaction, and its SuperNode looks for messages every 3 s and for replies every 0.5 s.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from math import inf
from threading import BoundedSemaphore, Condition, Event
from types import SimpleNamespace
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supernode.nodestate import nodestate_factory
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from fedapp.deploy.warm import extend, replace, wrap

# Seconds. Flower's loop polls every 3 s for messages and every 0.5 s for replies.
SOONEST = 0.05
TASK_SECONDS = 1.0  # that a request for a task waits
WAIT_SECONDS = 2.0  # that a request for messages waits
GATHER_SECONDS = 0.01  # that a request for several waits for the others when one has arrived
# Requests that may wait at once, of 40 threads; any other is answered immediately.
MOST_WAITING = 20


class PollTimer:
    """When to poll: at once for local events, sooner the more recent the last message is."""

    def __init__(self) -> None:
        self.task, self.reply = Event(), Event()
        self._arrived_at = -inf

    def note_message(self) -> None:
        """Note that a message has arrived."""
        self._arrived_at = time.monotonic()
        self.task.set()

    def sleep(self, seconds: float) -> None:
        """Replaces ``time.sleep`` in the SuperNode's loop."""
        if seconds < 1:  # Flower waits for a reply, else for a message
            self.reply.wait(seconds)
            self.reply.clear()
        else:
            time.sleep(self.seconds(seconds))

    def seconds(self, longest: float) -> float:
        """Seconds until messages are requested again."""
        return min(longest, max(SOONEST, (time.monotonic() - self._arrived_at) / 10))


class PollingState(InMemoryNodeState):
    """Signals its timer when there is work."""

    timer: PollTimer

    def store_message(self, message: Message) -> str | None:
        """Store a message, or a reply whose objects follow."""
        stored = super().store_message(message)
        if not message.metadata.reply_to_message_id:
            self.timer.note_message()
        return stored

    def store_object(self, *args: Any, **kwargs: Any) -> bool:
        """Store an object; the last one completes a reply."""
        stored = super().store_object(*args, **kwargs)
        self.timer.reply.set()
        return stored

    def _store_error_replies(self, run_ids: set[int], error: Error) -> None:
        super()._store_error_replies(run_ids, error)
        self.timer.reply.set()


def wait_for_task(acquire: Any, timer: PollTimer, request: Any, state: Any) -> Any:
    """Replaces a SuperNode's ``acquire_task``."""
    timer.task.clear()
    response = acquire(request, state)
    if response.token or not timer.task.wait(TASK_SECONDS):
        return response
    return acquire(request, state)


def supernode() -> None:
    """Poll soon after the last message, and wait for replies and tasks."""
    from flwr.supernode import start_client_internal
    from flwr.supernode.servicer.runtime import runtime_handlers as handlers

    timer = PollTimer()
    extend(nodestate_factory, "InMemoryNodeState", PollingState, timer=timer)
    replace(start_client_internal, time=SimpleNamespace(sleep=timer.sleep))
    wrap(handlers, acquire_task=lambda acquire: partial(wait_for_task, acquire, timer))


# The SuperLink


class MessageQueue:
    """Number of messages that have arrived for each node since the SuperLink started."""

    def __init__(self) -> None:
        self._counts = Counter[int]()
        # As many had arrived when none was left; one that was there at the start is not counted.
        self._pulled = defaultdict[int, float](lambda: -inf)
        self._came, self._room = Condition(), BoundedSemaphore(MOST_WAITING)

    def __getitem__(self, node: int) -> int:
        return self._counts[node]

    def add(self, node: int) -> None:
        """Count a message and wake the waiting requests."""
        with self._came:
            self._counts[node] += 1
            self._came.notify_all()

    def note_pulled(self, node: int, count: int, n_pulled: int) -> None:
        """Note how many messages a request got that began when `count` had arrived."""
        self._pulled[node] = self._pulled[node] + n_pulled if n_pulled else count

    def is_empty(self, node: int) -> bool:
        """Whether all messages that have arrived were pulled."""
        # The SuperLink's own are replies to all runs, and a request is for one run's.
        return node != SUPERLINK_NODE_ID and self._pulled[node] == self._counts[node]

    def wait(self, node: int, count: int, wanted: int = 1) -> bool:
        """Wait for more than `count` messages; whether they arrived in time."""
        if not self._room.acquire(blocking=False):
            return False
        with self._came:
            came = self._came.wait_for(lambda: self._counts[node] > count, WAIT_SECONDS)
            if came:
                self._came.wait_for(lambda: self._counts[node] >= count + wanted, GATHER_SECONDS)
        self._room.release()
        return came


def wait_for_messages(
    arrivals: MessageQueue,
    node_of: Callable[[Any], int],
    pull: Callable[..., Any],
    request: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces a ``pull_messages``: long polling."""
    node = node_of(request)

    def look() -> Any:
        count = arrivals[node]
        response = pull(request, *args, **kwargs)
        arrivals.note_pulled(node, count, len(response.messages_list))
        return response

    count = arrivals[node]
    is_empty = arrivals.is_empty(node)
    if not is_empty and (response := look()).messages_list:
        return response
    came = arrivals.wait(node, count, len(request.message_ids))
    return look() if came or is_empty else response


def notify_waiting(
    arrivals: MessageQueue, push: Callable[..., Any], request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces a ``push_messages``: wakes requests that wait for these messages."""
    response = push(request, *args, **kwargs)
    for message in request.messages_list:
        arrivals.add(message.metadata.dst_node_id)
    return response


def superlink() -> None:
    """Let requests for messages wait."""
    from flwr.superlink.servicer.fleet import fleet_handlers
    from flwr.superlink.servicer.runtime import runtime_handlers

    arrivals = MessageQueue()
    for handlers, node_of in (
        (fleet_handlers, lambda request: request.node.node_id),
        (runtime_handlers, lambda _: SUPERLINK_NODE_ID),
    ):
        wrap(handlers, pull_messages=partial(partial, wait_for_messages, arrivals, node_of))
        wrap(handlers, push_messages=partial(partial, notify_waiting, arrivals))
