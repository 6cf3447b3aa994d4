"""Points of ids, their masks and intersections: beside vectors of RFCs, and sets."""

import importlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.crypto import psi
from fedapp.crypto.psi import (
    ORDER,
    check_list,
    draw_scalar,
    expander,
    mask,
    mask_ids,
    mask_messages,
    match,
)

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


def as_points(texts):
    return np.frombuffer(bytes.fromhex("".join(texts)), dtype=np.uint8).reshape(len(texts), -1)


def as_scalar(number):
    return number.to_bytes(32, "little")


def hash_to_group(ids):
    """The points that stand for ids."""
    return mask_ids(ids, as_scalar(1))


def as_set(points):
    return {point.tobytes() for point in points}


def test_ids_become_points_as_the_rfcs_have_it():
    for message, expected in EXPANDED:
        assert expander(EXPAND_DST, len(expected) // 2)(message).hex() == expected
    for message, expected in BLINDED:
        points = mask_messages([bytes.fromhex(message)], bytes.fromhex(BLIND), OPRF_DST)
        assert points.tobytes().hex() == expected
    dst, scalar = b"fedapp-psi-v1-ristretto255_XMD:SHA-512_R255MAP_RO_", draw_scalar()
    points = mask_messages(["Zoë".encode()], scalar, dst)
    np.testing.assert_array_equal(mask_ids(["Zoë"], scalar), points)


def test_an_id_keeps_its_point_in_any_list_and_no_ids_give_none():
    points = hash_to_group(["a", "b", "c"])
    assert (points.dtype, points.shape) == (np.uint8, (3, 32))
    np.testing.assert_array_equal(hash_to_group(["c", "a"]), points[[2, 0]])
    nothing = hash_to_group([])
    for none in (nothing, mask(nothing, draw_scalar())):
        assert none.shape == (0, 32)
    check_list(nothing)
    assert [rows.tolist() for rows in match(points, nothing)] == [[], []]


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
        assert len(match(*lists)[0]) == 0
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
    for ids, points in zip(parties, lists, strict=True):
        check_list(points)
        first, found = (
            np.array(sorted(own), dtype=object)[rows].tolist()
            for own, rows in zip((parties[0], ids), match(lists[0], points), strict=True)
        )
        assert first == found
        assert sorted(found) == sorted(parties[0] & ids)


def test_points_that_share_their_bytes_but_one_or_their_first_are_told_apart():
    differ = np.zeros((3, 32), dtype=np.uint8)
    differ[1, 31], differ[2, 0] = 1, 1
    assert [rows.tolist() for rows in match(differ, differ[:0:-1])] == [[1, 2], [1, 0]]
    rng = np.random.default_rng(0)
    points = np.repeat(rng.integers(0, 256, (5, 32)).astype(np.uint8), 40, axis=0)
    points[:, 8:] = np.unique(rng.integers(0, 3, (300, 24)).astype(np.uint8), axis=0)[:200]
    own, other = rng.permutation(points)[:150], rng.permutation(points)[:120]
    rows, other_rows = match(own, other)
    assert as_set(own[rows]) == as_set(own) & as_set(other)
    np.testing.assert_array_equal(own[rows], other[other_rows])


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
        ("points must have each point once, got 2 repeats", check_list, twice),
        *((out_of_range, mask, points, number) for number in numbers),
        (out_of_range, mask_ids, ["a"], numbers[0]),
        ("scalar must be 32 bytes, got 31", mask, points, bytes(31)),
        # And the id is not shown.
        ("ids must be valid Unicode, got a lone surrogate in one", mask_ids, ["\ud800"], one),
        (rf"points {form} \(2, 31\)", mask, np.zeros((2, 31), np.uint8), one),
        (rf"points {form} \(2, 32\)", check_list, np.zeros((2, 32), np.int8)),
    ):
        with pytest.raises(ValueError, match=f"^{rule}$"):
            call(*arguments)


# Points of ristretto255: vectors of RFC 9496

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


def test_multiples_of_the_generator_are_those_of_the_rfc():
    points = as_points(MULTIPLES)
    for number in range(1, 6):
        found = mask(points[:1], as_scalar(number))
        np.testing.assert_array_equal(found, points[number - 1 : number])


def test_bytes_that_encode_no_point_are_refused_and_the_first_is_told(monkeypatch):
    for encoding in NO_POINTS:
        points = as_points([*MULTIPLES * 3, encoding])
        with pytest.raises(ValueError, match=r"^points must be canonical, got another at 15$"):
            mask(points, draw_scalar())
    for place in (0, 7, 14):
        points = as_points(MULTIPLES * 3).copy()
        points[place, 31] |= 128
        rule = rf"^points must be canonical, got another at {place}$"
        with pytest.raises(ValueError, match=rule):
            mask(points, draw_scalar())
    monkeypatch.setattr("fedapp.crypto.psi.CHUNK", 9)
    points = as_points(MULTIPLES * 12).copy()
    points[[20, 50]] = 0
    points[21, 31] |= 128
    with pytest.raises(ValueError, match=r"^points must not be the identity, got it at 20$"):
        mask(points, draw_scalar())
    points[13] = 255
    with pytest.raises(ValueError, match=r"^points must be canonical, got another at 13$"):
        mask(points, draw_scalar())
