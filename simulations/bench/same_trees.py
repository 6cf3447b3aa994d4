"""Whether two models in XGBoost's JSON are the same, node for node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

# Relative; and absolute, for leaves near 0: there the gradients cancel, and what is left shows that
# float32 sigmoids of two libraries differ in their last bit.
LEAF_TOLERANCE, NEAR_ZERO = 1e-6, 1e-8


def count_same_nodes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> int:
    """Number of nodes of two equal models.

    Raises
    ------
    ValueError : they differ in a tree's shape, a column, threshold, default side or leaf.
    """
    pairs = zip(_trees(ours), _trees(theirs), strict=True)
    return sum(_walk(mine, other) for mine, other in pairs)


def _trees(model: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = model["learner"]["gradient_booster"]["model"]["trees"]
    return found


def _walk(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> int:
    """From the roots down, for nodes may be numbered differently."""
    pairs, n_nodes = [(0, 0)], 0
    while pairs:
        mine, other = pairs.pop()
        n_nodes += 1
        lefts = ours["left_children"][mine], theirs["left_children"][other]
        if _node(ours, mine) != _node(theirs, other):
            raise ValueError(f"node {mine} must be {_node(theirs, other)}, got {_node(ours, mine)}")
        if lefts[0] == -1:
            _check_leaf(ours["split_conditions"][mine], theirs["split_conditions"][other])
        else:
            rights = ours["right_children"][mine], theirs["right_children"][other]
            pairs += [lefts, rights]
    return n_nodes


def _node(tree: Mapping[str, Any], node: int) -> tuple[Any, ...]:
    """Column, threshold and default side; of a leaf, nothing."""
    if tree["left_children"][node] == -1:
        return ()
    threshold = np.float32(tree["split_conditions"][node])
    return tree["split_indices"][node], threshold, int(tree["default_left"][node])


def _check_leaf(ours: float, theirs: float) -> None:
    if not np.isclose(ours, theirs, rtol=LEAF_TOLERANCE, atol=NEAR_ZERO):
        raise ValueError(f"leaf must be {theirs}, got {ours}")
