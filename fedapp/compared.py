"""A finished comparison in Python."""

from __future__ import annotations

from typing import Any

from fedapp.finished import Run, as_frame
from fedapp.finished_folder import FinishedFolder

SUMMARY, PAGE = "comparison.json", "comparison.html"
CLAIM = "compared.json"  # of every folder of several runs: what decides on them


class Compared(FinishedFolder):
    """A finished comparison of methods: runs on the same rows, and their scores.

    Parameters
    ----------
    path : of its folder, in which ``comparison.html`` is the page.

    Raises
    ------
    ConfigError : the folder holds none that has finished.

    Examples
    --------
    >>> import fedapp
    >>> found = fedapp.compare(["pax", "bagging"], seeds=2, num_boost_round=2, max_depth=2)
    >>> {"strategy", "auc", "logloss", "difference", "ties"} <= set(found.scores)
    True
    """

    _kind, _files = "comparison", (SUMMARY,)

    @property
    def summary(self) -> dict[str, Any]:
        """The content of ``comparison.json``."""
        return self._summary()

    @property
    def scores(self) -> Any:
        """A record a method or baseline, best first: means over the runs, and the paired
        ``difference`` to the best method; a DataFrame where pandas is installed."""
        return as_frame(self.summary["table"])

    @property
    def runs(self) -> dict[str, list[Run]]:
        """The runs of each method, in the order of seeds and folds."""
        named = {line["name"]: line["runs"] for line in self.summary["lines"] if line["runs"]}
        return {name: [Run(self.path / run) for run in runs] for name, runs in named.items()}
