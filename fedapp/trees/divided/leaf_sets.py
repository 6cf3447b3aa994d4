"""Rows that may end in each leaf of a tree, by only some of its splits.

Source: Liu et al. 2019 (arXiv:1905.10053v1), Algorithm 3 and Proposition 1.

Sets have one bit per row, packed in bytes: a split costs an AND of ``n_rows / 8`` bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.kernels import kernel
from fedapp.trees.divided.lookup import Lookup
from fedapp.trees.model import LEAF

Sets = npt.NDArray[np.uint8]  # shape (n_leaves, n_bytes)
LEVEL = 1  # of zlib: higher levels cost more time than they save


def walk(lefts: npt.NDArray[Any], sides: Mapping[int, Sets], n_rows: int) -> Sets:
    """Rows that may end in each leaf, leaves in the order of their nodes.

    ``lefts``, shape (n_nodes,), are left children, LEAF at leaves; ``sides`` has packed bits of the
    rows that go left at each known split. At others rows go both ways.
    """
    node_sets: Sets = np.empty((len(lefts), -(-n_rows // 8)), dtype=np.uint8)
    node_sets[0] = np.packbits(np.ones(n_rows, dtype=bool))
    # Children come after their parents.
    for node in np.flatnonzero(lefts != LEAF).tolist():
        left, inside = int(lefts[node]), node_sets[node]
        if node in sides:
            np.bitwise_and(inside, sides[node], out=node_sets[left])
            np.bitwise_and(inside, ~sides[node], out=node_sets[left + 1])
        else:
            node_sets[left] = node_sets[left + 1] = inside
    at_leaves: Sets = node_sets[lefts == LEAF]
    return at_leaves


def own_sides(
    records: npt.NDArray[np.int64], lookup: Lookup, columns: npt.NDArray[np.float32]
) -> dict[int, Sets]:
    """Packed bits of rows that go left, by node; ``records`` are record ids, -1 elsewhere."""
    return {
        node: np.packbits(lookup.sides(records[node], columns.T))
        for node in np.flatnonzero(records >= 0).tolist()
    }


def leaves_of(sets: Sets, lefts: npt.NDArray[Any], n_rows: int) -> npt.NDArray[np.int32]:
    """The leaf of each row, int32; ValueError if a row is in no leaf, or in several."""
    counts, leaves = np.zeros(n_rows, dtype=np.int32), np.zeros(n_rows, dtype=np.int32)
    _note(sets, np.flatnonzero(lefts == LEAF), counts, leaves)
    if (counts != 1).any():
        raise ValueError("leaf sets must leave every row in one leaf")
    return leaves


@kernel
def _note(sets: Any, at: Any, counts: Any, leaves: Any) -> None:
    """Write the leaf of every row that is in one; most bytes are 0."""
    for place in range(len(sets)):
        for first in range(sets.shape[1]):
            byte = sets[place, first]
            if byte == 0:
                continue
            for bit in range(8):
                row = 8 * first + bit
                if byte & (128 >> bit) and row < len(leaves):
                    counts[row] += 1
                    leaves[row] = at[place]


def compress(sets: Sets) -> bytes:
    """Sets of one tree as bytes."""
    return zlib.compress(sets.tobytes(), LEVEL)


def decompress(data: bytes, n_leaves: int, n_rows: int) -> Sets:
    """Undo ``compress``, with bounded memory; raises ValueError for other bytes."""
    n_wanted = n_leaves * -(-n_rows // 8)
    reader = zlib.decompressobj()
    try:
        unpacked = reader.decompress(data, n_wanted + 1)
    except zlib.error as error:
        raise ValueError(f"sets must be compressed by zlib: {error}") from error
    if len(unpacked) != n_wanted or not reader.eof or reader.unused_data:
        raise ValueError(f"sets must be {n_wanted} bytes, of {n_leaves} leaves and {n_rows} rows")
    return np.frombuffer(unpacked, dtype=np.uint8).reshape(n_leaves, -1)
