"""Points of ristretto255 eight at a time, beside libsodium's and the vectors of RFC 9496."""

import hashlib
import importlib

import numpy as np
import pytest

from fedapp.crypto.lanes import ristretto
from fedapp.crypto.lanes.field import CARRIED, LIMB, P, of_slots
from fedapp.crypto.lanes.registers import supported
from fedapp.crypto.psi import draw_scalar, mask, points_of, scale
from fedapp.crypto.rings import ORDER

needs_lanes = pytest.mark.skipif(not supported(), reason="needs AVX-512 IFMA")
KINDS = [
    pytest.param(True, marks=needs_lanes, id="eight at a time"),
    pytest.param(False, id="one by one"),
]

# Appendix A.1: multiples of the generator, from 1 on.
MULTIPLES = [
    "e2f2ae0a6abc4e71a884a961c500515f58e30b6aa582dd8db6a65945e08d2d76",
    "6a493210f7499cd17fecb510ae0cea23a110e8d5b901f8acadd3095c73a3b919",
    "94741f5d5d52755ece4f23f044ee27d5d1ea1e2bd196b462166b16152a9d0259",
    "da80862773358b466ffadfe0b3293ab3d9fd53c5ea6c955358f568322daf6a57",
    "e882b131016b52c1d3337080187cf768423efccbb517bb495ab812c4160ff44e",
]
# Of appendix A.2: not canonical, negative, no square, a negative product, s = -1.
NO_POINTS = [
    "00ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "ed57ffd8c914fb201471d1c3d245ce3c746fcbe63a3679d51b6a516ebebe0e20",
    "26948d35ca62e643e26a83177332e6b6afeb9d08e4268b650f1f5bbd8d81d371",
    "4eac077a713c57b4f4397629a4145982c661f48044dd3f96427d40b147d9742f",
    "3eb858e78f5a7254d8c9731174a94f76755fd3941c0ac93735c07ba14579630e",
    "a45fdc55c76448c049a1ab33f17023edfb2be3581e9c7aade8a6125215e04220",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]
# Of appendix A.3.
HASHED = {
    "Ristretto is traditionally a short shot of espresso coffee": (
        "3066f82a1a747d45120d1740f14358531a8f04bbffe6a819f86dfe50f44a0a46"
    ),
    "by using a finer grind.": "f8f0c87cf237953c5890aec3998169005dae3eca1fbb04548c635953c817f92a",
    "and is not a Ristretto as some believe.": (
        "80bd07262511cdde4863f8a7434cef696750681cb9510eea557088f76d9e5065"
    ),
}
# Their digits are the least and the largest, alike and mixed; even and odd; halves as well.
SCALARS = [1, 2, 3, 7, 8, 15, 16, 17, 2**128, 2**252 - 1, 2**252]
SCALARS += [ORDER // 2, ORDER // 2 + 1, ORDER - 2, ORDER - 1]


def as_points(texts):
    return np.frombuffer(bytes.fromhex("".join(texts)), dtype=np.uint8).reshape(len(texts), -1)


def as_scalar(number):
    return number.to_bytes(32, "little")


def some_uniform(n, seed=0):
    """The edges of the field, each beside all others, and what is between them."""
    edges = [0, 1, 2, P - 1, P, P + 1, 2**255 - 1, 2**255, 2**256 - 1]
    both = [as_scalar(one) + as_scalar(other) for one in edges for other in edges]
    drawn = np.random.default_rng(seed).bytes(64 * n)
    return np.frombuffer(b"".join(both) + drawn, dtype=np.uint8).reshape(-1, 64)


@pytest.fixture
def use(monkeypatch):
    """Choose between eight at a time and one by one."""
    return lambda lanes: monkeypatch.setattr("fedapp.crypto.psi.has_lanes", lambda: lanes)


@pytest.mark.parametrize("lanes", KINDS)
def test_multiples_of_the_generator_and_hashed_points_are_those_of_the_rfc(lanes, use):
    use(lanes)
    points = as_points(MULTIPLES)
    for number in range(1, 6):
        found = scale(points[:1], as_scalar(number))
        np.testing.assert_array_equal(found, points[number - 1 : number])
    uniform = as_points([hashlib.sha512(text.encode()).hexdigest() for text in HASHED])
    np.testing.assert_array_equal(scale(uniform, as_scalar(1)), as_points([*HASHED.values()]))


@pytest.mark.parametrize("lanes", KINDS)
def test_bytes_that_encode_no_point_are_refused_and_the_first_is_told(lanes, use, monkeypatch):
    use(lanes)
    for encoding in NO_POINTS:
        points = as_points([*MULTIPLES * 3, encoding])
        with pytest.raises(ValueError, match=r"^points must be canonical, got another at 15$"):
            scale(points, draw_scalar())
    for place in (0, 7, 14):
        points = as_points(MULTIPLES * 3).copy()
        points[place, 31] |= 128
        rule = rf"^points must be canonical, got another at {place}$"
        with pytest.raises(ValueError, match=rule):
            mask(points, draw_scalar())
    monkeypatch.setattr("fedapp.crypto.psi.CHUNK", 9)
    points = points_of(some_uniform(60))[-60:]
    points[[20, 50]] = 0
    points[21, 31] |= 128
    with pytest.raises(ValueError, match=r"^points must not be the identity, got it at 20$"):
        scale(points, draw_scalar())
    points[13] = 255
    with pytest.raises(ValueError, match=r"^points must be canonical, got another at 13$"):
        scale(points, draw_scalar())


@pytest.mark.parametrize("lanes", KINDS)
def test_uniform_bytes_of_the_identity_are_refused(lanes, use):
    use(lanes)
    uniform = some_uniform(3)
    is_identity = ~points_of(uniform).any(axis=1)
    rows = np.concatenate([uniform[~is_identity][:11], uniform[is_identity][:1]])
    with pytest.raises(ValueError, match=r"^points must not be the identity, got it at 11$"):
        scale(rows, draw_scalar())


@needs_lanes
@pytest.mark.parametrize("number", [*SCALARS, None])
def test_eight_at_a_time_is_one_by_one(number, use):
    scalar = draw_scalar() if number is None else as_scalar(number)
    uniform = some_uniform(200 if number is None else 3)
    uniform = uniform[points_of(uniform).any(axis=1)]
    points, found = points_of(uniform), []
    for lanes in (True, False):
        use(lanes)
        found.append([scale(uniform, scalar), scale(points, scalar), scale(points[5:6], scalar)])
    for side_by_side, single in zip(*found, strict=True):
        np.testing.assert_array_equal(side_by_side, single)


@needs_lanes
def test_the_same_bytes_are_points_as_to_libsodium():
    """Random bytes, the edges of the field, points, and points with a bit or two turned."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 256, (1000, 32)).astype(np.uint8)
    drawn[:, 31] &= 127
    drawn[::3, 0] &= 254
    small = [value.to_bytes(32, "little") for value in (*range(100), *range(P - 60, 2**255))]
    points = points_of(some_uniform(100))
    turned = points ^ (1 << rng.integers(0, 8, points.shape) * (rng.random(points.shape) < 1 / 32))
    rows = [drawn, np.frombuffer(b"".join(small), np.uint8).reshape(-1, 32), points, turned]
    given = np.concatenate(rows).astype(np.uint8)
    sodium = importlib.import_module("rbcl")
    wanted = [
        bool(row.any() and sodium.crypto_core_ristretto255_is_valid_point(row.tobytes()))
        for row in given
    ]
    masks = ristretto.digit_masks(5)
    assert ristretto.scale_words(given.view(np.uint64), masks)[1].tolist() == wanted
    assert 200 < sum(wanted) < len(wanted) - 200


@pytest.mark.slow
@needs_lanes
@pytest.mark.parametrize("formula", [ristretto.add_multiple, ristretto.double])
def test_what_depends_on_the_scalar_is_compiled_without_branches(formula):
    n_slots = {ristretto.add_multiple: 3, ristretto.double: 2}[formula]
    formula(np.zeros(40 * 120, dtype=np.uint64), tuple(range(0, 40 * n_slots, 40)))
    code = formula.inspect_asm(formula.signatures[0]).split(".Lfunc_end")[0].splitlines()
    instructions = [line.split()[0] for line in code if line[:1] == "\t" and line[1:2] != "."]
    assert sum(each.startswith("vpmadd52") for each in instructions) > 200
    assert not [each for each in instructions if each.startswith(("j", "call", "loop", "vpgather"))]


@of_slots
def _sample(out, left, right):
    """Each operation, on limbs as large as they may be, and on sums that must be carried first."""
    x, y = left[0], right[0]
    many = x + x + y + x + y
    for place, element in enumerate(
        [x * y, x.square(), x + y, x - y, -x, many * (y - x), many.square() - many, x.abs()]
    ):
        out[place] = element
    out.put(8, x.words())
    out.put_bits(9, x.is_zero())
    out.put_bits(10, many.is_negative())
    out[11] = x.where((x - y).is_zero(), y + y)


def _numbers(memory, slot):
    limbs = memory[40 * slot : 40 * slot + 40].reshape(5, 8).astype(object)
    return (limbs.T * [1 << 51 * place for place in range(5)]).sum(axis=1).tolist()


@needs_lanes
def test_operations_on_extreme_limbs_are_those_of_integers():
    rng = np.random.default_rng(0)
    edges = [0, 1, 18, 19, LIMB - 18, LIMB - 17, LIMB - 1, LIMB, LIMB + 1, CARRIED - 1, CARRIED]
    for turn in range(20):
        memory = np.zeros(40 * 16, dtype=np.uint64)
        memory[: 2 * 40] = rng.choice(edges, 80) if turn else CARRIED
        if turn == 1:  # 0, p and 2 p - 1 in other limbs
            memory[:40] = np.repeat([LIMB - 18, LIMB, LIMB, LIMB, LIMB], 8)
        _sample(memory, (2, 0, 1))
        found = [_numbers(memory, slot) for slot in range(2 + 12)]
        for lane in range(8):
            x, y, *given = (numbers[lane] for numbers in found)
            many, least = 3 * x + 2 * y, x % P
            wanted = [x * y, x * x, x + y, x - y, -x, many * (y - x), many**2 - many]
            wanted += [least if least % 2 == 0 else P - least]
            assert [one % P for one in given[:8]] == [one % P for one in wanted]
            words = memory[10 * 40 + lane : 10 * 40 + 32 : 8].tolist()
            assert sum(word << 64 * place for place, word in enumerate(words)) == least
            assert given[9] == (least == 0)
            assert given[10] == many % P % 2
            assert given[11] % P == (x if (x - y) % P == 0 else 2 * y) % P
        assert memory[2 * 40 : 10 * 40].max() <= CARRIED
