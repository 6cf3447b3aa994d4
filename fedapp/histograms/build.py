"""Sums of gradients by tree node, column and bin: the inner loop of boosting.

Then histograms that come from several parties: ``sum_jobs`` is the order in which encrypted sums
are made and read, and ``make_consistent`` repairs counts that carry noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Floats, Ints
from fedapp.histograms.bins import Codes, in_parts
from fedapp.histograms.fixed_point import Whole
from fedapp.kernels import frozen, kernel

Histogram = Doubles
HistogramSums = tuple[npt.NDArray[Any], npt.NDArray[np.int32]]  # see ``build_histograms``
Places = npt.NDArray[np.int32]

# Standard deviations of noise that a clear count exceeds: of 256 empty cells, none passes with a
# probability of 0.98.
CLEAR = 4.0


def build_histograms(
    codes: Codes,
    missing_code: int,
    columns: Ints,
    widths: Ints,
    gradients: npt.NDArray[Any],
    nodes: npt.NDArray[np.int32],
    wanted: npt.NDArray[np.int32],
    so_far: HistogramSums | None = None,
) -> HistogramSums:
    """Sum the gradients of the rows of some nodes of one tree.

    Each thread sums other columns, so the terms of a bin are always added in the order of the rows.

    Parameters
    ----------
    codes : uint8 or uint16, shape (n_rows, n_columns): bin of each value.
    missing_code : the code of a missing value, or -1.
    columns : int64, shape (n_drawn,): the columns to sum over.
    widths : int64, shape (n_drawn,): number of bins of each of these columns.
    gradients : float32 or int64, shape (n_rows, 2): gradient and hessian; (0, 0) excludes a row.
    nodes : int32, shape (n_rows,): the node of each row.
    wanted : int32, shape (n_wanted,): the nodes to sum for.
    so_far : sums of the rows before these, which are continued.

    Returns
    -------
    histograms : float64 (int64 for integer gradients), shape (n_wanted, sum of widths, 2), columns
        one after the other.
    missing : int32, shape (n_wanted, n_drawn): number of rows without a value.
    """
    kind = np.int64 if gradients.dtype == np.int64 else np.float64
    ends = np.append(0, np.cumsum(widths))
    codes, columns, gradients = frozen(codes, columns, gradients)
    rows, row_ends = inside_of(nodes, gradients, wanted)

    def add(first: int, last: int) -> HistogramSums:
        starts = (ends[first:last] - ends[first]).astype(np.uint64)
        if so_far is None:
            histograms = np.zeros((len(wanted), int(ends[last] - ends[first]), 2), dtype=kind)
            missing = np.zeros((len(wanted), last - first), dtype=np.int32)
        else:
            histograms = so_far[0][:, ends[first] : ends[last]].copy()
            missing = so_far[1][:, first:last].copy()
        some, flat = columns[first:last], histograms.reshape(len(wanted), -1)
        _accumulate(codes, missing_code, some, starts, gradients, rows, row_ends, flat, missing)
        return histograms, missing

    blocks = in_parts((len(columns), len(rows)), add)
    return blocks[0] if len(blocks) == 1 else joined(blocks, axis=1)


def build_all_histograms(
    codes: Codes,
    missing_code: int,
    columns: Ints,
    widths: Ints,
    gradients: npt.NDArray[Any],
    nodes: npt.NDArray[np.int32],
    wanted_trees: npt.NDArray[np.int32],
    wanted_nodes: npt.NDArray[np.int32],
    so_far: HistogramSums | None = None,
) -> HistogramSums:
    """``build_histograms`` for nodes of several trees, in the order of the wanted nodes.

    Parameters
    ----------
    gradients : float32 or int64, shape (n_trees, n_rows, 2).
    nodes : int32, shape (n_trees, n_rows).
    wanted_trees, wanted_nodes : int32, shape (n_wanted,), n_wanted > 0; trees ascending.
    """
    by_tree = []
    for tree in np.unique(wanted_trees):
        is_of_tree = wanted_trees == tree
        before = so_far and (so_far[0][is_of_tree], so_far[1][is_of_tree])
        rows = gradients[tree], nodes[tree], wanted_nodes[is_of_tree]
        by_tree.append(build_histograms(codes, missing_code, columns, widths, *rows, before))
    return by_tree[0] if len(by_tree) == 1 else joined(by_tree)


def joined(parts: Sequence[HistogramSums], axis: int = 0) -> HistogramSums:
    """Sums of several lists of nodes, or of columns with axis 1."""
    histograms, missing = (np.concatenate(some, axis) for some in zip(*parts, strict=True))
    return histograms, missing


def build_vector_histograms(
    codes: Codes,
    missing_code: int,
    columns: Ints,
    widths: Ints,
    gradients: Floats,
    nodes: npt.NDArray[np.int32],
    wanted_trees: npt.NDArray[np.int32],
    wanted_nodes: npt.NDArray[np.int32],
) -> tuple[Histogram, npt.NDArray[np.int32]]:
    """``build_all_histograms`` of several outputs, whose rows are in the nodes of one tree.

    ``gradients`` is float32, shape (n_outputs, n_rows, 2), and ``nodes`` int32, (1, n_rows); the
    sums are float64, shape (n_wanted, sum of widths, n_outputs, 2).
    """
    sums = [
        build_histograms(codes, missing_code, columns, widths, of_output, nodes[0], wanted_nodes)
        for of_output in gradients
    ]
    return np.stack([histogram for histogram, _ in sums], axis=2), sums[0][1]


def slots_by_node(
    nodes: npt.NDArray[np.int32], wanted: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """Index of every node among the wanted ones, -1 for others; ``slots[nodes]`` is by row."""
    slots = np.full(max(int(nodes.max(initial=0)), int(wanted.max(initial=0))) + 1, -1, np.int32)
    slots[wanted] = np.arange(len(wanted), dtype=np.int32)
    return slots


def inside_of(nodes: Places, counted: npt.NDArray[Any], wanted: Places) -> tuple[Places, Ints]:
    """Rows of some nodes of one tree, node after node, ascending within each.

    Parameters
    ----------
    nodes : int32, shape (n_rows,), >= 0: node of each row.
    counted : shape (n_rows,) or (n_rows, 2): rows of which all numbers are 0 are in no node.

    Returns
    -------
    rows : int32, shape (n_inside,).
    starts : int64, shape (n_wanted + 1,): start of each node's rows, and the end of the last.
    """
    counted = counted if counted.ndim > 1 else counted[:, None]
    nodes, counted, slots = frozen(nodes, counted, slots_by_node(nodes, wanted))
    rows = np.empty(len(nodes), dtype=np.int32)
    starts = _sort_rows(nodes, counted, slots, len(wanted), rows)
    return rows[: starts[-1]], starts


@kernel
def _sort_rows(nodes: Any, counted: Any, slots: Any, n_slots: int, rows: Any) -> Any:
    """Counting sort of the counted rows by slot, written to ``rows``; the start of each slot's."""
    starts, last = np.zeros(n_slots + 1, dtype=np.int64), counted.shape[1] - 1
    for row in range(nodes.shape[0]):
        slot = slots[nodes[row]]
        if slot >= 0 and (counted[row, 0] != 0 or counted[row, last] != 0):
            starts[slot + 1] += 1
    for slot in range(n_slots):  # np.cumsum takes numba 0.1 s to load
        starts[slot + 1] += starts[slot]
    ends = starts[:-1].copy()
    for row in range(nodes.shape[0]):
        slot = slots[nodes[row]]
        if slot >= 0 and (counted[row, 0] != 0 or counted[row, last] != 0):
            rows[ends[slot]] = row
            ends[slot] += 1
    return starts


@kernel
def _accumulate(
    codes: Any,
    missing_code: int,
    columns: Any,
    starts: Any,
    gradients: Any,
    rows: Any,
    ends: Any,
    histograms: Any,
    missing: Any,
) -> None:
    # Node by node, so that its bins stay in the cache; rows in order, so that the same rows always
    # give the same sums. Gradient and hessian of bin b are at 2 b and 2 b + 1.
    one = np.uint64(1)
    for slot in range(ends.shape[0] - 1):
        sums, absent = histograms[slot], missing[slot]
        for place_of_row in range(ends[slot], ends[slot + 1]):
            row = rows[place_of_row]
            gradient, hessian = gradients[row, 0], gradients[row, 1]
            for drawn in range(columns.shape[0]):
                code = codes[row, columns[drawn]]
                if code == missing_code:
                    absent[drawn] += 1
                else:
                    # Unsigned, so that numba does not check for a negative index.
                    cell = (starts[drawn] + np.uint64(code)) << one
                    sums[cell] += gradient
                    sums[cell + one] += hessian


@kernel
def add_histograms(total: Any, added: Any, places: Any) -> None:
    """Add histograms into another layout: bin b of ``added`` goes to ``places[b]`` of ``total``.

    Parameters
    ----------
    total : float64, shape (n_nodes, n_bins, 2), changed in place.
    added : float64, shape (n_nodes, n_added_bins, 2).
    places : int64, shape (n_added_bins,).
    """
    for node in range(added.shape[0]):
        for bin_id in range(added.shape[1]):
            total[node, places[bin_id], 0] += added[node, bin_id, 0]
            total[node, places[bin_id], 1] += added[node, bin_id, 1]


def sum_jobs(
    n_outputs: Sequence[int],
    level: int,
    trees: npt.NDArray[np.int32],
    nodes: npt.NDArray[np.int32],
    has_one_tree: bool = False,
) -> Iterator[tuple[int, int, npt.NDArray[np.int32]]]:
    """Order in which wanted nodes are summed, so that both sides read the sums alike.

    Yields the group of trees whose gradients share ciphertexts, a tree, and its nodes. Groups have
    ``n_outputs`` each. At the root all trees of a group have the same rows, so the first tree
    represents all. With one tree for all outputs, each group sums for its nodes.
    """
    first = 0
    for number, size in enumerate(n_outputs):
        members = range(first, first + size)
        first += size
        for tree in [0] if has_one_tree else members if level else members[:1]:
            wanted = nodes[trees == tree]
            if len(wanted):
                yield number, tree, wanted


# Histograms with noise


def make_consistent(noised: Whole, masses: Whole | None, deviation: float) -> Whole:
    """Consistent counts for a ``Descent``: int64, shape of ``noised``, >= 0, rows add up to masses.

    The weight of a prefix is divided between both halves of its cells in proportion to their
    counts, then each half between its halves, down to single cells. A count that is not clearly
    above its noise is that of its halves, in the end of its cells; so a value that many rows have
    is seen among cells without any. If neither half has a count, both get the same: cells too light
    to be distinguished from noise are treated as one. So cuts always ascend.

    Parameters
    ----------
    noised : int64, shape (n_prefixes, n_cells), n_cells a power of two.
    masses : int64, shape (n_prefixes,), >= 0: weight of each prefix; None if unknown.
    deviation : standard deviation of the noise of a cell.
    """
    n_prefixes, n_cells = noised.shape
    sums, levels = noised, [_clear(noised, deviation)]  # the latter from single cells up
    while (n_halves := sums.shape[1] // 2) > 0:
        halves = n_prefixes, n_halves, 2
        sums, below = sums.reshape(halves).sum(axis=-1), levels[-1].reshape(halves).sum(axis=-1)
        spread = deviation * math.sqrt(n_cells / n_halves)
        levels.append(np.maximum(below, _clear(sums, spread)))
    whole = levels.pop()
    consistent: Whole = whole if masses is None else masses[:, None]
    for counts in reversed(levels):
        n_halves = counts.shape[1]
        shares = counts.reshape(n_prefixes, n_halves // 2, 2).astype(np.float64)
        shares[~shares.any(axis=-1)] = 1
        lefts = np.floor(consistent * (shares[..., 0] / shares.sum(axis=-1))).astype(np.int64)
        rights = consistent - lefts
        consistent = np.stack((lefts, rights), axis=-1).reshape(n_prefixes, n_halves)
    return consistent


def _clear(counts: Whole, deviation: float) -> Whole:
    """The counts, 0 where they may be noise."""
    clear: Whole = np.where(counts > CLEAR * deviation, counts, 0)
    return clear
