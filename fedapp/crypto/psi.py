"""Private set intersection: ids as points of a group, masked by every party in turn.

Parties multiply each other's points by secret scalars. Masks commute, so an id that all parties
have ends as the same point in every list, and a point under an unknown scalar reveals nothing about
its id. The caller transports the lists and chooses the order of their points: a party must shuffle
its points before it sends them.

The group is libsodium's ristretto255. A product takes the same time for every scalar.

Source: Meadows, A more efficient cryptographic matchmaking protocol, 1986; group and hash of RFC
9496 and RFC 9380.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import secrets
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt

from fedapp.crypto.rings import Bytes
from fedapp.crypto.workers import shared_workers
from fedapp.errors import MachineError

Points = Bytes  # encoded, shape (n, 32)
Ints = npt.NDArray[np.int64]

DST = b"fedapp-psi-v1-ristretto255_XMD:SHA-512_R255MAP_RO_"
ORDER = 2**252 + 27742317777372353535851937790883648493  # of the group: l of RFC 9496, Section 4
SHA512_BLOCK, SHA512_OUTPUT = 128, 64

POINT_BYTES = SCALAR_BYTES = 32
UNIFORM_BYTES = 64
CHUNK = 1024  # points a thread takes at once, in 50 milliseconds

# RFC 9497, Appendix A.1.1: a tag, the blind and the blinded element of the input 00.
KNOWN_DST = b"HashToGroup-OPRFV1-\x00-ristretto255-SHA512"
KNOWN_SCALAR = "64d37aed22a27f5191de1c1d69fadb899d8862b58eb4220029e036ec4c1f6706"
KNOWN_POINT = "609a0ae68c15a3cf6903766461307e5c8bb2f95e7e6550e1ffa2dc99e412803c"


def expander(dst: bytes, n_bytes: int) -> Callable[[bytes], bytes]:
    """Function from a message to ``n_bytes`` uniform bytes: expand_message_xmd with SHA-512.

    ``dst``, 1 to 255 bytes, is a domain separation tag. Source: RFC 9380, Section 5.3.1.
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
    """Points of ids, multiplied by a secret scalar; uint8, shape (n, 32).

    Raises a ValueError if an id is no valid Unicode, or the scalar is out of range.
    """
    _check_scalar(scalar)
    check_known_answer()
    try:
        messages = [text.encode() for text in ids]
    except UnicodeEncodeError:
        raise ValueError("ids must be valid Unicode, got a lone surrogate in one") from None
    return mask_messages(messages, scalar, DST)


def mask_messages(messages: Sequence[bytes], scalar: bytes, dst: bytes) -> Points:
    """Hash byte strings to points under a domain separation tag, and multiply them by a scalar.

    Source: RFC 9380, Appendix B; one-way map of RFC 9496, Section 4.3.4.
    """
    expand, to_point = expander(dst, UNIFORM_BYTES), _group().crypto_core_ristretto255_from_hash

    def read(part: slice) -> list[bytes]:
        return [to_point(expand(message)) for message in messages[part]]

    return _scaled(read, len(messages), scalar)


def mask(points: Points, scalar: bytes) -> Points:
    """Multiply encoded points, uint8 of shape (n, 32), by a secret scalar, on all cores.

    Raises
    ------
    ValueError : points have another form, one is no canonical encoding or the identity, or the
        scalar is out of range.
    """
    _check_points(points)
    _check_scalar(scalar)
    check_known_answer()
    return _scaled(lambda part: list(map(bytes, points[part])), len(points), scalar)


def check_list(points: Points) -> None:
    """Refuse points, uint8 of shape (n, 32), that repeat or have another form by a ValueError."""
    _check_points(points)
    n_repeats = len(points) - len(np.unique(_keys(points)))
    if n_repeats:
        raise ValueError(f"points must have each point once, got {n_repeats} repeats")


def match(points: Points, others: Points) -> tuple[Ints, Ints]:
    """Where two checked lists have their common points, in the same order of these."""
    _, rows, other_rows = np.intersect1d(
        _keys(points), _keys(others), assume_unique=True, return_indices=True
    )
    return rows, other_rows


@functools.cache
def check_known_answer() -> None:
    """Compare a masked id with RFC 9497, once a process; raises a MachineError."""
    with suppress(ValueError):
        masked = mask_messages([b"\0"], bytes.fromhex(KNOWN_SCALAR), KNOWN_DST)
        if masked.tobytes().hex() == KNOWN_POINT:
            return
    raise MachineError("masked ids", "RFC 9497")


def _scaled(read: Callable[[slice], list[bytes]], n_points: int, scalar: bytes) -> Points:
    """Multiply points by a secret scalar in threads: libsodium releases Python's lock.

    ``read`` returns the encoded points of a slice. Raises a ValueError for one that is no canonical
    encoding, or the identity.
    """
    multiply = _group().crypto_scalarmult_ristretto255

    def scale(start: int) -> bytes:
        scaled = bytearray()
        for index, point in enumerate(read(slice(start, start + CHUNK)), start):
            # libsodium ignores the highest bit, and RFC 9496, Section 4.3.1, refuses it.
            if point[-1] >= 2**7:
                raise ValueError(f"points must be canonical, got another at {index}")
            try:
                scaled += multiply(scalar, point)
            except RuntimeError:
                # The order is prime: a scalar in range and a point but the identity never fail.
                rule = "be canonical, got another" if any(point) else "not be the identity, got it"
                raise ValueError(f"points must {rule} at {index}") from None
        return bytes(scaled)

    parts = shared_workers().run_here(scale, [(start,) for start in range(0, n_points, CHUNK)])
    return np.frombuffer(bytearray().join(parts), dtype=np.uint8).reshape(-1, POINT_BYTES)


def _keys(points: Points) -> npt.NDArray[np.void]:
    """Every point as one value, which numpy compares bytewise."""
    return np.ascontiguousarray(points).view(f"V{POINT_BYTES}")[:, 0]


def _check_points(points: Points) -> None:
    if points.dtype != np.uint8 or points.ndim != 2 or points.shape[1] != POINT_BYTES:
        form = f"{points.dtype} {points.shape}"
        raise ValueError(f"points must be uint8 of shape (n, {POINT_BYTES}), got {form}")


def _check_scalar(scalar: bytes) -> None:
    if len(scalar) != SCALAR_BYTES:
        raise ValueError(f"scalar must be {SCALAR_BYTES} bytes, got {len(scalar)}")
    if not 0 < int.from_bytes(scalar, "little") < ORDER:
        raise ValueError("scalar must be 1 to l - 1, got another number")


@functools.cache
def _group() -> ModuleType:
    """rbcl, without the 3 MB of libsodium that it leaves in a temporary file."""
    group = importlib.import_module("rbcl")
    library = Path(group._sodium._name)
    if library.parent == Path(tempfile.gettempdir()):
        library.unlink(missing_ok=True)
    return group
