"""Unpack bits of rows that another party has sent."""

from __future__ import annotations

from collections.abc import Sequence

from fedapp.errors import ProtocolError
from fedapp.messages.fields import Array
from fedapp.trees.predict import Bits, unpack_bits


def sent_bits(
    sender: str, message: str, field: str, packed: Array, sizes: Sequence[int]
) -> list[Bits]:
    """Unpack bits of several lists of rows, each padded to whole bytes by ``pack_bits``.

    `sender`, `message` and `field` are for the ProtocolError if the bytes do not fit `sizes`.
    """
    try:
        return unpack_bits(packed, sizes)
    except ValueError as error:
        rule = str(error).removeprefix("bits ")
        raise ProtocolError(sender, message, field, rule) from error
