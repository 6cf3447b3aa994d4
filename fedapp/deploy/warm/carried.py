"""The objects of a message, within the request or response that names them.

Flower sends a message as the names of the objects that it consists of, three and more, and each
object in a request of its own. Here they travel in a field that Flower's protobuf messages do not
have. Who does not know the field passes over it, and asks for and sends each object as always; so
either end of a connection may be Flower's own.
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

# Numbers that no field of Flower's has: contents of objects, that they are wanted, and who asks.
CONTENTS, WANTED, SENDER = 20_041, 20_042, 20_043
# Of the objects in one request or response; those of a longer message travel singly.
MOST_BYTES = 2**23

Find = Callable[[str], bytes | None]  # content of an object by its name, "" or None if missing


def _carried_class() -> Any:
    file = FileDescriptorProto(name="fedapp/carried.proto", package="fedapp", syntax="proto3")
    fields, kind = file.message_type.add(name="Carried").field, FieldDescriptorProto
    fields.add(name="contents", number=CONTENTS, type=kind.TYPE_BYTES, label=kind.LABEL_REPEATED)
    fields.add(name="wanted", number=WANTED, type=kind.TYPE_BOOL, label=kind.LABEL_OPTIONAL)
    fields.add(name="sender", number=SENDER, type=kind.TYPE_BYTES, label=kind.LABEL_OPTIONAL)
    (pool := DescriptorPool()).Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("fedapp.Carried"))


Carried = _carried_class()  # a protobuf message of those fields alone


def add(proto: Proto, **fields: Any) -> None:
    """Add ``contents`` of objects, that they are ``wanted``, or a ``sender``."""
    proto.MergeFromString(Carried(**fields).SerializeToString())


def added(proto: Proto, number: int) -> list[Any]:
    """What was added under a number; bytes, but for ``WANTED``."""
    kind = int if number == WANTED else bytes
    found = (field.data for field in UnknownFieldSet(proto) if field.field_number == number)
    return [data for data in found if isinstance(data, kind)]


def carried(proto: Proto) -> dict[str, bytes]:
    """Contents of the objects that came with a request or response, by their names.

    An object's name is the SHA-256 of its content, so none can stand for another.
    """
    return {get_object_id(content): content for content in added(proto, CONTENTS)}


def whole(trees: Iterable[ObjectTree], find: Find) -> dict[str, bytes]:
    """Contents of all objects of messages, by name; none if one is missing, or they are many."""
    found = dict[str, bytes]()
    for name in {part.object_id for tree in trees for part in iterate_object_tree(tree)}:
        content = find(name)
        if not content or sum(map(len, found.values())) + len(content) > MOST_BYTES:
            return {}
        found[name] = content
    return found


def contents_of(messages: Iterable[Message]) -> Mapping[str, bytes]:
    """Contents of all objects of messages, by their names."""
    with no_object_id_recompute():
        parts = (part for one in messages for part in get_all_nested_objects(one).items())
        return {name: part.deflate() for name, part in parts}


class Carrier:
    """Stands for what a client of Flower's sends its requests with.

    ``find`` is to give the contents of what the client will push, by their names.
    """

    def __init__(self) -> None:
        self.find: Find = dict[str, bytes]().get
        self._came: Mapping[str, bytes] = {}
        self._send: Callable[..., Any] | None = None

    def serve(self, client: Any) -> None:
        """Send this client's requests from now on."""
        self._send, client._unary_unary = client._unary_unary, self

    def __call__(self, *, request: Proto, **named: Any) -> Any:
        """Send a request, or answer it from what has come already."""
        assert self._send
        match request:
            case PullMessagesRequest() | PullAppMessagesRequest():
                asked = deepcopy(request)  # it may be sent again
                add(asked, wanted=True)
                response = self._send(request=asked, **named)
                self._came = carried(response)
                return response
            case PullObjectRequest() if request.object_id in self._came:
                content = self._came[request.object_id]
                return PullObjectResponse(
                    object_found=True, object_available=True, object_content=content
                )
            case ConfirmMessageReceivedRequest() if request.message_object_id in self._came:
                return ConfirmMessageReceivedResponse()  # it was deleted as it was handed out
            case PushMessagesRequest() | PushAppMessagesRequest():
                sent = deepcopy(request)
                add(sent, contents=whole(request.message_object_trees, self.find).values())
                return self._send(request=sent, **named)
        return self._send(request=request, **named)


def handing_out(
    pull: Callable[..., Any], request: Any, state: Any, *rest: Any, **named: Any
) -> Any:
    """Stands for a ``pull_messages``: adds the messages' objects where they are wanted, and deletes
    them, as a confirmation would."""
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
    """Stands for a ``push_messages``: stores the objects that came with the messages."""
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
    """One transaction for a whole request, where the state is a database."""
    return state.session() if hasattr(state, "session") else nullcontext()
