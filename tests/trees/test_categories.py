"""Dictionaries of categories: made, joined, and put in place of one another."""

import numpy as np
import pytest

from fedapp.errors import DataError
from fedapp.trees.categories import chosen, joint_categories, recoded, side_by_side

NAN = np.nan


@pytest.mark.parametrize(
    ("values", "own", "joint", "due", "unseen"),
    [
        (
            [[0, 5], [1, 6], [NAN, 7], [2, NAN]],
            (("a", "b", "d"), None),
            (("b", "c", "d"), None),
            [[NAN, 5], [0, 6], [NAN, 7], [2, NAN]],
            [1, 0],
        ),
        ([[0], [1]], (("a", "b"),), (("a", "b"),), [[0], [1]], [0]),
        ([[NAN, NAN]], (None, ("a",)), (("a", "b"), None), [[NAN, NAN]], [0, 0]),
    ],
    ids=["others", "equal", "without values"],
)
def test_codes_follow_their_names_into_another_dictionary(values, own, joint, due, unseen):
    values = np.array(values, np.float32)
    before = values.copy()
    found, n_unseen = recoded(values, own, joint)
    assert found.dtype == np.float32
    assert (found is values) == (own == joint)
    np.testing.assert_array_equal(found, due)
    np.testing.assert_array_equal(values, before)
    assert n_unseen.tolist() == unseen


@pytest.mark.parametrize(
    ("own", "joint", "told"),
    [
        ((), (("a", "b"),), "feature column 'x' must be categories, .* got numbers"),
        ((("a", "b"),), (), "feature column 'x' must be numbers, .* got text"),
    ],
)
def test_numbers_are_no_categories(own, joint, told):
    with pytest.raises(DataError, match=told) as found:
        recoded(np.ones((2, 1), np.float32), own, joint, ("x",))
    assert "'x'" not in found.value.outside


def test_dictionaries_are_joined_chosen_and_put_side_by_side():
    found = joint_categories([(("b", "z"), None), (), (("10", "9", "a"), None)])
    assert found == (("10", "9", "a", "b", "z"), None)  # sorted by text
    assert joint_categories([(), ()]) == joint_categories([(None,)]) == ()
    categories = (None, ("a",), ("b",))
    assert chosen(categories, [2, 0]) == (("b",), None)
    assert chosen(categories, [0]) == ()
    assert side_by_side([((), 2), ((("a",),), 1)]) == (None, None, ("a",))
    assert side_by_side([((), 2), ((), 1)]) == ()
