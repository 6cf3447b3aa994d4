"""What limits the trees of a round: columns that may split, bounds of weights, depth and leaves.

Limits of columns are XGBoost 3.2's: columns drawn per tree, of these per level, of these per node;
monotone and interaction constraints. All follow from the tree so far. Columns are drawn alike or by
their weights; where a draw would take all columns it takes those of weight 0 too, as nothing is
drawn. XGBoost draws by ``feature_weights`` with the same chances, but others, as its generator is
another one. Nothing compiled is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Flags
from fedapp.errors import did_you_mean

Weights = Doubles
Nodes = npt.NDArray[Any]  # of a tree
N = TypeVar("N")
GrowPolicy = Literal["depthwise", "lossguide"]
# Of several classes: a tree each, or one tree with a vector in each leaf; named as in XGBoost.
MultiStrategy = Literal["one_output_per_tree", "multi_output_tree"]
ONE_TREE: MultiStrategy = "multi_output_tree"
DISTRIBUTIONS = ("normal", "logistic", "extreme")  # of ``survival:aft``, also by their numbers
ALIKE = np.empty(0)  # weights of columns that are all alike
LEVEL, NODE_DRAW = 2, 3  # streams of draws, so that no two share a seed
WIDEST = np.finfo(np.float32).max


def n_levels(max_depth: int, max_leaves: int) -> int:
    """Most levels that are split; of both limits, 0 is none."""
    limits = [limit for limit in (max_depth, max_leaves and max(1, max_leaves - 1)) if limit]
    return min(limits, default=0)


def parse_monotone(text: str) -> dict[str, int]:
    """Directions by column, from ``age:1,income:-1``; raises ValueError."""
    rule = "columns with 1, 0 or -1, as age:1,income:-1"
    return _by_column("monotone-constraints", text, {"1": 1, "0": 0, "-1": -1}.__getitem__, rule)


def parse_weights(text: str) -> dict[str, float]:
    """Weights by column, from ``age:2,income:0.5``; raises ValueError."""

    def read(number: str) -> float:
        if not 0 <= float(number) <= 1e9:
            raise ValueError
        return float(number)

    rule = "columns with a number from 0 to 1e9, as age:2,income:0.5"
    return _by_column("feature-weights", text, read, rule)


def _by_column(setting: str, text: str, read: Callable[[str], N], rule: str) -> dict[str, N]:
    numbers = dict[str, N]()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, number = (piece.strip() for piece in part.rpartition(":"))
        try:
            value = read(number) if name else None
        except (LookupError, ValueError):
            value = None
        if value is None:
            raise ValueError(f"{setting} must be {rule}, got {part}")
        if name in numbers:
            raise ValueError(f"{setting} must name a column once, got {name} twice")
        numbers[name] = value
    return numbers


def parse_interactions(text: str) -> tuple[tuple[str, ...], ...]:
    """Groups of columns, from ``[age,income],[income,sex]``; raises ValueError."""
    if not text.strip():
        return ()
    if not re.fullmatch(r"\s*\[[^\[\]]+\]\s*(,\s*\[[^\[\]]+\]\s*)*", text):
        rule = "must be groups of columns, as [age,income],[income,sex]"
        raise ValueError(f"interaction-constraints {rule}, got {text}")
    groups = re.findall(r"\[([^\[\]]+)\]", text)
    return tuple(tuple(name.strip() for name in group.split(",")) for group in groups)


def constraints_of(
    monotone: str, interactions: str, columns: Sequence[str]
) -> tuple[npt.NDArray[np.int8], tuple[frozenset[int], ...]]:
    """Directions in the order of the columns, empty without any, and groups as column numbers.

    Raises ValueError for texts of another form, and for unknown columns.
    """
    by_name, groups = parse_monotone(monotone), parse_interactions(interactions)
    _check_known("monotone-constraints", by_name, columns)
    for group in groups:
        _check_known("interaction-constraints", group, columns)
    directions = [by_name.get(name, 0) for name in columns if any(by_name.values())]
    in_groups = tuple(frozenset(columns.index(name) for name in group) for group in groups)
    return np.array(directions, dtype=np.int8), in_groups


def check_without_categories(monotone: Sequence[int] | Any, has_categories: bool) -> None:
    """Raise ValueError for monotone constraints beside columns of categories."""
    if len(monotone) and has_categories:
        raise ValueError(
            "monotone-constraints must be empty where a column has categories; exclude these "
            "with drop-columns, or give them as numbers"
        )


def weights_of(weights: Mapping[str, float], columns: Sequence[str]) -> Doubles:
    """Weights in the order of the columns, 1 by default; empty without any. Raises ValueError."""
    _check_known("feature-weights", weights, columns)
    by_column = np.array([weights.get(name, 1.0) for name in columns if weights])
    if len(by_column) and not by_column.any():
        raise ValueError("feature-weights must be > 0 for one column at least, got 0 for all")
    return by_column


def _check_known(setting: str, names: Any, columns: Sequence[str]) -> None:
    existing = set(columns)
    if missing := [name for name in names if name not in existing]:
        rule = f"{setting} must name columns of the table, got {', '.join(missing[:5])}"
        others = f"; it has {', '.join(columns[:5])}{' and others' if len(columns) > 5 else ''}"
        raise ValueError(rule + (did_you_mean(missing[0], columns) or others))


def draw_columns(
    allowed: Flags, share: float, rng: np.random.Generator, weights: Weights = ALIKE
) -> Flags:
    """Draw a share of the allowed columns, at least one; without weight, fewer or none.

    Columns are drawn one after the other, each time by their weights among those that are left.
    """
    columns = np.flatnonzero(allowed)
    n_drawn = max(1, int(share * len(columns)))
    drawn, chances = np.zeros_like(allowed), None
    if len(weights):
        columns = columns[weights[columns] > 0]
        chances = weights[columns] / weights[columns].sum()
    if len(columns):
        n_drawn = min(n_drawn, len(columns))
        drawn[rng.choice(columns, n_drawn, replace=False, p=chances)] = True
    return drawn


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Which columns may split a node of a round, and the bounds of its leaf weights."""

    # seed, round_id: of the draws
    seed: int = 0
    round_id: int = 0
    # bylevel, bynode: shares of a tree's columns drawn per level, and of these per node, in (0, 1]
    bylevel: float = 1.0
    bynode: float = 1.0
    # (n_columns,): 1 if predictions must not fall as the column grows, -1 if not rise; or empty
    monotone: npt.NDArray[np.int8] = field(default_factory=lambda: np.empty(0, dtype=np.int8))
    interactions: tuple[frozenset[int], ...] = ()  # columns that may share a path; empty: all
    weights: Weights = field(default_factory=lambda: ALIKE)  # (n_columns,): of draws; or empty
    both_children: bool = False  # with bins merged by node, no sibling follows from its parent

    def of_trees(self, share: float, n_trees: int, n_columns: int) -> Flags:
        """Columns that each tree may split, a share of all, at least one; (n_trees, n_columns)."""
        every = np.ones((n_trees, n_columns), dtype=bool)
        if max(1, int(share * n_columns)) == n_columns:
            return every
        rng = np.random.default_rng([self.seed, self.round_id])
        return np.array([draw_columns(columns, share, rng, self.weights) for columns in every])

    def columns(
        self, level: int, places: Sequence[Sequence[int]], trees: Sequence[Nodes], allowed: Flags
    ) -> Flags:
        """Columns that may split each node, (n_nodes, n_columns), from those allowed by tree.

        ``places`` are tree and node of each.
        """
        if self.bylevel < 1:
            drawn = [
                self._drawn(columns, self.bylevel, LEVEL, tree, level)
                for tree, columns in enumerate(allowed)
            ]
            allowed = np.stack(drawn)
        masks = allowed[[tree for tree, _ in places]]
        if self.bynode < 1:
            for mask, (tree, node) in zip(masks, places, strict=True):
                mask[:] = self._drawn(mask, self.bynode, NODE_DRAW, tree, node)
        if self.interactions:
            for mask, (tree, node) in zip(masks, places, strict=True):
                mask &= self._compatible(trees[tree], node, len(mask))
        return masks

    def _drawn(self, allowed: Flags, share: float, *stream: int) -> Flags:
        """Draw a share of some columns, at least one."""
        rng = np.random.default_rng([self.seed, self.round_id, *stream])
        return draw_columns(allowed, share, rng, self.weights)

    def _compatible(self, nodes: Nodes, node: int, n_columns: int) -> Flags:
        """Columns that may be on a path with those above a node."""
        used = {int(nodes["column"][above]) for above, _ in _path(nodes, node)}
        if not used:
            return np.ones(n_columns, dtype=bool)
        mask = np.zeros(n_columns, dtype=bool)
        for group in (
            used,
            *(interaction for interaction in self.interactions if used <= interaction),
        ):
            mask[list(group)] = True
        return mask

    def bounds(self, nodes: Nodes, node: int) -> tuple[np.float32, np.float32]:
        """Lowest and highest weight of a leaf below a node."""
        low, high = -WIDEST, WIDEST
        if not len(self.monotone):
            return low, high
        for above, below in _path(nodes, node):
            direction = self.monotone[nodes["column"][above]]
            left = nodes["left"][above]
            if not direction:
                continue
            middle = (nodes["weight"][left] + nodes["weight"][left + 1]) / np.float32(2)
            if (below == left) == (direction > 0):
                high = middle
            else:
                low = middle
        return low, high


def _path(nodes: Nodes, node: int) -> list[tuple[int, int]]:
    """Pairs (ancestor, next node on the path), from the root to a node."""
    steps = []
    while (above := int(nodes["parent"][node])) >= 0:
        steps.append((above, node))
        node = above
    return steps[::-1]


FREE = Limits()
