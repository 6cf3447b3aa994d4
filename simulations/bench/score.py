"""How fast rows are scored: by ``fedapp serve``, and by sites of a divided model."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import pyarrow as pa

import fedapp
from fedapp.data.datasets import read_source, source_frame
from fedapp.data.schema import Roles
from fedapp.runs.flower import free_ports, is_healthy
from simulations.bench.sites import START_SECONDS, Sites
from simulations.deployment import Proxy
from simulations.study import Row, check_names, show

PARTIES = ("bank", "insurer", "shop")
BATCH, CALLERS, WARM_UP = 300, 8, 100
MOST_ASKED = 10_000  # rows of a request
Body = Callable[[Sequence[Any]], Row]  # a request for some rows


@dataclass(frozen=True)
class Model:
    """A model to score by: the table, its parties, and how it is trained."""

    data: str
    parties: int = 2
    strategy: str = "secureboost"
    settings: Row = field(default_factory=dict)


TREES: Row = {"num-boost-round": 60, "max-depth": 4, "early-stopping-rounds": 0, "eta": 0.1}
MODELS = {
    "pax": Model("breast-cancer", 3, "pax", {"num-boost-round": 50}),
    "higgs": Model("higgs-11k", settings=TREES),
    "credit": Model("default-credit", 3, settings=TREES),
    "forest": Model("higgs-11k", strategy="federated-forest"),
}


def score(
    models: tuple[str, ...] = tuple(MODELS),
    requests: int = 1000,
    delay_ms: int = 20,
    ahead_rows: int = 1_000_000,
) -> Iterator[Row]:
    """Milliseconds of scores by other processes on this machine, over HTTP.

    First every row's score is compared with what ``fedapp predict`` writes. Then callers ask for
    rows that differ from request to request. A PAX model is served by ``fedapp serve``. Sites of a
    divided model score among themselves over TLS: live, with every party asked; live with a delay
    each way between the sites; nightly, by cells sent ahead. Last, cells of ``--ahead-rows`` rows
    are sent ahead (HIGGS, its rows again and again).
    """
    check_names("models", models, MODELS)
    timed = list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        for name in models:
            model, place = MODELS[name], Path(folder) / name
            with patch.dict(os.environ, FEDAPP_HOME=f"{folder}/home-{name}"):
                if model.strategy == "pax":
                    lines = _of_pax(model, place, requests)
                else:
                    lines = _of_sites(model, place, requests, delay_ms)
                for line in lines:
                    timed.append({"model": name, "parties": str(model.parties), **line})
                    yield timed[-1]
        with patch.dict(os.environ, FEDAPP_HOME=f"{folder}/home"):
            yield _ahead(Path(folder) / "ahead", ahead_rows)
    columns = "model; way; parties; rows:.0f; callers:.0f; p50 ms=p50:.2f; p99 ms=p99:.2f"
    show("Times of requests", timed, f"{columns}; requests a second=rate:.0f", 3)


def tables_of(model: Model) -> tuple[dict[str, Any], str]:
    """Tables of the parties, each with an id and rows in an order of its own; and the label."""
    rng = np.random.default_rng(0)
    frame, roles, _, _ = source_frame(model.data, Roles())
    others = {roles.label, *roles.drop, roles.id_column}
    columns = [name for name in frame.column_names if name not in others]
    ids = pa.array([f"c{number}" for number in range(frame.num_rows)])
    tables = {}
    for party_id, party in enumerate(PARTIES[: model.parties]):
        names = [*columns[party_id :: model.parties], *([roles.label] if not party_id else [])]
        table = frame.select(names).append_column("id", ids)
        tables[party] = table.take(rng.permutation(frame.num_rows))
    return tables, roles.label


def _of_pax(model: Model, folder: Path, requests: int) -> Iterator[Row]:
    settings = {name.replace("-", "_"): value for name, value in model.settings.items()}
    run = fedapp.run("pax", data=model.data, parties=model.parties, run_dir=folder, **settings)
    table = read_source(model.data)
    rows = [
        dict(zip(table.columns, row, strict=True)) for row in table.values.astype(float).tolist()
    ]
    scores = run.predict_proba(model.data)[:, 1].astype(float).tolist()

    def body(asked: Sequence[Row]) -> Row:
        return {"rows": list(asked)} if len(asked) > 1 else {"row": asked[0]}

    (port,) = free_ports(1)
    command = [sys.executable, "-m", "fedapp", "serve", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        if not is_healthy(process, port, START_SECONDS):
            raise SystemExit("the server must answer, got none")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            _check(client, body, rows, [{"probability_1": score} for score in scores])
            yield from _timed(client, body, rows, requests, "served")
    finally:
        process.terminate()
        process.wait()


def _of_sites(model: Model, folder: Path, requests: int, delay_ms: int) -> Iterator[Row]:
    tables, label = tables_of(model)
    sites = Sites(folder, tables, label, **{"standing-nightly": "all"})
    trained = sites.train(model.strategy, **model.settings)
    expected = {row.pop("id"): row for row in sites.predicted(trained).to_pylist()}
    sites.activate(trained)
    ids = list(expected)

    def body(asked: Sequence[str], **more: str) -> Row:
        return {"ids": list(asked), **more} if len(asked) > 1 else {"id": asked[0], **more}

    nightly = partial(body, way="nightly")
    with sites.standing(), httpx.Client(base_url=sites.url(), timeout=60) as client:
        _check(client, partial(body, way="live"), ids, list(expected.values()))
        yield from _timed(client, body, ids, requests, "live")
        client.post("/nightly", json={"all": True}).raise_for_status()
        _check(client, nightly, ids, list(expected.values()))
        yield from _timed(client, nightly, ids, requests, "nightly")
    with _delayed(sites, delay_ms / 1000), httpx.Client(base_url=sites.url()) as client:
        yield from _timed(client, body, ids, requests // 5, f"live, {delay_ms} ms each way")


def _check(client: httpx.Client, body: Body, rows: Sequence[Any], expected: Sequence[Row]) -> None:
    """Check that all scores have the bits of those of ``fedapp predict``."""
    scores = list[Row]()
    for first in range(0, len(rows), MOST_ASKED):
        asked = body(rows[first : first + MOST_ASKED])
        reply = client.post("/score", json=asked).raise_for_status().json()
        scores += [row["scores"] for row in reply["rows"]]
    n_same = sum(
        wanted.items() <= ours.items() for ours, wanted in zip(scores, expected, strict=True)
    )
    if n_same < len(rows):
        raise SystemExit(f"scores must be those of fedapp predict, got {n_same} of {len(rows)}")


def _timed(
    client: httpx.Client, body: Body, rows: Sequence[Any], requests: int, way: str
) -> Iterator[Row]:
    """Times of one row and of many a request, and of one row with several callers."""

    def asked(number: int, n_rows: int) -> Row:
        first = number * n_rows
        return body([rows[row % len(rows)] for row in range(first, first + n_rows)])

    def ask(number: int, n_rows: int) -> float:
        request, start = asked(number, n_rows), time.perf_counter()
        client.post("/score", json=request).raise_for_status()
        return time.perf_counter() - start

    for n_rows, n_requests in ((1, requests), (BATCH, requests // 5)):
        for number in range(WARM_UP if n_rows == 1 else 5):
            ask(number, n_rows)
        seconds = [ask(number, n_rows) for number in range(n_requests)]
        yield {"way": way, "rows": n_rows, "callers": 1, **_figures(seconds, sum(seconds))}
    seconds, in_all = asyncio.run(_callers(str(client.base_url), asked, requests // CALLERS))
    yield {"way": way, "rows": 1, "callers": CALLERS, **_figures(seconds, in_all)}


def _figures(seconds: Sequence[float], in_all: float) -> Row:
    """Milliseconds, and requests a second."""
    p50, p99 = np.quantile(seconds, (0.5, 0.99)) * 1000
    return {"p50": float(p50), "p99": float(p99), "rate": len(seconds) / in_all}


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


@contextmanager
def _delayed(sites: Sites, seconds: float) -> Iterator[None]:
    """Sites whose connections have a delay each way."""
    with ExitStack() as ends:
        for name in sites.names:
            words = list[str]()
            if name != sites.active:
                (port,) = free_ports(1)
                words = ["--listen", f"127.0.0.1:{port}"]
                proxy = ends.enter_context(Proxy(port, sites.peer_ports[name]))
                ends.callback(proxy.shutdown)
                proxy.mode, proxy.delay = "delay", seconds
            process = sites.start(name, *words)
            ends.callback(process.wait)
            ends.callback(process.kill)
        yield


def _ahead(folder: Path, n_rows: int) -> Row:
    """Seconds and bytes of cells of many rows that are sent ahead."""
    model = MODELS["higgs"]
    tables, label = tables_of(model)
    sites = Sites(folder, tables, label, **{"standing-nightly": "all", "suffix": ".parquet"})
    trained = sites.train(model.strategy, **{**model.settings, "num-boost-round": 10})
    ids = pa.array([f"c{number}" for number in range(n_rows)])
    for name, table in tables.items():
        ordered = table.sort_by("id").take(np.arange(n_rows) % table.num_rows)
        sites.write_table(name, ordered.drop("id").append_column("id", ids))
    fixed = {"standing.service": "higgs", "align-most-rows": 10**8}
    sites.run("standing", model=trained, align="ordered", **fixed)
    with sites.standing(), httpx.Client(base_url=sites.url(), timeout=600) as client:
        fetched = client.post("/nightly", json={"all": True}).raise_for_status().json()
    figures = {"seconds": fetched["seconds"], "bytes": sum(fetched["bytes"].values())}
    return {"model": "higgs", "way": "sent ahead", "trees": 10, "rows": fetched["rows"], **figures}
