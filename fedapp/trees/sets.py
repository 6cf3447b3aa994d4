"""Sets of categories that splits send right, as XGBoost's categorical splits do.

A category in the set goes right, any other left. A missing value, or a code that is not a category
of the column, takes the split's default side.

The value k of a column of categories, a whole number in float32, is the category at index k of the
column's names; NaN is missing. ``joint_categories`` merges the names of several tables, and
``recoded`` converts values to the merged ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from fedapp.kernels import frozen, inlined
from fedapp.trees.categories import MOST_CATEGORIES, Categories

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


def kernel_sets(numbers: npt.NDArray[Any] | None, sets: CategorySets) -> tuple[Any, Any, Any]:
    """Arrays that ``goes_left`` reads: of each node or split the number of categories, 0 for a
    threshold, and the first byte of its set; and all bytes. The first is empty without sets.

    ``numbers`` is the set number of each. A kernel names the arrays before its loop: to read them
    from a tuple in the loop would count references.
    """
    if numbers is None or not len(sets):
        numbers = np.empty(0, dtype=np.int64)
    widths = np.where(numbers == NO_SET, 0, sets.widths[numbers])
    widths, starts, bits = frozen(widths, sets.offsets[numbers], sets.bits)
    return widths, starts, bits


@inlined
def goes_left(
    value: Any,
    missing: Any,
    first_right: Any,
    default_left: Any,
    split: int,
    widths: Any,
    starts: Any,
    bits: Any,
) -> Any:
    """Whether a split sends a value left: below its threshold, or by its set.

    ``missing`` is NaN, or the code of a missing value if values are numbers of bins; for the last
    three see ``kernel_sets``.
    """
    if value == missing or value != value:  # NaN differs from itself
        return default_left
    if len(widths) == 0 or widths[split] == 0:
        return value < first_right
    if not 0 <= value < widths[split]:
        return default_left
    code = np.int64(value)
    return not (bits[starts[split] + (code >> 3)] >> (7 - (code & 7))) & 1
