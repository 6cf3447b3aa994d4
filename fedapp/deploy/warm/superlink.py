"""A SuperLink that holds a question for messages until there are some, and answers others sooner.

Asked again and again, Flower's SuperLink spends most of its time on saying no: each question is a
transaction of its database. Of an exchange's other requests it spends most in eight layers of its
web framework, of which five or six only pass each of them on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
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
from fedapp.deploy.warm.carried import handing_out, storing

HOLD = 2.0  # seconds
# Of the 40 threads that answer; whoever asks beyond that is answered at once, as by Flower.
MOST_HELD = 20
FLEET, RUNTIME = "/v1/fleet/", "/v1/runtime/"
# Routes whose requests a layer passes on as they are.
PASSED_ON: Mapping[str, tuple[str, ...]] = {
    "ControlSensitiveResponseMiddleware": (FLEET, RUNTIME),
    "ControlAuthenticationMiddleware": (FLEET, RUNTIME),
    "ControlLicenseMiddleware": (FLEET, RUNTIME),
    "ControlEventLogMiddleware": (FLEET, RUNTIME),
    "NodeAuthMiddleware": (RUNTIME,),
    "FleetEventLogMiddleware": (RUNTIME,),
    "RuntimeTracingMiddleware": (FLEET,),  # until 1.41
}


class Arrivals:
    """How many messages have come for each node since the SuperLink started."""

    def __init__(self) -> None:
        self._counts = Counter[int]()
        self._came, self._room = Condition(), BoundedSemaphore(MOST_HELD)

    def __getitem__(self, node: int) -> int:
        return self._counts[node]

    def add(self, node: int) -> None:
        """One has come."""
        with self._came:
            self._counts[node] += 1
            self._came.notify_all()

    def wait(self, node: int, count: int) -> bool:
        """Wait for more than so many; whether they have come."""
        if not self._room.acquire(blocking=False):
            return False
        with self._came:
            came = self._came.wait_for(lambda: self._counts[node] > count, HOLD)
        self._room.release()
        return came


def held(
    arrivals: Arrivals,
    pull: Callable[..., Any],
    node_of: Callable[[Any], int],
    request: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    """Stands for a ``pull_messages``: looks again when a message has come."""
    count = arrivals[node := node_of(request)]
    response = pull(request, *rest, **named)
    if response.messages_list or not arrivals.wait(node, count):
        return response
    return pull(request, *rest, **named)


def told(
    arrivals: Arrivals, push: Callable[..., Any], request: Any, *rest: Any, **named: Any
) -> Any:
    """Stands for a ``push_messages``: tells those who wait."""
    response = push(request, *rest, **named)
    for message in request.messages_list:
        arrivals.add(message.metadata.dst_node_id)
    return response


class Layer:
    """A layer of the web framework, and a way past it for what it would pass on."""

    def __init__(self, app: ASGIApp, layer: Middleware, passed_on: tuple[str, ...]) -> None:
        self._app, self._passed_on = app, passed_on
        self._layer = layer.cls(app, *layer.args, **layer.kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        is_passed_on = scope["type"] == "http" and scope["path"].startswith(self._passed_on)
        await (self._app if is_passed_on else self._layer)(scope, receive, send)


def layers(given: Callable[[], list[Middleware]]) -> list[Middleware]:
    """Stands for ``_get_middleware``."""
    found = ((one, PASSED_ON.get(getattr(one.cls, "__name__", ""))) for one in given())
    return [Middleware(Layer, one, paths) if paths else one for one, paths in found]


# Held during a transaction, and while the objects in memory change.
TRANSACTION = RLock()


Transactions = Callable[[SqlMixin], AbstractContextManager[Session]]


def one_at_a_time(session: Transactions) -> Transactions:
    """Stands for ``SqlMixin.session``: a transaction begins when the one before has ended.

    SQLite would let it look again and again whether it has, and wait up to 0.1 s between.
    """

    @contextmanager
    def locked(state: SqlMixin) -> Iterator[Session]:
        with TRANSACTION, session(state) as found:
            yield found

    return locked


class LinkStateWithoutObjects(SqlLinkState):
    """Runs, nodes, tasks and messages in the database; the objects of messages in memory.

    These are deleted as soon as a message is fetched. Where the SuperLink dies before, the message
    counts as lost, and is sent again.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
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
    """Have Flower's SuperLink, once it starts, use these parts."""
    replace(SqlMixin, session=one_at_a_time(SqlMixin.session))
    replace(linkstate_factory, SqlLinkState=LinkStateWithoutObjects)
    replace(config_loader, ObjectStoreFactory=lambda database: ObjectStoreFactory())
    replace(superlink, _get_middleware=partial(layers, superlink._get_middleware))
    arrivals = Arrivals()
    for handlers, node_of in (
        (fleet_handlers, lambda request: request.node.node_id),
        (runtime_handlers, lambda _: SUPERLINK_NODE_ID),
    ):
        pull = partial(handing_out, handlers.pull_messages)
        push = partial(storing, handlers.push_messages)
        replace(handlers, pull_messages=partial(held, arrivals, pull, node_of))
        replace(handlers, push_messages=partial(told, arrivals, push))
