"""What a command sets itself is refused with its way, and never ignored."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.commands.common import RENAMED
from fedapp.errors import ConfigError
from fedapp.runs.set_by_command import SET_BY_COMMAND
from fedapp.settings import defaults

pytestmark = pytest.mark.usefixtures("own_folder")

VALUES = {"score-test": "false", "fold": "1", "folds": "3", "resume": "nowhere"}
# Arguments of each command with settings; None is the folder of a run with a divided model.
ARGUMENTS = {
    "run": ("run", "pax"),
    "compare": ("compare", "pax", "bagging"),
    "tune": ("tune", "pax"),
    "describe": ("describe",),
    "predict": ("predict", None, "--data", "breast-cancer", "--output", "scores.csv"),
    "federation activate": ("federation", "activate", None, "--engine", "north"),
}


def refused(*words):
    given = [word or "divided" for word in words]
    error = CliRunner().invoke(cli, given).exception
    assert isinstance(error, ConfigError), error
    return str(error)


def test_every_command_refuses_every_setting_that_it_sets_itself():
    small = {"parties": 2, "align": "ordered", "federated-forest": {"trees": 1, "max-depth": 1}}
    fedapp.run("federated-forest", data="breast-cancer", run_dir="divided", **small)
    assert SET_BY_COMMAND.keys() - {"fit"} == ARGUMENTS.keys()
    for command, arguments in ARGUMENTS.items():
        for name, way in SET_BY_COMMAND[command].items():
            assert name in defaults()
            value = VALUES.get(name, "x")
            rule = f"{name} must be omitted to {command.split()[-1]}: {way}, got "
            text = refused(*arguments, "-c", f"{name}={value}")
            assert text.startswith(rule), (command, text)
    assert not Path("runs").exists()
    assert not Path("scores.csv").exists()


def test_an_estimator_refuses_every_setting_that_it_sets_itself():
    for name in SET_BY_COMMAND["fit"]:
        estimator = fedapp.PAXClassifier(settings={name.replace("-", "_"): "1"})
        with pytest.raises(ValueError, match=r"^settings must have none that the"):
            estimator.fit([[0.0], [1.0]] * 20, [0, 1] * 20)


def test_the_folder_of_a_run_has_one_name():
    words = ("run", "pax", "--output", "one", "-c", "run-dir=two")
    error = CliRunner().invoke(cli, words).exception
    assert str(error) == "run-dir must be given once, got two and one"


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_word_names_the_new_one(old):
    result = CliRunner().invoke(cli, [*old.split()[1:], "x", "--y"])
    assert (result.exit_code, result.output) == (2, f"error: {old} is now {RENAMED[old]}\n")
