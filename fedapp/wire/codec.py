"""Messages <-> Flower records. Nothing is pickled, and both sides check everything.

A message becomes one or two records of one ``RecordDict``::

    envelope  ConfigRecord   format, model id, step, checkpoint, attempt, gap, method; content
    content   ArrayRecord    one array of bytes, only if they are many

The content is all fields, in the layout of ``wire.layout``. In a deployment Flower makes a request
on every hop for each record and for two more objects an array, so a small content goes with the
envelope. A large one is an array, because Flower splits arrays into chunks, but not the values of a
ConfigRecord.
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
# Error codes of sites, whose texts begin with the site's name; Flower's codes are far below.
REFUSED, FAILED, WAITING, DIVERGED = 1000, 1001, 1002, 1003


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


def to_records(content: Content, envelope: Envelope) -> RecordDict:
    """Lay a message and its envelope out for Flower; a ProtocolError if a field is of no kind."""
    return records_of(to_bytes(content), envelope)


def records_of(data: bytes, envelope: Envelope) -> RecordDict:
    """``to_records`` for a message that is already laid out as bytes."""
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
    """Inverse of ``to_records``; arrays are read-only views of the bytes received."""
    try:
        record = records[ENVELOPE]
        if not isinstance(record, ConfigRecord):
            raise KeyError(ENVELOPE)
        # Flower's ``config_records`` would copy and check all records.
        head: dict[str, Any] = dict(record.items())
        if head["format"] != WIRE_FORMAT:
            rule = f"must be {WIRE_FORMAT}, got {head['format']!r}; update fedapp at all parties"
            raise ProtocolError(party, "message", "format", rule)
        steps = {key: _whole(head[key]) for key in ("step", "checkpoint", "attempt", "gap")}
        method = head["method"]
        if not isinstance(method, str) or not METHOD.fullmatch(method):
            raise ValueError("no name of a method")
        envelope = Envelope(str(head["model-id"]), **steps, method=method)
        data = _content(records, head)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(
            party, "message", "records", f"must be fedapp's, got {error!r}"
        ) from error
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


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no whole number >= 0")
    return value


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
