"""Fixtures of the sites' tests."""

import pytest

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
def joined(sites, write_table):
    """``joined(n_rows, shop={...})``: two sites with columns of the same rows, of which the bank
    has the label; what more their node configs say."""

    def make(n_rows=40, **more):
        ids = [f"c{number}" for number in range(n_rows)]
        bank = {"name": "bank", "data": write_table("bank", n_rows, id=ids)}
        shop = {"name": "shop", "data": write_table("shop", n_rows, id=ids, y=None), "label": ""}
        nodes = ({"id": "id", **node, **more.get(node["name"], {})} for node in (bank, shop))
        return sites(*nodes)

    return make
