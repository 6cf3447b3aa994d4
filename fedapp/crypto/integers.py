"""Big integers as rows of bytes, the form in which they are sent."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from gmpy2 import mpz

Bytes = npt.NDArray[np.uint8]


def to_bytes_array(values: Iterable[mpz], width: int) -> Bytes:
    """Integers >= 0 and < 256**width as big-endian rows; uint8, shape (n, width)."""
    data = b"".join([value.to_bytes(width, "big") for value in values])
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, width)


def from_bytes_array(rows: Bytes) -> list[mpz]:
    """Inverse of ``to_bytes_array``."""
    data, width = rows.tobytes(), rows.shape[1]
    return [
        mpz.from_bytes(data[start : start + width], "big") for start in range(0, len(data), width)
    ]


N_LANES = 8  # of a register


# RFC 9496, Section 4: l, the number of points.
ORDER = 2**252 + 27742317777372353535851937790883648493
