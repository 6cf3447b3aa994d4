"""Points of ids, their masks and intersections: beside vectors of RFCs, libsodium and sets."""

import hashlib
import importlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.crypto import psi
from fedapp.crypto.lanes import has_lanes, ristretto
from fedapp.crypto.lanes.field import CARRIED, LIMB, P, of_slots
from fedapp.crypto.psi import (
    DST,
    ORDER,
    draw_scalar,
    expander,
    intersect,
    mask,
    mask_ids,
    places,
    points_of,
    scale_parts,
)
from tests.letters import hash_messages

EXPAND_DST = b"QUUX-V01-CS02-with-expander-SHA512-256"
OPRF_DST = b"HashToGroup-OPRFV1-\x00-ristretto255-SHA512"

# Of RFC 9380, Appendix K.3.
EXPANDED = [
    (b"", "6b9a7312411d92f921c6f68ca0b6380730a1a4d982c507211a90964c394179ba"),
    (b"abc", "0da749f12fbe5483eb066a5f595055679b976e93abe9be6f0f6318bce7aca8dc"),
    (b"abcdef0123456789", "087e45a86e2939ee8b91100af1583c4938e0f5fc6c9db4b107b83346bc967f58"),
    (b"q128_" + 128 * b"q", "7336234ee9983902440f6bc35b348352013becd88938d2afec44311caf8356b3"),
    (b"a512_" + 512 * b"a", "57b5f7e766d5be68a6bfe1768e3c2b7f1228b3e4b3134956dd73a59b954c66f4"),
    (
        b"abc",
        "7f1dddd13c08b543f2e2037b14cefb255b44c83cc397c1786d975653e36a6b11"
        "bdd7732d8b38adb4a0edc26a0cef4bb45217135456e58fbca1703cd6032cb134"
        "7ee720b87972d63fbf232587043ed2901bce7f22610c0419751c065922b48843"
        "1851041310ad659e4b23520e1772ab29dcdeb2002222a363f0c2b1c972b3efe1",
    ),
]
# RFC 9497, Appendix A.1.1: the blind and the blinded element of an input.
BLIND = "64d37aed22a27f5191de1c1d69fadb899d8862b58eb4220029e036ec4c1f6706"
BLINDED = [
    ("00", "609a0ae68c15a3cf6903766461307e5c8bb2f95e7e6550e1ffa2dc99e412803c"),
    (17 * "5a", "da27ef466870f5f15296299850aa088629945a17d1f5b7f5ff043f76b3c06418"),
]


def scale(points, scalar):
    """Multiply encoded points, or uniform bytes that are mapped first."""
    return scale_parts(lambda part: points[part], len(points), scalar)


def hash_to_group(ids):
    """The points that stand for ids."""
    return hash_messages([one.encode() for one in ids], DST)


def as_set(points):
    return {point.tobytes() for point in points}


def test_ids_become_points_as_the_rfcs_have_it():
    for message, expected in EXPANDED:
        assert expander(EXPAND_DST, len(expected) // 2)(message).hex() == expected
    for message, expected in BLINDED:
        points = hash_messages([bytes.fromhex(message)], OPRF_DST)
        assert mask(points, bytes.fromhex(BLIND)).tobytes().hex() == expected
    dst = b"fedapp-psi-v1-ristretto255_XMD:SHA-512_R255MAP_RO_"
    np.testing.assert_array_equal(hash_to_group(["Zoë"]), hash_messages(["Zoë".encode()], dst))


def test_an_id_keeps_its_point_in_any_list_and_no_ids_give_none():
    points = hash_to_group(["a", "b", "c"])
    assert (points.dtype, points.shape) == (np.uint8, (3, 32))
    np.testing.assert_array_equal(hash_to_group(["c", "a"]), points[[2, 0]])
    nothing = hash_to_group([])
    for none in (nothing, mask(nothing, draw_scalar()), intersect([nothing])):
        assert none.shape == (0, 32)


def test_points_keep_their_order_over_chunks_and_wherever_they_are_in_memory(monkeypatch):
    points, scalar = hash_to_group([str(number) for number in range(50)]), draw_scalar()
    at_once = mask(points, scalar)
    np.testing.assert_array_equal(mask(points[::2], scalar), at_once[::2])
    monkeypatch.setattr(psi, "CHUNK", 7)
    np.testing.assert_array_equal(mask(points, scalar), at_once)


def test_fresh_scalars_are_in_range_and_leave_no_point_equal():
    points = hash_to_group([str(number) for number in range(20)])
    first, second = mask(points, draw_scalar()), mask(points, draw_scalar())
    for lists in ([points, first], [points, second], [first, second]):
        assert len(intersect(lists)) == 0
    scalars = {draw_scalar() for _ in range(100)}
    assert len(scalars) == 100
    assert all(0 < int.from_bytes(scalar, "little") < ORDER for scalar in scalars)


IDS = st.sets(st.text("ab0\x00é", max_size=3), max_size=8)


@given(st.lists(IDS, min_size=1, max_size=3))
@settings(deadline=None, max_examples=40)
def test_intersection_equals_that_of_sets(parties):
    scalars = [draw_scalar() for _ in parties]
    lists = []
    for ids in parties:
        points = hash_to_group(sorted(ids))
        for scalar in scalars:
            points = mask(points, scalar)
        lists.append(points)
    common = intersect(lists)
    for ids, points in zip(parties, lists, strict=True):
        found = np.array(sorted(ids), dtype=object)[places(points, common)]
        assert set(found) == set.intersection(*parties)
        assert len(found) == len(set(found))


def test_common_points_are_sorted_bytewise_and_equal_in_every_byte():
    points = hash_to_group([str(number) for number in range(300)])
    common = intersect([points[::-1], points[40:45], points[3:200]])
    assert [point.tobytes() for point in common] == sorted(as_set(points[40:45]))
    found = places(points[::-1], points[[7, 3, 11]])
    assert (found.dtype, found.tolist()) == (np.int64, [292, 296, 288])
    differ = np.zeros((3, 32), dtype=np.uint8)
    differ[1, 31], differ[2, 0] = 1, 1
    assert as_set(intersect([differ, differ[1:]])) == as_set(differ[1:])


def test_points_that_share_their_first_bytes_are_told_apart():
    rng = np.random.default_rng(0)
    points = np.repeat(rng.integers(0, 256, (5, 32)).astype(np.uint8), 40, axis=0)
    points[:, 8:] = np.unique(rng.integers(0, 3, (300, 24)).astype(np.uint8), axis=0)[:200]
    own, other = rng.permutation(points)[:150], rng.permutation(points)[:120]
    common = intersect([own, other])
    assert [point.tobytes() for point in common] == sorted(as_set(own) & as_set(other))
    np.testing.assert_array_equal(own[places(own, common)], common)
    with pytest.raises(ValueError, match=r"^common must be in points, got \d+ points"):
        places(own, other)


def test_ids_are_masked_as_their_points_are():
    ids, scalar = [f"person-{number}" for number in range(30)], draw_scalar()
    np.testing.assert_array_equal(mask_ids(ids, scalar), mask(hash_to_group(ids), scalar))
    # The temporary copy of libsodium is gone once it is loaded.
    assert not Path(importlib.import_module("rbcl")._sodium._name).exists()


def test_what_is_no_list_scalar_id_or_tag_is_refused():
    points = hash_to_group(["a", "b", "c", "d"])
    twice, one = points[[0, 1, 0, 0]], bytes([1]) + bytes(31)
    numbers = [number.to_bytes(32, "little") for number in (0, ORDER, 2**256 - 1)]
    form = r"must be uint8 of shape \(n, 32\), got u?int8"
    out_of_range = "scalar must be 1 to l - 1, got another number"
    for rule, call, *arguments in (
        (r"lists\[1\] must have each point once, got 2 repeats", intersect, [points, twice]),
        ("points must have each point once, got 2 repeats", places, twice, points),
        ("common must be in points, got 2 points that are not", places, points[:2], points[1:]),
        *((out_of_range, mask, points, number) for number in numbers),
        (out_of_range, mask_ids, ["a"], numbers[0]),
        ("scalar must be 32 bytes, got 31", mask, points, bytes(31)),
        # And the id is not shown.
        ("ids must be valid Unicode, got a lone surrogate in one", mask_ids, ["\ud800"], one),
        (rf"points {form} \(2, 31\)", mask, np.zeros((2, 31), np.uint8), one),
        (rf"lists\[0\] {form} \(2, 32\)", intersect, [np.zeros((2, 32), np.int8)]),
    ):
        with pytest.raises(ValueError, match=f"^{rule}$"):
            call(*arguments)


# Points of ristretto255 eight at a time: vectors of RFC 9496

needs_lanes = pytest.mark.skipif(not has_lanes(), reason="needs AVX-512 IFMA")
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
