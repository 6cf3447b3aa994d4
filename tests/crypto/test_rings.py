"""Arithmetic of many big integers at once, beside gmpy2's, whichever way the processor has."""

from contextlib import closing

import numpy as np
import pytest
from gmpy2 import mpz, powmod
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedapp.crypto import lanes, paillier
from fedapp.crypto.lanes import has_lanes
from fedapp.crypto.lanes.ring import LaneRing
from fedapp.crypto.packing import FixedPoint, Layout
from fedapp.crypto.paillier import decrypt, encrypt, share_out
from fedapp.crypto.paillier_keys import PrivateKey, generate_key
from fedapp.crypto.rings import Ring, products_by_place
from fedapp.crypto.sums import pack_sums, sum_rows
from fedapp.crypto.workers import Workers
from tests.crypto.test_paillier import sums_read

needs_lanes = pytest.mark.skipif(not has_lanes(), reason="needs AVX-512 IFMA")
KINDS = [Ring, pytest.param(LaneRing, marks=needs_lanes)]
# One limb to many; just below and above a power of two, where quotients and carries are extreme.
MODULI = [
    mpz(3),
    mpz(2**48 - 59),
    mpz(2**52 - 47),
    mpz(2**52 + 21),
    mpz(2**104 - 1),
    mpz(2**255 - 19),
    mpz(2**330 + 9),  # a word of 64 bits ends in its last limb
    mpz(2**1024 - 105),
    mpz(2**1024 + 643),
    mpz(2**4096 - 2549),
]


def some_numbers(modulus, n, seed=0):
    """The edges and what is between them."""
    rng = np.random.default_rng(seed)
    width = (modulus.bit_length() + 7) // 8 + 1
    drawn = [mpz(int.from_bytes(rng.bytes(width), "big")) % modulus for _ in range(n)]
    half = mpz(1) << (modulus.bit_length() - 1)
    return [mpz(0), mpz(1), modulus - 1, half % modulus, (half - 1) % modulus, *drawn]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("modulus", MODULI)
def test_products_sums_and_powers_are_those_of_gmpy2(kind, modulus):
    own, left = kind(modulus), some_numbers(modulus, 8)
    pairs = [(one, other) for one in left for other in left]
    first, second = (own.take(list(side)) for side in zip(*pairs, strict=True))
    assert own.numbers(first) == [one for one, _ in pairs]
    products = own.multiply(first, second)
    assert own.numbers(products) == [one * other % modulus for one, other in pairs]
    sums = own.add(first, second)
    assert own.numbers(sums) == [(one + other) % modulus for one, other in pairs]
    both = own.multiply(sums, own.add(second, products))  # factors as large as they may be
    assert own.numbers(both) == [(a + b) * (b + a * b) % modulus for a, b in pairs]
    residues = own.take(left)
    for exponent in (0, 1, 2, 15, 16, 2**70 - 1, 2**70 + 12345):
        wanted = [powmod(one, exponent, modulus) for one in left]
        assert own.numbers(own.power(residues, exponent)) == wanted
    assert own.numbers(own.squares(residues, 0)) == left
    assert own.numbers(own.squares(residues, 9)) == [powmod(one, 2**9, modulus) for one in left]


@needs_lanes
@settings(deadline=None, max_examples=50)
@given(
    modulus=st.integers(1, 2**600).map(lambda half: mpz(2 * half + 1)),
    numbers=st.lists(st.tuples(st.integers(0, 2**601), st.integers(0, 2**601)), max_size=20),
)
@example(modulus=mpz(2**600 + 1), numbers=[(2**600, 2**600)] * 9)
def test_side_by_side_is_one_by_one(modulus, numbers):
    plain, lanes = Ring(modulus), LaneRing(modulus)
    pairs = [(mpz(one) % modulus, mpz(other) % modulus) for one, other in numbers]
    left, right = [one for one, _ in pairs], [other for _, other in pairs]
    found = [own.multiply(own.take(left), own.take(right)) for own in (plain, lanes)]
    assert lanes.numbers(found[1]) == plain.numbers(found[0])
    width = 80
    np.testing.assert_array_equal(lanes.write(found[1], width), plain.write(found[0], width))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_chosen_and_a_single_one_stands_for_all(kind):
    modulus, left = MODULI[5], some_numbers(MODULI[5], 20)
    own = kind(modulus)
    residues, rows = own.take(left), np.array([3, 0, 3, 24, 7, 7, 7, 1, 2, 9, 11])
    chosen = own.multiply(residues, residues, rows, rows[::-1].copy())
    wanted = [left[a] * left[b] % modulus for a, b in zip(rows, rows[::-1], strict=True)]
    assert own.numbers(chosen) == wanted
    for product in (own.multiply(residues, residues[4:5]), own.multiply(residues[4:5], residues)):
        assert own.numbers(product) == [one * left[4] % modulus for one in left]
    assert own.numbers(residues) == left  # factors stay as they were
    assert own.numbers(own.multiply(residues[:0], residues[:0])) == []
    assert own.numbers(own.multiply(own.ones(3), residues[:3])) == left[:3]


@pytest.mark.parametrize("kind", KINDS)
def test_entries_of_tables_are_multiplied(kind):
    own, rng = kind(MODULI[6]), np.random.default_rng(0)
    entries = some_numbers(own.modulus, 3 * 256 - 5)
    residues = own.take(entries)
    tables = residues.reshape(3, 256, *residues.shape[1:])
    digits = rng.integers(0, 256, (11, 3)).astype(np.uint8)
    digits[0], digits[1] = 0, 255
    wanted = [
        entries[a] * entries[256 + b] * entries[512 + c] % own.modulus
        for a, b, c in digits.tolist()
    ]
    assert own.numbers(own.table_products(tables, digits)) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_an_integer_is_lifted_into_a_larger_ring(kind):
    small, large = kind(MODULI[4]), kind(MODULI[7])
    values = some_numbers(small.modulus, 10)
    residues = small.take(values)
    nothing = small.add(residues, small.multiply(residues, small.take([small.modulus - 1])))
    assert large.numbers(large.lift(nothing, small)) == [0] * len(values)
    lifted = large.lift(small.multiply(residues, small.ones(1)), small)
    assert large.numbers(large.multiply(lifted, large.take([mpz(10)]))) == [
        10 * value for value in values
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 200])
def test_products_by_place_are_those_of_a_loop(kind, n):
    own, rng = kind(MODULI[5]), np.random.default_rng(n)
    values = [mpz(int(one)) for one in rng.integers(1, 2**62, 50)]
    places, rows = rng.integers(0, 7, n) * 3, rng.integers(0, 50, n)
    wanted = {}
    for place, row in zip(places.tolist(), rows, strict=True):
        wanted[place] = wanted.get(place, 1) * values[row] % own.modulus
    found, products = products_by_place(own, own.take(values), places, rows)
    assert dict(zip(found.tolist(), own.numbers(products), strict=True)) == wanted
    assert found.tolist() == sorted(wanted)


@needs_lanes
def test_what_is_of_another_size_is_refused():
    own, other = LaneRing(MODULI[5]), LaneRing(MODULI[6])
    residues, none = own.ones(3), np.zeros((4, 1), np.uint8)
    wide = np.zeros((1, 40), np.uint8)
    wide[0, 0] = 1

    def chosen(row):
        return own.multiply(residues, residues, np.array([0, row, 0]))

    for rule, call in (
        ("modulus must be odd, >= 3", lambda: LaneRing(mpz(4))),
        ("modulus must be odd, >= 3", lambda: LaneRing(mpz(2) ** 53_300 + 1)),
        (r"residues must be uint64 of .* \(n, 5\)", lambda: own.multiply(residues, other.ones(3))),
        ("residues must be .* got int64", lambda: own.power(residues.astype(np.int64), 3)),
        ("factors must be as many on both sides", lambda: own.multiply(residues, own.ones(2))),
        ("rows must be 0 to 2, got others", lambda: chosen(-1)),
        ("rows must be 0 to 2, got others", lambda: chosen(3)),
        ("tables must fit", lambda: own.table_products(np.tile(residues, (1, 2, 1)), none)),
        ("width must be >= 32 bytes, got 31", lambda: own.write(residues, 31)),
        (r"integers must be below 2\^260, got a larger", lambda: own.read(wide)),
        ("integers must be of at most", lambda: own.read(np.zeros((1, 400), np.uint8))),
    ):
        with pytest.raises(ValueError, match=rule):
            call()


def test_shares_are_whole_registers_and_of_a_size_that_memory_holds():
    for n_rows in (0, 1, 7, 8, 9, 1000, 40_000):
        shares = share_out(n_rows, Workers(2))
        rows = [row for share in shares for row in range(*share)]
        assert rows == list(range(n_rows))
        assert all(0 < last - first <= 4096 + 8 for first, last in shares)
        assert not lanes.has_lanes() or all(first % 8 == 0 for first, _ in shares)


@pytest.fixture
def made(monkeypatch):
    """A key that no tables are kept for."""
    monkeypatch.setattr(paillier, "_owner_masks", paillier.OwnerMasks)
    monkeypatch.setattr(paillier, "_public_masks", paillier.PublicMasks)
    return generate_key(256, insecure_small_key=True)


@needs_lanes
@pytest.mark.parametrize("full_masks", [True, False])
def test_either_ring_reads_and_sums_what_the_other_encrypts(made, full_masks, monkeypatch):
    key = PrivateKey(made.p, made.q, full_masks)
    rng, here = np.random.default_rng(0), Workers(1)
    rows = rng.normal(size=(300, 1, 2)).astype(np.float32) ** 2
    scale, layout = FixedPoint.covering(rows), Layout(256, len(rows))
    codes, offsets = rng.integers(0, 4, (300, 2)).astype(np.uint8), np.array([0, 4, 8])
    nodes = rng.integers(-1, 2, 300).astype(np.int32)
    found = []
    for here_has in (True, False):
        monkeypatch.setattr(lanes, "has_lanes", lambda has=here_has: has)
        monkeypatch.setattr(paillier, "has_lanes", lambda has=here_has: has)
        encrypted = encrypt(key, layout.pack(scale.encode(rows)), here)
        monkeypatch.setattr(lanes, "has_lanes", lambda has=here_has: not has)
        monkeypatch.setattr(paillier, "has_lanes", lambda has=here_has: not has)
        assert decrypt(key, encrypted, here) == layout.pack(scale.encode(rows))
        sums = sum_rows(key.public, encrypted, codes, offsets, nodes, 2, here)
        packed = pack_sums(key.public, sums, layout, here)
        found.append(sums_read(key, packed, layout, scale, 16, here))
    np.testing.assert_array_equal(*found)


@needs_lanes
def test_threads_that_draw_masks_at_once_get_masks_of_their_own():
    key = generate_key(256, insecure_small_key=True)
    source = paillier.PublicMasks(key.public)
    with closing(Workers(4)) as workers:
        drawn = workers.run_here(source.draw, [(7,)] * 20)
    own = lanes.ring_of(key.public.n_squared)
    values = [value for part in drawn for value in own.numbers(part)]
    assert len(set(values)) == 140
    zeros = own.write(np.concatenate(drawn), key.public.ciphertext_bytes)
    assert decrypt(key, zeros, Workers(1)) == [0] * 140
