"""How fast sites score rows of a divided model among themselves (``fedapp serve --site``)."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import pyarrow as pa

from fedapp.data.datasets import source_frame
from fedapp.data.schema import Roles
from fedapp.runs.flower import free_ports
from fedapp.serve.joint import Joint
from fedapp.serve.v2 import Asked
from fedapp.serve.versions import Site
from simulations.bench.sites import Sites
from simulations.study import Row, check_names, show

PARTIES = ("bank", "insurer", "shop")
BATCH, CALLERS, WARM_UP = 300, 8, 100
MOST_ASKED = 10_000  # rows of a request


@dataclass(frozen=True)
class Model:
    """A model to score by: the table, its parties, and how it is trained."""

    data: str  # a data set; empty for made columns with names and gaps, in three classes
    parties: int = 2
    strategy: str = "secureboost"
    settings: Row = field(default_factory=dict)


TREES: Row = {"num-boost-round": 60, "max-depth": 4, "early-stopping-rounds": 0, "eta": 0.1}
DEEP: Row = {"num-boost-round": 4, "max-depth": 9, "min-child-weight": 0.0}
MODELS = {
    "higgs": Model("higgs-11k", settings=TREES),
    "credit": Model("default-credit", 3, settings=TREES),
    "names": Model("", settings={**TREES, **DEEP, "objective": "multi:softprob"}),
    "forest": Model("higgs-11k", strategy="federated-forest"),
}


def score(
    models: tuple[str, ...] = tuple(MODELS),
    requests: int = 1000,
    delay_ms: int = 20,
    ahead_rows: int = 1_000_000,
) -> None:
    """Bits, and milliseconds, of scores between real processes over TLS, all on this machine.

    First every row's score is compared with what ``fedapp predict`` writes, live and by cells sent
    ahead. Then callers ask over HTTP for rows that differ from request to request: live, with every
    party asked; live with a delay each way between the sites; nightly, by cells sent ahead. Last,
    cells of ``--ahead-rows`` rows are sent ahead (HIGGS, its rows again and again).
    """
    check_names("models", models, MODELS)
    with tempfile.TemporaryDirectory() as folder:
        timed: list[Row] = []
        for name in models:
            with patch.dict(os.environ, FEDAPP_HOME=f"{folder}/home-{name}"):
                timed += _of_model(name, MODELS[name], Path(folder) / name, requests, delay_ms)
        columns = "model; way; parties; rows=n:.0f; callers:.0f; p50 ms=p50:.2f; p99 ms=p99:.2f"
        show("Times of requests", timed, f"{columns}; requests a second=rate:.0f", 2)
        with patch.dict(os.environ, FEDAPP_HOME=f"{folder}/home"):
            _ahead(Path(folder) / "ahead", ahead_rows)


def tables_of(model: Model) -> tuple[dict[str, Any], str]:
    """Tables of the parties, each with an id and rows in an order of its own; and the label."""
    rng = np.random.default_rng(0)
    if model.data:
        frame, roles, _, _ = source_frame(model.data, Roles())
        label, dropped = roles.label, {*roles.drop, roles.id_column}
    else:
        values = rng.normal(size=(4000, 6)).round(2)
        values[rng.random(values.shape) < 0.1] = np.nan
        towns = rng.choice(np.array(["Oslo", "Rome", "Bern", None]), 4000)
        signal = np.nan_to_num(values).sum(axis=1) + (towns == "Oslo")
        numbers = {f"x{k}": pa.array(column, from_pandas=True) for k, column in enumerate(values.T)}
        label, dropped = "y", set[str]()
        classes = np.array(["low", "middle", "high"])[np.digitize(signal, [-1, 1])]
        frame = pa.table({"town": towns.tolist(), **numbers, label: classes.tolist()})
    columns = [name for name in frame.column_names if name not in {label, *dropped}]
    ids = pa.array([f"c{number}" for number in range(frame.num_rows)])
    tables = {}
    for party_id, party in enumerate(PARTIES[: model.parties]):
        names = [*columns[party_id :: model.parties], *([label] if not party_id else [])]
        table = frame.select(names).append_column("id", ids)
        tables[party] = table.take(rng.permutation(frame.num_rows))
    return tables, label


def _of_model(name: str, model: Model, folder: Path, requests: int, delay_ms: int) -> Iterator[Row]:
    tables, label = tables_of(model)
    sites = Sites(folder, tables, label, **{"standing-nightly": "all"})
    trained = sites.train(model.strategy, **model.settings)
    expected = {row.pop("id"): row for row in sites.predicted(trained).to_pylist()}
    sites.activate(trained)
    ids, about = list(expected), {"model": name, "parties": str(model.parties)}
    with sites.standing(), httpx.Client(base_url=sites.url(), timeout=60) as client:
        print(f"{name}: {_same(client, expected, 'live')} live", flush=True)
        yield from _timed(client, sites.url(), ids, requests, about | {"way": "live"})
        client.post("/nightly", json={"all": True}).raise_for_status()
        print(f"{name}: {_same(client, expected, 'nightly')} nightly", flush=True)
        more = about | {"way": "nightly"}
        yield from _timed(client, sites.url(), ids, requests, more, {"way": "nightly"})
    yield about | {"way": "nightly, in Python", **_in_process(sites, ids, requests)}
    with _delayed(sites, delay_ms / 1000), httpx.Client(base_url=sites.url()) as client:
        about |= {"way": f"live, {delay_ms} ms each way"}
        yield from _timed(client, sites.url(), ids, requests // 5, about)


def _same(client: httpx.Client, expected: Row, way: str) -> str:
    """How many scores have the bits of those of ``fedapp predict``; all of them, or an error."""
    ids, n_same = list(expected), 0
    for first in range(0, len(ids), MOST_ASKED):
        part = ids[first : first + MOST_ASKED]
        reply = client.post("/score", json={"ids": part, "way": way}).raise_for_status().json()
        rows = zip(part, reply["rows"], strict=True)
        n_same += sum(row["scores"] == expected[row_id] for row_id, row in rows)
    if n_same < len(ids):
        raise SystemExit(f"scores must be those of fedapp predict, got {n_same} of {len(ids)}")
    return f"{n_same:,} of {len(ids):,} scores have the same bits"


def _timed(
    client: httpx.Client,
    url: str,
    ids: Sequence[str],
    requests: int,
    about: Row,
    more: Row = {},  # noqa: B006
) -> Iterator[Row]:
    def body(number: int, n_rows: int) -> Row:
        rows = [ids[(number * n_rows + row) % len(ids)] for row in range(n_rows)]
        return {"id": rows[0], **more} if n_rows == 1 else {"ids": rows, **more}

    def ask(number: int, n_rows: int) -> None:
        client.post("/score", json=body(number, n_rows)).raise_for_status()

    for n_rows, n_requests in ((1, requests), (BATCH, requests // 5)):
        for number in range(WARM_UP if n_rows == 1 else 5):
            ask(number, n_rows)
        yield {
            **about,
            "n": n_rows,
            "callers": 1,
            **_spread(partial(ask, n_rows=n_rows), n_requests),
        }
    seconds, took = asyncio.run(_callers(url, body, requests // CALLERS))
    yield {**about, "n": 1, "callers": CALLERS, **_quantiles(seconds), "rate": len(seconds) / took}


def _spread(ask: Callable[[int], None], n_requests: int) -> Row:
    seconds = []
    for number in range(n_requests):
        began = time.perf_counter()
        ask(number)
        seconds.append(time.perf_counter() - began)
    return {**_quantiles(seconds), "rate": len(seconds) / sum(seconds)}


def _quantiles(seconds: Sequence[float]) -> Row:
    p50, p99 = np.quantile(seconds, (0.5, 0.99)) * 1000
    return {"p50": float(p50), "p99": float(p99)}


async def _callers(
    url: str, body: Callable[[int, int], Row], n_each: int
) -> tuple[list[float], float]:
    """Seconds of the requests of several callers at once, and of all together."""
    seconds: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def ask(caller: int) -> None:
            for number in range(n_each):
                began = time.perf_counter()
                reply = await client.post("/score", json=body(caller * n_each + number, 1))
                reply.raise_for_status()
                seconds.append(time.perf_counter() - began)

        began = time.perf_counter()
        await asyncio.gather(*map(ask, range(CALLERS)))
        return seconds, time.perf_counter() - began


def _in_process(sites: Sites, ids: Sequence[str], requests: int) -> Row:
    """The same by cells sent ahead, called in this process; with a line of the log."""

    async def ask() -> Row:
        site = Site(sites.config(sites.active))
        await site.refreshed()
        joint, seconds = Joint(site, site.versions[site.current]), []
        for number in range(WARM_UP + requests):
            asked = Asked({"id": [ids[number % len(ids)]]}, way="nightly")
            began = time.perf_counter()
            await joint.answer(asked)
            seconds.append(time.perf_counter() - began)
        await joint.close()
        return {"n": 1, "callers": 1, **_quantiles(seconds[WARM_UP:])}

    return asyncio.run(ask())


@contextmanager
def _delayed(sites: Sites, seconds: float) -> Iterator[None]:
    """Sites whose connections have a delay each way."""
    passive = sites.names[1:]
    hidden = dict(zip(passive, free_ports(len(passive)), strict=True))
    started = [sites.start(sites.active)]
    started += [sites.start(name, "--listen", f"127.0.0.1:{port}") for name, port in hidden.items()]
    pairs = [(sites.peer_ports[name], port) for name, port in hidden.items()]
    relay = multiprocessing.get_context("spawn").Process(target=relays, args=(pairs, seconds))
    relay.start()
    time.sleep(1.0)
    try:
        yield
    finally:
        relay.kill()
        for process in started:
            process.kill()
            process.wait()


def relays(pairs: Sequence[tuple[int, int]], seconds: float) -> None:
    """Relay connections from ports to others, each byte after a delay; until it is killed."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(65536):
            loop.call_later(seconds, writer.write, data)
        loop.call_later(seconds, writer.close)

    async def relay(listening: int, port: int) -> None:
        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pump(reader, other_writer), pump(other_reader, writer))

        server = await asyncio.start_server(connect, "127.0.0.1", listening)
        await server.serve_forever()

    async def every() -> None:
        await asyncio.gather(*(relay(*pair) for pair in pairs))

    asyncio.run(every())


def _ahead(folder: Path, n_rows: int) -> None:
    """Cells of many rows are sent ahead."""
    model = MODELS["higgs"]
    tables, label = tables_of(model)
    n_table = next(iter(tables.values())).num_rows
    sites = Sites(folder, tables, label, **{"standing-nightly": "all", "suffix": ".parquet"})
    trained = sites.train(model.strategy, **{**model.settings, "num-boost-round": 10})
    take = np.arange(n_rows) % n_table
    for name, table in tables.items():
        ordered = table.sort_by("id").take(take)
        ids = pa.array([f"c{number}" for number in range(n_rows)])
        id_column = ordered.column_names.index("id")
        sites.write_table(name, ordered.set_column(id_column, "id", ids))
    sites.run(
        "standing",
        model=trained,
        align="ordered",
        **{"standing.service": "higgs", "align-most-rows": 10**8},
    )
    with sites.standing(), httpx.Client(base_url=sites.url(), timeout=600) as client:
        fetched = client.post("/nightly", json={"all": True}).raise_for_status().json()
    n_bytes = sum(fetched["bytes"].values())
    print(
        f"sent ahead, 10 trees of depth 4: {fetched['rows']:,} rows, {fetched['seconds']:.1f} s, "
        f"{n_bytes / 1e6:.1f} MB",
        flush=True,
    )
