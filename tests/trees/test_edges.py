"""Odd tables and odd wishes, which must work or be refused clearly; files nested too deeply."""

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
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.data.schema import read_schema
from fedapp.errors import ConfigError, DataError
from fedapp.home import home
from fedapp.records.document import MOST_BYTES
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.runs.predict import load_model, parts_of, predict_table, trained_settings
from fedapp.serve.scorer import open_scorer
from fedapp.settings import load_settings
from fedapp.site.settings import read_node_config
from fedapp.site.trust import PINNED, pins_in
from fedapp.superlinks import superlinks
from fedapp.trees.model import DIVIDED
from tests.federated import summary_of

pytestmark = pytest.mark.usefixtures("own_folder")
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


@pytest.mark.slow
def test_few_bins_are_told_of(settings):
    ways = {
        "finest": "the most of any party are kept; pax.bins=equal or a larger max-bin gives",
        "coarsest": "the fewest of any party are kept; pax.bins=equal, pax.fusion=finest or a "
        "larger max-bin gives",
    }
    made = partial(settings, max_bin=64, parties=4, valid_fraction=0.0)
    told = "only 16 bins a column are left of max-bin 64: the share rule divides them among the "
    for fusion, kept in ways.items():
        few = run_local(made(pax__fusion=fusion)).summary
        assert few["warnings"] == [f"{told}parties, and {kept} more"]
    assert run_local(made(pax__bins="equal")).summary["warnings"] == []


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
    long_ago = time.time() - 11 * 24 * 60 * 60
    os.utime(old, (long_ago, long_ago))
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


# Files that are nested too deeply, or too large, are refused by name


DEEP = 20_000
NESTED = {
    "lists": "a = " + "[" * DEEP + "]" * DEEP,
    "tables": "a = " + "{a=" * DEEP + "1" + "}" * DEEP,
    "dotted keys": "a" + ".a" * (DEEP // 10) + " = 1",
}
SHORT = {"num_boost_round": 1, "max_depth": 2, "max_bin": 16, "parties": 2}


READ = {
    "schema": ("rows.toml", read_schema, "schema '.*rows.toml' must be TOML: "),
    "node config": (
        "site.toml",
        read_node_config,
        'node config .*site.toml must be TOML, like name = "bank": ',
    ),
    "keys": (PINNED, lambda path: pins_in(path.parent), "trusted.toml must have a fingerprint "),
    "run": (
        "config.toml",
        lambda path: trained_settings(path.parent),
        "config.toml must be TOML: ",
    ),
    "SuperLinks": ("config.toml", lambda path: superlinks(), r".*config.toml must be TOML: "),
}


@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("kind", READ)
def test_toml_that_is_nested_too_deeply_is_refused(kind, nested, monkeypatch, tmp_path):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    name, read, rule = READ[kind]
    Path(name).write_text(NESTED[nested])
    with pytest.raises(ConfigError, match=rf"^{rule}.*nested at most 32 deep$"):
        read(Path(name).absolute())


@pytest.mark.parametrize("kind", [kind for kind in READ if kind != "run"])
def test_toml_that_is_no_utf8_is_refused(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    name, read, rule = READ[kind]
    Path(name).write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigError, match=rf"^{rule}.*'utf-8' codec can't decode byte 0xff"):
        read(Path(name).absolute())


@pytest.mark.slow
@pytest.mark.parametrize("nested", NESTED)
def test_settings_that_are_nested_too_deeply_are_refused(nested):
    name, _, value = NESTED[nested].partition("=")
    found = CliRunner().invoke(cli, ["run", "pax", "-c", f"{name.strip()}={value}"])
    assert isinstance(found.exception, ConfigError)
    assert str(found.exception).startswith("a")
    Path("runs/unfinished").mkdir(parents=True)
    Path("runs/unfinished/config.toml").write_text(NESTED[nested])
    with pytest.raises(ConfigError, match=r"^config.toml must be TOML: nested at most"):
        fedapp.run("pax", resume="runs/unfinished")
    listed = CliRunner().invoke(cli, ["runs"])
    assert "skipped: runs/unfinished: config.toml must be TOML: nested at most" in listed.output


def test_a_model_too_large_or_nested_too_deeply_is_not_read():
    run = fedapp.run("pax", **SHORT)
    (run.path / "model.xgb.json").write_text('{"learner":' + "[" * DEEP + "]" * DEEP + "}")
    with pytest.raises(DataError, match=r"^model must be JSON, got RecursionError"):
        run.to_xgboost()
    # Without blocks on the disk: nothing reads it.
    for name in ("model.json", "model.xgb.json"):
        os.truncate(run.path / name, MOST_BYTES + 1)
    loaded = fedapp.load(run.path)
    rule = r"^model must be a file of <= 1,073,741,824 bytes, got 1,073,741,825: .*model"
    for read in (
        lambda: loaded.predict("breast-cancer"),
        loaded.to_xgboost,
        lambda: open_scorer(run.path),
        lambda: fedapp.run("pax", init_model=run.path, **SHORT),
    ):
        with pytest.raises(DataError, match=rule):
            read()
    words = ["predict", str(run.path), "--data", "breast-cancer", "--output", "out.csv"]
    assert isinstance(CliRunner().invoke(cli, words).exception, DataError)


@pytest.mark.parametrize("kind", ["", DIVIDED, "forest", "linear"])
def test_a_model_that_is_nested_too_deeply_is_refused(kind):
    told = f',"kind":"{kind}"' if kind else ""
    nested = "[" * DEEP + "]" * DEEP
    Path("model.json").write_text(f'{{"format":1{told},"parts":{nested}}}')
    read = parts_of if kind == DIVIDED else load_model
    with pytest.raises(DataError, match=r"^model must be JSON.*, got RecursionError"):
        read(Path() if kind == DIVIDED else Path("model.json"))
