"""Points of ids, their masks and intersections, against the vectors of RFCs and against sets."""

import importlib
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.crypto import psi
from fedapp.crypto.psi import (
    DST,
    ORDER,
    draw_scalar,
    expander,
    hash_messages,
    intersect,
    mask,
    mask_ids,
    places,
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


def test_masks_commute():
    points = hash_to_group(["a", "b", "c"])
    scalars = [draw_scalar() for _ in range(3)]
    masked = []
    for order in itertools.permutations(scalars):
        current = points
        for scalar in order:
            current = mask(current, scalar)
        masked.append(current)
    for other in masked[1:]:
        np.testing.assert_array_equal(other, masked[0])


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
        ("lists must have one or more, got 0", intersect, []),
        *((out_of_range, mask, points, number) for number in numbers),
        (out_of_range, mask_ids, ["a"], numbers[0]),
        ("scalar must be 32 bytes, got 31", mask, points, bytes(31)),
        # And the id is not shown.
        ("ids must be valid Unicode, got a lone surrogate in one", mask_ids, ["\ud800"], one),
        ("dst must be 1 to 255 bytes, got 0", expander, b"", 64),
        ("dst must be 1 to 255 bytes, got 256", expander, 256 * b"d", 64),
        ("n_bytes must be 1 to 16320, got 0", expander, b"d", 0),
        ("n_bytes must be 1 to 16320, got 16321", expander, b"d", 16321),
        (rf"points {form} \(2, 31\)", mask, np.zeros((2, 31), np.uint8), one),
        (rf"lists\[0\] {form} \(2, 32\)", intersect, [np.zeros((2, 32), np.int8)]),
    ):
        with pytest.raises(ValueError, match=f"^{rule}$"):
            call(*arguments)
