"""Patches of a SuperLink: long polling, and less work for each request.

With short polling, Flower's SuperLink spends most of its time on empty replies, each a database
transaction. Of other requests it spends most in eight layers of middleware, of which five or six
only forward each of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import inf
from threading import BoundedSemaphore, Condition, RLock
from typing import Any

from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.server.superlink.linkstate import SqlLinkState, linkstate_factory
from flwr.supercore.corestate.in_memory_corestate import InMemoryCoreState, ObjectPushSession
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.sql_mixin import SqlMixin
from flwr.superlink import config_loader
from flwr.superlink import main as superlink
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from sqlalchemy.orm import Session
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from fedapp.deploy.warm import replace
from fedapp.deploy.warm.supernode import attach_objects, pass_on_whole, store_objects

WAIT_SECONDS = 2.0  # that a request for messages waits
GATHER_SECONDS = 0.01  # that a request for several waits for the others when one has arrived
# Requests that may wait at once, of 40 threads; any other is answered immediately.
MOST_WAITING = 20
FLEET, RUNTIME = "/v1/fleet/", "/v1/runtime/"
# Middleware -> path prefixes of the requests that it only forwards.
BYPASSED: Mapping[str, tuple[str, ...]] = {
    "ControlSensitiveResponseMiddleware": (FLEET, RUNTIME),
    "ControlAuthenticationMiddleware": (FLEET, RUNTIME),
    "ControlLicenseMiddleware": (FLEET, RUNTIME),
    "ControlEventLogMiddleware": (FLEET, RUNTIME),
    "NodeAuthMiddleware": (RUNTIME,),
    "FleetEventLogMiddleware": (RUNTIME,),
    "RuntimeTracingMiddleware": (FLEET,),  # until 1.41
}


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
    pull: Callable[..., Any],
    node_of: Callable[[Any], int],
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


class Layer:
    """A middleware, bypassed by requests that it would only forward."""

    def __init__(self, app: ASGIApp, layer: Middleware, bypass_prefixes: tuple[str, ...]) -> None:
        self._app, self._passed_on = app, bypass_prefixes
        self._layer = layer.cls(app, *layer.args, **layer.kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_bypassed = scope["type"] == "http" and scope["path"].startswith(self._passed_on)
        await (self._app if is_bypassed else self._layer)(scope, receive, send)


def bypassable_layers(get_middleware: Callable[[], list[Middleware]]) -> list[Middleware]:
    """Replaces ``_get_middleware``."""
    candidates = (
        (layer, BYPASSED.get(getattr(layer.cls, "__name__", ""))) for layer in get_middleware()
    )
    return [Middleware(Layer, layer, paths) if paths else layer for layer, paths in candidates]


# Held during a transaction, and while the objects in memory change.
TRANSACTION = RLock()
Transactions = Callable[[SqlMixin], AbstractContextManager[Session]]


def serialized(session: Transactions) -> Transactions:
    """Replaces ``SqlMixin.session``: a transaction starts when the previous one has ended."""

    # SQLite itself would poll for the end of the previous one, up to 0.1 s apart.
    @contextmanager
    def locked(state: SqlMixin) -> Iterator[Session]:
        with TRANSACTION, session(state) as open_session:
            yield open_session

    return locked


class LinkStateWithoutObjects(SqlLinkState):
    """Keeps runs, nodes, tasks and messages in the database, but objects in memory.

    Objects are deleted as soon as a message is fetched. If the SuperLink dies before, the message
    counts as lost and is sent again.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._object_push_sessions: dict[str, ObjectPushSession] = {}
        self._object_push_session_by_root: dict[str, str] = {}
        self._lock_object_push_sessions = TRANSACTION

    start_session = InMemoryCoreState.start_session
    delete_sessions_in_run = InMemoryCoreState.delete_sessions_in_run
    preregister_object_tree = InMemoryCoreState.preregister_object_tree
    store_object = InMemoryCoreState.store_object
    get_object = InMemoryCoreState.get_object
    _cleanup_push_session = InMemoryCoreState._cleanup_push_session


def replace_parts() -> None:
    """Patch Flower's SuperLink before it starts."""
    replace(SqlMixin, session=serialized(SqlMixin.session))
    replace(linkstate_factory, SqlLinkState=LinkStateWithoutObjects)
    replace(config_loader, ObjectStoreFactory=lambda database: ObjectStoreFactory())
    replace(superlink, _get_middleware=partial(bypassable_layers, superlink._get_middleware))
    arrivals = MessageQueue()
    for handlers, node_of in (
        (fleet_handlers, lambda request: request.node.node_id),
        (runtime_handlers, lambda _: SUPERLINK_NODE_ID),
    ):
        pull = partial(attach_objects, handlers.pull_messages)
        push = partial(store_objects, handlers.push_messages)
        replace(handlers, pull_messages=partial(wait_for_messages, arrivals, pull, node_of))
        replace(handlers, push_messages=partial(notify_waiting, arrivals, push))
    pass_on_whole()
