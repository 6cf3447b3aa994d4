"""Messages <-> Flower records. Nothing is pickled; everything is checked, on both sides.

A message becomes three records of one ``RecordDict``::

    envelope  ConfigRecord   format, message class, method, model id, step, checkpoint, attempt, gap
    scalars   ConfigRecord   the fields that are no arrays
    arrays    ArrayRecord    raw little-endian C-order bytes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedapp.errors import ProtocolError
from fedapp.messages.fields import Array, Form, Letter, Range, Reply, Request

WIRE_FORMAT = 1
RAW = "fedapp.raw"
# A site's codes of errors, whose texts begin with its name; Flower's own end well below.
REFUSED, FAILED = 1000, 1001

M = TypeVar("M", bound=Request | Reply | Letter)
Scalar = bool | int | float | str | list[str]


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every message carries beside its content.

    Parameters
    ----------
    model_id : names the model at every site; drawn by the server.
    step : number of the exchange, from 1.
    checkpoint : the last step whose state a site must be able to go back to.
    attempt : how often the server has been started for this model, less one.
    gap : steps since this party was last asked; 0 where a server started anew cannot know.
    method : of the run, for the sites to allow or refuse; "" only in tests.
    """

    model_id: str
    step: int
    checkpoint: int = 0
    attempt: int = 0
    gap: int = 1
    method: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """A message taken apart: its class name, its scalars, its arrays."""

    name: str
    scalars: Mapping[str, Scalar]
    arrays: Mapping[str, Array]


def take_apart(message: Request | Reply | Letter, party: str) -> Content:
    """Check a message and split it into scalars and arrays.

    Raises
    ------
    ProtocolError : a field breaks its form.
    """
    values = {field.name: getattr(message, field.name) for field in fields(message)}  # type: ignore[arg-type]
    _check(type(message), values, party)
    arrays = {name for name in values if _is_array(type(message), name)}
    return Content(
        type(message).__name__,
        {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if k not in arrays},
        {k: v for k, v in values.items() if k in arrays},
    )


def put_together(kind: type[M], content: Content, party: str) -> M:
    """Rebuild a message of a known class and check it.

    Raises
    ------
    ProtocolError : another class, a field too many or too few, or a field breaks its form.
    """
    if content.name != kind.__name__:
        raise ProtocolError(party, kind.__name__, "class", f"must be this one, got {content.name}")
    values: dict[str, Any] = {**content.scalars, **content.arrays}
    expected = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    for name in sorted(expected ^ set(values)):
        state = "present" if name in expected else "absent"
        raise ProtocolError(party, kind.__name__, name, f"must be {state}")
    for name, hint in _HINTS[kind].items():
        if hint[0] is tuple and isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    _check(kind, values, party)
    return kind(**values)


def to_records(content: Content, envelope: Envelope) -> RecordDict:
    """Lay a message and its envelope out for Flower."""
    head = ConfigRecord(
        {
            "format": WIRE_FORMAT,
            "class": content.name,
            "model-id": envelope.model_id,
            "step": envelope.step,
            "checkpoint": envelope.checkpoint,
            "attempt": envelope.attempt,
            "gap": envelope.gap,
            "method": envelope.method,
        }
    )
    arrays = ArrayRecord({name: _to_raw(array) for name, array in content.arrays.items()})
    scalars = ConfigRecord(dict(content.scalars))
    return RecordDict({"envelope": head, "scalars": scalars, "arrays": arrays})


def from_records(records: RecordDict, party: str) -> tuple[Envelope, Content]:
    """Read what ``to_records`` laid out.

    Raises
    ------
    ProtocolError : records are missing, of another format, or arrays do not fill their shapes.
    """
    try:
        head = records.config_records["envelope"]
        scalars, arrays = records.config_records["scalars"], records.array_records["arrays"]
        name = str(head["class"])
        if head["format"] != WIRE_FORMAT:
            rule = f"must be {WIRE_FORMAT}, got {head['format']!r}; update fedapp at all parties"
            raise ProtocolError(party, name, "format", rule)
        steps = {key: _whole(head[key]) for key in ("step", "checkpoint", "attempt", "gap")}
        envelope = Envelope(str(head["model-id"]), **steps, method=str(head["method"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(
            party, "message", "records", f"must be fedapp's, got {error!r}"
        ) from error
    unpacked = {key: _from_raw(array, party, name, key) for key, array in arrays.items()}
    return envelope, Content(name, dict(scalars), unpacked)  # type: ignore[arg-type]


def n_bytes(records: RecordDict) -> int:
    """Size of a message's content in bytes: array data, 8 a number, 1 an ASCII character.

    Flower's own ``ConfigRecord.count_bytes`` fails on an empty list.
    """
    arrays = sum(len(a.data) for r in records.array_records.values() for a in r.values())
    scalars = [value for r in records.config_records.values() for value in r.values()]
    return arrays + sum(_scalar_bytes(value) for value in scalars)


def _scalar_bytes(value: Any) -> int:
    if isinstance(value, list):
        return sum(_scalar_bytes(part) for part in value)
    return len(value.encode()) if isinstance(value, str) else 8


def _whole(value: Any) -> int:
    """A whole number >= 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no whole number >= 0")
    return value


def _to_raw(array: Array) -> FlowerArray:
    """An array's bytes, without numpy's file header."""
    data = np.ascontiguousarray(array).tobytes()
    return FlowerArray(dtype=array.dtype.str, shape=array.shape, stype=RAW, data=data)


def _from_raw(array: FlowerArray, party: str, name: str, field: str) -> Array:
    """A read-only view of the bytes, with the stated dtype and shape."""
    try:
        dtype = np.dtype(array.dtype)
        if array.stype != RAW or dtype.kind not in "uif" or any(size < 0 for size in array.shape):
            raise ValueError(f"{array.dtype} {array.stype}")
        return np.frombuffer(array.data, dtype=dtype).reshape(array.shape)
    except (TypeError, ValueError) as error:
        rule = f"must be numbers that fill their shape, got {error}"
        raise ProtocolError(party, name, field, rule) from error


class _Hints(dict[type[Any], dict[str, tuple[Any, Form | Range | None]]]):
    """Plain type and declared form of every field of a message class, read once."""

    def __missing__(self, kind: type[Any]) -> dict[str, tuple[Any, Form | Range | None]]:
        found = {}
        for name, hint in get_type_hints(kind, include_extras=True).items():
            if get_origin(hint) is not ClassVar:
                base, extra = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, None)
                found[name] = (get_origin(base) or base, extra)
        self[kind] = found  # whole: sites of one process read it from several threads
        return found


_HINTS = _Hints()


def _is_array(kind: type[Any], field: str) -> bool:
    return isinstance(_HINTS[kind][field][1], Form)


def _check(kind: type, values: Mapping[str, Any], party: str) -> None:
    """Hold every field against its form."""
    sizes: dict[str, int] = {}
    for name, (base, form) in _HINTS[kind].items():
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
