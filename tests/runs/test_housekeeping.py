"""Which runs there are, and what of them is deleted."""

import json
import os
import re
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.errors import ConfigError, DataError, PartyError, RunFailedError
from fedapp.home import home, secret_at
from fedapp.run_folder import Checkpoints, RunFolder, RunState, State
from fedapp.runs.clean import (
    folder_of_runs,
    forget_model,
    list_runs,
    plan,
    run_folders,
    site_states,
)
from fedapp.runs.local import run_local
from fedapp.site.clock import SECONDS_A_DAY
from fedapp.site.store import PART_FILE, STATE
from tests.forests import move_thresholds

RUNS = Path("runs")
pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def unfinished(settings):
    """``unfinished(name, error)``: a run that was begun, and what it wrote of its end."""

    def make(name, error="", model_id="", data="wine"):
        folder = RunFolder(RUNS / name)
        folder.begin(settings(data=data, run_dir=str(folder.path)))
        if error:
            folder.write_json("failure.json", {"error": error, "message": "as told"})
        if model_id:
            save(folder, RunState(model_id))
        return folder

    return make


def save(folder, state):
    """A checkpoint; any record may be the method's state."""
    Checkpoints(folder.path).save(state, state)


def state_of(site, model_id, days=0.0):
    """What a site keeps of a model, so many days old."""
    folder = home() / "sites" / site / model_id
    folder.mkdir(parents=True)
    (folder / STATE).write_text("{}")
    then = time.time() - days * SECONDS_A_DAY
    os.utime(folder / STATE, (then, then))
    return folder


def invoked(*words, typed=""):
    return CliRunner().invoke(cli, list(words), input=typed, env={"COLUMNS": "120"})


def states_of(runs):
    return {run.path.name: str(run.state) for run in runs}


def test_runs_are_listed_by_state(unfinished, settings):
    assert invoked("runs").output == "no runs in runs\n"
    run_local(settings(num_boost_round=1, run_dir=str(RUNS / "good")))
    unfinished("bad", "DataError")
    unfinished("stopped", "KeyboardInterrupt")
    unfinished("killed")
    unfinished("saved", "SystemExit", model_id="a" * 16)
    (RUNS / "20260101-000000-pax").mkdir()
    (RUNS / "notes").mkdir()
    states = {"good": "finished", "bad": "failed", "stopped": "interrupted", "saved": "resumable"}
    states |= dict.fromkeys(("killed", "20260101-000000-pax"), "interrupted")
    assert states_of(run_folders(RUNS)) == states
    shown = invoked("runs").output
    line = r"good +finished +pax +breast-cancer +auc 0\.\d{4} +\d+(\.\d)? kB +20\d\d-\d\d-\d\d "
    assert re.search(line, shown)
    assert re.search(r"saved +resumable +pax +wine", shown)
    assert f"to resume: fedapp run pax -c resume={RUNS / 'saved'}" in shown
    for number in range(16):
        unfinished(f"run-{number:02d}")
    unfinished("compare/pax-42")
    assert "2 more: fedapp runs --all" in (few := invoked("runs").output)
    assert "compare/pax-42" not in few
    assert "compare/pax-42" in (every := invoked("runs", "--all").output)
    line = r"(?m)^\S+ +(?:finished|failed|interrupted|resumable) "
    assert (len(re.findall(line, few)), len(re.findall(line, every))) == (20, 23)


POOLED = {"name": "pooled XGBoost", "scores": [0.99], "n_bytes": None}
CYCLIC = {"name": "cyclic", "scores": [0.97, 0.98], "n_bytes": 7.0}
# What is read of the summary of a comparison, and of a search.
COMPARED = {"data": "breast-cancer", "metric": "auc", "lines": [POOLED, CYCLIC]}
COMPARED |= {"methods": {"rows": ["pax", "cyclic"]}}
SEARCHED = {"data": "wine", "metric": "auc", "strategy": "pax", "test": {"auc": 0.96}}


def test_comparisons_and_searches_are_listed_as_wholes(unfinished):
    for name, file, summary in (
        ("compared", "comparison.json", COMPARED),
        ("searched", "tune.json", SEARCHED),
        ("begun", "compared.json", {"data": "rows"}),
    ):
        folder = unfinished(f"{name}/pax-42").path.parent
        (folder / "compared.json").write_text('{"data": "rows"}')
        (folder / file).write_text(json.dumps(summary))
    lines = []
    names = ("state", "method", "metric", "test_score", "data")
    found = list_runs(RUNS, tell=lines.append)
    assert {tuple(line[name] for name in names) for line in found} == {
        ("finished", "comparison of pax, cyclic", "cyclic auc", 0.975, "breast-cancer"),
        ("finished", "search, pax", "auc", 0.96, "wine"),
        ("interrupted", "unfinished comparison or search", "", None, "rows"),
    }
    assert not lines
    assert "-42" not in invoked("runs").output
    assert "begun/pax-42" in invoked("runs", "--all").output
    assert {run.path.name[-3:] for run in plan(RUNS).runs} == {"-42"}


def test_a_run_is_running_until_its_process_lets_go(unfinished):
    folder = unfinished("one", "DataError")
    with folder.held(), folder.held():
        assert folder.state is State.RUNNING
    assert folder.state is State.FAILED


def test_failed_runs_are_deleted_after_asking_and_others_stay(unfinished, settings):
    run_local(settings(num_boost_round=1, run_dir=str(RUNS / "good")))
    bad = unfinished("bad", "DataError")
    unfinished("compare/pax-42", "DataError")
    working = unfinished("working")
    with working.held():
        assert invoked("runs", "clean").exit_code == 1  # nobody answers
        refused = invoked("runs", "clean", typed="n\n")
        assert refused.exit_code == 1
        assert re.search(r"runs/bad  failed, pax, \d", refused.output)
        assert bad.path.exists()
        done = invoked("runs", "clean", typed="y\n")
    assert done.exit_code == 0
    assert states_of(run_folders(RUNS, deep=True)) == {"good": "finished", "working": "interrupted"}
    assert invoked("runs", "clean", "--yes").exit_code == 0
    assert states_of(run_folders(RUNS)) == {"good": "finished"}


def test_parts_of_models_stay_unless_all_are_asked_for(vertical, monkeypatch):
    run = vertical(num_boost_round=1, allow_export=False, run_dir=str(RUNS / "good"))
    run_local(run)
    for state in site_states():
        for path in state.path.iterdir():
            os.utime(path, (0, 0))
    shown = invoked("runs", "clean", "--yes").output
    assert re.search(r"kept: parts of models at sites \(2\), .*; --all deletes them too", shown)
    assert len(site_states()) == 2
    shown = invoked("runs", "clean", "--yes", "--all").output
    assert "WARNING: finished runs in runs that cannot predict without these parts: 1" in shown
    assert site_states() == []
    assert (RUNS / "good" / "model.json").exists()
    gone, busy = state_of("bank", "a" * 16), state_of("bank", "b" * 16)
    forget_model(gone.name)
    assert [state.path for state in site_states()] == [busy]
    # Another process deletes it meanwhile.
    monkeypatch.setattr("fedapp.runs.clean._state", lambda path: os.stat(path / "gone"))
    assert site_states() == []


def test_old_states_go_and_keys_of_sites_stay():
    old, young = state_of("bank", "a" * 16, days=11), state_of("bank", "b" * 16, days=9)
    key = home() / "sites" / "bank" / "box.key"
    secret_at(key, lambda: b"secret")
    os.utime(key, (0, 0))
    shown = invoked("runs", "clean", "--yes").output
    assert "site bank: states of old runs (1), 2 B" in shown
    assert (old.exists(), young.exists(), key.exists()) == (False, True, True)


def test_the_state_of_a_run_that_goes_goes_with_it_and_of_one_that_stays_stays(unfinished):
    unfinished("gone", "DataError", model_id="a" * 16)
    with unfinished("working", model_id="b" * 16).held():
        gone, needed = state_of("bank", "a" * 16), state_of("bank", "b" * 16, days=30)
        found = plan(RUNS)
    assert [state.path for state in found.states] == [gone]
    assert needed.exists()


def test_a_state_that_was_used_within_the_hour_may_be_another_runs(unfinished, monkeypatch):
    monkeypatch.setattr("fedapp.runs.clean.KEEP_DAYS", -3)
    state_of("bank", "a" * 16, days=0.5 / 24)
    old = state_of("bank", "b" * 16, days=2 / 24)
    folder = unfinished("working")
    began = time.time() - SECONDS_A_DAY
    os.utime(folder.path / "config.toml", (began, began))
    with folder.held():  # while it goes on no younger state goes
        assert plan(RUNS).states == ()
    assert [state.path for state in plan(RUNS).states] == [old]


def test_what_changed_after_the_plan_stays(unfinished):
    names = ("resumed", "finished", "saved", "gone")
    models = dict(zip(names, (digit * 16 for digit in "abcd"), strict=True))
    made = {name: unfinished(name, model_id=models[name]) for name in names}
    states = [state_of("bank", models[name]) for name in names]
    found, lines = plan(RUNS), list[str]()
    assert len(found.runs) == len(found.states) == len(names)
    summary = {"model_id": models["finished"], "objective": "binary:logistic", "metrics": {}}
    made["finished"].write_json("summary.json", summary)
    save(made["saved"], RunState(models["saved"], step=1))
    with made["resumed"].written():
        found.carry_out(lines.append)
    assert [name for name in names if made[name].path.exists()] == [*names[:3]]
    assert [path.exists() for path in states] == [True, True, True, False]
    busy = "run folder must be free, got one that another process writes: runs/resumed"
    assert f"skipped: runs/resumed: {busy}" in lines
    assert "skipped: runs/saved: run folder must be as it was listed, got a changed one" in lines


NO_SETTING = "config.toml must hold settings of fedapp, got learning_rate"
NO_TOML = "config.toml must be TOML: Invalid value (at line 1, column 12)"
OF_OTHERS = {  # settings in its file, or what else is there, and why a folder stays
    "settings of others": ("learning_rate = 0.1\n", NO_SETTING),
    "no TOML": ("strategy = \n", NO_TOML),
    "a link": (Path.symlink_to, "a symbolic link"),
    "another run": (None, "run folder must hold no folder to be deleted, got good"),
}


@pytest.mark.parametrize("case", OF_OTHERS)
def test_folders_of_others_are_named_and_stay(case, unfinished, settings, tmp_path):
    content, rule = OF_OTHERS[case]
    target = unfinished("../elsewhere/bad", "DataError").path.resolve()
    (RUNS / "other").parent.mkdir(exist_ok=True)
    if case == "a link":
        for name, path in {"other": target, "20260101-000000-pax": target.parent}.items():
            (RUNS / name).symlink_to(path)
    elif case == "another run":
        unfinished("other", "DataError")
        for parent in ("20260101-000000-pax", "other"):
            run_local(settings(num_boost_round=1, run_dir=str(RUNS / parent / "good")))
        shown = invoked("runs", "clean", "--yes").output
        line = "skipped: runs/20260101-000000-pax: run folder must have a config.toml, got good"
        assert line in shown
        assert len(list(RUNS.glob("*/good/summary.json"))) == 2
    else:
        (RUNS / "other").mkdir(parents=True)
        (RUNS / "other" / "config.toml").write_text(content)
    for words in (["runs", "clean", "--yes"], *([] if case == "another run" else [["runs"]])):
        done = invoked(*words)
        assert done.exit_code == 0
        assert f"skipped: runs/other: {rule}" in done.output
    assert (RUNS / "other").exists()
    assert target.exists()


def test_only_a_prediction_that_fails_keeps_its_run(vertical):
    run_local(vertical(num_boost_round=1, allow_export=False, run_dir=str(RUNS / "good")))
    words = ["predict", "runs/good", "--data", "breast-cancer", "--output", "scores.csv"]
    done = invoked(*words, "-calign=ordered")
    assert done.exit_code == 0, done.output
    assert Path("scores.csv").is_file()
    assert list((home() / "predictions").iterdir()) == []
    (path,) = (home() / "sites" / "party-2").glob(f"*/{PART_FILE}")
    move_thresholds(path.parent)
    done = invoked(*words)
    assert isinstance(done.exception, PartyError)
    (kept,) = (home() / "predictions").iterdir()
    assert f"the run that failed is kept in {kept.relative_to(Path.cwd())}" in done.stderr
    assert [path.name for path in RUNS.iterdir()] == ["good"]
    assert kept in {run.path for run in plan(RUNS).runs}


BEGUN = {  # how a block ends, the error in the run's failure.json, and what more stays
    "it is refused": (ConfigError("no"), "ConfigError", ()),
    "a party refuses": (PartyError("bank", 1, "no", refused=True), "PartyError", ()),
    "Flower's run is refused": (RunFailedError("no", []), "DataError", ()),
    "a party fails": (PartyError("bank", 1, "no"), "PartyError", ("one",)),
    "it is interrupted": (KeyboardInterrupt(), "", ("one",)),
    "a round has ended": (ConfigError("no"), "ConfigError", ("one",)),
    "a checkpoint is there": (ConfigError("no"), "ConfigError", ("one",)),
    "another process has it": (ConfigError("no"), "", ("one",)),
    "a trial has finished": (DataError("no"), "DataError", ("one",)),
    "nothing has begun": (KeyboardInterrupt(), None, ()),
}


@pytest.mark.parametrize("case", BEGUN)
def test_only_what_has_trained_or_failed_stays_of_a_new_folder(case, unfinished):
    error, noted, stays = BEGUN[case]
    new, run = RUNS / "new", RunFolder(RUNS / "new/one")
    others = ExitStack()

    def begin():
        if case == "another process has it":
            others.enter_context(run.held())
        if noted is not None:
            unfinished("new/one", noted, "a" * 16 if case == "a checkpoint is there" else "")
        if case == "a round has ended":
            run.add_round({"round": 1})
        raise error

    place = folder_of_runs(new, lambda: case == "a trial has finished")
    with others, pytest.raises(type(error)), place:
        begin()
    assert tuple(path.name for path in new.glob("*")) == stays
    assert new.parent.exists() == bool(stays)
