"""Which runs there are, and what of them is deleted."""

import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.errors import PartyError
from fedapp.home import home, secret_at
from fedapp.run_folder import Checkpoints, RunFolder, RunState, State
from fedapp.runs.clean import forget_model, list_runs, plan, site_states
from fedapp.runs.local import run_local
from fedapp.site.store import PART_FILE, SECONDS_A_DAY, STATE
from tests.forests import move_thresholds

RUNS = Path("runs")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")


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


def state_of(site, model_id, days=0.0, is_part=False):
    """What a site keeps of a model, so many days old."""
    folder = home() / "sites" / site / model_id
    folder.mkdir(parents=True)
    for name in (STATE, *([PART_FILE] if is_part else [])):
        (folder / name).write_text("{}")
        then = time.time() - days * SECONDS_A_DAY
        os.utime(folder / name, (then, then))
    return folder


def invoked(*words, typed=""):
    return CliRunner().invoke(cli, list(words), input=typed)


def states_of(runs):
    return {run.path.name: str(run.state) for run in runs}


# fedapp runs


def test_runs_are_listed_by_state(unfinished, settings):
    run_local(settings(num_boost_round=1, run_dir=str(RUNS / "good")))
    unfinished("bad", "DataError")
    unfinished("stopped", "KeyboardInterrupt")
    unfinished("killed")
    unfinished("saved", "SystemExit", model_id="a" * 16)
    (RUNS / "20260101-000000-pax").mkdir()
    (RUNS / "notes").mkdir()
    assert states_of(list_runs(RUNS)) == {
        "good": "finished",
        "bad": "failed",
        "stopped": "interrupted",
        "killed": "interrupted",
        "saved": "resumable",
        "20260101-000000-pax": "interrupted",
    }


def test_a_run_that_is_going_on_is_running_until_its_process_lets_go(unfinished):
    folder = unfinished("one", "DataError")
    with folder.held(), folder.held():
        assert folder.state is State.RUNNING
    assert folder.state is State.FAILED


def test_a_run_is_running_while_its_parties_answer(settings):
    from fedapp.runs.local import LocalGrid, simulated_contexts

    run, seen = settings(num_boost_round=1, parties=1, run_dir=str(RUNS / "one")), set()

    class Watching(LocalGrid):
        def pull_messages(self, message_ids):
            seen.add(RunFolder(RUNS / "one").state)
            return super().pull_messages(message_ids)

    from strategies.run import train

    train(Watching(simulated_contexts(run)), run)
    assert seen == {State.RUNNING}


def test_the_server_app_leaves_the_page_to_a_command_that_waits_for_the_run(settings):
    from fedapp.runs.local import LocalGrid, simulated_contexts
    from fedapp.server_app import app

    pages = {}
    for name in ("waited for", "alone"):
        contexts = simulated_contexts(
            settings(num_boost_round=1, parties=1, run_dir=str(RUNS / name))
        )
        folder = RunFolder(RUNS / name)
        with folder.held() if name == "waited for" else nullcontext():
            app(LocalGrid(contexts), contexts[0])
        pages[name] = (folder.path / "report.html").exists()
    assert pages == {"waited for": False, "alone": True}


def test_the_command_shows_method_data_score_and_size(settings, unfinished):
    run_local(settings(num_boost_round=1, run_dir=str(RUNS / "good")))
    unfinished("saved", model_id="a" * 16)
    shown = invoked("runs").output
    line = (
        r"good +finished +pax +breast-cancer +auc 0\.\d{4} +\d+(\.\d)? kB +20\d\d-\d\d-\d\d \d\d:"
    )
    assert re.search(line, shown)
    assert re.search(r"saved +resumable +pax +wine", shown)
    assert f"to resume: fedapp run pax -c resume={RUNS / 'saved'}" in shown


@pytest.mark.slow
def test_the_last_20_runs_are_shown_and_all_on_request(unfinished):
    for number in range(22):
        unfinished(f"run-{number:02d}")
    unfinished("compare/pax-42")
    assert "2 more: fedapp runs --all" in (few := invoked("runs").output)
    assert few.count("interrupted") == 20
    assert "compare/pax-42" not in few
    assert "compare/pax-42" in (every := invoked("runs", "--all").output)
    assert every.count("interrupted") == 23


@pytest.mark.slow
def test_comparisons_and_searches_are_listed_as_wholes():
    given = {"num_boost_round": 1, "max_depth": 2, "parties": 2}
    compared = fedapp.compare(["pax", "cyclic"], **given)
    tuned = fedapp.tune("pax", runs=1, **given)
    (RUNS / "begun").mkdir()
    (RUNS / "begun" / "compared.json").write_text('{"data": "wine"}')
    best = next(each for each in compared.summary["table"] if each["is_best"])
    due = {
        ("finished", "comparison of pax, cyclic", f"{best['strategy']} auc {best['auc']:.4f}"),
        ("finished", "search, pax", f"auc {tuned.summary['test']['auc']:.4f}"),
        ("interrupted", "unfinished comparison or search", ""),
    }
    told = []
    found = list_runs(RUNS, tell=told.append, with_groups=True)
    assert {(run.state, run.method, run.score) for run in found} == due
    assert not told
    assert sorted(run.data for run in found) == ["breast-cancer"] * 2 + ["wine"]
    shown = invoked("runs").output
    for word in ("comparison of", "search, pax", "unfinished"):
        assert word in shown
    assert "skipped" not in shown
    assert "cyclic-42" not in shown
    assert "cyclic-42" in invoked("runs", "--all").output
    assert not plan(RUNS).runs


def test_where_there_are_no_runs_that_is_said():
    assert invoked("runs").output == "no runs in runs\n"


# fedapp runs clean


@pytest.mark.slow
def test_failed_runs_are_deleted_after_asking_and_others_stay(unfinished, settings):
    run_local(settings(num_boost_round=1, run_dir=str(RUNS / "good")))
    bad = unfinished("bad", "DataError")
    unfinished("compare/pax-42", "DataError")
    working = unfinished("working")
    with working.held():
        refused = invoked("runs", "clean", typed="n\n")
        assert refused.exit_code == 1
        assert re.search(r"runs/bad  failed, pax, \d", refused.output)
        assert bad.path.exists()
        done = invoked("runs", "clean", typed="y\n")
    assert done.exit_code == 0
    assert states_of(list_runs(RUNS, deep=True)) == {"good": "finished", "working": "interrupted"}


def test_nobody_to_ask_deletes_nothing(unfinished):
    bad = unfinished("bad", "DataError")
    assert invoked("runs", "clean").exit_code == 1
    assert bad.path.exists()
    assert invoked("runs", "clean", "--yes").exit_code == 0
    assert not bad.path.exists()


def test_young_runs_stay_where_an_age_is_given(unfinished):
    old, young = unfinished("old", "DataError"), unfinished("young", "DataError")
    for path in old.path.iterdir():
        os.utime(path, (0, 0))
    assert invoked("runs", "clean", "--yes", "--older-than", "1").exit_code == 0
    assert not old.path.exists()
    assert young.path.exists()


def test_old_states_go_and_keys_of_sites_stay():
    old, young = state_of("bank", "a" * 16, days=8), state_of("bank", "b" * 16, days=6)
    key = home() / "sites" / "bank" / "box.key"
    secret_at(key, lambda: b"secret")
    os.utime(key, (0, 0))
    shown = invoked("runs", "clean", "--yes").output
    assert "site bank: states of old runs (1), 2 B" in shown
    assert (old.exists(), young.exists(), key.exists()) == (False, True, True)
    assert invoked("runs", "clean", "--yes", "--older-than", "5").exit_code == 0
    assert not young.exists()


def test_the_state_of_a_run_that_goes_goes_with_it_and_of_one_that_stays_stays(unfinished):
    unfinished("gone", "DataError", model_id="a" * 16)
    with unfinished("working", model_id="b" * 16).held():
        gone, needed = state_of("bank", "a" * 16), state_of("bank", "b" * 16, days=30)
        found = plan(RUNS)
    assert [state.path for state in found.states] == [gone]
    assert needed.exists()


def test_a_state_that_was_used_within_the_hour_may_be_another_runs():
    state_of("bank", "a" * 16, days=0.5 / 24)
    old = state_of("bank", "b" * 16, days=2 / 24)
    assert [state.path for state in plan(RUNS, days=0.0).states] == [old]


def test_while_a_run_goes_on_no_younger_state_goes(unfinished):
    state_of("bank", "a" * 16, days=2 / 24)
    folder = unfinished("working")
    began = time.time() - SECONDS_A_DAY
    os.utime(folder.path / "config.toml", (began, began))
    with folder.held():
        assert plan(RUNS, days=0.0).states == ()
    assert len(plan(RUNS, days=0.0).states) == 1


@pytest.mark.slow
def test_parts_of_models_stay_unless_all_are_asked_for(vertical):
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


@pytest.mark.slow
def test_a_model_is_forgotten_while_other_processes_come_and_go():
    gone, sites = state_of("bank", "a" * 16), home() / "sites"
    busy = sites / "bank" / ("b" * 16)
    code = (
        "import pathlib, shutil, sys\n"
        "while (path := pathlib.Path(sys.argv[1])):\n"
        "    path.mkdir()\n"
        "    [(path / f'margins-{step}.raw').touch() for step in range(30)]\n"
        "    print(flush=True)\n"
        "    shutil.rmtree(path)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, busy], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        try:
            for _ in range(300):
                other.stdout.readline()
                gone.mkdir(exist_ok=True)
                forget_model(gone.name)
                assert {state.path.name for state in site_states()} <= {busy.name}
                assert not gone.exists()
        finally:
            other.kill()


def test_what_changed_after_the_plan_stays(unfinished):
    names = ("resumed", "finished", "saved", "gone")
    models = dict(zip(names, (digit * 16 for digit in "abcd"), strict=True))
    made = {name: unfinished(name, model_id=models[name]) for name in names}
    states = [state_of("bank", models[name]) for name in names]
    found, told = plan(RUNS), list[str]()
    assert len(found.runs) == len(found.states) == len(names)
    summary = {"model_id": models["finished"], "objective": "binary:logistic", "metrics": {}}
    made["finished"].write_json("summary.json", summary)
    save(made["saved"], RunState(models["saved"], step=1))
    with made["resumed"].written():
        found.carry_out(told.append)
    assert [name for name in names if made[name].path.exists()] == [*names[:3]]
    assert [path.exists() for path in states] == [True, True, True, False]
    busy = "run folder must be free, got one that another process writes: runs/resumed"
    assert f"skipped: runs/resumed: {busy}" in told
    assert "skipped: runs/saved: run folder must be as it was listed, got a changed one" in told


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ("learning_rate = 0.1\n", "config.toml must hold settings of fedapp, got learning_rate"),
        ("seed = 1\n", "config.toml must name a strategy, got none"),
        ("strategy = \n", "config.toml must be TOML, got: Invalid value (at line 1, column 12)"),
    ],
)
def test_folders_of_others_are_named_and_stay(config, rule):
    other = RUNS / "notes"
    other.mkdir(parents=True)
    (other / "config.toml").write_text(config)
    for words in (["runs"], ["runs", "clean", "--yes"]):
        done = invoked(*words)
        assert done.exit_code == 0
        assert f"skipped: runs/notes: {rule}" in done.output
    assert other.exists()


@pytest.mark.slow
def test_a_folder_that_holds_another_stays(unfinished, settings):
    unfinished("bad", "DataError")
    for parent in ("20260101-000000-pax", "bad"):
        run_local(settings(num_boost_round=1, run_dir=str(RUNS / parent / "good")))
    shown = invoked("runs", "clean", "--yes").output
    rule = "run folder must have a config.toml, got good"
    assert f"skipped: runs/20260101-000000-pax: {rule}" in shown
    assert "skipped: runs/bad: run folder must hold no folder to be deleted, got good" in shown
    assert len(list(RUNS.glob("*/good/summary.json"))) == 2


def test_links_are_named_and_not_followed(unfinished, tmp_path):
    target = unfinished("../elsewhere/bad", "DataError")
    RUNS.mkdir(exist_ok=True)
    for name in ("link", "20260101-000000-pax"):
        (RUNS / name).symlink_to(target.path.resolve())
    (RUNS / "above").symlink_to(tmp_path / "elsewhere")
    shown = invoked("runs", "clean", "--yes").output
    assert "skipped: runs/link: a symbolic link" in shown
    assert "skipped: runs/above: a symbolic link" in shown
    assert target.path.exists()
    assert "skipped: runs/link: a symbolic link" in invoked("runs").output


def test_a_folder_that_cannot_be_read_is_named(unfinished, tmp_path):
    closed = unfinished("closed", "DataError")
    unfinished("bad", "DataError")
    for each in (tmp_path, RUNS, *RUNS.rglob("bad"), *RUNS.rglob("bad/*")):
        each.chmod(0o755)
    closed.path.chmod(0)
    user, told = os.geteuid(), list[str]()
    try:
        if not user:  # whom no mode stops
            os.seteuid(65534)
        found = list_runs(Path("runs"), tell=told.append)
    finally:
        os.seteuid(user)
        closed.path.chmod(0o755)
    assert states_of(found) == {"bad": "failed"}
    assert len(told) == 1
    assert re.match(r"skipped: .*closed: \[Errno 13\] Permission denied", told[0])


# fedapp predict


@pytest.mark.slow
def test_a_prediction_together_leaves_no_run_behind(vertical):
    run_local(vertical(num_boost_round=1, allow_export=False, run_dir=str(RUNS / "good")))
    given = ["predict", "runs/good", "--data", "breast-cancer", "-calign=ordered"]
    done = invoked(*given, "--output", "scores.csv")
    assert done.exit_code == 0, done.output
    assert Path("scores.csv").is_file()
    assert [path.name for path in RUNS.iterdir()] == ["good"]
    assert list((home() / "predictions").iterdir()) == []


@pytest.mark.slow
def test_a_prediction_that_fails_keeps_its_run_and_names_it(vertical):
    run_local(vertical(num_boost_round=1, allow_export=False, run_dir=str(RUNS / "good")))
    (path,) = (home() / "sites" / "party-2").glob(f"*/{PART_FILE}")
    move_thresholds(path.parent)
    done = invoked("predict", "runs/good", "--data", "breast-cancer", "--output", "scores.csv")
    assert isinstance(done.exception, PartyError)
    (kept,) = (home() / "predictions").iterdir()
    assert f"the run that failed is kept in {kept.relative_to(Path.cwd())}" in done.stderr
    assert [path.name for path in RUNS.iterdir()] == ["good"]
    assert kept in {run.path for run in plan(RUNS).runs}
