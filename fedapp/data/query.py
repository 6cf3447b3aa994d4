"""Rows of a database by their ids: a read-only query with ``:ids`` bound, by SQLAlchemy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pyarrow as pa

from fedapp.data.schema import Reader, with_names
from fedapp.data.table import ids_of
from fedapp.errors import ConfigError, DataError, check_package

IDS = "ids"  # the bound parameter
CHUNK = 5000  # ids of one query: SQLite and drivers limit bound values
READ_ONLY = {"sqlite": "PRAGMA query_only = ON"}
TRANSACTION = "SET TRANSACTION READ ONLY"  # PostgreSQL, MySQL, Oracle


def is_database(data: str) -> bool:
    """Whether a site's table is named by the URL of a database."""
    return "://" in data


class Query:
    """Two queries of a database: of rows by their ids, and of all ids.

    Raises ConfigError if a setting is missing, DataError if the database does not answer.
    """

    def __init__(self, url: str, rows: str, ids: str) -> None:
        check_package("sqlalchemy", "to read a database", "database")
        from sqlalchemy import bindparam, text

        if f":{IDS}" not in rows:
            rule = f"must be a query WHERE the id column IN :{IDS}"
            raise ConfigError(f"predict-query in the node config {rule}, got {rows or 'none'}")
        if not ids:
            raise ConfigError("predict-ids in the node config must be the query of all ids")
        self._engine = _engine(url)
        self._rows = text(rows).bindparams(bindparam(IDS, expanding=True))
        self._ids = text(ids)

    def bound_ids(self, id_column: str, reader: Reader) -> dict[str, Any]:
        """The database's value of each id, by the id as text."""
        if "," in id_column:
            rule = "must be one column where rows come from a database"
            raise ConfigError(f"id {rule}, got {id_column}: let the queries join them into one")
        frame = self._frame(self._ids)
        if id_column not in frame.column_names:
            rule = "predict-ids must give the id column {}"
            raise DataError.naming(rule, f"'{id_column}'")
        names = ids_of(frame, id_column, reader)
        return dict(zip(names.tolist(), frame[id_column].to_pylist(), strict=True))

    def rows(self, ids: Sequence[Any]) -> Any:
        """The rows of some ids, as the database has them, in any order; a pyarrow.Table."""
        parts = [ids[first : first + CHUNK] for first in range(0, len(ids), CHUNK)] or [[]]
        frames = [self._frame(self._rows, {IDS: list(part)}) for part in parts]
        try:
            return pa.concat_tables(frames, promote_options="permissive")
        except pa.ArrowException:
            raise DataError("predict-query must give each column one type") from None

    def _frame(self, query: Any, values: Mapping[str, Any] | None = None) -> Any:
        from sqlalchemy.exc import SQLAlchemyError

        try:
            with self._engine.connect() as connection:
                connection.exec_driver_sql(READ_ONLY.get(connection.dialect.name, TRANSACTION))
                result = connection.execute(query, values or {})
                names, rows = with_names(list(result.keys())), result.fetchall()
            columns = zip(*rows, strict=True) if rows else ([] for _ in names)
            return pa.table([pa.array(column) for column in columns], names=names)
        except SQLAlchemyError as error:
            # Its text has the query and its values: only the kind leaves.
            cause = type(getattr(error, "orig", None) or error).__name__
            rule = "database must answer the queries of the node config"
            raise DataError.naming(f"{rule}, got {cause}", here=f"{rule}, got {error}") from None
        except (pa.ArrowException, OverflowError):
            raise DataError("predict-query must give each column one type") from None


@cache
def _engine(url: str) -> Any:
    """Connections of a database, shared by all its queries."""
    from sqlalchemy import create_engine, make_url
    from sqlalchemy.exc import SQLAlchemyError
    from sqlalchemy.pool import NullPool

    try:
        # A connection to a file that was replaced would read the one before.
        address = make_url(url)
        is_file = address.get_backend_name() == "sqlite" and "memory" not in url
        if is_file and address.database:
            return create_engine(address, poolclass=NullPool)
        return create_engine(address, pool_pre_ping=True)
    except (SQLAlchemyError, ImportError) as error:
        rule = "predict-data in the node config must be a file, or the URL of a database"
        raise ConfigError(f"{rule} whose driver is installed, got: {error}") from None
