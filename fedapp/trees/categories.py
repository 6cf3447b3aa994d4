"""Categories of columns: names by code, codes of other tables, and sets that splits send right.

The value k of a column of categories, a whole number in float32, is the category at index k of the
column's names; NaN is missing. ``joint_categories`` merges the names of several tables, and
``recoded`` converts values to the merged ones.

As in XGBoost, a category in a split's set goes right, any other left. A missing value, or a code
that is not a category of the column, takes the split's default side.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Flags, Floats, Ints
from fedapp.errors import DataError

Categories = tuple[tuple[str, ...] | None, ...]
Copy = Callable[[Floats], Floats]
Members = Flags  # shape (n_categories,): by code; True goes right

NO_SET = -1  # of a leaf, and of a split that has a threshold
MOST_CATEGORIES = 65_535  # of a column, so that codes fit in the type of bin ids
# Of more categories, splits single out groups of few rows; both numbers were measured
# (simulations/papers/methods.md).
MANY_CATEGORIES = 100
CHILD_WEIGHT, CHILD_WEIGHT_OF_MANY = 1.0, 5.0  # the first is XGBoost's default
# Category of all names that stay at their site, and of those that a model with it does not have. No
# table has such a name, as blanks around values are removed.
RARE = " (rare)"


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


def chosen(categories: Categories, columns: Sequence[int] | Ints) -> Categories:
    """Entries of some columns, by index, in this order."""
    return as_categories(names_of(categories, int(column)) for column in columns)


def in_secret_order(
    values: Floats, categories: Categories, seed: int, copied: Copy = np.ndarray.copy
) -> tuple[Floats, Categories]:
    """Reorder the codes of each categorical column so that they reveal nothing about the names.

    A keyed digest of the column determines its order: only a party that has the rows can compute
    it, and the same seed (>= 0) gives the same order. `values` has shape (n_rows, n_columns).
    """
    if not categories:
        return values, categories
    ordered: list[tuple[str, ...] | None] = []
    for column, names in enumerate(categories):
        if names is not None:
            codes = np.ascontiguousarray(values[:, column]).view(np.uint8).data
            digest = hashlib.blake2b(codes, key=seed.to_bytes(8, "little"))
            digest.update(json.dumps(names).encode())
            keyed = partial(hashlib.blake2b, key=digest.digest())
            names = tuple(sorted(names, key=lambda name: keyed(name.encode()).digest()))
        ordered.append(names)
    return recoded(values, categories, tuple(ordered), copied=copied)[0], tuple(ordered)


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
    values: Floats,
    current: Categories,
    joint: Categories,
    columns: Sequence[str] = (),
    copied: Copy = np.ndarray.copy,
) -> tuple[Floats, Ints]:
    """Convert values, shape (n_rows, n_columns), from the codes of `current` to those of `joint`.

    A name that is not in `joint` becomes ``RARE`` if that is in `joint`, else NaN. Returns the
    values, and the number of such NaN of each column. If nothing changes, the values are the input
    itself, else a changed copy, which `copied` makes. Raises DataError for a column with values
    that is numeric in one and categorical in the other.
    """
    n_columns = values.shape[1]
    unseen = np.zeros(n_columns, np.int64)
    if current == joint:
        return values, unseen
    out = copied(values)
    for column in range(n_columns):
        names, joint_names = names_of(current, column), names_of(joint, column)
        if names is None or joint_names is None:
            if (names is None) != (joint_names is None) and not np.isnan(values[:, column]).all():
                raise unlike(columns[column] if columns else f"{column + 1}", names is None)
        elif names != joint_names:
            places = {name: code for code, name in enumerate(joint_names)}
            other, is_present = places.get(RARE, np.nan), ~np.isnan(values[:, column])
            codes = np.array([places.get(name, other) for name in names], np.float32)
            out[is_present, column] = codes[values[is_present, column].astype(np.int64)]
            unseen[column] = (is_present & np.isnan(out[:, column])).sum()
    return out, unseen


def unlike(column: str, must_be_categories: bool) -> DataError:
    """Error for a column that is numbers in one table and categories in another."""
    due, got = ("categories", "numbers") if must_be_categories else ("numbers", "text")
    rule = f"feature column {{}} must be {due}, as at the other parties or in the model, got {got}:"
    return DataError.naming(f"{rule} the schema of a table says its type", f"'{column}'")


def trained_first(categories: Categories, train: Floats) -> tuple[Categories, Ints]:
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


# Sets that splits send right


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
        n_bytes = int(self.offsets[-1]) if len(self.widths) else 0
        if len(self.bits) != n_bytes:
            raise ValueError(f"sets must be {n_bytes} bytes, got {len(self.bits)}")
        if not n_bytes:
            return
        past = 0xFF >> (1 + (self.widths - 1) % 8)  # of the last byte of each set
        if (self.bits[self.offsets[1:] - 1] & past).any():
            raise ValueError("sets must contain only categories of the column")

    @classmethod
    def of(cls, members: Sequence[Members]) -> CategorySets:
        """From membership arrays, each over all categories of its column."""
        bits = [np.packbits(member) for member in members]
        widths = np.array([len(member) for member in members], dtype=np.int64)
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
        """The same sets for columns with at least as many categories; else raises ValueError."""
        if len(widths) != len(self):
            rule = f"sets must be {len(widths)}, one a categorical split"
            raise ValueError(f"{rule}, got {len(self)}")
        if (widths < self.widths).any():
            raise ValueError("sets must contain only categories of the column")
        members = [self.members(number) for number in range(len(self))]
        padded = zip(members, widths.tolist(), strict=True)
        return CategorySets.of([np.pad(bits, (0, width - len(bits))) for bits, width in padded])

    def plus(self, *others: CategorySets) -> CategorySets:
        """With further sets appended."""
        every = (self, *others)
        return CategorySets(
            np.concatenate([sets.bits for sets in every]),
            np.concatenate([sets.widths for sets in every]),
        )

    def codes(self) -> list[list[int]]:
        """The categories of each set, ascending."""
        return [np.flatnonzero(self.members(number)).tolist() for number in range(len(self))]

    @classmethod
    def of_codes(cls, codes: tuple[tuple[Annotated[int, ">= 0"], ...], ...]) -> CategorySets:
        """Undo ``codes``, with no more categories than the codes need: see ``widened``."""
        widest = max((code for of_set in codes for code in of_set), default=0)
        if widest >= MOST_CATEGORIES:
            raise ValueError(f"sets must be of categories < {MOST_CATEGORIES}, got {widest}")
        members = [np.zeros(max(of_set, default=0) + 1, dtype=bool) for of_set in codes]
        for is_member, set_codes in zip(members, codes, strict=True):
            is_member[list(set_codes)] = True
        return cls.of(members)


NO_SETS = CategorySets.of(())
CodedSets = Annotated[CategorySets, CategorySets.codes, CategorySets.of_codes]  # in a document


def set_numbers(widths: npt.NDArray[Any]) -> Ints:
    """Set number of each split, ``NO_SET`` for a threshold, where its width is 0."""
    has_set = widths > 0
    return np.where(has_set, np.cumsum(has_set) - 1, NO_SET)


def sets_of_rows(widths: Ints, rights: npt.NDArray[np.uint8]) -> tuple[Ints, CategorySets]:
    """Set number of each split, and the sets; ``rights`` has a row of bits per split."""
    is_used = np.arange(rights.shape[1]) < -(-widths // 8)[:, None]
    return set_numbers(widths), CategorySets(rights[is_used], widths[widths > 0])


def category_counts(categories: Categories, n_columns: int) -> Ints:
    """Number of categories of each column, 0 for a numeric one; int64, shape (n_columns,)."""
    if not categories:
        return np.zeros(n_columns, dtype=np.int64)
    return np.array([len(names or ()) for names in categories], dtype=np.int64)
