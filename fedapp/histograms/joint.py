"""One histogram over the columns of several parties; each party keeps its thresholds private.

::

    party    ------a------ ---b---        parties in the order of their names
    column   --0-- ---1--- ---2---
    edges    1 2 3 1 2 3 4 1 2 3          in place of a threshold: number of bins that go left
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fedapp.histograms.bins import Cuts, Ints, ragged


@dataclass(frozen=True, slots=True, eq=False)
class JointColumns:
    """Columns of all parties side by side."""

    widths: Mapping[str, Ints]  # by party, sorted by name: number of bins of each column
    categorical: Mapping[str, npt.NDArray[np.bool_]]  # by party; a bin is a category

    @property
    def cuts(self) -> Cuts:
        """Layout of the joint histogram; a threshold is the number of bins that go left."""
        flat = np.concatenate(list(self.widths.values()))
        edges, offsets = ragged([np.arange(1, width + 1, dtype=np.float32) for width in flat])
        is_category = np.concatenate([self.categorical[party] for party in self.widths])
        categories = np.where(is_category, flat, 0) if is_category.any() else flat[:0]
        return Cuts(edges, offsets, np.zeros(len(flat), dtype=np.float32), categories)

    @property
    def firsts(self) -> dict[str, int]:
        """Number of each party's first column."""
        counts = [len(widths) for widths in self.widths.values()]
        starts = np.cumsum([0, *counts[:-1]]).tolist()
        return dict(zip(self.widths, starts, strict=True))

    def owner(self, column: int) -> tuple[str, int]:
        """Party of a column, and the column's number at that party."""
        party, first = next(
            (party, first) for party, first in reversed(self.firsts.items()) if first <= column
        )
        return party, column - first

    def own(self, party: str, columns: npt.NDArray[np.int64]) -> Ints:
        """Those of the columns that are the party's, as numbers at the party."""
        local = columns - self.firsts[party]
        return local[(local >= 0) & (local < len(self.widths[party]))]

    def bins(self, party: str, columns: Sequence[int] | Ints) -> Ints:
        """Places in the joint histogram of the bins of some of a party's columns."""
        offsets, first = self.cuts.offsets, self.firsts[party]
        bins = [np.arange(offsets[first + c], offsets[first + c + 1]) for c in columns]
        return np.concatenate([*bins, np.empty(0, dtype=np.int64)]).astype(np.int64)


class Group(Protocol):
    """Trees whose gradients share a ciphertext."""

    @property
    def n_outputs(self) -> int: ...


def sum_jobs(
    groups: Sequence[Group],
    level: int,
    trees: npt.NDArray[np.int32],
    nodes: npt.NDArray[np.int32],
) -> Iterator[tuple[int, int, npt.NDArray[np.int32]]]:
    """Order in which wanted nodes are summed, so that both sides read the sums alike.

    Yields the group of trees whose gradients share ciphertexts, a tree, and its nodes. At the root
    all trees of a group have the same rows, so the first tree represents all.
    """
    first = 0
    for number, group in enumerate(groups):
        members = range(first, first + group.n_outputs)
        first += group.n_outputs
        for tree in members if level else members[:1]:
            wanted = nodes[trees == tree]
            if len(wanted):
                yield number, tree, wanted
