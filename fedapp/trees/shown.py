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

from fedapp.arrays import Floats, Ints
from fedapp.histograms.bins import find_bins
from fedapp.trees.categories import RARE, Categories, entries_of
from fedapp.trees.model import LEAF, Tree

FEW = 10  # rows, unless a run says otherwise
NOT_COUNTED = -1
MISSING = 2**16 - 1  # beyond the codes of any column
WHAT = "names of categories", "cut points", "ends of columns"  # in the order of ``few_rows``


def not_counted() -> Ints:
    """In the place of ``few_rows``; int64, shape (3,)."""
    return np.full(len(WHAT), NOT_COUNTED)


def cuts_of(trees: Iterable[Tree], n_columns: int) -> list[Floats]:
    """Distinct thresholds of each column, ascending; those of a column of categories are none."""
    splits = [tree[tree["left"] != LEAF] for tree in trees]
    columns = np.concatenate([np.empty(0, np.int32), *(of_tree["column"] for of_tree in splits)])
    cuts = np.concatenate([np.empty(0, np.float32), *(of_tree["threshold"] for of_tree in splits)])
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
    least : of the run; 0: ``FEW``.
    """
    least = least or FEW
    entries = entries_of(categories, len(cuts))
    widths = np.array([len(names or ()) for names in entries], dtype=np.int64)
    edges = [
        np.arange(1, width, dtype=np.float32) if width else of_column
        for width, of_column in zip(widths, cuts, strict=True)
    ]
    counts = [np.zeros(len(of_column) + 1, np.int64) for of_column in edges]
    for values in batches:
        codes = np.empty(values.shape, dtype=np.uint16)
        find_bins(values, edges, widths, MISSING, codes)
        for count, of_column in zip(counts, codes.T, strict=True):
            count += np.bincount(of_column, minlength=MISSING + 1)[: len(count)]
    n_few = np.zeros(len(WHAT), np.int64)
    for names, count in zip(entries, counts, strict=True):
        few = (count > 0) & (count < least)
        if names:
            n_few[0] += sum(few[code] for code, name in enumerate(names) if name != RARE)
        elif len(count) > 1:
            n_few[1] += (few[1:] | few[:-1]).sum()
            n_few[2] += int(few[0]) + int(few[-1])
    return n_few
