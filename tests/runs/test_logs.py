"""Runs in MLflow: what is read back there is the run's."""

import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.csv
import pytest

import fedapp
from fedapp import server_app
from fedapp.run_folder import RunFolder
from fedapp.runs import logs, session
from fedapp.runs.local import LocalGrid, simulated_contexts
from fedapp.runs.logs import MLflowLog
from simulations.deployment import settings_of
from tests.deployed import PAX, started

SHORT = {"num_boost_round": 3, "max_depth": 2, "max_bin": 16, "parties": 2}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """MLflow writes to the folder of the test."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'mlflow'}")
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)


@pytest.fixture
def table(write_table):
    """Whole numbers, categories and missing values."""
    rng = np.random.default_rng(0)
    towns = rng.choice(["Oslo", "Rome", ""], 60)
    path = write_table(n_rows=60, count=rng.integers(0, 9, 60), town=towns)
    return pyarrow.csv.read_csv(path)


class Fake(MLflowLog):
    """A log that writes down what MLflow would get, and fails where it is asked to."""

    fails = ""
    made: list

    def _open(self, settings, engine):
        self.told = []
        self.is_resumed = bool(self.run_id)
        if self.fails == "begin":
            raise OSError("no begin at http://ann:secret@tracking:5000/api")
        self.run_id, self.location = self.run_id or "new", "nowhere"
        self.made.append(self)

    def _note(self, what, *more):
        if what == self.fails:
            raise OSError(f"no {what}")
        self.told.append((what, *more))

    def _log_round(self, info):
        self._note("round", info["round"])

    def _finish(self):
        self._note("end", self._folder.summary["logs"])

    def _close(self, status):
        self._note("close", status)


@pytest.fixture
def fakes(monkeypatch):
    """Stands for MLflow; ``fails`` is what the next one fails at, ``made`` are those made."""
    found = type("Fake", (Fake,), {"made": []})
    monkeypatch.setattr(logs, "MLflowLog", found)
    monkeypatch.setattr(session, "MLflowLog", found)
    return found


# One run, told to any tool


def test_a_tool_is_told_every_round_and_the_end(table, fakes):
    seen = []
    run = fedapp.run(
        "pax",
        data=table,
        label="y",
        log="mlflow",
        on_round=lambda info: seen.append(info["round"]),
        **SHORT,
    )
    (fake,) = fakes.made
    assert fake.told == [("round", 1), ("round", 2), ("round", 3), ("end", {"mlflow": "nowhere"})]
    assert seen == [1, 2, 3]
    assert run.summary["logs"] == {"mlflow": "nowhere"}


@pytest.mark.parametrize("fails", ["round", "end"])
def test_a_tool_that_fails_is_given_up_and_the_run_is_not(table, fakes, fails, caplog):
    fakes.fails = fails
    run = fedapp.run("pax", data=table, label="y", log="mlflow", **SHORT)
    told = f"log=mlflow failed and is given up: OSError: no {fails}"
    assert told in run.summary["warnings"]
    assert told in caplog.messages
    assert run.summary["logs"] == {}
    assert len(run.rounds) == 3
    assert fakes.made[0].told[-1] == ("close", "FAILED")


def test_a_tool_that_cannot_be_reached_is_refused_before_training(table, fakes):
    fakes.fails = "begin"
    told = (
        "^log=mlflow must be a tool that can be reached: "
        "OSError: no begin at http://tracking:5000/api; start the server, set MLFLOW_TRACKING_URI"
    )
    with pytest.raises(fedapp.ConfigError, match=told):
        fedapp.run("pax", data=table, label="y", log="mlflow", run_dir="one", **SHORT)
    assert not (Path("one") / "config.toml").exists()


def test_a_resumed_run_goes_on_where_it_was_logged(table, fakes):
    given = {**SHORT, "data": table, "label": "y", "run_dir": "one"}
    with pytest.raises(fedapp.StoppedError):
        fedapp.run("pax", log="mlflow", on_round=lambda info: info["round"] < 2, **given)
    assert fakes.made[0].told == [("round", 1), ("round", 2), ("close", "KILLED")]
    run = fedapp.run("pax", resume="one", log="mlflow")
    (again,) = fakes.made[1:]
    assert again.is_resumed
    assert [told[1] for told in again.told[:-1]] == [3]
    assert len(run.rounds) == 3


def test_rounds_before_a_log_are_logged_when_it_is_opened(table, fakes):
    given = {**SHORT, "data": table, "label": "y", "run_dir": "one"}
    with pytest.raises(fedapp.StoppedError):
        fedapp.run("pax", on_round=lambda info: info["round"] < 2, **given)
    fedapp.run("pax", resume="one", log="mlflow")
    (fake,) = fakes.made
    assert not fake.is_resumed
    assert [told[1] for told in fake.told[:-1]] == [1, 2, 3]


def test_what_is_no_tool_or_not_installed_is_refused(monkeypatch):
    rule = "^log must be one of '' or 'mlflow', got 'wandb'$"
    with pytest.raises(fedapp.ConfigError, match=rule):
        fedapp.run("pax", log="wandb")
    told = r"^mlflow must be installed for log=mlflow \(pip install 'fedapp\[log\]'\)"
    monkeypatch.setattr("fedapp.errors.find_spec", lambda name: None)
    with pytest.raises(fedapp.ConfigError, match=told):
        fedapp.run("pax", log="mlflow")
    assert not Path("runs").exists()


def test_a_comparison_and_a_prediction_log_nothing():
    from typer.testing import CliRunner

    from fedapp.commands import cli

    refused = CliRunner().invoke(cli, ["compare", "pax", "bagging", "-c", "log=mlflow"])
    assert str(refused.exception).startswith("log must be omitted to compare: fedapp run logs")


def test_scores_that_are_no_numbers_are_not_logged(monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    told = []
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", lambda *_, metrics: told.extend(metrics))
    info = {
        "round": 1,
        "rounds": 2,
        "trees": 1,
        "leaves": None,
        "exchanges": 4,
        "seconds": 0.5,
        "train": {"auc": 0.5, "logloss": float("nan")},
        "valid": {"auc": None},
        "bytes": {"to_parties": 3, "to_server": 4},
    }
    log = MLflowLog.__new__(MLflowLog)
    log._client = mlflow.MlflowClient()
    log._log_round(info)
    assert {one.key for one in told} == {
        *("trees", "exchanges", "seconds", "train/auc", "bytes/to_parties", "bytes/to_server")
    }


# Whose side logs


@contextmanager
def grid_of(settings, name):
    """A grid in this process that is called otherwise."""
    grid = type(name, (LocalGrid,), {})(simulated_contexts(settings))
    try:
        yield grid
    finally:
        grid.close()


@pytest.mark.parametrize(
    ("grid_name", "is_held", "expected"),
    [("HttpGrid", False, 1), ("HttpGrid", True, 1), ("InMemoryGrid", True, 0)],
    ids=["deployment", "deployment on one machine", "simulation that a command waits for"],
)
def test_between_organisations_the_serverapp_logs(
    settings, fakes, grid_name, is_held, expected, monkeypatch
):
    given = settings(log="mlflow", parties=2)
    folder = RunFolder(Path(given.run_dir))
    monkeypatch.setattr(server_app, "untested_versions", lambda: ["numpy differs"])
    with grid_of(given, grid_name) as grid:
        if is_held:
            with folder.held():
                server_app.train_alone(grid, given)
        else:
            server_app.train_alone(grid, given)
    assert len(fakes.made) == expected
    assert "numpy differs" in json.loads((folder.path / "summary.json").read_text())["warnings"]
    if expected:
        assert [told[0] for told in fakes.made[0].told] == ["round", "round", "end"]
        assert (folder.path / "report.html").exists()


# The tools themselves


def logged_in_mlflow(run):
    """MLflow's client, and its record of a run."""
    import mlflow

    client = mlflow.MlflowClient()
    return client, client.get_run(json.loads((run.path / logs.RUN_ID_FILE).read_text())["mlflow"])


def check_mlflow(run, table):
    """Hold what MLflow has of a run against the run."""
    import mlflow

    client, found = logged_in_mlflow(run)
    run_id = found.info.run_id
    assert found.info.status == "FINISHED"
    assert found.data.params["max-depth"] == "2"
    unlogged = {"run-dir", "resume", "log", "strategy", "secureboost.key-bits"}
    assert not unlogged & found.data.params.keys()
    assert found.data.tags["fedapp.strategy"] == "pax"
    assert found.data.tags["fedapp.objective"] == "binary:logistic"
    history = client.get_metric_history(run_id, "train/auc")
    rounds = run.rounds
    records = rounds if isinstance(rounds, list) else rounds.to_dict("records")
    assert [(one.step, one.value) for one in history] == [
        (record["round"], record["train_auc"]) for record in records
    ]
    metrics = found.data.metrics
    assert metrics["final/test/auc"] == run.summary["metrics"]["test"]["auc"]
    assert metrics["final/exchanges"] == run.summary["exchanges"]
    assert metrics["bytes/to_server"] == records[-1]["bytes_to_server"]
    names = {file.path for file in client.list_artifacts(run_id)}
    assert {"model.json", "report.html", "model-card.md", "summary.json"} <= names
    model = mlflow.pyfunc.load_model(f"runs:/{run_id}/model")
    assert model.metadata.signature.inputs.input_names() == list(run.model.columns)
    rows = table.drop_columns("y").to_pandas()
    assert np.array_equal(model.predict(rows)["probability_1"], run.predict_proba(rows)[:, 1])


@pytest.mark.slow
def test_mlflow_has_the_run_and_its_model_predicts_the_same(table):
    mlflow = pytest.importorskip("mlflow")
    run = fedapp.run("pax", data=table, label="y", log="mlflow", **SHORT)
    check_mlflow(run, table)
    assert mlflow.active_run() is None


@pytest.fixture
def silent():
    """Address of a server that takes connections and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://ann:secret@127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.slow
def test_an_mlflow_that_does_not_answer_is_named_before_training(table, silent, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", silent)
    address = silent.replace("ann:secret@", "")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    told = f"be reached: MlflowException: API request to {address}/.*; start the server, set MLFLOW"
    with pytest.raises(fedapp.ConfigError, match=told):
        fedapp.run("pax", data=table, label="y", log="mlflow", run_dir="one", **SHORT)
    assert not (Path("one") / "config.toml").exists()


@pytest.mark.slow
def test_an_mlflow_that_dies_is_given_up_once(table, silent, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    mlflow = pytest.importorskip("mlflow")

    def die(info):
        mlflow.set_tracking_uri(silent)

    try:
        run = fedapp.run("pax", data=table, label="y", log="mlflow", on_round=die, **SHORT)
    finally:
        mlflow.set_tracking_uri(None)
    (told,) = [text for text in run.summary["warnings"] if "mlflow" in text]
    assert told.startswith("log=mlflow failed and is given up: MlflowException: API request to ")
    assert "secret" not in told
    assert {*logs.VARIABLES} & {*os.environ} == {"MLFLOW_HTTP_REQUEST_TIMEOUT"}  # the test's own
    assert len(run.rounds) == 3


@pytest.mark.slow
def test_mlflow_in_sqlite_after_a_stop_and_inside_another_run(table, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    given = {**SHORT, "data": table, "label": "y", "run_dir": "one"}
    try:
        with pytest.raises(fedapp.StoppedError):
            fedapp.run("pax", log="mlflow", on_round=lambda info: info["round"] < 2, **given)
        run = fedapp.run("pax", resume="one")
        check_mlflow(run, table)
        with mlflow.start_run() as outer:
            inner = fedapp.run("pax", data=table, label="y", log="mlflow", **SHORT)
        assert logged_in_mlflow(inner)[1].data.tags["mlflow.parentRunId"] == outer.info.run_id
    finally:
        mlflow.set_tracking_uri(None)


@pytest.mark.slow
def test_flowers_simulation_logs_in_the_command(table):
    pytest.importorskip("mlflow")
    run = fedapp.run("pax", data=table, label="y", engine="simulation", log="mlflow", **SHORT)
    check_mlflow(run, table)


@pytest.mark.slow
def test_tools_are_imported_where_they_are_asked_for():
    code = "import sys, fedapp.runs.session;print({'mlflow', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.slow
def test_a_coordinator_logs_what_its_sites_trained(tmp_path):
    mlflow, pandas = pytest.importorskip("mlflow"), pytest.importorskip("pandas")
    (folder := tmp_path / "sites").mkdir()
    with started(folder) as deployment:
        given = settings_of({**PAX, "log": "mlflow", "run-dir": tmp_path / "one"})
        deployment.fedapp("run", "pax", "--engine", "federation", *given)
    run = fedapp.load(tmp_path / "one")
    _, found = logged_in_mlflow(run)
    assert found.info.status == "FINISHED"
    assert found.data.tags["fedapp.engine"] == "deployment"
    assert found.data.tags["fedapp.party_names"] == "bank, insurer, shop"
    model = mlflow.pyfunc.load_model(f"runs:/{found.info.run_id}/model")
    frame = pandas.DataFrame({"a": [0.5, -2.0], "b": [0.25, 1.0]})
    assert np.array_equal(model.predict(frame)["probability_1"], run.predict_proba(frame)[:, 1])
