"""What a command leaves when it is interrupted, and how it goes on."""

import errno
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedapp.commands import _carry_out as carry_out
from fedapp.commands import cli
from fedapp.commands.common import command_began, if_interrupted
from fedapp.errors import PartyError
from fedapp.home import app_folder, home, open_private, write_atomically
from fedapp.run_folder import RunFolder
from fedapp.runs.local import LocalGrid, run_local, simulated_contexts
from tests.federated import model_bytes, summary_of
from tests.network import resumed, step_of


def fedapp(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


@pytest.fixture
def interrupt_at(monkeypatch):
    """``interrupt_at(step)``: Ctrl-C before the messages of a step go out; None: no more."""
    push = LocalGrid.push_messages

    def at(wanted):
        def push_or_stop(grid, messages):
            messages = list(messages)
            if step_of(messages[0]) == wanted:
                raise KeyboardInterrupt
            return push(grid, messages)

        monkeypatch.setattr(LocalGrid, "push_messages", push_or_stop)

    return at


def run_words(folder, *more):
    given = ["num-boost-round=4", "max-depth=2", "max-bin=16", "parties=2", f"run-dir={folder}"]
    options = [word for pair in given for word in ("-c", pair)]
    return ["run", "pax", "--engine", "local", *more, *options]


@pytest.mark.parametrize(
    ("step", "saved"), [(2, "nothing was saved yet"), (8, "saved up to round 1")]
)
def test_an_interrupted_run_prints_the_command_that_goes_on(tmp_path, interrupt_at, step, saved):
    folder = tmp_path / "it's mine"
    interrupt_at(step)
    stopped = fedapp(*run_words(folder, "--baselines"))
    assert stopped.exit_code == 130
    where = f" in {folder}" if step == 8 else ""
    assert f"interrupted: {saved}{where}; to resume:\n  fedapp run pax --engine" in stopped.output
    again = shlex.split(stopped.output.splitlines()[-1])[1:]
    assert again[:5] == ["run", "pax", "--engine", "local", "--baselines"]
    interrupt_at(None)
    resumed = fedapp(*again)
    assert resumed.exit_code == 0
    assert ("resumed after round 1" in resumed.output) == (step == 8)
    assert bool(re.search(r"round 1/4  ", resumed.output)) == (step == 2)
    assert all(f"round {number}/4  " in resumed.output for number in (2, 3, 4))
    began = command_began.set(time.time() - 1000)  # long before it trains
    assert fedapp(*run_words(tmp_path / "whole")).exit_code == 0
    command_began.reset(began)
    whole = RunFolder(tmp_path / "whole")
    seconds = summary_of(whole)["seconds"]
    assert (1000 < seconds["total"] < 5000, seconds["train"] < 1000) == (True, True)
    assert model_bytes(RunFolder(folder)) == model_bytes(whole)
    assert "pooled" in summary_of(RunFolder(folder))["baselines"]


@pytest.fixture
def hospitals(tmp_path, monkeypatch):
    """Words of a run at a SuperLink."""
    (tmp_path / "config.toml").write_text('[superlink.hospitals]\naddress = "localhost:9093"\n')
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    return ["run", "pax", "--engine", "hospitals"]


@pytest.mark.parametrize(
    ("told", "ends"),
    [((), "its state is shown by\n  flwr list hospitals\n"), (["it goes on"], "ted: it goes on\n")],
)
def test_a_run_that_goes_on_elsewhere_is_told_by_who_carries_it(hospitals, monkeypatch, told, ends):
    """What is said of a SuperLink's run: before it is known to have begun, and after."""

    def stop(*given):
        raise KeyboardInterrupt(*told)

    monkeypatch.setattr("fedapp.runs.flower.run_superlink", stop)
    shown = fedapp(*hospitals)
    assert shown.exit_code == 130
    assert shown.output.endswith(ends)


def test_a_run_whose_folder_lies_elsewhere_leaves_the_one_in_the_working_folder_alone(
    settings, tmp_path, monkeypatch, hospitals
):
    """The SuperLink's part of the run is left away: what the command reads afterwards is meant."""
    run_local(settings(strategy="bagging", run_dir=str(tmp_path / "old")))
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    monkeypatch.setattr("fedapp.runs.flower._train_at", lambda *given: None)
    monkeypatch.chdir(tmp_path / "old")
    ended = fedapp(*hospitals)
    assert ended.exit_code == 0
    assert ended.output.endswith("its folder is where the ServerApp runs.\n")
    assert {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before


def test_a_command_that_is_interrupted_while_it_is_imported_says_so():
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupting:
    def find_spec(self, name, *more):
        if name == "fedapp.settings":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Interrupting())
from fedapp.__main__ import main
main()
"""
    command = [sys.executable, "-c", code, "--version"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=app_folder())
    shown = "\ninterrupted: nothing has begun; run the same command again\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", shown)


def test_a_full_disk_names_the_file_and_the_way_on(tmp_path, monkeypatch, capsys):
    def write_new(path, *_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_page():
        with open_private(Path("/dev/full"), "w") as file:
            file.write("page")

    def write_model():
        write_atomically(tmp_path / "model.json", b"{}")

    def write_rows():
        with open_private(tmp_path / "rows.csv", "w") as file:
            file.write("1,2")
            file.flush()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def command(write):
        if_interrupted.set(lambda: "saved up to round 3")
        write()

    monkeypatch.setattr("fedapp.home.write_new", write_new)
    for write, path in (
        (write_page, "/dev/full"),
        (write_model, tmp_path / "model.json"),
        (write_rows, tmp_path / "rows.csv"),
    ):
        monkeypatch.setattr("fedapp.commands.cli", partial(command, write))
        with pytest.raises(SystemExit, match="1"):
            carry_out()
        line = f"error: '{path}' must be a path that can be used as asked, got: no space left on "
        assert capsys.readouterr().err == f"{line}device\nfree some space; saved up to round 3\n"
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []


def test_a_site_with_an_older_state_than_the_run_goes_on_from_is_refused_by_name(
    settings, interrupt_at, write_table
):
    data = write_table(n_rows=120)
    given = {"parties": 2, "label": "y", "allow_export": True, "secureboost__key_bits": 256}
    given |= {"secureboost__insecure_small_key": True, "data": str(data)}
    run = settings(strategy="secureboost", **given)
    contexts, copy = simulated_contexts(run), data.parent / "copy"
    for step in (8, 14):
        interrupt_at(step)
        with pytest.raises(KeyboardInterrupt):
            run_local(run, contexts)
        run = resumed(run)
        (state,) = (home() / "sites" / "party-2").glob("*/state")
        if not copy.exists():
            shutil.copytree(state.parent, copy)
    shutil.rmtree(state.parent)
    shutil.copytree(copy, state.parent)
    interrupt_at(None)
    rule = r"party-2 \(step \d+\): must resume from step \d+, its state is of step \d: restore"
    with pytest.raises(PartyError, match=rule):
        run_local(run, contexts)
