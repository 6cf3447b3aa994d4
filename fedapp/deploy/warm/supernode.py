"""What a site's SuperNode does in other ways than Flower's.

It looks for messages and replies when there is something to see, answers at once for a process that
has died, and shows that it lives often enough to be replaced soon where it does not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import Status, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore import heartbeat
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.object_store import ObjectStore
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.nodestate import NodeState, nodestate_factory
from flwr.supernode.nodestate.in_memory_nodestate import CLIENT_APP_CRASHED_ERROR, InMemoryNodeState
from flwr.supernode.servicer.runtime import runtime_handlers
from httpx import Response

from fedapp.clock import clock_text, seconds_ahead
from fedapp.deploy.warm import BACKOFF, replace
from fedapp.deploy.warm.carried import SENDER, Carrier, added, handing_out, storing

log = logging.getLogger("fedapp")

# Seconds. Flower's loop waits 3 for a message and 0.5 for a reply.
SOONEST = 0.05
HOLD = 1.0  # a request for a task waits so long for one
# Between two signs of life, the fewest that a SuperLink takes; 30 in Flower. It holds a SuperNode
# alive, and refuses another in its place, until twice as long after the last one.
HEARTBEAT = 10


class Pace:
    """When to look again: at once for what comes from this machine; for a message the sooner, the
    less time has passed since the last one."""

    def __init__(self) -> None:
        self.task, self.reply = Event(), Event()
        self._asked_at = -float("inf")
        self._executor = b""

    def is_another(self, executor: bytes) -> bool:
        """Whether it is another executor than the one that asked for tasks until now."""
        before, self._executor = self._executor, executor
        return before not in (b"", executor)

    def asked(self) -> None:
        """A message has come."""
        self._asked_at = time.monotonic()
        self.task.set()

    def sleep(self, seconds: float) -> None:
        """Stands for ``time.sleep`` in the SuperNode's loop."""
        if seconds < 1:
            self.reply.wait(seconds)
            self.reply.clear()
        else:
            time.sleep(self.seconds(seconds))

    def seconds(self, longest: float) -> float:
        """Until a message is asked for again."""
        return min(longest, max(SOONEST, (time.monotonic() - self._asked_at) / 10))


class WarmNodeState(InMemoryNodeState):
    """Tells its pace when there is something to do, and answers for a process that has died."""

    def __init__(self, pace: Pace, object_store: ObjectStore) -> None:
        super().__init__(object_store)
        self.pace = pace

    def store_message(self, message: Message) -> str | None:
        """A message has come, or a reply whose objects follow."""
        stored = super().store_message(message)
        if not message.metadata.reply_to_message_id:
            self.pace.asked()
        return stored

    def store_object(self, *given: Any, **named: Any) -> bool:
        """With its last object a reply is whole."""
        stored = super().store_object(*given, **named)
        self.pace.reply.set()
        return stored

    def get_messages_legacy(self, *, is_reply: Any = None, **named: Any) -> Sequence[Message]:
        """No reply before it is whole: its objects might never come."""
        if is_reply and self._object_push_session_by_root:
            return []
        return super().get_messages_legacy(is_reply=is_reply, **named)

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        """A task that failed without a reply has one: that it failed."""
        finished = super().finish_task(task_id, sub_status, details)
        if finished and sub_status == SubStatus.FAILED:
            (task,) = self.get_tasks(task_ids=[task_id])
            if task.type == TaskType.CLIENT_APP:
                self._store_error_replies({task.run_id}, CLIENT_APP_CRASHED_ERROR)
        return finished

    def _store_error_replies(self, run_ids: set[int], error: Error) -> None:
        """Also for a message that nobody took, and instead of a reply that is not whole."""
        with self._lock_object_push_sessions, self.lock_msg_store:
            broken = self._object_push_session_by_root.keys() & self.msg_store.keys()
            self.delete_messages(message_ids=list(broken))
            for run_id in run_ids:
                self.delete_sessions_in_run(run_id)
            for entry in self.msg_store.values():
                metadata = entry.message.metadata
                if metadata.run_id in run_ids and not metadata.reply_to_message_id:
                    entry.is_retrieved = True
                    self.record_message_processing_start(metadata.message_id)
        super()._store_error_replies(run_ids, error)
        self.pace.reply.set()


def hold(acquire: Any, pace: Pace, request: AcquireTaskRequest, state: NodeState) -> Any:
    """Stands for ``acquire_task``: waits for a task instead of being asked again and again."""
    if pace.is_another(b"".join(added(request, SENDER))):
        # Whoever was to answer the open tasks has ended.
        for task in state.get_tasks(statuses=[Status.STARTING, Status.RUNNING]):
            state.finish_task(task.task_id, SubStatus.FAILED, "the executor has ended")
    pace.task.clear()
    response = acquire(request, state)
    if response.token or not pace.task.wait(HOLD):
        return response
    return acquire(request, state)


class ClockNote:
    """Logs once how far this machine's clock is from the SuperLink's, by a response's date."""

    def __init__(self) -> None:
        self._noted = False

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> Response:
        """Send a request, and look at its response's date, which counts whole seconds."""
        asked = time.time()
        response = call_next(context)
        answered, date = time.time(), response.headers.get("date", "")
        with suppress(ValueError):
            there = parsedate_to_datetime(date).timestamp()
            behind = seconds_ahead(asked, answered, there, there + 1)
            text = clock_text("this machine's", -behind, "the SuperLink's")
            if text and not self._noted:
                self._noted = True
                log.warning("%s: set it, as timedatectl set-ntp true does", text)
        return response


def replace_parts() -> None:
    """Have Flower's SuperNode, once it starts, use these parts."""
    pace, carrier = Pace(), Carrier()
    connect = FleetHttpClient.from_server_address

    def warm_state(object_store: ObjectStore) -> WarmNodeState:
        carrier.find = object_store.get
        return WarmNodeState(pace, object_store)

    def warm_client(*given: Any, **named: Any) -> FleetHttpClient:
        client = connect(*given, **named)
        carrier.serve(client)
        client._interceptors = (ClockNote(), *client._interceptors)
        return client

    replace(
        fleet_http_connection,
        FleetHttpClient=SimpleNamespace(from_server_address=warm_client),
        HEARTBEAT_DEFAULT_INTERVAL=HEARTBEAT,
    )
    replace(heartbeat, HEARTBEAT_DEFAULT_INTERVAL=HEARTBEAT)
    replace(
        start_client_internal,
        time=SimpleNamespace(sleep=pace.sleep),
        pull_objects=partial(pull_objects, initial_backoff=BACKOFF),
    )
    replace(nodestate_factory, InMemoryNodeState=warm_state)
    replace(
        runtime_handlers,
        pull_messages=partial(handing_out, runtime_handlers.pull_messages),
        push_messages=partial(storing, runtime_handlers.push_messages),
        acquire_task=partial(hold, runtime_handlers.acquire_task, pace),
    )
