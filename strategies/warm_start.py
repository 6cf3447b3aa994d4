"""Initial model of a run, as ``xgb_model`` of ``xgboost.train``.

The rounds of the new run are numbered after those of the model, so that rows and columns are
drawn as in one run of all rounds; the base score stays the model's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedapp.errors import ConfigError, as_plain, did_you_mean_path
from fedapp.home import RUNS
from fedapp.settings import Settings
from fedapp.trees.model import Ensemble, load_model
from fedapp.trees.objective import LossParameters
from fedapp.trees.sets import Categories


@dataclass(frozen=True, slots=True)
class Begun:
    """Size of the initial model; 0 without one."""

    n_rounds: int = 0
    n_trees: int = 0

    @classmethod
    def with_model(cls, model: Ensemble, trees_a_round: int) -> Begun:
        """All rounds of a model; its trees must be whole rounds."""
        n_rounds, n_over = divmod(len(model.trees), trees_a_round)
        if n_over or not n_rounds:
            rule = f"must have whole rounds of {trees_a_round} trees"
            raise ConfigError(f"init-model {rule}, got {len(model.trees)} trees")
        return cls(n_rounds, len(model.trees))

    def facts(self, settings: Settings) -> dict[str, Any]:
        """The summary's part; empty without an initial model."""
        if not self.n_rounds:
            return {}
        model = {"path": settings.init_model, "rounds": self.n_rounds, "trees": self.n_trees}
        return {"init_model": model}


def read_init_model(
    settings: Settings,
    columns: tuple[str, ...],
    classes: tuple[str, ...],
    categories: Categories,
    base_margin: str = "",
) -> Ensemble | None:
    """The initial model of a run; None without one.

    It must be in one piece, and have the run's objective, columns, classes and categories.
    """
    if not settings.init_model:
        return None
    place = Path(settings.init_model)
    path = place / "model.json" if place.is_dir() else place
    if not path.is_file():
        rule = "must be a run's folder or its model.json"
        raise ConfigError(f"init-model {rule}, got {place}{did_you_mean_path(place, RUNS)}")
    model = load_model(path)
    pairs = {
        "objective": (settings.objective, model.objective),
        "columns": (columns, model.columns),
        "classes": (classes, model.classes),
        "categories": (categories, model.categories),
        "parameters": (LossParameters.of(settings), model.parameters),
        "base-margin": (base_margin, model.margin_column),
    }
    for field, (wanted, got) in pairs.items():
        if wanted != got:
            raise ConfigError(
                f"{field} of init-model must be the run's, {_difference(wanted, got)}"
            )
    return model


def init_model_id(settings: Settings) -> str:
    """Id of the divided initial model; empty without one. Refuses a run of another method."""
    if not settings.init_model:
        return ""
    folder = Path(settings.init_model)
    path = (folder if folder.is_dir() else folder.parent) / "summary.json"
    if not path.is_file():
        rule = "must be the folder of a finished run"
        raise ConfigError(f"init-model {rule}, got {folder}{did_you_mean_path(folder, RUNS)}")
    summary = json.loads(path.read_text())
    if (method := summary.get("strategy")) != settings.strategy:
        rule = f"must be a run of {settings.strategy}, whose model is divided among the parties"
        raise ConfigError(f"init-model {rule}, got one of {method}")
    return str(summary["model_id"])


def _difference(wanted: Any, got: Any) -> str:
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        if len(wanted) != len(got):
            return f"{len(wanted)} in number, got {len(got)}"
        pairs = enumerate(zip(wanted, got, strict=True), start=1)
        place, (wanted, got) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
        return as_plain(f"number {place} being {wanted!r}, got {got!r}")
    return f"{wanted!r}, got {got!r}"
