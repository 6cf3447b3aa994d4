"""Random draws of a forest: rows per tree, columns per node, the same at every party.

Draws are hashes of numbers, so they do not depend on numpy's version, and a draw for one column
discloses nothing about the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.kernels import kernel
from fedapp.trees.forest.cart import Ints

Words = npt.NDArray[np.uint64]
GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(words: Words) -> Words:
    """A bijective hash of each word.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", Figure 16
    (the constants are those of Java's SplittableRandom).
    """
    z = words + GAMMA
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    mixed: Words = z ^ (z >> np.uint64(31))
    return mixed


def column_keys(column_seeds: Ints, tree: int, nodes: npt.NDArray[np.int32]) -> Ints:
    """Keys that select columns for the nodes of a tree: the smallest are drawn.

    ``column_seeds`` is int64, shape (n_columns,), >= 0; each is known to the column's owner.
    Returns int64, shape (n_nodes, n_columns), 1 to 2**63 - 2.
    """
    places = mix((np.uint64(tree) << np.uint64(32)) | nodes.astype(np.uint64))
    words = mix(column_seeds.astype(np.uint64)[None, :] ^ places[:, None])
    return (words >> np.uint64(1)).astype(np.int64).clip(1, 2**63 - 2)


def row_counts(bootstrap: bool, seed: int, n_trees: int, n_rows: int) -> npt.NDArray[np.uint8]:
    """How often each tree draws each row (1 without bootstrap); uint8, shape (n_trees, n_rows)."""
    if bootstrap:
        return bootstrap_counts(seed, n_trees, n_rows)
    return np.ones((n_trees, n_rows), dtype=np.uint8)


def column_seeds(seed: int, n_columns: int) -> npt.NDArray[np.int64]:
    """Seeds of all parties' columns, from which they are drawn for nodes."""
    return np.random.default_rng([seed, 2]).integers(0, 2**63 - 1, (n_columns,))


def bootstrap_counts(seed: int, n_trees: int, n_rows: int) -> npt.NDArray[np.uint8]:
    """How often each tree draws each row, in ``n_rows`` draws with replacement."""
    roots = mix(np.uint64(seed) ^ mix(np.arange(n_trees, dtype=np.uint64)))
    counts = np.zeros((n_trees, n_rows), dtype=np.uint8)
    for tree in range(n_trees):
        words = mix(roots[tree] ^ mix(np.arange(n_rows, dtype=np.uint64)))
        _count(words, counts[tree])
    return counts


@kernel
def _count(words: Any, counts: Any) -> None:
    """Draw one row per word: its upper half as a fraction of 2**32."""
    for word in words:
        row = np.int64(((word >> np.uint64(32)) * np.uint64(len(counts))) >> np.uint64(32))
        if counts[row] < 255:
            counts[row] += 1


def n_features(rule: str | float, n_columns: int) -> int:
    """Columns drawn per node; ``rule`` is all, sqrt, log2, or a share of the columns."""
    if rule == "all":
        return n_columns
    if rule in ("sqrt", "log2"):
        root_or_log = np.sqrt(n_columns) if rule == "sqrt" else np.log2(n_columns)
        return max(1, int(root_or_log))
    return max(1, int(float(rule) * n_columns))
