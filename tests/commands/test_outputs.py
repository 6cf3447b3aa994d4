"""Outputs of commands: no file is overwritten that the same command did not write before."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.errors import ConfigError
from fedapp.report.page import page

ROWS = "id,a,b,y\n" + "".join(f"r{k},{k * 7 % 50},{k * 3 % 11},{k % 2}\n" for k in range(60))
PREDICT = ("predict", "RUN", "--data", "table.csv", "--id", "id", "--output", "OUT")
FILES = {  # words of a command, by the endings of its outputs
    ".csv": PREDICT,
    ".parquet": PREDICT,
    ".onnx": ("export", "RUN", "--output", "OUT"),
    ".json": ("export", "RUN", "--to", "xgboost", "--output", "OUT"),
    ".html": ("report", "RUN", "--output", "OUT"),
}
TABLE = ("--data", "table.csv", "--id", "id", "--label", "y")
TRAIN = (*TABLE, "-c", "num-boost-round=1", "-c", "max-depth=2")
FOLDERS = {
    "run": ("run", "pax", *TRAIN, "--output", "OUT"),
    "describe": ("describe", *TABLE, "--output", "OUT"),
    "compare": ("compare", "pax", "bagging", *TRAIN, "--output", "OUT"),
    "tune": ("tune", "pax", *TRAIN, "--runs", "1", "--output", "OUT"),
    "documents": ("documents", "RUN", "--output", "OUT"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    (folder / "table.csv").write_text(ROWS)
    given = {"id": "id", "num_boost_round": 2, "max_depth": 2, "run_dir": str(folder / "run")}
    return fedapp.run("pax", data=str(folder / "table.csv"), label="y", parties=2, **given).path


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setattr("fedapp.report.page.run_page", lambda run: page("run", "", {}))
    (folder := tmp_path / "here").mkdir()
    monkeypatch.chdir(folder)
    Path("table.csv").write_text(ROWS)
    return folder


def invoked(run, words, output):
    """The error of a command; empty if it did what it should."""
    given = [{"RUN": str(run), "OUT": output}.get(word, word) for word in words]
    done = CliRunner().invoke(cli, given)
    return f"{type(done.exception).__name__}: {done.exception}" if done.exit_code else ""


def contents(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _of_another(output):
    output.write_text('id,income\n"learner",{"version": 1}\n<html>')


def _linked(output):
    _of_another(Path("other" + output.suffix))
    output.symlink_to("other" + output.suffix)


FAULTS = {
    "a new file, or a": _of_another,
    "a new file, or an? ": _linked,
    "a file, got ": Path.mkdir,
}


@pytest.mark.parametrize("suffix", FILES)
def test_only_a_new_file_or_one_of_its_own_kind_is_written(run, here, suffix):
    def refused(output, rule):
        before = contents(here)
        with pytest.raises(ConfigError, match=rule):
            raise ConfigError(invoked(run, FILES[suffix], output))
        assert contents(here) == before

    for number, (rule, make) in enumerate(FAULTS.items()):
        make(Path(f"out-{number}{suffix}"))
        refused(f"out-{number}{suffix}", f"output must be {rule}")
    where = f"no/where/out{suffix}: mkdir -p '{here}/no/where' makes it"
    refused(f"no/where/out{suffix}", f"^ConfigError: output must be in a folder .*, got {where}")
    if suffix != ".parquet":
        refused("out.doc", f"^ConfigError: output must end in {suffix}")


@pytest.mark.parametrize("suffix", FILES)
def test_what_the_same_command_wrote_is_replaced(run, here, suffix):
    output = Path("out" + suffix)
    output.touch()  # of mktemp
    assert invoked(run, FILES[suffix], str(output)) == ""
    first = output.read_bytes()
    again = invoked(run, FILES[suffix], str(output))
    assert ("a new file" in again) is (suffix == ".json")  # XGBoost's own look the same
    assert len(output.read_bytes()) == len(first) > 0
    assert {path.name for path in here.iterdir()} == {"table.csv", output.name}
    if suffix == ".csv":  # with which explanations come
        Path("out-explanation.csv").write_text(ROWS)
        before = contents(here)
        text = invoked(run, (*PREDICT, "--explain", "all"), "out.csv")
        assert "got out-explanation.csv, which is another" in text
        assert contents(here) == before


@pytest.mark.parametrize("link", [os.link, os.symlink, None])
def test_the_table_is_never_the_output(run, here, link):
    assert invoked(run, PREDICT, "scores.csv") == ""
    # With a table of predictions, only its being read keeps it.
    words = tuple("scores.csv" if word == "table.csv" else word for word in PREDICT)
    if link:
        link("scores.csv", "link.csv")
    before = contents(here)
    text = invoked(run, words, "link.csv" if link else "scores.csv")
    assert "output must be another file than scores.csv, which is read, got " in text
    assert contents(here) == before


def test_an_output_does_not_become_a_part_of_the_table(run, here):
    (here / "rows").mkdir()
    words = tuple("rows" if word == "table.csv" else word for word in PREDICT)
    text = invoked(run, words, "rows/scores.parquet")
    assert "output must be outside of the table's folder, got rows/scores.parquet" in text


@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder_of_other_files_is_no_output(run, here, command):
    for name in ("report.html", "notes.txt", "threat-model.md"):
        (here / "mine").mkdir(exist_ok=True)
        (here / "mine" / name).write_text("mine")
    before = contents(here)
    for output in ("mine", "table.csv"):
        text = invoked(run, FOLDERS[command], output)
        assert "must be a new" in text or "must be a folder, got the file" in text
    assert contents(here) == before


def test_what_is_interrupted_leaves_the_file_before(run, here, monkeypatch):
    assert invoked(run, PREDICT, "out.csv") == ""
    before = contents(here)

    def fails(file, schema):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.csv.CSVWriter", fails)
    assert "No space left" in invoked(run, PREDICT, "out.csv")
    assert contents(here) == before
