"""Splits of a level as every party is told them, and rows moved on by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.histograms.bins import Codes
from fedapp.kernels import kernel
from fedapp.trees.sets import NO_SETS, CategorySets, goes_left_by_set, walked_sets

# A split as it is told to whoever routes rows: of node (tree, node), into left and left + 1.
ROUTE = np.dtype(
    [
        ("tree", np.int32),
        ("node", np.int32),
        ("left", np.int32),
        ("column", np.int32),
        ("threshold", np.float32),
        ("default_left", np.bool_),
        ("set", np.int32),  # number of the set that goes right, where there is no threshold
    ]
)

Routes = npt.NDArray[np.void]
Places = npt.NDArray[Any]  # integers: a tree, or a node of one, each
NodeList = tuple[Places, Places]  # trees and nodes, each of shape (n_nodes,)


def route_values(
    nodes: npt.NDArray[np.int32],
    routes: Routes,
    values: npt.NDArray[np.float32],
    sets: CategorySets = NO_SETS,
) -> npt.NDArray[np.int32]:
    """Move rows on to the children of the nodes that were split, by their values.

    Parameters
    ----------
    nodes : int32, shape (n_trees, n_rows): where each row is in each tree.
    routes : ``ROUTE``, the splits.
    values : float32, shape (n_rows, n_columns).
    sets : of the categorical splits.

    Returns
    -------
    int32, shape (n_trees, n_rows).
    """
    return _routed(nodes, routes, routes["threshold"], values, np.float32(np.nan), sets)


def route_codes(
    nodes: npt.NDArray[np.int32],
    routes: Routes,
    first_right: npt.NDArray[np.int64],
    codes: Codes,
    missing_code: int,
    sets: CategorySets = NO_SETS,
) -> npt.NDArray[np.int32]:
    """Move rows on to the children of the nodes that were split, by their bins: a bin moves whole.

    Parameters
    ----------
    nodes : int32, shape (n_trees, n_rows): where each row is in each tree.
    routes : ``ROUTE``, the splits.
    first_right : int64, shape (n_routes,): lowest bin of the column that goes right.
    codes : uint8 or uint16, shape (n_rows, n_columns).
    missing_code : the code of a missing value, or -1.
    sets : of the categorical splits; a category is a bin.

    Returns
    -------
    int32, shape (n_trees, n_rows).
    """
    return _routed(nodes, routes, first_right, codes, missing_code, sets)


def each_once_among(wanted: NodeList, known: NodeList) -> bool:
    """Whether nodes are all among the known ones, none of them twice."""
    asked = _keys(wanted).tolist()
    once = set(asked)  # they are few: sets take less time than numpy's forms
    return len(once) == len(asked) and once.issubset(_keys(known).tolist())


def children_of(trees: Places, lefts: Places) -> NodeList:
    """Both children of some splits, given their left ones."""
    return np.concatenate((trees, trees)), np.concatenate((lefts, lefts + 1))


def roots_of(n_trees: int) -> NodeList:
    """The root of every tree."""
    return np.arange(n_trees), np.zeros(n_trees, dtype=np.int64)


def _keys(nodes: NodeList) -> npt.NDArray[np.int64]:
    """A number for each node of a round."""
    return (nodes[0].astype(np.int64) << 32) | nodes[1].astype(np.int64)


def _routed(
    nodes: npt.NDArray[np.int32],
    routes: Routes,
    firsts: npt.NDArray[Any],
    cells: npt.NDArray[Any],
    missing: int | np.float32,
    sets: CategorySets,
) -> npt.NDArray[np.int32]:
    """Rows moved on; a cell below the first one of its split that goes right goes left."""
    moved = nodes.copy()
    lefts, columns, default_lefts = (
        np.ascontiguousarray(routes[name]) for name in ("left", "column", "default_left")
    )
    by_set, firsts = walked_sets(routes["set"], sets), np.ascontiguousarray(firsts)
    for tree in range(len(nodes)):
        # Place of each node's split among the routes, -1 where it was not split.
        n_nodes = int(nodes[tree].max(initial=0)) + 1
        split_at = np.full(n_nodes, -1, dtype=np.int64)
        known = np.flatnonzero((routes["tree"] == tree) & (routes["node"] < n_nodes))
        split_at[routes["node"][known]] = known
        _move(moved[tree], split_at, lefts, columns, default_lefts, firsts, cells, missing, by_set)
    return moved


@kernel
def _move(
    nodes: Any,
    split_at: Any,
    lefts: Any,
    columns: Any,
    default_lefts: Any,
    firsts: Any,
    cells: Any,
    missing: Any,
    sets: Any,
) -> None:
    """Change the nodes of one tree in place. NaN, which is no code, differs from itself."""
    for row in range(nodes.shape[0]):
        split = split_at[nodes[row]]
        if split < 0:
            continue
        cell = cells[row, columns[split]]
        if cell == missing or cell != cell:
            goes_left = default_lefts[split]
        elif len(sets) and sets[0][split] >= 0:
            goes_left = goes_left_by_set(cell, default_lefts[split], sets[0][split], sets)
        else:
            goes_left = cell < firsts[split]
        nodes[row] = lefts[split] + (0 if goes_left else 1)
