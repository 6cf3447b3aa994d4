"""One party's table as read from a file, before anything is computed from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fedapp.data.notes import Note
from fedapp.trees.sets import Categories, chosen


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Rows of one table: features as numbers or category codes, and the columns with a role."""

    columns: tuple[str, ...]  # names of the features, in the order of the table
    values: npt.NDArray[np.float32]  # (n_rows, n_columns); NaN is missing, no value is infinite
    # (n_rows,), str: class names; None without a label column
    labels: npt.NDArray[np.float64] | npt.NDArray[np.str_] | None = None
    weights: npt.NDArray[np.float32] | None = None  # (n_rows,), >= 0; None means 1 for every row
    ids: npt.NDArray[np.str_] | None = None  # (n_rows,); None without an id column
    groups: npt.NDArray[np.str_] | None = None  # (n_rows,): the column of a natural partition
    # warnings about the whole table, also if these are some of its rows
    notes: tuple[Note, ...] = ()
    categories: Categories = ()  # of each column, see ``fedapp.trees.sets``
    # columns whose categories come from a schema, not from the rows
    given: frozenset[str] = frozenset()
    base_margins: npt.NDArray[np.float32] | None = None  # (n_rows,): initial margins
    # of the columns, see ``fedapp.data.typed``; empty for rows to predict
    kinds: tuple[str, ...] = ()

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.values)

    def in_order(self, columns: Sequence[str]) -> Table:
        """Reorder the columns; `columns` has the same names."""
        if tuple(columns) == self.columns:
            return self
        places = [self.columns.index(name) for name in columns]
        values = np.ascontiguousarray(self.values[:, places])
        categories = chosen(self.categories, places)
        return replace(self, columns=tuple(columns), values=values, categories=categories)

    def take(self, rows: npt.NDArray[np.int64]) -> Table:
        """Select rows, in this order."""
        return replace(
            self,
            values=self.values[rows],
            labels=None if self.labels is None else self.labels[rows],
            weights=None if self.weights is None else self.weights[rows],
            ids=None if self.ids is None else self.ids[rows],
            groups=None if self.groups is None else self.groups[rows],
            base_margins=None if self.base_margins is None else self.base_margins[rows],
        )
