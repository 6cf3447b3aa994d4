"""Cells: what a party's splits leave open to rows, and the leaves that all parties' cells leave.

Splits of one party divide the leaves of a tree into cells: leaves that none of its splits tells
apart are one. A cell is the nearest local split above and the side, numbered as in ``Nesting``: the
cells of split ``r`` are ``2 * r``, right of it, and ``2 * r + 1``. Its rows are those that local
splits send there. Source: Liu et al. 2019, "Federated Forest" (arXiv:1905.10053v1), Algorithms 3
and 4, Proposition 1, with a bit a cell in place of one a leaf.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Floats, Ints
from fedapp.kernels import frozen, kernel
from fedapp.trees.divided import NONE, ActivePart, Lookup, Nesting
from fedapp.trees.predict import Nodes, goes_left, kernel_sets

Cells = npt.NDArray[np.uint8]  # bits, shape (2 * n_records, n_row_bytes)
LEVEL = 1  # of zlib: higher levels cost more time than they save


def open_cells(nesting: Nesting, lookup: Lookup, values: Floats) -> Cells:
    """Rows that a party's splits leave open to each of its cells; ``values`` as in a table."""
    cells = np.zeros((2 * lookup.n_records, -(-len(values) // 8)), dtype=np.uint8)
    cuts = frozen(lookup.columns, lookup.thresholds, lookup.defaults)
    sets = kernel_sets(lookup.numbers, lookup.sets)
    _open(*(*frozen(np.asarray(values, order="A"), nesting.under), *cuts, sets, cells))
    return cells


@kernel
def _open(
    values: Any, unders: Any, columns: Any, thresholds: Any, defaults: Any, sets: Any, cells: Any
) -> None:
    widths, starts, bits = sets
    # A split comes after those above it.
    for record in range(len(unders)):
        under, column, default = unders[record], columns[record], defaults[record] > 0
        for row in range(len(values)):
            byte, bit = row >> 3, np.uint8(128 >> (row & 7))
            if under >= 0 and not cells[under, byte] & bit:
                continue
            value, cut = values[row, column], thresholds[record]
            is_left = goes_left(value, np.nan, cut, default, record, widths, starts, bits)
            cells[2 * record + is_left, byte] |= bit


def share_open(cells: Cells, n_rows: int) -> float:
    """Share of the sides of rows at a party's splits that its cells show."""
    n_open = int(np.bitwise_count(cells[::2] | cells[1::2]).sum())
    return n_open / max(n_rows * len(cells) // 2, 1)


def check_cells(nesting: Nesting, cells: Cells, n_rows: int) -> None:
    """Check that a row is on one side of each split that it may reach, on none of others.

    Then the cells of all parties leave every row one leaf of each tree. Raises ValueError.
    """
    above = np.empty((len(cells) // 2, cells.shape[1]), dtype=np.uint8)
    above[:] = np.packbits(np.ones(n_rows, dtype=bool))
    has_above = nesting.under != NONE
    above[has_above] = cells[nesting.under[has_above]]
    rights, lefts = cells[::2], cells[1::2]
    if (rights & lefts).any() or not np.array_equal(rights | lefts, above):
        rule = "must leave every row one leaf of each tree"
        raise ValueError(f"cells {rule}, so one side of each split that it may reach")


@dataclass(frozen=True, slots=True, eq=False)
class Crossing:
    """All trees of a divided model, with the cells of all parties in turn."""

    nestings: Mapping[str, Nesting]  # of each party's splits; of others' those of these trees
    starts: Ints  # (n_trees + 1,): first node of each tree
    lefts: npt.NDArray[np.int32]  # (n_nodes,): left child within the tree, LEAF at a leaf
    slots: Ints  # (n_nodes,): the split's right cell, among those of all parties

    @classmethod
    def of(cls, part: ActivePart) -> Self:
        """At the active party, whose cells come first."""
        trees = [tree["left"] for tree in part.model.trees]
        starts = np.cumsum([0, *map(len, trees)])
        slots, n_cells, nestings = np.zeros(int(starts[-1]), np.int64), 0, dict[str, Nesting]()
        for name in (part.name, *part.digests):
            by_tree = part.trees_of(name)
            records = np.concatenate([records for _, records in by_tree] or [np.empty(0, np.int64)])
            n_records = int(records.max(initial=-1)) + 1
            if name == part.name:
                n_records = part.lookup.n_records
            nestings[name] = Nesting.of(by_tree, n_records)
            slots[records >= 0] = n_cells + 2 * records[records >= 0]
            n_cells += 2 * n_records
        lefts = np.concatenate([*trees, np.empty(0, np.int32)])
        return cls(nestings, starts, lefts, slots)

    def read(self, party: str, data: bytes, n_rows: int) -> Cells:
        """Check and unpack what ``compress`` has written at a party; raises ValueError.

        It may have more cells, of trees that the model has lost; these are not read.
        """
        nesting = self.nestings[party]
        cells = decompress(data, 2 * len(nesting.under), n_rows)
        check_cells(nesting, cells, n_rows)
        return cells

    def leaves(self, cells: Mapping[str, Cells], n_rows: int) -> Nodes:
        """The leaf of each row in each tree, shape (n_trees, n_rows); ``cells`` are checked."""
        stacked = np.concatenate([cells[name] for name in self.nestings])
        leaves = np.empty((len(self.starts) - 1, n_rows), dtype=np.int32)
        _walk(*(*frozen(self.starts, self.lefts, self.slots, stacked), leaves))
        return leaves


@kernel
def _walk(starts: Any, lefts: Any, slots: Any, cells: Any, leaves: Any) -> None:
    for tree in range(len(leaves)):
        start = starts[tree]
        for row in range(leaves.shape[1]):
            byte, bit = row >> 3, np.uint8(128 >> (row & 7))
            node = 0
            while lefts[start + node] >= 0:
                is_left = cells[slots[start + node] + 1, byte] & bit
                node = lefts[start + node] + (0 if is_left else 1)
            leaves[tree, row] = node


def cells_of_rows(cells: Cells, rows: Ints) -> Cells:
    """Cells of some rows, in their order."""
    bits = cells[:, rows >> 3] >> (7 - (rows & 7)).astype(np.uint8) & 1
    return np.packbits(bits, axis=1)


def compress(cells: Cells) -> bytes:
    """The cells, as bytes."""
    return zlib.compress(cells.tobytes(), LEVEL)


def decompress(data: bytes, n_cells: int, n_rows: int) -> Cells:
    """The first cells that ``compress`` has written.

    Memory is bounded by what is wanted, whatever was sent. Raises ValueError for other bytes.
    """
    n_bytes = -(-n_rows // 8)
    reader = zlib.decompressobj()
    try:
        # 0 would be all.
        unpacked = reader.decompress(data, n_cells * n_bytes) if n_cells * n_bytes else b""
    except zlib.error as error:
        raise ValueError(f"cells must be compressed by zlib: {error}") from error
    if len(unpacked) != n_cells * n_bytes:
        raise ValueError(f"cells must be at least {n_cells}, of {n_rows} rows")
    return np.frombuffer(unpacked, dtype=np.uint8).reshape(n_cells, n_bytes)
