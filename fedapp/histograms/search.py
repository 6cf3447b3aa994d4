"""Find the bin of every value of a table.

The edges of a column are stored as a search tree, level by level (S. Khuong and P. Morin, "Array
Layouts for Comparison-Based Searching", 2017). The next node follows from a comparison by
arithmetic, without a branch that could be mispredicted.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.crypto.workers import n_cores
from fedapp.kernels import kernel

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

FEWEST_CELLS = 2**21  # a smaller table is not divided among threads


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
        is missing); 0 for a numeric column, -1 for one without bins.
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


def in_parts(shape: tuple[int, ...], work: Callable[[int, int], None]) -> None:
    """Call ``work(first, last)`` on ranges of rows, one thread per core if the table is large."""
    n_rows, n_parts = shape[0], n_cores() if shape[0] * shape[1] >= FEWEST_CELLS else 1
    if n_parts == 1:
        work(0, n_rows)
        return
    ends = np.linspace(0, n_rows, n_parts + 1).astype(int).tolist()
    with ThreadPoolExecutor(n_parts) as threads:
        list(threads.map(work, ends[:-1], ends[1:]))


@kernel
def _find(values: Any, trees: Any, ends: Any, limits: Any, missing_code: int, codes: Any) -> None:
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            value, limit = values[row, column], limits[column]
            if value != value or (limit > 0 and (value < 0 or value >= limit)):
                codes[row, column] = missing_code
                continue
            first, n_edges = ends[column], ends[column + 1] - ends[column]
            place = 0
            while place < n_edges:
                place = 2 * place + 1 + (trees[first + place] <= value)
            codes[row, column] = place - n_edges if limit >= 0 else -1


@kernel
def any_missing(values: Any, limits: Any) -> bool:
    """Whether any value is missing; arguments as in ``find_bins``."""
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            value, limit = values[row, column], limits[column]
            if value != value or (limit > 0 and (value < 0 or value >= limit)):
                return True
    return False


@kernel
def column_ranges(values: Any, weights: Any) -> Any:
    """Minimum and maximum of each column over rows with weight, (2, n_columns), or NaN."""
    found = np.full((2, values.shape[1]), np.nan, dtype=np.float32)
    for row in range(values.shape[0]):
        if not weights[row] > 0:
            continue
        for column in range(values.shape[1]):
            value = values[row, column]
            if value != value:
                continue
            if not value >= found[0, column]:
                found[0, column] = value
            if not value <= found[1, column]:
                found[1, column] = value
    return found


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
