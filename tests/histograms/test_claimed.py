"""Claimed sums are compared with rows exactly: no division of rows is refused, every other is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedapp.histograms.claimed import carried, disclosed_labels, row_sums, unfit_column, words_of

WIDTHS = np.array([3, 1, 0, 4])  # of the bins of each column
OFFSETS = np.concatenate(([0], np.cumsum(WIDTHS)))


def integers(cells):
    """Words as Python's integers."""
    return cells[..., 0].astype(object) * 2**32 + cells[..., 1].astype(object)


def claimed(codes, numbers, slots, n_nodes):
    """Sums in Python's integers, in words, and missing rows; a code at the width is missing."""
    cells = np.zeros((n_nodes, OFFSETS[-1], numbers.shape[1]), dtype=object)
    missing = np.zeros((n_nodes, len(WIDTHS)), dtype=np.int32)
    for of_row, row, slot in zip(codes, numbers.tolist(), slots, strict=True):
        for column, code in enumerate(of_row if slot >= 0 else ()):
            if code == WIDTHS[column]:
                missing[slot, column] += 1
            else:
                cells[slot, OFFSETS[column] + code] += np.array(row, dtype=object)
    return words_of(cells), missing


@given(
    rows=st.lists(
        st.tuples(
            st.integers(-(2**53), 2**53),
            st.one_of(st.just(0), st.integers(0, 2**53)),
            st.integers(-1, 2),
            st.tuples(*(st.integers(0, int(width)) for width in WIDTHS)),
        ),
        max_size=20,
    )
)
def test_no_division_of_rows_is_refused_and_sums_are_exact(rows):
    numbers = np.array([row[:2] for row in rows], dtype=np.int64).reshape(-1, 2)
    slots = np.array([row[2] for row in rows], dtype=np.int32)
    codes = np.array([row[3] for row in rows], dtype=np.int64).reshape(-1, len(WIDTHS))
    cells, missing = claimed(codes, numbers, slots, 3)
    assert unfit_column(cells, missing, OFFSETS, numbers, slots) is None
    sums = integers(row_sums(numbers, slots, 3))
    assert (
        sums == [np.array(numbers[slots == node], object).sum(axis=0) for node in range(3)]
    ).all()
    derived = carried(cells[:1] - cells[1:2])
    assert (integers(derived) == integers(cells[:1]) - integers(cells[1:2])).all()
    assert ((derived[..., 1] >= 0) & (derived[..., 1] < 2**32)).all()


def test_sums_of_a_million_rows_at_the_limit_are_exact():
    numbers = np.full((10**6, 2), 2**53 - 1)
    numbers[:, 0] *= -1
    (sums,) = integers(row_sums(numbers, np.zeros(10**6, np.int32), 1))
    assert sums.tolist() == [-(10**6) * (2**53 - 1), 10**6 * (2**53 - 1)]


NUMBERS = np.array([[-5, 2], [3, 1], [4, 3], [-1, 1]]) * 2**50
CODES = np.array([[0, 0, 0, 0], [1, 1, 0, 1], [2, 0, 0, 1], [2, 1, 0, 3]])


def add(place, field, number):
    def change(cells, missing):
        cells[0, place, field] += number

    return change


def moved(source, target, field, number):
    def change(cells, missing):
        add(source, field, -number)(cells, missing)
        add(target, field, number)(cells, missing)

    return change


def counted(column, number):
    def change(cells, missing):
        missing[0, column] += number

    return change


@pytest.mark.parametrize(
    ("change", "column"),
    [
        (add(0, 0, 1), 0),  # a bit more than the node
        (add(0, 1, -1), 0),
        (add(6, 1, 1), 3),
        (moved(0, 1, 0, 3 * 2**50), 0),  # more than is negative in all rows
        (moved(0, 1, 1, 2**51 + 1), 0),  # a hessian below 0
        (add(3, 0, 9 * 2**50), 1),  # two missing rows have 2, and can have -6 to 7
        (add(3, 0, -6 * 2**50), 1),
        (add(3, 1, 2**50), 1),  # no two rows have a hessian of 1
        (counted(1, 3), 1),  # more rows than the node has
        (counted(1, -3), 1),
        (counted(1, -2), 1),  # no row, but something is left
        (counted(0, 1), 0),  # a row, of nothing
        (counted(0, -1), 0),  # as by difference to the parent
        (counted(2, 1), 2),  # one more than all
    ],
)
def test_sums_that_no_rows_have_are_found_by_their_column(change, column):
    slots = np.zeros(4, np.int32)
    cells, missing = claimed(CODES, NUMBERS, slots, 1)
    whole = integers(cells)
    assert unfit_column(words_of(whole), missing, OFFSETS, NUMBERS, slots) is None
    change(whole, missing)
    assert unfit_column(words_of(whole), missing, OFFSETS, NUMBERS, slots) == column


@pytest.mark.parametrize(
    ("shape", "n_labels"), [((1,), 4), ((3,), 28), ((6, 4), 12), ((0, 5, 3), 0), ((3, 0, 2), 56)]
)
def test_each_split_tells_as_many_labels_as_its_cuts_have_bits(shape, n_labels):
    assert disclosed_labels(16, *shape) == n_labels
    assert disclosed_labels(31, *shape) == n_labels
