"""Patches of a site's SuperNode, and objects that travel within messages.

The SuperNode polls soon after the last message, waits for replies instead of polling, answers at
once for a process that has died, and sends heartbeats often enough to be replaced soon after a
crash. `ObjectCarrier` sends, and `attach_objects` and `store_objects` answer, at every hop between
ServerApp and ClientApp.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode, Status, SubStatus
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
)
from flwr.supercore import heartbeat
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, pull_objects
from flwr.supercore.object_store import ObjectStore
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.retry import (
    RetryInvoker,
    RetryState,
    exponential,
    make_simple_http_retry_invoker,
)
from flwr.supercore.utils import get_flwr_home
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.nodestate import NodeState, nodestate_factory
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from flwr.supernode.servicer.runtime import runtime_handlers
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message as Proto
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet
from httpx import Response
from starlette.middleware.base import BaseHTTPMiddleware, _CachedRequest
from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse
from starlette.types import Receive, Scope, Send

from fedapp.deploy.health import REACHED
from fedapp.deploy.tasks import NOT_STARTED
from fedapp.deploy.warm import BACKOFF, replace
from fedapp.superlinks import site_fault
from strategies.delivery import clock_text, seconds_ahead

log = logging.getLogger("fedapp")

# Seconds. Flower's loop polls every 3 s for messages and every 0.5 s for replies.
SOONEST = 0.05
LONGEST_PAUSE = 5  # between two tries to reach the SuperLink; 20 in Flower
QUICK = 1.0  # a response whose date is compared with the clock
WAIT_SECONDS = 1.0  # a request for a task waits up to this long
# Heartbeat interval: the smallest that a SuperLink accepts; 30 in Flower. The SuperLink refuses a
# replacement for a SuperNode until two intervals after its last heartbeat.
HEARTBEAT = 10
# Field numbers that Flower does not use: object contents, a flag that asks for them, the sender,
# and a flag that the run's bundle is there.
CONTENTS, WANTED, SENDER, BUNDLED = 20_041, 20_042, 20_043, 20_044
# Limit of the objects in one request or response; larger messages send them singly.
MOST_BYTES = 2**25

Find = Callable[[str], bytes | None]  # name -> content; empty or None if missing


class PollTimer:
    """When to poll: at once for local events, sooner the more recent the last message is."""

    def __init__(self) -> None:
        self.task, self.reply = Event(), Event()
        self._arrived_at = -float("inf")
        self._executor = b""

    def is_another(self, executor: bytes) -> bool:
        """Whether a different executor asked for tasks before."""
        previous, self._executor = self._executor, executor
        return previous not in (b"", executor)

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


class WarmNodeState(InMemoryNodeState):
    """Signals its timer when there is work, and answers for a process that has died."""

    def __init__(self, timer: PollTimer, object_store: ObjectStore) -> None:
        super().__init__(object_store)
        self.timer = timer

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
                crashed, failed = ErrorCode.CLIENT_APP_CRASHED, ErrorCode.LOAD_CLIENT_APP_EXCEPTION
                error = Error(failed if NOT_STARTED in details else crashed, details)
                self._store_error_replies({task.run_id}, error)
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
        self.timer.reply.set()


def wait_for_task(
    acquire: Any, timer: PollTimer, request: AcquireTaskRequest, state: NodeState
) -> Any:
    """Replaces ``acquire_task``: long polling."""
    if timer.is_another(b"".join(added(request, SENDER))):
        # The executor that took the open tasks has died.
        for task in state.get_tasks(statuses=[Status.STARTING, Status.RUNNING]):
            state.finish_task(task.task_id, SubStatus.FAILED, "the executor has ended")
    timer.task.clear()
    response = acquire(request, state)
    if response.token or not timer.task.wait(WAIT_SECONDS):
        return response
    return acquire(request, state)


class ReachedNote:
    """Notes in a file when the SuperLink was reached; warns once of a clock that is off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._noted = False
        self._off_since = math.inf

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> Response:
        """Send a request and compare its response's date, in whole seconds, with the clock."""
        sent_at = time.time()
        response = call_next(context)
        received_at = time.time()
        date = response.headers.get("date", "")
        if response.is_success:
            self._path.touch()
        with suppress(ValueError):
            server_time = parsedate_to_datetime(date).timestamp()
            behind = seconds_ahead(sent_at, received_at, server_time, server_time + 1)
            text = clock_text("this machine's", -behind, "the SuperLink's")
            # A SuperLink that was stopped for a while sends an old date, late or for a second.
            if received_at - sent_at < QUICK:
                self._off_since = min(self._off_since, sent_at) if text else math.inf
            is_sure = response.is_error or sent_at - self._off_since > 2 * QUICK
            if text and is_sure and not self._noted:
                self._noted = True
                log.warning("%s: set it, as timedatectl set-ntp true does", text)
        return response


def patient_retry() -> RetryInvoker:
    """Replaces ``make_simple_http_retry_invoker``: gives up what is refused, and nothing else.

    Flower also gives up where a certificate has expired or a proxy fails, and forgets the reply.
    """
    retry = make_simple_http_retry_invoker()
    is_refused = retry.should_giveup
    causes = set[str]()

    def should_giveup(error: Exception) -> bool:
        response = getattr(error, "response", None)
        return bool(response and response.is_client_error and is_refused and is_refused(error))

    def log_cause(state: RetryState) -> None:
        if state.tries == 1:
            causes.clear()
        if (kind := str(state.exception).partition("\n")[0]) not in causes:
            causes.add(kind)
            cause = site_fault(state.exception, sys.argv, get_flwr_home() / REACHED)
            log.warning("no connection to the SuperLink, tried again until it works: %s", cause)

    retry.should_giveup, retry.on_backoff = should_giveup, log_cause
    retry.wait_function = time.sleep
    retry.wait_gen_factory = partial(exponential, max_delay=LONGEST_PAUSE)
    return retry


def replace_parts() -> None:
    """Patch Flower's SuperNode before it starts."""
    timer, carrier = PollTimer(), ObjectCarrier()
    connect = FleetHttpClient.from_server_address

    def warm_state(object_store: ObjectStore) -> WarmNodeState:
        carrier.find = object_store.get
        return WarmNodeState(timer, object_store)

    def warm_client(*args: Any, **kwargs: Any) -> FleetHttpClient:
        client = connect(*args, **kwargs)
        carrier.serve(client)
        client._interceptors = (ReachedNote(get_flwr_home() / REACHED), *client._interceptors)
        return client

    replace(
        fleet_http_connection,
        FleetHttpClient=SimpleNamespace(from_server_address=warm_client),
        HEARTBEAT_DEFAULT_INTERVAL=HEARTBEAT,
        make_simple_http_retry_invoker=patient_retry,
    )
    replace(heartbeat, HEARTBEAT_DEFAULT_INTERVAL=HEARTBEAT)
    replace(
        start_client_internal,
        time=SimpleNamespace(sleep=timer.sleep),
        pull_objects=pull_at_once,
    )
    replace(nodestate_factory, InMemoryNodeState=warm_state)
    replace(
        runtime_handlers,
        pull_messages=partial(attach_objects, runtime_handlers.pull_messages),
        push_messages=partial(store_objects, runtime_handlers.push_messages),
        acquire_task=partial(wait_for_task, runtime_handlers.acquire_task, timer),
        pull_task_input=partial(without_bundle, runtime_handlers.pull_task_input),
    )
    pass_on_whole()


# Carry the objects of a message inside the request or response that names them.


# Flower sends a message as the names of its objects, at least three, and then each object in a
# separate request. Here the objects travel in fields that Flower's protobuf messages do not define.
# A receiver that does not know these fields ignores them and transfers each object as usual; so
# either end of a connection may be unpatched.
def _carried_class() -> Any:
    file = FileDescriptorProto(name="fedapp/carried.proto", package="fedapp", syntax="proto3")
    fields = file.message_type.add(name="Carried").field
    kind = FieldDescriptorProto
    fields.add(name="contents", number=CONTENTS, type=kind.TYPE_BYTES, label=kind.LABEL_REPEATED)
    fields.add(name="wanted", number=WANTED, type=kind.TYPE_BOOL, label=kind.LABEL_OPTIONAL)
    fields.add(name="sender", number=SENDER, type=kind.TYPE_BYTES, label=kind.LABEL_OPTIONAL)
    fields.add(name="bundled", number=BUNDLED, type=kind.TYPE_BOOL, label=kind.LABEL_OPTIONAL)
    (pool := DescriptorPool()).Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("fedapp.Carried"))


Carried = _carried_class()


def add(proto: Proto, **fields: Any) -> None:
    """Add ``contents`` of objects, the flag ``wanted`` or ``bundled``, or a ``sender``."""
    proto.MergeFromString(Carried(**fields).SerializeToString())


def added(proto: Proto, number: int) -> list[Any]:
    """Values of one of the fields above: int for a flag, else bytes."""
    kind = int if number in (WANTED, BUNDLED) else bytes
    values = (field.data for field in UnknownFieldSet(proto) if field.field_number == number)
    return [value for value in values if isinstance(value, kind)]


def objects_in(proto: Proto) -> dict[str, bytes]:
    """Contents of the objects in a request or response, by name."""
    # A name is the SHA-256 of the content, so no object can replace another.
    return {get_object_id(content): content for content in added(proto, CONTENTS)}


def all_objects(trees: Iterable[ObjectTree], find: Find) -> dict[str, bytes]:
    """Contents of all objects by name; none if one is missing or they are too large."""
    contents = dict[str, bytes]()
    for name in {part.object_id for tree in trees for part in iterate_object_tree(tree)}:
        content = find(name)
        if not content or sum(map(len, contents.values())) + len(content) > MOST_BYTES:
            return {}
        contents[name] = content
    return contents


def contents_of(messages: Iterable[Message]) -> Mapping[str, bytes]:
    """Contents of all objects of messages, by name."""
    with no_object_id_recompute():
        parts = (part for message in messages for part in get_all_nested_objects(message).items())
        return {name: part.deflate() for name, part in parts}


class ObjectCarrier:
    """Replaces a Flower client's send function; ``find`` returns contents of objects to push."""

    has_bundle = False  # the run's, which is not asked for again

    def __init__(self) -> None:
        self.find: Find = dict[str, bytes]().get
        self._came: Mapping[str, bytes] = {}
        self._send: Callable[..., Any] | None = None

    def serve(self, client: Any) -> None:
        """Patch a client."""
        self._send = client._unary_unary
        client._unary_unary = self

    def __call__(self, *, request: Proto, **named: Any) -> Any:
        """Send a request, or answer it from objects that have already arrived."""
        assert self._send
        match request:
            case PullMessagesRequest() | PullAppMessagesRequest():
                marked = deepcopy(request)  # the caller may retry with it
                add(marked, wanted=True)
                response = self._send(request=marked, **named)
                self._came = objects_in(response)
                return response
            case PullObjectRequest() if request.object_id in self._came:
                content = self._came[request.object_id]
                return PullObjectResponse(
                    object_found=True, object_available=True, object_content=content
                )
            case ConfirmMessageReceivedRequest() if request.message_object_id in self._came:
                return ConfirmMessageReceivedResponse()  # attach_objects has deleted it
            case PullTaskInputRequest() if self.has_bundle:
                marked = deepcopy(request)
                add(marked, bundled=True)
                return self._send(request=marked, **named)
            case PushMessagesRequest() | PushAppMessagesRequest():
                sent = deepcopy(request)
                add(sent, contents=all_objects(request.message_object_trees, self.find).values())
                return self._send(request=sent, **named)
        return self._send(request=request, **named)


def attach_objects(
    pull: Callable[..., Any], request: Any, state: Any, *rest: Any, **named: Any
) -> Any:
    """Replaces a ``pull_messages``: adds wanted objects and deletes them."""
    with transaction(state):
        response = pull(request, state, *rest, **named)
        store = state.object_store
        for tree in response.message_object_trees if added(request, WANTED) else ():
            contents = all_objects([tree], store.get).values()
            if contents and response.ByteSize() + sum(map(len, contents)) <= MOST_BYTES:
                add(response, contents=contents)
                store.delete(tree.object_id)
    return response


def store_objects(
    push: Callable[..., Any], request: Any, state: Any, *rest: Any, **named: Any
) -> Any:
    """Replaces a ``push_messages``: stores the objects that came with the messages."""
    with transaction(state):
        response = push(request, state, *rest, **named)
        contents = objects_in(request)
        run_id = request.messages_list[0].metadata.run_id if request.messages_list else 0
        missing = [
            name
            for name in response.objects_to_push
            if name not in contents
            or not state.store_object(run_id, response.session_id, name, contents[name])
        ]
        del response.objects_to_push[:]
        response.objects_to_push.extend(missing)
    return response


def without_bundle(pull: Callable[..., Any], request: Any, *rest: Any, **named: Any) -> Any:
    """Replaces ``pull_task_input``, which sends the run's bundle with every message."""
    response = pull(request, *rest, **named)
    if added(request, BUNDLED):
        response.ClearField("fab")
    return response


def pull_at_once(
    object_ids: Iterable[str], pull_object_fn: Callable[[str], bytes], **named: Any
) -> dict[str, bytes]:
    """Replaces ``pull_objects``, which starts threads also for objects that have arrived."""
    contents = dict[str, bytes]()
    missing = list(object_ids)
    with suppress(ObjectUnavailableError):
        while missing:
            contents[missing[-1]] = pull_object_fn(missing[-1])
            missing.pop()
    named["initial_backoff"] = BACKOFF
    return contents | pull_objects(missing, pull_object_fn, **named) if missing else contents


# Requests whose responses are whole, not streams.
WHOLE = frozenset(
    (
        *(f"/v1/fleet/{name}" for name in ("pull-messages", "push-messages")),
        *(f"/v1/runtime/{name}" for name in ("pull-messages", "push-messages", "acquire-task")),
        *(f"/v1/runtime/{name}" for name in ("pull-task-input", "push-task-output")),
    )
)


def pass_on_whole() -> None:
    """Pass the responses to frequent requests through layers of middleware in one piece.

    Starlette passes each response through a stream, and starts two tasks in each layer.
    """
    stream = BaseHTTPMiddleware.__call__

    async def call(layer: BaseHTTPMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in WHOLE:
            await stream(layer, scope, receive, send)
            return
        request = _CachedRequest(scope, receive)

        async def call_next(_: HttpRequest) -> HttpResponse:
            parts = list[Any]()

            async def collect(part: Any) -> None:
                parts.append(part)

            await layer.app(scope, request.wrapped_receive, collect)
            content = b"".join(part.get("body", b"") for part in parts)
            response = HttpResponse(content, parts[0]["status"])
            response.raw_headers = parts[0]["headers"]
            return response

        response = await layer.dispatch_func(request, call_next)
        await response(scope, request.wrapped_receive, send)

    replace(BaseHTTPMiddleware, __call__=call)


def transaction(state: Any) -> Any:
    """One transaction for a whole request if the state is a database."""
    return state.session() if hasattr(state, "session") else nullcontext()
