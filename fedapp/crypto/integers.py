"""Big integers as rows of bytes, the form in which they are sent."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from gmpy2 import mpz

Bytes = npt.NDArray[np.uint8]


def to_bytes_array(values: Iterable[mpz], width: int) -> Bytes:
    """Lay integers out as rows of bytes, big endian.

    Parameters
    ----------
    values : n integers, >= 0 and < 256**width.
    width : int, >= 1: bytes of an integer.

    Returns
    -------
    uint8, shape (n, width).

    Raises
    ------
    OverflowError : an integer is negative or too long.
    """
    data = b"".join([value.to_bytes(width, "big") for value in values])
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, width)


def from_bytes_array(rows: Bytes) -> list[mpz]:
    """The integers of rows of bytes; the inverse of ``to_bytes_array``.

    Parameters
    ----------
    rows : uint8, shape (n, width), big endian.

    Returns
    -------
    n integers, >= 0.
    """
    data, width = rows.tobytes(), rows.shape[1]
    return [
        mpz.from_bytes(data[start : start + width], "big") for start in range(0, len(data), width)
    ]
