"""Carry the objects of a message inside the request or response that names them.

Flower sends a message as the names of its objects, at least three, and then each object in a
separate request. Here the objects travel in fields that Flower's protobuf messages do not define.
A receiver that does not know these fields ignores them and transfers each object as usual; so
either end of a connection may be unpatched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

from flwr.app import Message
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    iterate_object_tree,
    no_object_id_recompute,
)
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message as Proto
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

# Field numbers that Flower does not use: object contents, a flag that asks for them, the sender.
CONTENTS, WANTED, SENDER = 20_041, 20_042, 20_043
# Limit of the objects in one request or response; larger messages send them singly.
MOST_BYTES = 2**23

Find = Callable[[str], bytes | None]  # name -> content; empty or None if missing


def _carried_class() -> Any:
    file = FileDescriptorProto(name="fedapp/carried.proto", package="fedapp", syntax="proto3")
    fields, kind = file.message_type.add(name="Carried").field, FieldDescriptorProto
    fields.add(name="contents", number=CONTENTS, type=kind.TYPE_BYTES, label=kind.LABEL_REPEATED)
    fields.add(name="wanted", number=WANTED, type=kind.TYPE_BOOL, label=kind.LABEL_OPTIONAL)
    fields.add(name="sender", number=SENDER, type=kind.TYPE_BYTES, label=kind.LABEL_OPTIONAL)
    (pool := DescriptorPool()).Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("fedapp.Carried"))


Carried = _carried_class()


def add(proto: Proto, **fields: Any) -> None:
    """Add ``contents`` of objects, the flag ``wanted``, or a ``sender``."""
    proto.MergeFromString(Carried(**fields).SerializeToString())


def added(proto: Proto, number: int) -> list[Any]:
    """Values of one of the fields above: int for ``WANTED``, else bytes."""
    kind = int if number == WANTED else bytes
    values = (field.data for field in UnknownFieldSet(proto) if field.field_number == number)
    return [value for value in values if isinstance(value, kind)]


def carried(proto: Proto) -> dict[str, bytes]:
    """Contents of the objects in a request or response, by name."""
    # A name is the SHA-256 of the content, so no object can replace another.
    return {get_object_id(content): content for content in added(proto, CONTENTS)}


def whole(trees: Iterable[ObjectTree], find: Find) -> dict[str, bytes]:
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
        parts = (part for one in messages for part in get_all_nested_objects(one).items())
        return {name: part.deflate() for name, part in parts}


class Carrier:
    """Replaces a Flower client's send function; ``find`` returns contents of objects to push."""

    def __init__(self) -> None:
        self.find: Find = dict[str, bytes]().get
        self._came: Mapping[str, bytes] = {}
        self._send: Callable[..., Any] | None = None

    def serve(self, client: Any) -> None:
        """Patch a client."""
        self._send, client._unary_unary = client._unary_unary, self

    def __call__(self, *, request: Proto, **named: Any) -> Any:
        """Send a request, or answer it from objects that have already arrived."""
        assert self._send
        match request:
            case PullMessagesRequest() | PullAppMessagesRequest():
                marked = deepcopy(request)  # the caller may retry with it
                add(marked, wanted=True)
                response = self._send(request=marked, **named)
                self._came = carried(response)
                return response
            case PullObjectRequest() if request.object_id in self._came:
                content = self._came[request.object_id]
                return PullObjectResponse(
                    object_found=True, object_available=True, object_content=content
                )
            case ConfirmMessageReceivedRequest() if request.message_object_id in self._came:
                return ConfirmMessageReceivedResponse()  # handing_out has deleted it
            case PushMessagesRequest() | PushAppMessagesRequest():
                sent = deepcopy(request)
                add(sent, contents=whole(request.message_object_trees, self.find).values())
                return self._send(request=sent, **named)
        return self._send(request=request, **named)


def handing_out(
    pull: Callable[..., Any], request: Any, state: Any, *rest: Any, **named: Any
) -> Any:
    """Replaces a ``pull_messages``: adds wanted objects and deletes them."""
    with transaction(state):
        response = pull(request, state, *rest, **named)
        store = state.object_store
        for tree in response.message_object_trees if added(request, WANTED) else ():
            contents = whole([tree], store.get).values()
            if contents and response.ByteSize() + sum(map(len, contents)) <= MOST_BYTES:
                add(response, contents=contents)
                store.delete(tree.object_id)
    return response


def storing(push: Callable[..., Any], request: Any, state: Any, *rest: Any, **named: Any) -> Any:
    """Replaces a ``push_messages``: stores the objects that came with the messages."""
    with transaction(state):
        response = push(request, state, *rest, **named)
        contents = carried(request)
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


def transaction(state: Any) -> Any:
    """One transaction for a whole request if the state is a database."""
    return state.session() if hasattr(state, "session") else nullcontext()
