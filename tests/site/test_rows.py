"""Hashes by which a site recognises rows wherever their file is."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from fedapp.data.table import Table
from fedapp.site.rows import compare, hash_rows

N_ROWS = 30


def table(n_rows=N_ROWS):
    """Rows with a number, a category, missing values, label, weight, margin and id."""
    rng = np.random.default_rng(5)
    values = rng.normal(size=(n_rows, 2)).astype(np.float32)
    values[:, 1] = rng.integers(0, 3, n_rows)
    values[::7] = np.nan
    return Table(
        ("age", "town"),
        values,
        labels=rng.integers(0, 2, n_rows).astype(np.float64),
        weights=rng.random(n_rows).astype(np.float32),
        ids=np.array([f"customer {row}" for row in range(n_rows)]),
        categories=(None, ("bonn", "oslo", "rome")),
        base_margins=rng.normal(size=n_rows).astype(np.float32),
    )


def hashed(rows, key=b"key"):
    return hash_rows(rows, key)


def by_content(first, second):
    """Rows that two tables share, and rows that only one has, by what is in them."""
    return compare(hashed(first), hashed(second), with_ids=False)


def recoded(rows):
    """The same rows after a town has come first in the alphabet: all codes are others."""
    values = rows.values + np.array([0, 1], np.float32)
    return replace(rows, values=values, categories=(None, ("athens", "bonn", "oslo", "rome")))


def of_texts(rows):
    """The same rows after ages became categories, as one of them was no number."""
    ages = rows.values[:, 0]
    names = tuple(dict.fromkeys(repr(float(age)) for age in ages[~np.isnan(ages)]))
    codes = [np.nan if np.isnan(age) else names.index(repr(float(age))) for age in ages]
    values = np.column_stack([np.array(codes, np.float32), rows.values[:, 1]])
    return replace(rows, values=values, categories=(names, rows.categories[1]))


@pytest.mark.parametrize(
    "same",
    [
        lambda rows: rows.take(np.random.default_rng(0).permutation(N_ROWS)),
        lambda rows: rows.in_order(("town", "age")),
        recoded,
        of_texts,
        lambda rows: replace(rows, labels=rows.labels.astype(np.int64).astype(str)),
        lambda rows: replace(rows, ids=None),
        lambda rows: replace(rows, values=np.where(rows.values == 0, -0.0, rows.values)),
    ],
)
def test_rows_stay_the_same_however_they_are_written(same):
    assert by_content(table(), same(table())) == (N_ROWS, 0)


@pytest.mark.parametrize(
    "field", ["values", "labels", "weights", "base_margins", "categories", "columns"]
)
def test_rows_are_others_if_anything_in_them_is(field):
    rows = table()
    if field == "categories":
        changed = (None, ("bonn", "oslo", "paris"))
        n_changed = int((rows.values[:, 1] == 2).sum())
    elif field == "columns":
        changed, n_changed = ("years", "town"), N_ROWS
    else:
        changed, n_changed = getattr(rows, field).copy(), 1
        changed[3] += 1
    shared, differing = by_content(rows, replace(rows, **{field: changed}))
    assert shared == N_ROWS - n_changed
    assert differing == (2 * n_changed if shared else 0)


def test_a_text_longer_than_all_changes_no_hash_of_another():
    ids = table().ids
    assert ids is not None
    longer = np.append(ids, "a customer with a much longer name")
    both = table(N_ROWS + 1)
    shared = compare(hashed(table()), hashed(replace(both, ids=longer)), with_ids=True)[0]
    assert shared == N_ROWS
    assert len(set(hashed(replace(both, ids=longer)).ids)) == N_ROWS + 1


def test_another_home_cannot_compare_rows():
    here, elsewhere = hashed(table(), b"one"), hashed(table(), b"another")
    assert compare(here, elsewhere, with_ids=True) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_shared_rows_are_counted_as_by_hand(seed):
    """Of tables with few distinct rows, so that most are there several times."""
    rng = np.random.default_rng(seed)
    drawn = [rng.integers(0, 3, size=(rng.integers(1, 60), 2)) for _ in range(2)]
    tables = [Table(("a", "b"), rows.astype(np.float32)) for rows in drawn]
    first, second = (Counter(map(tuple, rows.tolist())) for rows in drawn)
    n_shared = (first & second).total()
    n_differing = ((first - second) + (second - first)).total()
    assert by_content(*tables) == (n_shared, n_differing if n_shared else 0)


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        (lambda rows: rows, 0),
        (lambda rows: replace(rows, columns=("years", "town")), 0),
        (lambda rows: replace(rows.take(np.arange(1, N_ROWS)), columns=("years", "town")), 1),
        (lambda rows: replace(rows, labels=1 - rows.labels), 0),
        (lambda rows: replace(rows, labels=rows.labels + (np.arange(N_ROWS) == 3)), 2),
        (lambda rows: rows.take(np.arange(3, N_ROWS)), 3),
    ],
)
def test_rows_of_equal_ids_are_the_same_whatever_their_columns(change, differing):
    counts = compare(hashed(table()), hashed(change(table())), with_ids=True)
    assert counts == (change(table()).n_rows, differing)
