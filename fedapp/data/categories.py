"""Columns of categories: the names that their codes stand for.

A value k of such a column, a whole number in float32, stands for the name at place k of the
column's dictionary; NaN is missing. Tables with different dictionaries are brought to one:
``joint_categories`` makes it, ``recoded`` applies it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from fedapp.errors import DataError

Categories = tuple[tuple[str, ...] | None, ...]
"""One entry a column: its names, sorted by text as a table is read; None for a column of numbers.
The empty tuple: every column holds numbers."""

MOST_CATEGORIES = 65_535
"""Names of one column, so that codes are of the size of bin ids."""

Values = npt.NDArray[np.float32]


def names_of(categories: Categories, column: int) -> tuple[str, ...] | None:
    """Names of the categories of a column, by its place; None for a column of numbers."""
    return categories[column] if categories else None


def entries_of(categories: Categories, n_columns: int) -> Categories:
    """An entry for each column, also where all hold numbers."""
    return categories or (None,) * n_columns


def as_categories(entries: Iterable[tuple[str, ...] | None]) -> Categories:
    """Entries of all columns; the empty tuple where all hold numbers."""
    found = tuple(entries)
    return found if any(names is not None for names in found) else ()


def chosen(categories: Categories, columns: Sequence[int] | npt.NDArray[np.int64]) -> Categories:
    """The entries of some columns, by their places, in this order."""
    return as_categories(names_of(categories, int(column)) for column in columns)


def in_secret_order(values: Values, categories: Categories, seed: int) -> tuple[Values, Categories]:
    """Columns of categories with codes in an order that says nothing of the names.

    The order of a column is drawn by a digest of the column itself: who does not have its rows
    cannot tell it, and the same run draws the same again.

    Parameters
    ----------
    values : shape (n_rows, n_columns).
    seed : of the run, >= 0: another run draws another order.
    """
    if not categories:
        return values, categories
    ordered: list[tuple[str, ...] | None] = []
    for column, names in enumerate(categories):
        if names is not None:
            digest = hashlib.blake2b(values[:, column].tobytes(), key=seed.to_bytes(8, "little"))
            digest.update(json.dumps(names).encode())
            names = tuple(sorted(names, key=partial(_keyed, digest.digest())))
        ordered.append(names)
    return recoded(values, categories, tuple(ordered))[0], tuple(ordered)


def _keyed(key: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), key=key).digest()


def side_by_side(parts: Iterable[tuple[Categories, int]]) -> Categories:
    """Categories of tables whose columns stand beside each other.

    Parameters
    ----------
    parts : categories of each table, and its number of columns.
    """
    return as_categories(
        names for categories, width in parts for names in entries_of(categories, width)
    )


def joint_categories(tables: Iterable[Categories]) -> Categories:
    """The dictionary of all parties: the union of their names, sorted by text.

    A column is of categories where it is so at any party; whether the others' values fit, only they
    can tell: a column without any value fits both (``recoded``).
    """
    given = [categories for categories in tables if categories]
    merged = (
        [names for names in column if names is not None] for column in zip(*given, strict=True)
    )
    return as_categories(tuple(sorted(set().union(*names))) if names else None for names in merged)


def recoded(
    values: Values, own: Categories, joint: Categories, columns: Sequence[str] = ()
) -> tuple[Values, npt.NDArray[np.int64]]:
    """Values with the codes of another dictionary.

    Parameters
    ----------
    values : shape (n_rows, n_columns); codes are those of `own`.
    own, joint : of the same columns.
    columns : their names, for errors.

    Returns
    -------
    values : float32, shape (n_rows, n_columns); NaN where the name is not in `joint`. The values
        given where nothing changes.
    unseen : int64, shape (n_columns,): values that became NaN.

    Raises
    ------
    DataError : a column is of numbers in one and of categories in the other, and has a value.
    """
    n_columns = values.shape[1]
    unseen = np.zeros(n_columns, np.int64)
    if own == joint:
        return values, unseen
    out = values.copy()
    for column in range(n_columns):
        here, there = names_of(own, column), names_of(joint, column)
        if here is None or there is None:
            if (here is None) != (there is None) and not np.isnan(values[:, column]).all():
                raise _other_type(columns[column] if columns else f"{column + 1}", there is None)
        elif here != there:
            out[:, column], unseen[column] = _recoded_column(values[:, column], here, there)
    return out, unseen


def _other_type(column: str, is_number: bool) -> DataError:
    due, found = ("numbers", "text") if is_number else ("categories", "numbers")
    rule = f"feature column {{}} must be {due}, as at the other parties or in the model, "
    return DataError.naming(
        rule + f"got {found}: the schema of a table says its type", f"'{column}'"
    )


def trained_first(
    categories: Categories, train: Values
) -> tuple[Categories, npt.NDArray[np.int64]]:
    """The categories with those that occur in training rows first, otherwise in their order.

    Parameters
    ----------
    train : shape (n_rows, n_columns): the training rows, by the codes of `categories`.

    Returns
    -------
    The categories, and how many of each column occur; int64, shape (n_columns,).
    """
    counts, ordered = np.zeros(train.shape[1], dtype=np.int64), list[tuple[str, ...] | None]()
    for place, names in enumerate(entries_of(categories, train.shape[1])):
        if names is not None:
            present = np.unique(train[~np.isnan(train[:, place]), place]).astype(np.int64)
            others = np.setdiff1d(np.arange(len(names)), present)
            counts[place] = len(present)
            names = tuple(names[code] for code in (*present, *others))
        ordered.append(names)
    return as_categories(ordered), counts


def _recoded_column(
    codes: Values, own: tuple[str, ...], joint: tuple[str, ...]
) -> tuple[Values, int]:
    """Codes of another dictionary, and how many names are not in it."""
    places = {name: place for place, name in enumerate(joint)}
    new = np.array([*(places.get(name, np.nan) for name in own), np.nan], np.float32)
    known = ~np.isnan(codes)
    # The last entry is where missing values point.
    at = np.full(len(codes), len(own), np.int64)
    at[known] = codes[known].astype(np.int64)
    out = new[at]
    return out, int((known & np.isnan(out)).sum())
