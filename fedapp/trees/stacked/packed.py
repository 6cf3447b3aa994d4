"""Trees in few bytes: six a node and five a split, or nine with its gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.trees.model import LEAF, NODE, Tree, check_trees, split_trees, stack_trees

MOST_NODES = 2**16  # of a tree: a left child fits 16 bits
NO_CHILD = 0  # node 0 is the root and nobody's child


@dataclass(frozen=True, slots=True, eq=False)
class PackedTrees:
    """Trees one after the other, without what only training needs.

    Parameters
    ----------
    sizes : int32, shape (n_trees,): nodes of each tree.
    lefts : uint16, shape (n_nodes,): left child within the tree, 0 at a leaf; the right child is
        the next.
    values : float32, shape (n_nodes,): threshold of a split (below goes left), value of a leaf.
    columns : int32, shape (n_splits,).
    defaults : uint8, shape (n_splits,): 1 where missing goes left.
    gains : float32, shape (n_splits,), or empty where they are not told.
    """

    sizes: npt.NDArray[np.int32]
    lefts: npt.NDArray[np.uint16]
    values: npt.NDArray[np.float32]
    columns: npt.NDArray[np.int32]
    defaults: npt.NDArray[np.uint8]
    gains: npt.NDArray[np.float32]


def pack_trees(trees: Sequence[Tree], with_gains: bool) -> PackedTrees:
    """The trees in few bytes; each must have at most 2^16 nodes."""
    nodes, offsets = stack_trees(trees)
    assert (np.diff(offsets) <= MOST_NODES).all()
    inner = nodes["left"] != LEAF
    return PackedTrees(
        np.diff(offsets).astype(np.int32),
        np.where(inner, nodes["left"], NO_CHILD).astype(np.uint16),
        np.where(inner, nodes["threshold"], nodes["value"]),
        nodes["column"][inner],
        nodes["default_left"][inner].astype(np.uint8),
        nodes["gain"][inner] if with_gains else np.empty(0, dtype=np.float32),
    )


def packed_of(message: Any) -> PackedTrees:
    """The arrays of whatever has them all under their names."""
    return PackedTrees(**{name: getattr(message, name) for name in PackedTrees.__slots__})


def unpack_trees(packed: PackedTrees, n_columns: int) -> tuple[Tree, ...]:
    """Trees of a known table; a walk down each ends, and meets no column that is not there.

    Raises
    ------
    ValueError : says which array breaks which rule.
    """
    _check(packed)
    nodes = np.zeros(len(packed.lefts), dtype=NODE)
    inner = packed.lefts != NO_CHILD
    nodes["left"] = np.where(inner, packed.lefts.astype(np.int32), LEAF)
    offsets = np.zeros(len(packed.sizes) + 1, dtype=np.int64)
    np.cumsum(packed.sizes, out=offsets[1:])
    check_trees(nodes["left"], offsets, packed.columns, n_columns)
    nodes["threshold"], nodes["value"] = (
        np.where(kind, packed.values, np.float32(0)) for kind in (inner, ~inner)
    )
    nodes["column"][inner] = packed.columns
    nodes["default_left"][inner] = packed.defaults
    if len(packed.gains):
        nodes["gain"][inner] = packed.gains
    return split_trees(nodes, offsets)


def _check(packed: PackedTrees) -> None:
    """Hold the lengths of the arrays against each other."""
    n_nodes, n_splits = len(packed.lefts), np.count_nonzero(packed.lefts != NO_CHILD)
    if len(packed.values) != n_nodes:
        raise ValueError(f"values must be {n_nodes}, got {len(packed.values)}")
    if len(packed.columns) != n_splits or len(packed.defaults) != n_splits:
        raise ValueError(f"columns and defaults must be {n_splits}, one a split")
    if len(packed.gains) not in {0, n_splits}:
        raise ValueError(f"gains must be {n_splits}, one a split, or none")
