"""Purity of leaves: how well a party could infer labels from rows that share a node."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedapp.trees.predict import Nodes


def mean_purity(labels: npt.NDArray[np.int64], nodes: Nodes) -> float:
    """Share of the majority class in a node, weighted by rows and averaged over trees.

    Source: Cheng et al. 2019 (arXiv:1901.08755), "Performance of Completely SecureBoost": the sum
    over leaves of n_i / n * p_i. ``labels`` are int64 class ids; ``nodes``, int32, shape (n_trees,
    n_rows), is where each row ends, or is last seen.
    """
    purities = []
    for tree in nodes:
        counts = np.zeros((int(tree.max(initial=0)) + 1, int(labels.max(initial=0)) + 1))
        np.add.at(counts, (tree, labels), 1)
        purities.append(float(counts.max(axis=1).sum() / len(labels)))
    return float(np.mean(purities))


def last_seen(before: Nodes, after: Nodes, splits: npt.NDArray[np.int64]) -> Nodes:
    """Nodes of rows as seen by an observer who knows only some of the last splits.

    ``before`` and ``after`` are the nodes before and after the last splits; ``splits``, shape
    (n_splits, 2), are tree and node of those.
    """
    seen = np.array(before)
    for tree, node in splits:
        rows = before[tree] == node
        seen[tree, rows] = after[tree, rows]
    return seen
