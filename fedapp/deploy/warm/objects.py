"""Objects that travel within the request or response that names them.

Flower sends a message as the names of its objects, at least three, and then each object in a
separate request. Here they travel in added fields, at every hop between ServerApp and ClientApp:
`ObjectCarrier` sends, and `attach_objects` and `store_objects` answer. Where either end of a
connection is not patched, each object travels as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import partial
from typing import Any, cast

from flwr.app import Message
from flwr.proto import fleet_pb2, message_pb2, runtime_pb2
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, pull_objects
from google.protobuf.message import Message as Proto

from fedapp.deploy.warm import connected, replace, wrap
from fedapp.deploy.warm.carried import BUNDLED, CONTENTS, WANTED, add, added

# Seconds before an announced object that has not arrived is requested again; 1 in Flower.
BACKOFF = 0.02
# Limit of the objects in one request or response; larger messages send them singly.
MOST_BYTES = 2**25

Find = Callable[[str], bytes | None]  # name -> content; empty or None if missing


def objects_in(proto: Proto) -> dict[str, bytes]:
    """Contents of the objects in a request or response, by name."""
    # A name is the SHA-256 of the content, so no object can replace another.
    return {get_object_id(content): content for content in added(proto, CONTENTS)}


def all_objects(trees: Iterable[message_pb2.ObjectTree], find: Find) -> dict[str, bytes]:
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

    def __init__(self) -> None:
        self._has_bundle = False  # the run's, which is not asked for again
        self.find: Find = dict[str, bytes]().get
        self._came: Mapping[str, bytes] = {}

    def serve(self, client: Any) -> None:
        """Patch a client."""
        self._send: Callable[..., Any] = client._unary_unary
        client._unary_unary = self

    def __call__(self, *, request: Proto, **named: Any) -> Any:
        """Send a request, or answer it from objects that have already arrived."""
        match request:
            case fleet_pb2.PullMessagesRequest() | runtime_pb2.PullAppMessagesRequest():
                response = self._send_with({"wanted": True}, request, **named)
                self._came = objects_in(response)
                return response
            case message_pb2.PullObjectRequest(object_id=name) if content := self._came.get(name):
                return message_pb2.PullObjectResponse(
                    object_found=True, object_available=True, object_content=content
                )
            case message_pb2.ConfirmMessageReceivedRequest(message_object_id=name) if (
                name in self._came
            ):
                return message_pb2.ConfirmMessageReceivedResponse()  # attach_objects has deleted it
            case runtime_pb2.PullTaskInputRequest():
                response = self._send_with({"bundled": self._has_bundle}, request, **named)
                self._has_bundle = True
                return response
            case fleet_pb2.PushMessagesRequest() | runtime_pb2.PushAppMessagesRequest():
                contents = all_objects(request.message_object_trees, self.find).values()
                return self._send_with({"contents": contents}, request, **named)
        return self._send(request=request, **named)

    def _send_with(self, fields: Mapping[str, Any], request: Proto, **named: Any) -> Any:
        sent = deepcopy(request)  # the caller may retry with it
        add(sent, **fields)
        return self._send(request=sent, **named)


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
    if any(added(request, BUNDLED)):
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


def transaction(state: Any) -> Any:
    """One transaction for a whole request if the state is a database."""
    return state.session() if hasattr(state, "session") else nullcontext()


def _carry(handlers: Any) -> None:
    wrap(handlers, pull_messages=partial(partial, attach_objects))
    wrap(handlers, push_messages=partial(partial, store_objects))


def superlink() -> None:
    """Carry objects to and from SuperNodes and ServerApps."""
    from flwr.superlink.servicer.fleet import fleet_handlers
    from flwr.superlink.servicer.runtime import runtime_handlers

    _carry(fleet_handlers)
    _carry(runtime_handlers)


def supernode() -> None:
    """Carry objects between the SuperLink and the processes that answer."""
    from flwr.supernode import fleet_http_connection, start_client_internal
    from flwr.supernode.servicer.runtime import runtime_handlers

    carrier = ObjectCarrier()
    push = start_client_internal._push_messages

    def push_from(*, object_store: Any, **named: Any) -> None:
        carrier.find = object_store.get
        push(object_store=object_store, **named)

    wrap(fleet_http_connection, FleetHttpClient=partial(connected, carrier.serve))
    replace(start_client_internal, pull_objects=pull_at_once, _push_messages=push_from)
    _carry(runtime_handlers)
    wrap(runtime_handlers, pull_task_input=partial(partial, without_bundle))


def worker(client: Any) -> None:
    """Carry objects between a process that answers a run's messages and its SuperNode."""
    from flwr.supernode.runtime import run_clientapp

    carrier = ObjectCarrier()
    push = run_clientapp.push_message

    def push_with_objects(client: Any, reply: Message, context: Any) -> None:
        carrier.find = contents_of([reply]).get
        push(client, reply, context)

    replace(inflatable_utils, pull_objects=pull_at_once)
    replace(run_clientapp, push_message=push_with_objects)
    carrier.serve(client)


def server(grid: Any) -> None:
    """Carry objects between a ServerApp and its SuperLink."""
    from flwr.superlink.grid import http_grid

    push = grid._try_push_messages
    carrier = ObjectCarrier()

    def push_with_objects(run_id: int, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        carrier.find = contents_of(sent).get
        return cast(list[str], push(run_id, sent))

    replace(http_grid, pull_objects=pull_at_once)
    replace(grid, _try_push_messages=push_with_objects)
    carrier.serve(grid._runtime_client)
