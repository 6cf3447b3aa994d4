"""Formulas for points of ristretto255, eight points at a time.

A point (x, y) of the curve -x^2 + y^2 = 1 + d x^2 y^2 takes four slots, X, Y, Z and T with x = X/Z,
y = Y/Z and x y = T/Z; as a summand Y + X, Y - X, 2 Z and 2 d T. Several points represent one
element of the group, and any of them will do.

There are no branches: a square root is computed whether there is one or not, and masks select.
``fedapp.crypto.lane_scale`` combines the formulas.

Source: RFC 9496, Section 4; Hisil, Wong, Carter and Dawson, Twisted Edwards curves revisited, 2008;
Hamburg, Decaf, 2015, and the double-and-compress of curve25519-dalek.
"""

from __future__ import annotations

from typing import Any

from fedapp.crypto.lane_field import N_LIMBS, Element, P, Slots, of_slots

# RFC 9496, Sections 4.1 and 4.
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
    s, u1, u2, v, w, factor = (work[place] for place in range(6))
    one, build = s.constant(1), s.builder
    was_square, inverse_root = root(one, w, factor, work[ROOT + POWER])
    den_x = inverse_root * u2
    x = ((s + s) * den_x).abs()
    y = u1 * (inverse_root * den_x * v)
    t = x * y
    wrong = [build.not_(was_square), t.is_negative(), y.is_zero(), s.is_negative(), s.is_zero()]
    for place, word in enumerate(s.words()):
        wrong.append(build.icmp_unsigned("!=", word, words.register(0, place)))
    any_wrong = wrong[0]
    for each in wrong[1:]:
        any_wrong = build.or_(any_wrong, each)
    valid.put_bits(0, build.not_(any_wrong))
    point[0], point[1], point[2], point[3] = x, y, one, t


@of_slots
def check_sum(valid: Slots, point: Slots) -> None:
    """Mark points other than the identity."""
    build, x, y = point[0].builder, point[0], point[1]
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
    t, r, u, v, factor = (work[place] for place in range(5))
    one = t.constant(1)
    was_square, s = root(u, v, factor, work[ROOT + POWER])
    s = s.where(was_square, -(s * t).abs())
    c = (-one).where(was_square, r)
    n = c * (r - one) * t.constant((D - 1) ** 2) - v
    w0, w1 = (s + s) * v, n * t.constant(SQRT_AD_MINUS_ONE)
    w2, w3 = one - s.square(), one + s.square()
    point[0], point[1], point[2], point[3] = w0 * w3, w2 * w1, w1 * w3, w0 * w2


def put_double(out: Slots, point: Slots, with_t: bool) -> None:
    """Double a point, whose T is not read; T is computed only ``with_t``.

    Source: Hisil and others, Section 3.3 (2008), all coordinates negated.
    """
    x, y, z = point[0], point[1], point[2]
    a, b, xy, c = x.square(), y.square(), x * y, z.square()
    e, g, h = xy + xy, b - a, a + b
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
    x, y, z, t = (point[place] for place in range(4))
    out[0], out[1], out[2], out[3] = y + x, y - x, z + z, t * t.constant(2 * D)


def put_sum(out: Slots, point: Slots, summand: Any, negated: Any = None) -> None:
    """Add a summand to a point, or subtract it in the lanes where ``negated`` is set.

    Source: Hisil and others, Section 3.1 (2008).
    """
    x, y, z, t = (point[place] for place in range(4))
    plus, minus, double_z, double_dt = (summand[place] for place in range(4))
    if negated is not None:
        plus, minus = plus.swapped(negated, minus)
    a, b, c, d = (y - x) * minus, (y + x) * plus, t * double_dt, z * double_z
    e, f, g, h = b - a, d - c, d + c, b + a
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
        for place in range(len(chosen)):
            limb = build.and_(table.register(4 * multiple, place), mask)
            chosen[place] = build.or_(chosen[place], limb) if multiple else limb
    for place in range(4):
        limbs = chosen[N_LIMBS * place : N_LIMBS * (place + 1)]
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
    x, y, z, t = (point[place] for place in range(4))
    zz, dtt, xy = z.square(), t.square() * t.constant(D), x * y
    e, f, g, h = xy + xy, zz + dtt, y.square() + x.square(), zz - dtt
    point[0], point[1], point[2], point[3] = e, f, g, h
    before = product[0]
    point[4], product[0] = before, before * ((e * g) * (f * h))


@of_slots
def end_encoding(words: Slots, point: Slots, inverse: Slots) -> None:
    """Encode the double by RFC 9496, Section 4.3.2; take the point's factor out of ``inverse``."""
    # For a double, 1 / (e f g h) gives what the RFC takes from an inverse square root. ``inverse``
    # is 1 over the product of all points so far, ``before`` the product without this point.
    e, f, g, h, before = (point[place] for place in range(5))
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
