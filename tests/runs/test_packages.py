"""What is installed: versions, and the methods that need more than the rest."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.errors import ConfigError, PartyError
from fedapp.home import app_folder
from fedapp.messages.methods import all_methods
from fedapp.runs.local import run_local

INSTALL = r"torch must be installed for fedxgbllr \(pip install 'fedapp\[fedxgbllr\]'\), got none$"
WITHOUT_TORCH = """
import importlib, pkgutil, sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name == "torch" else find(name, *more)
refused = []
for package in ("fedapp", "strategies", "clients", "simulations"):
    package = importlib.import_module(package)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        try:
            if not module.name.endswith(".__main__"):
                importlib.import_module(module.name)
        except ModuleNotFoundError:
            refused.append(module.name)
print(refused)
from fedapp.commands import main
main()
"""


@pytest.mark.slow
def test_without_torch_all_else_is_imported_and_runs(tmp_path):
    """Only fedapp.trees.head, which trains a network, begins by importing it."""
    words = ["run", "pax", f"-crun-dir={tmp_path / 'run'}", "-cnum-boost-round=1"]
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_TORCH, *words, "--engine", "local"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == "['fedapp.trees.head']"
    assert (tmp_path / "run" / "summary.json").is_file()


def test_commands_and_a_site_say_what_to_install_before_anything_runs(
    own_folder, settings, monkeypatch
):
    monkeypatch.setitem(sys.modules, "torch", None)
    for words in (["run", "fedxgbllr"], ["compare", "pax", "fedxgbllr"]):
        with pytest.raises(ConfigError, match=f"^{INSTALL}"):
            raise CliRunner().invoke(cli, words).exception
        assert not Path("runs").exists()
    with pytest.raises(PartyError, match=rf"^party-1 \(step 0\): {INSTALL}"):
        run_local(settings(strategy="fedxgbllr", parties=1))


def test_every_requirement_is_pinned_and_those_of_a_method_are_an_extra():
    folder = app_folder()
    with (folder / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    packages = {name: method.package for name, method in all_methods().items() if method.package}
    assert packages
    for method, package in packages.items():
        assert [one.partition(">")[0] for one in extras[method]] == [package]
        assert not any(one.startswith(package) for one in project["dependencies"])
    wanted = [*project["dependencies"], *(one for extra in extras.values() for one in extra)]
    names = {one.partition(">")[0].partition("[")[0].replace("-", "_").lower() for one in wanted}
    pins = (folder / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].replace("-", "_").lower() for line in pins if "==" in line}
    assert names <= pinned
