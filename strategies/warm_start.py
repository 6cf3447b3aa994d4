"""Going on from the model of a finished run, as ``xgb_model`` of ``xgboost.train`` does.

The rounds of the new run follow those of the model: they are numbered on, so that rows and columns
are drawn as in one run of all rounds, and the base score stays the model's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedapp.config import Settings
from fedapp.data.categories import Categories
from fedapp.errors import ConfigError, as_plain
from fedapp.home import RUNS
from fedapp.names import near_path
from fedapp.trees.model import Ensemble, load_model
from fedapp.trees.objective import LossParameters


@dataclass(frozen=True, slots=True)
class Begun:
    """How much of a model was there before its run.

    Parameters
    ----------
    n_rounds, n_trees : of the model that the run goes on from; 0 without one.
    """

    n_rounds: int = 0
    n_trees: int = 0

    @classmethod
    def with_model(cls, model: Ensemble, trees_a_round: int) -> Begun:
        """All rounds of a model.

        Raises
        ------
        ConfigError : its trees are not whole rounds.
        """
        n_rounds, rest = divmod(len(model.trees), trees_a_round)
        if rest or not n_rounds:
            rule = f"must have whole rounds of {trees_a_round} trees"
            raise ConfigError(f"init-model {rule}, got {len(model.trees)} trees")
        return cls(n_rounds, len(model.trees))

    def facts(self, settings: Settings) -> dict[str, Any]:
        """The summary's part; nothing where the run began without a model."""
        if not self.n_rounds:
            return {}
        told = {"path": settings.init_model, "rounds": self.n_rounds, "trees": self.n_trees}
        return {"init_model": told}


def read_init_model(
    settings: Settings,
    columns: tuple[str, ...],
    classes: tuple[str, ...],
    categories: Categories,
    base_margin: str = "",
) -> Ensemble | None:
    """The model that a run goes on from; None where it begins without one.

    Parameters
    ----------
    columns, classes, categories : of the run, as in ``Ensemble``.
    base_margin : its column of base margins.

    Raises
    ------
    ConfigError : there is no such file, or its model is of other columns, classes, categories, base
        margins or of another objective.
    DataError : the file is no boosted model in one piece.
    """
    if not settings.init_model:
        return None
    given = Path(settings.init_model)
    path = given / "model.json" if given.is_dir() else given
    if not path.is_file():
        rule = "must be a run's folder or its model.json"
        raise ConfigError(f"init-model {rule}, got {given}{near_path(given, RUNS)}")
    model = load_model(path)
    due = {
        "objective": (settings.objective, model.objective),
        "columns": (columns, model.columns),
        "classes": (classes, model.classes),
        "categories": (categories, model.categories),
        "parameters": (LossParameters.of(settings), model.parameters),
        "base-margin": (base_margin, model.margin_column),
    }
    for field, (wanted, found) in due.items():
        if wanted != found:
            raise ConfigError(f"{field} of init-model must be the run's, {_differ(wanted, found)}")
    return model


def init_model_id(settings: Settings) -> str:
    """Id of the model that a run goes on from whose parts lie at the parties; empty without one.

    Raises
    ------
    ConfigError : there is no such run, or it is of another method.
    """
    if not settings.init_model:
        return ""
    given = Path(settings.init_model)
    path = (given if given.is_dir() else given.parent) / "summary.json"
    if not path.is_file():
        rule = "must be the folder of a finished run"
        raise ConfigError(f"init-model {rule}, got {given}{near_path(given, RUNS)}")
    summary = json.loads(path.read_text())
    if (method := summary.get("strategy")) != settings.strategy:
        rule = f"must be a run of {settings.strategy}, whose parts lie at the parties"
        raise ConfigError(f"init-model {rule}, got one of {method}")
    return str(summary["model_id"])


def _differ(wanted: Any, found: Any) -> str:
    """Where two values differ, in words."""
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        if len(wanted) != len(found):
            return f"{len(wanted)} in number, got {len(found)}"
        pairs = enumerate(zip(wanted, found, strict=True), start=1)
        place, (wanted, found) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
        return as_plain(f"number {place} being {wanted!r}, got {found!r}")
    return f"{wanted!r}, got {found!r}"
