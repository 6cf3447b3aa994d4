"""Odd tables and odd wishes, which must work or be refused clearly."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import xgboost

from fedapp.errors import ConfigError, DataError, PartyError
from fedapp.home import home
from fedapp.records.document import load
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from fedapp.settings import load_settings
from fedapp.trees.model import Ensemble
from tests.federated import summary_of
from tests.reference import compare_trees


def test_a_party_whose_columns_are_all_missing_takes_part(settings, write_table, sites):
    nothing = [""] * 40
    run = settings(parties=2)
    contexts = sites(
        {"name": "bank", "data": write_table("bank")},
        {"name": "shop", "data": write_table("shop", seed=1, a=nothing, b=nothing)},
    )
    summary = summary_of(run_local(run, contexts))
    assert summary["metrics"]["train"]["logloss"] < 0.7
    assert [party["name"] for party in summary["parties"]] == ["bank", "shop"]


def test_early_stopping_on_one_class_is_refused(settings, write_table):
    labels = [0] * 38 + [1, 1]
    run = settings(
        data=str(write_table(y=labels)),
        label="y",
        parties=1,
        valid_fraction=0.1,
        test_fraction=0.0,
        seed=1,
        early_stopping_rounds=5,
        eval_metric="auc",
    )
    with pytest.raises(ConfigError, match="early-stopping-rounds must have a validation auc"):
        run_local(run)


def test_a_class_without_weight_in_training_is_refused(settings, write_table):
    labels = [0, 1] * 20
    weights = [float(label) for label in labels]
    run = settings(data=str(write_table(y=labels, w=weights)), label="y", weight="w")
    with pytest.raises(DataError, match="label must have both classes among the training rows"):
        run_local(run)


def test_values_near_the_end_of_float32_train(settings, write_table):
    huge = np.linspace(-3e38, 3e38, 40)
    huge = [f"{value:.6g}" if place % 5 else "" for place, value in enumerate(huge)]
    run = settings(data=str(write_table(a=huge)), label="y", parties=2)
    assert summary_of(run_local(run))["trees"] == 2


def test_names_of_any_script_load_in_stock_xgboost(settings, tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(60, 2)).round(3)
    lines = ["größe [cm],体重,y", *(f"{a},{b},{int(a + b > 0)}" for a, b in rows)]
    table = tmp_path / "names.csv"
    table.write_text("\n".join(lines) + "\n")
    folder = run_local(settings(data=str(table), label="y"))
    booster = xgboost.Booster()
    booster.load_model(folder.path / "model.xgb.json")
    assert booster.feature_names == ["größe _cm_", "体重"]
    booster.predict(xgboost.DMatrix(rows, feature_names=booster.feature_names))


def test_rows_without_weight_do_not_move_the_cuts(settings, write_table):
    rng = np.random.default_rng(4)
    a = rng.normal(size=300).round(3)
    a[:2] = -50, 50
    weights = rng.uniform(0.5, 2, 300).astype(np.float32)
    weights[:2] = 0
    labels = (a + rng.normal(size=300) > 0).astype(int)
    table = write_table(n_rows=300, a=a, w=weights, y=labels)
    run = settings(
        data=str(table),
        label="y",
        weight="w",
        parties=1,
        test_fraction=0.0,
        valid_fraction=0.0,
        num_boost_round=5,
        max_depth=3,
        max_bin=64,
    )
    model = load(run_local(run).path / "model.json", Ensemble)
    frame = np.genfromtxt(table, delimiter=",", skip_header=1, dtype=np.float32)
    matrix = xgboost.QuantileDMatrix(frame[:, :2], frame[:, 2], weight=frame[:, 3], max_bin=64)
    parameters = {
        "objective": "binary:logistic",
        "tree_method": "hist",
        "max_depth": 3,
        "max_bin": 64,
        "base_score": float(model.base_score[0]),
    }
    found = compare_trees(model, xgboost.train(parameters, matrix, 5))
    assert found.differing == 0
    assert found.leaf_error <= 1e-6


@pytest.mark.slow
def test_a_table_that_changes_between_runs_is_read_again(settings, write_table):
    def model_of(**columns):
        run = settings(data=str(write_table(**columns)), label="y")
        return (run_local(run).path / "model.json").read_text()

    first = model_of()
    assert model_of() == first
    assert model_of(seed=8) != first


@pytest.mark.slow
def test_few_bins_are_told_of(settings):
    ways = {"finest": "the most of any party are kept; pax.bins=equal or a larger max-bin gives"}
    ways["coarsest"] = (
        "the fewest of any party are kept; pax.bins=equal, pax.fusion=finest or a larger max-bin "
        "gives"
    )
    made = partial(settings, max_bin=64, parties=4, valid_fraction=0.0)
    for fusion, kept in ways.items():
        few = summary_of(run_local(made(pax__fusion=fusion)))
        assert few["warnings"] == [
            "only 16 bins a column are left of max-bin 64: the share rule divides them among the "
            f"parties, and {kept} more"
        ]
    enough = summary_of(run_local(made(pax__bins="equal")))
    assert enough["warnings"] == []


def test_a_resumed_run_keeps_its_settings(settings):
    run = settings()
    folder = RunFolder(Path(run.run_dir))
    folder.begin(run)
    with pytest.raises(ConfigError, match=r"eta must be the resumed run's, 0\.3, got 0\.1"):
        run_local(load_settings({"resume": run.run_dir, "eta": 0.1}))
    resumed = run_local(load_settings({"resume": run.run_dir, "exchange-deadline": 5.0}))
    assert resumed.path == folder.path
    assert summary_of(resumed)["trees"] == 2


def test_own_tables_are_not_called_by_the_name_of_another(settings, write_table, sites):
    contexts = sites({"name": "bank", "data": write_table("bank")})
    summary = summary_of(run_local(settings(parties=1), contexts))
    assert summary["data"] == "the parties' own tables"


def test_states_of_models_long_gone_are_deleted(settings):
    run_local(settings(parties=1))
    (old,) = (home() / "sites" / "party-1").glob("*/state")
    week_ago = time.time() - 8 * 24 * 60 * 60
    os.utime(old, (week_ago, week_ago))
    run_local(settings(parties=1))
    assert not old.parent.exists()
    assert len(list((home() / "sites" / "party-1").glob("*/state"))) == 1


def test_a_prediction_names_its_class(settings, tmp_path):
    table = tmp_path / "text.csv"
    rows = [f"{x},{'good' if x > 20 else 'bad'}" for x in range(60)]
    table.write_text("\n".join(["x,y", *rows]) + "\n")
    folder = run_local(settings(data=str(table), label="y", parties=2))
    assert predict_table(folder.path, str(table), "", tmp_path / "out.csv").n_rows == 60
    header, first, *_ = (tmp_path / "out.csv").read_text().splitlines()
    assert header == '"row","probability_good"'
    assert float(first.split(",")[1]) < 0.5


def test_the_id_is_no_feature(settings, write_table):
    table = write_table()
    folder = run_local(settings(data=str(table), label="y", parties=1))
    with pytest.raises(DataError, match="id must not be a feature of the model, got a"):
        predict_table(folder.path, str(table), "a", folder.path / "out.csv")
    with pytest.raises(ConfigError, match=r"output must end in \.csv or \.parquet, got .*out\.txt"):
        predict_table(folder.path, str(table), "", folder.path / "out.txt")


def test_a_party_that_fails_is_named_before_any_training(settings, write_table, sites):
    contexts = sites(
        {"name": "bank", "data": write_table("bank")},
        {"name": "shop", "data": write_table("shop", y=["x"] * 40)},
    )
    run = settings(parties=2, objective="reg:squarederror")
    with pytest.raises(PartyError, match=r"^shop \(step 1\): label must be numbers"):
        run_local(run, contexts)


@pytest.mark.slow
def test_an_interrupted_simulation_leaves_no_process(tmp_path):
    """What the command has started ends with it, though it is in other sessions."""
    mark = {"FEDAPP_TEST_MARK": tmp_path.name}
    command = [sys.executable, "-m", "fedapp", "run", "fedavg-linear", "--engine", "simulation"]
    command += ["-c", "fedavg-linear.rounds=500", "-c", f"run-dir={tmp_path / 'run'}"]
    # A shell's script ignores SIGINT for what it starts in the background.
    command = ["bash", "-c", 'trap "" INT; exec "$@"', "bash", *command]
    process = subprocess.Popen(command, env={**os.environ, **mark}, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while not (tmp_path / "run" / "rounds.jsonl").exists() and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.2)
    assert len(marked(mark)) > 3
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    deadline = time.monotonic() + 20
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert marked(mark) == []


def marked(mark):
    """Processes that have the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().items() >= mark.items():
                found.append(process.pid)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found
