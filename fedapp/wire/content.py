"""A message as scalars and arrays by name, each held against its declared form on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fedapp.errors import ProtocolError
from fedapp.messages.fields import Array, Form, Message, Range

M = TypeVar("M", bound=Message)
Scalar = bool | int | float | str | list[str]


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """A message taken apart: its class name, its scalars, its arrays."""

    name: str
    scalars: Mapping[str, Scalar]
    arrays: Mapping[str, Array]


def take_apart(message: Message, party: str) -> Content:
    """Check a message and split it into scalars and arrays.

    Raises
    ------
    ProtocolError : a field breaks its form.
    """
    kind = type(message)
    values = {name: getattr(message, name) for name in kind.forms}
    _check(kind, values, party)
    arrays = {name: values.pop(name) for name, (_, form) in kind.forms.items() if _is_array(form)}
    scalars = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    return Content(kind.__name__, scalars, arrays)


def put_together(kind: type[M], content: Content, party: str) -> M:
    """Rebuild a message of a known class and check it.

    Raises
    ------
    ProtocolError : another class, a field too many or too few, or a field breaks its form.
    """
    if content.name != kind.__name__:
        raise ProtocolError(party, kind.__name__, "class", f"must be this one, got {content.name}")
    values: dict[str, Any] = {**content.scalars, **content.arrays}
    for name in sorted(kind.forms.keys() ^ values.keys()):
        state = "present" if name in kind.forms else "absent"
        raise ProtocolError(party, kind.__name__, name, f"must be {state}")
    for name, (base, _) in kind.forms.items():
        if base is tuple and isinstance(values[name], list):
            values[name] = tuple(values[name])
    _check(kind, values, party)
    return kind(**values)


def _is_array(form: Form | Range | None) -> bool:
    return isinstance(form, Form)


def _check(kind: type[Message], values: Mapping[str, Any], party: str) -> None:
    """Hold every field against its form."""
    sizes: dict[str, int] = {}
    for name, (base, form) in kind.forms.items():
        broken = (
            _broken_array(values[name], form, sizes)
            if isinstance(form, Form)
            else _broken_scalar(values[name], base, form)
        )
        if broken:
            raise ProtocolError(party, kind.__name__, name, broken)


def _broken_array(value: Any, form: Form, sizes: dict[str, int]) -> str:
    """The rule an array breaks, or nothing."""
    if not isinstance(value, np.ndarray) or value.dtype != form.dtype:
        return f"must be {form.dtype}, got {getattr(value, 'dtype', type(value).__name__)}"
    if value.ndim != len(form.shape):
        return f"must have {len(form.shape)} dimensions, got {value.ndim}"
    for place, (size, wanted) in enumerate(zip(value.shape, form.shape, strict=True), start=1):
        known = wanted if isinstance(wanted, int) else sizes.setdefault(wanted, size)
        if size != known:
            name = "" if isinstance(wanted, int) else f" ({wanted})"
            return f"must have size {known}{name} in dimension {place}, got {size}"
    if not value.size:
        return ""
    if value.dtype.kind == "f":
        finite = np.isfinite(value) | np.isnan(value) if form.nan else np.isfinite(value)
        if not finite.all():
            return "must be finite"
    if form.low is not None and (value < form.low).any():
        return f"must be >= {form.low}, got {np.nanmin(value)}"
    if form.high is not None and (value > form.high).any():
        return f"must be <= {form.high}, got {np.nanmax(value)}"
    return ""


def _broken_scalar(value: Any, base: Any, form: Range | None) -> str:
    """The rule a scalar breaks, or nothing."""
    if base is tuple:
        if not isinstance(value, tuple):
            return f"must be a list of texts, got {type(value).__name__}"
        if not all(isinstance(part, str) for part in value):
            return "must be a list of texts, got another element in it"
    elif type(value) is not base:
        return f"must be {base.__name__}, got {type(value).__name__}"
    if isinstance(value, float) and not np.isfinite(value):
        return f"must be finite, got {value}"
    if form is None:
        return ""
    measured = len(value) if isinstance(value, str | tuple) else value
    if not form.low <= measured <= form.high:
        what = "length must" if isinstance(value, str | tuple) else "must"
        return f"{what} be {form.low} to {form.high}, got {measured}"
    return ""
