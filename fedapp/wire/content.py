"""A message as scalars and arrays by name, each checked against its declared form on both sides."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fedapp.errors import ProtocolError
from fedapp.messages.fields import Array, Form, Message, Range
from fedapp.messages.parcels import Parcel, Parcels, pack_parcels, unpack_parcels

M = TypeVar("M", bound=Message)
Scalar = bool | int | float | str | list[str]
LONGEST = 1000  # characters of a text
# Control characters, marks that change the direction of writing, and lone surrogates.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """A message taken apart: its class name, its scalars, its arrays."""

    name: str
    scalars: Mapping[str, Scalar]
    arrays: Mapping[str, Array]


def take_apart(message: Message, party: str, parcels: Iterable[Parcel] = ()) -> Content:
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


def put_together(kind: type[M], content: Content, party: str) -> M:
    """Rebuild a message of the given class and check it."""
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
    return kind(**{name: values[name] for name in kind.forms})


def enclose(content: Content, parcels: Iterable[Parcel]) -> Content:
    """A message that carries letters, with its parcels replaced by these."""
    packed = take_apart(pack_parcels(parcels), "sender")
    bare = without_parcels(content)
    return Content(bare.name, {**bare.scalars, **packed.scalars}, {**bare.arrays, **packed.arrays})


def enclosed(content: Content) -> list[Parcel]:
    """The parcels of a message that has been put together; none if it carries no letters."""
    if "peers" not in content.scalars:
        return []
    peers: Any = content.scalars["peers"]
    ends, packed = content.arrays["parcel_ends"], content.arrays["parcels"]
    return unpack_parcels(Parcels(tuple(peers), ends, packed))


def without_parcels(content: Content) -> Content:
    """A message's fields without its parcels."""
    scalars = {name: one for name, one in content.scalars.items() if name not in Parcels.forms}
    arrays = {name: one for name, one in content.arrays.items() if name not in Parcels.forms}
    return Content(content.name, scalars, arrays)


def _forms(kind: type[Message]) -> Mapping[str, tuple[Any, Form | Range | None]]:
    return {**kind.forms, **Parcels.forms} if kind.carries_letters else kind.forms


def _check(kind: type[Message], values: Mapping[str, Any], party: str) -> None:
    sizes: dict[str, int] = {}
    for name, (base, form) in _forms(kind).items():
        broken = (
            _broken_array(values[name], form, sizes)
            if isinstance(form, Form)
            else _broken_scalar(values[name], base, form)
        )
        if broken:
            raise ProtocolError(party, kind.__name__, name, broken)


def _broken_array(value: Any, form: Form, sizes: dict[str, int]) -> str:
    """The rule that an array breaks, or ""."""
    if not isinstance(value, np.ndarray) or value.dtype != form.dtype:
        return f"must be {form.dtype}, got {getattr(value, 'dtype', type(value).__name__)}"
    if value.ndim != len(form.shape):
        return f"must have {len(form.shape)} dimensions, got {value.ndim}"
    for place, (wanted, size) in enumerate(zip(form.shape, value.shape, strict=True), start=1):
        # The first array with a named dimension fixes its size.
        expected = wanted if isinstance(wanted, int) else sizes.setdefault(wanted, size)
        if size != expected:
            name = "" if isinstance(wanted, int) else f" ({wanted})"
            return f"must have size {expected}{name} in dimension {place}, got {size}"
    if not value.size:
        return ""
    if value.dtype.kind == "f":
        finite = np.isfinite(value)
        if form.nan:
            finite |= np.isnan(value)
        if not finite.all():
            return "must be finite"
    # fmin and fmax ignore NaN; minimum and maximum would return it.
    least = np.fmin.reduce if form.nan else np.minimum.reduce
    largest = np.fmax.reduce if form.nan else np.maximum.reduce
    if form.low is not None and (extreme := least(value, axis=None)) < form.low:
        return f"must be >= {form.low}, got {extreme}"
    if form.high is not None and (extreme := largest(value, axis=None)) > form.high:
        return f"must be <= {form.high}, got {extreme}"
    return ""


def _broken_scalar(value: Any, base: Any, form: Range | None) -> str:
    """The rule that a scalar breaks, or ""."""
    if base is tuple:
        if not isinstance(value, tuple):
            return f"must be a list of texts, got {type(value).__name__}"
        if not all(isinstance(one, str) for one in value):
            return "must be a list of texts, got another element in it"
    elif type(value) is not base:
        return f"must be {base.__name__}, got {type(value).__name__}"
    if isinstance(value, float) and not np.isfinite(value):
        return f"must be finite, got {value}"
    texts = (value,) if isinstance(value, str) else value
    if isinstance(texts, tuple):  # shown in terminals, logs and pages of other parties
        if UNPRINTABLE.search("".join(texts)):
            return "must have no control characters but tab and line feed"
        longest = max(map(len, texts), default=0)
        if longest > LONGEST:
            return f"must be of at most {LONGEST} letters, got {longest}"
    if form is None:
        return ""
    measured = len(value) if isinstance(value, str | tuple) else value
    if not form.low <= measured <= form.high:
        what = "length must" if isinstance(value, str | tuple) else "must"
        return f"{what} be {form.low} to {form.high}, got {measured}"
    return ""
