"""Multiply points of ristretto255 by a secret scalar, eight points at a time.

The sequence of operations and memory addresses is the same for all scalars and points: digits of
the scalar, all odd, select among eight multiples of a point by masks. Python computes the digits,
once a list.

Results come out doubled, because doubles are encoded by an inverse, which many points can share,
instead of an inverse square root each; ``digit_masks`` halves the scalar.

Only the points are checked here. ``fedapp.crypto.ristretto`` checks the rest, and compares a sample
of the results with libsodium.

Source: Joye and Tunstall, Exponent recoding and regular exponentiation algorithms, 2009; formulas
in ``fedapp.crypto.lane_points``.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from fedapp.crypto.lane_field import N_LIMBS, NUMBER_WORDS, SLOT_WORDS, multiply, square
from fedapp.crypto.lane_points import (
    N_MULTIPLES,
    POWER,
    ROOT,
    add_multiple,
    add_summand,
    check_sum,
    double,
    double_whole,
    end_decoding,
    end_encoding,
    end_mapping,
    put_identity,
    put_one,
    start_decoding,
    start_encoding,
    start_mapping,
    to_summand,
)
from fedapp.crypto.lanes import registers
from fedapp.crypto.rings import N_LANES
from fedapp.crypto.ristretto import ORDER
from fedapp.errors import MachineError
from fedapp.kernels import kernel

Words = npt.NDArray[np.uint64]

# RFC 9496, Appendix A.1: multiples 1 to 4 of the generator; A.3: a text and the point of its
# SHA-512; A.2: an encoding of no point.
MULTIPLES = [
    "e2f2ae0a6abc4e71a884a961c500515f58e30b6aa582dd8db6a65945e08d2d76",
    "6a493210f7499cd17fecb510ae0cea23a110e8d5b901f8acadd3095c73a3b919",
    "94741f5d5d52755ece4f23f044ee27d5d1ea1e2bd196b462166b16152a9d0259",
    "da80862773358b466ffadfe0b3293ab3d9fd53c5ea6c955358f568322daf6a57",
]
HASHED = "by using a finer grind."
POINT = "f8f0c87cf237953c5890aec3998169005dae3eca1fbb04548c635953c817f92a"
NO_POINT = "26948d35ca62e643e26a83177332e6b6afeb9d08e4268b650f1f5bbd8d81d371"

WINDOW_BITS, N_WINDOWS = 4, 64
# Slots: work of the formulas (see lane_points), words, which rows are valid, a further point, a
# table of odd multiples as summands, masks, and then five a group of eight points: the point, and
# the product of the numbers to invert of all groups before.
WORK, WORDS, VALID, OTHER, TABLE = 0, 12, 13, 14, 18
MASKS = TABLE + 4 * N_MULTIPLES
POINTS, POINT_SLOTS = MASKS + N_WINDOWS, 5

# From slot ROOT on: the number x; its power (POWER); x^9; x^(2^10 - 1); x^(2^50 - 1); squares.
NUMBER, NINE, TEN, FIFTY, SQUARES = 0, 2, 3, 4, 5
# Each step (to, from, n, times): square ``from`` n times, multiply by ``times``. Result:
# x^(2^252 - 3), the power by (p - 5) / 8.
ROOT_STEPS = np.array(
    [
        (NINE, NUMBER, 3, NUMBER),  # x^9
        (POWER, NUMBER, 1, NINE),  # x^11
        (POWER, POWER, 1, NINE),  # x^(2^5 - 1)
        (TEN, POWER, 5, POWER),  # x^(2^10 - 1)
        (POWER, TEN, 10, TEN),
        (POWER, POWER, 20, POWER),
        (FIFTY, POWER, 10, TEN),  # x^(2^50 - 1)
        (POWER, FIFTY, 50, FIFTY),
        (POWER, POWER, 100, POWER),
        (POWER, POWER, 50, FIFTY),  # x^(2^250 - 1)
        (POWER, POWER, 2, NUMBER),
    ]
)
# 1 / x = x^(p - 2), in place; p - 2 = 8 (2^252 - 3) + 3.
INVERSE_STEPS = np.array(
    [*ROOT_STEPS.tolist(), (NINE, NUMBER, 1, NUMBER), (NUMBER, POWER, 3, NINE)]
)


def digit_masks(scalar: int) -> Words:
    """Masks that select by the digits of half a scalar, 0 to ORDER - 1.

    The half, made odd by adding the odd order if needed, is the sum of digits d 16^i, d odd and -15
    to 15: with c = (d + 15) / 2, the number of digits c is half the odd one plus 2^255. Returns a
    digit a row, the highest first, uint64, shape (64, 40): all bits are set in place i where |d| is
    2 i + 1, and in place 8 where d < 0; others are 0.
    """
    half = scalar * ((ORDER + 1) // 2) % ORDER
    odd = half + ORDER * (1 - half % 2)
    code = np.frombuffer(((odd >> 1) + (1 << 255)).to_bytes(32, "big"), dtype=np.uint8)
    digits = np.stack([code >> WINDOW_BITS, code & 15], axis=1).ravel()
    is_negative = digits < N_MULTIPLES
    places = (digits ^ np.where(is_negative, 7, 0)) & 7
    masks = np.zeros((N_WINDOWS, SLOT_WORDS), dtype=np.uint64)
    masks[:, :N_MULTIPLES] = places[:, None] == np.arange(N_MULTIPLES)
    masks[:, N_MULTIPLES] = is_negative
    return np.uint64(0) - masks


@numba.njit(nogil=True)
def raise_to(memory: Any, steps: Any) -> None:
    """Raise the number in slot ``ROOT`` by ``ROOT_STEPS`` or ``INVERSE_STEPS``."""
    for step in range(len(steps)):
        square(memory, (ROOT + SQUARES, ROOT + steps[step, 1]))
        for _ in range(steps[step, 2] - 1):
            square(memory, (ROOT + SQUARES, ROOT + SQUARES))
        factor = ROOT + steps[step, 3]
        multiply(memory, (ROOT + steps[step, 0], ROOT + SQUARES, factor))


@numba.njit(nogil=True)
def read_lanes(memory: Any, words: Any, start: Any, column: Any) -> None:
    """Read four words of eight rows; lanes past the end repeat the last row."""
    for lane in range(N_LANES):
        row = min(start + lane, len(words) - 1)
        for word in range(NUMBER_WORDS):
            memory[SLOT_WORDS * WORDS + N_LANES * word + lane] = words[row, column + word]


@numba.njit(nogil=True)
def write_lanes(memory: Any, out: Any, start: Any) -> None:
    """Inverse of ``read_lanes``, without the lanes past the end."""
    for row in range(start, min(start + N_LANES, len(out))):
        for word in range(NUMBER_WORDS):
            out[row, word] = memory[SLOT_WORDS * WORDS + N_LANES * word + row - start]


@numba.njit(nogil=True)
def read_valid(memory: Any, valid: Any, start: Any) -> Any:
    """Read which of eight rows are valid; returns whether all are."""
    all_valid = True
    for row in range(start, min(start + N_LANES, len(valid))):
        valid[row] = memory[SLOT_WORDS * VALID + row - start] == 1
        all_valid &= valid[row]
    return all_valid


@numba.njit(nogil=True)
def decode(memory: Any, point: Any, words: Any, start: Any, valid: Any) -> Any:
    """Decode eight points; returns whether all are valid."""
    read_lanes(memory, words, start, 0)
    start_decoding(memory, (WORK, WORDS))
    raise_to(memory, ROOT_STEPS)
    end_decoding(memory, (point, VALID, WORK, WORDS))
    return read_valid(memory, valid, start)


@numba.njit(nogil=True)
def from_uniform(memory: Any, point: Any, words: Any, start: Any, valid: Any) -> Any:
    """Map eight times 64 uniform bytes to points, sums of two; returns whether all are valid."""
    for half in range(2):
        read_lanes(memory, words, start, NUMBER_WORDS * half)
        start_mapping(memory, (WORK, WORDS))
        raise_to(memory, ROOT_STEPS)
        end_mapping(memory, (OTHER if half else point, WORK))
    to_summand(memory, (OTHER, OTHER))
    add_summand(memory, (point, point, OTHER))
    check_sum(memory, (VALID, point))
    return read_valid(memory, valid, start)


@numba.njit(nogil=True)
def scale(memory: Any, point: Any) -> None:
    """Multiply eight points by the half scalar of the masks."""
    double_whole(memory, (OTHER, point))
    to_summand(memory, (OTHER, OTHER))
    to_summand(memory, (TABLE, point))
    for multiple in range(1, N_MULTIPLES):
        add_summand(memory, (point, point, OTHER))
        to_summand(memory, (TABLE + 4 * multiple, point))
    put_identity(memory, (point,))
    for window in range(N_WINDOWS):
        for _ in range(WINDOW_BITS - 1):
            double(memory, (point, point))
        double_whole(memory, (point, point))
        add_multiple(memory, (point, TABLE, MASKS + window))


def scale_words(words: Words, masks: Words) -> tuple[Words, npt.NDArray[np.bool_]]:
    """Multiply points by the scalar of ``masks``, from ``digit_masks``.

    ``words`` is uint64, shape (n, 4): encoded points; or (n, 8): uniform bytes, to be mapped first.
    Returns encoded points, if all are valid, and which rows are points other than the identity.
    """
    n_slots = POINTS + POINT_SLOTS * -(-len(words) // N_LANES)
    memory = registers(n_slots * N_LIMBS)
    memory[SLOT_WORDS * MASKS : SLOT_WORDS * POINTS] = masks.ravel()
    out = np.empty((len(words), NUMBER_WORDS), dtype=np.uint64)
    valid = np.ones(len(words), dtype=np.bool_)
    _scale_rows(words, memory, out, valid)
    return out, valid


@functools.cache
def check_known_answers() -> None:
    """Compare results on known points with RFC 9496, once a process; raises a MachineError."""
    multiples, point, no_point = map(_words, (MULTIPLES, [POINT], [NO_POINT]))
    cases = [(k, multiples[: 4 // k].copy(), multiples[k - 1 :: k]) for k in range(1, 5)]
    cases.append((1, _words([hashlib.sha512(HASHED.encode()).hexdigest()]), point))
    for scalar, words, wanted in cases:
        out, valid = scale_words(words, digit_masks(scalar))
        if not valid.all() or not np.array_equal(out, wanted):
            raise MachineError("points of ristretto255", "RFC 9496")
    if scale_words(no_point, digit_masks(1))[1].any():
        raise MachineError("points of ristretto255", "RFC 9496")


def _words(texts: Sequence[str]) -> Words:
    """Points or uniform bytes, in writable memory like that of a batch."""
    return np.array([np.frombuffer(bytes.fromhex(text), dtype=np.uint64) for text in texts])


@kernel
def _scale_rows(words: Any, memory: Any, out: Any, valid: Any) -> None:
    """Kernel of ``scale_words``; writes nothing unless all points are valid."""
    n_groups, all_valid = -(-len(words) // N_LANES), True
    for group in range(n_groups):
        point, start = POINTS + POINT_SLOTS * group, N_LANES * group
        if words.shape[1] == NUMBER_WORDS:
            all_valid &= decode(memory, point, words, start, valid)
        else:
            all_valid &= from_uniform(memory, point, words, start, valid)
    if not all_valid:
        return
    put_one(memory, (ROOT + NUMBER,))
    for group in range(n_groups):
        point = POINTS + POINT_SLOTS * group
        scale(memory, point)
        start_encoding(memory, (point, ROOT + NUMBER))
    raise_to(memory, INVERSE_STEPS)
    for group in range(n_groups - 1, -1, -1):
        end_encoding(memory, (WORDS, POINTS + POINT_SLOTS * group, ROOT + NUMBER))
        write_lanes(memory, out, N_LANES * group)
