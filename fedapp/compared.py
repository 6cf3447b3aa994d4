"""A finished comparison in Python."""

from __future__ import annotations

from typing import Any

from fedapp.finished import Run, as_frame
from fedapp.finished_folder import FinishedFolder

SUMMARY, PAGE = "comparison.json", "comparison.html"


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
    >>> given = {"num_boost_round": 2, "max_depth": 2}
    >>> found = fedapp.compare(["pax", "bagging"], seeds=2, **given)
    >>> [len(runs) for runs in found.runs.values()]
    [2, 2]
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
        lines = self.summary["lines"]
        return {
            line["name"]: [Run(self.path / name) for name in line["runs"]]
            for line in lines
            if line["runs"]
        }
