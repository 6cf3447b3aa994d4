"""Walk rows down trees: split by split, as bits that can be sent, or to the leaves at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.kernels import frozen, kernel
from fedapp.trees.model import LEAF, Ensemble, Margins, Tree, leaf_rows, stack_trees
from fedapp.trees.sets import NO_SETS, CategorySets, goes_left_by_set, kernel_sets

Nodes = npt.NDArray[np.int32]  # shape (n_trees, n_rows): node of each row in each tree
Places = npt.NDArray[np.int32]  # numbers of trees, or of nodes within a tree
Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[np.bool_]  # rows of one node, ascending; True goes left


def goes_left(
    column: npt.NDArray[np.float32],
    threshold: np.float32 | npt.NDArray[np.float32],
    default_left: bool | npt.NDArray[np.bool_],
) -> npt.NDArray[np.bool_]:
    """Whether each value goes left, by one split or by a split per value; NaN by default side."""
    sides: npt.NDArray[np.bool_] = np.where(np.isnan(column), default_left, column < threshold)
    return sides


def rows_of(nodes: Nodes, tree: int, node: int) -> npt.NDArray[np.int64]:
    """Rows of one node, ascending."""
    return np.flatnonzero(nodes[tree] == node)


def slots_of(nodes: Nodes, trees: Places, wanted: Places) -> tuple[Nodes, Ints]:
    """Which of some nodes each row is in, and the number of rows of each of these nodes.

    ``trees`` and ``wanted``, shape (n_wanted,), name the nodes in any order. Returns slots, shape
    (n_trees, n_rows), indices among the nodes or -1; and sizes, shape (n_wanted,).
    """
    slots = np.full(nodes.shape, -1, dtype=np.int32)
    numbers = np.full(int(nodes.max(initial=0)) + 1, -1, dtype=np.int32)
    sizes = np.zeros(len(wanted) + 1, dtype=np.int64)  # the last counts slot -1
    order = np.argsort(trees, kind="stable")
    order = order[wanted[order] < len(numbers)]  # others have no rows
    _find(*(*frozen(nodes, trees[order], wanted[order], order), numbers, slots, sizes))
    return slots, sizes[:-1]


@kernel
def _find(
    nodes: Any, trees: Any, wanted: Any, places: Any, numbers: Any, slots: Any, sizes: Any
) -> None:
    end = 0
    while end < len(trees):
        tree, first = trees[end], end
        while end < len(trees) and trees[end] == tree:
            numbers[wanted[end]] = places[end]
            end += 1
        for row in range(nodes.shape[1]):
            slots[tree, row] = numbers[nodes[tree, row]]
            sizes[slots[tree, row]] += 1
        for index in range(first, end):
            numbers[wanted[index]] = -1


def sides_of(
    values: npt.NDArray[np.float32],
    columns: Ints,
    thresholds: npt.NDArray[np.float32],
    defaults: npt.NDArray[np.uint8],
    slots: Nodes,
    sizes: Ints,
    numbers: npt.NDArray[Any] | None = None,
    sets: CategorySets = NO_SETS,
) -> Bits:
    """Which rows go left: one bit per row of the nodes, node by node, rows ascending.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns).
    columns, thresholds, defaults : of the split of each node.
    slots, sizes : see ``slots_of``.
    numbers : set number of each split, ``NO_SET`` for a threshold; None if all have thresholds.
    """
    sides = np.empty(sizes.sum(), dtype=np.bool_)
    values, slots, *splits = frozen(values, slots, columns, thresholds, defaults)
    _cut(values, slots, tuple(splits), kernel_sets(numbers, sets), np.cumsum(sizes) - sizes, sides)
    return sides


@kernel
def _cut(values: Any, slots: Any, splits: Any, sets: Any, ends: Any, sides: Any) -> None:
    columns, thresholds, defaults = splits
    for tree in range(slots.shape[0]):
        for row in range(slots.shape[1]):
            slot = slots[tree, row]
            if slot >= 0:
                value = values[row, columns[slot]]
                if len(sets) and sets[0][slot] >= 0:
                    left = goes_left_by_set(value, defaults[slot], sets[0][slot], sets)
                else:
                    left = defaults[slot] if np.isnan(value) else value < thresholds[slot]
                sides[ends[slot]] = left
                ends[slot] += 1


def move_rows(nodes: Nodes, lefts: Places, slots: Nodes, firsts: Ints, sides: Bits) -> Nodes:
    """The nodes of rows after some splits.

    Parameters
    ----------
    lefts : int32, shape (n_splits,): left child of each; the right child is the next.
    slots : of the split nodes, see ``slots_of``.
    firsts : int64, shape (n_splits,): where the bits of each split begin in ``sides``.
    """
    children = nodes.copy()
    slots, sides, lefts = frozen(slots, sides, np.ascontiguousarray(lefts))
    _move(slots, firsts.copy(), sides, lefts, children)
    return children


@kernel
def _move(slots: Any, ends: Any, sides: Any, lefts: Any, nodes: Any) -> None:
    for tree in range(slots.shape[0]):
        for row in range(slots.shape[1]):
            slot = slots[tree, row]
            if slot >= 0:
                nodes[tree, row] = lefts[slot] if sides[ends[slot]] else lefts[slot] + 1
                ends[slot] += 1


def predict_margins(
    model: Ensemble, values: npt.NDArray[np.float32], base_margins: Margins | None = None
) -> npt.NDArray[np.float32]:
    """Margins, (n_rows, n_outputs): leaf values summed in float32 in the order of the trees.

    ``base_margins``, shape (n_rows,), as in ``Ensemble.starts``. ValueError if columns are missing.
    """
    if values.shape[1] < len(model.columns):
        raise ValueError(f"values must have {len(model.columns)} columns, got {values.shape[1]}")
    margins = model.starts(len(values), base_margins)
    return add_trees(margins, model.trees, values, model.sets)


def add_outputs(
    trees: Sequence[Tree],
    places: npt.NDArray[np.int64],
    values: npt.NDArray[np.float32],
    outputs: npt.NDArray[np.float32],
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
    read = frozen(leaf_rows(nodes), offsets, places, values)
    _add_outputs(*(_walked(nodes, sets), *read, outputs))


def add_trees(
    margins: npt.NDArray[np.float32],
    trees: Sequence[Tree],
    values: npt.NDArray[np.float32],
    sets: CategorySets = NO_SETS,
) -> npt.NDArray[np.float32]:
    """Margins, (n_rows, n_outputs), with leaf values added in float32, in tree order."""
    updated = margins.copy()
    places = np.arange(len(trees)) % margins.shape[1]
    if any(tree["value"].ndim > 1 for tree in trees[:1]):
        places[:] = 0
    add_outputs(trees, places, values, updated, sets)
    return updated


def find_leaves(
    tree: npt.NDArray[Any],
    values: npt.NDArray[np.float32],
    leaves: npt.NDArray[np.int32],
    sets: CategorySets = NO_SETS,
) -> None:
    """Write the leaf of each row of a tree into ``leaves``."""
    _find_leaves(*(_walked(tree, sets), *frozen(values), leaves))


def _walked(nodes: Tree, sets: CategorySets) -> tuple[Any, ...]:
    """Arrays that a walk reads: contiguous fields of the nodes, and the sets if any."""
    names = ("left", "column", "threshold", "default_left")
    fields = frozen(*(np.ascontiguousarray(nodes[name]) for name in names))
    return (*fields, kernel_sets(nodes["set"] if len(sets) else None, sets))


@kernel
def _leaf_of(
    values: Any,
    first: int,
    lefts: Any,
    columns: Any,
    thresholds: Any,
    default_lefts: Any,
    sets: Any,
) -> Any:
    """Index of the leaf that a row reaches in the tree with its root at ``first``."""
    node = first
    while lefts[node] != LEAF:
        value = values[columns[node]]
        if len(sets) and sets[0][node] >= 0:
            goes_left = goes_left_by_set(value, default_lefts[node], sets[0][node], sets)
        else:
            goes_left = default_lefts[node] if np.isnan(value) else value < thresholds[node]
        node = first + lefts[node] + (0 if goes_left else 1)
    return node


@kernel
def _add_outputs(
    nodes: Any, leaf_values: Any, offsets: Any, places: Any, values: Any, outputs: Any
) -> None:
    """Walk every row down every tree."""
    lefts, columns, thresholds, default_lefts, sets = nodes
    for row in range(values.shape[0]):
        for tree in range(places.shape[0]):
            first = offsets[tree]
            leaf = _leaf_of(values[row], first, lefts, columns, thresholds, default_lefts, sets)
            for output in range(leaf_values.shape[1]):
                outputs[row, places[tree] + output] += leaf_values[leaf, output]


@kernel
def _find_leaves(nodes: Any, values: Any, leaves: Any) -> None:
    """Walk every row down one tree."""
    lefts, columns, thresholds, default_lefts, sets = nodes
    for row in range(values.shape[0]):
        leaves[row] = _leaf_of(values[row], 0, lefts, columns, thresholds, default_lefts, sets)
