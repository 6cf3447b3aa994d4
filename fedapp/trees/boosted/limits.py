"""Which columns may split a node, and between which weights its leaves must lie.

Source: XGBoost 3.2, which draws columns for a tree, of these for a level, of these for a node; its
monotone and interaction constraints. All follows from the tree as it stands, so nothing is kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    """

    seed: int = 0
    round_id: int = 0
    bylevel: float = 1.0
    bynode: float = 1.0
    monotone: npt.NDArray[np.int8] = field(default_factory=lambda: np.empty(0, dtype=np.int8))
    interactions: tuple[frozenset[int], ...] = ()

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


def parse_monotone(text: str) -> dict[str, int]:
    """Directions by column, of ``age:1,income:-1``.

    Raises
    ------
    ValueError : the text is not of this form, or names a column twice.
    """
    found: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, colon, direction = (each.strip() for each in part.rpartition(":"))
        if not colon or not name or direction not in ("1", "0", "-1"):
            rule = "must be columns with 1, 0 or -1, as age:1,income:-1"
            raise ValueError(f"monotone-constraints {rule}, got {part}")
        if name in found:
            raise ValueError(f"monotone-constraints must name a column once, got {name} twice")
        found[name] = int(direction)
    return found


def parse_interactions(text: str) -> tuple[tuple[str, ...], ...]:
    """Groups of columns, of ``[age,income],[income,sex]``.

    Raises
    ------
    ValueError : the text is not of this form.
    """
    if not text.strip():
        return ()
    if not re.fullmatch(r"\s*\[[^\[\]]+\]\s*(,\s*\[[^\[\]]+\]\s*)*", text):
        rule = "must be groups of columns, as [age,income],[income,sex]"
        raise ValueError(f"interaction-constraints {rule}, got {text}")
    groups = re.findall(r"\[([^\[\]]+)\]", text)
    return tuple(tuple(name.strip() for name in group.split(",")) for group in groups)


def monotone_of(directions: Mapping[str, int], columns: Sequence[str]) -> npt.NDArray[np.int8]:
    """Directions in the order of the columns; empty where none is held.

    Raises
    ------
    ValueError : a column is not there.
    """
    _check_known("monotone-constraints", directions, columns)
    if not any(directions.values()):
        return np.empty(0, dtype=np.int8)
    return np.array([directions.get(name, 0) for name in columns], dtype=np.int8)


def interactions_of(
    groups: Sequence[Sequence[str]], columns: Sequence[str]
) -> tuple[frozenset[int], ...]:
    """Groups as numbers of columns.

    Raises
    ------
    ValueError : a column is not there.
    """
    for group in groups:
        _check_known("interaction-constraints", group, columns)
    places = {name: place for place, name in enumerate(columns)}
    return tuple(frozenset(places[name] for name in group) for group in groups)


def check_without_categories(monotone: Sequence[int] | Any, has_categories: bool) -> None:
    """Refuse directions beside columns of categories.

    Raises
    ------
    ValueError : there are both.
    """
    if len(monotone) and has_categories:
        raise ValueError(
            "monotone-constraints must be empty where a column has categories; exclude these "
            "with drop-columns, or give them as numbers"
        )


def _check_known(setting: str, names: Any, columns: Sequence[str]) -> None:
    known = set(columns)
    if missing := [name for name in names if name not in known]:
        raise ValueError(f"{setting} must name columns of the table, got {', '.join(missing[:5])}")
