"""Splits of a level as every party receives them, and moving rows by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.histograms.bins import Codes
from fedapp.kernels import kernel
from fedapp.trees.sets import NO_SETS, CategorySets, goes_left_by_set, walked_sets

# A split as parties receive it: node (tree, node) is split into left and left + 1.
ROUTE = np.dtype(
    [
        ("tree", np.int32),
        ("node", np.int32),
        ("left", np.int32),
        ("column", np.int32),
        ("threshold", np.float32),
        ("default_left", np.bool_),
        ("set", np.int32),  # of a categorical split: number of the set that goes right
    ]
)

Routes = npt.NDArray[np.void]
Places = npt.NDArray[Any]  # integers: numbers of trees, or of nodes within a tree
NodeList = tuple[Places, Places]  # trees and nodes, each of shape (n_nodes,)


def route_values(
    nodes: npt.NDArray[np.int32],
    routes: Routes,
    values: npt.NDArray[np.float32],
    sets: CategorySets = NO_SETS,
) -> npt.NDArray[np.int32]:
    """Node of each row after the splits, by its values; int32, shape (n_trees, n_rows).

    Parameters
    ----------
    nodes : int32, shape (n_trees, n_rows): node of each row before.
    routes : ``ROUTE``.
    values : float32, shape (n_rows, n_columns).
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
    """``route_values`` by bins instead of values: a bin moves as a whole.

    Parameters
    ----------
    first_right : int64, shape (n_routes,): lowest bin of the column that goes right.
    codes : uint8 or uint16, shape (n_rows, n_columns).
    missing_code : the code of a missing value, or -1.
    """
    return _routed(nodes, routes, first_right, codes, missing_code, sets)


def each_once_among(wanted: NodeList, known: NodeList) -> bool:
    """Whether all nodes are among the known ones, none of them twice."""
    asked = _keys(wanted).tolist()
    once = set(asked)  # few nodes: sets are faster than numpy
    return len(once) == len(asked) and once.issubset(_keys(known).tolist())


def children_of(trees: Places, lefts: Places) -> NodeList:
    """Both children of some splits, from their left ones."""
    return np.concatenate((trees, trees)), np.concatenate((lefts, lefts + 1))


def roots_of(n_trees: int) -> NodeList:
    """The root of every tree."""
    return np.arange(n_trees), np.zeros(n_trees, dtype=np.int64)


def _keys(nodes: NodeList) -> npt.NDArray[np.int64]:
    return (nodes[0].astype(np.int64) << 32) | nodes[1].astype(np.int64)


def _routed(
    nodes: npt.NDArray[np.int32],
    routes: Routes,
    firsts: npt.NDArray[Any],
    cells: npt.NDArray[Any],
    missing: int | np.float32,
    sets: CategorySets,
) -> npt.NDArray[np.int32]:
    """Rows moved; a cell goes left if it is below its split's entry of ``firsts``."""
    moved = nodes.copy()
    lefts, columns, default_lefts = (
        np.ascontiguousarray(routes[name]) for name in ("left", "column", "default_left")
    )
    by_set, firsts = walked_sets(routes["set"], sets), np.ascontiguousarray(firsts)
    for tree in range(len(nodes)):
        # Index of each node's route, -1 for nodes that were not split.
        n_nodes = int(nodes[tree].max(initial=0)) + 1
        split_at = np.full(n_nodes, -1, dtype=np.int64)
        ids = np.flatnonzero((routes["tree"] == tree) & (routes["node"] < n_nodes))
        split_at[routes["node"][ids]] = ids
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
    """Change the nodes of one tree in place. NaN, which is not a code, differs from itself."""
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
