"""How far a model is XGBoost's, node for node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

# Relative; and absolute for leaves near 0, where gradients cancel and only the last bit of the two
# libraries' float32 sigmoids is left.
LEAF_TOLERANCE = 1e-6
NEAR_ZERO = 1e-8


def same_nodes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[int, int]:
    """Number of equal nodes of two models, and the larger number of nodes.

    Splits are equal if column, threshold or categories, default side and gain are, gains to the
    last bit; leaves if their values are close. Children are compared only below equal nodes.
    """
    models = [model["learner"]["gradient_booster"]["model"]["trees"] for model in (ours, theirs)]
    n_nodes = max(sum(len(tree["left_children"]) for tree in trees) for trees in models)
    return sum(_walk(mine, other) for mine, other in zip(*models, strict=False)), n_nodes


def _walk(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> int:
    """Count equal nodes from the root down, as nodes may be numbered differently."""
    pairs = [(0, 0)]
    n_same = 0
    sets = (_sets(ours), _sets(theirs))
    while pairs:
        mine, other = pairs.pop()
        if _node(ours, mine, sets[0]) != _node(theirs, other, sets[1]):
            continue
        if ours["left_children"][mine] == -1:
            value, other_value = _leaf(ours, mine), _leaf(theirs, other)
            n_same += bool(np.allclose(value, other_value, rtol=LEAF_TOLERANCE, atol=NEAR_ZERO))
            continue
        n_same += 1
        pairs += [
            (ours[side][mine], theirs[side][other]) for side in ("left_children", "right_children")
        ]
    return n_same


def _node(tree: Mapping[str, Any], node: int, sets: Mapping[int, list[int]]) -> tuple[Any, ...]:
    """The fields of a split that must be equal; empty for a leaf."""
    if tree["left_children"][node] == -1:
        return ()
    names = ("split_conditions", "loss_changes")
    threshold, gain = (np.float32(tree[name][node]) for name in names)
    if node in sets:
        threshold = np.float32(0)
    split = tree["split_indices"][node], int(tree["default_left"][node]), sets.get(node)
    return threshold, gain, *split


def _leaf(tree: Mapping[str, Any], leaf: int) -> Any:
    """The value of a leaf, or its vector."""
    size = int(tree["tree_param"]["size_leaf_vector"])
    if size < 2:
        return tree["split_conditions"][leaf]
    first = size * tree["right_children"][leaf]
    return tree["leaf_weights"][first : first + size]


def _sets(tree: Mapping[str, Any]) -> dict[int, list[int]]:
    """The categories that each categorical split sends right."""
    names = ("categories_nodes", "categories_segments", "categories_sizes")
    return {
        node: tree["categories"][start : start + size]
        for node, start, size in zip(*(tree[name] for name in names), strict=True)
    }
