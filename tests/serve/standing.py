"""Standing processes of sites in threads of a test, over real sockets and TLS."""

import asyncio
import gc
import json
import threading
import time
import warnings
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

import httpx
import numpy as np
import pyarrow as pa

from fedapp.home import home
from fedapp.serve.standing import serve
from fedapp.serve.versions import Site
from fedapp.site.log import LOG, Audit
from fedapp.site.settings import read_node_config
from fedapp.site.standing import current, ids_of
from simulations.bench.sites import Sites
from tests.tables import made_columns

FEW = {"num-boost-round": 3, "max-depth": 3, "early-stopping-rounds": 0}


class Threads:
    """The sites' processes, each in a thread with a loop of its own."""

    def __init__(self, sites):
        self.sites = sites
        self._running = {}
        self.site = {}
        self.client = httpx.Client(base_url=sites.url(), timeout=30)

    def start(self, *names):
        for name in names or self.sites.names:
            ready, failure = threading.Event(), list[BaseException]()

            async def stand(name=name, ready=ready):
                ending = asyncio.Event()
                self.site[name] = Site(self.sites.config(name))
                self._running[name] = threading.current_thread(), asyncio.get_running_loop(), ending
                port = self.sites.ports[name]
                await serve(self.site[name], "", port, ending, lambda _: ready.set())

            def run(stand=stand, ready=ready, failure=failure):
                try:
                    asyncio.run(stand())
                except BaseException as error:
                    failure.append(error)
                finally:
                    ready.set()

            threading.Thread(target=run).start()
            ready.wait()
            if failure:
                raise failure[0]

    def stop(self, *names):
        for name in names or tuple(self._running):
            thread, loop, ending = self._running.pop(name)
            if not loop.is_closed():
                loop.call_soon_threadsafe(ending.set)
            thread.join()
        close_cut_off()

    def follow(self, name):
        """Let a process look whether its files have changed."""
        following = self.site[name].follow()
        asyncio.run_coroutine_threadsafe(following, self._running[name][1]).result(60)

    def restart(self, name):
        self.stop(name)
        self.start(name)

    def score(self, ids, **more):
        key = "id" if isinstance(ids, str) else "ids"
        reply = self.client.post("/score", json={key: ids, **more})
        return reply.status_code, reply.json()

    def close(self):
        self.stop()
        self.client.close()


def close_cut_off():
    """Close sockets of handshakes that were cut off, as the end of a process would."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def tables(objective="binary:logistic", n_parties=2, n_rows=200):
    """Tables by party: every party lacks some rows, orders them otherwise, has names and gaps."""
    columns = made_columns(objective, n_rows=n_rows)
    rng = np.random.default_rng(1)
    columns["town"] = rng.choice(["Oslo", "Rome", "Bern", None], n_rows)
    columns["kind"] = rng.choice(["new", "old", None], n_rows)
    ids = [f"c{number}" for number in rng.permutation(9000)[:n_rows]]
    names = ("bank", "insurer", "shop")[:n_parties]
    labels = columns.pop("y")
    every = {}
    for place, name in enumerate(names):
        mine = dict(list(columns.items())[place :: len(names)])
        mine = {"id": ids, **mine, **({"y": labels} if place == 0 else {})}
        rows = np.sort(rng.permutation(n_rows)[: n_rows - 7])
        order = rng.permutation(len(rows))
        every[name] = pa.table(
            {key: pa.array(list(values), from_pandas=True) for key, values in mine.items()}
        ).take(rows[order])
    return every


@cache
def _models():
    return TemporaryDirectory()


class TrainedSites(Sites):
    """Sites that train the first model of equal tables and settings, and copy what the sites that
    did so before them have."""

    def train(self, strategy="secureboost", **settings):
        if (home() / "sites").exists():
            return super().train(strategy, **settings)
        configs = {name: read_node_config(self.config(name)) for name in self.names}
        for config in configs.values():
            for of_the_test in ("data", "standing-address"):
                del config[of_the_test]
        contents = [self.table(name).read_bytes() for name in self.names]
        key = json.dumps(
            [strategy, settings, configs, [sha256(one).hexdigest() for one in contents]]
        )
        files = Path(_models().name) / sha256(key.encode()).hexdigest()
        if not files.exists():
            model = super().train(strategy, **settings)
            copytree(home(), files / "home")
            (files / "model").write_text(model)
            return model
        copytree(files / "home", home(), dirs_exist_ok=True)
        return (files / "model").read_text()


def sites_in(folder, *of_tables, **node):
    return TrainedSites(folder / "sites", tables(*of_tables), "y", **node)


def bits(rows):
    """Predictions of ``fedapp predict`` by id."""
    return {row.pop("id"): tuple(row.values()) for row in rows.to_pylist()}


def scored(threads, ids, **more):
    status, reply = threads.score(ids, **more)
    assert status == 200, reply
    rows = zip(ids, reply["rows"], strict=True)
    return {name: tuple(row["scores"].values()) for name, row in rows}


def logged(site):
    """Lines of a site's log about scores."""
    audit = Audit(home() / "sites" / site / LOG)
    lines = [fields for _, fields in audit] if audit.path.exists() else []
    assert not audit.faults
    return [fields for fields in lines if fields["event"] in ("score", "cells", "ahead", "fetch")]


@contextmanager
def as_peer(threads, asker="bank", asked="insurer"):
    """A client with one site's certificate, towards another."""
    site = threads.site[asker]
    peer = site.versions[site.current].agreed.peers[asked]
    context = site.context_to(peer.certificate)
    with httpx.Client(verify=context, base_url=f"https://{peer.address}") as client:
        yield client


def nightly(threads, **body):
    reply = threads.client.post("/nightly", json=body)
    return reply.status_code, reply.json()


def ids(site="bank"):
    return [str(name) for name in ids_of(site, current(site)[0])]


def until(is_true, seconds=20):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
