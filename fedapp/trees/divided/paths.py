"""Splits of a tree that decide about one row, as an observer can see them.

Knowing only some splits, an observer knows which ones the row may reach: those that no known split
above excludes. Knowing the row's leaf, an observer knows its path.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.trees.model import LEAF

Lefts = npt.NDArray[Any]  # left child of each node, LEAF at a leaf; the right child is the next


def open_splits(
    lefts: Lefts, known: npt.NDArray[np.int64], goes_left: npt.NDArray[np.bool_]
) -> list[int]:
    """Splits that a row may reach, each after its parent; ``goes_left`` is by known node."""
    sides = dict(zip(known.tolist(), goes_left.tolist(), strict=True))
    reachable, splits = [0], []
    for node in reachable:  # the list grows in the loop
        left = int(lefts[node])
        if left == LEAF:
            continue
        splits.append(node)
        if sides.get(node, True):
            reachable.append(left)
        if not sides.get(node, False):
            reachable.append(left + 1)
    return splits


def path_to(lefts: Lefts, leaf: int) -> list[tuple[int, bool]]:
    """Nodes from the root to above a leaf, and whether the path goes left there."""
    parents = {}
    for node in np.flatnonzero(lefts != LEAF).tolist():
        left = int(lefts[node])
        parents[left], parents[left + 1] = (node, True), (node, False)
    path = []
    node = leaf
    while node:
        path.append(parents[node])
        node = parents[node][0]
    return path[::-1]
