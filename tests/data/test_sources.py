"""The setting ``data``: one table to split, or one for each party."""

import pytest

from fedapp.data.datasets import party_sources
from fedapp.errors import ConfigError
from fedapp.settings import load_settings
from fedapp.site.settings import site_config


@pytest.mark.parametrize("data", ["breast-cancer", "rows.csv", "folder/a=b.csv"])
def test_one_table_without_a_name_is_to_be_split(data):
    assert party_sources(data, 3) == {}


def test_tables_without_names_are_those_of_numbered_parties():
    assert party_sources("a.csv, b.csv", 2) == {"party-1": "a.csv", "party-2": "b.csv"}


def test_tables_with_names_come_in_the_order_of_the_names():
    found = party_sources("insurer=b.csv, bank=a.csv", 2)
    assert list(found.items()) == [("bank", "a.csv"), ("insurer", "b.csv")]


def test_ten_numbered_parties_keep_their_order():
    found = party_sources(",".join(f"{part}.csv" for part in range(10)), 10)
    assert list(found.values()) == [f"{part}.csv" for part in range(10)]
    assert sorted(found) == list(found)


@pytest.mark.parametrize(
    ("data", "n_parties", "match"),
    [
        ("a.csv,b.csv", 3, "each of parties=3, got 2: set parties=2$"),
        ("bank=a.csv", 2, "each of parties=2, got 1: set parties=1$"),
        ("a.csv,,b.csv", 3, "name a table between any two commas, got 'a.csv,,b.csv'$"),
        ("bank=,shop=b.csv", 2, "name a table between any two commas, got 'bank=,shop=b.csv'$"),
        ("bank=a.csv,b.csv", 2, "name all parties or none, .*; got 'b.csv' unnamed$"),
        ("bank=a.csv,bank=b.csv", 2, "a different name, .*; got 'bank' more than once$"),
        ("my bank=a.csv,shop=b.csv", 2, "letters, digits, .*; got 'my bank'$"),
        ("=a.csv,=b.csv", 2, "letters, digits, .*; got ''$"),
    ],
)
def test_what_is_wrong_with_the_tables_of_parties_is_said(data, n_parties, match):
    with pytest.raises(ConfigError, match=f"^data must .*{match}"):
        load_settings({"data": data, "parties": n_parties})


def config_of(part, data):
    run = {**load_settings({"data": data, "parties": 2, "label": "y"}).as_config()}
    return site_config({"partition-id": part, "num-partitions": 2}, run)


def test_a_simulated_party_with_a_file_of_its_own_has_its_name_from_there():
    found = config_of(1, "bank=a.csv,insurer=b.csv")
    assert (found.name, found.data, found.label) == ("insurer", "b.csv", "y")
    assert found.simulated
    assert not found.is_share


def test_a_simulated_party_without_a_file_has_a_share():
    found = config_of(1, "a.csv")
    assert (found.name, found.data) == ("party-2", "a.csv")
    assert found.simulated
    assert found.is_share
