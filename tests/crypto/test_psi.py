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

# RFC 9380, Appendix K.3.
EXPANDED = [
    (b"", "6b9a7312411d92f921c6f68ca0b6380730a1a4d982c507211a90964c394179ba"),
    (b"abc", "0da749f12fbe5483eb066a5f595055679b976e93abe9be6f0f6318bce7aca8dc"),
    (b"abcdef0123456789", "087e45a86e2939ee8b91100af1583c4938e0f5fc6c9db4b107b83346bc967f58"),
    (b"q128_" + 128 * b"q", "7336234ee9983902440f6bc35b348352013becd88938d2afec44311caf8356b3"),
    (b"a512_" + 512 * b"a", "57b5f7e766d5be68a6bfe1768e3c2b7f1228b3e4b3134956dd73a59b954c66f4"),
    (
        b"",
        "41b037d1734a5f8df225dd8c7de38f851efdb45c372887be655212d07251b921"
        "b052b62eaed99b46f72f2ef4cc96bfaf254ebbbec091e1a3b9e4fb5e5b619d2e"
        "0c5414800a1d882b62bb5cd1778f098b8eb6cb399d5d9d18f5d5842cf5d13d7e"
        "b00a7cff859b605da678b318bd0e65ebff70bec88c753b159a805d2c89c55961",
    ),
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
# RFC 9496, Appendix A.2: one of each kind of bytes that encode no point.
NO_POINTS = {
    "not canonical": "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "top bit": "00ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
    "negative": "0100000000000000000000000000000000000000000000000000000000000000",
    "no square": "26948d35ca62e643e26a83177332e6b6afeb9d08e4268b650f1f5bbd8d81d371",
    "negative product": "3eb858e78f5a7254d8c9731174a94f76755fd3941c0ac93735c07ba14579630e",
    "s is -1": "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
}


def hash_to_group(ids):
    """The points that stand for ids."""
    return hash_messages([one.encode() for one in ids], DST)


def as_point(text):
    return np.frombuffer(bytes.fromhex(text), dtype=np.uint8)


def as_set(points):
    return {point.tobytes() for point in points}


@pytest.mark.parametrize(("message", "expected"), EXPANDED)
def test_messages_expand_to_the_bytes_of_the_rfc(message, expected):
    assert expander(EXPAND_DST, len(expected) // 2)(message).hex() == expected


@pytest.mark.parametrize(("message", "expected"), BLINDED)
def test_hash_and_mask_give_the_blinded_elements_of_the_rfc(message, expected):
    points = hash_messages([bytes.fromhex(message)], OPRF_DST)
    assert mask(points, bytes.fromhex(BLIND)).tobytes().hex() == expected


def test_ids_are_hashed_under_the_tag_of_fedapp():
    dst = b"fedapp-psi-v1-ristretto255_XMD:SHA-512_R255MAP_RO_"
    np.testing.assert_array_equal(hash_to_group(["Zoë"]), hash_messages(["Zoë".encode()], dst))


def test_an_id_keeps_its_point_in_any_list():
    points = hash_to_group(["a", "b", "c"])
    assert points.dtype == np.uint8
    assert points.shape == (3, 32)
    np.testing.assert_array_equal(hash_to_group(["c", "a"]), points[[2, 0]])


def test_no_ids_give_no_points():
    nothing = hash_to_group([])
    assert nothing.shape == mask(nothing, draw_scalar()).shape == intersect([nothing]).shape
    assert nothing.shape == (0, 32)


@pytest.mark.parametrize("n_parties", [2, 3])
def test_masks_commute(n_parties):
    points = hash_to_group(["a", "b", "c"])
    scalars = [draw_scalar() for _ in range(n_parties)]
    masked = []
    for order in itertools.permutations(scalars):
        current = points
        for scalar in order:
            current = mask(current, scalar)
        masked.append(current)
    for other in masked[1:]:
        np.testing.assert_array_equal(other, masked[0])


def test_points_keep_their_order_over_several_chunks(monkeypatch):
    points, scalar = hash_to_group([str(number) for number in range(50)]), draw_scalar()
    at_once = mask(points, scalar)
    monkeypatch.setattr(psi, "CHUNK", 7)
    np.testing.assert_array_equal(mask(points, scalar), at_once)


def test_points_that_lie_apart_in_memory_are_masked_alike():
    points, scalar = hash_to_group(["a", "b", "c", "d"]), draw_scalar()
    np.testing.assert_array_equal(mask(points[::2], scalar), mask(points, scalar)[::2])


def test_fresh_scalars_leave_no_point_equal():
    points = hash_to_group([str(number) for number in range(20)])
    first, second = mask(points, draw_scalar()), mask(points, draw_scalar())
    assert len(intersect([points, first])) == 0
    assert len(intersect([points, second])) == 0
    assert len(intersect([first, second])) == 0


def test_scalars_differ_and_are_in_range():
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


def test_common_points_are_sorted_bytewise_whatever_the_sizes():
    points = hash_to_group([str(number) for number in range(300)])
    common = intersect([points[::-1], points[40:45], points[3:200]])
    assert [point.tobytes() for point in common] == sorted(as_set(points[40:45]))


def test_points_that_differ_in_one_byte_only_are_not_common():
    points = np.zeros((3, 32), dtype=np.uint8)
    points[1, 31], points[2, 0] = 1, 1
    assert as_set(intersect([points, points[1:]])) == as_set(points[1:])


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
    with pytest.raises(ValueError, match=r"^ids must be valid Unicode, got a lone surrogate"):
        mask_ids(["fine", "id\ud800"], scalar)
    with pytest.raises(ValueError, match=r"^scalar must be 1 to l - 1, got another number$"):
        mask_ids(ids, bytes(32))


def test_places_lead_from_own_points_to_the_common_ones():
    points = hash_to_group([str(number) for number in range(20)])
    own, common = points[::-1], points[[7, 3, 11]]
    found = places(own, common)
    assert found.dtype == np.int64
    assert found.tolist() == [12, 16, 8]
    np.testing.assert_array_equal(own[found], common)


def test_duplicates_are_refused():
    points = hash_to_group(["a", "b"])
    twice = points[[0, 1, 0, 0]]
    with pytest.raises(ValueError, match=r"^lists\[1\] must have each point once, got 2 repeats$"):
        intersect([points, twice])
    with pytest.raises(ValueError, match=r"^points must have each point once, got 2 repeats$"):
        places(twice, points)


def test_a_common_point_one_does_not_have_is_refused():
    points = hash_to_group(["a", "b", "c", "d"])
    with pytest.raises(ValueError, match=r"^common must be in points, got 2 points that are not$"):
        places(points[:2], points[1:])


def test_an_intersection_of_no_lists_is_refused():
    with pytest.raises(ValueError, match=r"^lists must have one or more, got 0$"):
        intersect([])


@pytest.mark.parametrize("encoding", NO_POINTS.values(), ids=NO_POINTS.keys())
def test_bytes_that_encode_no_point_are_refused(encoding):
    points = np.vstack([hash_to_group(["a"]), as_point(encoding)])
    with pytest.raises(ValueError, match=r"^points must be canonical, got another at 1$"):
        mask(points, draw_scalar())


def test_the_identity_is_refused():
    points = np.vstack([hash_to_group(["a"]), np.zeros(32, dtype=np.uint8)])
    with pytest.raises(ValueError, match=r"^points must not be the identity, got it at 1$"):
        mask(points, draw_scalar())


@pytest.mark.parametrize(
    "points", [np.zeros((2, 31), np.uint8), np.zeros(32, np.uint8), np.zeros((2, 32), np.int8)]
)
def test_points_of_another_form_are_refused(points):
    rule = r"must be uint8 of shape \(n, 32\), got u?int8 \("
    with pytest.raises(ValueError, match=f"^points {rule}"):
        mask(points, draw_scalar())
    with pytest.raises(ValueError, match=rf"^lists\[0\] {rule}"):
        intersect([points])


@pytest.mark.parametrize("number", [0, ORDER, 2**256 - 1])
def test_a_scalar_out_of_range_is_refused(number):
    with pytest.raises(ValueError, match=r"^scalar must be 1 to l - 1, got another number$"):
        mask(hash_to_group(["a"]), number.to_bytes(32, "little"))


def test_a_scalar_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"^scalar must be 32 bytes, got 31$"):
        mask(hash_to_group(["a"]), bytes(31))


def test_an_id_without_utf8_form_is_refused_and_not_shown():
    with pytest.raises(ValueError, match=r"^ids must be valid Unicode, got a lone surrogate"):
        mask_ids(["fine", "id\ud800"], draw_scalar())


@pytest.mark.parametrize("dst", [b"", 256 * b"d"])
def test_a_tag_of_another_length_is_refused(dst):
    with pytest.raises(ValueError, match=rf"^dst must be 1 to 255 bytes, got {len(dst)}$"):
        expander(dst, 64)


@pytest.mark.parametrize("n_bytes", [0, 16321])
def test_an_expansion_to_another_length_is_refused(n_bytes):
    with pytest.raises(ValueError, match=rf"^n_bytes must be 1 to 16320, got {n_bytes}$"):
        expander(b"d", n_bytes)


def test_the_temporary_copy_of_libsodium_is_gone_once_loaded():
    hash_to_group(["a"])
    assert not Path(importlib.import_module("rbcl")._sodium._name).exists()
