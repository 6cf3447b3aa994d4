"""Fixed-point numbers and packed plaintexts: round trips, head-room, refusals."""

from fractions import Fraction

import numpy as np
import pytest
from gmpy2 import mpz
from hypothesis import given
from hypothesis import strategies as st

from fedapp.crypto.packing import FixedPoint, PairLayout, grouped_layouts, readable_rows
from fedapp.crypto.rings import from_bytes_array, to_bytes_array

RNG = np.random.default_rng(0)
UNIT = FixedPoint((0, 0))
FLOATS = st.floats(-1, 1, width=32)


def some_rows(n_rows, n_outputs=1):
    rows = RNG.normal(size=(n_rows, n_outputs, 2)).astype(np.float32)
    rows[..., 1] = np.abs(rows[..., 1])
    return rows


def side_by_side(layout, slots):
    """Slots in one plaintext, as ``pack_sums`` lays them under encryption."""
    return sum(slot << (layout.slot_bits * place) for place, slot in enumerate(slots))


@given(st.lists(st.tuples(FLOATS, st.floats(0, 1, width=32)), min_size=1, max_size=20))
def test_a_value_comes_back_within_half_a_multiple(pairs):
    rows = np.array(pairs, dtype=np.float32).reshape(-1, 1, 2)
    back = UNIT.decode(UNIT.encode(rows).reshape(-1, 2).tolist(), 1)
    assert (np.abs(back - rows) <= 2.0**-54).all()
    exact = np.abs(rows) >= 2.0**-30
    np.testing.assert_array_equal(back[exact], rows[exact])


@given(st.floats(2.0**-100, 2.0**100, width=32), st.integers(24, 62))
def test_the_scale_covers_the_largest_value_and_keeps_it_exact(largest, precision):
    rows = np.array([[[-largest, largest / 4]]], dtype=np.float32)
    scale = FixedPoint.covering(rows, precision)
    back = scale.decode(scale.encode(rows).reshape(1, 2).tolist(), 1)
    np.testing.assert_array_equal(back, rows)
    assert largest < 2.0 ** scale.exponents[0] <= 2 * largest


@given(st.integers(1, 4), st.integers(1, 30), st.sampled_from([512, 1024, 2048]))
def test_slots_come_back_in_their_order(n_outputs, n_sums, key_bits):
    layout = PairLayout(key_bits, 1, n_outputs, precision=30)
    fields = RNG.integers(-(2**30), 2**30, (n_sums, n_outputs, 2), endpoint=True)
    fields[..., 1] = np.abs(fields[..., 1])
    slots, size = layout.pack(fields), layout.n_slots
    plaintexts = [
        side_by_side(layout, slots[first : first + size]) for first in range(0, n_sums, size)
    ]
    assert layout.unpack(plaintexts, n_sums) == fields.reshape(n_sums, -1).tolist()


@given(st.integers(1, 2**24), st.integers(1, 62), st.sampled_from([-1, 1]))
def test_the_largest_sums_of_all_rows_fit_in_every_slot(n_rows, precision, sign):
    layout = PairLayout(2048, n_rows, precision=precision)
    largest = np.array([[[sign << precision, 1 << precision]]])
    slot = layout.pack(largest)[0] * n_rows
    plaintext = side_by_side(layout, [slot] * layout.n_slots)
    assert abs(plaintext) < 2**2046
    limit = n_rows << precision
    assert layout.unpack([plaintext], layout.n_slots) == [[sign * limit, limit]] * layout.n_slots


def test_sums_are_the_exact_sums_rounded_once():
    rows = some_rows(1000)
    scale, layout = FixedPoint.covering(rows), PairLayout(512, 1000)
    total = sum(layout.pack(scale.encode(rows)))
    found = scale.decode(layout.unpack([total], 1), 1)[0, 0]
    for place in range(2):
        unit = Fraction(2) ** (scale.exponents[place] - scale.precision)
        exact = sum(Fraction(float(value)) for value in rows[:, 0, place])
        assert abs(Fraction(float(found[place])) - exact) <= 500 * unit + abs(exact) * 2**-53


def test_a_2048_bit_key_holds_the_sums_of_14_bins_of_20000_rows():
    layout = PairLayout(2048, 20_000)
    assert (layout.field_bits, layout.slot_bits, layout.n_slots) == (69, 138, 14)
    assert layout.n_plaintexts(29) == 3


def test_rows_out_of_range_and_layouts_that_cannot_be_are_refused():
    rows, layout = some_rows(3), PairLayout(512, 3, precision=10)
    assert (FixedPoint.covering(0 * rows).encode(0 * rows) == 0).all()
    for bad in (np.nan, np.inf, -np.inf):
        rows[1, 0, 0] = bad
        for refuse in (FixedPoint.covering, UNIT.encode):
            with pytest.raises(ValueError, match="gradients must be finite, got 1 that are not"):
                refuse(rows)
    for rule, call in (
        (r"at most 2\^0 and 2\^0, got 1 that are not", lambda: UNIT.encode(pair(1.5, 0.5))),
        ("hessians must be >= 0, got 1 that are not", lambda: UNIT.encode(pair(0.5, -0.5))),
        ("precision must be 1 to 62, got 63", lambda: FixedPoint.covering(some_rows(1), 63)),
        (r"fields must be at most 2\^10, got 1 above", lambda: layout.pack(pair(1025, 0, int))),
        (r"shape \(n, 1, 2\), got \(1, 2, 2\)", lambda: layout.pack(np.zeros((1, 2, 2), int))),
        ("key-bits must be > 138 for 1 pairs of 69 bits, got 138", lambda: PairLayout(138, 20_000)),
        ("n_rows must be >= 1, got 0", lambda: PairLayout(2048, 0)),
        ("must be 0 past their last slot", lambda: layout.unpack([1 << layout.slot_bits], 1)),
        ("plaintexts must be 1 in number, got 2", lambda: layout.unpack([0, 0], 1)),
    ):
        with pytest.raises(ValueError, match=rule):
            call()
    assert layout.unpack([], 0) == []


def pair(gradient, hessian, dtype=np.float32):
    return np.array([[[gradient, hessian]]], dtype)


@pytest.mark.parametrize(
    "fields", [[3 * 2**10 + 1, 0], [-3 * 2**10 - 1, 0], [0, 3 * 2**10 + 1], [0, -1]]
)
def test_a_sum_that_the_rows_cannot_have_is_refused(fields):
    layout = PairLayout(512, 3, precision=10)
    plaintext = (fields[0] << layout.field_bits) + fields[1]
    with pytest.raises(ValueError, match="sums must be of at most 3 rows, got one beyond"):
        layout.unpack([plaintext], 1)


@given(st.lists(st.integers(0, 2**64 - 1)), st.integers(8, 20))
def test_integers_come_back_from_bytes(values, width):
    rows = to_bytes_array([mpz(value) for value in values], width)
    assert rows.shape == (len(values), width)
    assert from_bytes_array(rows) == values
    assert to_bytes_array([mpz(258)], 3).tolist() == [[0, 1, 2]]  # big endian, never cut off
    with pytest.raises(OverflowError, match="too big to convert"):
        to_bytes_array([mpz(256)], 1)


@pytest.mark.parametrize(
    ("n_outputs", "max_depth", "n_rows"), [(1, 1, 128), (1, 6, 4096), (20, 2, 2 * 10 * 2560)]
)
def test_rows_that_a_round_can_show_are_the_bits_of_its_nodes_slots(n_outputs, max_depth, n_rows):
    layouts = grouped_layouts(2048, 1000, n_outputs)
    # Of 20 outputs each of two ciphertexts has 10, a slot of 1,280 bits.
    assert readable_rows(layouts, max_depth) == n_rows
