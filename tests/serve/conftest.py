"""A table of columns of all kinds, and sites that score."""

import numpy as np
import pytest

from tests.serving import TOWNS


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Sites wait longer for each other, as the machine may be busy, and not between pings."""
    monkeypatch.setattr("fedapp.serve.joint.LIVE_SECONDS", 20.0)
    monkeypatch.setattr("fedapp.serve.joint.PING_SECONDS", 0.0)


@pytest.fixture
def table(write_table):
    """Numbers, booleans, dates and categories, some of each missing."""
    rng = np.random.default_rng(1)
    days = ["2024-01-31", "2025-12-01", "2023-07-04", ""]
    return write_table(
        n_rows=80,
        count=rng.choice(["1", "2", "30", ""], 80),
        flag=rng.choice(["true", "false", ""], 80),
        day=rng.choice(days, 80),
        town=rng.choice(TOWNS, 80),
    )


@pytest.fixture
def stand(tmp_path):
    """``stand(...)``: sites that score by a model they have trained, their processes, its id."""
    from tests.serve.standing import FEW, Threads, sites_in

    open_threads = []

    def make(*of_tables, strategy="secureboost", node=None, **settings):
        sites = sites_in(tmp_path, *of_tables, **(node or {}))
        few = FEW if strategy == "secureboost" else {}
        model = sites.train(strategy, **{**few, **settings})
        sites.activate(model)
        threads = Threads(sites)
        open_threads.append(threads)
        threads.start()
        return sites, threads, model

    yield make
    for threads in open_threads:
        threads.close()
