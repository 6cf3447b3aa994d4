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
    ValueError : they differ.
    """
    n_same, n_nodes = same_nodes(ours, theirs)
    if n_same < n_nodes:
        raise ValueError(f"nodes must be the same, got {n_same} of {n_nodes} equal")
    return n_nodes


def same_nodes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[int, int]:
    """Nodes of two models that are equal, and the larger number of nodes.

    Nodes are equal where column, threshold or categories, default side and gain are, gains to the
    last bit; leaves where their values are. Children are compared below equal nodes only.
    """
    models = _trees(ours), _trees(theirs)
    n_nodes = max(sum(len(tree["left_children"]) for tree in trees) for trees in models)
    return sum(_walk(mine, other) for mine, other in zip(*models, strict=False)), n_nodes


def _trees(model: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = model["learner"]["gradient_booster"]["model"]["trees"]
    return found


def _walk(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> int:
    """Equal nodes, from the root down, for nodes may be numbered differently."""
    pairs, n_same, sets = [(0, 0)], 0, (_sets(ours), _sets(theirs))
    while pairs:
        mine, other = pairs.pop()
        if _node(ours, mine, sets[0]) != _node(theirs, other, sets[1]):
            continue
        if ours["left_children"][mine] == -1:
            values = ours["split_conditions"][mine], theirs["split_conditions"][other]
            n_same += bool(np.isclose(*values, rtol=LEAF_TOLERANCE, atol=NEAR_ZERO))
            continue
        n_same += 1
        pairs += [
            (ours[side][mine], theirs[side][other]) for side in ("left_children", "right_children")
        ]
    return n_same


def _node(tree: Mapping[str, Any], node: int, sets: Mapping[int, list[int]]) -> tuple[Any, ...]:
    """What must be equal of a split; of a leaf, nothing."""
    if tree["left_children"][node] == -1:
        return ()
    kept = ("split_conditions", "loss_changes")
    threshold, gain = (np.float32(tree[name][node]) for name in kept)
    if node in sets:
        threshold = np.float32(0)
    split = tree["split_indices"][node], int(tree["default_left"][node]), sets.get(node)
    return threshold, gain, *split


def _sets(tree: Mapping[str, Any]) -> dict[int, list[int]]:
    """The categories that each categorical split sends right."""
    kept = (tree[name] for name in ("categories_nodes", "categories_segments", "categories_sizes"))
    return {
        node: tree["categories"][start : start + size]
        for node, start, size in zip(*kept, strict=True)
    }
