"""The maths of private set intersection: ids as points, masked by every party in turn.

Parties mask one another's points with scalars of their own. Masks commute, so an id that all hold
ends as the same point in every list, and a point under a scalar one does not know says nothing of
its id. How the lists travel, and in which order their points stand, is up to the caller: a party
that sends its own points shuffles them first.

Source: Meadows, A more efficient cryptographic matchmaking protocol, 1986; group and hash of
RFC 9496 and RFC 9380.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import secrets
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt

from fedapp.crypto.workers import n_cores

Points = npt.NDArray[np.uint8]

DST = b"fedapp-psi-v1-ristretto255_XMD:SHA-512_R255MAP_RO_"
# RFC 9496, Section 4: l, the number of points.
ORDER = 2**252 + 27742317777372353535851937790883648493
POINT_BYTES = SCALAR_BYTES = 32
UNIFORM_BYTES = 64
SHA512_BLOCK, SHA512_OUTPUT = 128, 64
# Points a thread takes at once: 40 milliseconds.
CHUNK = 1024


def hash_to_group(ids: Sequence[str]) -> Points:
    """The points that stand for ids.

    Ids are the same if their UTF-8 bytes are; nothing is trimmed or normalised.

    Source: RFC 9380, Appendix B, with fedapp's own ``DST``.

    Parameters
    ----------
    ids : texts, shape (n,).

    Returns
    -------
    uint8, shape (n, 32): encoded points, in the order of ``ids``.

    Raises
    ------
    ValueError : an id has no UTF-8 form.
    """
    try:
        messages = [text.encode() for text in ids]
    except UnicodeEncodeError:
        raise ValueError("ids must be valid Unicode, got a lone surrogate in one") from None
    return hash_messages(messages, DST)


def hash_messages(messages: Sequence[bytes], dst: bytes) -> Points:
    """The points that stand for byte strings, under any domain separation tag.

    Source: RFC 9380, Appendix B; one-way map of RFC 9496, Section 4.3.4.

    Parameters
    ----------
    messages : byte strings, shape (n,).
    dst : 1 to 255 bytes.

    Returns
    -------
    uint8, shape (n, 32): encoded points.

    Raises
    ------
    ValueError : dst is empty or too long.
    """
    to_point = _group().crypto_core_ristretto255_from_hash
    points = [to_point(expand_message(message, dst, UNIFORM_BYTES)) for message in messages]
    return _from_encodings(points)


def expand_message(message: bytes, dst: bytes, n_bytes: int) -> bytes:
    """``n_bytes`` uniform bytes: expand_message_xmd with SHA-512.

    Source: RFC 9380, Section 5.3.1.

    Parameters
    ----------
    message : any bytes.
    dst : 1 to 255 bytes, the domain separation tag.
    n_bytes : int, 1 to 16320.

    Raises
    ------
    ValueError : dst or n_bytes is out of range.
    """
    if not 1 <= len(dst) <= 255:
        raise ValueError(f"dst must be 1 to 255 bytes, got {len(dst)}")
    if not 1 <= n_bytes <= 255 * SHA512_OUTPUT:
        raise ValueError(f"n_bytes must be 1 to {255 * SHA512_OUTPUT}, got {n_bytes}")
    tag = dst + bytes([len(dst)])
    head = _sha512(bytes(SHA512_BLOCK) + message + n_bytes.to_bytes(2, "big") + b"\0" + tag)
    blocks = [_sha512(head + b"\1" + tag)]
    for block_id in range(2, -(-n_bytes // SHA512_OUTPUT) + 1):
        mixed = bytes(a ^ b for a, b in zip(head, blocks[-1], strict=True))
        blocks.append(_sha512(mixed + bytes([block_id]) + tag))
    return b"".join(blocks)[:n_bytes]


def draw_scalar() -> bytes:
    """A secret mask, uniform in 1 to l - 1: 32 bytes, little-endian."""
    return (1 + secrets.randbelow(ORDER - 1)).to_bytes(SCALAR_BYTES, "little")


def mask(points: Points, scalar: bytes) -> Points:
    """Multiply every point by a secret scalar, on all cores.

    libsodium works without Python's lock, so threads are enough: 40 microseconds a point and core.

    Parameters
    ----------
    points : uint8, shape (n, 32): encoded points.
    scalar : 32 bytes, little-endian, from ``draw_scalar``.

    Returns
    -------
    uint8, shape (n, 32): encoded points, in the same order.

    Raises
    ------
    ValueError : points have another form, one is no canonical encoding or the identity, or the
    scalar is out of range.
    """
    _check_points("points", points)
    _check_scalar(scalar)
    _group()  # loaded here, not by all threads at once
    starts = range(0, len(points), CHUNK)
    with ThreadPoolExecutor(n_cores()) as threads:
        chunks = list(threads.map(lambda start: _mask_chunk(points, start, scalar), starts))
    return _from_encodings([point for chunk in chunks for point in chunk])


def intersect(lists: Sequence[Points]) -> Points:
    """The points that all lists have, sorted bytewise.

    Parameters
    ----------
    lists : at least one, each uint8, shape (n, 32), without duplicates; sizes may differ.

    Returns
    -------
    uint8, shape (m, 32).

    Raises
    ------
    ValueError : there is no list, or one has another form or a point twice.
    """
    if not lists:
        raise ValueError("lists must have one or more, got 0")
    common, *others = [_distinct(f"lists[{place}]", points) for place, points in enumerate(lists)]
    for other in others:
        common = np.intersect1d(common, other, assume_unique=True)
    return np.ascontiguousarray(common).view(np.uint8).reshape(-1, POINT_BYTES)


def places(own: Points, common: Points) -> npt.NDArray[np.int64]:
    """Where each common point stands in one's own list.

    Parameters
    ----------
    own : uint8, shape (n, 32), without duplicates.
    common : uint8, shape (m, 32), all of them in ``own``.

    Returns
    -------
    int64, shape (m,): ``own[places]`` equals ``common``.

    Raises
    ------
    ValueError : a list has another form, ``own`` has a point twice or lacks one of ``common``.
    """
    ordered = _distinct("own", own)
    _check_points("common", common)
    wanted = _keys(common)
    ranks = np.searchsorted(ordered, wanted)
    held = ranks < len(ordered)
    held[held] = ordered[ranks[held]] == wanted[held]
    if not held.all():
        raise ValueError(f"common must be in own, got {np.sum(~held)} points that are not")
    return np.argsort(_keys(own))[ranks].astype(np.int64, copy=False)


@functools.cache
def _group() -> ModuleType:
    """rbcl, loaded when first needed.

    Each process that loads it writes libsodium to a temporary file of 3 MB and leaves it there.
    """
    group = importlib.import_module("rbcl")
    library = Path(group._sodium._name)
    if os.name == "posix" and library.parent == Path(tempfile.gettempdir()):
        library.unlink(missing_ok=True)
    return group


def _sha512(data: bytes) -> bytes:
    return hashlib.sha512(data).digest()


def _mask_chunk(points: Points, start: int, scalar: bytes) -> list[bytes]:
    """Masked points from ``start`` on."""
    multiply = _group().crypto_scalarmult_ristretto255
    masked = []
    for place, point in enumerate(points[start : start + CHUNK], start):
        try:
            masked.append(multiply(scalar, point.tobytes()))
        except RuntimeError:
            # The order is prime: a scalar in range and a point but the identity never fail.
            rule = "not be the identity, got it" if not point.any() else "be canonical, got another"
            raise ValueError(f"points must {rule} at {place}") from None
    return masked


def _from_encodings(points: Sequence[bytes]) -> Points:
    """A writable array of encoded points."""
    return np.frombuffer(bytearray().join(points), dtype=np.uint8).reshape(-1, POINT_BYTES)


def _keys(points: Points) -> npt.NDArray[np.void]:
    """Every point as one value, which numpy compares bytewise."""
    return np.ascontiguousarray(points).view(f"V{POINT_BYTES}")[:, 0]


def _distinct(name: str, points: Points) -> npt.NDArray[np.void]:
    """The sorted keys of a list without duplicates."""
    _check_points(name, points)
    keys = np.sort(_keys(points))
    n_repeats = np.sum(keys[1:] == keys[:-1])
    if n_repeats:
        raise ValueError(f"{name} must have each point once, got {n_repeats} repeats")
    return keys


def _check_points(name: str, points: Points) -> None:
    if points.dtype != np.uint8 or points.ndim != 2 or points.shape[1] != POINT_BYTES:
        found = f"{points.dtype} {points.shape}"
        raise ValueError(f"{name} must be uint8 of shape (n, {POINT_BYTES}), got {found}")


def _check_scalar(scalar: bytes) -> None:
    if len(scalar) != SCALAR_BYTES:
        raise ValueError(f"scalar must be {SCALAR_BYTES} bytes, got {len(scalar)}")
    if not 0 < int.from_bytes(scalar, "little") < ORDER:
        raise ValueError("scalar must be 1 to l - 1, got another number")
