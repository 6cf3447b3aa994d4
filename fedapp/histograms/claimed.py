"""Sums that another party claims, compared exactly with the rows that they are said to be of.

Sums of fixed-point numbers do not fit in 64 bits, so a whole number is two int64 words along the
last axis, ``high * 2^32 + low``. Words are added and subtracted one by one, and then ``carried``:
0 <= low < 2^32, so a number has the sign of its high word. Sums may have 2^30 terms.

``unfit_column`` is for sums that nothing is known of but the rows of their node, ``row_sums`` for
sums whose rows are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Flags, Ints
from fedapp.kernels import frozen, kernel

WORD_BITS = 32
LOW = (1 << WORD_BITS) - 1


def words_of(numbers: Sequence[Sequence[int]] | npt.NDArray[Any]) -> Ints:
    """Whole numbers in words, shape (*shape of the numbers, 2)."""
    whole = numbers if isinstance(numbers, np.ndarray) else np.array(numbers, dtype=object)
    return np.stack([(whole >> WORD_BITS).astype(np.int64), (whole & LOW).astype(np.int64)], -1)


def carried(words: Ints) -> Ints:
    """The same numbers with low words of 0 to 2^32 - 1."""
    return np.stack([words[..., 0] + (words[..., 1] >> WORD_BITS), words[..., 1] & LOW], -1)


def row_sums(numbers: Ints, slots: npt.NDArray[np.int32], n_nodes: int) -> Ints:
    """Sums over the rows of each node, in words, shape (n_nodes, n_fields, 2).

    ``numbers`` is int64, shape (n_rows, n_fields); ``slots`` has each row's node, -1 for none.
    """
    numbers, slots = frozen(numbers, slots)
    return carried(_added(numbers, slots, n_nodes)[0])


def unfit_column(
    cells: Ints, missing: Ints, offsets: Ints, numbers: Ints, slots: npt.NDArray[np.int32]
) -> int | None:
    """The first column whose claimed sums no division of the rows among its bins has, or None.

    Bins and missing rows together must be the node. Of the sum that the bins leave, only the number
    of its rows is known, so it must be between the sums of as many smallest and largest numbers.
    What is positive in bins must not exceed what is positive in rows, and so with what is negative.

    Parameters
    ----------
    cells : int64, shape (n_nodes, n_bins, n_fields, 2): claimed sums, in carried words.
    missing : shape (n_nodes, n_columns): claimed numbers of rows without a value.
    offsets : int64, shape (n_columns + 1,): where the bins of each column begin and end.
    numbers, slots : of the rows, as in ``row_sums``.
    """
    n_nodes, _, n_fields, _ = cells.shape
    numbers, slots = frozen(numbers, slots)
    sums, positive_sums, sizes = _added(numbers, slots, n_nodes)
    rest = carried(sums[:, None] - _by_column(cells, offsets))
    positive = _by_column(np.where(cells[..., :1] >= 0, cells, 0), offsets)
    positive += np.where(rest[..., :1] >= 0, rest, 0)
    fits = _at_most(positive, positive_sums[:, None])
    # With no row missing, 0 is both the least and the most.
    least, most = np.zeros_like(rest), np.zeros_like(rest)
    n_missing = np.clip(missing, 0, sizes[:, None])
    for node in np.flatnonzero(n_missing.any(axis=1)):
        inside, counts = slots == node, n_missing[node]
        for field in range(n_fields):
            ascending = np.sort(numbers[inside, field])
            totals = np.zeros((len(ascending) + 1, 2), dtype=np.int64)
            np.cumsum(ascending >> WORD_BITS, out=totals[1:, 0])
            np.cumsum(ascending & LOW, out=totals[1:, 1])
            least[node, :, field] = totals[counts]
            most[node, :, field] = totals[-1] - totals[len(ascending) - counts]
    fits &= _at_most(least, rest) & _at_most(rest, most)
    wrong = ~fits.all(axis=2) | (n_missing != missing)
    columns = np.flatnonzero(wrong.any(axis=0))
    return int(columns[0]) if len(columns) else None


def disclosed_labels(n_cuts: int, max_depth: int, max_leaves: int = 0, n_trees: int = 1) -> int:
    """Labels that a round can show a party whose columns are made up, with their rows.

    In each node one of ``n_cuts`` cuts is chosen, by labels. That answers about log2(n) questions,
    which the party asks by which rows it puts on which side of each cut. Columns of categories can
    show more: a label each, where categories of few rows have weights.

    Parameters
    ----------
    max_depth, max_leaves : of the round's ``n_trees`` trees, 0 leaves for no limit.
    """
    n_nodes = (1 << max_depth) - 1
    n_splits = min(n_nodes, max_leaves - 1) if max_leaves else n_nodes
    return n_trees * n_splits * (max(n_cuts, 1).bit_length() - 1)


def _at_most(smaller: Ints, larger: Ints) -> Flags:
    fits: Flags = carried(larger - smaller)[..., 0] >= 0
    return fits


def _by_column(cells: Ints, offsets: Ints) -> Ints:
    """Sums of each column's bins, in words, shape (n_nodes, n_columns, n_fields, 2)."""
    ends = np.concatenate((np.zeros_like(cells[:, :1]), cells.cumsum(axis=1)), axis=1)
    sums: Ints = ends[:, offsets[1:]] - ends[:, offsets[:-1]]
    return sums


@kernel
def _added(numbers: Any, slots: Any, n_nodes: int) -> Any:
    """Sums of all and of the positive numbers of each node, in words; and its number of rows."""
    sums = np.zeros((n_nodes, numbers.shape[1], 2), dtype=np.int64)
    positive = np.zeros_like(sums)
    sizes = np.zeros(n_nodes, dtype=np.int64)
    for row in range(len(slots)):
        slot = slots[row]
        if slot < 0:
            continue
        sizes[slot] += 1
        for field in range(numbers.shape[1]):
            high, low = numbers[row, field] >> WORD_BITS, numbers[row, field] & LOW
            sums[slot, field, 0] += high
            sums[slot, field, 1] += low
            if high >= 0:
                positive[slot, field, 0] += high
                positive[slot, field, 1] += low
    return sums, positive, sizes
