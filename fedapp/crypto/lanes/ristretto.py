"""Multiply points of ristretto255 by a secret scalar, eight points at a time.

``Element`` has arithmetic modulo p = 2^255 - 19, formulas for points use it, and ``scale_words``
combines the formulas. The sequence of operations and memory addresses is the same for all scalars
and points: digits of the scalar, all odd, select among eight multiples of a point by masks, and a
square root is computed whether there is one or not. Only the points are checked here;
``fedapp.crypto.psi`` checks the rest.

Formulas are written with ``Element``, which represents eight numbers; a register has one limb of
each::

    x = x0 + x1 2^51 + x2 2^102 + x3 2^153 + x4 2^204

Its operators add instructions to the function being compiled. It tracks how large its limbs may be,
and carries them only before they would pass 2^64, or 2^52 where they become factors.

In memory elements follow each other, a *slot* of five registers each, with no limb above
``CARRIED``. A compiled function of slots is called with the memory and the places of its slots.

A point (x, y) of the curve -x^2 + y^2 = 1 + d x^2 y^2 takes four slots, X, Y, Z and T with x = X/Z,
y = Y/Z and x y = T/Z; as a summand Y + X, Y - X, 2 Z and 2 d T. Several points represent one
element of the group, and any of them will do. Results come out doubled, because doubles are encoded
by an inverse, which many points can share, instead of an inverse square root each; ``digit_masks``
halves the scalar.

Source: RFC 9496, Section 4; Bernstein, Duif, Lange, Schwabe and Yang, High-speed high-security
signatures, 2012 (limbs of 51 bits); Gueron and Krasnov 2016 (IFMA); Hisil, Wong, Carter and Dawson,
Twisted Edwards curves revisited, 2008; Hamburg, Decaf, 2015, and the double-and-compress of
curve25519-dalek; Joye and Tunstall, Exponent recoding and regular exponentiation algorithms, 2009.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from fedapp.arrays import Flags
from fedapp.crypto.lanes.field import (
    N_LIMBS,
    NUMBER_WORDS,
    SLOT_WORDS,
    Element,
    P,
    Slots,
    multiply,
    of_slots,
    square,
)
from fedapp.crypto.lanes.registers import registers
from fedapp.crypto.rings import N_LANES, ORDER
from fedapp.errors import MachineError
from fedapp.kernels import kernel

# Formulas for points. Constants of RFC 9496, Sections 4.1 and 4:

D = -121665 * pow(121666, -1, P) % P
SQRT_M1 = pow(2, (P - 1) // 4, P)
SQRT_AD_MINUS_ONE = 25063068953384623474111414158702152701244531502492656460079210482610430750235
INVSQRT_A_MINUS_D = 54469307008909316920995813868745141605393597292927456921205312896311721017578

N_MULTIPLES = 8  # of a point, in a table: 1, 3, ..., 15
# Layout of ``work``, which passes numbers from one formula to the next: slots 0 to 5 intermediate
# results, ROOT the number to raise, ROOT + POWER its power.
ROOT, POWER = 6, 1


def root(u: Element, v: Element, factor: Element, power: Element) -> tuple[Any, Element]:
    """SQRT_RATIO_M1 of RFC 9496, Section 4.2: where u / v is a square, and a root.

    ``factor`` is u v^3, ``power`` is (u v^7)^((p - 5) / 8).
    """
    candidate, build = factor * power, u.builder
    check = v * candidate.square()
    is_flipped = (check + u).is_zero()
    is_turned = build.or_(is_flipped, (check + u * u.constant(SQRT_M1)).is_zero())
    was_square = build.or_((check - u).is_zero(), is_flipped)
    return was_square, (candidate * u.constant(SQRT_M1)).where(is_turned, candidate).abs()


@of_slots
def start_decoding(work: Slots, words: Slots) -> None:
    """RFC 9496, Section 4.3.1, up to the root of 1 / w, w = v u2^2."""
    s = words.number()
    one, ss = s.constant(1), s.square()
    u1, u2 = one - ss, one + ss
    u2_square = u2.square()
    v = -(s.constant(D) * u1.square()) - u2_square
    w = v * u2_square
    factor = w.square() * w
    work[0], work[1], work[2], work[3], work[4], work[5] = s, u1, u2, v, w, factor
    work[ROOT] = factor.square() * w


@of_slots
def end_decoding(point: Slots, valid: Slots, work: Slots, words: Slots) -> None:
    """The rest of the decoding; ``valid`` marks canonical encodings other than the identity's."""
    s, u1, u2, v, w, factor = (work[index] for index in range(6))
    one, build = s.constant(1), s.builder
    was_square, inverse_root = root(one, w, factor, work[ROOT + POWER])
    den_x = inverse_root * u2
    x = ((s + s) * den_x).abs()
    y = u1 * (inverse_root * den_x * v)
    t = x * y
    wrong = [build.not_(was_square), t.is_negative(), y.is_zero(), s.is_negative(), s.is_zero()]
    for index, word in enumerate(s.words()):
        wrong.append(build.icmp_unsigned("!=", word, words.register(0, index)))
    any_wrong = wrong[0]
    for is_wrong in wrong[1:]:
        any_wrong = build.or_(any_wrong, is_wrong)
    valid.put_bits(0, build.not_(any_wrong))
    point[0], point[1], point[2], point[3] = x, y, one, t


@of_slots
def check_sum(valid: Slots, point: Slots) -> None:
    """Mark points other than the identity."""
    build = point[0].builder
    x = point[0]
    y = point[1]
    valid.put_bits(0, build.not_(build.or_(x.is_zero(), y.is_zero())))


@of_slots
def start_mapping(work: Slots, words: Slots) -> None:
    """MAP of RFC 9496, Section 4.3.4, up to the root of u / v."""
    t = words.number()
    one, d = t.constant(1), t.constant(D)
    r = t.constant(SQRT_M1) * t.square()
    u = (r + one) * t.constant(1 - D**2)
    v = (-one - r * d) * (r + d)
    v_square = v.square()
    factor = u * v_square * v
    work[0], work[1], work[2], work[3], work[4] = t, r, u, v, factor
    work[ROOT] = factor * v_square.square()


@of_slots
def end_mapping(point: Slots, work: Slots) -> None:
    """The rest of MAP."""
    t, r, u, v, factor = (work[index] for index in range(5))
    one = t.constant(1)
    was_square, s = root(u, v, factor, work[ROOT + POWER])
    s = s.where(was_square, -(s * t).abs())
    c = (-one).where(was_square, r)
    n = c * (r - one) * t.constant((D - 1) ** 2) - v
    w0 = (s + s) * v
    w1 = n * t.constant(SQRT_AD_MINUS_ONE)
    w2, w3 = one - s.square(), one + s.square()
    point[0], point[1], point[2], point[3] = w0 * w3, w2 * w1, w1 * w3, w0 * w2


def put_double(out: Slots, point: Slots, with_t: bool) -> None:
    """Double a point, whose T is not read; T is computed only ``with_t``.

    Source: Hisil and others, Section 3.3 (2008), all coordinates negated.
    """
    x, y, z = point[0], point[1], point[2]
    a = x.square()
    b = y.square()
    xy = x * y
    c = z.square()
    e = xy + xy
    g = b - a
    h = a + b
    f = c + c + a - b
    out[0], out[1], out[2] = e * f, g * h, f * g
    if with_t:
        out[3] = e * h


@of_slots
def double(out: Slots, point: Slots) -> None:
    """Double a point, without T."""
    put_double(out, point, False)


@of_slots
def double_whole(out: Slots, point: Slots) -> None:
    """Double a point."""
    put_double(out, point, True)


@of_slots
def to_summand(out: Slots, point: Slots) -> None:
    """A point as a summand."""
    x, y, z, t = (point[index] for index in range(4))
    out[0], out[1], out[2], out[3] = y + x, y - x, z + z, t * t.constant(2 * D)


def put_sum(out: Slots, point: Slots, summand: Any, negated: Any = None) -> None:
    """Add a summand to a point, or subtract it in the lanes where ``negated`` is set.

    Source: Hisil and others, Section 3.1 (2008).
    """
    x, y, z, t = (point[index] for index in range(4))
    plus, minus, double_z, double_dt = (summand[index] for index in range(4))
    if negated is not None:
        plus, minus = plus.swapped(negated, minus)
    a = (y - x) * minus
    b = (y + x) * plus
    c = t * double_dt
    d = z * double_z
    e = b - a
    f = d - c
    g = d + c
    h = b + a
    if negated is not None:
        f, g = f.swapped(negated, g)
    out[0], out[1], out[2], out[3] = e * f, g * h, f * g, e * h


@of_slots
def add_summand(out: Slots, point: Slots, summand: Slots) -> None:
    """A point plus a summand."""
    put_sum(out, point, summand)


@of_slots
def add_multiple(point: Slots, table: Slots, masks: Slots) -> None:
    """Add the multiple that a digit's masks select; reads the whole table."""
    build, summand = point[0].builder, []
    chosen: list[Any] = [None] * (4 * N_LIMBS)
    for multiple in range(N_MULTIPLES):
        mask = masks.spread(multiple)
        for index in range(len(chosen)):
            limb = build.and_(table.register(4 * multiple, index), mask)
            chosen[index] = build.or_(chosen[index], limb) if multiple else limb
    for index in range(4):
        limbs = chosen[N_LIMBS * index : N_LIMBS * (index + 1)]
        summand.append(Element(build, limbs, point[0].most))
    put_sum(point, point, summand, masks.spread(N_MULTIPLES))


@of_slots
def put_identity(point: Slots) -> None:
    """The neutral point."""
    zero, one = point[0].constant(0), point[0].constant(1)
    point[0], point[1], point[2], point[3] = zero, one, one, zero


@of_slots
def put_one(out: Slots) -> None:
    """The number 1."""
    out[0] = out[0].constant(1)


@of_slots
def start_encoding(point: Slots, product: Slots) -> None:
    """First half of encoding twice a point; multiplies ``product`` by the number to invert."""
    # The double is x = e / f, y = g / h of the four numbers that replace the point.
    x, y, z, t = (point[index] for index in range(4))
    zz = z.square()
    dtt = t.square() * t.constant(D)
    xy = x * y
    e = xy + xy
    f = zz + dtt
    g = y.square() + x.square()
    h = zz - dtt
    point[0], point[1], point[2], point[3] = e, f, g, h
    before = product[0]
    point[4], product[0] = before, before * ((e * g) * (f * h))


@of_slots
def end_encoding(words: Slots, point: Slots, inverse: Slots) -> None:
    """Encode the double by RFC 9496, Section 4.3.2; take the point's factor out of ``inverse``."""
    # For a double, 1 / (e f g h) gives what the RFC takes from an inverse square root. ``inverse``
    # is 1 over the product of all points so far, ``before`` the product without this point.
    e, f, g, h, before = (point[index] for index in range(5))
    eg, fh = e * g, f * h
    point_inverse = inverse[0] * before
    inverse[0] = inverse[0] * (eg * fh)
    z_inverse, t_inverse = eg * point_inverse, fh * point_inverse
    rotate = (eg * z_inverse).is_negative()
    turned = e.constant(SQRT_M1)
    e, g, h = g.where(rotate, e), (-e).where(rotate, g), (f * turned).where(rotate, h)
    magic = turned.where(rotate, e.constant(INVSQRT_A_MINUS_D))
    g = (-g).where((h * e * z_inverse).is_negative(), g)
    s = (h - g) * (magic * (g * t_inverse))
    words.put(0, s.abs().words())


# The scalar multiplication

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
# Slots: work of the formulas (see ``ROOT``), words, which rows are valid, a further point, a
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
def scale_eight(memory: Any, point: Any) -> None:
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


def scale_words(words: Words, masks: Words) -> tuple[Words, Flags]:
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
    n_groups = -(-len(words) // N_LANES)
    all_valid = True
    for group in range(n_groups):
        point = POINTS + POINT_SLOTS * group
        start = N_LANES * group
        if words.shape[1] == NUMBER_WORDS:
            all_valid &= decode(memory, point, words, start, valid)
        else:
            all_valid &= from_uniform(memory, point, words, start, valid)
    if not all_valid:
        return
    put_one(memory, (ROOT + NUMBER,))
    for group in range(n_groups):
        point = POINTS + POINT_SLOTS * group
        scale_eight(memory, point)
        start_encoding(memory, (point, ROOT + NUMBER))
    raise_to(memory, INVERSE_STEPS)
    for group in range(n_groups - 1, -1, -1):
        end_encoding(memory, (WORDS, POINTS + POINT_SLOTS * group, ROOT + NUMBER))
        write_lanes(memory, out, N_LANES * group)
