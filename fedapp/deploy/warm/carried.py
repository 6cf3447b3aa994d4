"""Fields that are added to Flower's protobuf messages, which do not define them.

A receiver that does not know these fields ignores them.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message as Proto
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

# Field numbers that Flower does not use: object contents, a flag that asks for them, the sender,
# and a flag that the run's bundle is there.
CONTENTS, WANTED, SENDER, BUNDLED = 20_041, 20_042, 20_043, 20_044


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
