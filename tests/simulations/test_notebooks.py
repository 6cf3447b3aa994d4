"""The notebooks run as they are, from a clean clone: built-in data, no display, no network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedapp.settings import app_folder

FOLDER = Path("simulations/examples")
# Runs four trainings with their reports, which takes more than ten seconds.
LONG = {"horizontal_credit"}
CASES = [
    pytest.param(path.stem, marks=[pytest.mark.slow] if path.stem in LONG else [])
    for path in sorted((app_folder() / FOLDER).glob("[a-z]*.py"))
]
PICTURES = {
    "horizontal_credit": {"scores", "rounds", "model"},
    "vertical_bank_insurer": {"vertical", "predictions"},
}
NO_NETWORK = """
import socket, sys, runpy
def refuse(*words, **named): raise AssertionError("a notebook must not use the network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("name", CASES)
def test_a_notebook_runs_and_draws_its_pictures(name: str, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "FEDAPP_DATA"}
    environment |= {"NOTEBOOK_OUTPUT": str(tmp_path), "NOTEBOOK_ROUNDS": "2", "MPLBACKEND": "Agg"}
    environment |= {"FEDAPP_HOME": str(tmp_path / "home"), "PYTHONPATH": str(app_folder())}
    path = app_folder() / FOLDER / f"{name}.py"
    command = [sys.executable, "-c", NO_NETWORK, str(path)]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    pictures = {picture.stem: picture.stat().st_size for picture in tmp_path.glob("*.png")}
    assert set(pictures) == PICTURES[name]
    assert min(pictures.values()) > 5000


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_a_notebook_is_in_cells(name: str) -> None:
    text = (app_folder() / FOLDER / f"{name}.py").read_text()
    assert text.count("# %% [markdown]\n# #") >= 5  # each with a heading
    assert text.count("\n# %%\n") >= 5
