"""Messages as bytes and as Flower records. Nothing is pickled, and both sides check everything.

A message becomes ``Content``: scalars and arrays by name, each checked against its declared form.
``to_bytes`` lays it out, for a Flower record or to be sealed for another party::

    8 bytes     length of the header, little-endian
    header      JSON: {"name": ..., "scalars": {...}, "arrays": [[name, dtype, shape], ...]}
    arrays      raw C-order bytes, one after the other

Padding at the header's end and the order of the arrays, wide items first, align every array to its
item size; numba would compile a function again for unaligned arrays. Offsets follow from the
header, so no array can be outside of the message, leave a gap, or share bytes with another. A
message has only one layout: anything that ``to_bytes`` would not write is refused.

``to_records`` puts these bytes into one or two records of a ``RecordDict``::

    envelope  ConfigRecord   format, model id, step, checkpoint, attempt, gap, method; content
    content   ArrayRecord    one array of bytes, only if they are many

In a deployment Flower makes a request on every hop for each record and for two more objects an
array, so a small content goes with the envelope. A large one is an array, because Flower splits
arrays into chunks, but not the values of a ConfigRecord.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedapp.errors import ProtocolError
from fedapp.messages.fields import Array, Declared, Form, Message, check_values, fields_of
from fedapp.messages.vertical import Parcel, Parcels, pack_parcels, unpack_parcels

M = TypeVar("M", bound=Message)
Scalar = bool | int | float | str | list[str]
Layout = Sequence[tuple[str, str, Sequence[int]]]  # name, dtype and shape of each array
WIRE_FORMAT = 3
MOST_WITH_ENVELOPE = 2**20  # bytes of a content
RAW, BYTES = "fedapp.raw", "|u1"
METHOD = re.compile(r"[a-z0-9-]{0,64}")
ENVELOPE, CONTENT = "envelope", "content"
# Error codes of sites, whose texts begin with the site's name; Flower's codes are far below.
REFUSED, FAILED, WAITING, DIVERGED = 1000, 1001, 1002, 1003
PREFIX_BYTES = ALIGNMENT = 8
DTYPES = frozenset(
    ("|u1", "|i1", *(f"{order}{kind}{size}" for order in "<>" for kind in "uif" for size in "248"))
)
INT64 = range(-(2**63), 2**63)
HEADER_KEYS = {"name", "scalars", "arrays"}
MOST_DIMENSIONS = 8
MOST_SHARED, LONGEST_SHARED = 8, 2**14  # contents that are read once; bytes of the longest
MOST_HEADERS, LONGEST_HEADER = 64, 2**14  # size of the cache; bytes of its longest header


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """A message taken apart: its class name, its scalars, its arrays."""

    name: str
    scalars: Mapping[str, Scalar]
    arrays: Mapping[str, Array]
    whole: dict[type[Message], Any] = field(default_factory=dict)  # as it was put together
    size: int = 0  # bytes of what was received


def to_content(message: Message, party: str, parcels: Iterable[Parcel] = ()) -> Content:
    """Check a message and split it, with the parcels beside its fields, into scalars and arrays."""
    kind = type(message)
    values = {name: getattr(message, name) for name in kind.forms}
    if kind.carries_letters:
        packed = pack_parcels(parcels)
        values |= {name: getattr(packed, name) for name in Parcels.forms}
    _check(kind, values, party)
    forms = _forms(kind)
    arrays = {name: values.pop(name) for name, (_, form) in forms.items() if isinstance(form, Form)}
    scalars = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    return Content(kind.wire_name, scalars, arrays)


def from_content(kind: type[M], content: Content, party: str) -> M:
    """Rebuild a message of the given class and check it, once."""
    whole: M | None = content.whole.get(kind)
    if whole is not None:
        return whole
    if content.name != kind.wire_name:
        raise ProtocolError(party, kind.wire_name, "class", f"must be this one, got {content.name}")
    values: dict[str, Any] = {**content.scalars, **content.arrays}
    forms = _forms(kind)
    for name in sorted(forms.keys() ^ values.keys()):
        state = "present" if name in forms else "absent"
        raise ProtocolError(party, kind.__name__, name, f"must be {state}")
    for name, (base, _) in forms.items():
        if base is tuple and isinstance(values[name], list):
            values[name] = tuple(values[name])
    _check(kind, values, party)
    whole = content.whole[kind] = kind(**{name: values[name] for name in kind.forms})
    return whole


def with_parcels(content: Content, parcels: Iterable[Parcel]) -> Content:
    """A message that carries letters, with its parcels replaced by these."""
    packed = to_content(pack_parcels(parcels), "sender")
    bare = without_parcels(content)
    return Content(bare.name, {**bare.scalars, **packed.scalars}, {**bare.arrays, **packed.arrays})


def parcels_of(content: Content) -> list[Parcel]:
    """The parcels of a message that has been put together; none if it carries no letters."""
    if "peers" not in content.scalars:
        return []
    peers: Any = content.scalars["peers"]
    ends, packed = content.arrays["parcel_ends"], content.arrays["parcels"]
    return unpack_parcels(Parcels(tuple(peers), ends, packed))


def without_parcels(content: Content) -> Content:
    """A message's fields without its parcels."""
    scalars = {name: value for name, value in content.scalars.items() if name not in Parcels.forms}
    arrays = {name: value for name, value in content.arrays.items() if name not in Parcels.forms}
    return Content(content.name, scalars, arrays)


def _forms(kind: type[Message]) -> Mapping[str, tuple[Any, Declared]]:
    return {**kind.forms, **Parcels.forms} if kind.carries_letters else kind.forms


def _check(kind: type[Message], values: Mapping[str, Any], party: str) -> None:
    check_values(kind, values, party)
    if kind.carries_letters:
        check_values(Parcels, values, party, kind.__name__)
        if len(values["peers"]) != len(values["parcel_ends"]):
            raise ProtocolError(party, kind.__name__, "peers", "must be one a parcel")


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every message carries beside its content.

    Parameters
    ----------
    model_id : names the model at every site; drawn by the server.
    step : number of the exchange, from 1.
    checkpoint : the last step to which a site must be able to go back.
    attempt : restarts of the server for this model.
    gap : steps since this party was last asked; 0 if a restarted server cannot know.
    """

    model_id: str
    step: int
    checkpoint: int = 0
    attempt: int = 0
    gap: int = 1
    method: str = ""


def to_records(data: bytes, envelope: Envelope) -> RecordDict:
    """Lay a message, which ``to_bytes`` has laid out, and its envelope out for Flower."""
    # Copied from a cache: the messages of one exchange mostly have the same envelope, and Flower
    # checks each value that is set.
    head = _head(envelope).copy()
    if len(data) <= MOST_WITH_ENVELOPE:
        head[CONTENT] = data
        return RecordDict({ENVELOPE: head})
    array = FlowerArray(dtype=BYTES, shape=(len(data),), stype=RAW, data=data)
    return RecordDict({ENVELOPE: head, CONTENT: ArrayRecord({CONTENT: array})})


@lru_cache(maxsize=8)
def _head(envelope: Envelope) -> ConfigRecord:
    facts = {name.replace("_", "-"): value for name, value in fields_of(envelope).items()}
    return ConfigRecord({"format": WIRE_FORMAT, **facts})


def from_records(records: RecordDict, party: str) -> tuple[Envelope, Content]:
    """Inverse of both; arrays are read-only views of the bytes received."""
    try:
        record = records[ENVELOPE]
        if not isinstance(record, ConfigRecord):
            raise KeyError(ENVELOPE)
        # Flower's ``config_records`` would copy and check all records.
        head: dict[str, Any] = dict(record.items())
        if head["format"] != WIRE_FORMAT:
            rule = f"must be {WIRE_FORMAT}, got {head['format']!r}; update fedapp at all parties"
            raise ProtocolError(party, "message", "format", rule)
        steps = {key: head[key] for key in ("step", "checkpoint", "attempt", "gap")}
        for value in steps.values():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{value!r} is no whole number >= 0")
        method = head["method"]
        if not isinstance(method, str) or not METHOD.fullmatch(method):
            raise ValueError("no name of a method")
        envelope = Envelope(str(head["model-id"]), **steps, method=method)
        data = _content(records, head)
    except (KeyError, TypeError, ValueError) as error:
        rule = f"must be fedapp's, got {error!r}"
        raise ProtocolError(party, "message", "records", rule) from error
    return envelope, from_bytes(data, party)


def n_bytes(records: RecordDict) -> int:
    """Size of a message in bytes: its content, and of the envelope 8 a number, 1 an ASCII letter.

    Unlike Flower's ``count_bytes`` it excludes Flower's field names.
    """
    total = 0
    for record in records.values():
        for value in record.values():
            if isinstance(value, FlowerArray):
                total += len(value.data)
            else:
                text = value.encode() if isinstance(value, str) else value
                total += len(text) if isinstance(text, bytes) else 8
    return total


def _content(records: RecordDict, head: dict[str, Any]) -> bytes:
    """The content's bytes, in the envelope or in the only array."""
    data = head.get(CONTENT)
    if isinstance(data, bytes) and len(records) == 1:
        return data
    if data is not None:
        raise ValueError("more records or arrays, or content of another type")
    arrays = records[CONTENT]
    if not isinstance(arrays, ArrayRecord):
        raise KeyError(CONTENT)
    array = arrays[CONTENT]
    if len(records) != 2 or len(arrays) != 1:
        raise ValueError("more records or arrays")
    form = (array.stype, array.dtype, tuple(array.shape))
    if form != (RAW, BYTES, (len(array.data),)):
        raise ValueError(f"an array of {form}")
    return array.data


def to_bytes(content: Content) -> bytes:
    """Lay a message out as bytes; a ProtocolError if a field is of a kind that no message has."""
    for name, value in content.scalars.items():
        if not _is_scalar(value):
            rule = f"must be a finite number, a text or a list of texts, got {type(value).__name__}"
            raise ProtocolError("sender", content.name, name, rule)
    layout = [(name, array.dtype.str, array.shape) for name, array in content.arrays.items()]
    for name, code, _ in layout:
        if code not in DTYPES:
            dtype = content.arrays[name].dtype
            rule = f"must be whole numbers or floats of 1 to 8 bytes, got {dtype}"
            raise ProtocolError("sender", content.name, name, rule)
    layout.sort(key=lambda entry: -int(entry[1][-1]))
    # Replies of one exchange mostly have the same header.
    header = _header if content.scalars else _header_of_arrays
    text = header(content.name, content.scalars or (), tuple(layout))
    prefix = len(text).to_bytes(PREFIX_BYTES, "little")
    raw = [np.ascontiguousarray(content.arrays[name]).data for name, _, _ in layout]
    return b"".join([prefix, text, *raw])


def from_bytes(data: bytes, party: str) -> Content:
    """Inverse of ``to_bytes``; accepts no other layout. Arrays are read-only views of ``data``."""
    if len(data) <= LONGEST_SHARED:
        with suppress(ProtocolError):  # which shall name the party
            return _read_shared(data)
    return _read(data, party)


@lru_cache(MOST_SHARED)
def _read_shared(data: bytes) -> Content:
    # The parties of a simulation receive the same requests.
    content = _read(data, "")
    scalars, arrays = MappingProxyType(content.scalars), MappingProxyType(content.arrays)
    return Content(content.name, scalars, arrays, size=len(data))


def _read(data: bytes, party: str) -> Content:
    start = PREFIX_BYTES + int.from_bytes(data[:PREFIX_BYTES], "little")
    if not PREFIX_BYTES < start <= len(data):
        raise ProtocolError(party, "message", "header", f"must be whole, got {len(data)} bytes")
    try:
        text = data[PREFIX_BYTES:start]
        read = _read_once if len(text) <= LONGEST_HEADER else _read_header
        name, scalars, layout = read(text)
    except (ValueError, RecursionError) as error:
        rule = f"must be fedapp's, got {error}"
        raise ProtocolError(party, "message", "header", rule) from error
    arrays = _views(data, start, layout, party, name)
    return Content(name, dict(scalars), arrays, size=len(data))


def _views(data: bytes, start: int, layout: Layout, party: str, message: str) -> dict[str, Array]:
    """The arrays, which must fill the rest of ``data``."""
    arrays = {}
    for name, code, shape in layout:
        dtype, n_items = np.dtype(code), math.prod(shape)
        stop = start + n_items * dtype.itemsize
        if stop > len(data):
            rule = f"must fill its shape, got {len(data) - start} of {stop - start} bytes"
            raise ProtocolError(party, message, name, rule)
        try:
            arrays[name] = np.frombuffer(data, dtype, n_items, start).reshape(shape)
        except ValueError as error:
            raise ProtocolError(party, message, name, f"must have a shape, got {error}") from error
        start = stop
    if start != len(data):
        rule = f"must be the end, got {len(data) - start} bytes after them"
        raise ProtocolError(party, message, "arrays", rule)
    return arrays


def _header(name: str, scalars: Mapping[str, Scalar] | tuple[()], layout: Layout) -> bytes:
    header = {"name": name, "scalars": dict(scalars), "arrays": layout}
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % ALIGNMENT)


_header_of_arrays = lru_cache(MOST_HEADERS)(_header)


def _read_header(text: bytes) -> tuple[str, dict[str, Scalar], Layout]:
    """Name, scalars and arrays' layout; texts of ValueErrors contain nothing from the header."""
    header = json.loads(text.decode())
    if not isinstance(header, dict) or set(header) != HEADER_KEYS:
        raise ValueError("other keys")
    name, scalars, layout = header["name"], header["scalars"], header["arrays"]
    if not isinstance(name, str) or not isinstance(scalars, dict) or not isinstance(layout, list):
        raise ValueError("values of other types")
    if not all(_is_scalar(value) for value in scalars.values()):
        raise ValueError("a scalar of another type or range")
    if not all(_is_entry(entry) for entry in layout):
        raise ValueError("an array of another form")
    names = [*scalars, *(entry[0] for entry in layout)]
    if len(set(names)) < len(names):
        raise ValueError("a name twice")
    widths = [int(code[-1]) for _, code, _ in layout]
    if widths != sorted(widths, reverse=True):
        raise ValueError("arrays in another order")
    if _header(name, scalars, layout) != text:  # other blanks, escapes or order of keys
        raise ValueError("another spelling")
    return name, scalars, layout


# Messages of one exchange mostly have the same header.
_read_once = lru_cache(MOST_HEADERS)(_read_header)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(text, str) for text in value)
    if type(value) is int:
        return value in INT64
    return isinstance(value, bool | str) or (type(value) is float and math.isfinite(value))


def _is_entry(entry: Any) -> bool:
    """Whether it is [name, dtype, shape] of an array."""
    match entry:
        case [str(), str(code), list(shape)] if code in DTYPES and len(shape) <= MOST_DIMENSIONS:
            return all(type(size) is int and 0 <= size < INT64.stop for size in shape)
    return False
