"""Trees as compact arrays, for messages, stores and stacked models.

All trees are concatenated::

    sizes      per tree   nodes of the tree
    lefts      per node   left child within the tree, 0 at a leaf; the right child is the next
    values     per node   threshold of a split (below goes left), value of a leaf
    columns    per split
    defaults   per split  1 if missing goes left
    sets       per split of a column of categories: one bit per category, 1 if it goes right, padded
               to whole bytes (see ``fedapp.trees.sets``); no bytes for other splits

and, if explanations will be made of them::

    gains      per split
    hessians   per node
    weights    per node   before the learning rate
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.trees.model import (
    LEAF,
    NODE,
    Grown,
    Tree,
    check_trees,
    in_order,
    number_sets,
    parents_of,
    split_trees,
    stack_trees,
)
from fedapp.trees.sets import NO_SETS, CategorySets, Ints

Array = npt.NDArray[Any]
TREES: Mapping[str, type[np.generic]] = {
    "sizes": np.int32,
    "lefts": np.uint16,
    "values": np.float32,
    "columns": np.int32,
    "defaults": np.uint8,
    "sets": np.uint8,
}
EXPLAINED = ("gains", "hessians", "weights")
SPLIT_ARRAYS = ("columns", "defaults", "gains")  # one value per split; all others per node
MOST_NODES = 2**16  # per tree: a left child fits in 16 bits
NO_CHILD = 0  # node 0 is the root and nobody's child


def pack_trees(
    trees: Sequence[Tree], explained: Sequence[str] = (), sets: CategorySets = NO_SETS
) -> dict[str, Array]:
    """Pack trees of at most 2^16 nodes each; ``explained`` selects arrays of ``EXPLAINED``."""
    trees, sets = in_order(trees, sets)
    nodes, offsets = stack_trees(trees)
    sizes = np.diff(offsets)
    assert (sizes <= MOST_NODES).all()
    inner = nodes["left"] != LEAF
    arrays = {
        "sizes": sizes,
        "lefts": np.where(inner, nodes["left"], NO_CHILD),
        "values": np.where(inner, nodes["threshold"], nodes["value"]),
        "columns": nodes["column"][inner],
        "defaults": nodes["default_left"][inner],
        "sets": sets.bits,
    }
    packed = {name: array.astype(TREES[name]) for name, array in arrays.items()}
    for name in explained:
        node_values = nodes[name.removesuffix("s")]
        packed[name] = node_values[inner] if name in SPLIT_ARRAYS else node_values.copy()
    return packed


def unpack_trees(arrays: Mapping[str, Array], widths: Ints) -> Grown:
    """Unpack trees of a known table; they are checked as by ``check_trees``.

    Missing arrays of ``EXPLAINED`` are read as 0. ``widths`` is the number of categories of each
    column, 0 for a numeric one. Raises ValueError naming the array and the broken rule.
    """
    inner = arrays["lefts"] != NO_CHILD
    nodes = np.zeros(len(inner), dtype=NODE)
    present = {name: arrays[name] for name in (*TREES, *EXPLAINED) if name in arrays}
    for name, array in present.items():
        wanted = np.count_nonzero(inner) if name in SPLIT_ARRAYS else len(inner)
        if name not in {"sizes", "sets"} and len(array) != wanted:
            raise ValueError(f"{name} must be {wanted}, got {len(array)}")
    offsets = np.concatenate(([0], np.cumsum(arrays["sizes"], dtype=np.int64)))
    nodes["left"] = np.where(inner, arrays["lefts"].astype(np.int32), LEAF)
    check_trees(nodes["left"], offsets, arrays["columns"], len(widths))
    nodes["parent"] = parents_of(nodes["left"], offsets)
    nodes["column"][inner], nodes["default_left"][inner] = arrays["columns"], arrays["defaults"]
    nodes["threshold"][inner] = arrays["values"][inner]
    nodes["value"][~inner] = arrays["values"][~inner]
    for name in present.keys() & set(EXPLAINED):
        nodes[name.removesuffix("s")][inner if name in SPLIT_ARRAYS else slice(None)] = present[
            name
        ]
    sets = CategorySets(arrays["sets"], number_sets(nodes, widths))
    return Grown(split_trees(nodes, offsets), sets)
