"""Bins of a table's columns, in the layout of XGBoost's histograms.

All columns are concatenated in one flat array::

    offsets  0        3           7      9
    edges    c0 c1 c2 c0 c1 c2 c3 c0 c1         one upper edge per bin
    column   ---0---- -----1----- --2--

Bin ``b`` of a column contains ``edges[b-1] <= x < edges[b]``; bin 0 also everything below, the last
bin everything above. A column of categories has one bin per code, up to the highest code in use;
its edges are 1, 2, 3 and so on, and any value that is not a category's code is missing.

A value's bin is searched in a tree of the column's edges, stored level by level: the next node
follows from a comparison by arithmetic, without a branch that could be mispredicted (S. Khuong and
P. Morin, "Array Layouts for Comparison-Based Searching", 2017).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Flags, Floats, Ints
from fedapp.kernels import kernel, n_cores

Codes = npt.NDArray[np.uint8 | np.uint16]
Empty = Callable[[Any, Any], npt.NDArray[Any]]  # as ``np.empty``
T = TypeVar("T")

NO_CODE = -1
FEWEST_CELLS = 2**21  # a smaller table is not divided among threads
GROUP_CELLS = 2**25  # of the columns that are sketched together


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """Bin edges of all columns of a table."""

    edges: Floats  # (n_bins,): upper edges, ascending by column, the last above all values
    offsets: Ints  # (n_columns + 1,): bins of column f are offsets[f] to offsets[f+1]
    minima: Floats  # (n_columns,): below all values; as a threshold, only missing go left
    # (n_columns,): number of categories, 0 for a numeric column; empty if all are numeric
    categories: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def n_columns(self) -> int:
        """Number of columns."""
        return len(self.minima)

    @property
    def widths(self) -> Ints:
        """Number of bins of each column; int64, shape (n_columns,)."""
        return np.diff(self.offsets)

    @property
    def by_category(self) -> Flags:
        """Which columns are categorical; bool, shape (n_columns,)."""
        if not len(self.categories):
            return np.zeros(self.n_columns, dtype=bool)
        return self.categories > 0

    def column(self, column_id: int) -> Floats:
        """Upper edges of one column."""
        return self.edges[self.offsets[column_id] : self.offsets[column_id + 1]]


def ragged(arrays: list[Floats]) -> tuple[Floats, Ints]:
    """Concatenate arrays; returns the flat array and the start of each."""
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    flat = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.float32)
    return flat.astype(np.float32, copy=False), offsets


def spans(lengths: Ints) -> tuple[Ints, Ints]:
    """For each element of spans of these lengths: its span, and its place there."""
    spans = np.repeat(np.arange(len(lengths)), lengths)
    return spans, np.arange(len(spans)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def with_categories(cuts: Cuts, categories: Ints, used: Ints) -> Cuts:
    """Replace the bins of columns of categories by one bin per category.

    ``categories`` is as in ``Cuts``, with all columns; ``used`` is int64, shape (n_columns,), the
    number of bins of these columns. Categories beyond do not occur.
    """
    if not categories.any():
        return cuts
    edges = [
        np.arange(1, used[column_id] + 1, dtype=np.float32) if width else cuts.column(column_id)
        for column_id, width in enumerate(categories.tolist())
    ]
    return Cuts(*ragged(edges), np.where(categories > 0, np.float32(0), cuts.minima), categories)


def column_groups(shape: tuple[int, ...]) -> Iterator[slice]:
    """Neighbouring columns, of ``GROUP_CELLS`` or one column each; one group if there are none."""
    size = max(1, GROUP_CELLS // max(1, shape[0]))
    return (slice(first, first + size) for first in range(0, max(1, shape[1]), size))


def digitise(values: Floats, cuts: Cuts, empty: Empty = np.empty) -> tuple[Codes, int]:
    """Replace every value by the number of its bin.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns); NaN is missing, and so is an unknown code of a
        category, and every value of a column without bins.
    empty : makes the array of codes.

    Returns
    -------
    codes : uint8 (uint16 past 256 codes), shape (n_rows, n_columns).
    missing_code : the code of a missing value, or -1 if no value is missing.
    """
    widths = cuts.widths
    limits = np.where(cuts.by_category, widths, 0)
    limits[widths == 0] = -1
    is_missing = any_missing(values, limits)
    kind = np.uint8 if int(widths.max(initial=0)) + is_missing <= 256 else np.uint16
    missing_code = int(np.iinfo(kind).max) if is_missing else NO_CODE
    codes: Codes = empty(values.shape, kind)
    columns = [cuts.column(column_id)[:-1] for column_id in range(cuts.n_columns)]
    find_bins(values, columns, limits, missing_code, codes)
    return codes, missing_code


def search_tree(edges: Floats) -> Floats:
    """Ascending edges as a full binary tree in level order, padded with NaN: above no value."""
    n_levels = len(edges).bit_length()
    ordered = np.full(2**n_levels - 1, np.nan, dtype=np.float32)
    ordered[: len(edges)] = edges
    levels = [ordered[2 ** (n_levels - 1 - d) - 1 :: 2 ** (n_levels - d)] for d in range(n_levels)]
    return np.concatenate([*levels, np.empty(0, dtype=np.float32)])


def find_bins(
    values: Floats, columns: list[Floats], limits: Ints, missing_code: int, codes: Any
) -> None:
    """Write the bin of each value: the number of edges of its column that are not above it.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns).
    columns : upper edges of each column's bins but the last.
    limits : int64, shape (n_columns,): number of codes of a column of categories (any other value
        is missing); 0 for a numeric column, -1 for one without bins, where all are.
    codes : unsigned, shape (n_rows, n_columns), written.
    """
    trees = [search_tree(edges) for edges in columns]
    ends = np.cumsum([0, *map(len, trees)])
    flat = np.concatenate([*trees, np.empty(0, dtype=np.float32)])
    in_parts(
        values.shape,
        lambda first, last: _find(
            values[first:last], flat, ends, limits, missing_code, codes[first:last]
        ),
    )


def n_threads(shape: tuple[int, ...]) -> int:
    """Threads that work on a table; to wake others for a small one would take longer."""
    return n_cores() if shape[0] * shape[1] >= FEWEST_CELLS else 1


def in_parts(shape: tuple[int, ...], work: Callable[[int, int], T]) -> list[T]:
    """Call ``work(first, last)`` on ranges of rows, one thread per core if the table is large."""
    n_rows, n_parts = shape[0], min(n_threads(shape), max(1, shape[0]))
    if n_parts == 1:
        return [work(0, n_rows)]
    ends = np.linspace(0, n_rows, n_parts + 1).astype(int).tolist()
    with ThreadPoolExecutor(n_parts) as threads:
        return list(threads.map(work, ends[:-1], ends[1:]))


@kernel
def _find(values: Any, trees: Any, ends: Any, limits: Any, missing_code: int, codes: Any) -> None:
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            value, limit = values[row, column], limits[column]
            if value != value or (limit != 0 and (value < 0 or value >= limit)):
                codes[row, column] = missing_code
                continue
            first = ends[column]
            n_edges = ends[column + 1] - ends[column]
            node = 0
            while node < n_edges:
                node = 2 * node + 1 + (trees[first + node] <= value)
            codes[row, column] = node - n_edges


@kernel
def any_missing(values: Any, limits: Any) -> bool:
    """Whether any value is missing; arguments as in ``find_bins``."""
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            value, limit = values[row, column], limits[column]
            if value != value or (limit != 0 and (value < 0 or value >= limit)):
                return True
    return False


@kernel
def column_ranges(values: Any, weights: Any) -> Any:
    """Minimum and maximum of each column over rows with weight, (2, n_columns), or NaN."""
    ranges = np.full((2, values.shape[1]), np.nan, dtype=np.float32)
    for row in range(values.shape[0]):
        if not weights[row] > 0:
            continue
        for column in range(values.shape[1]):
            value = values[row, column]
            if value != value:
                continue
            if not value >= ranges[0, column]:
                ranges[0, column] = value
            if not value <= ranges[1, column]:
                ranges[1, column] = value
    return ranges


@kernel
def sum_weights(codes: Any, missing_code: int, weights: Any, starts: Any, sums: Any) -> None:
    """Add each row's weight to its bins, rows in order; column f begins at ``starts[f]``."""
    for row in range(codes.shape[0]):
        weight = weights[row]
        if not weight > 0:
            continue
        for column in range(codes.shape[1]):
            code = codes[row, column]
            if code != missing_code:
                sums[starts[column] + code] += weight
