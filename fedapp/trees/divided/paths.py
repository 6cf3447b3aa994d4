"""Splits of a tree that decide on one row, as far as somebody may see them.

Somebody who knows only some of the splits knows which ones the row may reach: those that no known
one above has turned it away from. Somebody who knows the row's leaf knows its path.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.trees.model import LEAF

Lefts = npt.NDArray[Any]  # left child of each node, LEAF where it is one; the right one is the next


def open_splits(
    lefts: Lefts, known: npt.NDArray[np.int64], goes_left: npt.NDArray[np.bool_]
) -> list[int]:
    """Splits that a row may reach.

    Parameters
    ----------
    known : nodes whose split is known.
    goes_left : of each of them, whether the row goes left.

    Returns
    -------
    Nodes, each behind its parent.
    """
    sides = dict(zip(known.tolist(), goes_left.tolist(), strict=True))
    is_open, found = [0], []
    for node in is_open:  # grows while it is walked
        left = int(lefts[node])
        if left == LEAF:
            continue
        found.append(node)
        if sides.get(node, True):
            is_open.append(left)
        if not sides.get(node, False):
            is_open.append(left + 1)
    return found


def path_to(lefts: Lefts, leaf: int) -> list[tuple[int, bool]]:
    """Nodes from the root to above a leaf, and whether the way goes left there."""
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
