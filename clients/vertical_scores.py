"""Scores at the active party, which alone has the labels of a vertical run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedapp.data.partition import SUBSETS
from fedapp.site.store import Store


def rows_of(store: Store, subset: str) -> slice:
    """The rows of a subset, in the common order: training rows come first, test rows last."""
    start = sum(store.facts[f"n_{name}"] for name in SUBSETS[: SUBSETS.index(subset)])
    return slice(start, start + store.facts[f"n_{subset}"])


def told_scores(scores: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Scores by subset, as the fields of a reply; "train" among them."""
    values = {subset: list(found.values()) for subset, found in scores.items()}
    arrays = {f"{subset}_scores": np.array(v, dtype=np.float64) for subset, v in values.items()}
    return {"score_names": tuple(scores["train"]), **arrays}
