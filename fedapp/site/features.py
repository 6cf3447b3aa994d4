"""Features of a version's rows by their numbers, from the site's table or database as it is now."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from fedapp.data.columns import Columns
from fedapp.data.predictions import columns_of_frame
from fedapp.data.query import is_database
from fedapp.data.schema import Roles
from fedapp.data.table import Table
from fedapp.errors import DataError
from fedapp.site.settings import SiteConfig
from fedapp.site.table import file_version, query_of, row_ids, rows_of_part
from fedapp.trees.divided import Part

Ints = npt.NDArray[np.int64]


class InTable:
    """Rows of a table, which is in memory."""

    is_in_memory = True

    def __init__(self, config: SiteConfig, part: Part, ids: npt.NDArray[np.str_]) -> None:
        self.source = source_of(config)
        self._table = table = rows_of_part(config, part)
        row_of = {name: row for row, name in enumerate(row_ids(table, config, True).tolist())}
        self._table_rows = np.array([row_of.get(name, -1) for name in ids.tolist()], dtype=np.int64)

    def read(self, rows: Ints) -> Table:
        """Some rows, by their numbers; raises DataError if one is not there any more."""
        table_rows = self._table_rows[rows]
        _check_there(int((table_rows < 0).sum()))
        return self._table.take(table_rows)


class InDatabase:
    """Rows of a database, which are asked for each time."""

    is_in_memory = False

    def __init__(self, config: SiteConfig, part: Part, ids: npt.NDArray[np.str_]) -> None:
        self.source = source_of(config)
        self._query = query_of(config)
        self._bound = self._query.bound_ids(config.id_column, config.reader)
        roles = Roles(id_column=config.id_column, base_margin=part.margin_column)
        self._config, self._roles, self._ids = config, roles, ids
        self._columns = Columns.of_model(part.columns, part.categories, config.reader, part.kinds)

    def read(self, rows: Ints) -> Table:
        """The same of rows of the database."""
        names = self._ids[rows].tolist()
        bound = [self._bound[name] for name in names if name in self._bound]
        frame = self._query.rows(bound)
        _check_there(0 if frame.num_rows else len(names))
        table = columns_of_frame(frame, self._columns, self._roles)
        row_of = {name: row for row, name in enumerate(row_ids(table, self._config, True))}
        _check_there(sum(name not in row_of for name in names))
        return table.take(np.array([row_of[name] for name in names], dtype=np.int64))


Features = InTable | InDatabase  # where a version's rows come from


def features_of(config: SiteConfig, part: Part, ids: npt.NDArray[np.str_]) -> Features:
    """Features of a version's rows."""
    kind = InDatabase if is_database(config.predict_data) else InTable
    return kind(config, part, ids)


def source_of(config: SiteConfig) -> Hashable:
    """Where the rows are and how they are read, with the version of a file; if it changes, the rows
    may have."""
    data = config.predict_data or config.data
    file = () if is_database(data) else file_version(data)
    roles = config.id_column, config.label, config.event, config.qid, config.weight, config.reader
    return data, file, config.predict_query, config.predict_ids, *roles


def _check_there(n_missing: int) -> None:
    if n_missing > 0:
        rule = "rows must be in the table that the site has now"
        raise DataError(f"{rule}, got {n_missing} that are no longer there: activate again")
