"""What a finished model shows of few rows: names of categories, and cuts that set few rows apart.

A *cut* is the threshold of a split. The cuts of a column divide its values; a cut *of few rows* has
fewer than some number of a party's rows on one of its sides, up to the next cut. An *end* is what
lies below a column's lowest cut or above its highest: if it has few rows, the cut bounds the
column's extreme values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from fedapp.trees.categories import RARE, Categories, entries_of
from fedapp.trees.model import LEAF, Tree

FEW = 10  # rows, unless a run says otherwise
NOT_COUNTED = -1
WHAT = "names of categories", "cut points", "ends of columns"  # in the order of ``few_rows``

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


def not_counted() -> Ints:
    """In the place of ``few_rows``; int64, shape (3,)."""
    return np.full(len(WHAT), NOT_COUNTED)


def cuts_of(trees: Iterable[Tree], n_columns: int) -> list[Floats]:
    """Distinct thresholds of each column, ascending; those of a column of categories are none."""
    splits = [tree[tree["left"] != LEAF] for tree in trees]
    columns = np.concatenate([np.empty(0, np.int32), *(each["column"] for each in splits)])
    cuts = np.concatenate([np.empty(0, np.float32), *(each["threshold"] for each in splits)])
    return cuts_by_column(columns, cuts, n_columns)


def cuts_by_column(columns: npt.NDArray[np.integer], cuts: Floats, n_columns: int) -> list[Floats]:
    """Distinct cuts of each column, ascending."""
    return [np.unique(cuts[columns == column]) for column in range(n_columns)]


def few_rows(
    batches: Iterable[Floats], cuts: Sequence[Floats], categories: Categories, least: int
) -> Ints:
    """Number of names, cuts and ends that belong to 1 to ``least`` - 1 rows; int64, shape (3,).

    Parameters
    ----------
    batches : values of all rows, each of shape (n_rows, n_columns); NaN is missing.
    cuts : of each column, distinct and ascending.
    categories : names by column, whose values are their codes.
    """
    entries = entries_of(categories, len(cuts))
    counts = [
        np.zeros(len(names or ()) or len(each) + 1, np.int64)
        for names, each in zip(entries, cuts, strict=True)
    ]
    for values in batches:
        for column, names in enumerate(entries):
            present = values[~np.isnan(values[:, column]), column]
            places = (
                present.astype(np.int64)
                if names
                else np.searchsorted(cuts[column], present, side="right")
            )
            counts[column] += np.bincount(places, minlength=len(counts[column]))
    n_few = np.zeros(len(WHAT), np.int64)
    for names, count in zip(entries, counts, strict=True):
        few = (count > 0) & (count < least)
        if names:
            n_few[0] += sum(few[place] for place, name in enumerate(names) if name != RARE)
        elif len(count) > 1:
            n_few[1] += (few[1:] | few[:-1]).sum()
            n_few[2] += int(few[0]) + int(few[-1])
    return n_few
