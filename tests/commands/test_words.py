"""Words of commands that are refused: ports, settings that a command sets itself, old names."""

import socket
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.commands.common import RENAMED, Group
from fedapp.errors import ConfigError
from fedapp.runs.set_by_command import SET_BY_COMMAND
from fedapp.settings import defaults

pytestmark = pytest.mark.usefixtures("own_folder")

SITE = ("site", "init", "new", "--name", "bank", "--data", "table.csv")
FEDERATION = ("federation", "init", "new", "--host", "localhost", "--sites", "a,b,c")
PORTS = [  # words before a port
    ("serve", "new", "--port"),
    ("serve", "--metrics", "--port"),
    ("serve", "--site", "new", "--port"),
    (*SITE, "--superlink", "localhost:1", "--port"),
    (*FEDERATION, "--port"),
    (*FEDERATION, "--public-port"),
    (*FEDERATION, "--users-port"),
    (*SITE, "--superlink"),
]


@pytest.mark.parametrize("words", PORTS, ids=lambda words: words[-1])
def test_a_port_beyond_its_range_is_refused(words):
    Path("table.csv").write_text("id,y\n1,0\n")
    for port in ("65536", "-1", *(["0"] if words != PORTS[0] else [])):  # 0 is a free one there
        value = f"localhost:{port}" if words[-1] == "--superlink" else port
        done = CliRunner().invoke(cli, [*words, value])
        text = " ".join(f"{done.output} {done.exception}".replace("│", "").split())
        rules = ("is not in the range", "--port must be 1 to 65535", "superlink must be HOST:PORT")
        assert any(rule in text for rule in rules), text
        assert not Path("new").exists()


@pytest.mark.parametrize("way", ["--metrics", "."])
def test_a_port_in_use_names_the_way_out(monkeypatch, way):
    monkeypatch.setattr("fedapp.serve.scorer.open_scorer", lambda folder: None)
    monkeypatch.setattr("fedapp.serve.app.make_app", lambda *words: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = CliRunner().invoke(cli, ["serve", way, "--port", str(port)])
    rule = f"port {port} must be free at 127.0.0.1, got: Address already in use; --port names"
    assert rule in str(done.exception)


VALUES = {"score-test": "false", "fold": "1", "folds": "3", "resume": "nowhere"}
# Arguments of each command with settings; "divided" is the folder of a run with a divided model.
ARGUMENTS = {
    "run": ("run", "pax"),
    "compare": ("compare", "pax", "bagging"),
    "tune": ("tune", "pax"),
    "describe": ("describe",),
    "predict": ("predict", "divided", "--data", "breast-cancer", "--output", "scores.csv"),
    "federation activate": ("federation", "activate", "divided", "--engine", "north"),
}


def test_every_command_refuses_every_setting_that_it_sets_itself():
    small = {"parties": 2, "align": "ordered", "federated-forest": {"trees": 1, "max-depth": 1}}
    fedapp.run("federated-forest", data="breast-cancer", run_dir="divided", **small)
    assert SET_BY_COMMAND.keys() - {"fit"} == ARGUMENTS.keys()
    for command, arguments in ARGUMENTS.items():
        for name, way in SET_BY_COMMAND[command].items():
            assert name in defaults()
            words = [*arguments, "-c", f"{name}={VALUES.get(name, 'x')}"]
            error = CliRunner().invoke(cli, words).exception
            assert isinstance(error, ConfigError), error
            rule = f"{name} must be omitted to {command.split()[-1]}: {way}, got "
            assert str(error).startswith(rule), (command, str(error))
    assert not Path("runs").exists()
    assert not Path("scores.csv").exists()
    words = ["run", "pax", "--output", "one", "-c", "run-dir=two"]
    error = CliRunner().invoke(cli, words).exception
    assert str(error) == "run-dir must be given once, got two and one"


def test_an_estimator_refuses_every_setting_that_it_sets_itself():
    for name in SET_BY_COMMAND["fit"]:
        estimator = fedapp.PAXClassifier(settings={name.replace("-", "_"): "1"})
        with pytest.raises(ValueError, match=r"^settings must have none that the"):
            estimator.fit([[0.0], [1.0]] * 20, [0, 1] * 20)


SETTING = "or a setting, got "
WORDS = {  # what is typed first, and what answers
    "run pax t.csv": "t.csv must follow --data, got no option: write fedapp run pax --data t.csv",
    "run pax --data=a.csv b.csv": "write fedapp run pax --data a.csv,b.csv",
    "run t.csv": "write fedapp run METHOD --data t.csv",
    "compare pax t.csv bagging": "write fedapp compare pax bagging --data t.csv",
    "run pax bagging": "must name one method, got pax, bagging",
    "run pax xgboost": "Got unexpected extra argument (xgboost)",
    "predict one t.csv": "t.csv must follow --data, got no option: write fedapp predict one "
    "--data t.csv",
    "predict t.csv": "write fedapp predict RUN --data t.csv",
    "predict t.csv one": "write fedapp predict one --data t.csv",
    "predict one --input t.csv": "got --input: write --data",
    "predict one -e x": "No such option '-e'",  # --engine, or --explain
    "export one m.onnx": "write fedapp export one --output m.onnx",
    "export one sklearn": "write fedapp export one --to sklearn",
    "runs retrain one ids.csv": "write fedapp runs retrain one --without ids.csv",
    "serve one 8000": "write fedapp serve one --port 8000",
    "site check site.toml": "write fedapp site check --site site.toml",
    "audit one one": "Got unexpected extra argument",
    "settings maxdepth": f"{SETTING}maxdepth; did you mean max-depth?",
    "settings zzz": f"{SETTING}zzz: fedapp settings lists them",
    "settings max_depth": " max-depth  6  ",
    "settings pax.bins": "Of pax",
}


@pytest.mark.parametrize("typed", WORDS)
def test_first_words_are_answered(typed):
    Path("t.csv").touch()
    Path("one").mkdir()
    done = CliRunner().invoke(cli, typed.split())
    assert WORDS[typed] in f"{done.output}{done.exception}"


def with_output(group, *path):
    """Words of every command that has the option ``--output``."""
    for name, command in group.commands.items():
        if isinstance(command, Group):
            yield from with_output(command, *path, name)
        elif any("--output" in parameter.opts for parameter in command.params):
            yield (*path, name)


@pytest.mark.parametrize("command", [*with_output(get_command(cli))], ids=" ".join)
def test_an_output_without_its_option_is_answered_with_it(command):
    words = ["x"] * (command[-1] != "compare")
    done = CliRunner().invoke(cli, [*command, *words, "-o", "y"])
    assert "got -o: write --output" in str(done.exception)


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_word_names_the_new_one(old):
    result = CliRunner().invoke(cli, [*old.split()[1:], "x", "--y"])
    assert (result.exit_code, result.output) == (2, f"error: {old} is now {RENAMED[old]}\n")
