"""Scores at the active party, the only one with labels in a vertical run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from clients.local_model import warn_if_worse
from fedapp.data.partition import SUBSETS
from fedapp.messages.fields import Array
from fedapp.site.answer import Site
from fedapp.site.store import Store
from fedapp.trees.objective import PLAIN, LossParameters


def rows_of(store: Store, subset: str) -> slice:
    """Rows of a subset in the common order: training rows first, test rows last."""
    start = sum(store.facts[f"n_{name}"] for name in SUBSETS[: SUBSETS.index(subset)])
    return slice(start, start + store.facts[f"n_{subset}"])


def told_scores(scores: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Scores by subset, as fields of a reply."""
    values = {subset: list(by_name.values()) for subset, by_name in scores.items()}
    arrays = {
        f"{subset}_scores": np.array(each, dtype=np.float64) for subset, each in values.items()
    }
    return {"score_names": tuple(scores["train"]), **arrays}


def compare(site: Site, objective: str, margins: Array, loss: LossParameters = PLAIN) -> None:
    """Warn in the site's log if its columns only predict better; margins are of all rows."""
    places = [rows_of(site.store, subset) for subset in ("train", "test")]
    if not site.config.simulated and site.store["values"].shape[1]:
        names = "values", "labels", "weights"
        train, test = ([site.store[name][rows] for name in names] for rows in places)
        warn_if_worse(site, objective, margins[places[1]], train, test, loss)
