"""Which rows of a tree node a split sends left, as bits, and where that leaves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Nodes = npt.NDArray[np.int32]  # shape (n_trees, n_rows): where each row is in each tree
Bits = npt.NDArray[np.bool_]  # rows of one node in order; True goes left


def goes_left(
    column: npt.NDArray[np.float32],
    threshold: np.float32 | npt.NDArray[np.float32],
    default_left: bool | npt.NDArray[np.bool_],
) -> npt.NDArray[np.bool_]:
    """Side of each row by its value; NaN goes to the default side.

    Parameters
    ----------
    threshold, default_left : of one split, or of the split each value is at.
    """
    sides: npt.NDArray[np.bool_] = np.where(np.isnan(column), default_left, column < threshold)
    return sides


def rows_of(nodes: Nodes, tree: int, node: int) -> npt.NDArray[np.int64]:
    """Rows of one node, ascending."""
    return np.flatnonzero(nodes[tree] == node)


def pack_bits(sides: Sequence[Bits]) -> npt.NDArray[np.uint8]:
    """Bits of several splits one after the other, each in whole bytes."""
    packed = [np.packbits(side) for side in sides]
    return np.concatenate([*packed, np.empty(0, dtype=np.uint8)])


def unpack_bits(packed: npt.NDArray[np.uint8], sizes: Sequence[int]) -> list[Bits]:
    """Undo ``pack_bits``.

    Parameters
    ----------
    sizes : rows of each split's node.

    Raises
    ------
    ValueError : another number of bytes, or bits past the last row.
    """
    ends = np.cumsum([-(-size // 8) for size in sizes], dtype=np.int64).tolist()
    if len(packed) != (ends[-1] if ends else 0):
        raise ValueError(f"bits must be {ends[-1] if ends else 0} bytes, got {len(packed)}")
    sides = []
    for start, end, size in zip([0, *ends], ends, sizes, strict=False):
        bits = np.unpackbits(packed[start:end]).astype(bool)
        if bits[size:].any():
            raise ValueError(f"bits must be 0 past the {size} rows")
        sides.append(bits[:size])
    return sides


def move_rows(nodes: Nodes, lefts: Mapping[tuple[int, int], tuple[int, Bits]]) -> Nodes:
    """Rows at the children of the nodes that were split.

    Parameters
    ----------
    lefts : (tree, node) to its left child and the rows that go there; the right child is the next.
    """
    moved = nodes.copy()
    for (tree, node), (left, sides) in lefts.items():
        moved[tree, rows_of(nodes, tree, node)] = np.where(sides, left, left + 1)
    return moved
