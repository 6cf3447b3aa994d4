"""Groups of neighbouring bins, so that none discloses few rows.

``group`` merges bins until every non-empty one has at least ``min_rows`` rows. Each column is a
line of cells: missing values, then its bins in order. Neighbouring cells are merged, and a group's
sum is reported in its last cell. Both children of a node have the same groups, each a union of
groups of the parent. So a node's sums that follow from its parent and sibling also have enough
rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Floats, Ints
from fedapp.histograms.bins import ragged
from fedapp.histograms.sketch import Sketch
from fedapp.kernels import kernel


def cell_starts(widths: Ints) -> Ints:
    """First cell of each column, and the number of cells; int64, shape (n_columns + 1,)."""
    return np.concatenate(([0], np.cumsum(widths + 1))).astype(np.int64)


def join_counts(histogram: npt.NDArray[Any], missing: npt.NDArray[Any], starts: Ints) -> Ints:
    """Counts, (n_nodes, n_bins) and (n_nodes, n_columns), as cells, (n_nodes, n_cells)."""
    cells = np.zeros((len(histogram), int(starts[-1])), dtype=np.int64)
    is_bin = np.ones(cells.shape[1], dtype=bool)
    is_bin[starts[:-1]] = False
    cells[:, is_bin], cells[:, starts[:-1]] = histogram, missing
    return cells


@kernel
def group(ends: Any, counts: Any, starts: Any, least: int) -> Any:
    """Merge neighbouring cells until each group has at least ``least`` rows, or none, in each node.

    Parameters
    ----------
    ends : int64, shape (n_cells,): last cell of each cell's group so far.
    counts : int64, shape (n_nodes, n_cells): rows; each node has at least ``least``, or none.
    starts : from ``cell_starts``.

    Returns
    -------
    As ``ends``. Cells are joined greedily from the first of each column.
    """
    merged = ends.copy()
    n_nodes = counts.shape[0]
    longest = np.diff(starts).max()
    first, last = np.empty(longest, np.int64), np.empty(longest, np.int64)
    sums = np.empty((longest, n_nodes), np.int64)
    for column in range(len(starts) - 1):
        n_groups, cell = 0, starts[column]
        while cell < starts[column + 1]:
            is_open = n_groups > 0 and _is_few(sums[n_groups - 1], least)
            if not is_open:
                first[n_groups] = cell
                sums[n_groups] = 0
                n_groups += 1
            end = ends[cell]
            last[n_groups - 1] = end
            while cell <= end:
                sums[n_groups - 1] += counts[:, cell]
                cell += 1
        while n_groups > 1 and _is_few(sums[n_groups - 1], least):
            n_groups -= 1
            sums[n_groups - 1] += sums[n_groups]
            last[n_groups - 1] = last[n_groups]
        for number in range(n_groups):
            merged[first[number] : last[number] + 1] = last[number]
    return merged


@kernel
def _is_few(counts: Any, least: int) -> bool:
    """Whether any node has rows in a group, but fewer than ``least``."""
    few: bool = ((counts > 0) & (counts < least)).any()
    return few


@kernel
def merge_group_sums(
    histograms: Any, missing: Any, totals: Any, ends: Any, columns: Any, starts: Any
) -> None:
    """Move the sums of each group into its last cell.

    Parameters
    ----------
    histograms : shape (n_nodes, n_bins of the columns, 2), changed in place.
    missing : int32, shape (n_nodes, n_drawn), changed in place.
    totals : shape (n_nodes, 2): sums over all rows of each node.
    ends : int64, shape (n_nodes, n_cells): from ``group``.
    columns : int64, shape (n_drawn,).
    starts : from ``cell_starts``.
    """
    for node in range(histograms.shape[0]):
        first = 0
        for index in range(len(columns)):
            begin = starts[columns[index]]
            width = starts[columns[index] + 1] - begin - 1
            cells = histograms[node, first : first + width]
            seen = cells.sum(axis=0)
            target = ends[node, begin] - begin - 1
            for bin_id in range(width):
                end = ends[node, begin + 1 + bin_id] - begin - 1
                if end != bin_id:
                    cells[end] += cells[bin_id]
                    cells[bin_id] = 0
            if target >= 0 and missing[node, index]:
                cells[target] += totals[node] - seen
                missing[node, index] = 0
            first += width


def merge_sketch_bins(summary: Sketch, values: Floats, weights: Floats, least: int) -> Sketch:
    """Merge the bins of a sketch to at least ``least`` rows; hide the extreme values.

    A column with fewer than ``least`` values has no bins.

    Parameters
    ----------
    summary : without bins of columns of categories, whose maxima stay.
    values : float32, shape (n_rows, n_columns); NaN is missing.
    weights : float32, shape (n_rows,); rows without weight do not count.
    """
    points = []
    masses = []
    maxima = summary.maxima.copy()
    for column in range(values.shape[1]):
        lowest, mass = summary.column(column)
        present = np.sort(values[(weights > 0) & ~np.isnan(values[:, column]), column])
        if len(lowest) and len(present) < least:
            lowest = lowest[:0]
            mass = mass[:0]
            maxima[column] = np.nan
        elif len(lowest):
            below = np.append(np.searchsorted(present, lowest[1:]), len(present))
            counts = np.diff(np.concatenate(([0], below)))
            cells = np.arange(len(counts))
            starts = np.array([0, len(counts)])
            ends = np.unique(group(cells, counts[None].astype(np.int64), starts, least))
            firsts = np.concatenate(([0], ends[:-1] + 1))
            lowest = lowest[firsts].copy()
            mass = np.add.reduceat(mass, firsts)
            # Neither minimum nor maximum is disclosed.
            lowest[0] = present[least - 1]
            maxima[column] = lowest[-1]
        points.append(lowest)
        masses.append(mass.astype(np.float32))
    flat, offsets = ragged(points)
    return Sketch(flat, ragged(masses)[0], offsets, maxima)
