"""Bits of rows that another party has sent."""

from __future__ import annotations

from collections.abc import Sequence

from fedapp.errors import ProtocolError
from fedapp.messages.fields import Array
from fedapp.trees.sides import Bits, unpack_bits


def sent_bits(
    sender: str, message: str, field: str, packed: Array, sizes: Sequence[int]
) -> list[Bits]:
    """Bits of several lists of rows, each in whole bytes.

    Parameters
    ----------
    sender, message, field : where they come from, for the error.
    packed : uint8, as ``pack_bits`` makes them.
    sizes : rows of each list.

    Raises
    ------
    ProtocolError : another number of bytes, or bits past the last row.
    """
    try:
        return unpack_bits(packed, sizes)
    except ValueError as error:
        rule = str(error).removeprefix("bits ")
        raise ProtocolError(sender, message, field, rule) from error
