"""Features from a database: the rows of a query score as those of a file do."""

import os
import shutil
import sqlite3
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
sqlalchemy = pytest.importorskip("sqlalchemy")

from fedapp.data.schema import Reader  # noqa: E402
from fedapp.errors import ConfigError, DataError, PartyError  # noqa: E402
from fedapp.runs.flower import free_ports  # noqa: E402
from fedapp.site.rows_to_predict import Query, _engine  # noqa: E402
from fedapp.site.settings import SiteConfig  # noqa: E402
from fedapp.site.standing import current, ids_of  # noqa: E402
from simulations.bench.sites import Sites  # noqa: E402
from tests.serve.standing import FEW, Threads, tables, until  # noqa: E402

QUERY = {
    "predict-query": "SELECT * FROM customers WHERE id IN :ids",
    "predict-ids": "SELECT id FROM customers",
}


def write(url, table):
    """The table customers, of numbers, texts and gaps; its ids are numbers."""
    types = {str: sqlalchemy.Text, float: sqlalchemy.Float, int: sqlalchemy.Integer}
    columns = []
    for name, values in table.to_pydict().items():
        kind = next(type(value) for value in values if value is not None)
        columns.append(sqlalchemy.Column(name, types[kind], primary_key=name == "id"))
    described = sqlalchemy.Table("customers", sqlalchemy.MetaData(), *columns)
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        described.create(connection)
        connection.execute(described.insert(), table.to_pylist())
    engine.dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """The URL of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'customers.db'}"
        return
    pytest.importorskip("psycopg")
    folders = f"{os.environ['PATH']}:" + ":".join(
        map(str, Path("/usr/lib/postgresql").glob("*/bin"))
    )
    if not (control := shutil.which("pg_ctl", path=folders)):
        pytest.skip("needs PostgreSQL")
    (port,) = free_ports(1)
    who = {"user": "nobody"} if os.getuid() == 0 else {}  # it refuses to be root's
    with TemporaryDirectory() as folder:  # tmp_path is below a folder that only one user reads
        Path(folder).chmod(0o777)
        call = [control, "-D", f"{folder}/data", "-s", "-l", f"{folder}/log", "-o"]
        listening = f"-p {port} -k {folder} -h 127.0.0.1 -F"
        subprocess.run([*call, "-A trust -U site --no-sync", "initdb"], check=True, cwd="/", **who)
        subprocess.run([*call, listening, "start"], check=True, cwd="/", **who)
        place = f"postgresql+psycopg://site@127.0.0.1:{port}/postgres"
        try:
            yield place
            _engine(place).dispose()
        finally:
            subprocess.run([*call, "", "-m", "fast", "stop"], check=True, cwd="/", **who)


def numbered(every):
    """The same tables with numbers as ids."""
    numbers = {}
    for name, table in every.items():
        ids = [numbers.setdefault(one, 1000 + len(numbers)) for one in table["id"].to_pylist()]
        every[name] = table.set_column(0, "id", pa.array(ids))
    return every


@pytest.mark.slow
def test_rows_of_a_database_score_as_those_of_a_file(tmp_path, url):
    every = numbered(tables("binary:logistic", 2, 200))
    sites = Sites(tmp_path / "sites", every, "y")
    model = sites.train(**FEW)
    expected = {row["id"]: row["probability_1"] for row in sites.predicted(model).to_pylist()}
    names = list(expected)
    write(url, every["insurer"])
    sites.configure("insurer", {"predict-data": url, **QUERY})
    assert sites.predicted(model).to_pylist() == [
        {"id": name, "probability_1": score} for name, score in expected.items()
    ]
    sites.activate(model)
    threads = Threads(sites)

    def scores(asked):
        return [row["scores"]["probability_1"] for row in threads.score(asked)[1].get("rows", [])]

    def refuses(asked, rule):
        status, reply = threads.score(asked)
        return status in (422, 502) and f"insurer: {rule}" in reply["error"].replace("rows ", "")

    try:
        threads.start()
        assert [scores([name]) for name in names[:20]] == [[expected[name]] for name in names[:20]]
        assert scores(names) == [*expected.values()]
        # Another query counts without a restart.
        for text, rule in {
            "SELECT * FROM customers WHERE NOT id IN :ids": "got 1 that are no longer there",
            "SELECT * FROM customers UNION ALL SELECT * FROM customers WHERE id IN :ids": "must be "
            "unique",
            "SELECT id FROM customers WHERE id IN :ids": "table must have the model's columns",
        }.items():
            sites.configure("insurer", {"predict-query": text})
            until(lambda rule=rule: rule in threads.score(names[0])[1].get("error", ""))
        sites.configure("insurer", QUERY)
        until(lambda: scores(names) == [*expected.values()])
        # Changed rows score otherwise from the next request on; a row that is gone has no score.
        column = next(name for name in every["insurer"].column_names if name in "abcdef")
        engine = sqlalchemy.create_engine(url)
        with engine.begin() as connection:
            connection.exec_driver_sql(f"UPDATE customers SET {column} = NULL")
        assert scores(names) != [*expected.values()]
        with engine.begin() as connection:
            connection.exec_driver_sql(f"DELETE FROM customers WHERE id = {names[0]}")
        assert refuses(names[0], "must be in the table that the site has now")
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP TABLE customers")
        engine.dispose()
        rule = "database must answer the queries of the node config"
        assert refuses(names[1], rule)
        assert "customers" not in threads.score(names[1])[1]["error"]  # nothing of the query leaves
        before = ids_of("bank", current("bank")[0])
        with pytest.raises(PartyError, match=f"insurer.*{rule}"):
            sites.activate(model)
        np.testing.assert_array_equal(ids_of("bank", current("bank")[0]), before)
    finally:
        threads.close()


# What is wrong with a database


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "rows.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE rows (id INTEGER, a REAL)")
        connection.executemany("INSERT INTO rows VALUES (?, ?)", [(n, n / 2) for n in range(7000)])
    connection.close()
    return path


def query(path, rows="SELECT id, a FROM rows WHERE id IN :ids", ids="SELECT id FROM rows"):
    return queries(f"sqlite:///{path}", rows, ids)


def queries(url, rows, ids):
    return Query(SiteConfig("shop", url, predict_data=url, predict_query=rows, predict_ids=ids))


def test_more_ids_than_a_query_may_bind_are_asked_for_in_parts(database):
    asked = query(database)
    bound = asked.bound_ids("id", Reader())
    assert bound["17"] == 17
    frame = asked.rows(list(bound.values()))
    np.testing.assert_array_equal(frame["a"].to_numpy(), np.arange(7000) / 2)


def test_a_file_that_is_replaced_is_read_from_the_next_query_on(database):
    asked = query(database)
    assert asked.rows([1]).num_rows == 1
    with sqlite3.connect(database.with_name("new.db")) as connection:
        connection.execute("CREATE TABLE rows (id INTEGER, a REAL)")
    connection.close()
    database.with_name("new.db").rename(database)
    assert asked.rows([1]).num_rows == 0


def test_a_database_is_only_read_and_ids_are_no_part_of_the_query(database):
    writes = query(database, "DELETE FROM rows WHERE id IN :ids RETURNING id")
    with pytest.raises(DataError, match="database must answer the queries of the node config"):
        writes.rows([1])
    assert query(database).rows(["0); DELETE FROM rows; --"]).num_rows == 0
    assert query(database).rows([1, 2]).num_rows == 2


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"rows": "SELECT * FROM rows"}, "predict-query in the node config must be a query WHERE"),
        ({"ids": "SELECT a FROM rows"}, "predict-ids must give the id column 'id'"),
        ({"ids": "SELECT id FROM none"}, "database must answer the queries"),
    ],
)
def test_queries_that_do_not_fit_are_refused(database, given, rule):
    with pytest.raises((ConfigError, DataError), match=rule):
        query(database, **given).bound_ids("id", Reader())


def test_a_driver_that_is_missing_is_named():
    with pytest.raises(ConfigError, match=r"predict-data .*whose driver is installed, got"):
        queries("nosuch://host/db", "SELECT 1 WHERE 1 IN :ids", "SELECT 1")
