"""Limits of a tree, which settings and messages name too; nothing compiled is imported here."""

from __future__ import annotations

from typing import Literal

GrowPolicy = Literal["depthwise", "lossguide"]
# Of several classes: a tree each, or one tree with a vector in each leaf; named as in XGBoost.
MultiStrategy = Literal["one_output_per_tree", "multi_output_tree"]
ONE_TREE: MultiStrategy = "multi_output_tree"


def n_levels(max_depth: int, max_leaves: int) -> int:
    """Most levels that are split; of both limits, 0 is none."""
    limits = [limit for limit in (max_depth, max_leaves and max(1, max_leaves - 1)) if limit]
    return min(limits, default=0)
