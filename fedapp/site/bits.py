"""Unpack bits of rows that another party has sent."""

from __future__ import annotations

from collections.abc import Sequence

from fedapp.errors import ProtocolError
from fedapp.messages.fields import Array
from fedapp.trees.sides import Bits, unpack_bits


def sent_bits(
    sender: str, message: str, field: str, packed: Array, sizes: Sequence[int]
) -> list[Bits]:
    """Unpack bits of several lists of rows, each padded to whole bytes.

    Parameters
    ----------
    sender, message, field : origin, for the error.
    packed : uint8, from ``pack_bits``.
    sizes : rows of each list.

    Raises
    ------
    ProtocolError : wrong number of bytes, or bits past the last row.
    """
    try:
        return unpack_bits(packed, sizes)
    except ValueError as error:
        rule = str(error).removeprefix("bits ")
        raise ProtocolError(sender, message, field, rule) from error
