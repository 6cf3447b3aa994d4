"""Parcels: sealed content from one party to another, which the server cannot open.

They travel beside the fields of a message declared with ``letters=True``, one after the other, with
the names of the peers: the sender of each in a request, the receiver in a reply.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from fedapp.messages.fields import Array, Form, Message, Range, Reply


@dataclass(frozen=True, slots=True, eq=False)
class Parcels(Message):
    """Parcels, each with its peer; one peer may have several."""

    peers: Annotated[tuple[str, ...], Range(0, 10**5)]
    parcel_ends: Annotated[Array, Form("int64", "n_parcels", low=0)]
    parcels: Annotated[Array, Form("uint8", "n_bytes")]


@dataclass(frozen=True, slots=True, eq=False)
class SentReply(Reply, letters=True):
    """Parcels for others, and nothing for the server."""


Parcel = tuple[str, bytes]  # peer, sealed content


def pack_parcels(parcels: Iterable[Parcel]) -> Parcels:
    """Concatenate parcels."""
    pairs = list(parcels)
    return Parcels(
        tuple(peer for peer, _ in pairs),
        np.cumsum([len(content) for _, content in pairs], dtype=np.int64),
        np.frombuffer(b"".join(content for _, content in pairs), dtype=np.uint8),
    )


def unpack_parcels(packed: Parcels) -> list[Parcel]:
    """Inverse of ``pack_parcels``; a ValueError if peers, ends and bytes do not fit together."""
    ends, n_bytes = packed.parcel_ends.tolist(), len(packed.parcels)
    starts = [0, *ends[:-1]]
    in_order = all(start <= end for start, end in zip(starts, ends, strict=False))
    if len(ends) != len(packed.peers) or not in_order or (ends[-1] if ends else 0) != n_bytes:
        raise ValueError(f"parcels must be {len(packed.peers)} that fill {n_bytes} bytes")
    content = packed.parcels.tobytes()
    return [
        (peer, content[start:end])
        for peer, start, end in zip(packed.peers, starts, ends, strict=False)
    ]
