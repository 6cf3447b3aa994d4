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
from fedapp.home import app_folder
from fedapp.trees.divided import DividedModel
from tests.federated import model_bytes

SHORT = {"num_boost_round": 2, "max_depth": 2, "max_bin": 16}


pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def mixed(write_table):
    """A table of numbers, booleans, dates and categories, some of each missing."""
    rng = np.random.default_rng(1)
    columns = {
        "count": ["1", "2", "30", ""],
        "flag": ["true", "false", ""],
        "day": ["2024-01-31", "2025-12-01", "2023-07-04", ""],
        "town": ["Oslo", "Rome", "Bern", ""],
    }
    return write_table(n_rows=80, **{name: rng.choice(one, 80) for name, one in columns.items()})


ONE_TABLE = "must be omitted: data has rows and labels in one table"
ARROW = pa.table({"a": [1.0, 2.0] * 20, "y": [0, 1] * 20})
STRANGE = pa.table({"y": pa.DictionaryArray.from_arrays([0], pa.array([{"a": 1}]))})
OBJECTS = np.array([[1, "x"], [None, {}]], object)
SERIES = pandas.Series([0])
REFUSED = {  # arguments of ``fedapp.run("pax")``, and how the error begins, as Python writes it
    "a column": ({"data": SERIES}, "data must be a table, which a column's to_frame() is, got one"),
    "a vector": ({"data": np.zeros(3)}, "data must be an array of rows and columns, got shape (3,"),
    "objects": ({"data": OBJECTS}, "data must be a frame whose columns are of"),
    "categories": ({"data": STRANGE}, "columns of a frame must be of types that Parquet files hav"),
    "y": ({"y": SERIES}, f"y {ONE_TABLE}"),
    "X": ({"X": np.zeros((1, 1))}, f"X {ONE_TABLE}"),
    "a label": ({"label": SERIES}, "label must be the name of a column of data, got Series: "),
    "params": ({"params": {}}, "params must be omitted: settings are arguments of their own"),
    "verbose": ({"verbose": 1}, "verbose must be omitted: progress=True shows progress"),
    "a mapping": ({"data": {"age": [1, 2]}}, "or a mapping with a table for each party, got a col"),
    "trees": ({"n_trees": 3}, "n_trees is not a setting; did you mean num_boost_round?"),
    "section": ({"pax": {"bin": 3}}, "pax={'bin': ...} is not a setting; did you mean pax={'bins'"),
    "of a section": ({"local_rounds": 3}, "local_rounds is not a setting; did you mean bagging={"),
    "commas": ({"drop_columns": ["a", "b, c"]}, "drop_columns must be names without commas, got "),
    "unread": ({"secureboost": {"goss": True}}, "secureboost={'goss': ...} must be omitted for p"),
    "a type": ({"eta": object()}, "eta must be a text, a number, a truth value or a list, got obj"),
    "resumed": ({"data": "wine", "resume": "runs"}, "data must be omitted with resume"),
}
OF_ALL = "y", "X", "a label", "params", "verbose", "a mapping"


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_call_refuses_leaves_no_folder(case):
    given, told = REFUSED[case]
    for call in (fedapp.run, fedapp.tune, fedapp.compare) if case in OF_ALL else (fedapp.run,):
        methods = ["pax"] if call is fedapp.compare else "pax"
        with pytest.raises((fedapp.ConfigError, fedapp.DataError), match=re.escape(told)) as error:
            call(methods, **given)
        assert case in OF_ALL or str(error.value).startswith(told)
    with pytest.raises(fedapp.ConfigError, match=r"^eta must be > 0"):
        fedapp.tune("pax", space={"eta": [-1.0]}, runs=1, data=ARROW, label="y")
    with pytest.raises(fedapp.ConfigError, match=r"^path must be the folder of a comparison that"):
        fedapp.Compared(".")
    assert not list(Path("runs").glob("*"))


@pytest.mark.parametrize("library", ["arrow", "pandas", "polars"])
def test_a_frame_trains_the_model_of_its_file(mixed, library):
    read = pyarrow.csv.ConvertOptions(strings_can_be_null=True)
    frame = pyarrow.csv.read_csv(mixed, convert_options=read)
    if library != "arrow":
        frame = pytest.importorskip(library).read_csv(mixed)
    if library == "pandas":
        frame = frame.set_index(frame.index + 1000)  # no column of the table
    given = {"label": "y", "parties": 2, **({} if library == "arrow" else {"drop_columns": "day"})}
    of_file = fedapp.run("pax", data=mixed, **given, **SHORT)
    of_frame = fedapp.run("pax", data=frame, **given, **SHORT)
    assert model_bytes(of_frame) == model_bytes(of_file)
    assert of_frame.summary["data"] == "frame"
    assert not list(of_frame.path.glob("frame-*"))
    assert np.array_equal(of_frame.predict_proba(frame), of_file.predict_proba(mixed))


def test_an_array_has_columns_by_number():
    rng = np.random.default_rng(0)
    array = np.column_stack([rng.normal(size=(60, 2)), rng.integers(0, 2, 60)])
    run = fedapp.run("pax", data=array, label="c2", parties=2, **SHORT)
    assert run.model.columns == ("c0", "c1")
    assert run.predict(array).tolist() == run.predict(array[:, :2]).tolist()


def test_settings_are_named_as_in_python():
    found = arguments.settings_of(
        "pax",
        {
            "reg_lambda": np.float32(2),
            "reg_alpha": 1,
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


def test_python_and_the_command_train_the_same_model_that_predicts_the_same(mixed):
    words = [f"-c{name.replace('_', '-')}={value}" for name, value in SHORT.items()]
    words += ["-cpax.bins=equal", "-clambda=2", "-cparties=2", "--data", str(mixed), "--label", "y"]
    done = CliRunner().invoke(cli, ["run", "pax", "--output", "by-command", "--baselines", *words])
    assert done.exit_code == 0
    given = {"pax": {"bins": "equal"}, "reg_lambda": 2, "parties": 2, **SHORT}
    run = fedapp.run("pax", data=mixed, label="y", baselines=True, run_dir="by-python", **given)
    by_command = fedapp.load("by-command")
    assert model_bytes(run) == model_bytes(by_command)
    assert run.summary.keys() == by_command.summary.keys()
    assert run.summary["baselines"]["pooled"] == by_command.summary["baselines"]["pooled"]
    assert {path.name for path in run.path.iterdir()} == {
        path.name for path in by_command.path.iterdir()
    }
    words = ["predict", "by-command", "--data", str(mixed), "--output", "out.csv"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    with Path("out.csv").open() as file:
        written = [float(row["probability_1"]) for row in csv.DictReader(file)]
    table = pyarrow.csv.read_csv(mixed)
    found = run.predict_proba(table.drop_columns("y"))
    assert np.allclose(found[:, 1], written, rtol=1e-6)
    assert np.allclose(found.sum(axis=1), 1)
    assert run.predict(table).tolist() == [int(p > 0.5) for p in found[:, 1]]
    margins = np.log(found[:, 1] / found[:, 0])
    assert np.allclose(run.explain(table).sum(axis=1), margins, atol=1e-4)
    assert run.to_xgboost().num_boosted_rounds() == 2
    assert run.report() == run.path / "report.html"


def test_a_callback_sees_every_round_and_stops_the_run_which_goes_on(write_table, capsys):
    given = {**SHORT, "num_boost_round": 4, "label": "y", "parties": 2}
    table, seen = pyarrow.csv.read_csv(write_table(n_rows=60)), []
    whole = fedapp.run("pax", data=table, on_round=seen.append, **given)
    assert [info["round"] for info in seen] == [1, 2, 3, 4]
    assert [*whole.rounds["valid_auc"]] == [info["valid"]["auc"] for info in seen]
    assert capsys.readouterr().out == ""
    stops = {"run_dir": "stopped", "on_round": lambda info: info["round"] < 2}
    with pytest.raises(fedapp.StoppedError) as stopped:
        fedapp.run("pax", data=table, **stops, **given)
    folder = Path("stopped").resolve()
    told = f"the run was stopped after round 2; resume={folder} resumes the run"
    assert str(stopped.value) == told
    with pytest.raises(fedapp.ConfigError, match="must be the folder of a run that has finished"):
        fedapp.load(folder)
    (kept,) = folder.glob("frame-*")
    assert kept.stat().st_mode & 0o777 == 0o600
    resumed = fedapp.run("pax", resume=folder)
    assert model_bytes(resumed) == model_bytes(whole)
    assert not [*folder.glob("frame-*"), *folder.glob("stop")]
    with pytest.raises(ZeroDivisionError):
        fedapp.run("pax", data=table, on_round=lambda info: 1 / 0, **given)


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
    rows = xgboost.DMatrix(encoded, enable_categorical=True)
    predicted, margins = booster.predict(rows), booster.predict(rows, output_margin=True)
    assert np.array_equal(run.predict(frame, output_margin=True), margins)
    np.testing.assert_allclose(predicted, run.predict_proba(frame)[:, 1], rtol=1e-6)
    shap = run.explain(frame).sum(axis=1)
    np.testing.assert_allclose(shap, np.log(predicted / (1 - predicted)), atol=1e-5)


def test_parties_predict_together_in_the_order_of_the_active_partys_frame(write_table):
    """A model whose parts are at a bank and a shop, with tables in different orders."""
    ids = [f"p{row}" for row in range(60)]
    whole = pyarrow.csv.read_csv(write_table(n_rows=60, id=ids))
    order = np.random.default_rng(5).permutation(60)
    tables = {"bank": whole.select(["id", "a", "y"]), "shop": whole.select(["id", "b"]).take(order)}
    forest = {"trees": 2, "max_depth": 2}
    run = fedapp.run("federated-forest", data=tables, label="y", id="id", federated_forest=forest)
    assert isinstance(run.model, DividedModel)
    asked = {"bank": tables["bank"].take([7, 3, 30]), "shop": tables["shop"]}
    found = run.predict_proba(asked)
    assert np.array_equal(found, run.predict_proba(tables)[[7, 3, 30]])
    assert run.predict(asked).shape == (3,)
    with pytest.raises(fedapp.ConfigError, match=r"^ids must name rows where parties predict"):
        run.explain(tables)


def test_a_model_without_boosting_or_classes_has_no_booster_or_probabilities(write_table):
    given = {"trees": 2, "max_depth": 2, "master_keeps_model": True}
    more = {"allow_export": True, "align": "ordered", "parties": 2}
    run = fedapp.run("federated-forest", federated_forest=given, **more)
    with pytest.raises(fedapp.ConfigError, match=r"^to_xgboost must be of a boosted model that"):
        run.to_xgboost()
    with pytest.raises(fedapp.ConfigError, match=r"^output_margin must be of a boosted model that"):
        run.predict("breast-cancer", output_margin=True)
    assert run.predict("breast-cancer").shape == (569,)
    numbers = write_table("numbers", y=[row / 7 for row in range(40)])
    run = fedapp.run("pax", data=numbers, label="y", parties=2, **SHORT)
    assert run.classes == ()
    with pytest.raises(fedapp.ConfigError, match=r"^predict_proba must be of a model of classes"):
        run.predict_proba(numbers)


def test_importing_fedapp_loads_nothing_else_and_all_public_names_are_there():
    code = "import fedapp, sys; print(*sorted(name.partition('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"flwr", "torch", "xgboost", "sklearn", "numpy", "pyarrow", "pydantic", "pandas"}
    assert not heavy & set(done.stdout.split())
    assert all(getattr(fedapp, name) is not None for name in fedapp.__all__)
    assert set(fedapp.__all__) <= set(dir(fedapp))
    with pytest.raises(AttributeError, match=r"^module 'fedapp' has no attribute 'rnu'$"):
        fedapp.rnu  # noqa: B018


@pytest.mark.by_default("fedapp.api")
@pytest.mark.parametrize("module", ["fedapp.api", "fedapp.runs.run", "fedapp.runs.run_groups"])
def test_the_examples_of_the_docs_are_true(module):
    """Those of estimators, which take seconds, are among the slow tests of test_estimators.py."""
    pytest.importorskip("onnx")
    fedapp.run("pax", parties=2, num_boost_round=2, max_depth=2, eta=0.3, run_dir="runs/one")
    found = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert found.attempted > found.failed == 0


USERS = """
import numpy as np
import fedapp
from fedapp import PAXClassifier, RoundInfo


def show(info: RoundInfo) -> bool:
    return info["round"] < 3 and info["valid"]["auc"] is not None


run: fedapp.Run = fedapp.run("pax", data=np.ones((3, 2)), label="c1", on_round=show, max_depth=3)
labels = run.predict({"bank": np.ones((3, 1)), "shop": "shop.csv"}, id="customer")
print(labels.shape, run.classes[0].upper(), fedapp.load("runs/one").summary["trees"])
PAXClassifier(n_estimators=5, parties=2).fit(np.ones((3, 2)), [0, 1, 0]).predict(np.ones((3, 2)))
fedapp.run("pax", eval_metric=["mae"], log="mlflow").plot_roc().savefig("roc")
fedapp.run(3)  # wrong
fedapp.rnu("pax")  # wrong
"""


@pytest.mark.slow
def test_a_type_checker_passes_a_users_script_and_finds_what_is_wrong(tmp_path):
    (script := tmp_path / "script.py").write_text(USERS)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", script.name]
    environment = {**os.environ, "MYPYPATH": str(app_folder())}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    found = re.findall(r"script.py:(\d+):\S* error:", done.stdout)
    wrong = [n for n, line in enumerate(USERS.splitlines(), 1) if line.endswith("# wrong")]
    assert [int(number) for number in found] == wrong
