"""A finished cross-validation in Python."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from fedapp.errors import ConfigError
from fedapp.finished import Run
from fedapp.home import shown

SUMMARY = "folds.json"


class Folds:
    """A finished cross-validation: a run for each fold, and their scores.

    Parameters
    ----------
    path : of its folder.

    Raises
    ------
    ConfigError : the folder holds none that has finished.

    Examples
    --------
    >>> import fedapp
    >>> found = fedapp.run("pax", folds=2, num_boost_round=2, max_depth=2)
    >>> sorted(found.scores["federated test"]["auc"])
    ['mean', 'sd', 'values']
    >>> [run.summary["metrics"]["test"]["auc"] for run in found.runs] == found.scores[
    ...     "federated test"
    ... ]["auc"]["values"]
    True
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path).resolve()
        if not (self.path / SUMMARY).is_file():
            rule = "path must be the folder of a cross-validation that has finished"
            raise ConfigError(f"{rule}, got {shown(self.path)} without {SUMMARY}")

    @property
    def summary(self) -> dict[str, Any]:
        """The content of ``folds.json``: scores, names of the runs, traffic, seconds."""
        found: dict[str, Any] = json.loads((self.path / SUMMARY).read_text())
        return found

    @property
    def scores(self) -> dict[str, Any]:
        """By model and rows, as in ``federated test``, and by score: ``mean``, ``sd``, ``values``
        of the folds."""
        return dict(self.summary["scores"])

    @property
    def runs(self) -> list[Run]:
        """The run of each fold, in their order."""
        return [Run(self.path / name) for name in self.summary["runs"]]

    def __repr__(self) -> str:
        return f"Folds({shown(self.path)!r})"
