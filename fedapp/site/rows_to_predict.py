"""Rows to predict: of a table, of a database, or of several parties' tables joined by id.

A database is asked by SQLAlchemy: a read-only query of rows, with ``:ids`` bound.

Rows to predict are compared with quantiles of the training columns, which a party stores with its
part of a model, as column names alone do not distinguish tables. The two rules were measured on
default-credit, give-me-some-credit and the breast-hetero tables, each randomly cut in two (60 cuts,
5 to 1,000 rows to predict): no cut comes near either rule, and the other party's file of
default-credit is detected from 100 rows on. Tables whose columns are all distributed alike
(breast-hetero) cannot be distinguished; hence files are named after parties.

    warning     half of the columns have a Kolmogorov distance (largest difference of the
                distribution functions) above 0.15 + 1.5 / sqrt(n_rows), or most values outside
                the training range, widened by a tenth; the largest median of matching rows was
                0.36 at 20 rows, 0.13 at 300 to 1,000
    error       in most rows, most values and at least three are outside that range: one column
                that drifts, such as days since a date, does not make another table
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fedapp.arrays import Ints
from fedapp.data.columns import Columns
from fedapp.data.datasets import NAME, read_source
from fedapp.data.predictions import columns_of_frame, read_columns_of
from fedapp.data.read import column_names, file_version
from fedapp.data.schema import PLAIN, REGISTRY, Reader, Roles, with_names
from fedapp.data.scratch import batches, side_by_side
from fedapp.data.table import Table, ids_of
from fedapp.errors import ConfigError, DataError, check_package
from fedapp.home import home
from fedapp.messages.vertical import INNER
from fedapp.site.settings import SiteConfig
from fedapp.site.store import read_part
from fedapp.site.table import read_held, read_once, row_ids
from fedapp.trees.categories import Categories, chosen
from fedapp.trees.divided import PARTS, ActivePart, Part

Values = npt.NDArray[np.float32]
# Of the comparison with training columns; see the module.
N_QUANTILES = 65
MOST_ROWS = 100_000  # of which quantiles are taken
MARGIN = 0.1  # of a column's range, beyond it
LEAST_DISTANCE, OF_FEW_ROWS = 0.15, 1.5
FEWEST_OUTSIDE = 3  # columns of a row
IDS = "ids"  # the bound parameter
CHUNK = 5000  # ids of one query: SQLite and drivers limit bound values
READ_ONLY = {"sqlite": "PRAGMA query_only = ON"}
TRANSACTION = "SET TRANSACTION READ ONLY"  # PostgreSQL, MySQL, Oracle


def read_to_predict(config: SiteConfig, model: str) -> tuple[Part, Table]:
    """Read the site's part of a model, by its id, and the rows to predict with it."""
    if not NAME.fullmatch(model):
        raise DataError("model must have a part at this party, got no id of a model")
    part = read_part(home() / "sites" / config.name / model, *PARTS)
    return part, rows_of_part(config, part)


def rows_of_part(config: SiteConfig, part: Part) -> Table:
    """The rows to predict, with the columns of the site's part of a model.

    Labels and weights are read only for the part with the labels, and if the table has them in
    every row.
    """
    data = config.predict_data or config.data
    roles, foreign = Roles(id_column=config.id_column), ""
    if with_labels := isinstance(part, ActivePart):
        roles = replace(roles, label=config.label, weight=config.weight)
        roles = replace(roles, base_margin=part.margin_column, event=config.event, qid=config.qid)
    elif config.simulated and not config.is_share:
        # Among simulated parties with one table each, only the active one has the label.
        foreign = config.label
    model = Columns.of_model(part.columns, part.categories, config.reader, part.kinds)
    if config.frame is not None:
        table = columns_of_frame(config.frame(), model, roles)
    elif is_database(data):
        query = Query(config)
        frame = query.rows(list(query.bound_ids(config.id_column, config.reader).values()))
        table = columns_of_frame(frame, model, roles)
    else:
        read = partial(read_once, n_parties=config.n_shares) if config.simulated else read_held
        names, kinds, reader = tuple(part.columns), tuple(part.kinds), config.reader
        table = read(read_columns_of, data, names, roles, foreign, reader, part.categories, kinds)
    return table if with_labels else replace(table, labels=None, weights=None)


# A database, and features by row


def is_database(data: str) -> bool:
    """Whether a site's table is named by the URL of a database."""
    return "://" in data


class Query:
    """A site's queries of the rows to predict, by their ids, and of all ids.

    Raises ConfigError if a setting is missing, DataError if the database does not answer.
    """

    def __init__(self, config: SiteConfig) -> None:
        check_package("sqlalchemy", "to read a database", "database")
        from sqlalchemy import bindparam, text

        if f":{IDS}" not in (rows := config.predict_query):
            rule = f"must be a query WHERE the id column IN :{IDS}"
            raise ConfigError(f"predict-query in the node config {rule}, got {rows or 'none'}")
        if not config.predict_ids:
            raise ConfigError("predict-ids in the node config must be the query of all ids")
        self._engine = _engine(config.predict_data)
        self._rows = text(rows).bindparams(bindparam(IDS, expanding=True))
        self._ids = text(config.predict_ids)

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
        from sqlalchemy.exc import SQLAlchemyError, StatementError

        try:
            with self._engine.connect() as connection:
                connection.exec_driver_sql(READ_ONLY.get(connection.dialect.name, TRANSACTION))
                result = connection.execute(query, values or {})
                names, rows = with_names(list(result.keys())), result.fetchall()
            columns = zip(*rows, strict=True) if rows else ([] for _ in names)
            return pa.table([pa.array(column) for column in columns], names=names)
        except SQLAlchemyError as error:
            # Its text has the query and its values: only the kind leaves.
            orig = error.orig if isinstance(error, StatementError) else None
            cause = type(orig or error).__name__
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
        self._query = Query(config)
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


def source_of(config: SiteConfig) -> Hashable:
    """Where the rows are and how they are read, with the version of a file; if it changes, the rows
    may have."""
    data = config.predict_data or config.data
    file = () if is_database(data) else file_version(Path(data))
    roles = config.id_column, config.label, config.event, config.qid, config.weight, config.reader
    return data, file, config.predict_query, config.predict_ids, *roles


def _check_there(n_missing: int) -> None:
    if n_missing > 0:
        rule = "rows must be in the table that the site has now"
        raise DataError(f"{rule}, got {n_missing} that are no longer there: activate again")


# Tables joined by id


def read_joined(
    sources: Mapping[str, str],
    columns: Sequence[str],
    roles: Roles,
    first: str,
    categories: Categories = (),
    readers: Mapping[str, Reader] | None = None,
    kinds: Sequence[str] = (),
    join: str = INNER,
) -> tuple[Table, list[str], dict[str, Table]]:
    """Read the rows that all tables have, with a model's columns in the model's order.

    Also returns the ids of the first party's rows that others do not have, and the tables.

    Parameters
    ----------
    sources : of each party.
    columns : of the model; ``bank.balance`` is ``balance`` of the party ``bank``.
    roles : the ids that match rows; labels and weights, from any table that has them; base
        margins, from the first party's.
    first : the party whose rows are wanted, and whose order they keep.
    readers : from the schemas of the parties; declared columns may be absent.
    kinds : of the model's columns.
    join : ``left`` for all rows of the first party, which then has the labels and weights too;
        values of columns whose party lacks a row are missing.
    """
    if not roles.id_column:
        raise ConfigError('--id must name the column to match rows by, as in --id customer; got ""')
    readers = readers or dict.fromkeys(sources, PLAIN)
    names = {party: _column_names(source, readers[party]) for party, source in sources.items()}
    owners = [_owner(column, names, set(columns)) for column in columns]
    features = {party: [name for at, name in owners if at == party] for party in sources}
    with_roles = (first, *sources) if join == INNER else (first,)
    others = {party: names[party].difference(features[party]) for party in with_roles}
    labels_at = next((party for party, extra in others.items() if roles.label in extra), first)
    at_hand = [party for party in (labels_at, *others) if roles.weight in others[party]]
    weights_at = next(iter(at_hand), labels_at)
    column_ids = {
        party: [index for index, (owner, _) in enumerate(owners) if owner == party]
        for party in sources
    }
    tables = {
        party: read_columns_of(
            source,
            features[party],
            Roles(
                roles.label if party == labels_at else "",
                roles.id_column,
                roles.weight if party == weights_at else "",
                base_margin=roles.base_margin if party == first else "",
                event=roles.event if party == labels_at else "",
                qid=roles.qid if party == labels_at else "",
            ),
            reader=readers[party],
            categories=chosen(categories, column_ids[party]),
            kinds=[kinds[index] for index in column_ids[party]] if kinds else (),
        )
        for party, source in sources.items()
    }
    ids = {
        party: row_ids(table, SiteConfig(party, sources[party], id_column=roles.id_column), True)
        for party, table in tables.items()
    }
    is_wanted = np.ones(len(ids[first]), dtype=bool)
    if join == INNER:
        is_wanted = np.isin(ids[first], reduce(np.intersect1d, ids.values()))
    wanted = ids[first][is_wanted]
    taken = {
        party: taken_by_id(tables[party], party_ids, wanted) for party, party_ids in ids.items()
    }
    # Columns of a party come in the order of the model, so each is taken when its turn comes.
    at = {party: iter(table.values.T) for party, table in taken.items()}
    every = (next(at[party]) for party, _ in owners)
    values = side_by_side(every, (len(wanted), len(owners)))
    joined = replace(
        taken[labels_at],
        columns=tuple(columns),
        values=values,
        weights=taken[weights_at].weights,
        base_margins=taken[first].base_margins,
        categories=categories,
    )
    return joined, ids[first][~is_wanted].tolist(), tables


def taken_by_id(table: Table, ids: npt.NDArray[np.str_], wanted: npt.NDArray[np.str_]) -> Table:
    """Rows of a table that has `ids`, in an order of ids; of an id it lacks, missing values."""
    order = np.argsort(ids, kind="stable")
    positions = np.searchsorted(ids[order], wanted) % len(ids)
    taken = table.take(order[positions])
    taken.values[ids[order[positions]] != wanted] = np.nan
    return taken


def _column_names(source: str, reader: Reader) -> set[str]:
    if source in REGISTRY:
        return set(read_source(source).columns)
    return set(column_names(Path(source), replace(reader, tolerant=True)))


def _owner(column: str, names: Mapping[str, set[str]], columns: Collection[str]) -> tuple[str, str]:
    owners = [
        (party, column.removeprefix(f"{party}."))
        for party, present in names.items()
        if column.startswith(f"{party}.") and column.removeprefix(f"{party}.") in present
    ]
    owners += [
        (party, column)
        for party, present in names.items()
        if column in present and f"{party}.{column}" not in columns
    ]
    if len(owners) != 1:
        got = " and ".join(f"'{name}' of {party}" for party, name in owners) or "none"
        way = ": leave out of the tables what the model was not trained on" if owners else ""
        rule = f"column '{column}' of the model must be in one of the tables"
        raise DataError(f"{rule}, got {got}{way}")
    return owners[0]


# The training range


def quantiles(values: Values) -> Values:
    """Quantiles of each column, float32, shape (n_columns, 65); NaN for a column without values."""
    out = np.full((values.shape[1], N_QUANTILES), np.nan, dtype=np.float32)
    shares = np.linspace(0, 1, N_QUANTILES)
    for points, column in zip(out, values[:: 1 + len(values) // MOST_ROWS].T, strict=True):
        present = column[~np.isnan(column)]
        if present.size:
            points[:] = np.quantile(present, shares, method="inverted_cdf")
    return out


def unlike_columns(trained: Values, values: Values) -> list[int]:
    """Columns with another distribution than in training, if they are half of all; else none."""
    n_beyond = sum(outside.sum(axis=0) for outside in _outside(trained, values))
    beyond = 2 * n_beyond > len(values)
    far = [
        column_id
        for column_id, (points, column) in enumerate(zip(trained, values.T, strict=True))
        if beyond[column_id] or _is_far(points, column)
    ]
    return far if 2 * len(far) >= len(trained) else []


def check_range(trained: Values, values: Values) -> None:
    """Check that most rows are in the training range; raises DataError."""
    n_ranged = int((trained[:, 0] < trained[:, -1]).sum())
    by_row = (outside.sum(axis=1) for outside in _outside(trained, values))
    n_rows = sum(int(((2 * n > n_ranged) & (n >= FEWEST_OUTSIDE)).sum()) for n in by_row)
    if 2 * n_rows > len(values):
        rule = "table must have values in the range that the model was trained on"
        raise DataError(
            f"{rule}, got {n_rows:,} of {len(values):,} rows with most columns outside of it; "
            "is it the table of another party, or in other units?"
        )


def _outside(trained: Values, values: Values) -> Iterator[npt.NDArray[np.bool_]]:
    """Values outside their column's training range, by batches; none of a constant column."""
    lows, highs = trained[:, 0], trained[:, -1]
    margins = MARGIN * (highs - lows)
    for rows in batches(len(values), 4 * values.shape[1]):
        beyond = (values[rows] < lows - margins) | (values[rows] > highs + margins)
        yield np.asarray(beyond & (lows < highs))


def _is_far(points: Values, column: Values) -> bool:
    """Whether the Kolmogorov distance of a column exceeds what rows of the same table reach."""
    present: Any = np.sort(column[~np.isnan(column)])
    if np.isnan(points).any() or not present.size:
        return False
    # Both distribution functions jump: compare them on both sides of every stored quantile.
    at = np.unique(points)
    sides: tuple[Literal["left", "right"], ...] = ("left", "right")
    distances = [
        np.searchsorted(present, at, side) / present.size
        - np.searchsorted(points, at, side) / points.size
        for side in sides
    ]
    return bool(np.abs(distances).max() > LEAST_DISTANCE + OF_FEW_ROWS / np.sqrt(present.size))
