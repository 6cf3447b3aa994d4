"""Private set intersection: ids as points of a group, masked by every party in turn.

Parties multiply each other's points by secret scalars. Masks commute, so an id that all parties
have ends as the same point in every list, and a point under an unknown scalar reveals nothing about
its id. The caller transports the lists and chooses the order of their points: a party must shuffle
its points before it sends them.

With AVX-512 IFMA points are multiplied eight at a time (``crypto.lanes.ristretto``), in a seventh
of libsodium's time; elsewhere one by one through libsodium. Both take the same time for every
scalar, release Python's lock, and give the same bytes.

Source: Meadows, A more efficient cryptographic matchmaking protocol, 1986; group and hash of RFC
9496 and RFC 9380.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Flags, Ints
from fedapp.crypto.lanes import has_lanes
from fedapp.crypto.rings import ORDER, Bytes
from fedapp.errors import MachineError
from fedapp.kernels import n_cores

Points = Bytes  # encoded, shape (n, 32)
Keys = npt.NDArray[np.void]  # shape (n,)

DST = b"fedapp-psi-v1-ristretto255_XMD:SHA-512_R255MAP_RO_"
SHA512_BLOCK, SHA512_OUTPUT = 128, 64
Scale = Callable[[Bytes, int], Bytes]  # some points, and the index of the first

POINT_BYTES = SCALAR_BYTES = 32
UNIFORM_BYTES = 64
# Points a thread takes at once: 50 milliseconds one by one; 200 KB of memory side by side.
CHUNK = 1024


def expander(dst: bytes, n_bytes: int) -> Callable[[bytes], bytes]:
    """Function from a message to ``n_bytes`` uniform bytes: expand_message_xmd with SHA-512.

    Source: RFC 9380, Section 5.3.1. The domain separation tag, dst, is of 1 to 255 bytes, and
    n_bytes 1 to 16320.
    """
    tag = dst + bytes([len(dst)])
    first = n_bytes.to_bytes(2, "big") + b"\0" + tag
    last = b"\1" + tag
    n_blocks = -(-n_bytes // SHA512_OUTPUT)
    sha512 = hashlib.sha512
    padded = sha512(bytes(SHA512_BLOCK))

    def expand(message: bytes) -> bytes:
        state = padded.copy()
        state.update(message + first)
        head = state.digest()
        blocks = [sha512(head + last).digest()]
        for block_id in range(2, n_blocks + 1):
            mixed = bytes(a ^ b for a, b in zip(head, blocks[-1], strict=True))
            blocks.append(sha512(mixed + bytes([block_id]) + tag).digest())
        return b"".join(blocks)[:n_bytes]

    return expand


def draw_scalar() -> bytes:
    """A secret mask, uniform in 1 to l - 1; 32 bytes, little-endian."""
    return (1 + secrets.randbelow(ORDER - 1)).to_bytes(SCALAR_BYTES, "little")


def mask_ids(ids: Sequence[str], scalar: bytes) -> Points:
    """Hash ids to points, and ``mask`` these without encoding them in between.

    Source: RFC 9380, Appendix B; one-way map of RFC 9496, Section 4.3.4.
    """
    _check_scalar(scalar)
    _check_expander()
    try:
        messages = [text.encode() for text in ids]
    except UnicodeEncodeError:
        raise ValueError("ids must be valid Unicode, got a lone surrogate in one") from None
    expand = expander(DST, UNIFORM_BYTES)
    return scale_parts(lambda part: _uniform(messages[part], expand), len(messages), scalar)


def mask(points: Points, scalar: bytes) -> Points:
    """Multiply encoded points, uint8 of shape (n, 32), by a secret scalar, on all cores.

    Raises
    ------
    ValueError : points have another form, one is no canonical encoding or the identity, or the
        scalar is out of range.
    """
    _check_points("points", points)
    _check_scalar(scalar)
    return scale_parts(lambda part: points[part], len(points), scalar)


def intersect(lists: Sequence[Points]) -> Points:
    """The points that all lists have, sorted bytewise; uint8, shape (m, 32).

    Each of the lists, one at least, is uint8, shape (n, 32), without duplicates. Raises a
    ValueError if one has another form or a point twice.
    """
    common, *others = [_sorted(f"lists[{index}]", points)[0] for index, points in enumerate(lists)]
    for other in others:
        common = common[_find(common, other)[1]]
    return common.view(np.uint8).reshape(-1, POINT_BYTES)


def places(points: Points, common: Points) -> Ints:
    """Position of each common point in a party's list: ``points[places]`` equals ``common``.

    Both are uint8, shape (n, 32), ``points`` without duplicates. Raises a ValueError if a list has
    another form, ``points`` has a point twice or lacks one of ``common``.
    """
    ordered, order = _sorted("points", points)
    ranks, is_present = _find(_keys("common", common), ordered)
    if not is_present.all():
        raise ValueError(f"common must be in points, got {np.sum(~is_present)} points that are not")
    return order[ranks].astype(np.int64, copy=False)


@functools.cache
def _check_expander() -> None:
    """Compare with RFC 9380, Appendix K.3, once a process."""
    expand = expander(b"QUUX-V01-CS02-with-expander-SHA512-256", 32)
    if expand(b"abc").hex() != "0da749f12fbe5483eb066a5f595055679b976e93abe9be6f0f6318bce7aca8dc":
        raise MachineError("uniform bytes of ids", "RFC 9380")


def _uniform(messages: Sequence[bytes], expand: Callable[[bytes], bytes]) -> Points:
    expanded = b"".join(map(expand, messages))
    return np.frombuffer(expanded, dtype=np.uint8).reshape(-1, UNIFORM_BYTES)


def _keys(name: str, points: Points) -> Keys:
    """Every point as one value, which numpy compares bytewise."""
    _check_points(name, points)
    return np.ascontiguousarray(points).view(f"V{POINT_BYTES}")[:, 0]


def _sorted(name: str, points: Points) -> tuple[Keys, npt.NDArray[np.intp]]:
    """A list without duplicates, sorted bytewise, and the indices that sort it."""
    keys = _keys(name, points)
    order = np.argsort(keys)
    ordered = keys[order]
    n_repeats = np.sum(ordered[1:] == ordered[:-1])
    if n_repeats:
        raise ValueError(f"{name} must have each point once, got {n_repeats} repeats")
    return ordered, order


def _find(keys: Keys, ordered: Keys) -> tuple[npt.NDArray[np.intp], Flags]:
    """Rank of each point among sorted ones, and whether it is one of them."""
    ranks = np.searchsorted(ordered, keys)
    is_present = ranks < len(ordered)
    is_present[is_present] = ordered[ranks[is_present]] == keys[is_present]
    return ranks, is_present


def _check_points(name: str, points: Points) -> None:
    if points.dtype != np.uint8 or points.ndim != 2 or points.shape[1] != POINT_BYTES:
        form = f"{points.dtype} {points.shape}"
        raise ValueError(f"{name} must be uint8 of shape (n, {POINT_BYTES}), got {form}")


def _check_scalar(scalar: bytes) -> None:
    if len(scalar) != SCALAR_BYTES:
        raise ValueError(f"scalar must be {SCALAR_BYTES} bytes, got {len(scalar)}")
    if not 0 < int.from_bytes(scalar, "little") < ORDER:
        raise ValueError("scalar must be 1 to l - 1, got another number")


def scale_parts(read: Callable[[slice], Bytes], n_points: int, scalar: bytes) -> Bytes:
    """Multiply points by a secret scalar, on all cores; uint8, shape (n, 32), in the same order.

    ``read`` makes the points of a slice: uint8, shape (n, 32), encoded; or (n, 64), uniform bytes
    that the one-way map of RFC 9496, Section 4.3.4, maps to points first. Raises a ValueError for
    one that is no canonical encoding, or the identity.
    """
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
    return _joined([to_point(row.tobytes()) for row in uniform])


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
        if not valid.all():
            # libsodium must refuse the first; otherwise the fault is here and not with the sender.
            row = int(np.argmin(valid))
            single(points[row : row + 1], start + row)
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
        for index, point in enumerate(points):
            # libsodium ignores the highest bit, and RFC 9496, Section 4.3.1, refuses it.
            if point[-1] >= 2**7:
                raise _not_a_point(points, index, start)
            try:
                scaled.append(multiply(scalar, point.tobytes()))
            except RuntimeError:
                # The order is prime: a scalar in range and a point but the identity never fail.
                raise _not_a_point(points, index, start) from None
        return _joined(scaled)

    return scale_part


def _not_a_point(points: Bytes, index: int, start: int) -> ValueError:
    """The error for an encoding, or uniform bytes, at a place of a part."""
    is_encoding = points.shape[1] == POINT_BYTES and points[index].any()
    rule = "be canonical, got another" if is_encoding else "not be the identity, got it"
    return ValueError(f"points must {rule} at {start + index}")


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
