"""Rows of nodes that are split: which go left, and where that leaves them."""

import numpy as np

from fedapp.trees.predict import move_rows, rows_of, sides_of, slots_of

NODES = np.array([[1, 2, 2, 1, 0, 2], [0, 0, 3, 0, 3, 0]], dtype=np.int32)
VALUES = np.array([[1, 5], [2, np.nan], [3, 5], [np.nan, 6], [5, 7], [6, 8]], dtype=np.float32)
# (tree, node): column, threshold, default, left child; the trees in turn, and no row in the last.
SPLITS = {
    (1, 0): (0, 3.0, 1, 5),
    (0, 2): (1, 6.0, 1, 3),
    (1, 3): (1, 7.0, 0, 7),
    (0, 9): (0, 1.0, 0, 11),
}


def arrays():
    places, cuts = (
        np.array(list(SPLITS), dtype=np.int32).T,
        list(zip(*SPLITS.values(), strict=True)),
    )
    kinds = (np.int64, np.float32, np.uint8, np.int32)
    return (*places, *(np.array(cut, kind) for cut, kind in zip(cuts, kinds, strict=True)))


def test_slots_are_the_places_of_the_splits_in_whatever_order():
    trees, split, *_ = arrays()
    slots, sizes = slots_of(NODES, trees, split)
    assert slots.tolist() == [[-1, 1, 1, -1, -1, 1], [0, 0, 2, 0, 2, 0]]
    assert sizes.tolist() == [4, 3, 2, 0]


def test_rows_are_moved_one_split_at_a_time_or_all_at_once():
    trees, split, columns, thresholds, defaults, lefts = arrays()
    expected = NODES.copy()
    for (tree, node), (column, threshold, default, left) in SPLITS.items():
        for row in rows_of(NODES, tree, node):
            value = VALUES[row, column]
            goes_left = bool(default) if np.isnan(value) else value < threshold
            expected[tree, row] = left if goes_left else left + 1
    slots, sizes = slots_of(NODES, trees, split)
    sides = sides_of(VALUES, columns, thresholds, defaults, slots, sizes)
    found = move_rows(NODES, lefts, slots, np.cumsum(sizes) - sizes, sides)
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, NODES)
