"""Dictionaries of categories: made, joined, and put in place of one another."""

import numpy as np
import pytest

from fedapp.errors import DataError
from fedapp.trees.categories import chosen, joint_categories, recoded, side_by_side

NAN = np.nan


def test_codes_follow_their_names_into_another_dictionary():
    values = np.array([[0, 5], [1, 6], [NAN, 7], [2, NAN]], np.float32)
    own, joint = (("a", "b", "d"), None), (("b", "c", "d"), None)
    found, unseen = recoded(values, own, joint)
    assert np.array_equal(found, [[NAN, 5], [0, 6], [NAN, 7], [2, NAN]], equal_nan=True)
    assert found.dtype == np.float32
    assert unseen.tolist() == [1, 0]
    assert values[0].tolist() == [0, 5]


def test_equal_dictionaries_leave_the_values_as_they_are():
    values = np.array([[0.0], [1.0]], np.float32)
    found, unseen = recoded(values, (("a", "b"),), (("a", "b"),))
    assert found is values
    assert unseen.tolist() == [0]


def test_a_column_without_values_fits_categories_and_numbers():
    values = np.full((2, 2), NAN, np.float32)
    found, unseen = recoded(values, (None, ("a",)), (("a", "b"), None))
    assert np.isnan(found).all()
    assert unseen.tolist() == [0, 0]


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


def test_the_joint_dictionary_is_the_union_sorted_by_text():
    found = joint_categories([(("b", "z"), None), (), (("10", "9", "a"), None)])
    assert found == (("10", "9", "a", "b", "z"), None)


def test_tables_of_numbers_have_no_joint_dictionary():
    assert joint_categories([(), ()]) == ()
    assert joint_categories([(None,)]) == ()


def test_columns_keep_their_dictionaries_when_chosen_and_joined():
    categories = (None, ("a",), ("b",))
    assert chosen(categories, [2, 0]) == (("b",), None)
    assert chosen(categories, [0]) == ()
    assert side_by_side([((), 2), ((("a",),), 1)]) == (None, None, ("a",))
    assert side_by_side([((), 2), ((), 1)]) == ()
