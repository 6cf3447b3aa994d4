"""Multiply points of ristretto255 by a secret scalar, in the fastest way the processor supports.

With AVX-512 IFMA points are processed eight at a time (``crypto.lanes.ristretto``), elsewhere
one by one through libsodium. Both take the same time for every scalar, release Python's lock, and
give the same bytes.

Source: RFC 9496.
"""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np

from fedapp.crypto.lanes import has_lanes
from fedapp.crypto.rings import Bytes, sampled
from fedapp.errors import MachineError
from fedapp.kernels import n_cores

Scale = Callable[[Bytes, int], Bytes]  # some points, and the index of the first

POINT_BYTES = SCALAR_BYTES = 32
UNIFORM_BYTES = 64
# Points a thread takes at once: 50 milliseconds one by one; 200 KB of memory side by side.
CHUNK = 1024


def scale(points: Bytes, scalar: bytes) -> Bytes:
    """Multiply points by a secret scalar, on all cores; uint8, shape (n, 32), in the same order.

    Parameters
    ----------
    points : uint8, shape (n, 32): encoded points; or (n, 64): uniform bytes, which the one-way map
        of RFC 9496, Section 4.3.4, maps to points first.
    scalar : 32 bytes, little-endian, 1 to l - 1.

    Raises
    ------
    ValueError : a point is no canonical encoding, or the identity.
    """
    return scale_parts(lambda part: points[part], len(points), scalar)


def scale_parts(read: Callable[[slice], Bytes], n_points: int, scalar: bytes) -> Bytes:
    """``scale`` for points that ``read`` makes part by part."""
    scale_part = _side_by_side(scalar) if has_lanes() else _one_by_one(scalar)

    def scaled(start: int) -> Bytes:
        return scale_part(read(slice(start, start + CHUNK)), start)

    with ThreadPoolExecutor(n_cores()) as threads:
        parts = threads.map(scaled, range(0, n_points, CHUNK))
        return np.concatenate([np.empty((0, POINT_BYTES), dtype=np.uint8), *parts])


def points_of(uniform: Bytes) -> Bytes:
    """Map 64 uniform bytes each, uint8 of shape (n, 64), to encoded points.

    Source: RFC 9496, Section 4.3.4.
    """
    to_point = _group().crypto_core_ristretto255_from_hash
    return _joined([to_point(each.tobytes()) for each in uniform])


def _side_by_side(scalar: bytes) -> Scale:
    """Scale eight points at a time."""
    from fedapp.crypto.lanes import ristretto

    ristretto.check_known_answers()
    single = _one_by_one(scalar)
    masks = ristretto.digit_masks(int.from_bytes(scalar, "little"))

    def scale_part(points: Bytes, start: int) -> Bytes:
        # A copy is aligned and writable, so that numba compiles only one kernel.
        words = np.array(points, order="C").view(np.uint64)
        out, valid = ristretto.scale_words(words, masks)
        # libsodium recomputes one row of each part, see ``rings.sampled``. If points are invalid it
        # must refuse the first; otherwise the fault is here and not with the sender.
        for row in sampled("points", len(points)) if valid.all() else [int(np.argmin(valid))]:
            again = single(points[row : row + 1], start + row)
            if not valid[row] or not np.array_equal(out[row : row + 1].view(np.uint8), again):
                raise MachineError("points of ristretto255", "libsodium")
        return out.view(np.uint8)

    return scale_part


def _one_by_one(scalar: bytes) -> Scale:
    """Scale by libsodium."""
    multiply = _group().crypto_scalarmult_ristretto255

    def scale_part(points: Bytes, start: int) -> Bytes:
        if points.shape[1] == UNIFORM_BYTES:
            points = points_of(points)
        scaled = []
        for place, point in enumerate(points):
            # libsodium ignores the highest bit, and RFC 9496, Section 4.3.1, refuses it.
            if point[-1] >= 2**7:
                raise _not_a_point(points, place, start)
            try:
                scaled.append(multiply(scalar, point.tobytes()))
            except RuntimeError:
                # The order is prime: a scalar in range and a point but the identity never fail.
                raise _not_a_point(points, place, start) from None
        return _joined(scaled)

    return scale_part


def _not_a_point(points: Bytes, place: int, start: int) -> ValueError:
    """The error for an encoding, or uniform bytes, at a place of a part."""
    is_encoding = points.shape[1] == POINT_BYTES and points[place].any()
    rule = "be canonical, got another" if is_encoding else "not be the identity, got it"
    return ValueError(f"points must {rule} at {start + place}")


def _joined(points: Sequence[bytes]) -> Bytes:
    """A writable array."""
    return np.frombuffer(bytearray().join(points), dtype=np.uint8).reshape(-1, POINT_BYTES)


@functools.cache
def _group() -> ModuleType:
    """rbcl, without the 3 MB of libsodium that it leaves in a temporary file."""
    group = importlib.import_module("rbcl")
    library = Path(group._sodium._name)
    if os.name == "posix" and library.parent == Path(tempfile.gettempdir()):
        library.unlink(missing_ok=True)
    return group
