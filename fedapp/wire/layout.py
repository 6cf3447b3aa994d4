"""A message as bytes: what a Flower record carries, and what is sealed for another party.

::

    8 bytes     length of the header, little-endian
    header      JSON: {"name": ..., "scalars": {...}, "arrays": [[name, dtype, shape], ...]}
    arrays      raw C-order bytes, one after the other

Padding at the header's end and the order of the arrays, wide items first, align every array to its
item size; numba would compile a function again for unaligned arrays. Offsets follow from the
header, so no array can be outside of the message, leave a gap, or share bytes with another. A
message has only one layout: anything that ``to_bytes`` would not write is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from fedapp.errors import ProtocolError
from fedapp.messages.fields import Array
from fedapp.wire.content import Content, Scalar

PREFIX_BYTES = ALIGNMENT = 8
DTYPE = re.compile(r"\|[ui]1|[<>](?:[ui][248]|f[248])")
INT64 = range(-(2**63), 2**63)
HEADER_KEYS = {"name", "scalars", "arrays"}
MOST_DIMENSIONS = 8
MOST_HEADERS, LONGEST_HEADER = 64, 2**14  # size of the cache; bytes of its longest header

Layout = Sequence[tuple[str, str, Sequence[int]]]  # name, dtype and shape of each array


def to_bytes(content: Content) -> bytes:
    """Lay a message out as bytes; a ProtocolError if a field is of a kind that no message has."""
    for name, value in content.scalars.items():
        if not _is_scalar(value):
            rule = f"must be a finite number, a text or a list of texts, got {type(value).__name__}"
            raise ProtocolError("sender", content.name, name, rule)
    for name, array in content.arrays.items():
        if not DTYPE.fullmatch(array.dtype.str):
            rule = f"must be whole numbers or floats of 1 to 8 bytes, got {array.dtype}"
            raise ProtocolError("sender", content.name, name, rule)
    arrays = sorted(content.arrays.items(), key=lambda item: -item[1].dtype.itemsize)
    layout = [(name, array.dtype.str, array.shape) for name, array in arrays]
    text = _header(content.name, content.scalars, layout)
    prefix = len(text).to_bytes(PREFIX_BYTES, "little")
    raw = [np.ascontiguousarray(array).data for _, array in arrays]
    return b"".join([prefix, text, *raw])


def from_bytes(data: bytes, party: str) -> Content:
    """Inverse of ``to_bytes``; accepts no other layout. Arrays are read-only views of ``data``."""
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
    return Content(name, dict(scalars), _views(data, start, layout, party, name))


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


def _header(name: str, scalars: Mapping[str, Scalar], layout: Layout) -> bytes:
    header = {"name": name, "scalars": dict(scalars), "arrays": layout}
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % ALIGNMENT)


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


@lru_cache(MOST_HEADERS)
def _read_once(text: bytes) -> tuple[str, dict[str, Scalar], Layout]:
    # Messages of one exchange mostly have the same header.
    return _read_header(text)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(one, str) for one in value)
    if type(value) is int:
        return value in INT64
    return isinstance(value, bool | str) or (type(value) is float and math.isfinite(value))


def _is_entry(entry: Any) -> bool:
    """Whether it is [name, dtype, shape] of an array."""
    if not isinstance(entry, list) or len(entry) != 3:
        return False
    name, code, shape = entry
    return (
        isinstance(name, str)
        and isinstance(code, str)
        and DTYPE.fullmatch(code) is not None
        and isinstance(shape, list)
        and len(shape) <= MOST_DIMENSIONS
        and all(type(size) is int and 0 <= size < INT64.stop for size in shape)
    )
