"""Horizontal parties of one machine, each with a file of its own."""

import json

import numpy as np
import pyarrow.csv
import pytest
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.data.partition import SUBSETS, split_rows
from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, DataError, StoppedError
from fedapp.run_folder import resumed_settings
from fedapp.runs.baselines import run_baselines
from fedapp.runs.local import run_local, site_contexts
from fedapp.runs.predict import predict_table
from fedapp.runs.tables import check_tables, stacked_tables
from fedapp.settings import load_settings

METHODS = ("pax", "bagging", "cyclic", "fedavg-linear")


@pytest.fixture
def files(write_table):
    return {"bank": write_table("bank", 120, seed=1), "shop": write_table("shop", 60, seed=2)}


@pytest.fixture
def own_files(settings, files):
    def make(strategy="pax", **more):
        data = ",".join(f"{name}={path}" for name, path in files.items())
        given = {"data": data, "label": "y", "parties": 2, **more}
        return settings(strategy=strategy, **given)

    return make


def contexts_of(files):
    own = {
        "label": "y",
        "draws-secret": "none",
        "allow": ",".join(METHODS),
    }  # rows are drawn as in a simulation
    return site_contexts({"name": name, "data": str(path), **own} for name, path in files.items())


@pytest.mark.slow
@pytest.mark.by_default("pax", "bagging")
@pytest.mark.parametrize("strategy", [*METHODS, "fedxgbllr"])
def test_columns_in_another_order_make_the_same_model(write_table, settings, strategy):
    own = [{"c": [*("xyz" * 40)]}, {"c": [*("zwy" * 20)]}]
    bank, shop = (write_table(str(i), 120 - 60 * i, i, **one) for i, one in enumerate(own))
    frame = pyarrow.csv.read_csv(shop)
    turned = shop.with_name("turned.csv")
    pyarrow.csv.write_csv(frame.select(["c", "y", "b", "a"]), turned)
    quick = {"fedxgbllr__trees": 2, "fedxgbllr__rounds": 1, "fedxgbllr__epochs": 1}
    given = {"strategy": strategy, "label": "y", "parties": 2, "subsample": 0.7}
    given |= quick if strategy == "fedxgbllr" else {}
    given |= {"pax__aggregation": "secure", "colsample_bynode": 0.7} if strategy == "pax" else {}
    models, scores, pooled = [], [], []
    for other in (shop, turned):
        run = settings(data=f"bank={bank},shop={other}", **given)
        check_tables(run)
        folder = run_local(run)
        models.append((folder.path / "model.json").read_bytes())
        scores.append(folder.summary["metrics"])
        pooled.append(run_baselines(run)["pooled"])
        predictions = [
            predict_table(folder.path, str(table), "", folder.path / f"{place}.csv", "y").scores
            for place, table in enumerate((shop, turned))
        ]
        assert predictions[0] == predictions[1]
    assert models[0] == models[1]
    assert scores[0] == scores[1]
    assert pooled[0] == pooled[1]


def test_a_run_with_columns_in_another_order_is_resumed(write_table, settings):
    bank, shop = write_table("bank", 120, 1), write_table("shop", 60, 2)
    pyarrow.csv.write_csv(pyarrow.csv.read_csv(shop).select(["b", "y", "a"]), shop)
    given = {"data": f"bank={bank},shop={shop}", "label": "y", "parties": 2, "num_boost_round": 4}
    whole = run_local(settings(**given))
    begun = settings(**given)
    with pytest.raises(StoppedError):
        run_local(begun, on_round=lambda info: info["round"] < 2)
    resumed = run_local(resumed_settings(load_settings({"resume": begun.run_dir})))
    assert (resumed.path / "model.json").read_bytes() == (whole.path / "model.json").read_bytes()


@pytest.mark.by_default("pax", "cyclic")
@pytest.mark.parametrize("strategy", METHODS)
def test_the_model_is_that_of_a_deployment_with_the_same_tables(own_files, files, strategy):
    here = run_local(own_files(strategy, subsample=0.7))
    there = run_local(own_files(strategy, subsample=0.7), contexts_of(files))
    text = (here.path / "model.json").read_bytes()
    assert text == (there.path / "model.json").read_bytes()
    parties = json.loads((here.path / "summary.json").read_text())["parties"]
    assert parties == [{"name": "bank", "rows": 86}, {"name": "shop", "rows": 43}]


def test_the_baselines_have_the_rows_that_the_run_held_back(own_files, files):
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


def test_every_party_trains_alone_on_its_file(own_files):
    found = run_baselines(own_files())
    assert list(found["alone"]) == ["bank", "shop"]
    assert found["alone"]["bank"] != found["alone"]["shop"] != found["pooled"]


@pytest.mark.slow
def test_the_same_rows_and_shared_ids_of_two_parties_are_warned_of(own_files, files, write_table):
    def warned(**more):
        given = own_files(num_boost_round=1, pax__bins="equal", **more)
        warnings = run_local(given).summary["warnings"]
        found = [text for text in warnings if "rows are of the rarer class" not in text]
        assert check_tables(given) == found
        return found

    assert warned() == []
    for name, first in (("bank", 0), ("shop", 110)):
        rows = {"bank": 120, "shop": 60}[name]
        write_table(name, rows, first, i=[f"c{row}" for row in range(first, first + rows)])
    assert warned(id="i") == [
        "bank and shop share 10 ids of 'i': remove rows that are in both tables, or the id if it "
        "only numbers rows; if both have rows of a person, name it as group too"
    ]
    assert warned(id="i", group="i") == []
    files["copy"] = files["bank"].with_name("copy.csv")
    files["copy"].write_bytes(files["bank"].read_bytes())
    (same, shared) = warned(id="i", parties=3)
    assert same.startswith("bank and copy have the same rows (")
    assert shared.startswith("bank and shop share 10 ids")


def test_columns_that_differ_are_refused_by_name(own_files, files, write_table):
    write_table("shop", 60, seed=2, b=None, c=range(60))
    rule = "^shop: columns must be those of bank, got 'b' is missing, 'c', which bank does not have"
    with pytest.raises(DataError, match=rule):
        run_local(own_files())
    with pytest.raises(DataError, match=rule):
        run_baselines(own_files())


def test_class_names_of_one_file_and_numbers_of_the_other_are_classes_of_both(
    own_files, files, write_table
):
    write_table("shop", 60, seed=2, y=["0", "one"] * 30)
    table, _ = stacked_tables(own_files())
    assert set(table.labels.tolist()) == {"0", "1", "one"}


@pytest.mark.slow
@pytest.mark.parametrize("exports", [False, True])
def test_tables_without_header_lines_have_a_schema_each(tmp_path, settings, exports):
    rng = np.random.default_rng(0)
    ids, a, b = [np.arange(60), *rng.normal(size=(2, 60)).round(2)]
    tables = {"bank": (ids, a, (a + b > 0).astype(int)), "shop": (ids, b)}
    names = {"bank": ["id", "a", "y"], "shop": ["id", "b"]}
    for party, columns in tables.items():
        np.savetxt(tmp_path / f"{party}.csv", np.column_stack(columns), "%g", ",")
        text = f"header = false\nnames = {json.dumps(names[party])}\n"
        (tmp_path / f"{party}.toml").write_text(text)
    data = ",".join(f"{party}={tmp_path / party}.csv" for party in tables)
    run = settings(
        strategy="federated-forest",
        federated_forest__trees=2,
        federated_forest__max_depth=3,
        data=data,
        schema=data.replace(".csv", ".toml"),
        parties=2,
        label="y",
        id="id",
        align="rows",
        allow_export=exports,
        federated_forest__master_keeps_model=exports,
        share_column_names=exports,
    )
    check_tables(run)
    folder = run_local(run)
    for party in tables:
        (tmp_path / f"{party}.toml").unlink()  # the run has copies
    words = ["predict", str(folder.path), "--data", data, "--id", "id"]
    done = CliRunner().invoke(cli, [*words, "--output", str(tmp_path / "out.csv")])
    assert done.exit_code == 0, done.output
    assert "60 rows written" in done.output


def test_a_schema_of_no_party_is_refused(own_files):
    with pytest.raises(ConfigError, match=r"^schema must name parties that data names, got 'mi"):
        check_tables(own_files(schema="bank=a.toml,mill=b.toml"))
