"""A finished cross-validation in Python."""

from __future__ import annotations

from typing import Any

from fedapp.finished import Run
from fedapp.finished_folder import FinishedFolder

SUMMARY = "folds.json"


class Folds(FinishedFolder):
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

    _kind, _files = "cross-validation", (SUMMARY,)

    @property
    def summary(self) -> dict[str, Any]:
        """The content of ``folds.json``: scores, names of the runs, traffic, seconds."""
        return self._summary()

    @property
    def scores(self) -> dict[str, Any]:
        """By model and rows, as in ``federated test``, and by score: ``mean``, ``sd``, ``values``
        of the folds."""
        return dict(self.summary["scores"])

    @property
    def runs(self) -> list[Run]:
        """The run of each fold, in their order."""
        return [Run(self.path / name) for name in self.summary["runs"]]
