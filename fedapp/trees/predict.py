"""Walk rows down trees."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from fedapp.histograms.bins import Codes
from fedapp.trees.grow import Routes
from fedapp.trees.model import LEAF, Ensemble, stack_trees


def predict_margins(model: Ensemble, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Sum of the leaf values of each row, added in float32 in the order of the trees.

    Parameters
    ----------
    model : the trees.
    values : float32, shape (n_rows, n_columns); NaN is missing.

    Returns
    -------
    float32, shape (n_rows, n_outputs).
    """
    margins = np.full((len(values), model.n_outputs), model.base_margin, dtype=np.float32)
    nodes, offsets = stack_trees(model.trees)
    _add_leaves(
        np.ascontiguousarray(nodes["left"]),
        np.ascontiguousarray(nodes["column"]),
        np.ascontiguousarray(nodes["threshold"]),
        np.ascontiguousarray(nodes["default_left"]),
        np.ascontiguousarray(nodes["value"]),
        offsets,
        values,
        margins,
    )
    return margins


@numba.njit(cache=True, nogil=True)
def _add_leaves(
    lefts: Any,
    columns: Any,
    thresholds: Any,
    default_lefts: Any,
    leaf_values: Any,
    offsets: Any,
    values: Any,
    margins: Any,
) -> None:
    """Add every tree's leaf value to the margin of its output."""
    for row in range(values.shape[0]):
        for tree in range(offsets.shape[0] - 1):
            node = offsets[tree]
            while lefts[node] != LEAF:
                value = values[row, columns[node]]
                goes_left = default_lefts[node] if np.isnan(value) else value < thresholds[node]
                node = offsets[tree] + lefts[node] + (0 if goes_left else 1)
            margins[row, tree % margins.shape[1]] += leaf_values[node]


def route_values(
    nodes: npt.NDArray[np.int32], routes: Routes, values: npt.NDArray[np.float32]
) -> npt.NDArray[np.int32]:
    """Move rows on to the children of the nodes that were split, by their values.

    Parameters
    ----------
    nodes : int32, shape (n_trees, n_rows): where each row is in each tree.
    routes : ``ROUTE``, the splits.
    values : float32, shape (n_rows, n_columns).

    Returns
    -------
    int32, shape (n_trees, n_rows).
    """
    moved = nodes.copy()
    for tree in range(len(nodes)):
        _move_values(
            moved[tree],
            _splits_of(tree, routes, nodes),
            np.ascontiguousarray(routes["left"]),
            np.ascontiguousarray(routes["column"]),
            np.ascontiguousarray(routes["default_left"]),
            np.ascontiguousarray(routes["threshold"]),
            values,
        )
    return moved


def route_codes(
    nodes: npt.NDArray[np.int32],
    routes: Routes,
    first_right: npt.NDArray[np.int64],
    codes: Codes,
    missing_code: int,
) -> npt.NDArray[np.int32]:
    """Move rows on to the children of the nodes that were split, by their bins: a bin moves whole.

    Parameters
    ----------
    nodes : int32, shape (n_trees, n_rows): where each row is in each tree.
    routes : ``ROUTE``, the splits.
    first_right : int64, shape (n_routes,): lowest bin of the column that goes right.
    codes : uint8 or uint16, shape (n_rows, n_columns).
    missing_code : the code of a missing value, or -1.

    Returns
    -------
    int32, shape (n_trees, n_rows).
    """
    moved = nodes.copy()
    for tree in range(len(nodes)):
        _move_codes(
            moved[tree],
            _splits_of(tree, routes, nodes),
            np.ascontiguousarray(routes["left"]),
            np.ascontiguousarray(routes["column"]),
            np.ascontiguousarray(routes["default_left"]),
            first_right,
            codes,
            missing_code,
        )
    return moved


def _splits_of(tree: int, routes: Routes, nodes: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Place of each node's split among the routes, -1 where it was not split."""
    n_nodes = int(nodes.max(initial=0)) + 1
    split_at = np.full(n_nodes, -1, dtype=np.int64)
    known = np.flatnonzero((routes["tree"] == tree) & (routes["node"] < n_nodes))
    split_at[routes["node"][known]] = known
    return split_at


@numba.njit(cache=True, nogil=True)
def _move_values(
    nodes: Any,
    split_at: Any,
    lefts: Any,
    columns: Any,
    default_lefts: Any,
    thresholds: Any,
    values: Any,
) -> None:
    """Change the nodes of one tree in place."""
    for row in range(nodes.shape[0]):
        split = split_at[nodes[row]]
        if split < 0:
            continue
        value = values[row, columns[split]]
        goes_left = default_lefts[split] if np.isnan(value) else value < thresholds[split]
        nodes[row] = lefts[split] + (0 if goes_left else 1)


@numba.njit(cache=True, nogil=True)
def _move_codes(
    nodes: Any,
    split_at: Any,
    lefts: Any,
    columns: Any,
    default_lefts: Any,
    first_right: Any,
    codes: Any,
    missing_code: int,
) -> None:
    """Change the nodes of one tree in place."""
    for row in range(nodes.shape[0]):
        split = split_at[nodes[row]]
        if split < 0:
            continue
        code = codes[row, columns[split]]
        goes_left = default_lefts[split] if code == missing_code else code < first_right[split]
        nodes[row] = lefts[split] + (0 if goes_left else 1)
