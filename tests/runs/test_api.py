"""Training and predicting from Python: the same as the command, on frames as on files."""

import csv
import doctest
import importlib
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.csv
import pytest
import xgboost
from typer.testing import CliRunner

import fedapp
from fedapp import arguments
from fedapp.commands import cli
from fedapp.data.datasets import as_arrow
from fedapp.home import app_folder
from fedapp.trees.divided import DividedModel

SHORT = {"num_boost_round": 2, "max_depth": 2, "max_bin": 16}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Runs go to a folder of the test."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def mixed(write_table):
    """A table of numbers, booleans, dates and categories, some of each missing."""
    rng = np.random.default_rng(1)

    def column(values):
        return [str(value) for value in rng.choice(values, 80)]

    return write_table(
        n_rows=80,
        count=column(["1", "2", "30", ""]),
        flag=column(["true", "false", ""]),
        day=column(["2024-01-31", "2025-12-01", "2023-07-04", ""]),
        town=column(["Oslo", "Rome", "Bern", ""]),
    )


class Streamed:
    """A frame of a library that speaks Arrow and nothing else."""

    def __init__(self, table):
        self.table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


def model_of(run):
    return (run.path / "model.json").read_text()


# Importing


def test_importing_fedapp_loads_nothing_else():
    code = "import fedapp, sys; print(*sorted(name.partition('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"flwr", "torch", "xgboost", "sklearn", "numpy", "pyarrow", "pydantic", "pandas"}
    assert not heavy & set(done.stdout.split())


def test_all_public_names_are_there_and_others_are_not():
    assert all(getattr(fedapp, name) is not None for name in fedapp.__all__)
    assert set(fedapp.__all__) <= set(dir(fedapp))
    with pytest.raises(AttributeError, match=r"^module 'fedapp' has no attribute 'rnu'$"):
        fedapp.rnu  # noqa: B018


# Frames


@pytest.mark.slow
@pytest.mark.by_default("<lambda>", "Streamed")
@pytest.mark.parametrize("kind", [lambda table: table, Streamed])
def test_a_frame_trains_the_model_of_its_file(mixed, kind):
    table = pyarrow.csv.read_csv(
        mixed, convert_options=pyarrow.csv.ConvertOptions(strings_can_be_null=True)
    )
    assert {str(type) for type in table.schema.types} >= {"bool", "date32[day]", "string"}
    of_file = fedapp.run("pax", data=mixed, label="y", parties=2, **SHORT)
    of_frame = fedapp.run("pax", data=kind(table), label="y", parties=2, **SHORT)
    assert model_of(of_frame) == model_of(of_file)
    assert of_frame.summary["data"] == "frame"
    assert np.array_equal(of_frame.predict_proba(kind(table)), of_file.predict_proba(mixed))


@pytest.mark.slow
@pytest.mark.by_default("pandas")
@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_frame_of_a_library_trains_the_model_of_its_file(mixed, library):
    frame = pytest.importorskip(library).read_csv(mixed)
    if library == "pandas":
        frame = frame.set_index(frame.index + 1000)  # no column of the table
    of_frame = fedapp.run("pax", data=frame, label="y", parties=2, drop_columns="day", **SHORT)
    of_file = fedapp.run("pax", data=mixed, label="y", parties=2, drop_columns="day", **SHORT)
    assert model_of(of_frame) == model_of(of_file)


def whole_and_text_categories(n_rows=80):
    """A table whose categories are numbers and booleans, and the same with texts for them."""
    rng = np.random.default_rng(3)
    places = rng.integers(0, 6, n_rows)
    names = {
        "whole": (pa.array([12, 3, 7, 40, 5, 9]), ["12", "3", "7", "40", "5", "9"]),
        "part": (pa.array([1.0, 2.5, 3.0, 4.0, 0.5, 9.0]), ["1", "2.5", "3", "4", "0.5", "9"]),
        "flag": (pa.array([True, False]), ["True", "False"]),
    }
    others = {"x": rng.normal(size=n_rows), "y": np.isin(places, [0, 3, 4]).astype(int)}
    marked, texts = dict[str, Any](others), dict[str, Any](others)
    for name, (values, written) in names.items():
        codes = pa.array(places % len(values))
        marked[name] = pa.DictionaryArray.from_arrays(codes, values)
        texts[name] = pa.DictionaryArray.from_arrays(codes, written)
    return pa.table(marked), pa.table(texts)


@pytest.mark.by_default("arrow", "pandas file")
@pytest.mark.parametrize("kind", ["arrow", "pandas", "pandas file"])
def test_categories_of_numbers_are_categories(kind):
    table, texts = whole_and_text_categories()
    data = table if kind == "arrow" else table.to_pandas()
    if kind == "pandas file":
        data.to_parquet("rows.parquet", engine="pyarrow")
        data = "rows.parquet"
    run = fedapp.run("pax", data=data, label="y", parties=2, **SHORT)
    as_texts = fedapp.run("pax", data=texts, label="y", parties=2, **SHORT)
    assert model_of(run) == model_of(as_texts)
    assert run.to_xgboost().feature_types == ["float", "c", "c", "c"]
    assert np.array_equal(run.predict_proba(data), as_texts.predict_proba(texts))
    assert run.summary["facts"][0] == (
        "feature columns 'whole', 'part', 'flag' have numbers or other values that the table marks "
        "as categories, read as categories"
    )


@pytest.mark.slow
def test_a_label_of_categories_of_numbers_is_of_numbers():
    table, _ = whole_and_text_categories()
    table = table.select(["x", "whole", "y"])
    marked = table.set_column(2, "y", table["y"].dictionary_encode())
    runs = [
        fedapp.run("pax", data=each, label="y", objective="reg:squarederror", **SHORT)
        for each in (table, marked)
    ]
    assert model_of(runs[0]) == model_of(runs[1])


@pytest.mark.slow
@pytest.mark.by_default("Categorical")
@pytest.mark.parametrize("type", ["Categorical", "Enum"])
def test_categories_of_polars_are_categories(type):
    polars = pytest.importorskip("polars")
    _, texts = whole_and_text_categories()
    own = (
        polars.Categorical
        if type == "Categorical"
        else polars.Enum(["12", "3", "7", "40", "5", "9"])
    )
    frame = polars.from_arrow(texts.select(["x", "whole", "y"])).with_columns(
        polars.col("whole").cast(polars.String).cast(own)
    )
    of_frame = fedapp.run("pax", data=frame, label="y", parties=2, **SHORT)
    of_texts = fedapp.run(
        "pax", data=texts.select(["x", "whole", "y"]), label="y", parties=2, **SHORT
    )
    assert model_of(of_frame) == model_of(of_texts)


def test_an_array_has_columns_by_number():
    rng = np.random.default_rng(0)
    array = np.column_stack([rng.normal(size=(60, 2)), rng.integers(0, 2, 60)])
    run = fedapp.run("pax", data=array, label="c2", parties=2, **SHORT)
    assert run.model.columns == ("c0", "c1")
    assert run.predict(array).tolist() == run.predict(array[:, :2]).tolist()


@pytest.mark.slow
def test_several_frames_are_a_party_each(write_table):
    paths = [write_table(name, seed=seed) for seed, name in enumerate(("bank", "shop"))]
    frames = [pyarrow.csv.read_csv(path) for path in paths]
    listed = fedapp.run("pax", data=frames, label="y", **SHORT)
    named = fedapp.run("pax", data={"bank": frames[0], "shop": paths[1]}, label="y", **SHORT)
    text = ",".join(map(str, paths))
    assert model_of(listed) == model_of(fedapp.run("pax", data=text, label="y", **SHORT))
    assert model_of(listed) == model_of(named)
    assert [party["name"] for party in listed.summary["parties"]] == ["party-1", "party-2"]
    assert [party["name"] for party in named.summary["parties"]] == ["bank", "shop"]
    assert named.summary["data"] == f"bank=frame,shop={paths[1]}"


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        (pandas.Series([1.0]), r"^data must be a table, which a column's to_frame\(\) is, got one"),
        (object(), r"^data must be a table's name or path, .* got builtins.object$"),
        (np.zeros(3), r"^data must be an array of rows and columns, got shape \(3,\)$"),
        (np.array([[1, "x"], [None, {}]], object), "^data must be a frame whose columns are of"),
        (
            pa.table({"y": pa.DictionaryArray.from_arrays([0], pa.array([{"a": 1}]))}),
            "^columns of a frame must be of types that Parquet files have, got others in 'y': wri",
        ),
    ],
)
def test_what_is_no_frame_is_refused_and_leaves_no_folder(frame, match):
    with pytest.raises(fedapp.DataError, match=match):
        fedapp.run("pax", data=frame, label="y")
    assert not list(Path("runs").glob("*"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"y": pandas.Series([0])}, "y must be omitted: data has rows and labels in one table"),
        ({"X": np.zeros((1, 1))}, "X must be omitted: data has rows and labels in one table"),
        ({"label": pandas.Series([0])}, "label must be the name of a column of data, got Series: "),
        ({"params": {"eta": 0.1}}, "params must be omitted: settings are arguments of their own"),
        ({"verbose": 1}, "verbose must be omitted: progress=True shows progress"),
        ({"data": {"age": [1, 2]}}, "got a column named 'age': pandas.DataFrame(data) is a table"),
        ({"data": {"age": np.zeros(2)}}, "got a column named 'age': pandas.DataFrame(data) is a"),
    ],
)
@pytest.mark.parametrize("call", [fedapp.run, fedapp.tune, fedapp.compare])
def test_a_call_as_of_another_library_gets_the_call_that_is_right(call, given, told):
    methods = ["pax"] if call is fedapp.compare else "pax"
    with pytest.raises(fedapp.ConfigError, match=re.escape(told)):
        call(methods, **given)


def test_a_frame_that_breaks_a_rule_leaves_no_folder(write_table):
    table = pyarrow.csv.read_csv(write_table())
    with pytest.raises(fedapp.DataError, match="label column 'z' must be in the table"):
        fedapp.run("pax", data=table, label="z")
    assert not list(Path("runs").glob("*"))


# Settings


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_dept": 3}, "max_dept is not a setting; did you mean max_depth?"),
        ({"n_trees": 3}, "n_trees is not a setting; did you mean num_boost_round?"),
        ({"l2_regularization": 3}, "l2_regularization is not a setting; did you mean reg_lambda?"),
        ({"pax": {"bin": 3}}, "pax={'bin': ...} is not a setting; did you mean pax={'bins': ...}?"),
        (
            {"local_rounds": 3},
            "local_rounds is not a setting; did you mean bagging={'local_rounds': ...}?",
        ),
        ({"reg_lambda": -1}, "reg_lambda must be >= 0.0, got -1"),
        (
            {"early_stopping_rounds": 2, "valid_fraction": 0},
            "valid_fraction must be > 0 with early_stopping_rounds, got 0.0",
        ),
        (
            {"pax": {"bins": "x"}},
            "pax={'bins': ...} must be one of 'auto', 'share' or 'equal', got 'x'",
        ),
        (
            {"drop_columns": ["a", "b, c"]},
            "drop_columns must be names without commas, got 'b, c': a schema drops a column by its "
            'type = "drop"',
        ),
        ({"eta": 0.1, "learning_rate": 0.3}, "eta must be given once, got 0.1 and 0.3"),
        (
            {"secureboost": {"key_bits": 2048}},
            "secureboost={'key_bits': ...} must be omitted for pax, which does not read it, got "
            "2048; read by secureboost",
        ),
        ({"eta": object()}, "eta must be a text, a number, a truth value or a list, got object"),
    ],
)
def test_a_wrong_setting_is_told_as_python_writes_it(given, told):
    with pytest.raises(fedapp.ConfigError) as error:
        fedapp.run("pax", **given)
    assert str(error.value) == told


@pytest.mark.parametrize(
    ("positive", "classes"), [(True, ("False", "True")), (False, ("True", "False"))]
)
def test_a_truth_value_may_be_the_positive_label(positive, classes):
    table = pa.table({"a": [*range(40)], "y": [row % 3 == 0 for row in range(40)]})
    given = {"data": table, "label": "y", "parties": 2, "num_boost_round": 1}
    assert fedapp.run("pax", **given, positive_label=positive).classes == classes


def test_settings_are_named_as_in_python():
    found = arguments.settings_of(
        "pax",
        {
            "reg_lambda": np.float32(2),
            "reg_alpha": 1,
            "lambda_": None,
            "drop_columns": ["a", "b"],
            "monotone_constraints": {"age": 1, "income": -1},
            "interaction_constraints": [["age", "income"], ["sex"]],
            "federated_forest": {"max_depth": 3},
            "init_model": Path("runs") / "one",
            "label": 54,
        },
    )
    assert found == {
        "lambda": 2.0,
        "alpha": 1,
        "drop-columns": "a,b",
        "monotone-constraints": "age:1,income:-1",
        "interaction-constraints": "[age,income],[sex]",
        "federated-forest.max-depth": 3,
        "init-model": "runs/one",
        "label": "54",
    }


# Runs


@pytest.mark.slow
def test_python_and_the_command_train_the_same_model():
    words = ["run", "pax", "-c", "num-boost-round=2", "-c", "max-depth=2", "-c", "max-bin=16"]
    words += ["-c", "pax.bins=equal", "-c", "lambda=2", "-c", "run-dir=by-command"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    run = fedapp.run("pax", pax={"bins": "equal"}, reg_lambda=2, run_dir="by-python", **SHORT)
    by_command = fedapp.load("by-command")
    assert model_of(run) == model_of(by_command)
    assert run.summary.keys() == by_command.summary.keys()
    files = {path.name for path in run.path.iterdir()}
    assert files == {path.name for path in by_command.path.iterdir()}


@pytest.mark.slow
def test_flower_trains_the_same_model_and_stops_for_a_callback():
    rounds = []
    given = {**SHORT, "num_boost_round": 6, "parties": 2}
    local = fedapp.run("pax", **given)
    flower = fedapp.run(
        "pax", engine="simulation", on_round=lambda info: rounds.append(info["round"]), **given
    )
    assert model_of(flower) == model_of(local)
    assert rounds == [1, 2, 3, 4, 5, 6]
    given["num_boost_round"] = 200
    with pytest.raises(fedapp.StoppedError, match=r"^the run was stopped after round"):
        fedapp.run("pax", engine="simulation", on_round=lambda info: False, **given)


@pytest.mark.slow
def test_a_callback_sees_every_round_and_stops_the_run_which_goes_on(write_table):
    given = {**SHORT, "num_boost_round": 4, "label": "y", "parties": 2}
    table = pyarrow.csv.read_csv(write_table(n_rows=60))
    seen = []
    whole = fedapp.run("pax", data=table, on_round=seen.append, **given)
    assert [info["round"] for info in seen] == [1, 2, 3, 4]
    assert [record["valid_auc"] for record in records(whole)] == [
        info["valid"]["auc"] for info in seen
    ]
    with pytest.raises(fedapp.StoppedError) as stopped:
        fedapp.run(
            "pax", data=table, run_dir="stopped", on_round=lambda info: info["round"] < 2, **given
        )
    folder = Path("stopped").resolve()
    assert (
        str(stopped.value)
        == f"the run was stopped after round 2; resume={folder} goes on from there"
    )
    assert stopped.value.__notes__ == [
        "the run is kept in stopped; fedapp.run('pax', resume='stopped') goes on from there"
    ]
    with pytest.raises(fedapp.ConfigError, match="must be the folder of a run that has finished"):
        fedapp.load(folder)
    (kept,) = folder.glob("frame-*")
    assert kept.stat().st_mode & 0o777 == 0o600
    resumed = fedapp.run("pax", resume=folder)
    assert model_of(resumed) == model_of(whole)
    assert not [*folder.glob("frame-*"), *folder.glob("stop")]


def test_an_error_of_a_callback_ends_the_run():
    def fail(info):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fedapp.run("pax", on_round=fail, **SHORT)


def test_baselines_and_what_cannot_be_asked_for(write_table):
    run = fedapp.run("pax", data=write_table(), label="y", parties=2, baselines=True, **SHORT)
    assert run.summary["baselines"]["pooled"]
    with pytest.raises(fedapp.ConfigError, match=r"^data must be omitted with resume"):
        fedapp.run("pax", data="wine", resume="runs")
    with pytest.raises(fedapp.ConfigError, match=r"^parties must be >= 0, got -1$"):
        fedapp.run("pax", parties=-1)


def records(run):
    """Rounds, whatever is installed."""
    found = run.rounds
    return found if isinstance(found, list) else found.to_dict("records")


@pytest.mark.slow
def test_predictions_are_those_of_the_command(mixed):
    run = fedapp.run("pax", data=mixed, label="y", parties=2, **SHORT)
    words = ["predict", str(run.path), "--data", str(mixed), "--output", "out.csv"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    with Path("out.csv").open() as file:
        written = [float(row["probability_1"]) for row in csv.DictReader(file)]
    table = pyarrow.csv.read_csv(mixed)
    found = run.predict_proba(table.drop_columns("y"))
    assert np.allclose(found[:, 1], written, rtol=1e-6)
    assert np.allclose(found.sum(axis=1), 1)
    assert run.predict(table).tolist() == [int(p > 0.5) for p in found[:, 1]]
    assert run.predict(table).dtype == np.int64
    margins = np.log(found[:, 1] / found[:, 0])
    assert np.allclose(run.explain(table).sum(axis=1), margins, atol=1e-4)
    assert run.to_xgboost().num_boosted_rounds() == 2
    assert run.report() == run.path / "report.html"


def test_unknown_categories_and_other_units_are_told_by_a_run_and_an_estimator(mixed):
    table = pyarrow.csv.read_csv(mixed)
    frame = table.drop_columns("y").to_pandas()
    strange = frame.assign(town="Paris", a=1e6 * frame["a"])
    run = fedapp.run("pax", data=mixed, label="y", parties=2, **SHORT)
    model = fedapp.PAXClassifier(n_estimators=2, max_depth=2, max_bin=16, parties=2)
    model.fit(frame, table["y"].to_numpy())
    for predict in (run.predict, run.explain, model.predict, model.predict_proba, model.apply):
        with (
            pytest.warns(UserWarning, match="^80 values of 'town' are no category of the model"),
            pytest.warns(UserWarning, match="^column 'a': .*; see that units are the same"),
        ):
            predict(strange)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            predict(frame)


def test_names_that_xgboost_forbids_are_explained_and_encoded():
    rng = np.random.default_rng(1)
    names = ["a[1]", "a_1_", "b<2", "c"]
    frame = pa.table({name: rng.normal(size=60) for name in names})
    labelled = frame.append_column("y", [rng.integers(0, 2, 60)])
    run = fedapp.run("pax", data=labelled, label="y", parties=1, **SHORT)
    assert list(run.explain(frame).columns) == [*names, "bias"]
    encoded = run.encode(frame)
    booster = run.to_xgboost()
    assert [*encoded.columns] == booster.feature_names == ["a_1__", "a_1_", "b_2", "c"]
    predicted = booster.predict(xgboost.DMatrix(encoded, enable_categorical=True))
    np.testing.assert_allclose(predicted, run.predict_proba(frame)[:, 1], rtol=1e-6)
    shap = run.explain(frame).sum(axis=1)
    np.testing.assert_allclose(shap, np.log(predicted / (1 - predicted)), atol=1e-5)


@pytest.mark.by_default("two classes, calibrated", "three classes")
@pytest.mark.parametrize(
    ("labels", "more"),
    [
        ([0, 1], {"calibration": "platt", "valid_fraction": 0.3}),
        (["u", "v", "w"], {}),
        ([row / 7 for row in range(40)], {}),
    ],
    ids=["two classes, calibrated", "three classes", "numbers"],
)
def test_margins_are_those_of_the_booster(write_table, labels, more):
    data = write_table(n_rows=120, y=[labels[row % len(labels)] for row in range(120)])
    run = fedapp.run("pax", data=data, label="y", parties=2, **SHORT, **more)
    rows = xgboost.DMatrix(run.encode(data), enable_categorical=True)
    margins = run.predict(data, output_margin=True)
    expected = run.to_xgboost().predict(rows, output_margin=True)
    assert margins.shape == expected.shape
    assert np.array_equal(margins, expected)


@pytest.mark.slow
def test_classes_and_numbers_come_back_as_they_were(write_table):
    names = write_table("names", y=["low", "high"] * 20)
    run = fedapp.run("pax", data=names, label="y", parties=2, **SHORT)
    assert set(run.predict(names)) <= {"low", "high"}
    numbers = write_table("numbers", y=[row / 7 for row in range(40)])
    run = fedapp.run("pax", data=numbers, label="y", parties=2, **SHORT)
    assert run.classes == ()
    assert run.predict(numbers).shape == (40,)
    with pytest.raises(fedapp.ConfigError, match=r"^predict_proba must be of a model of classes"):
        run.predict_proba(numbers)


def test_a_run_shows_itself_without_what_a_name_smuggles_in(write_table):
    table = pyarrow.csv.read_csv(write_table())
    run = fedapp.run("pax", data=table, label="y", parties=2, run_dir="a<b>", **SHORT)
    assert repr(run) == "Run('a<b>')"
    page = run._repr_html_()
    assert "pax on frame" in page
    assert "a&lt;b&gt;" in page
    assert "<b>" not in page.replace("<b>pax on frame</b>", "")


def test_a_forest_is_no_booster():
    given = {"trees": 2, "max_depth": 2, "master_keeps_model": True}
    run = fedapp.run(
        "federated-forest", federated_forest=given, allow_export=True, align="ordered", parties=2
    )
    with pytest.raises(fedapp.ConfigError, match=r"^to_xgboost must be of a boosted model that"):
        run.to_xgboost()
    with pytest.raises(fedapp.ConfigError, match=r"^output_margin must be of a boosted model that"):
        run.predict("breast-cancer", output_margin=True)
    assert run.predict("breast-cancer").shape == (569,)


@pytest.fixture
def divided(write_table):
    """A model whose parts lie at a bank and a shop, and their tables, in different orders."""
    ids = [f"p{row}" for row in range(60)]
    whole = pyarrow.csv.read_csv(write_table(n_rows=60, id=ids))
    order = np.random.default_rng(5).permutation(60)
    tables = {"bank": whole.select(["id", "a", "y"]), "shop": whole.select(["id", "b"]).take(order)}
    small = {"key_bits": 512, "insecure_small_key": True}
    run = fedapp.run("secureboost", data=tables, label="y", id="id", secureboost=small, **SHORT)
    return run, tables


@pytest.mark.slow
def test_parties_predict_together_in_the_order_of_the_active_partys_frame(divided):
    run, tables = divided
    assert isinstance(run.model, DividedModel)
    asked = {"bank": tables["bank"].take([7, 3, 30]), "shop": tables["shop"]}
    found = run.predict_proba(asked)
    assert found.shape == (3, 2)
    assert np.array_equal(found, run.predict_proba(tables)[[7, 3, 30]])
    assert run.predict(asked).shape == (3,)
    eini = {"insecure_small_key": True, "key_bits": 512, "unguarded": True}
    encrypted = run.predict_proba(asked, inference="eini", eini=eini)
    assert np.allclose(encrypted, found, atol=1e-6)
    rule = "tables of all parties, got 1 that are not; .* with --verbose the ids of these$"
    with pytest.raises(fedapp.DataError, match=rule):
        run.predict(
            {
                **asked,
                "shop": tables["shop"].filter(pa.compute.not_equal(tables["shop"]["id"], "p3")),
            }
        )


@pytest.mark.slow
def test_methods_are_compared_on_frames_that_do_not_stay(mixed):
    table, given = pyarrow.csv.read_csv(mixed), {"label": "y", "parties": 2, **SHORT}
    found = fedapp.compare(["pax", "bagging"], data=table, seeds=2, eta=0.1, **given)
    assert {name: len(runs) for name, runs in found.runs.items()} == {"pax": 2, "bagging": 2}
    alone = fedapp.run("pax", data=table, eta=0.1, seed=43, **given)
    own = found.runs["pax"][1].summary
    assert own["metrics"] == alone.summary["metrics"]
    assert (own["data"], found.summary["data"]) == ("frame", "frame")
    assert not list(found.path.rglob("*.parquet"))
    assert (found.path / "comparison.html").is_file()
    records = {each["strategy"]: each for each in found.scores.to_dict("records")}
    scores = [run.summary["metrics"]["test"] for run in found.runs["pax"]]
    for name in ("auc", "logloss"):
        assert records["pax"][name] == pytest.approx(np.mean([each[name] for each in scores]))
    assert {each["ties"] for each in records.values()} <= {True, False}
    assert fedapp.Compared(found.path).summary == found.summary


def test_what_cannot_be_compared_in_python_is_refused():
    with pytest.raises(fedapp.ConfigError, match=r"^fold must be omitted to compare: --folds"):
        fedapp.compare(["pax"], folds=2, fold=1)
    with pytest.raises(fedapp.ConfigError, match=r"^seeds must be >= 1, got 0"):
        fedapp.compare(["pax"], seeds=0)
    with pytest.raises(fedapp.ConfigError, match=r"^path must be the folder of a comparison that"):
        fedapp.Compared(".")


def test_a_refused_comparison_leaves_no_frames(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame = pa.table({"a": [1.0, 2.0] * 20, "y": [0, 1] * 20})
    with pytest.raises(fedapp.ConfigError, match=r"^secureboost=\{'goss': ...\} must be omitted"):
        fedapp.compare(["pax", "bagging"], data=frame, label="y", secureboost={"goss": True})
    with pytest.raises(fedapp.ConfigError, match=r"^eta must be > 0"):
        fedapp.tune("pax", data=frame, label="y", space={"eta": [-1.0]}, runs=1)
    assert not any(tmp_path.glob("runs/*"))


@pytest.mark.slow
def test_parties_explain_rows_that_are_named(divided):
    run, tables = divided
    found = run.explain(tables, ["p3"])
    assert found.keys() == {"bank", "shop"}
    assert found["bank"]["rows"]["p3"]["score"]["probability_1"] == pytest.approx(
        run.predict_proba(tables)[3, 1]
    )
    with pytest.raises(fedapp.ConfigError, match=r"^ids must name rows where parties predict"):
        run.explain(tables)


def test_a_pandas_index_is_no_column():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, None]}, index=["x", "y"])
    assert as_arrow(frame).column_names == ["a"]
    assert as_arrow(frame)["a"].null_count == 1


# The public face


# Those of estimators, which take seconds, are among the slow tests of test_estimators.py.
@pytest.mark.by_default("fedapp.api")
@pytest.mark.parametrize("module", ["fedapp.api", "fedapp.runs.run", "fedapp.runs.run_groups"])
def test_the_examples_of_the_docs_are_true(module):
    found = doctest.DocTestFinder().find(importlib.import_module(module))
    examples = [each for each in found if each.examples]
    if any('"runs/one"' in example.source for each in examples for example in each.examples):
        fedapp.run("pax", parties=2, num_boost_round=2, max_depth=2, eta=0.3, run_dir="runs/one")
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for each in examples:
        if "onnx" in each.name:
            pytest.importorskip("onnx")
        assert runner.run(each).failed == 0, each.name


def test_every_public_function_and_method_has_an_example():
    documented = {
        *(getattr(fedapp, name) for name in fedapp.__all__ if not name.endswith(("Error", "Info"))),
        *(getattr(fedapp.Run, name) for name in vars(fedapp.Run) if not name.startswith("_")),
    }
    lacking = [each for each in documented if ">>> " not in (each.__doc__ or "")]
    assert not lacking


USERS = """
import numpy as np
import fedapp
from fedapp import PAXClassifier, RoundInfo


def show(info: RoundInfo) -> bool:
    return info["round"] < 3 and info["valid"]["auc"] is not None


run: fedapp.Run = fedapp.run("pax", data=np.ones((3, 2)), label="c1", on_round=show, max_depth=3)
labels = run.predict({"bank": np.ones((3, 1)), "shop": "shop.csv"}, id="customer")
print(labels.shape, run.classes[0].upper(), run.report().name)
model = PAXClassifier(n_estimators=5, max_depth=3, parties=2).fit(np.ones((3, 2)), [0, 1, 0])
print(model.predict_proba(np.ones((3, 2))).sum(), fedapp.load("runs/one").summary["trees"])


def squares(margins: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return margins - labels, np.ones_like(margins)


def distance(labels: np.ndarray, predictions: np.ndarray) -> float:
    return float(np.abs(labels - predictions).mean())


own = fedapp.run("pax", objective=squares, eval_metric=["mae", distance], log="mlflow")
own.to_sklearn().predict(np.ones((3, 2)))
own.plot_roc().savefig("roc.png")
numbers = fedapp.PAXRegressor(objective=squares, eval_metric=distance, log="mlflow")
"""
WRONG = """
import fedapp
from fedapp import PAXClassifier

fedapp.run(3)
fedapp.rnu("pax")
PAXClassifier(n_estimator=5)
PAXClassifier(n_estimators="many")
"""


@pytest.mark.slow
def test_a_type_checker_passes_a_users_script_and_finds_what_is_wrong(tmp_path):
    def checked(code):
        script = tmp_path / "script.py"
        script.write_text(code)
        done = subprocess.run(
            [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", script.name],
            cwd=tmp_path,
            env={**os.environ, "MYPYPATH": str(app_folder())},
            capture_output=True,
            text=True,
            check=False,
        )
        return [line for line in done.stdout.splitlines() if "error:" in line]

    assert checked(USERS) == []
    found = checked(WRONG)
    assert len(found) == 4
    assert all(f"script.py:{line}:" in text for line, text in zip((5, 6, 7, 8), found, strict=True))


def test_a_silent_run_prints_nothing(settings, capsys):
    fedapp.run("pax", **SHORT)
    assert capsys.readouterr().out == ""
