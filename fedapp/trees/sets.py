"""Sets of categories that splits send right, as XGBoost's categorical splits do.

A category in the set goes right, another one left. A missing value takes the default side of the
split, and so does a code that no category of the column has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.categories import Categories
from fedapp.kernels import frozen, inlined

Ints = npt.NDArray[np.int64]
Members = npt.NDArray[np.bool_]  # shape (n_categories,): by code; True goes right
NO_SET = -1  # of a leaf, and of a split that has a threshold


@dataclass(frozen=True, slots=True, eq=False)
class CategorySets:
    """Sets of categories, one after the other, each in whole bytes.

    Parameters
    ----------
    bits : uint8, shape (n_bytes,): a bit a category; the first of a byte is its highest.
    widths : int64, shape (n_sets,), >= 1: categories of the column that each set is of.

    Raises
    ------
    ValueError : another number of bytes than these widths take, or bits past the last category.
    """

    bits: npt.NDArray[np.uint8]
    widths: Ints

    def __post_init__(self) -> None:
        n_bytes = int(self.offsets[-1])
        if len(self.bits) != n_bytes:
            raise ValueError(f"sets must be {n_bytes} bytes, got {len(self.bits)}")
        past = 0xFF >> (1 + (self.widths - 1) % 8)  # of the last byte of each set
        if (self.bits[self.offsets[1:] - 1] & past).any():
            raise ValueError("sets must hold no category that the column has not")

    @classmethod
    def of(cls, members: Sequence[Members]) -> CategorySets:
        """These sets, each of all categories of its column."""
        bits = [np.packbits(one) for one in members]
        widths = np.array([len(one) for one in members], dtype=np.int64)
        return cls(np.concatenate([*bits, np.empty(0, dtype=np.uint8)]), widths)

    def __len__(self) -> int:
        return len(self.widths)

    @property
    def offsets(self) -> Ints:
        """Where the bytes of each set begin, and those of the last end; shape (n_sets + 1,)."""
        return np.concatenate(([0], np.cumsum(-(-self.widths // 8), dtype=np.int64)))

    def members(self, number: int) -> Members:
        """Which categories one of the sets holds."""
        start, end = self.offsets[number : number + 2]
        return np.unpackbits(self.bits[start:end]).astype(bool)[: self.widths[number]]

    def take(self, numbers: npt.NDArray[Any]) -> CategorySets:
        """Those of the sets with these numbers, in this order."""
        offsets = self.offsets
        bits = [self.bits[offsets[number] : offsets[number + 1]] for number in numbers.tolist()]
        return CategorySets(
            np.concatenate([*bits, np.empty(0, dtype=np.uint8)]), self.widths[numbers]
        )

    def widened(self, widths: Ints) -> CategorySets:
        """The same sets of columns that have more categories, at least as many as they have."""
        held = [self.members(number) for number in range(len(self))]
        padded = zip(held, widths.tolist(), strict=True)
        return CategorySets.of([np.pad(each, (0, width - len(each))) for each, width in padded])

    def plus(self, *others: CategorySets) -> CategorySets:
        """With further sets at the end."""
        every = (self, *others)
        return CategorySets(
            np.concatenate([sets.bits for sets in every]),
            np.concatenate([sets.widths for sets in every]),
        )

    def codes(self) -> list[list[int]]:
        """The categories of each set, ascending, as JSON can hold them."""
        return [np.flatnonzero(self.members(number)).tolist() for number in range(len(self))]


NO_SETS = CategorySets.of(())


def sets_of_codes(codes: Sequence[Sequence[int]], widths: Ints) -> CategorySets:
    """Undo ``CategorySets.codes``.

    Parameters
    ----------
    widths : of the column of each set.

    Raises
    ------
    ValueError : not one a width, or a code that the column has not.
    """
    if len(codes) != len(widths):
        raise ValueError(f"sets must be {len(widths)}, one a categorical split, got {len(codes)}")
    members = [np.zeros(width, dtype=bool) for width in widths.tolist()]
    for known, held in zip(members, codes, strict=True):
        if any(type(code) is not int or not 0 <= code < len(known) for code in held):
            raise ValueError("sets must hold no category that the column has not")
        known[np.array(held, dtype=np.int64)] = True
    return CategorySets.of(members)


def set_numbers(widths: npt.NDArray[Any]) -> Ints:
    """The number of each split's set, where sets stand in the order of the splits that have one.

    Parameters
    ----------
    widths : shape (n_splits,): categories of the split's column, 0 where it has a threshold.

    Returns
    -------
    int64, shape (n_splits,); ``NO_SET`` where there is a threshold.
    """
    has_set = widths > 0
    return np.where(has_set, np.cumsum(has_set) - 1, NO_SET)


def sets_of_rows(widths: Ints, rights: npt.NDArray[np.uint8]) -> tuple[Ints, CategorySets]:
    """Sets of some splits, a row of bits each.

    Parameters
    ----------
    widths : int64, shape (n_splits,): categories of the split's column, 0 where it has a threshold.
    rights : uint8, shape (n_splits, n_bytes): bits of the categories that go right; bytes past
        those of a width are not looked at.

    Returns
    -------
    The number of each split's set, ``NO_SET`` where it has none, and the sets.
    """
    is_used = np.arange(rights.shape[1]) < -(-widths // 8)[:, None]
    return set_numbers(widths), CategorySets(rights[is_used], widths[widths > 0])


def lefts_by_sets(
    values: npt.NDArray[np.float32],
    defaults: npt.NDArray[np.bool_],
    numbers: Ints,
    sets: CategorySets,
) -> npt.NDArray[np.bool_]:
    """Whether splits by sets send values left.

    Parameters
    ----------
    values, defaults, numbers : of one shape: codes, and the default side and set of the split that
        each is at.
    """
    is_known = (values >= 0) & (values < sets.widths[numbers])
    codes = np.where(is_known, values, 0).astype(np.int64)
    bytes_of = sets.bits[sets.offsets[numbers] + (codes >> 3)]
    goes_right = (bytes_of >> (7 - (codes & 7)).astype(np.uint8)) & 1
    found: npt.NDArray[np.bool_] = np.where(is_known, goes_right == 0, defaults)
    return found


def category_counts(categories: Categories, n_columns: int) -> Ints:
    """Categories of each column, 0 for one of numbers; int64, shape (n_columns,)."""
    if not categories:
        return np.zeros(n_columns, dtype=np.int64)
    return np.array([len(names or ()) for names in categories], dtype=np.int64)


def walked_sets(numbers: npt.NDArray[Any] | None, sets: CategorySets) -> tuple[Any, ...]:
    """What ``goes_left_by_set`` reads, for kernels.

    Parameters
    ----------
    numbers : the set of each node or split, ``NO_SET`` where it has none.

    Returns
    -------
    Number of each one's set, bytes, offsets and widths of the sets; the empty tuple where there is
    no set. A kernel that asks ``len(sets)`` first is compiled for that without what would look one
    up.
    """
    if numbers is None or not len(sets):
        return ()
    return tuple(frozen(numbers.astype(np.int64), sets.bits, sets.offsets, sets.widths))


@inlined
def goes_left_by_set(value: Any, default_left: Any, number: Any, sets: Any) -> Any:
    """Whether a split by a set sends a value left.

    Parameters
    ----------
    value : a code; below 0 or NaN where it is missing.
    number : of the set.
    sets : of ``walked_sets``.
    """
    _, bits, offsets, widths = sets
    if not 0 <= value < widths[number]:
        return default_left
    code = np.int64(value)
    return not (bits[offsets[number] + (code >> 3)] >> (7 - (code & 7))) & 1
