"""Trees as arrays, in few bytes: how messages, stores and stacked models lay them out.

All trees stand one after the other::

    sizes      a tree   nodes of the tree
    lefts      a node   left child within the tree, 0 at a leaf; the right child is the next
    values     a node   threshold of a split (below goes left), value of a leaf
    columns    a split
    defaults   a split  1 where missing goes left
    sets       a split of a column of categories: a bit a category, 1 where it goes right, in whole
               bytes (see ``fedapp.trees.sets``); no byte for any other split

and where explanations are to be made of them, also::

    gains      a split
    hessians   a node
    weights    a node   before the learning rate
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
SPLIT_ARRAYS = ("columns", "defaults", "gains")  # a value a split; all others have one a node
MOST_NODES = 2**16  # of a tree: a left child fits 16 bits
NO_CHILD = 0  # node 0 is the root and nobody's child


def pack_trees(
    trees: Sequence[Tree], explained: Sequence[str] = (), sets: CategorySets = NO_SETS
) -> dict[str, Array]:
    """The trees in few bytes; each must have at most 2^16 nodes.

    Parameters
    ----------
    explained : which of ``EXPLAINED`` are among the arrays.
    sets : that the splits have, of these trees and perhaps of others.
    """
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
    found = {name: array.astype(TREES[name]) for name, array in arrays.items()}
    for name in explained:
        of_nodes = nodes[name.removesuffix("s")]
        found[name] = of_nodes[inner] if name in SPLIT_ARRAYS else of_nodes.copy()
    return found


def unpack_trees(arrays: Mapping[str, Array], widths: Ints) -> Grown:
    """Trees of a known table; a walk down each ends, and meets no column that is not there.

    Parameters
    ----------
    arrays : see above; what explanations need is 0 where it is not given.
    widths : int64, shape (n_columns,): categories of each column, 0 for one of numbers.

    Raises
    ------
    ValueError : says which array breaks which rule.
    """
    inner = arrays["lefts"] != NO_CHILD
    nodes = np.zeros(len(inner), dtype=NODE)
    known = {name: arrays[name] for name in (*TREES, *EXPLAINED) if name in arrays}
    for name, array in known.items():
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
    for name in known.keys() & set(EXPLAINED):
        nodes[name.removesuffix("s")][inner if name in SPLIT_ARRAYS else slice(None)] = known[name]
    sets = CategorySets(arrays["sets"], number_sets(nodes, widths))
    return Grown(split_trees(nodes, offsets), sets)
