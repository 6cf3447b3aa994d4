"""Columns that may split a tree, a level or a node, drawn alike or by their weights.

Where a draw would take all columns it takes those of weight 0 too, as nothing is drawn. XGBoost
draws by ``feature_weights`` with the same chances, but others, as its generator is another one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Weights = npt.NDArray[np.float64]
ALIKE = np.empty(0)  # weights of columns that are all alike


def draw_columns(
    allowed: Bools, share: float, rng: np.random.Generator, weights: Weights = ALIKE
) -> Bools:
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


def parse_weights(text: str) -> dict[str, float]:
    """Weights by column, from ``age:2,income:0.5``; raises ValueError."""
    weights: dict[str, float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, number = (piece.strip() for piece in part.rpartition(":"))
        try:
            weight = float(number)
        except ValueError:
            weight = -1.0
        if not name or not 0 <= weight <= 1e9:
            rule = "must be columns with a number from 0 to 1e9, as age:2,income:0.5"
            raise ValueError(f"feature-weights {rule}, got {part}")
        if name in weights:
            raise ValueError(f"feature-weights must name a column once, got {name} twice")
        weights[name] = weight
    return weights
