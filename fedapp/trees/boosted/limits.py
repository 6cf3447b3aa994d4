"""Which columns may split a node, and the bounds of its leaf weights.

Source: XGBoost 3.2, which draws columns per tree, of these per level, of these per node; and its
monotone and interaction constraints. Everything follows from the tree so far; nothing is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedapp.trees.model import Tree

Bools = npt.NDArray[np.bool_]
NodeId = tuple[int, int]  # tree, node
LEVEL, NODE_DRAW = 2, 3  # streams of draws, so that no two share a seed
WIDEST = np.finfo(np.float32).max


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Limits of the nodes of a round."""

    # seed, round_id: of the draws
    seed: int = 0
    round_id: int = 0
    # bylevel, bynode: shares of a tree's columns drawn per level, and of these per node, in (0, 1]
    bylevel: float = 1.0
    bynode: float = 1.0
    # (n_columns,): 1 if predictions must not fall as the column grows, -1 if not rise; or empty
    monotone: npt.NDArray[np.int8] = field(default_factory=lambda: np.empty(0, dtype=np.int8))
    interactions: tuple[frozenset[int], ...] = ()  # columns that may share a path; empty: all
    min_child_rows: int = 0  # minimum rows on each side of a split; 0: rows are not counted
    both_children: bool = False  # with bins merged by node, no sibling follows from its parent

    def columns(
        self, level: int, places: Sequence[NodeId], trees: Sequence[Tree], allowed: Bools
    ) -> Bools:
        """Columns that may split each node, (n_nodes, n_columns), from those allowed by tree."""
        masks = allowed[[tree for tree, _ in places]]
        if self.bylevel < 1:
            drawn = [
                self._drawn(columns, self.bylevel, LEVEL, tree, level)
                for tree, columns in enumerate(allowed)
            ]
            masks = np.stack([drawn[tree] for tree, _ in places])
        if self.bynode < 1:
            pairs = zip(masks, places, strict=True)
            masks = np.stack(
                [self._drawn(columns, self.bynode, NODE_DRAW, *place) for columns, place in pairs]
            )
        if self.interactions:
            for mask, (tree, node) in zip(masks, places, strict=True):
                mask &= self._compatible(trees[tree], node, len(mask))
        return masks

    def _drawn(self, allowed: Bools, share: float, *stream: int) -> Bools:
        """Draw a share of some columns, at least one."""
        columns, drawn = np.flatnonzero(allowed), np.zeros_like(allowed)
        if len(columns):
            rng = np.random.default_rng([self.seed, self.round_id, *stream])
            n_drawn = max(1, int(share * len(columns)))
            drawn[rng.choice(columns, n_drawn, replace=False)] = True
        return drawn

    def _compatible(self, nodes: Tree, node: int, n_columns: int) -> Bools:
        """Columns that may be on a path with those above a node."""
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
    """Pairs (ancestor, next node on the path), from the root to a node."""
    steps = []
    while (above := int(nodes["parent"][node])) >= 0:
        steps.append((above, node))
        node = above
    return steps[::-1]
