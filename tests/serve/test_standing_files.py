"""Files and databases that change, break or hang below standing scores."""

import sqlite3
import threading
import time
from functools import partial

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")

from fedapp.serve import joint, peers
from fedapp.site.standing import current, folder_of
from tests.serve.standing import bits, ids, scored, tables, until


@pytest.mark.slow
def test_cells_of_the_night_that_are_torn_are_as_none(stand):
    sites, threads, _ = stand()
    sites.configure("insurer", {"standing-nightly": "all"})
    name, path = ids()[0], folder_of("bank") / current("bank")[0] / "cells.insurer"
    assert threads.client.post("/nightly", json={"all": True}).status_code == 200
    whole = path.read_bytes()
    for content in (b"", whole[:300], whole[:-30], b"other"):
        threads.stop("bank")
        path.write_bytes(content)
        threads.start("bank")
        assert threads.score(name)[1]["way"] == "live"
        assert threads.score(name, way="nightly")[0] == 404


def write_database(path, table):
    with sqlite3.connect(path) as database:
        names = [f'"{name}"' + " text" * (name == "id") for name in table.column_names]
        database.execute(f"create table r ({', '.join(names)})")
        places = ", ".join("?" * len(names))
        rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
        database.executemany(f"insert into r values ({places})", list(rows))
    database.close()


@pytest.mark.slow
def test_a_database_is_followed_as_a_table_is(stand, tmp_path):
    pytest.importorskip("sqlalchemy")
    sites, threads, model = stand()
    expected, table = bits(sites.predicted(model)), tables()["insurer"]
    names = list(expected)
    write_database(tmp_path / "rows.db", table)
    query = {"predict-query": "select * from r where id in :ids", "predict-ids": "select id from r"}
    where = {"predict-data": f"sqlite:///{tmp_path}/rows.db"}
    sites.configure("insurer", {**query, **where})
    site = threads.site["insurer"]
    until(lambda: not site.versions[site.current].features.is_in_memory)
    assert scored(threads, names) == expected

    def refuses(rule):
        return rule in threads.score(names[0])[1].get("error", "")

    # Another query counts without a restart.
    queries = {
        "select * from r where id in :ids and 1 = 0": "got 1 that are no longer there",
        "select * from r where id not in :ids": "got 1 that are no longer there",
        "select * from r union all select * from r where id in :ids": "must be unique for every",
        "select id from r where id in :ids": "table must have the model's columns",
    }
    for text, rule in queries.items():
        sites.configure("insurer", {"predict-query": text})
        until(partial(refuses, rule))
        assert "kind" not in threads.score(names[0])[1]["error"]
    sites.configure("insurer", query)
    until(lambda: threads.score(names[0])[0] == 200)
    # A file that is replaced is read from the next request on.
    stays = [name != names[0] for name in table["id"].to_pylist()]
    write_database(tmp_path / "new.db", table.filter(stays))
    (tmp_path / "new.db").rename(tmp_path / "rows.db")
    assert threads.score(names[0])[0] == 422
    assert scored(threads, names[1:]) == {name: expected[name] for name in names[1:]}


@pytest.mark.slow
def test_a_database_that_hangs_is_named_in_time(stand, monkeypatch):
    _, threads, _ = stand()
    site, may_end = threads.site["bank"], threading.Event()
    features = site.versions[site.current].features
    monkeypatch.setattr(type(features), "is_in_memory", False)
    monkeypatch.setattr(features.__class__, "read", lambda self, rows: may_end.wait(20))
    monkeypatch.setattr(peers, "_cells", _nothing)
    monkeypatch.setattr("fedapp.trees.cells.Crossing.read", lambda *_: {})
    monkeypatch.setattr(joint, "LIVE_SECONDS", 0.5)
    began = time.perf_counter()
    status, reply = threads.score(ids()[0])
    assert time.perf_counter() - began < 2
    may_end.set()
    assert (status, reply["error"]) == (
        504,
        "database of bank must answer within 0.5 s, got nothing",
    )


async def _nothing(*_):
    return b""
