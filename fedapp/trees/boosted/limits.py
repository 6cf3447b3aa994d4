"""Which columns may split a node, and between which weights its leaves must lie.

Source: XGBoost 3.2, which draws columns for a tree, of these for a level, of these for a node; its
monotone and interaction constraints. All follows from the tree as it stands, so nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedapp.trees.model import Tree

Bools = npt.NDArray[np.bool_]
NodeId = tuple[int, int]  # tree, node
LEVEL, NODE_DRAW = 2, 3  # streams of draws, so that no two are of the same seed
WIDEST = np.finfo(np.float32).max


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """What holds for the nodes of a round.

    Parameters
    ----------
    seed, round_id : of the draws.
    bylevel, bynode : share of a tree's columns a level draws, and of a level's a node, in (0, 1].
    monotone : int8, shape (n_columns,): 1 where predictions may not fall as the column grows, -1
        where they may not rise, else 0; empty where no column is held.
    interactions : columns that may stand together on a path; empty: all.
    min_child_rows : fewest rows on each side of a split; 0: any, and rows are not counted.
    both_children : whether sums of both children of a split are wanted, as those of the larger one
        do not follow where bins are merged node by node.
    """

    seed: int = 0
    round_id: int = 0
    bylevel: float = 1.0
    bynode: float = 1.0
    monotone: npt.NDArray[np.int8] = field(default_factory=lambda: np.empty(0, dtype=np.int8))
    interactions: tuple[frozenset[int], ...] = ()
    min_child_rows: int = 0
    both_children: bool = False

    def columns(
        self, level: int, places: Sequence[NodeId], trees: Sequence[Tree], allowed: Bools
    ) -> Bools:
        """Columns that may split each node; bool, shape (n_nodes, n_columns).

        Parameters
        ----------
        allowed : of each tree, bool, shape (n_trees, n_columns).
        """
        found = allowed[[tree for tree, _ in places]]
        if self.bylevel < 1:
            drawn = [
                self._drawn(own, self.bylevel, LEVEL, tree, level)
                for tree, own in enumerate(allowed)
            ]
            found = np.stack([drawn[tree] for tree, _ in places])
        if self.bynode < 1:
            each = zip(found, places, strict=True)
            found = np.stack(
                [self._drawn(own, self.bynode, NODE_DRAW, *place) for own, place in each]
            )
        if self.interactions:
            for mask, (tree, node) in zip(found, places, strict=True):
                mask &= self._together(trees[tree], node, len(mask))
        return found

    def _drawn(self, allowed: Bools, share: float, *stream: int) -> Bools:
        """So large a share of some columns, one at least."""
        columns, drawn = np.flatnonzero(allowed), np.zeros_like(allowed)
        if len(columns):
            rng = np.random.default_rng([self.seed, self.round_id, *stream])
            n_drawn = max(1, int(share * len(columns)))
            drawn[rng.choice(columns, n_drawn, replace=False)] = True
        return drawn

    def _together(self, nodes: Tree, node: int, n_columns: int) -> Bools:
        """Columns that may stand on a path with those above a node."""
        used = {int(nodes["column"][above]) for above, _ in _path(nodes, node)}
        if not used:
            return np.ones(n_columns, dtype=bool)
        mask = np.zeros(n_columns, dtype=bool)
        for group in (used, *(each for each in self.interactions if used <= each)):
            mask[list(group)] = True
        return mask

    def bounds(self, nodes: Tree, node: int) -> tuple[np.float32, np.float32]:
        """Lowest and highest weight of a leaf below a node."""
        low, high = -WIDEST, WIDEST
        if not len(self.monotone):
            return low, high
        for above, below in _path(nodes, node):
            direction, left = self.monotone[nodes["column"][above]], nodes["left"][above]
            if not direction:
                continue
            middle = (nodes["weight"][left] + nodes["weight"][left + 1]) / np.float32(2)
            if (below == left) == (direction > 0):
                high = middle
            else:
                low = middle
        return low, high


def _path(nodes: Tree, node: int) -> list[tuple[int, int]]:
    """From the root down to a node: each node above it, and the next one on the way."""
    steps = []
    while (above := int(nodes["parent"][node])) >= 0:
        steps.append((above, node))
        node = above
    return steps[::-1]
