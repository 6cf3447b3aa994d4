"""The setting ``data``: one table to split, or a file of each party of one machine."""

import numpy as np
import pyarrow.csv
import pytest

from fedapp.data.datasets import party_sources
from fedapp.data.partition import SUBSETS, split_rows
from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, DataError
from fedapp.runs.baselines import run_baselines
from fedapp.runs.local import run_local, site_contexts
from fedapp.runs.predict import predict_table
from fedapp.runs.tables import check_tables, stacked_tables
from fedapp.settings import load_settings
from tests.federated import model_bytes, summary_of

METHODS = ("pax", "bagging", "cyclic", "fedavg-linear")


TEN = [f"{part}.csv" for part in range(10)]
SOURCES = {  # by party, in the order of the names
    **{name: {} for name in ("breast-cancer", "folder/a=b.csv")},  # to be split
    "insurer=b.csv, bank=a.csv": {"bank": "a.csv", "insurer": "b.csv"},
    ",".join(TEN): {f"party-{part:02d}": name for part, name in enumerate(TEN, 1)},
}


@pytest.mark.parametrize("data", SOURCES)
def test_a_table_is_split_or_each_party_has_one(data):
    found = party_sources(data, len(SOURCES[data]) or 3)
    assert list(found.items()) == list(SOURCES[data].items())


@pytest.mark.parametrize(
    ("data", "n_parties", "match"),
    [
        ("a.csv,b.csv", 3, "each of parties=3, got 2: set parties=2$"),
        ("a.csv,,b.csv", 3, "name a table between any two commas, got 'a.csv,,b.csv'$"),
        ("bank=a.csv,b.csv", 2, "name all parties or none, .*; got 'b.csv' unnamed$"),
        ("bank=a.csv,bank=b.csv", 2, "a different name, .*; got 'bank' more than once$"),
        ("my bank=a.csv,shop=b.csv", 2, "letters, digits, .*; got 'my bank'$"),
    ],
)
def test_what_is_wrong_with_the_tables_of_parties_is_said(data, n_parties, match):
    with pytest.raises(ConfigError, match=f"^data must .*{match}"):
        load_settings({"data": data, "parties": n_parties})


# Runs


@pytest.fixture
def files(write_table):
    return {"bank": write_table("bank", 120, seed=1), "shop": write_table("shop", 60, seed=2)}


@pytest.fixture
def own_files(settings, files):
    def make(strategy="pax", **more):
        data = ",".join(f"{name}={path}" for name, path in files.items())
        return settings(strategy=strategy, **{"data": data, "label": "y", "parties": 2, **more})

    return make


@pytest.mark.parametrize(
    ("strategy", "more"),
    [("pax", {"pax__aggregation": "secure", "colsample_bynode": 0.7}), ("bagging", {})],
)
def test_columns_in_another_order_make_the_same_model(
    write_table, settings, tmp_path, strategy, more
):
    own = [{"c": [*("xyz" * 40)]}, {"c": [*("zwy" * 20)]}]
    bank, shop = (write_table(str(i), 120 - 60 * i, i, **one) for i, one in enumerate(own))
    turned = tmp_path / "turned.csv"
    pyarrow.csv.write_csv(pyarrow.csv.read_csv(shop).select(["c", "y", "b", "a"]), turned)
    shops = shop, turned
    given = {"strategy": strategy, "label": "y", "parties": 2, "subsample": 0.7, **more}
    found = []
    for other in shops:
        run = settings(data=f"bank={bank},shop={other}", **given)
        check_tables(run)
        folder = run_local(run)
        outputs = [folder.path / f"{place}.csv" for place in range(2)]
        predictions = [
            predict_table(folder.path, str(table), "", output, "y").scores
            for table, output in zip(shops, outputs, strict=True)
        ]
        assert predictions[0] == predictions[1]
        found.append((model_bytes(folder), folder.summary["metrics"], run_baselines(run)["pooled"]))
    assert found[0] == found[1]


@pytest.mark.by_default("pax", "cyclic")
@pytest.mark.parametrize("strategy", METHODS)
def test_the_model_is_that_of_a_deployment_with_the_same_tables(own_files, files, strategy):
    # Rows are drawn as in a simulation.
    usual = {"label": "y", "draws-secret": "none", "allow": ",".join(METHODS)}
    contexts = site_contexts({"name": name, "data": str(p), **usual} for name, p in files.items())
    here = run_local(own_files(strategy, subsample=0.7))
    there = run_local(own_files(strategy, subsample=0.7), contexts)
    assert model_bytes(here) == model_bytes(there)
    parties = summary_of(here)["parties"]
    assert parties == [{"name": "bank", "rows": 86}, {"name": "shop", "rows": 43}]


def test_the_baselines_have_the_rows_that_the_run_held_back_and_every_party_trains_alone(
    own_files, files
):
    settings = own_files()
    table, rows = stacked_tables(settings)
    fractions = settings.test_fraction, settings.valid_fraction
    for name, path in files.items():
        own = load_table(path, Roles(label="y"))
        split = split_rows(own.n_rows, *fractions, settings.seed)
        for subset in SUBSETS:
            held = own.take(getattr(split, subset))
            assert np.array_equal(table.values[rows[name][subset]], held.values)
            assert np.array_equal(table.labels[rows[name][subset]], held.labels)
    found = run_baselines(settings)
    assert list(found["alone"]) == ["bank", "shop"]
    assert found["alone"]["bank"] != found["alone"]["shop"] != found["pooled"]


def test_the_same_rows_and_shared_ids_of_two_parties_are_warned_of(own_files, files, write_table):
    def warned(**more):
        return check_tables(own_files(num_boost_round=1, pax__bins="equal", **more))

    assert warned() == []
    for name, first, rows in (("bank", 0, 120), ("shop", 110, 60)):
        write_table(name, rows, first, i=[f"c{row}" for row in range(first, first + rows)])
    shared = [
        "bank and shop share 10 ids of 'i': remove rows that are in both tables, or the id if it "
        "only numbers rows; if both have rows of a person, name it as group too"
    ]
    assert warned(id="i") == shared
    assert warned(id="i", group="i") == []
    summary = run_local(own_files(num_boost_round=1, pax__bins="equal", id="i")).summary
    assert set(shared) <= set(summary["warnings"])
    files["copy"] = files["bank"].with_name("copy.csv")
    files["copy"].write_bytes(files["bank"].read_bytes())
    same, *others = warned(id="i", parties=3)
    assert same.startswith("bank and copy have the same rows (")
    assert others == shared


def test_columns_that_differ_are_refused_by_name_and_a_schema_is_of_a_party(
    own_files, files, write_table
):
    with pytest.raises(ConfigError, match=r"^schema must name parties that data names, got 'mi"):
        check_tables(own_files(schema="bank=a.toml,mill=b.toml"))
    write_table("shop", 60, seed=2, b=None, c=range(60))
    rule = "^shop: columns must be those of bank, got 'b' is missing, 'c', which bank does not have"
    for do in (run_local, run_baselines):
        with pytest.raises(DataError, match=rule):
            do(own_files())
    write_table("shop", 60, seed=2, y=["0", "one"] * 30)  # names there, numbers here
    assert set(stacked_tables(own_files())[0].labels.tolist()) == {"0", "1", "one"}
