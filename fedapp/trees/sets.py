"""Sets of categories that splits send right, as XGBoost's categorical splits do.

A category in the set goes right, any other left. A missing value, or a code that is not a category
of the column, takes the split's default side.

The value k of a column of categories, a whole number in float32, is the category at index k of the
column's names; NaN is missing. ``joint_categories`` merges the names of several tables, and
``recoded`` converts values to the merged ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.errors import DataError
from fedapp.kernels import frozen, inlined

Ints = npt.NDArray[np.int64]
Members = npt.NDArray[np.bool_]  # shape (n_categories,): by code; True goes right
NO_SET = -1  # of a leaf, and of a split that has a threshold


@dataclass(frozen=True, slots=True, eq=False)
class CategorySets:
    """Sets of categories, concatenated, each padded to whole bytes.

    Raises
    ------
    ValueError : the number of bytes does not match the widths, or bits past the last category are
        set.
    """

    bits: npt.NDArray[np.uint8]  # one bit per category, a byte's first is its highest bit
    widths: Ints  # (n_sets,), >= 1: number of categories of each set's column

    def __post_init__(self) -> None:
        n_bytes = int(self.offsets[-1])
        if len(self.bits) != n_bytes:
            raise ValueError(f"sets must be {n_bytes} bytes, got {len(self.bits)}")
        past = 0xFF >> (1 + (self.widths - 1) % 8)  # of the last byte of each set
        if (self.bits[self.offsets[1:] - 1] & past).any():
            raise ValueError("sets must contain only categories of the column")

    @classmethod
    def of(cls, members: Sequence[Members]) -> CategorySets:
        """From membership arrays, each over all categories of its column."""
        bits = [np.packbits(one) for one in members]
        widths = np.array([len(one) for one in members], dtype=np.int64)
        return cls(np.concatenate([*bits, np.empty(0, dtype=np.uint8)]), widths)

    def __len__(self) -> int:
        return len(self.widths)

    @property
    def offsets(self) -> Ints:
        """Start of each set in bytes, and the end of the last; shape (n_sets + 1,)."""
        return np.concatenate(([0], np.cumsum(-(-self.widths // 8), dtype=np.int64)))

    def members(self, number: int) -> Members:
        """Membership of each category in one set."""
        start, end = self.offsets[number : number + 2]
        return np.unpackbits(self.bits[start:end]).astype(bool)[: self.widths[number]]

    def take(self, numbers: npt.NDArray[Any]) -> CategorySets:
        """The sets with these numbers, in this order."""
        offsets = self.offsets
        bits = [self.bits[offsets[number] : offsets[number + 1]] for number in numbers.tolist()]
        return CategorySets(
            np.concatenate([*bits, np.empty(0, dtype=np.uint8)]), self.widths[numbers]
        )

    def widened(self, widths: Ints) -> CategorySets:
        """The same sets for columns with at least as many categories."""
        members = [self.members(number) for number in range(len(self))]
        padded = zip(members, widths.tolist(), strict=True)
        return CategorySets.of([np.pad(each, (0, width - len(each))) for each, width in padded])

    def plus(self, *others: CategorySets) -> CategorySets:
        """With further sets appended."""
        every = (self, *others)
        return CategorySets(
            np.concatenate([sets.bits for sets in every]),
            np.concatenate([sets.widths for sets in every]),
        )

    def codes(self) -> list[list[int]]:
        """The categories of each set, ascending, for JSON."""
        return [np.flatnonzero(self.members(number)).tolist() for number in range(len(self))]


NO_SETS = CategorySets.of(())


def sets_of_codes(codes: Sequence[Sequence[int]], widths: Ints) -> CategorySets:
    """Undo ``CategorySets.codes``, by the categories of each set's column; raises ValueError."""
    if len(codes) != len(widths):
        raise ValueError(f"sets must be {len(widths)}, one a categorical split, got {len(codes)}")
    members = [np.zeros(width, dtype=bool) for width in widths.tolist()]
    for is_member, set_codes in zip(members, codes, strict=True):
        if any(type(code) is not int or not 0 <= code < len(is_member) for code in set_codes):
            raise ValueError("sets must contain only categories of the column")
        is_member[np.array(set_codes, dtype=np.int64)] = True
    return CategorySets.of(members)


def set_numbers(widths: npt.NDArray[Any]) -> Ints:
    """Set number of each split, ``NO_SET`` for a threshold, where its width is 0."""
    has_set = widths > 0
    return np.where(has_set, np.cumsum(has_set) - 1, NO_SET)


def sets_of_rows(widths: Ints, rights: npt.NDArray[np.uint8]) -> tuple[Ints, CategorySets]:
    """Set number of each split, and the sets; ``rights`` has a row of bits per split."""
    is_used = np.arange(rights.shape[1]) < -(-widths // 8)[:, None]
    return set_numbers(widths), CategorySets(rights[is_used], widths[widths > 0])


def lefts_by_sets(
    values: npt.NDArray[np.float32],
    defaults: npt.NDArray[np.bool_],
    numbers: Ints,
    sets: CategorySets,
) -> npt.NDArray[np.bool_]:
    """Whether splits by sets send codes left, one split per value."""
    is_known = (values >= 0) & (values < sets.widths[numbers])
    codes = np.where(is_known, values, 0).astype(np.int64)
    set_bytes = sets.bits[sets.offsets[numbers] + (codes >> 3)]
    goes_right = (set_bytes >> (7 - (codes & 7)).astype(np.uint8)) & 1
    lefts: npt.NDArray[np.bool_] = np.where(is_known, goes_right == 0, defaults)
    return lefts


def category_counts(categories: Categories, n_columns: int) -> Ints:
    """Number of categories of each column, 0 for a numeric one; int64, shape (n_columns,)."""
    if not categories:
        return np.zeros(n_columns, dtype=np.int64)
    return np.array([len(names or ()) for names in categories], dtype=np.int64)


def kernel_sets(numbers: npt.NDArray[Any] | None, sets: CategorySets) -> tuple[Any, ...]:
    """Arrays that ``goes_left_by_set`` reads in kernels; the empty tuple without sets.

    A kernel that checks ``len(sets)`` first is compiled for the empty tuple without the look-up.
    ``numbers`` is the set number of each node or split.
    """
    if numbers is None or not len(sets):
        return ()
    return tuple(frozen(numbers.astype(np.int64), sets.bits, sets.offsets, sets.widths))


@inlined
def goes_left_by_set(value: Any, default_left: Any, number: Any, sets: Any) -> Any:
    """Whether a set sends a code left; ``sets`` comes from ``kernel_sets``."""
    _, bits, offsets, widths = sets
    if not 0 <= value < widths[number]:
        return default_left
    code = np.int64(value)
    return not (bits[offsets[number] + (code >> 3)] >> (7 - (code & 7))) & 1


# Names of categories

Categories = tuple[tuple[str, ...] | None, ...]
"""Per column its category names, or None if it is numeric. Empty tuple: all columns are numeric."""

MOST_CATEGORIES = 65_535  # of a column, so that codes fit in the type of bin ids

Values = npt.NDArray[np.float32]


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


def in_secret_order(values: Values, categories: Categories, seed: int) -> tuple[Values, Categories]:
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


def recoded(
    values: Values, current: Categories, joint: Categories, columns: Sequence[str] = ()
) -> tuple[Values, npt.NDArray[np.int64]]:
    """Convert values, shape (n_rows, n_columns), from the codes of `current` to those of `joint`.

    Returns the values, NaN if the name is not in `joint`, and the number of such values of each
    column. If nothing changes, the values are the input itself. Raises DataError for a column with
    values that is numeric in one and categorical in the other.
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
                due, got = ("numbers", "text") if joint_names is None else ("categories", "numbers")
                rule = f"feature column {{}} must be {due}, as at the other parties or in the "
                rule += f"model, got {got}: the schema of a table says its type"
                name = columns[column] if columns else f"{column + 1}"
                raise DataError.naming(rule, f"'{name}'")
        elif names != joint_names:
            out[:, column], unseen[column] = _recoded_column(values[:, column], names, joint_names)
    return out, unseen


def trained_first(
    categories: Categories, train: Values
) -> tuple[Categories, npt.NDArray[np.int64]]:
    """Move the categories that occur in training rows first, otherwise keep their order.

    Also returns how many of each column occur; int64, shape (n_columns,). `train` has the codes of
    `categories`, shape (n_rows, n_columns).
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
    codes: Values, names: tuple[str, ...], joint_names: tuple[str, ...]
) -> tuple[Values, int]:
    """Codes in another dictionary, and the number of values not in it."""
    places = {name: place for place, name in enumerate(joint_names)}
    new = np.array([*(places.get(name, np.nan) for name in names), np.nan], np.float32)
    is_present = ~np.isnan(codes)
    # Missing values index the last entry of `new`, which is NaN.
    at = np.full(len(codes), len(names), np.int64)
    at[is_present] = codes[is_present].astype(np.int64)
    out = new[at]
    return out, int((is_present & np.isnan(out)).sum())
