"""Parcels: what one party sends another, passing the server as bytes that it cannot open.

They travel beside the fields of a message that is declared with ``letters=True``, one after the
other, with the names of the peers: in a request who has sent each, in a reply who is to get it.
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
    """Lay parcels one after the other."""
    found = list(parcels)
    return Parcels(
        tuple(peer for peer, _ in found),
        np.cumsum([len(content) for _, content in found], dtype=np.int64),
        np.frombuffer(b"".join(content for _, content in found), dtype=np.uint8),
    )


def unpack_parcels(packed: Parcels) -> list[Parcel]:
    """Undo ``pack_parcels``.

    Raises
    ------
    ValueError : peers, ends and bytes do not fit together.
    """
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
