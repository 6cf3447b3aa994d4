"""Patches of a site's SuperNode.

It polls soon after the last message, waits for replies instead of polling, answers at once for a
process that has died, and sends heartbeats often enough to be replaced soon after a crash.
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

from fedapp.deploy.warm import BACKOFF, replace
from fedapp.deploy.warm.carried import SENDER, Carrier, added, handing_out, storing
from strategies.delivery import clock_text, seconds_ahead

log = logging.getLogger("fedapp")

# Seconds. Flower's loop polls every 3 s for messages and every 0.5 s for replies.
SOONEST = 0.05
HOLD = 1.0  # a request for a task waits up to this long
# Heartbeat interval: the smallest that a SuperLink accepts; 30 in Flower. The SuperLink refuses a
# replacement for a SuperNode until two intervals after its last heartbeat.
HEARTBEAT = 10


class Pace:
    """When to poll: at once for local events, sooner the more recent the last message is."""

    def __init__(self) -> None:
        self.task, self.reply = Event(), Event()
        self._asked_at = -float("inf")
        self._executor = b""

    def is_another(self, executor: bytes) -> bool:
        """Whether a different executor asked for tasks before."""
        previous, self._executor = self._executor, executor
        return previous not in (b"", executor)

    def asked(self) -> None:
        """Note that a message has arrived."""
        self._asked_at = time.monotonic()
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
        return min(longest, max(SOONEST, (time.monotonic() - self._asked_at) / 10))


class WarmNodeState(InMemoryNodeState):
    """Signals its `Pace` when there is work, and answers for a process that has died."""

    def __init__(self, pace: Pace, object_store: ObjectStore) -> None:
        super().__init__(object_store)
        self.pace = pace

    def store_message(self, message: Message) -> str | None:
        """Store a message, or a reply whose objects follow."""
        stored = super().store_message(message)
        if not message.metadata.reply_to_message_id:
            self.pace.asked()
        return stored

    def store_object(self, *args: Any, **kwargs: Any) -> bool:
        """Store an object; the last one completes a reply."""
        stored = super().store_object(*args, **kwargs)
        self.pace.reply.set()
        return stored

    def get_messages_legacy(self, *, is_reply: Any = None, **kwargs: Any) -> Sequence[Message]:
        """Return no reply before it is complete: its objects might never arrive."""
        if is_reply and self._object_push_session_by_root:
            return []
        return super().get_messages_legacy(is_reply=is_reply, **kwargs)

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        """Finish a task; one that failed gets an error as its reply."""
        finished = super().finish_task(task_id, sub_status, details)
        if finished and sub_status == SubStatus.FAILED:
            (task,) = self.get_tasks(task_ids=[task_id])
            if task.type == TaskType.CLIENT_APP:
                self._store_error_replies({task.run_id}, CLIENT_APP_CRASHED_ERROR)
        return finished

    def _store_error_replies(self, run_ids: set[int], error: Error) -> None:
        """Also for messages that no process took, and in place of incomplete replies."""
        with self._lock_object_push_sessions, self.lock_msg_store:
            incomplete = self._object_push_session_by_root.keys() & self.msg_store.keys()
            self.delete_messages(message_ids=list(incomplete))
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
    """Replaces ``acquire_task``: long polling."""
    if pace.is_another(b"".join(added(request, SENDER))):
        # The executor that took the open tasks has died.
        for task in state.get_tasks(statuses=[Status.STARTING, Status.RUNNING]):
            state.finish_task(task.task_id, SubStatus.FAILED, "the executor has ended")
    pace.task.clear()
    response = acquire(request, state)
    if response.token or not pace.task.wait(HOLD):
        return response
    return acquire(request, state)


class ClockNote:
    """Logs once how far this machine's clock is from the SuperLink's."""

    def __init__(self) -> None:
        self._noted = False

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> Response:
        """Send a request and compare its response's date, in whole seconds, with the clock."""
        sent_at = time.time()
        response = call_next(context)
        received_at, date = time.time(), response.headers.get("date", "")
        with suppress(ValueError):
            server_time = parsedate_to_datetime(date).timestamp()
            behind = seconds_ahead(sent_at, received_at, server_time, server_time + 1)
            text = clock_text("this machine's", -behind, "the SuperLink's")
            if text and not self._noted:
                self._noted = True
                log.warning("%s: set it, as timedatectl set-ntp true does", text)
        return response


def replace_parts() -> None:
    """Patch Flower's SuperNode before it starts."""
    pace, carrier = Pace(), Carrier()
    connect = FleetHttpClient.from_server_address

    def warm_state(object_store: ObjectStore) -> WarmNodeState:
        carrier.find = object_store.get
        return WarmNodeState(pace, object_store)

    def warm_client(*args: Any, **kwargs: Any) -> FleetHttpClient:
        client = connect(*args, **kwargs)
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
