"""Runs in MLflow: what is read back there is the run's."""

import json
from contextlib import closing, nullcontext
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
from tests.federated import summary_of

SHORT = {"num_boost_round": 3, "max_depth": 2, "max_bin": 16, "parties": 2}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """MLflow writes to the folder of the test."""
    monkeypatch.chdir(tmp_path)
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
        self.calls = []
        self.is_resumed = bool(self.run_id)
        if self.fails == "begin":
            raise OSError("no begin at http://ann:secret@tracking:5000/api")
        self.run_id, self.location = self.run_id or "new", "nowhere"
        self.made.append(self)

    def _note(self, what, *more):
        if what == self.fails:
            raise OSError(f"no {what}")
        self.calls.append((what, *more))

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


def stopped(table, **more):
    with pytest.raises(fedapp.StoppedError):
        logged(table, on_round=lambda info: info["round"] < 2, run_dir="one", **more)


def logged(table, **more):
    return fedapp.run("pax", data=table, label="y", **{"log": "mlflow", **SHORT, **more})


ROUNDS = [("round", 1), ("round", 2), ("round", 3)]
END = ("end", {"mlflow": "nowhere"})


@pytest.mark.parametrize("fails", ["", "round", "end"])
def test_a_tool_that_fails_is_given_up_once_and_the_run_is_not(table, fakes, fails, caplog):
    fakes.fails, seen = fails, []
    run = logged(table, on_round=lambda info: seen.append(info["round"]))
    warning = f"log=mlflow failed and is given up: OSError: no {fails}"
    n_warnings = run.summary["warnings"].count(warning), caplog.messages.count(warning)
    assert n_warnings == (bool(fails), bool(fails))
    assert run.summary["logs"] == ({} if fails else {"mlflow": "nowhere"})
    assert seen == run.rounds["round"].tolist() == [1, 2, 3]
    (fake,) = fakes.made
    ends = [("close", "FAILED")] if fails else [END]
    assert fake.calls == [*(ROUNDS if fails != "round" else []), *ends]


def test_a_tool_that_cannot_be_reached_is_refused_before_training(table, fakes):
    fakes.fails = "begin"
    rule = (
        "^log=mlflow must be a tool that can be reached: "
        "OSError: no begin at http://tracking:5000/api; start the server, set MLFLOW_TRACKING_URI"
    )
    with pytest.raises(fedapp.ConfigError, match=rule):
        logged(table, run_dir="one")
    assert not (Path("one") / "config.toml").exists()


@pytest.mark.parametrize("log", ["", "mlflow"])
def test_a_resumed_run_has_all_rounds_where_it_was_logged(table, fakes, log):
    stopped(table, log=log)
    n_before = len(fakes.made)
    assert [fake.calls for fake in fakes.made] == [[*ROUNDS[:2], ("close", "KILLED")]] * n_before
    assert n_before == bool(log)
    assert len(fedapp.run("pax", resume="one", log="mlflow").rounds) == 3
    assert fakes.made[-1].is_resumed == bool(log)
    assert fakes.made[-1].calls == [*ROUNDS[2 * n_before :], END]


def test_a_log_of_a_comparison_or_by_what_is_not_installed_is_refused(monkeypatch):
    with pytest.raises(fedapp.ConfigError, match=r"^log must be omitted to compare: fedapp run "):
        fedapp.compare(["pax", "bagging"], log="mlflow")
    rule = r"^mlflow must be installed for log=mlflow \(pip install 'fedapp\[log\]'\)"
    monkeypatch.setattr("fedapp.errors.find_spec", lambda name: None)
    with pytest.raises(fedapp.ConfigError, match=rule):
        fedapp.run("pax", log="mlflow")
    assert not Path("runs").exists()


def test_scores_that_are_no_numbers_are_not_logged(monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    logged = []
    monkeypatch.setattr(
        mlflow.MlflowClient, "log_batch", lambda *_, metrics: logged.extend(metrics)
    )
    info = {"round": 1, "rounds": 2, "trees": 1, "leaves": None, "exchanges": 4, "seconds": 0.5}
    info |= {"train": {"auc": 0.5, "logloss": float("nan")}, "valid": {"auc": None}}
    log = MLflowLog.__new__(MLflowLog)
    log._client = mlflow.MlflowClient()
    log._log_round({**info, "bytes": {"to_parties": 3, "to_server": 4}})
    assert {one.key for one in logged} == {
        *("trees", "exchanges", "seconds", "train/auc", "bytes/to_parties", "bytes/to_server")
    }


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
    monkeypatch.setattr(server_app, "slow_modes", lambda engine: ["numpy differs"])
    grid = type(grid_name, (LocalGrid,), {})(simulated_contexts(given))
    with closing(grid), folder.held() if is_held else nullcontext():
        server_app.train_alone(grid, given)
    assert len(fakes.made) == (folder.path / "report.html").exists() == expected
    assert "numpy differs" in summary_of(folder)["warnings"]
    if expected:
        assert [call[0] for call in fakes.made[0].calls] == ["round", "round", "end"]


def test_mlflow_has_the_run_inside_another_and_its_model_predicts_the_same(table):
    mlflow = pytest.importorskip("mlflow")
    with mlflow.start_run() as outer:
        run = logged(table)
    assert mlflow.active_run() is None
    run_id = json.loads((run.path / logs.RUN_ID_FILE).read_text())["mlflow"]
    client = mlflow.MlflowClient()
    found = client.get_run(run_id)
    assert found.data.tags["mlflow.parentRunId"] == outer.info.run_id
    assert found.info.status == "FINISHED"
    assert found.data.params["max-depth"] == "2"
    unlogged = {"run-dir", "resume", "log", "strategy", "secureboost.key-bits"}
    assert not unlogged & found.data.params.keys()
    assert found.data.tags["fedapp.strategy"] == "pax"
    assert found.data.tags["fedapp.objective"] == "binary:logistic"
    history = client.get_metric_history(run_id, "train/auc")
    records = run.rounds.to_dict("records")
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
