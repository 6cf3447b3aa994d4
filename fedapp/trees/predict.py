"""Walk rows down trees: split by split, as bits that can be sent, or to the leaves at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Flags, Floats, Ints
from fedapp.histograms.build import inside_of
from fedapp.kernels import frozen, inlined, kernel
from fedapp.trees.categories import NO_SET, NO_SETS, CategorySets
from fedapp.trees.model import LEAF, Ensemble, Margins, Tree, leaf_rows, stack_trees

Nodes = npt.NDArray[np.int32]  # shape (n_trees, n_rows): node of each row in each tree
Places = npt.NDArray[np.int32]  # numbers of trees, or of nodes within a tree
Bits = Flags  # rows of one node, ascending; True goes left

BATCH_ROWS = 2**16  # copied at once of a table that is in the order of its columns


def kernel_sets(numbers: npt.NDArray[Any], sets: CategorySets) -> tuple[Any, Any, Any]:
    """Arrays that ``goes_left`` reads: of each node or split the number of categories, 0 for a
    threshold, and the first byte of its set; and all bytes. The first is empty without sets.

    ``numbers`` is the set number of each. A kernel names the arrays before its loop: to read them
    from a tuple in the loop would count references.
    """
    if not len(sets):
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


def rows_of(nodes: Nodes, tree: int, node: int) -> Ints:
    """Rows of one node, ascending."""
    return np.flatnonzero(nodes[tree] == node)


def rows_at(nodes: Nodes, trees: Places, wanted: Places) -> tuple[Places, Ints]:
    """Rows of some nodes, node after node, ascending within each; and their number in each.

    ``trees`` and ``wanted``, shape (n_wanted,), name the nodes in any order.
    """
    by_node = [np.empty(0, np.int32)] * (len(trees) + 1)
    every = np.ones(nodes.shape[1], dtype=bool)
    for tree in np.unique(trees):
        places = np.flatnonzero(trees == tree)
        rows, starts = inside_of(nodes[tree], every, wanted[places])
        for place, (start, end) in zip(places.tolist(), pairwise(starts.tolist()), strict=True):
            by_node[place] = rows[start:end]
    return np.concatenate(by_node), np.array([len(rows) for rows in by_node[:-1]], np.int64)


def sides_of(
    values: Floats,
    columns: Ints,
    thresholds: Floats,
    defaults: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.integer],
    sizes: Ints,
    numbers: npt.NDArray[Any],
    sets: CategorySets,
) -> Bits:
    """Which rows go left, split after split; ``rows`` and ``sizes`` are as from ``rows_at``.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns).
    columns, thresholds, defaults : of each split.
    numbers : set number of each split, ``NO_SET`` for a threshold.
    """
    sides = np.empty(len(rows), dtype=np.bool_)
    arrays = frozen(values, rows, np.cumsum(sizes), columns, thresholds, defaults)
    _write_sides(*(*arrays, kernel_sets(numbers, sets), sides))
    return sides


@kernel
def _write_sides(
    values: Any,
    rows: Any,
    ends: Any,
    columns: Any,
    thresholds: Any,
    defaults: Any,
    sets: Any,
    sides: Any,
) -> None:
    start = 0
    widths, starts, bits = sets
    for split in range(len(ends)):
        cut, default = thresholds[split], defaults[split]
        for index in range(start, ends[split]):
            value = values[rows[index], columns[split]]
            sides[index] = goes_left(value, np.nan, cut, default, split, widths, starts, bits)
        start = ends[split]


def predict_margins(model: Ensemble, values: Floats, base_margins: Margins | None = None) -> Floats:
    """Margins, (n_rows, n_outputs): leaf values summed in float32 in the order of the trees.

    ``base_margins``, shape (n_rows,), as in ``Ensemble.starts``. ValueError if columns are missing.
    """
    if values.shape[1] < len(model.columns):
        raise ValueError(f"values must have {len(model.columns)} columns, got {values.shape[1]}")
    margins = model.starts(len(values), base_margins)
    return add_trees(margins, model.trees, values, model.sets)


def add_outputs(
    trees: Sequence[Tree],
    places: Ints,
    values: Floats,
    outputs: Floats,
    sets: CategorySets = NO_SETS,
) -> None:
    """Add the leaf value of each row in each tree, in the order of the trees.

    Parameters
    ----------
    places : int64, shape (n_trees,): column of ``outputs`` that each tree adds to, or the first.
    values : float32, shape (n_rows, n_columns); NaN is missing.
    outputs : float32, shape (n_rows, n_outputs): changed in place.
    """
    nodes, offsets = stack_trees(trees)
    walked, of_trees = _walked(nodes, sets), frozen(leaf_rows(nodes), offsets, places)
    # A walk reads rows, and kernels are compiled for these.
    size = max(1, len(values)) if values.flags.c_contiguous else BATCH_ROWS
    for start in range(0, len(values), size):
        rows = slice(start, start + size)
        read = (*of_trees, *frozen(np.ascontiguousarray(values[rows])))
        _add_outputs(*(walked, *read, outputs[rows]))


def add_trees(
    margins: Floats,
    trees: Sequence[Tree],
    values: Floats,
    sets: CategorySets = NO_SETS,
) -> Floats:
    """Margins, (n_rows, n_outputs), with leaf values added in float32, in tree order."""
    updated = margins.copy()
    places = np.arange(len(trees)) % margins.shape[1]
    if any(tree["value"].ndim > 1 for tree in trees[:1]):
        places[:] = 0
    add_outputs(trees, places, values, updated, sets)
    return updated


def find_leaves(trees: Sequence[Tree], values: Floats, sets: CategorySets = NO_SETS) -> Nodes:
    """Leaf of each row in each tree; ``values`` is float32, shape (n_rows, n_columns)."""
    leaves = np.empty((len(trees), len(values)), dtype=np.int32)
    for tree, of_tree in zip(trees, leaves, strict=True):
        _find_leaves(*(_walked(tree, sets), *frozen(values), of_tree))
    return leaves


def _walked(nodes: Tree, sets: CategorySets) -> tuple[Any, ...]:
    """Arrays that a walk reads: contiguous fields of the nodes, and the sets if any."""
    names = ("left", "column", "threshold", "default_left")
    fields = frozen(*(np.ascontiguousarray(nodes[name]) for name in names))
    return (*fields, *kernel_sets(nodes["set"], sets))


@kernel
def _leaf_of(
    values: Any,
    first: int,
    lefts: Any,
    columns: Any,
    thresholds: Any,
    defaults: Any,
    widths: Any,
    starts: Any,
    bits: Any,
) -> Any:
    """Index of the leaf that a row reaches in the tree with its root at ``first``."""
    node = first
    while lefts[node] != LEAF:
        value, cut = values[columns[node]], thresholds[node]
        is_left = goes_left(value, np.nan, cut, defaults[node], node, widths, starts, bits)
        node = first + lefts[node] + (0 if is_left else 1)
    return node


@kernel
def _add_outputs(
    nodes: Any, leaf_values: Any, offsets: Any, places: Any, values: Any, outputs: Any
) -> None:
    """Walk every row down every tree."""
    lefts, columns, cuts, defaults, widths, starts, bits = nodes
    for row in range(values.shape[0]):
        for tree in range(places.shape[0]):
            first = offsets[tree]
            leaf = _leaf_of(
                values[row], first, lefts, columns, cuts, defaults, widths, starts, bits
            )
            for output in range(leaf_values.shape[1]):
                outputs[row, places[tree] + output] += leaf_values[leaf, output]


@kernel
def _find_leaves(nodes: Any, values: Any, leaves: Any) -> None:
    """Walk every row down one tree."""
    lefts, columns, cuts, defaults, widths, starts, bits = nodes
    for row in range(values.shape[0]):
        leaves[row] = _leaf_of(values[row], 0, lefts, columns, cuts, defaults, widths, starts, bits)
