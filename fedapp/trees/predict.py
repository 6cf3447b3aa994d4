"""Walk rows down trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.kernels import frozen, kernel
from fedapp.trees.model import LEAF, Ensemble, Margins, Tree, stack_trees
from fedapp.trees.sets import NO_SETS, CategorySets, goes_left_by_set, walked_sets


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
    places : int64, shape (n_trees,): column of ``outputs`` that each tree adds to.
    values : float32, shape (n_rows, n_columns); NaN is missing.
    outputs : float32, shape (n_rows, n_outputs): changed in place.
    """
    nodes, offsets = stack_trees(trees)
    read = (np.ascontiguousarray(nodes["value"]), offsets, places, values)
    _add_outputs(*(*_walked(nodes, sets), *frozen(*read), outputs))


def add_trees(
    margins: npt.NDArray[np.float32],
    trees: Sequence[Tree],
    values: npt.NDArray[np.float32],
    sets: CategorySets = NO_SETS,
) -> npt.NDArray[np.float32]:
    """Margins, (n_rows, n_outputs), with leaf values added in float32, in tree order."""
    updated = margins.copy()
    add_outputs(trees, np.arange(len(trees)) % margins.shape[1], values, updated, sets)
    return updated


def find_leaves(
    tree: npt.NDArray[Any],
    values: npt.NDArray[np.float32],
    leaves: npt.NDArray[np.int32],
    sets: CategorySets = NO_SETS,
) -> None:
    """Write the leaf of each row into ``leaves``; ``tree`` is of ``NODE`` or ``BRANCH``."""
    _find_leaves(*(*_walked(tree, sets), *frozen(values), leaves))


def _walked(nodes: npt.NDArray[Any], sets: CategorySets) -> list[Any]:
    """Arrays that a walk reads: contiguous fields of the nodes, and the sets if any."""
    names = ("left", "column", "threshold", "default_left")
    fields = frozen(*(np.ascontiguousarray(nodes[name]) for name in names))
    return [*fields, walked_sets(nodes["set"] if len(sets) else None, sets)]


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
    lefts: Any,
    columns: Any,
    thresholds: Any,
    default_lefts: Any,
    sets: Any,
    leaf_values: Any,
    offsets: Any,
    places: Any,
    values: Any,
    outputs: Any,
) -> None:
    """Walk every row down every tree."""
    for row in range(values.shape[0]):
        for tree in range(places.shape[0]):
            first, walked = offsets[tree], (lefts, columns, thresholds, default_lefts, sets)
            outputs[row, places[tree]] += leaf_values[_leaf_of(values[row], first, *walked)]


@kernel
def _find_leaves(
    lefts: Any,
    columns: Any,
    thresholds: Any,
    default_lefts: Any,
    sets: Any,
    values: Any,
    leaves: Any,
) -> None:
    """Walk every row down one tree."""
    for row in range(values.shape[0]):
        walked = lefts, columns, thresholds, default_lefts, sets
        leaves[row] = _leaf_of(values[row], 0, *walked)
