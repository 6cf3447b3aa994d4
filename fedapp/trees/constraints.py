"""Constraints of columns: parsed from settings, and by column number."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def parse_monotone(text: str) -> dict[str, int]:
    """Directions by column, from ``age:1,income:-1``; raises ValueError."""
    directions: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, colon, direction = (piece.strip() for piece in part.rpartition(":"))
        if not colon or not name or direction not in ("1", "0", "-1"):
            rule = "must be columns with 1, 0 or -1, as age:1,income:-1"
            raise ValueError(f"monotone-constraints {rule}, got {part}")
        if name in directions:
            raise ValueError(f"monotone-constraints must name a column once, got {name} twice")
        directions[name] = int(direction)
    return directions


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
    """Both constraints by column numbers, from their texts; raises ValueError."""
    directions = monotone_of(parse_monotone(monotone), columns)
    return directions, interactions_of(parse_interactions(interactions), columns)


def monotone_of(directions: Mapping[str, int], columns: Sequence[str]) -> npt.NDArray[np.int8]:
    """Directions in the order of the columns; empty without constraints. ValueError if unknown."""
    _check_known("monotone-constraints", directions, columns)
    if not any(directions.values()):
        return np.empty(0, dtype=np.int8)
    return np.array([directions.get(name, 0) for name in columns], dtype=np.int8)


def interactions_of(
    groups: Sequence[Sequence[str]], columns: Sequence[str]
) -> tuple[frozenset[int], ...]:
    """Groups as column numbers; raises ValueError for an unknown column."""
    for group in groups:
        _check_known("interaction-constraints", group, columns)
    places = {name: column for column, name in enumerate(columns)}
    return tuple(frozenset(places[name] for name in group) for group in groups)


def check_without_categories(monotone: Sequence[int] | Any, has_categories: bool) -> None:
    """Raise ValueError for monotone constraints beside columns of categories."""
    if len(monotone) and has_categories:
        raise ValueError(
            "monotone-constraints must be empty where a column has categories; exclude these "
            "with drop-columns, or give them as numbers"
        )


def weights_of(weights: Mapping[str, float], columns: Sequence[str]) -> npt.NDArray[np.float64]:
    """Weights in the order of the columns, 1 by default; empty without any. Raises ValueError."""
    _check_known("feature-weights", weights, columns)
    by_column = np.array([weights.get(name, 1.0) for name in columns if weights])
    if len(by_column) and not by_column.any():
        raise ValueError("feature-weights must be > 0 for one column at least, got 0 for all")
    return by_column


def _check_known(setting: str, names: Any, columns: Sequence[str]) -> None:
    existing = set(columns)
    if missing := [name for name in names if name not in existing]:
        raise ValueError(f"{setting} must name columns of the table, got {', '.join(missing[:5])}")
