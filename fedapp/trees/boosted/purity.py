"""How pure leaves are, and what a party can tell of labels from the rows it sees together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedapp.trees.sides import Nodes


def mean_purity(labels: npt.NDArray[np.int64], nodes: Nodes) -> float:
    """Share of the majority class among rows that are in one node, weighted by rows.

    Source: Cheng et al. 2019 (arXiv:1901.08755), "Performance of Completely SecureBoost": the sum
    over leaves of n_i / n * p_i.

    Parameters
    ----------
    labels : int64, shape (n_rows,): class ids.
    nodes : int32, shape (n_trees, n_rows): where each row ends, or is last seen.

    Returns
    -------
    The mean over the trees.
    """
    return float(np.mean([_purity(labels, tree) for tree in nodes]))


def last_seen(before: Nodes, after: Nodes, splits: npt.NDArray[np.int64]) -> Nodes:
    """Where rows are to somebody who knows of a tree's last splits only some.

    Parameters
    ----------
    before, after : where rows are before and after the last splits.
    splits : int64, shape (n_known, 2): tree and node of the splits that are known.
    """
    seen = np.array(before)
    for tree, node in splits:
        rows = before[tree] == node
        seen[tree, rows] = after[tree, rows]
    return seen


def _purity(labels: npt.NDArray[np.int64], nodes: npt.NDArray[np.int32]) -> float:
    counts = np.zeros((int(nodes.max(initial=0)) + 1, int(labels.max(initial=0)) + 1))
    np.add.at(counts, (nodes, labels), 1)
    return float(counts.max(axis=1).sum() / len(labels))
