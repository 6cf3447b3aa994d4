"""Fixtures of the sites' tests."""

from __future__ import annotations

import pytest

from fedapp.site import table
from fedapp.site.settings import site_config
from tests.crypto.test_masks import NAMES


@pytest.fixture
def configs(write_table):
    """Three sites that take part in PAX, by name."""
    tables = {name: str(write_table(name, seed=seed)) for seed, name in enumerate(NAMES)}
    return {
        name: site_config({"name": name, "data": data, "label": "y", "allow": "pax"}, {})
        for name, data in tables.items()
    }


@pytest.fixture
def n_read(monkeypatch):
    """The tables that are read, as they are."""
    reads: list[str] = []
    read = table.read_source
    monkeypatch.setattr(
        table, "read_source", lambda data, *how: (reads.append(data), read(data, *how))[1]
    )
    return reads
