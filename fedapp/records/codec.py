"""Values of declared types as trees of JSON values and arrays, and back.

A type is a dataclass or named tuple, an array, a scalar of JSON or numpy, or bytes; a tuple or
mapping (by str) of these; each of them ``| None``; a set of JSON scalars. A mapping of Any has JSON
values. What a type needs is worked out once (``codec_of``). In a tree a dataclass is a list of the
fields that its constructor takes, bytes are hex digits, and an array is its place in the list of
arrays beside the tree.

A dataclass that is not frozen is a *live* record: a state that its owner changes by assigning its
fields. It is taken apart field by field (``fields_of``), so that a journal writes those that have
been assigned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Tree = Any  # of JSON values
SCALARS = (str, bool, int, float)
C = TypeVar("C", bound=Callable[..., Any])
R = TypeVar("R")
once = cast(Callable[[C], C], cache)  # mypy takes no class for hashable
UNIONS = (Union, UnionType)
IN_FILE = "in a file"  # annotates a long JSON value, or long bytes: it is an array of its bytes


@dataclass(frozen=True, slots=True)
class Codec:
    """Takes the values of one type apart, and puts them together.

    ``encode`` appends arrays to a list; ``decode`` is given them.
    """

    encode: Callable[[Any, list[Array]], Tree]
    decode: Callable[[Tree, Sequence[Array]], Any]


PLAIN = Codec(lambda value, _: value, lambda tree, _: tree)


@once
def codec_of(hint: Any) -> Codec:
    """The codec of a type; raises TypeError for one that no record may have."""
    origin, args = origin_of(hint), get_args(hint)
    if origin is Annotated:
        if IN_FILE in args[1:]:
            return LONG_BYTES if args[0] is bytes else _in_file(codec_of(args[0]))
        return codec_of(args[0])
    if hint in SCALARS or origin is Literal:
        return PLAIN
    if hint is bytes:
        return Codec(lambda value, _: value.hex(), lambda tree, _: bytes.fromhex(tree))
    if origin in UNIONS:
        return _union([arg for arg in args if arg is not NoneType], NoneType in args, hint)
    if origin is np.ndarray:
        return Codec(_append, lambda tree, arrays: arrays[tree])
    if isinstance(hint, type) and issubclass(hint, np.generic):
        return Codec(lambda value, _: value.item(), lambda tree, _: hint(tree))
    if origin is tuple:
        return _tuple(args)
    if origin is frozenset and args[0] in SCALARS:
        return Codec(lambda value, _: sorted(value), lambda tree, _: frozenset(tree))
    if origin is Mapping and args[0] is str:
        return _mapping(PLAIN if args[1] is Any else codec_of(args[1]))
    if isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields")):
        return _record(hint)
    rule = "must be an array, a record, a JSON value, or a tuple or Mapping of them"
    raise TypeError(f"type of a record's field {rule}, got {hint}")


def origin_of(hint: Any) -> Any:
    """Origin of a generic type, also of an alias, as numpy's ``NDArray`` is one since 2.5."""
    origin = get_origin(hint)
    return get_origin(getattr(origin, "__value__", None)) or origin


LONG_BYTES = Codec(
    lambda value, arrays: _append(np.frombuffer(value, dtype=np.uint8), arrays),
    lambda tree, arrays: arrays[tree].tobytes(),
)


def _append(value: Array, arrays: list[Array]) -> int:
    arrays.append(value)
    return len(arrays) - 1


def _in_file(inner: Codec) -> Codec:
    def encode(value: Any, arrays: list[Array]) -> int:
        none = list[Array]()
        text = json.dumps(inner.encode(value, none))
        assert not none
        return _append(np.frombuffer(text.encode(), dtype=np.uint8), arrays)

    return Codec(encode, lambda tree, arrays: inner.decode(json.loads(arrays[tree].tobytes()), ()))


def _union(kinds: Sequence[Any], may_be_none: bool, hint: Any) -> Codec:
    arrays_only = all(origin_of(kind) is np.ndarray for kind in kinds)
    scalars_only = all(kind in SCALARS or origin_of(kind) is Literal for kind in kinds)
    if len(kinds) > 1 and not arrays_only and not scalars_only:
        raise TypeError(f"union must be of arrays, of scalars, or of one type and None, got {hint}")
    inner = codec_of(kinds[0])
    return Codec(unless_none(inner.encode), unless_none(inner.decode)) if may_be_none else inner


def unless_none(convert: Callable[..., Any]) -> Callable[..., Any]:
    """The same conversion, but None stays None."""
    return lambda value, *more: None if value is None else convert(value, *more)


def _tuple(args: tuple[Any, ...]) -> Codec:
    codecs = [codec_of(arg) for arg in args if arg is not ...]
    if codecs == [PLAIN] and ... in args:
        return Codec(lambda value, _: list(value), lambda tree, _: tuple(tree))

    def pairs(items: Sequence[Any]) -> Iterable[tuple[Codec, Any]]:
        return zip(codecs * len(items) if ... in args else codecs, items, strict=True)

    return Codec(
        lambda value, arrays: [codec.encode(item, arrays) for codec, item in pairs(value)],
        lambda tree, arrays: tuple(codec.decode(item, arrays) for codec, item in pairs(tree)),
    )


def _mapping(codec: Codec) -> Codec:
    if codec is PLAIN:
        return Codec(lambda value, _: dict(value), lambda tree, _: tree)
    return Codec(
        lambda value, arrays: {name: codec.encode(item, arrays) for name, item in value.items()},
        lambda tree, arrays: {name: codec.decode(item, arrays) for name, item in tree.items()},
    )


def _record(kind: type[Any]) -> Codec:
    codecs = [(name, codec_of(hint)) for name, hint in hints_of(kind).items()]

    def encode(value: Any, arrays: list[Array]) -> Tree:
        return [codec.encode(getattr(value, name), arrays) for name, codec in codecs]

    def decode(tree: Tree, arrays: Sequence[Array]) -> Any:
        return kind(
            *(codec.decode(item, arrays) for (_, codec), item in zip(codecs, tree, strict=True))
        )

    return Codec(encode, decode)


def hints_of(kind: type[Any]) -> dict[str, Any]:
    """Types of a record's fields by name, in the order of its constructor."""
    hints = get_type_hints(kind, include_extras=True)
    names = getattr(kind, "_fields", None)  # of a named tuple
    return {name: hints[name] for name in names or (f.name for f in fields(kind) if f.init)}


def _is_live(hint: Any) -> bool:
    parameters = getattr(hint, "__dataclass_params__", None)
    return parameters is not None and not parameters.frozen


@once
def fields_of(kind: type[Any]) -> dict[str, Codec]:
    """Codecs of a record's fields by name; of live records in it by dotted names."""
    codecs = dict[str, Codec]()
    for name, hint in hints_of(kind).items():
        if _is_live(hint):
            codecs |= {f"{name}.{inner}": codec for inner, codec in fields_of(hint).items()}
        else:
            codecs[name] = codec_of(hint)
    return codecs


def joined(kind: type[R], read: Callable[[str, Codec], Any], prefix: str = "") -> R:
    """The record whose fields ``read`` returns, by the names of ``fields_of`` and their codecs."""
    return kind(
        *(
            joined(hint, read, f"{prefix}{name}.")
            if _is_live(hint)
            else read(prefix + name, codec_of(hint))
            for name, hint in hints_of(kind).items()
        )
    )
