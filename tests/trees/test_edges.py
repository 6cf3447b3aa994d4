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

from fedapp.errors import ConfigError, DataError
from fedapp.home import home
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from fedapp.settings import load_settings
from tests.federated import summary_of
from tests.tables import write_rows

STOP = {"valid_fraction": 0.1, "early_stopping_rounds": 5, "eval_metric": "auc", "seed": 1}


@pytest.mark.parametrize(
    ("labels", "how", "rule"),
    [
        ([0] * 38 + [1, 1], STOP, "early-stopping-rounds must have a validation auc"),
        ([0, 1] * 20, {"weight": "w"}, "label must have both classes among the training rows"),
    ],
)
def test_labels_that_train_nothing_are_refused(settings, write_table, labels, how, rule):
    given = {"label": "y", "parties": 1, "test_fraction": 0.0, **how}
    with pytest.raises((ConfigError, DataError), match=rule):
        run_local(settings(data=str(write_table(y=labels, w=[0.0, 1.0] * 20)), **given))


def test_values_near_the_end_of_float32_train(settings, write_table):
    huge = np.linspace(-3e38, 3e38, 40)
    huge = [f"{value:.6g}" if place % 5 else "" for place, value in enumerate(huge)]
    run = settings(data=str(write_table(a=huge)), label="y", parties=2)
    assert summary_of(run_local(run))["trees"] == 2


def test_names_of_any_script_load_in_stock_xgboost(settings, tmp_path):
    rows = np.random.default_rng(0).normal(size=(60, 2)).round(3)
    names, labels = ["größe [cm]", "体重"], (rows.sum(axis=1) > 0).astype(int)
    columns = {**dict(zip(names, rows.T, strict=True)), "y": labels}
    table = write_rows(tmp_path / "names.csv", columns)
    folder = run_local(settings(data=str(table), label="y"))
    booster = xgboost.Booster(model_file=folder.path / "model.xgb.json")
    assert booster.feature_names == ["größe _cm_", "体重"]
    booster.predict(xgboost.DMatrix(rows, feature_names=booster.feature_names))


@pytest.mark.slow
def test_few_bins_are_told_of(settings):
    ways = {
        "finest": "the most of any party are kept; pax.bins=equal or a larger max-bin gives",
        "coarsest": "the fewest of any party are kept; pax.bins=equal, pax.fusion=finest or a "
        "larger max-bin gives",
    }
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


def test_states_of_models_long_gone_are_deleted(settings):
    run_local(settings(parties=1))
    (old,) = (home() / "sites" / "party-1").glob("*/state")
    week_ago = time.time() - 8 * 24 * 60 * 60
    os.utime(old, (week_ago, week_ago))
    run_local(settings(parties=1))
    assert not old.parent.exists()
    assert len(list((home() / "sites" / "party-1").glob("*/state"))) == 1


def test_the_id_of_a_prediction_is_no_feature(settings, write_table, tmp_path):
    data = str(write_table(a=range(40)))
    folder = run_local(settings(data=data, label="y", parties=2))
    with pytest.raises(DataError, match="id must not be a feature of the model, got a"):
        predict_table(folder.path, data, "a", tmp_path / "out.csv")


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
