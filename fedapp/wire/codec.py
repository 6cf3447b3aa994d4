"""Messages <-> Flower records. Nothing is pickled; everything is checked, on both sides.

A message becomes one or two records of one ``RecordDict``::

    envelope  ConfigRecord   format, model id, step, checkpoint, attempt, gap, method; content
    content   ArrayRecord    one array of bytes, where they are many

The content is all fields, as ``wire.layout`` lays them out. Flower stores, hashes and sends every
record, and of every array two more objects, as objects of their own, in a deployment with a request
each on every hop; so a small content goes with the envelope. It cuts arrays into pieces, and the
values of a ConfigRecord not, so a large one is an array.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedapp.errors import ProtocolError
from fedapp.wire.content import Content
from fedapp.wire.layout import from_bytes, to_bytes

WIRE_FORMAT = 3
MOST_WITH_ENVELOPE = 2**20  # bytes of a content
RAW, BYTES = "fedapp.raw", "|u1"
METHOD = re.compile(r"[a-z0-9-]{0,64}")
ENVELOPE, CONTENT = "envelope", "content"
# A site's codes of errors, whose texts begin with its name; Flower's own end well below.
REFUSED, FAILED, WAITING, DIVERGED = 1000, 1001, 1002, 1003


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


def to_records(content: Content, envelope: Envelope) -> RecordDict:
    """Lay a message and its envelope out for Flower.

    Raises
    ------
    ProtocolError : a scalar or an array is of a kind that no message has.
    """
    return records_of(to_bytes(content), envelope)


def records_of(data: bytes, envelope: Envelope) -> RecordDict:
    """The same, of a message that is laid out as bytes already."""
    # Messages of one exchange, and their replies, have mostly the same envelope.
    head = _head(envelope).copy()
    if len(data) <= MOST_WITH_ENVELOPE:
        head[CONTENT] = data
        return RecordDict({ENVELOPE: head})
    array = FlowerArray(dtype=BYTES, shape=(len(data),), stype=RAW, data=data)
    return RecordDict({ENVELOPE: head, CONTENT: ArrayRecord({CONTENT: array})})


@lru_cache(maxsize=8)
def _head(envelope: Envelope) -> ConfigRecord:
    """An envelope as Flower's record; to be copied, as Flower checks each value that is set."""
    return ConfigRecord(
        {
            "format": WIRE_FORMAT,
            "model-id": envelope.model_id,
            "step": envelope.step,
            "checkpoint": envelope.checkpoint,
            "attempt": envelope.attempt,
            "gap": envelope.gap,
            "method": envelope.method,
        }
    )


def from_records(records: RecordDict, party: str) -> tuple[Envelope, Content]:
    """Read what ``to_records`` laid out.

    Returns
    -------
    The envelope, and the message; its arrays are read-only views of the bytes that came.

    Raises
    ------
    ProtocolError : records are missing or of another format, or the bytes are no message.
    """
    try:
        head = _envelope_of(records)
        if head["format"] != WIRE_FORMAT:
            rule = f"must be {WIRE_FORMAT}, got {head['format']!r}; update fedapp at all parties"
            raise ProtocolError(party, "message", "format", rule)
        steps = {key: _whole(head[key]) for key in ("step", "checkpoint", "attempt", "gap")}
        envelope = Envelope(str(head["model-id"]), **steps, method=_method(head["method"]))
        data = _content(records, head)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(
            party, "message", "records", f"must be fedapp's, got {error!r}"
        ) from error
    return envelope, from_bytes(data, party)


def n_bytes(records: RecordDict) -> int:
    """Size of a message in bytes: its content, and of the envelope 8 a number, 1 an ASCII letter.

    Flower's own ``count_bytes`` would add its names for things.
    """
    found = 0
    for record in records.values():
        for value in record.values():
            if isinstance(value, FlowerArray):
                found += len(value.data)
            else:
                text = value.encode() if isinstance(value, str) else value
                found += len(text) if isinstance(text, bytes) else 8
    return found


def _envelope_of(records: RecordDict) -> dict[str, Any]:
    """The values of the envelope; Flower's ``config_records`` would copy and check all records."""
    head = records[ENVELOPE]
    if not isinstance(head, ConfigRecord):
        raise KeyError(ENVELOPE)
    return dict(head.items())


def _whole(value: Any) -> int:
    """A whole number >= 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no whole number >= 0")
    return value


def _method(value: Any) -> str:
    """A text that may be a method's name."""
    if not isinstance(value, str) or not METHOD.fullmatch(value):
        raise ValueError("no name of a method")
    return value


def _content(records: RecordDict, head: dict[str, Any]) -> bytes:
    """The bytes with the envelope, or of the one array there is."""
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
