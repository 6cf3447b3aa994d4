"""Masks that cancel in the sum over all parties: who passes vectors on sees their sum alone.

Each pair of parties has a secret. Of it, and of a label that says what is being sent, both draw the
same stream of numbers; the one whose name comes first adds it, the other subtracts it::

    a sends  x_a + s_ab + s_ac
    b sends  x_b - s_ab + s_bc        all in Z/2^64
    c sends  x_c - s_ac - s_bc
    ------------------------------
    sum      x_a + x_b + x_c

Without the sum of all, any of these vectors is as good as random to whoever knows none of the
secrets, and so is any sum of some of them. A stream must serve one vector alone: the difference of
two under the same masks is that of their contents. So the label must tell all contents apart.

Where a party may be lost, each adds one more stream, of a seed that is its own (``hide``). The sum
of those that are left then has the streams of their own seeds, and those of their pairs with who is
lost; whoever is told these seeds, which are of one label alone, takes them off (``total``). A
vector that comes late stays under the stream of its own seed, which nobody is told.

Source: Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", Section 4; ChaCha20 of RFC 8439, keyed BLAKE2b of RFC 7693.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from fedapp.crypto.fixed_point import Whole
from fedapp.crypto.sealed import prefixed

Masked = npt.NDArray[np.uint64]

LABEL = b"fedapp mask v1"
KEY_BYTES, NONCE_BYTES, NUMBER_BYTES = 32, 16, 8
# Bytes of a number in Z/2^n; shorter ones lie together in words of 8 bytes.
SIZES = 2, 4, 8
# The block counter of RFC 8439 has 32 bits, and a block 64 bytes.
MOST_NUMBERS = 2**32 * 64 // NUMBER_BYTES


def seed_of(secret: bytes, label: bytes) -> bytes:
    """What the stream of a label follows from, and of no other label: 32 bytes.

    Parameters
    ----------
    secret : of the two parties, 32 bytes, from ``sealed.agree``.
    label : of the content that the stream hides; none other may have it.
    """
    told = prefixed(LABEL, label)
    return hashlib.blake2b(told, digest_size=KEY_BYTES, key=secret).digest()


def expand(seed: bytes, n_numbers: int) -> Masked:
    """Numbers that look random to who does not know the seed; uint64, shape (n_numbers,).

    Raises
    ------
    ValueError : more than one seed may give.
    """
    if n_numbers > MOST_NUMBERS:
        raise ValueError(f"n_numbers must be <= {MOST_NUMBERS}, got {n_numbers}")
    # The key serves this stream alone, so any nonce will do.
    encryptor = Cipher(ChaCha20(seed, bytes(NONCE_BYTES)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(n_numbers * NUMBER_BYTES)), dtype="<u8")


def stream(secret: bytes, label: bytes, n_numbers: int) -> Masked:
    """The stream that a pair draws; arguments as of ``seed_of`` and ``expand``."""
    return expand(seed_of(secret, label), n_numbers)


def hide(
    name: str,
    values: Whole,
    secrets: Mapping[str, bytes],
    label: bytes,
    n_bytes: int = 8,
    own: bytes = b"",
) -> Masked:
    """A party's vector under its masks with all others.

    Parameters
    ----------
    name : of the party.
    values : int64, shape (n_values,).
    secrets : by name of the other party.
    label : see ``stream``; the same at all parties.
    n_bytes : of a number, one of ``SIZES``; sums are of n = 8 n_bytes bits.
    own : seed of a further mask, 32 bytes, drawn anew for each vector; empty for none.

    Returns
    -------
    uint64, shape (n_words(n_values, n_bytes),).
    """
    words = np.zeros(n_words(len(values), n_bytes), dtype=np.uint64)
    masked = words.view(f"<u{n_bytes}")
    np.copyto(masked[: len(values)], values, casting="unsafe")  # modulo 2^n
    for peer, secret in secrets.items():
        mask = stream(secret, label, len(words)).view(masked.dtype)
        if name < peer:
            masked += mask
        else:
            masked -= mask
    if own:
        masked += expand(own, len(words)).view(masked.dtype)
    return words


def total(
    vectors: Iterable[Masked],
    n_values: int,
    n_bytes: int = 8,
    added: Iterable[bytes] = (),
    subtracted: Iterable[bytes] = (),
) -> Whole:
    """What the vectors add up to, int64, shape (n_values,), once no masks are left.

    Parameters
    ----------
    added, subtracted : seeds of the streams that do not cancel, to be taken off.
    """
    first, *others = [np.ascontiguousarray(vector).view(f"<u{n_bytes}") for vector in vectors]
    summed = first.copy()
    for vector in others:
        summed += vector
    for seed in added:
        summed -= expand(seed, n_words(n_values, n_bytes)).view(summed.dtype)
    for seed in subtracted:
        summed += expand(seed, n_words(n_values, n_bytes)).view(summed.dtype)
    signed: Whole = summed[:n_values].view(f"<i{n_bytes}").astype(np.int64, copy=False)
    return signed


def n_words(n_values: int, n_bytes: int) -> int:
    """Words of 8 bytes that so many numbers take."""
    return -(-n_values * n_bytes // NUMBER_BYTES)
