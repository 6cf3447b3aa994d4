"""Categories of a table's columns: names by code, and codes of one table in those of another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from fedapp.errors import DataError

Categories = tuple[tuple[str, ...] | None, ...]


MOST_CATEGORIES = 65_535  # of a column, so that codes fit in the type of bin ids
# Of more categories, splits single out groups of few rows; both numbers were measured
# (simulations/papers/methods.md).
MANY_CATEGORIES = 100
CHILD_WEIGHT, CHILD_WEIGHT_OF_MANY = 1.0, 5.0  # the first is XGBoost's default
# Category of all names that stay at their site, and of those that a model with it does not have. No
# table has such a name, as blanks around values are removed.
RARE = " (rare)"


Floats = npt.NDArray[np.float32]


def auto_child_weight(category_counts: Iterable[int]) -> float:
    """``min-child-weight`` if it is ``auto``, from the number of categories of each column."""
    most = max(category_counts, default=0)
    return CHILD_WEIGHT_OF_MANY if most >= MANY_CATEGORIES else CHILD_WEIGHT


def names_of(categories: Categories, column: int) -> tuple[str, ...] | None:
    """Category names of a column, by index; None for a numeric column."""
    return categories[column] if categories else None


def entries_of(categories: Categories, n_columns: int) -> Categories:
    """One entry per column, also if all columns are numeric."""
    return categories or (None,) * n_columns


def as_categories(entries: Iterable[tuple[str, ...] | None]) -> Categories:
    """Collect the entries of all columns; the empty tuple if all are numeric."""
    columns = tuple(entries)
    return columns if any(names is not None for names in columns) else ()


def chosen(categories: Categories, columns: Sequence[int] | npt.NDArray[np.int64]) -> Categories:
    """Entries of some columns, by index, in this order."""
    return as_categories(names_of(categories, int(column)) for column in columns)


def in_secret_order(values: Floats, categories: Categories, seed: int) -> tuple[Floats, Categories]:
    """Reorder the codes of each categorical column so that they reveal nothing about the names.

    A keyed digest of the column determines its order: only a party that has the rows can compute
    it, and the same seed (>= 0) gives the same order. `values` has shape (n_rows, n_columns).
    """
    if not categories:
        return values, categories
    ordered: list[tuple[str, ...] | None] = []
    for column, names in enumerate(categories):
        if names is not None:
            digest = hashlib.blake2b(values[:, column].tobytes(), key=seed.to_bytes(8, "little"))
            digest.update(json.dumps(names).encode())
            keyed = partial(hashlib.blake2b, key=digest.digest())
            names = tuple(sorted(names, key=lambda name: keyed(name.encode()).digest()))
        ordered.append(names)
    return recoded(values, categories, tuple(ordered))[0], tuple(ordered)


def side_by_side(parts: Iterable[tuple[Categories, int]]) -> Categories:
    """Concatenate the categories of tables, each with its number of columns."""
    return as_categories(
        names for categories, width in parts for names in entries_of(categories, width)
    )


def joint_categories(tables: Iterable[Categories]) -> Categories:
    """Merge the dictionaries of all parties: the union of the names, sorted.

    A column is categorical if it is so at any party. Only the other parties can check that their
    values fit; a column without values fits both types (``recoded``).
    """
    parties = [categories for categories in tables if categories]
    merged = (
        [names for names in column if names is not None] for column in zip(*parties, strict=True)
    )
    return as_categories(tuple(sorted(set().union(*names))) if names else None for names in merged)


def without_rare(
    categories: Categories, subsets: Sequence[Floats], fewest: int, agreed: Collection[int] = ()
) -> Categories:
    """Replace the names that fewer than `fewest` rows of all subsets have by ``RARE``.

    `subsets` have the codes of `categories`, shape (n_rows, n_columns); columns `agreed` stay.
    Raises ValueError if a column has ``RARE`` already.
    """
    columns: list[tuple[str, ...] | None] = list(categories)
    for column, names in enumerate(columns):
        if not names or column in agreed:
            continue
        if RARE in names:
            raise ValueError(f"categories must not be {RARE!r}, which is for those of few rows")
        codes = np.concatenate([values[:, column] for values in subsets])
        counts = np.bincount(codes[~np.isnan(codes)].astype(np.int64), minlength=len(names))
        frequent = (name for name, count in zip(names, counts, strict=True) if count >= fewest)
        columns[column] = names if (counts >= fewest).all() else (RARE, *frequent)
    return tuple(columns)


def recoded(
    values: Floats, current: Categories, joint: Categories, columns: Sequence[str] = ()
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Convert values, shape (n_rows, n_columns), from the codes of `current` to those of `joint`.

    A name that is not in `joint` becomes ``RARE`` if that is in `joint`, else NaN. Returns the
    values, and the number of such NaN of each column. If nothing changes, the values are the input
    itself. Raises DataError for a column with values that is numeric in one and categorical in the
    other.
    """
    n_columns = values.shape[1]
    unseen = np.zeros(n_columns, np.int64)
    if current == joint:
        return values, unseen
    out = values.copy()
    for column in range(n_columns):
        names, joint_names = names_of(current, column), names_of(joint, column)
        if names is None or joint_names is None:
            if (names is None) != (joint_names is None) and not np.isnan(values[:, column]).all():
                raise unlike(columns[column] if columns else f"{column + 1}", names is None)
        elif names != joint_names:
            out[:, column], unseen[column] = _recoded_column(values[:, column], names, joint_names)
    return out, unseen


def unlike(column: str, must_be_categories: bool) -> DataError:
    """Error for a column that is numbers in one table and categories in another."""
    due, got = ("categories", "numbers") if must_be_categories else ("numbers", "text")
    rule = f"feature column {{}} must be {due}, as at the other parties or in the model, got {got}:"
    return DataError.naming(f"{rule} the schema of a table says its type", f"'{column}'")


def trained_first(
    categories: Categories, train: Floats
) -> tuple[Categories, npt.NDArray[np.int64]]:
    """Move the categories that occur in training rows first, otherwise keep their order.

    Also returns how many of each column occur; int64, shape (n_columns,). `train` has the codes of
    `categories`, shape (n_rows, n_columns).
    """
    counts = np.zeros(train.shape[1], dtype=np.int64)
    ordered = list[tuple[str, ...] | None]()
    for column, names in enumerate(entries_of(categories, train.shape[1])):
        if names is not None:
            present = np.unique(train[~np.isnan(train[:, column]), column]).astype(np.int64)
            others = np.setdiff1d(np.arange(len(names)), present)
            counts[column] = len(present)
            names = tuple(names[code] for code in (*present, *others))
        ordered.append(names)
    return as_categories(ordered), counts


def _recoded_column(
    codes: Floats, names: tuple[str, ...], joint_names: tuple[str, ...]
) -> tuple[Floats, int]:
    """Codes in another dictionary, and the number of values not in it."""
    places = {name: code for code, name in enumerate(joint_names)}
    other = places.get(RARE, np.nan)
    new = np.array([*(places.get(name, other) for name in names), np.nan], np.float32)
    is_present = ~np.isnan(codes)
    # Missing values index the last entry of `new`, which is NaN.
    at = np.full(len(codes), len(names), np.int64)
    at[is_present] = codes[is_present].astype(np.int64)
    out = new[at]
    return out, int((is_present & np.isnan(out)).sum())
